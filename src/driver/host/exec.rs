//! Performing one operation, on a worker thread and without the scheduler's lock.

use super::{
    Block, Engine, Key, Op, Work,
    watch::{self, Launched, Watched},
};
use crate::{
    contain::{discard, payload_text},
    driver::{HostArg, KernelArg},
    error::misuse::Report,
    sync::{load_word, store_word},
};
use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::{self, NonNull},
    sync::Arc,
};

/// A worker reuses one `Job` for all its operations.
#[derive(Default)]
pub(super) struct Job {
    pub stream: Key,
    pub number: usize,
    pub device: usize,
    pub engine: Option<Engine>,
    pub op: Option<Op>,
    pub spans: Vec<Span>,
    args: Vec<HostArg>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Done,
    /// It must be tried again; the job still has it.
    Again,
}

pub(super) enum Died {
    Panicked(String),
    /// It wrote to an argument that it had declared as read-only.
    Misused(Box<Report>),
}

thread_local! {
    static AGAIN: Cell<bool> = const { Cell::new(false) };
}

/// A host kernel calls this when it cannot finish yet. Then this run of the kernel was an attempt. The machine runs it
/// again when another operation has finished, or after a moment (the host may have written a word, too).
///
/// On a GPU such a kernel spins on a word that a kernel or copy of another stream writes. Here it does not occupy a
/// worker: between attempts it holds no thread and no memory. The writes of an attempt stay, so a host kernel must be
/// able to start over. Usually reached through [`Kernel::resumable`](crate::Kernel::resumable).
pub fn again() {
    AGAIN.set(true);
}

pub(super) struct Span {
    pub ptr: *mut u8,
    pub bytes: usize,
    pub write: bool,
    /// `None` for an empty range, whose pointer dangles.
    pub _block: Option<Arc<Block>>,
}

impl Span {
    pub fn empty(write: bool) -> Self {
        Span { ptr: ptr::without_provenance_mut(256), bytes: 0, write, _block: None }
    }
}

impl Job {
    /// In a dry machine only host functions run. A panic of a kernel or host function is returned as text.
    pub fn perform(&mut self, dry: bool, watch_reads: bool) -> Result<Ended, Died> {
        let Some(Op { work, place, engine, submitted }) = self.op.take() else { return Ok(Ended::Done) };
        match work {
            Work::HostFunction(f) => caught(|| f.call(), "a host function")?,
            _ if dry => {}
            Work::Kernel { name, kernel, dims, args, own } => {
                self.translate(&args);
                let watched = if watch_reads { Watched::new(&mut self.args) } else { Watched::default() };
                AGAIN.set(false);
                // SAFETY: `launch`'s caller promises that the arguments fit the kernel. Each slice is live (the spans
                // hold their blocks) and claimed in `access`, or it is a copy of such a slice. Slices of one launch
                // overlap only if all of them are read-only: `Core::admit` has checked it.
                let done = caught(|| unsafe { kernel(dims, &self.args) }, name);
                self.args.clear();
                done?;
                if let Some((argument, bytes)) = watched.harm() {
                    let by = Launched { name, place, device: self.device, stream: self.number };
                    return Err(Died::Misused(Box::new(watch::report(by, &args, argument, bytes))));
                }
                if AGAIN.take() {
                    let work = Work::Kernel { name, kernel, dims, args, own };
                    self.op = Some(Op { engine, work, place, submitted });
                    return Ok(Ended::Again);
                }
            }
            work => caught(|| self.plain(&work), "an operation")?,
        }
        Ok(Ended::Done)
    }

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

    fn plain(&self, work: &Work) {
        match work {
            Work::Copy { bytes, .. } => {
                let (dst, src) = (&self.spans[0], &self.spans[1]);
                // SAFETY: both ranges are live (the spans hold their blocks), `bytes` long, and claimed in `access`.
                // They do not overlap: `Core::admit` has checked it.
                unsafe { ptr::copy_nonoverlapping(src.ptr, dst.ptr, *bytes) }
            }
            Work::FillU8 { value, bytes, .. } => {
                // SAFETY: the range is live, `bytes` long and exclusively claimed.
                unsafe { ptr::write_bytes(self.spans[0].ptr, *value, *bytes) }
            }
            Work::FillU32 { value, count, .. } => {
                // SAFETY: the range is live, `4 * count` bytes long, 4-byte aligned (checked at submit), initialised
                // (all allocations are), and exclusively claimed.
                fill(unsafe { std::slice::from_raw_parts_mut(self.spans[0].ptr.cast::<u32>(), *count) }, *value)
            }
            #[cfg(feature = "blas")]
            Work::Gemm(gemm) => {
                // SAFETY: the spans are A, B and C in this order. They are live, as long as `operands` says, and
                // aligned (checked at submit); C is exclusively claimed.
                unsafe { super::gemm::run(gemm, self.spans[0].ptr, self.spans[1].ptr, self.spans[2].ptr) }
            }
            _ => unreachable!("`perform` and the scheduler do the others"),
        }
    }
}

/// By copies of what is filled already, up to a block: `[u32]::fill` is slow without optimisation, and tests are.
fn fill(words: &mut [u32], value: u32) {
    const BLOCK: usize = 4096;
    let Some(first) = words.first_mut() else { return };
    *first = value;
    let mut done = 1;
    while done < words.len() {
        let (filled, rest) = words.split_at_mut(done);
        let len = done.min(BLOCK).min(rest.len());
        rest[..len].copy_from_slice(&filled[..len]);
        done += len;
    }
}

fn caught(f: impl FnOnce(), what: &str) -> Result<(), Died> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        let died = Died::Panicked(format!("`{what}` panicked: {}", payload_text(&*payload).unwrap_or("(no message)")));
        discard(payload);
        died
    })
}

/// An 8-byte word of the driver's user: streams and the host use it as a flag, as by stream memory operations.
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
