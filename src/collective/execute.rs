//! Carries a collective out: it does once what every algorithm needs.
//!
//! ```text
//! access    the member's buffers: the current stream waits for conflicting work
//! scratch   the other memory that the algorithm needs
//! meet      all members have called one collective; they commit, or nobody begins
//! submit    the algorithm's part
//! settle    the uses of the memory are noted; a failure fails the gang
//! ```
//!
//! **The exit rule**: when a member's stream has passed the collective, no peer touches the member's memory any more.
//! So the next work on that stream may write the memory, and the member's memory pool may reuse it, without a look at
//! other devices.

use super::{
    Group,
    algorithm::{Algorithm, Executor, Matched, Meeting, Member, Scratch},
    barrier,
    choose::{Case, KernelBarrier, Machine, choose},
    commit::LaunchWindow,
    kernels::Entry,
    meet::Descriptors,
    request::{RemotePtr, Request},
    scratch,
};
use crate::{
    Event,
    copy::peer,
    driver::RawFunction,
    error::{Error, Result},
    fabric::{
        descriptor::{Area, Exposed, Payload, RecvScratch},
        layout::{DeviceBarrier, PadLayout},
        limits::Limits,
        signal_pad::SignalPad,
        spinning::SkippedBarrier,
        types::{Algorithm as Wish, DType, ReduceOp, ReduceOrder},
    },
    memory::{block::BlockRef, hazard::Access, stream::StreamCore},
    thread::worker::Shared,
    token::op::Op,
};
use std::{cell::Cell, sync::Arc};

