//! Performing one operation, on a worker thread and without the scheduler's lock.

use super::{
    memory::Block,
    op::{Engine, Work},
    slab::Key,
};
use crate::driver::{HostArg, KernelArg};
use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::{self, NonNull},
    sync::Arc,
};

/// An operation that has been started: what it does, and the memory that is its own until it is finished.
/// A worker reuses one for all its operations.
#[derive(Default)]
pub(super) struct Job {
    pub stream: Key,
    pub device: usize,
    pub engine: Option<Engine>,
    pub work: Option<Work>,
    pub spans: Vec<Span>,
    args: Vec<HostArg>,
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
    /// Performs the work. A panic of a kernel or host function comes back as its description.
    pub fn perform(&mut self) -> Result<(), String> {
        match self.work.take() {
            None => Ok(()),
            Some(Work::HostFunction(f)) => caught(f, "a host function"),
            Some(Work::Kernel { name, kernel, dims, args }) => {
                self.translate(&args);
                // SAFETY: `launch`'s caller promises that the arguments fit the kernel; each slice is live (the spans
                // hold their blocks) and claimed in `access`, and those of one launch overlap only where all are read,
                // which `Core::admit` has checked.
                let done = caught(|| unsafe { kernel(dims, &self.args) }, name);
                self.args.clear();
                done
            }
            Some(work) => caught(|| self.plain(&work), "an operation"),
        }
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

fn caught(f: impl FnOnce(), what: &str) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| format!("`{what}` panicked: {}", message(&*payload)))
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
    text.unwrap_or("(no message)").to_owned()
}

/// An 8-byte word that streams and the host use as a flag.
///
/// The crate keeps its atomics in `sync`, where they are model-checked; these stand for the stream memory operations of
/// the hardware, on words that belong to the driver's user.
pub(super) struct Flag(NonNull<u64>);

impl Flag {
    /// # Safety
    /// `ptr` is an 8-byte aligned word that lives as long as the flag; concurrent accesses to it are atomic.
    pub unsafe fn new(ptr: *mut u8) -> Self {
        Flag(NonNull::new(ptr.cast()).expect("resolved pointers are not null"))
    }

    #[allow(clippy::disallowed_types)]
    fn word(&self) -> &std::sync::atomic::AtomicU64 {
        // SAFETY: the promise of `new`.
        unsafe { std::sync::atomic::AtomicU64::from_ptr(self.0.as_ptr()) }
    }

    pub fn store(&self, value: u64) {
        self.word().store(value, std::sync::atomic::Ordering::Release);
    }

    /// Whether the word has reached `value`, compared cyclically.
    pub fn reached(&self, value: u64) -> bool {
        self.word().load(std::sync::atomic::Ordering::Acquire).wrapping_sub(value) as i64 >= 0
    }
}
