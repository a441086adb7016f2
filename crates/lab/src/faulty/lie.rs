//! Peers that report success but deliver wrong bytes.

use super::{
    common::Common,
    plan::{FaultPlan, Injected, Verdict},
};
use gpu_pool::extend::driver::{Address, DriverRef, DriverResult, KernelArg, Launch, RawStream};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::HashMap;

/// The bytes that a kernel loads instead of data that was dropped.
const JUNK: u8 = 0xdb;
/// Alignment that a replaced argument keeps.
const ALIGN: u64 = 256;
const DAMAGE: usize = 16;

pub(super) fn about(verdict: &Verdict, peer: usize) -> Option<Injected> {
    let lies = verdict.iter().filter(|(_, of)| of.is_none_or(|of| of == peer)).map(|(fault, _)| *fault);
    let mut lies = lies.filter(|fault| matches!(fault, Injected::Drop | Injected::Corrupt)).peekable();
    let first = lies.peek().copied();
    lies.find(|lie| *lie == Injected::Drop).or(first)
}

pub(super) fn of_mapping(verdict: &Verdict) -> Option<Injected> {
    verdict.iter().map(|(fault, _)| *fault).find(|fault| matches!(fault, Injected::Drop | Injected::Corrupt))
}

pub(super) struct Liar {
    inner: DriverRef,
    index: usize,
    plan: FaultPlan,
    memory: Mutex<Scratch>,
}

#[derive(Default)]
struct Scratch {
    /// Scratch memory that replaces a peer's, by stream and argument: launches of one stream run one after the other.
    current: HashMap<(RawStream, usize), (Address, usize)>,
    /// Scratch memory that became too small and may still be in use.
    outgrown: Vec<Address>,
    damages: u64,
}

impl Liar {
    pub fn new(inner: &DriverRef, index: usize, plan: &FaultPlan) -> Self {
        Liar { inner: inner.clone(), index, plan: plan.clone(), memory: Mutex::default() }
    }

    /// # Safety
    /// As [`Driver::fill_u8`](gpu_pool::extend::driver::Driver::fill_u8).
    pub unsafe fn damage(&self, at: Address, bytes: usize, stream: RawStream) -> DriverResult {
        if bytes == 0 {
            return Ok(());
        }
        let mut memory = self.memory.lock();
        memory.damages += 1;
        let len = bytes.min(DAMAGE);
        let start = self.plan.random(self.index as u64, memory.damages) % (bytes - len + 1) as u64;
        // Two values, so that constant data is damaged, too.
        let (half, at) = (len / 2, at + start);
        // SAFETY: within the caller's range.
        unsafe {
            self.inner.fill_u8(at, JUNK, half, stream)?;
            self.inner.fill_u8(at + half as u64, !JUNK, len - half, stream)
        }
    }

    /// Launches a kernel; `verdict` has lies about its slices of peers' memory.
    ///
    /// # Safety
    /// As [`Driver::launch`](gpu_pool::extend::driver::Driver::launch).
    pub unsafe fn launch(
        &self,
        common: &Common,
        verdict: &Verdict,
        launch: &Launch<'_>,
        stream: RawStream,
    ) -> DriverResult {
        let mut args: SmallVec<[KernelArg; 8]> = launch.args.into();
        let mut damaged: SmallVec<[(Address, usize); 2]> = SmallVec::new();
        for (place, arg) in args.iter_mut().enumerate() {
            let KernelArg::Slice { address, bytes, write } = arg else { continue };
            let Some(peer) = common.owner(*address).filter(|&owner| owner != self.index && *bytes > 0) else {
                continue;
            };
            match (about(verdict, peer), *write) {
                (None, _) => {}
                (Some(Injected::Corrupt), true) => damaged.push((*address, *bytes)),
                (Some(lie), _) => {
                    let scratch = self.scratch(stream, place, *address, *bytes)?;
                    // SAFETY: the scratch memory is large enough and only this stream uses it; the caller promises that
                    // the slice is live.
                    unsafe {
                        self.inner.fill_u8(scratch, JUNK, *bytes, stream)?;
                        if let (Injected::Corrupt, Some(owner)) = (lie, common.inner(peer)) {
                            self.inner.copy_peer(scratch, &*self.inner, *address, &*owner, *bytes, stream)?;
                            self.damage(scratch, *bytes, stream)?;
                        }
                    }
                    *address = scratch;
                }
            }
        }
        // SAFETY: the caller's promise; replaced slices have the same size and alignment.
        unsafe { self.inner.launch(&Launch { args: &args, ..*launch }, stream)? };
        // SAFETY: ranges that the kernel may write.
        damaged.into_iter().try_for_each(|(at, bytes)| unsafe { self.damage(at, bytes, stream) })
    }

    /// Scratch memory of this device with the alignment of `like`.
    fn scratch(&self, stream: RawStream, place: usize, like: Address, bytes: usize) -> DriverResult<Address> {
        let (mut memory, room) = (self.memory.lock(), bytes + ALIGN as usize);
        let known = memory.current.get(&(stream, place)).copied();
        let start = match known {
            Some((start, had)) if had >= room => start,
            _ => {
                let start = self.inner.mem_alloc(room)?;
                memory.outgrown.extend(known.map(|(start, _)| start));
                memory.current.insert((stream, place), (start, room));
                start
            }
        };
        Ok(start + like % ALIGN)
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        let Scratch { current, outgrown, .. } = std::mem::take(self.memory.get_mut());
        for start in current.into_values().map(|(start, _)| start).chain(outgrown) {
            // SAFETY: allocated here; the device is being dropped, so no operation uses it.
            let _ = unsafe { self.inner.mem_free(start) };
        }
    }
}