impl Group<'_> {
    /// Carries a collective out, or captures it. Asynchronous on the current stream.
    #[track_caller]
    pub(super) fn run(&self, request: Request) -> Result<()> {
        self.run_by(request, None)
    }

    /// [`run`](Self::run) by a `given` algorithm, which must be able to, and whose kernels wait for each other. Not for
    /// groups of several processes.
    #[track_caller]
    pub(super) fn run_by(&self, request: Request, given: Option<&dyn Algorithm>) -> Result<()> {
        if let Some(across) = &self.across {
            debug_assert!(given.is_none(), "each step there has an algorithm of its own");
            return self.run_across(across, &request, false);
        }
        match &self.dev.recording {
            Some(recording) => self.capture(recording, request, given),
            None => self.carry(&request, self.limits(), given),
        }
    }

    /// Whether kernels of higher rooms can wait for each other on the devices, and the builder asked for no algorithm.
    pub(crate) fn kernels_meet(&self) -> bool {
        let machine = Machine::of(&self.dev.worker.shared);
        let (members, any) = ((self.count(), self.membership.direct), (DType::U8, ReduceOp::Sum));
        self.across.is_none()
            && !machine.software
            && machine.wish == Wish::Auto
            && Case::new((machine, self.limits()), members, any, None, false).meets_on_devices()
    }

    /// Carries a collective out that leaves most of the device to other work. Not for captures.
    #[track_caller]
    pub(super) fn run_overlapped(&self, request: &Request) -> Result<()> {
        match &self.across {
            Some(across) => self.run_across(across, request, true),
            None => self.carry(request, &self.limits().overlapping(), None),
        }
    }

    /// Carries a collective out: by the algorithm that is right within these limits, or by a `given` one, which must be
    /// able to. All members give the same limits and the same algorithm.
    #[track_caller]
    pub(super) fn carry(&self, request: &Request, limits: &Limits, given: Option<&dyn Algorithm>) -> Result<()> {
        let (dev, name) = (self.dev, request.call.op());
        let case = self.case(request, limits);
        let algorithm = given.unwrap_or_else(|| choose(&case).0);
        let needs = algorithm.needs(&case);
        let mut access = self.access(request)?;
        let (by_kernels, on_host) =
            (matches!(needs.meeting, Meeting::Kernels { .. }), matches!(needs.scratch, Scratch::Host(_)));
        if by_kernels {
            dev.worker.spinning.prepare(name, request.call.site, &dev.stream)?;
        }
        if on_host {
            dev.worker.staging_calls.room(name, dev.worker.shared.deadline, &dev.session.gang)?;
        }
        let scratch = scratch::take(self, request, needs.scratch, &mut access)?;
        let blocks = || request.areas().chain(&scratch).map(|area| &area.block);
        let mut owed = SkippedBarrier { barrier: DeviceBarrier::NONE, times: 0 };
        let (met, window) = match needs.meeting {
            Meeting::Kernels { launches, in_full } => {
                // From the commit on, the others count on this member's launches, whatever happens here: every member
                // launches, and every pair counts.
                owed = SkippedBarrier { barrier: self.barrier_of_kernels(dev.session.gang.place()), times: launches };
                let number = self.next_number();
                let met = Descriptors::of(self, request, scratch.as_ref(), in_full, true);
                let met = met.inspect_err(|_| self.skip_launch(number, owed, blocks().cloned()))?;
                (met, Some(LaunchWindow::of(dev)))
            }
            Meeting::Events | Meeting::Host => {
                let events = needs.meeting == Meeting::Events && self.count() > 1;
                let ready = events.then(|| Event::record(&dev.stream, name, false)).transpose()?;
                let (stage, scratch) = match &scratch {
                    Some(area) if on_host => (Some(area.clone()), None),
                    area => (None, area.as_ref().map(RecvScratch::of)),
                };
                let exposed = Exposed { stage, scratch, ..request.expose(ready) };
                let met = self.meet(request.call.clone(), Payload::Memory(exposed), false)?;
                (Descriptors::Full(met), None)
            }
        };
        let shape = match met.shape(self, request) {
            Ok(shape) => shape,
            // Every member finds this error, and none has begun: no memory is touched. The kernels count nevertheless.
            Err(error) => {
                let counted = match by_kernels {
                    true => {
                        debug_assert_eq!(owed.times, 1, "what launches more is of a shape that is known");
                        barrier::count(&dev.worker, &dev.stream, name, owed.barrier)
                    }
                    false => return Err(error),
                };
                drop(window);
                access.submitted();
                dev.worker.spinning.launched(&dev.stream, owed, &counted);
                return Err(counted.inspect_err(|cause| self.fail_on(blocks(), cause)).err().unwrap_or(error));
            }
        };
        let executor = MemberThread { group: self, request };
        let member = executor.member(case.limits, scratch.as_ref(), owed.barrier);
        let submitted = algorithm.submit(&member, &Matched { met: &met, shape: &shape });
        drop(window);
        access.submitted();
        if by_kernels {
            owed.times -= member.launched.get().min(owed.times);
            dev.worker.spinning.launched(&dev.stream, owed, &submitted);
        }
        if on_host {
            dev.worker.staging_calls.note(&dev.stream);
        }
        // Peers may have accesses to these blocks in flight that no event of this member covers.
        submitted.inspect_err(|cause| self.fail_on(blocks(), cause))
    }

    /// Captures the kernels of a collective. The members meet now, on the host; their kernels meet at each launch of
    /// the graph, in whichever gang. Returns the kernels' barrier and their number. None: the algorithm has no kernels
    /// that wait for each other, and nothing is captured.
    #[track_caller]
    pub(super) fn capture_by(
        &self,
        request: &Request,
        case: &Case<'_>,
        algorithm: &dyn Algorithm,
        access: &mut Op<'_>,
    ) -> Result<Option<(DeviceBarrier, usize)>> {
        let needs = algorithm.needs(case);
        let Meeting::Kernels { launches, in_full } = needs.meeting else { return Ok(None) };
        self.dev.worker.spinning.check_not_blocked(request.call.op(), request.call.site)?;
        let scratch = scratch::take(self, request, needs.scratch, access)?;
        let met = Descriptors::of(self, request, scratch.as_ref(), in_full, false)?;
        let (shape, barrier) = (met.shape(self, request)?, self.barrier_of_kernels(0));
        // Nothing is launched yet, so nothing can be owed.
        let executor = MemberThread { group: self, request };
        let member = executor.member(case.limits, scratch.as_ref(), barrier);
        algorithm.submit(&member, &Matched { met: &met, shape: &shape })?;
        Ok(Some((barrier, launches)))
    }

    /// The call as all members see it.
    pub(super) fn case<'c>(&self, request: &'c Request, limits: &'c Limits) -> Case<'c> {
        let machine = Machine::of(&self.dev.worker.shared);
        let machine = Machine { rank_order: machine.rank_order || request.rank_order, ..machine };
        Case::new(
            (machine, limits),
            (self.count(), self.membership.direct),
            (request.dtype, request.reduce),
            request.shape.as_ref(),
            self.dev.recording.is_some(),
        )
    }

    /// What calls that do not overlap with other work may take of the devices.
    pub(super) fn limits(&self) -> &Limits {
        &self.dev.worker.shared.limits
    }

    /// The barrier of the members' kernels, in the gang at this place (0: in a graph).
    fn barrier_of_kernels(&self, place: u64) -> DeviceBarrier {
        let pad = self.pad().expect("an algorithm by kernels is chosen where they can meet");
        DeviceBarrier {
            signals: pad.address(self.dev.index()),
            members: self.packed().0,
            place,
            deadline: u64::try_from(self.dev.worker.shared.deadline.as_nanos()).unwrap_or(0),
            count: self.count() as u32,
            me: self.rank as u32,
            spare: 0,
        }
    }

    fn pad(&self) -> Option<&SignalPad> {
        self.dev.worker.shared.signals.get().map(|pad| &**pad)
    }

    /// Announces what a collective touches of this member's memory.
    #[track_caller]
    pub(super) fn access(&self, request: &Request) -> Result<Op<'_>> {
        let mut access = self.dev.op_in_graph(request.call.op())?;
        if let Some(source) = &request.source {
            access.touch(&source.block, source.bytes.clone(), Access::Read, false)?;
        }
        if let Some(destination) = &request.destination {
            access.touch(&destination.block, destination.bytes.clone(), Access::Write, false)?;
        }
        for (area, how) in &request.beside {
            access.touch(&area.block, area.bytes.clone(), *how, false)?;
        }
        access.reserve()?;
        Ok(access)
    }

    /// A committed collective that touches these blocks has failed here. The blocks are kept until the gang has
    /// drained.
    pub(super) fn fail_on<'b>(&self, blocks: impl Iterator<Item = &'b BlockRef>, cause: &Error) {
        let dev = self.dev;
        dev.worker.quarantine.borrow_mut().extend(blocks.cloned());
        // The peers count on this member; they must not wait for it.
        if !matches!(cause, Error::Aborted { .. }) {
            dev.session.gang.poison(dev.index(), cause.clone());
        }
    }
}

