//! Carries a collective out: it does once what every algorithm needs.
//!
//! ```text
//! access    the member's buffers: the current stream waits for conflicting work
//! scratch   the other memory that the algorithm needs
//! meet      all members have called one collective; they commit, or none begins
//! submit    the algorithm's part
//! settle    the uses of the memory are noted; a failure fails the gang
//! ```
//!
//! **The exit rule**: when a member's stream has passed the collective, no peer touches the member's memory any more.
//! So the next work on that stream may write it, and the member's memory pool may reuse it.

use super::algorithm::{Algorithm, Matched};
use super::{
    Descriptors, LaunchWindow, MeetBy, Meeting, Member, Request, Scratch, barrier, case::Case, choose::choose, scratch,
};
use crate::error::{Error, Result};
use crate::fabric::{DeviceBarrier, Exposed, Limits, Payload, RecvScratch, SkippedBarrier};
use crate::memory::{Access, BlockRef};
use crate::{Device, Event, timeline::Route, token::op::Op};

/// By the right algorithm within these limits, or by a `given` one, which must be able to; equal on all members.
#[track_caller]
pub(super) fn execute(
    meeting: Meeting<'_>,
    request: &Request,
    limits: &Limits,
    given: Option<&dyn Algorithm>,
) -> Result<()> {
    let (dev, name) = (meeting.dev, request.call.op);
    let case = Case::of(&meeting, request, limits);
    let algorithm = given.unwrap_or_else(|| choose(&case).0);
    let needs = algorithm.needs(&case);
    let mut access = access(dev, request)?;
    dev.worker.calls.algorithm(algorithm.name(), access.site);
    let members =
        || meeting.ordinals().iter().fold(0, |bits, &device| bits | 1u64.checked_shl(device as u32).unwrap_or(0));
    access.route_by(|| Route { algorithm: algorithm.name(), waits_by: algorithm.waits_by(), members: members() });
    let (by_kernels, on_host) =
        (matches!(needs.meeting, MeetBy::Kernels { .. }), matches!(needs.scratch, Scratch::Host(_)));
    if by_kernels {
        dev.worker.barrier_state.prepare(name, request.call.site, &dev.stream)?;
    }
    if on_host {
        dev.worker.staging_calls.room(name, dev.worker.shared.deadline, &dev.session.gang)?;
    }
    let scratch = scratch::take(dev, request, needs.scratch, &mut access)?;
    let blocks = || request.areas().chain(&scratch).map(|area| &area.block);
    let mut owed = SkippedBarrier { barrier: DeviceBarrier::NONE, times: 0 };
    let (met, window) = match needs.meeting {
        MeetBy::Kernels { launches, in_full } => {
            // From the commit on, the others count on this member's launches: every member launches, every pair counts.
            owed = SkippedBarrier { barrier: barrier_of_kernels(&meeting, dev.session.gang.place()), times: launches };
            let number = meeting.next_number();
            let met = Descriptors::meet(&meeting, request, scratch.as_ref(), in_full, true);
            let met = met.inspect_err(|_| meeting.skip_launch(number, owed, blocks().cloned()))?;
            (met, Some(LaunchWindow::of(dev)))
        }
        MeetBy::Events | MeetBy::Host => {
            let events = needs.meeting == MeetBy::Events && meeting.count() > 1;
            let ready = events.then(|| Event::record(&dev.stream, name, false)).transpose()?;
            let (stage, scratch) = match &scratch {
                Some(area) if on_host => (Some(area.clone()), None),
                area => (None, area.as_ref().map(RecvScratch::of)),
            };
            let exposed = Exposed { stage, scratch, ..request.expose(ready) };
            let number = meeting.next_number();
            let met = meeting.meet(request.call.clone(), Payload::Memory(exposed), false);
            let met = met.inspect_err(|_| _ = meeting.keep_if_committed(number, blocks().cloned()))?;
            (Descriptors::Full(met), None)
        }
    };
    let shape = match met.shape(&meeting, request) {
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
            dev.worker.barrier_state.launched(&dev.stream, owed, &counted);
            return Err(counted.inspect_err(|cause| fail_on(dev, blocks(), cause)).err().unwrap_or(error));
        }
    };
    let member = Member::new(meeting, request, limits, scratch.as_ref(), owed.barrier);
    let submitted = algorithm.submit(&member, &Matched { met: &met, shape: &shape });
    drop(window);
    access.submitted();
    if by_kernels {
        owed.times -= member.launched.get().min(owed.times);
        dev.worker.barrier_state.launched(&dev.stream, owed, &submitted);
    }
    if on_host {
        dev.worker.staging_calls.note(&dev.stream);
    }
    // Peers may have accesses to these blocks in flight that no event of this member covers.
    submitted.inspect_err(|cause| fail_on(dev, blocks(), cause))
}

/// Captures the kernels of a collective. The members meet now, on the host; their kernels meet at each launch of
/// the graph, in whichever gang. Returns the kernels' barrier and their number. None: the algorithm has no kernels
/// that wait for each other, and nothing is captured.
#[track_caller]
pub(super) fn capture(
    meeting: Meeting<'_>,
    request: &Request,
    case: &Case<'_>,
    algorithm: &dyn Algorithm,
    access: &mut Op<'_>,
) -> Result<Option<(DeviceBarrier, usize)>> {
    let needs = algorithm.needs(case);
    let MeetBy::Kernels { launches, in_full } = needs.meeting else { return Ok(None) };
    meeting.dev.worker.barrier_state.check_not_blocked(request.call.op, request.call.site)?;
    let scratch = scratch::take(meeting.dev, request, needs.scratch, access)?;
    let met = Descriptors::meet(&meeting, request, scratch.as_ref(), in_full, false)?;
    let (shape, barrier) = (met.shape(&meeting, request)?, barrier_of_kernels(&meeting, 0));
    // Nothing is launched yet, so nothing can be owed.
    let member = Member::new(meeting, request, case.limits, scratch.as_ref(), barrier);
    algorithm.submit(&member, &Matched { met: &met, shape: &shape })?;
    Ok(Some((barrier, launches)))
}

fn barrier_of_kernels(meeting: &Meeting<'_>, place: u64) -> DeviceBarrier {
    let (pad, dev) = (meeting.pad(), meeting.dev);
    let pad = pad.expect("an algorithm by kernels is chosen where they can meet");
    DeviceBarrier {
        signals: pad.address(dev.index()),
        members: meeting.packed().0,
        place,
        deadline: u64::try_from(dev.worker.shared.deadline.as_nanos()).unwrap_or(0),
        count: meeting.count() as u32,
        me: meeting.rank as u32,
        spare: 0,
    }
}

#[track_caller]
pub(super) fn access<'d>(dev: &'d Device, request: &Request) -> Result<Op<'d>> {
    let mut access = dev.op_in_graph(request.call.op)?;
    if let Some(source) = &request.source {
        access.touch(&source.block, source.bytes.clone(), Access::Read, false)?;
    }
    if let Some(destination) = &request.destination {
        access.touch(&destination.block, destination.bytes.clone(), Access::Write, false)?;
    }
    for (area, how) in &request.extra {
        access.touch(&area.block, area.bytes.clone(), *how, false)?;
    }
    access.reserve()?;
    Ok(access)
}

pub(super) fn fail_on<'b>(dev: &Device, blocks: impl Iterator<Item = &'b BlockRef>, cause: &Error) {
    dev.worker.quarantine.borrow_mut().extend(blocks.cloned());
    // The peers count on this member; they must not wait for it.
    if !matches!(cause, Error::Aborted { .. }) {
        dev.session.gang.poison(dev.index(), cause.clone());
    }
}
