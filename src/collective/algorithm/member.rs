//! One member's part in a collective, as a value. [`execute`](super::super::execute) makes a [`Member`] at its commit.
//!
//! Invariant (the exit rule): when the member's stream has passed the collective, no peer touches the member's memory.

use crate::collective::{Descriptors, Entry, Job, Meeting, RemotePtr, Request, kernels};
use crate::driver::{Address, FailPoint, KernelArg, Launch, LaunchDims, RawFunction, host::HostGpu};
use crate::fabric::{
    Area, DeviceBarrier, Exposed, FEW, Limits, MOST, RecvScratch, ReduceOp, Shape, Side, SignalPad, Tiling, Work,
    layout::THREADS,
};
use crate::memory::{DeviceHandle, StreamCore};
use crate::{Event, copy::peer, error::Result, gang::Gang};
use smallvec::SmallVec;
use std::{cell::Cell, sync::Arc, time::Duration};

pub(crate) struct Member<'a> {
    pub request: &'a Request,
    pub limits: &'a Limits,
    pub rank: usize,
    /// Ordinals in the pool of all members, by rank.
    pub ordinals: &'a [usize],
    pub handle: &'a DeviceHandle,
    pub stream: &'a Arc<StreamCore>,
    /// None where kernels cannot wait for each other.
    pub pad: Option<&'a SignalPad>,
    pub scratch: Option<&'a Area>,
    /// The barrier that its kernels take part in; [`DeviceBarrier::NONE`] where events order them.
    pub barrier: DeviceBarrier,
    /// Kernels launched so far that take part in the barrier. After a failure, `resync` launches the missing ones.
    pub launched: Cell<usize>,
    meeting: Meeting<'a>,
}

pub(crate) struct Matched<'a> {
    pub met: &'a Descriptors,
    pub shape: &'a Shape,
}

impl Matched<'_> {
    pub(super) fn exposed(&self, member: usize) -> &Exposed {
        self.met.exposed(member)
    }

    /// The scratch into which the others write what they send to this member, if it has any.
    pub(super) fn scratch(&self, member: usize) -> Option<RecvScratch> {
        self.exposed(member).scratch
    }

    /// [`scratch`](Self::scratch) of an algorithm that cannot go without.
    pub(crate) fn recv_scratch(&self, member: usize) -> RecvScratch {
        self.scratch(member).expect("every member has scratch")
    }

    pub(super) fn least_scratch(&self, members: usize) -> usize {
        (0..members).map(|member| self.scratch(member).map_or(0, |scratch| scratch.bytes)).min().unwrap_or(0)
    }

    /// All have as much, but for `all_to_all_v`, whose shape is unknown when they are made. Also the smallest's bytes.
    pub(super) fn stages(&self, members: usize) -> (SmallVec<[Address; 8]>, usize) {
        let all = || (0..members).map(|member| self.exposed(member).stage.as_ref().expect("every member has a stage"));
        (all().map(|stage| stage.address).collect(), all().map(|stage| stage.bytes.len()).min().unwrap_or(0))
    }

    pub(crate) fn address(&self, member: usize, side: Side) -> Address {
        self.met.address(member, side)
    }

    /// The addresses of all members' buffers, by rank, and zeros behind them.
    pub(crate) fn addresses(&self, members: usize, side: Side) -> [Address; MOST] {
        std::array::from_fn(|rank| if rank < members { self.address(rank, side) } else { 0 })
    }
}

impl<'a> Member<'a> {
    pub(in super::super) fn new(
        meeting: Meeting<'a>,
        request: &'a Request,
        limits: &'a Limits,
        scratch: Option<&'a Area>,
        barrier: DeviceBarrier,
    ) -> Self {
        let dev = meeting.dev;
        let (rank, ordinals, pad) = (meeting.rank, meeting.ordinals(), meeting.pad());
        let (handle, stream, launched) = (&*dev.worker.handle, &dev.stream, Cell::new(0));
        Member { request, limits, rank, ordinals, handle, stream, pad, scratch, barrier, launched, meeting }
    }