impl Machine {
    /// The capabilities of a pool, and the wishes of its builder.
    pub(crate) fn of(shared: &Shared) -> Machine {
        let handle = &shared.handles[0];
        let barrier = match shared.signals.get() {
            None => KernelBarrier::None,
            Some(pad) if pad.have_stages() => KernelBarrier::InHost { ll: pad.ll_bytes() },
            Some(pad) if pad.layout().registers > 0 => {
                let PadLayout { inbox, inbox_slot, .. } = pad.layout();
                KernelBarrier::OnSoftware { inbox, inbox_slot }
            }
            Some(pad) => {
                let (ll, eager, PadLayout { inbox, inbox_slot, .. }) =
                    (pad.ll_bytes(), pad.eager_bytes(), pad.layout());
                KernelBarrier::OnDevices { ll, eager, inbox, inbox_slot }
            }
        };
        Machine {
            software: handle.driver.info().compute_capability == (0, 0),
            virtual_time: handle.in_virtual_time(),
            barrier,
            alone: matches!(barrier, KernelBarrier::InHost { .. })
                && shared.handles.iter().all(|handle| handle.sharers == 1),
            wish: shared.algorithm,
            rank_order: shared.reduce_order == ReduceOrder::Rank,
        }
    }
}

/// The device thread of a member, as the algorithm uses it.
struct MemberThread<'g> {
    group: &'g Group<'g>,
    request: &'g Request,
}

impl<'g> MemberThread<'g> {
    /// The member's part, as a value.
    fn member<'a>(&'a self, limits: &'a Limits, scratch: Option<&'a Area>, barrier: DeviceBarrier) -> Member<'a> {
        let dev = self.group.dev;
        Member {
            request: self.request,
            limits,
            rank: self.group.rank,
            ordinals: self.group.ordinals(),
            handle: &dev.worker.handle,
            stream: &dev.stream,
            pad: self.group.pad(),
            scratch,
            barrier,
            launched: Cell::new(0),
            deadline: dev.worker.shared.deadline,
            executor: self,
        }
    }
}

impl Executor for MemberThread<'_> {
    fn send_step(&self, peer: usize, done: Event) -> Result<()> {
        self.group.post_step(&self.request.call, peer, done)
    }

    fn take_step(&self, peer: usize) -> Result<Event> {
        self.group.receive_step(&self.request.call, peer)
    }

    fn engines(&self) -> Result<[Arc<StreamCore>; 2]> {
        self.group.dev.worker.engines()
    }

    fn copy(&self, stream: &Arc<StreamCore>, to: RemotePtr, from: RemotePtr, bytes: usize) -> Result<()> {
        peer::copy(&self.group.dev.worker, stream, to.address, to.device, from.address, from.device, bytes)
    }

    fn function(&self, entry: &Entry) -> Result<RawFunction> {
        self.group.dev.worker.function(entry.module, entry.name)
    }

    fn note_blocks(&self, blocks: u32) -> bool {
        let dev = self.group.dev;
        dev.worker.spinning.note_blocks(dev.recording.is_some(), blocks)
    }

    fn is_aborted(&self) -> bool {
        self.group.dev.session.gang.is_aborted()
    }

    fn aborted(&self) -> Option<Error> {
        self.group.dev.session.gang.aborted()
    }
}
