//! Performing one operation, on a worker thread and without the scheduler's lock.

use super::{
    memory::Block,
    op::{Engine, Op, Work},
    slab::Key,
    watch::{self, Launched, Watched},
};
use crate::{
    contain::contain,
    driver::{HostArg, KernelArg, check::Report},
    sync::{load_word, store_word},
};
use std::{
    any::Any,
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::{self, NonNull},
    sync::Arc,
};

/// An operation that has been started: what it does, and the memory that is its own until it is finished.
/// A worker reuses one for all its operations.
#[derive(Default)]
pub(super) struct Job {
    pub stream: Key,
    /// The stream's place among those of its device.
    pub number: usize,
    pub device: usize,
    pub engine: Option<Engine>,
    pub op: Option<Op>,
    pub spans: Vec<Span>,
    args: Vec<HostArg>,
}

/// How an operation ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Done,
    /// It is to be tried again; the job has it.
    Again,
}

/// How an operation failed.
pub(super) enum Died {
    /// Its code panicked.
    Panicked(String),
    /// It did what it had declared not to do.
    Misused(Box<Report>),
}

thread_local! {
    /// Whether the kernel that this thread runs has asked to be called again.
    static AGAIN: Cell<bool> = const { Cell::new(false) };
}

/// To be called by the host kernel of a kernel that has found that it cannot finish yet: this call of it was an attempt,
/// and another will be made when some operation has finished, or after a moment (the host may have written a word,
/// too).
///
/// So a kernel that spins on a GPU, on a word that another stream's kernel or copy writes, does not keep a worker:
/// between attempts it holds no thread and no memory. What an attempt has written stays written, so a host kernel must be able
/// to start over. Usually reached through [`Kernel::resumable`](crate::Kernel::resumable).
pub fn again() {
    AGAIN.set(true);
}

/// A translated operand.
pub(super) struct Span {
    pub ptr: *mut u8,
    pub bytes: usize,
    pub write: bool,
    /// Keeps the bytes alive; `None` for an empty range, whose pointer dangles.
    pub _block: Option<Arc<Block>>,
}

impl Span {
    /// An empty range: a well aligned pointer to nothing.
    pub fn empty(write: bool) -> Self {
        Span { ptr: ptr::without_provenance_mut(256), bytes: 0, write, _block: None }
    }
}

impl Job {
    /// Performs the work; in a dry machine only host functions. A panic of a kernel or host function comes back as its
    /// description.
    pub fn perform(&mut self, dry: bool, watch_reads: bool) -> Result<Ended, Died> {
        let Some(Op { work, place, engine, submitted }) = self.op.take() else { return Ok(Ended::Done) };
        match work {
            Work::HostFunction(f) => caught(|| f.call(), "a host function")?,
            _ if dry => {}
            Work::Kernel { name, kernel, dims, args } => {
                self.translate(&args);
                let watched = if watch_reads { Watched::new(&mut self.args) } else { Watched::default() };
                AGAIN.set(false);
                // SAFETY: `launch`'s caller promises that the arguments fit the kernel; each slice is live (the spans
                // hold their blocks) and claimed in `access`, or a copy of one that is, and those of one launch overlap
                // only where all are read, which `Core::admit` has checked.
                let done = caught(|| unsafe { kernel(dims, &self.args) }, name);
                self.args.clear();
                done?;
                if let Some((argument, bytes)) = watched.harm() {
                    let by = Launched { name, place, device: self.device, stream: self.number };
                    return Err(Died::Misused(Box::new(watch::report(by, &args, argument, bytes))));
                }
                if AGAIN.take() {
                    let work = Work::Kernel { name, kernel, dims, args };
                    self.op = Some(Op { engine, work, place, submitted });
                    return Ok(Ended::Again);
                }
            }
            work => caught(|| self.plain(&work), "an operation")?,
        }
        Ok(Ended::Done)
    }

    /// A kernel's arguments as it runs.
    fn translate(&mut self, args: &[KernelArg]) {
        let mut spans = self.spans.iter();
        self.args.extend(args.iter().map(|arg| match arg {
            KernelArg::Value(value) => HostArg::Value(*value),
            KernelArg::Slice { .. } => {
                let span = spans.next().expect("`operands` gives one range per slice argument");
                HostArg::Slice { ptr: span.ptr, bytes: span.bytes, write: span.write }
            }
        }));
    }

    /// What has no code of the user in it.
    fn plain(&self, work: &Work) {
        match work {
            Work::Copy { bytes, .. } => {
                let (dst, src) = (&self.spans[0], &self.spans[1]);
                // SAFETY: both ranges are live (the spans hold their blocks), `bytes` long, claimed in `access`, and
                // do not overlap, which `Core::admit` has checked.
                unsafe { ptr::copy_nonoverlapping(src.ptr, dst.ptr, *bytes) }
            }
            Work::FillU8 { value, bytes, .. } => {
                // SAFETY: the range is live, `bytes` long and exclusively claimed.
                unsafe { ptr::write_bytes(self.spans[0].ptr, *value, *bytes) }
            }
            Work::FillU32 { value, count, .. } => {
                // SAFETY: the range is live, `4 * count` bytes long, 4-byte aligned (checked at submit), initialised
                // (all allocations are), and exclusively claimed.
                unsafe { std::slice::from_raw_parts_mut(self.spans[0].ptr.cast::<u32>(), *count) }.fill(*value)
            }
            #[cfg(feature = "blas")]
            Work::Gemm(gemm) => {
                // SAFETY: the spans are A, B and C in this order, live, as long as `operands` says, 4-byte aligned
                // (checked at submit), C exclusively claimed.
                unsafe { super::gemm::run(gemm, self.spans[0].ptr, self.spans[1].ptr, self.spans[2].ptr) }
            }
            _ => unreachable!("`perform` and the scheduler do the others"),
        }
    }
}

fn caught(f: impl FnOnce(), what: &str) -> Result<(), Died> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        let died = Died::Panicked(format!("`{what}` panicked: {}", message(&*payload)));
        // The payload is the user's, and so is its `Drop`.
        contain(|| drop(payload));
        died
    })
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
    text.unwrap_or("(no message)").to_owned()
}

/// An 8-byte word that streams and the host use as a flag. Its accesses stand for the stream memory operations of the
/// hardware, on words that belong to the driver's user.
pub(super) struct Flag(NonNull<u64>);

impl Flag {
    /// # Safety
    /// `ptr` is an 8-byte aligned word that lives as long as the flag; concurrent accesses to it are atomic.
    pub unsafe fn new(ptr: *mut u8) -> Self {
        Flag(NonNull::new(ptr.cast()).expect("resolved pointers are not null"))
    }

    pub fn store(&self, value: u64) {
        // SAFETY: the promise of `new`.
        unsafe { store_word(self.0.as_ptr(), value) }
    }

    pub fn load(&self) -> u64 {
        // SAFETY: the promise of `new`.
        unsafe { load_word(self.0.as_ptr()) }
    }

    /// Whether the word has reached `value`, compared cyclically.
    pub fn reached(&self, value: u64) -> bool {
        self.load().wrapping_sub(value) as i64 >= 0
    }
}