    pub(super) fn name(&self) -> &'static str {
        self.request.call.op
    }

    /// The same member with another stream of its device, for kernels without a barrier.
    pub(super) fn on<'s>(&'s self, stream: &'s Arc<StreamCore>) -> Member<'s> {
        Member { stream, barrier: DeviceBarrier::NONE, launched: Cell::new(0), ..*self }
    }

    pub(crate) fn count(&self) -> usize {
        self.ordinals.len()
    }

    pub(super) fn index(&self) -> usize {
        self.ordinals[self.rank]
    }

    /// Ranks of all members but this one. Each member begins with the one after it.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        self.meeting.others()
    }

    pub(super) fn pad(&self) -> &SignalPad {
        self.pad.expect("chosen since kernels can meet")
    }

    pub(crate) fn is_software(&self) -> bool {
        self.handle.driver.as_any().is::<HostGpu>()
    }

    pub(super) fn factors(&self, matched: &Matched<'_>) -> SmallVec<[f64; 8]> {
        match self.request.reduce {
            ReduceOp::Scaled(_) => (0..self.count()).map(|member| matched.met.factor(member)).collect(),
            _ => SmallVec::new(),
        }
    }

    pub(super) fn remote(&self, matched: &Matched<'_>, member: usize, side: Side) -> RemotePtr {
        let area = matched.exposed(member).area(side);
        // Managed memory belongs to no device.
        let device = area.block.device().unwrap_or(self.index());
        RemotePtr { device, address: area.address }
    }

    pub(super) fn local(&self, address: Address) -> RemotePtr {
        RemotePtr { device: self.index(), address }
    }

    /// 0 where there is nothing to touch, and perhaps no buffer.
    pub(super) fn own(&self, side: Side, start: usize, len: usize) -> Address {
        if len == 0 {
            return 0;
        }
        let area = self.request.area(side).expect("a member has the buffers that its part is done on");
        area.address + (start * self.request.dtype.size()) as u64
    }

    /// Address and bytes of tile `j` of `len` elements of an own buffer, from `start` on; 0 if nothing is left for it.
    pub(super) fn tile(&self, cut: &Tiling, side: Side, start: usize, len: usize, j: usize) -> (Address, usize) {
        let range = cut.range(j, len * self.request.dtype.size());
        if range.is_empty() {
            return (0, 0);
        }
        (self.own(side, start, len) + range.start as u64, range.len())
    }

    pub(super) fn wait_for_start(&self, matched: &Matched<'_>, peer: usize) -> Result<()> {
        if self.handle.injected(FailPoint::StartSkipped) {
            return Ok(());
        }
        let ready = matched.exposed(peer).ready.as_ref().expect("there are several members");
        self.wait(self.stream, ready)
    }

    pub(super) fn send_step(&self, peer: usize, done: Event) -> Result<()> {
        self.meeting.post_step(&self.request.call, peer, done)
    }

    pub(super) fn take_step(&self, peer: usize) -> Result<Event> {
        self.meeting.receive_step(&self.request.call, peer)
    }

    pub(super) fn engines(&self) -> Result<[Arc<StreamCore>; 2]> {
        self.meeting.dev.worker.engines()
    }

    pub(super) fn copy(&self, stream: &Arc<StreamCore>, to: RemotePtr, from: RemotePtr, bytes: usize) -> Result<()> {
        peer::copy(&self.meeting.dev.worker, stream, to.address, to.device, from.address, from.device, bytes)
    }

    pub(super) fn gang(&self) -> &Gang {
        &self.meeting.dev.session.gang
    }

    pub(super) fn deadline(&self) -> Duration {
        self.meeting.dev.worker.shared.deadline
    }

    pub(super) fn record(&self) -> Result<Event> {
        Event::record(self.stream, self.name(), false)
    }

    pub(super) fn wait(&self, stream: &Arc<StreamCore>, event: &Event) -> Result<()> {
        stream.wait_event(self.name(), event.0.raw, &event.0.stream, event.0.covered)
    }

    /// Waits on the host until a peer has submitted a step, then puts the member's stream behind it.
    pub(super) fn await_step(&self, peer: usize) -> Result<()> {
        let done = self.take_step(peer)?;
        if self.handle.injected(FailPoint::StepSkipped) {
            return Ok(());
        }
        self.wait(self.stream, &done)
    }

    /// Runs `work`, which submits to `streams`, between the earlier and the later work of the member's stream.
    pub(super) fn fork_join(&self, streams: &[Arc<StreamCore>], work: impl FnOnce() -> Result<()>) -> Result<()> {
        let (own, name) = (self.stream, self.name());
        streams.iter().try_for_each(|stream| stream.wait_for(name, own, own.submit()))?;
        let done = work();
        // Also after a failure: the work that was submitted to the other streams belongs to the caller's operation.
        let joined = streams.iter().map(|stream| {
            own.wait_for(name, stream, stream.submit()).or_else(|error| {
                // No event orders that work, so it must be over now.
                stream.wait_idle(name, self.deadline(), || false)?;
                Err(error)
            })
        });
        joined.fold(done, Result::and)
    }

    /// Submits `work` between the starts and the ends of all peers that share memory with this member: the exit rule.
    pub(super) fn ordered_by_events(&self, matched: &Matched<'_>, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let me = self.rank;
        let touched = || self.others().filter(|&peer| matched.shape.touches(me, peer));
        touched().try_for_each(|peer| self.wait_for_start(matched, peer))?;
        work()?;
        let done = touched().next().is_some().then(|| self.record()).transpose()?;
        for peer in touched() {
            self.send_step(peer, done.clone().expect("recorded for them"))?;
        }
        self.others().filter(|&peer| matched.shape.touches(peer, me)).try_for_each(|peer| self.await_step(peer))
    }

    /// Carries out this member's work by `submit`, [ordered by events](Self::ordered_by_events).
    pub(super) fn carry_out(
        &self,
        matched: &Matched<'_>,
        work: &Work,
        submit: impl FnOnce(&Job) -> Result<()>,
    ) -> Result<()> {
        self.ordered_by_events(matched, || {
            if work.is_empty() {
                return Ok(());
            }
            let at = |rank, side| self.remote(matched, rank, side);
            submit(&self.request.job(work, at, self.factors(matched)))
        })
    }

    /// Later work of every member comes after the earlier work of all of them.
    pub(super) fn barrier_by_events(&self) -> Result<()> {
        let done = self.record()?;
        self.others().try_for_each(|peer| self.send_step(peer, done.clone()))?;
        self.others().try_for_each(|peer| self.await_step(peer))
    }

    /// The kernel takes part in the member's barrier, if there is one; then it may be on the device before the kernel
    /// in front of it has ended, for which it waits by itself (`kernels/build.py` checks that).
    pub(crate) fn launch(&self, entry: &Entry, blocks: u32, args: &[KernelArg]) -> Result<()> {
        self.launch_as(entry, dims(blocks), args)
    }

    /// [`launch`](Self::launch) with blocks of another shape, none larger than the kernel is compiled for.
    pub(super) fn launch_as(&self, entry: &Entry, dims: LaunchDims, args: &[KernelArg]) -> Result<()> {
        let dev = self.meeting.dev;
        let few = dev.worker.barrier_state.note_blocks(dev.recording.is_some(), dims.grid.0);
        let early = self.barrier.signals != 0
            && comes_early(few, dims.grid.0, self.handle.driver.info().multiprocessors, self.handle.sharers);
        let function = dev.worker.function(entry.module, entry.name)?;
        launch((self.handle, self.stream), self.name(), (entry, function), dims, args, early)
    }

    pub(super) fn launch_counting(&self) -> Result<()> {
        let (entry, args) = kernels::counting(self.barrier);
        let function = self.meeting.dev.worker.function(entry.module, entry.name)?;
        launch((self.handle, self.stream), self.name(), (&entry, function), dims(1), &args, false)
    }
}

