//! The report of [`Error::OutOfMemory`](crate::Error::OutOfMemory).

use super::{
    Site,
    site::{CallSite, Holder},
    units::{Bytes, count},
};
use std::fmt;

pub(crate) const HOW_TO_RECORD: &str = "`Builder::record_memory(true)` or GPU_POOL_RECORD_MEMORY=1";

/// The state of a device's memory pool when it refused a request, in [`Error::OutOfMemory`](crate::Error::OutOfMemory).
/// `Display` writes it for people: one fact per line, and a hint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutOfMemoryReport {
    /// The device's ordinal in the pool.
    pub device: usize,
    /// The operation that requested memory; empty if the driver failed at a call that does not go through the pool.
    pub op: &'static str,
    /// Its call site, if recording is on.
    pub site: Option<CallSite>,
    /// Requested bytes.
    pub requested: u64,
    /// The limit set for the pool.
    pub limit: Option<u64>,
    /// Bytes in live buffers, rounded up to their classes.
    pub in_use: u64,
    /// Bytes taken from the driver.
    pub reserved: u64,
    /// Bytes in the pool that no buffer uses, including pending ones.
    pub free_in_pool: u64,
    /// The largest free piece.
    pub largest_free: u64,
    /// Freed memory that queued work still uses.
    pub pending: Vec<PendingOnStream>,
    /// Free bytes of the device, by the driver.
    pub driver_free: u64,
    /// Size of the device's memory; 0 if the driver does not report it.
    pub driver_total: u64,
    /// Whether recording was on.
    pub recorded: bool,
    /// The ten call sites that hold the most bytes. Empty without recording.
    pub holders: Vec<Holder>,
    /// The jobs in flight on the device, if a job has run out of memory.
    pub jobs: Vec<BookedJob>,
    /// The attempts of the pool before it refused, in order.
    pub rungs: Vec<&'static str>,
}

/// A job of [`Jobs`](crate::jobs::Jobs) in flight, with its booking.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BookedJob {
    /// Its name; `job` without one.
    pub name: String,
    /// Bytes that it has booked on the device; 0 without a number.
    pub bytes: u64,
    /// The place in the program that has submitted it.
    pub site: Site,
}

/// Freed memory that the work queued on one stream still uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PendingOnStream {
    /// The stream's device.
    pub device: usize,
    /// The stream.
    pub stream: u64,
    /// The number of bytes.
    pub bytes: u64,
}

impl OutOfMemoryReport {
    /// Used bytes of the device that are not this pool's: contexts, libraries, other pools and processes.
    fn foreign(&self) -> u64 {
        self.driver_total.saturating_sub(self.driver_free).saturating_sub(self.reserved)
    }

    fn hint(&self) -> String {
        let Self { requested, free_in_pool, largest_free, .. } = *self;
        let pending = self.pending.iter().map(|pending| pending.bytes).fold(0, u64::saturating_add);
        let most = match self.limit {
            Some(limit) => limit,
            None if self.driver_total > 0 => self.driver_total,
            None => u64::MAX,
        };
        if requested > most {
            let whose = if self.limit.is_some() { "the limit allows" } else { "the device has" };
            return format!("this request alone is more than {whose} in all; ask for less at a time");
        }
        if free_in_pool.saturating_sub(pending) >= requested && largest_free < requested {
            return format!(
                "fragmentation: {} are free, but no piece is larger than {}; allocate what lives long first, and large \
                 buffers before small ones, or keep a buffer for the largest need and use slices of it",
                Bytes(free_in_pool),
                Bytes(largest_free)
            );
        }
        if pending > 0 && free_in_pool.max(pending) >= requested {
            return format!(
                "{} were freed, but queued work still uses them and did not end in time; wait for those streams before \
                 asking for {}, or queue less ahead",
                Bytes(pending),
                Bytes(requested)
            );
        }
        if self.limit.is_none() && self.foreign() > self.reserved {
            return format!(
                "{} of the device are held by others than this pool (other processes, libraries, contexts): see \
                 nvidia-smi",
                Bytes(self.foreign())
            );
        }
        match self.holders.first() {
            _ if !self.recorded => format!("to see who holds the memory, record call sites: {HOW_TO_RECORD}"),
            Some(Holder { site: Some(site), bytes, blocks }) => {
                format!("most is held by {site}: {} in {}", Bytes(*bytes), count(*blocks, "buffer"))
            }
            Some(_) => "most is held by buffers from before recording began".to_owned(),
            None => "no live buffer holds any of it".to_owned(),
        }
    }
}

impl fmt::Display for OutOfMemoryReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.requested > 0 {
            write!(f, "asked for      {:>10} by {}", Bytes(self.requested), self.op)?;
            if let Some(CallSite { file, line, column, .. }) = &self.site {
                write!(f, " at {file}:{line}:{column}")?;
            }
            writeln!(f, "\nin use         {:>10} in live buffers", Bytes(self.in_use))?;
            let largest = Bytes(self.largest_free);
            writeln!(f, "free in pool   {:>10}, the largest piece {largest}", Bytes(self.free_in_pool))?;
            for PendingOnStream { device, stream, bytes } in &self.pending {
                let bytes = Bytes(*bytes);
                writeln!(f, "of it pending  {bytes:>10} until stream {stream} of device {device} is done")?;
            }
            writeln!(f, "reserved       {:>10} from the driver", Bytes(self.reserved))?;
        }
        if let Some(limit) = self.limit {
            writeln!(f, "limit          {:>10} for this pool", Bytes(limit))?;
        }
        if self.driver_total > 0 {
            let total = Bytes(self.driver_total);
            writeln!(f, "driver's free  {:>10} of the device's {total}", Bytes(self.driver_free))?;
        }
        if !self.rungs.is_empty() {
            writeln!(f, "tried in vain  {}", self.rungs.join(", "))?;
        }
        if !self.holders.is_empty() {
            writeln!(f, "held by")?;
        }
        for holder in &self.holders {
            writeln!(f, "  {holder}")?;
        }
        for BookedJob { name, bytes, site } in &self.jobs {
            match bytes {
                0 => writeln!(f, "in flight: {name} of {site}, which has booked nothing")?,
                _ => writeln!(f, "booked {:>18} by {name} of {site}", Bytes(*bytes))?,
            }
        }
        write!(f, "hint: {}", self.hint())
    }
}

/// Writes a report below an error's first line, with each line indented.
pub(crate) struct Indented<T>(pub(crate) T);

display_as!(Indented<T> [T: fmt::Display], |self, f| {
    self.0.to_string().lines().try_for_each(|line| write!(f, "\n  {line}"))
});

#[cfg(test)]
#[path = "../../tests/unit/error/out_of_memory_tests.rs"]
mod tests;
