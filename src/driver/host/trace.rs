//! The trace of a machine that runs one operation at a time: the list of its steps.

use super::event::duration;
use crate::error::op_site::OpSite;
use std::{fmt, sync::Arc};

/// Most steps of a trace; of a longer run it keeps the beginning.
const MOST: usize = 1 << 20;

/// The kind of a step's operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum What {
    /// A kernel ran to its end.
    Kernel(&'static str),
    /// A [resumable](super::again) kernel was tried and has not finished.
    Attempt(&'static str),
    /// A copy from host memory; the number of bytes.
    CopyUp(usize),
    /// A copy to host memory; the number of bytes.
    CopyDown(usize),
    /// A copy within a device; the number of bytes.
    CopyWithin(usize),
    /// A copy between devices; the number of bytes.
    CopyPeer(usize),
    /// A fill; the number of bytes.
    Fill(usize),
    /// A matrix product.
    Gemm,
    /// A host function.
    HostFunction,
    /// The stream continued after a wait for operations of another stream.
    WaitEvent {
        /// The device of the other stream.
        device: usize,
        /// The number of the other stream on its device.
        stream: usize,
        /// The number of operations that the other stream had to complete.
        operations: u64,
    },
    /// A timing event stored the time.
    Stamp,
    /// A word was written.
    WriteValue(u64),
    /// The stream continued after a wait for a word.
    WaitValue(u64),
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            What::Kernel(name) => write!(f, "kernel `{name}`"),
            What::Attempt(name) => write!(f, "kernel `{name}`, not finished yet"),
            What::CopyUp(bytes) => write!(f, "copy up, {bytes} bytes"),
            What::CopyDown(bytes) => write!(f, "copy down, {bytes} bytes"),
            What::CopyWithin(bytes) => write!(f, "copy within, {bytes} bytes"),
            What::CopyPeer(bytes) => write!(f, "peer copy, {bytes} bytes"),
            What::Fill(bytes) => write!(f, "fill, {bytes} bytes"),
            What::Gemm => f.write_str("matrix product"),
            What::HostFunction => f.write_str("host function"),
            What::WaitEvent { device, stream, operations } => {
                write!(f, "has waited for operation {operations} of stream {stream} of device {device}")
            }
            What::Stamp => f.write_str("time stamp"),
            What::WriteValue(value) => write!(f, "writes the word {value}"),
            What::WaitValue(value) => write!(f, "has waited for the word {value}"),
        }
    }
}

/// One step: the chosen operation, and the number of candidates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The device, by its ordinal in the machine.
    pub device: usize,
    /// The stream's number on its device, in order of creation.
    pub stream: usize,
    /// The operation.
    pub what: What,
    /// The chosen index. 0 is the stream of the previous step, if that stream was a candidate.
    pub choice: u32,
    /// Number of streams that could run.
    pub candidates: u32,
    /// Start and end in virtual time, in picoseconds; zeros if time is real.
    pub time: (u64, u64),
    /// When it was submitted, in virtual time.
    pub submitted: u64,
    /// The call that has submitted it.
    pub place: Option<OpSite>,
}

impl Step {
    fn is_of(&self, other: &Step) -> bool {
        (self.device, self.stream) == (other.device, other.stream)
    }
}

/// The steps of a machine in order, from [`trace`](super::trace()). `Display` writes one line for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    steps: Vec<Step>,
    left_out: usize,
}

impl Trace {
    pub(super) fn push(&mut self, step: Step) {
        if self.steps.len() < MOST { self.steps.push(step) } else { self.left_out += 1 }
    }

    pub(super) fn attempted(&mut self) {
        if self.left_out == 0
            && let Some(Step { what, .. }) = self.steps.last_mut()
            && let What::Kernel(name) = *what
        {
            *what = What::Attempt(name);
        }
    }

    /// The steps, the first million of them.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The choices, for [`ExecutionOrder::Replay`](super::ExecutionOrder::Replay).
    pub fn choices(&self) -> Arc<[u32]> {
        self.steps.iter().map(|step| step.choice).collect()
    }

    /// Number of choices other than 0: the stream of the previous step could run, but another stream was chosen.
    pub fn switches(&self) -> usize {
        self.steps.iter().filter(|step| step.choice != 0).count()
    }

    /// `*` marks choices other than 0.
    pub(crate) fn write(&self, range: std::ops::Range<usize>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.steps.iter().enumerate().take(range.end).skip(range.start) {
            let Step { device, stream, what, choice, candidates, time, .. } = step;
            let mark = if *choice != 0 { '*' } else { ' ' };
            let again = i > 0 && step.is_of(&self.steps[i - 1]);
            let who = if again { " ".repeat(17) } else { format!("device {device} stream {stream}") };
            write!(f, "{i:>6} {mark} {who:<17}  {what}")?;
            if *candidates > 1 {
                write!(f, "  [{choice} of {candidates}]")?;
            }
            if time.1 > 0 {
                write!(f, "  {:?} .. {:?}", duration(time.0), duration(time.1))?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

display_as!(Trace, |self, f| {
    self.write(0..self.steps.len(), f)?;
    if self.left_out > 0 { writeln!(f, "       and {} more", self.left_out) } else { Ok(()) }
});