/// Whether a kernel of so many blocks may be on its device before the kernel that it waits for has ended. If that one
/// has `few` blocks it may still wait for a peer's kernel, which may come after other work of this device: that must
/// find room beside the two. Else all peers' kernels run already. (On a shared GPU they may not find room.)
/// `kernels/meet.cuh` has the other half of the argument.
fn comes_early(few: bool, blocks: u32, multiprocessors: u32, sharers: usize) -> bool {
    sharers == 1 && (!few || FEW + blocks <= multiprocessors / 4 * 3)
}

pub(in super::super) fn dims(blocks: u32) -> LaunchDims {
    LaunchDims { grid: (blocks, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 }
}

/// `early`: it may be on the device before the kernel in front of it has ended.
pub(in super::super) fn launch(
    (handle, stream): (&DeviceHandle, &StreamCore),
    name: &'static str,
    (entry, function): (&Entry, RawFunction),
    dims: LaunchDims,
    args: &[KernelArg],
    early: bool,
) -> Result<()> {
    let launch = Launch { name: entry.name, function, host: entry.host, dims, args, early };
    // SAFETY: the memory is the members': each has lent it until its stream has passed the collective. It is ordered
    // before this launch, by events or by the kernel's own meeting, and no two members are given the same part.
    let launched = unsafe { handle.driver.launch(&launch, stream.raw) };
    handle.check(name, launched)
}

#[cfg(test)]
#[path = "../../../tests/unit/collective/algorithm/member_tests.rs"]
mod tests;
