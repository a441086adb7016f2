//! Carries a collective out: what every algorithm needs is done here, once.
//!
//! ```text
//! access    the member's buffers: the current stream waits for conflicting work
//! scratch   what the algorithm needs besides
//! meet      all members have called the same; commit, or nobody begins
//! submit    the algorithm's part
//! settle    the uses are noted; a failure fails the gang
//! ```
//!
//! **The exit rule**: when a member's stream has passed the collective, no peer touches the member's memory any more.
//! So what comes next on that stream may write it, and its memory pool may reuse it, without a look at other devices.

use super::{
    Group,
    algorithm::{Algorithm, Matched, Meeting, Member, Scratch},
    barrier::{self, Met, Missed},
    board::{Lent, Notice, Payload},
    choose::{Case, Machine, choose},
    kernels::Meet,
    plan::Shape,
    request::Request,
    scratch::{self, InFlight},
    signals::Signals,
    tuner::Limits,
};
use crate::{
    Event,
    error::{Error, Result},
    memory::{block::BlockRef, hazard::Access},
    token::op::Op,
};
use std::{cell::Cell, sync::Arc};

impl Group<'_> {
    /// Carries a collective out, or captures it. Asynchronous on the current stream.
    #[track_caller]
    pub(super) fn run(&self, request: Request) -> Result<()> {
        match &self.dev.recording {
            Some(recording) => self.capture(recording, request),
            None => self.carry(&request, self.limits()),
        }
    }

    /// Carries a collective out, by the algorithm that is right within these limits. All members give the same.
    #[track_caller]
    pub(super) fn carry(&self, request: &Request, limits: &Limits) -> Result<()> {
        let case = self.case(request, limits);
        self.carry_by(request, &case, choose(&case).0)
    }

    /// [`carry`](Self::carry) by a given algorithm. All members give the same, and one that can.
    #[track_caller]
    pub(super) fn carry_by(&self, request: &Request, case: &Case<'_>, algorithm: &dyn Algorithm) -> Result<()> {
        let (dev, name) = (self.dev, request.call.op());
        let needs = algorithm.needs(case);
        let mut access = self.access(request)?;
        let (by_kernels, on_host) =
            (matches!(needs.meeting, Meeting::Kernels { .. }), matches!(needs.scratch, Scratch::Host(_)));
        if by_kernels {
            barrier::prepare(dev, name, request.call.site)?;
        }
        if on_host {
            InFlight::room(dev, name)?;
        }
        let scratch = scratch::take(self, request, needs.scratch, &mut access)?;
        let blocks = || request.areas().chain(&scratch).map(|area| &area.block);
        let mut owed = Missed { meet: Meet::NONE, times: 0 };
        let (met, window) = match needs.meeting {
            Meeting::Kernels { launches, in_full } => {
                // From the commit on the others count on this member's launches, whatever comes of it: each launches,
                // and each pair counts.
                owed = Missed { meet: barrier::of(self, self.signals(), dev.session.gang.place()), times: launches };
                let meeting = || Met::of(self, request, scratch.as_ref(), in_full, true);
                let (met, window) = barrier::commit_by(self, owed, blocks().cloned(), meeting)?;
                (met, Some(window))
            }
            Meeting::Events | Meeting::Host => {
                let events = needs.meeting == Meeting::Events && self.count() > 1;
                let ready = events.then(|| Event::record(&dev.stream, name, false)).transpose()?;
                let (stage, inbox) = match &scratch {
                    Some(area) if on_host => (Some(area.clone()), None),
                    area => (None, area.as_ref().map(|area| (area.address, area.bytes.len()))),
                };
                let lent = Lent { stage, inbox, ..request.lend(ready) };
                (Met::InFull(self.meet(request.call.clone(), Payload::Memory(lent), false)?), None)
            }
        };
        let shape = match met.shape(self, request) {
            Ok(shape) => shape,
            // Every member finds the same, and none has begun: nobody touches anything. Kernels are counted all the
            // same.
            Err(error) => {
                let counted = match by_kernels {
                    true => {
                        debug_assert_eq!(owed.times, 1, "what launches more is of a shape that is known");
                        barrier::count(&dev.worker, &dev.stream, name, owed.meet)
                    }
                    false => return Err(error),
                };
                drop(window);
                access.submitted();
                barrier::end(dev, owed, &counted);
                return Err(counted.inspect_err(|cause| self.fail_on(blocks(), cause)).err().unwrap_or(error));
            }
        };
        let member = Member {
            group: self,
            request,
            limits: case.limits,
            scratch: scratch.as_ref(),
            barrier: owed.meet,
            launched: Cell::new(0),
        };
        let submitted = algorithm.submit(&member, &Matched { met: &met, shape: &shape });
        drop(window);
        access.submitted();
        if by_kernels {
            owed.times -= member.launched.get().min(owed.times);
            barrier::end(dev, owed, &submitted);
        }
        if on_host {
            InFlight::note(dev);
        }
        // Peers may have accesses to these blocks under way that no event of this member covers.
        submitted.inspect_err(|cause| self.fail_on(blocks(), cause))
    }

    /// Captures the kernels of a collective. The members meet now, on the host; their kernels do whenever the graph is
    /// launched, in whichever gang. Returns their barrier, and how many they are; none if the algorithm has no kernels
    /// that wait for each other: then nothing is captured.
    #[track_caller]
    pub(super) fn capture_by(
        &self,
        request: &Request,
        case: &Case<'_>,
        algorithm: &dyn Algorithm,
        access: &mut Op<'_>,
    ) -> Result<Option<(Meet, usize)>> {
        let needs = algorithm.needs(case);
        let Meeting::Kernels { launches, in_full } = needs.meeting else { return Ok(None) };
        barrier::check_not_blocked(self.dev, request.call.op(), request.call.site)?;
        let scratch = scratch::take(self, request, needs.scratch, access)?;
        let met = Met::of(self, request, scratch.as_ref(), in_full, false)?;
        let (shape, barrier) = (met.shape(self, request)?, barrier::of(self, self.signals(), 0));
        // Nothing is launched yet, so nothing can be owed.
        let (limits, launched) = (case.limits, Cell::new(0));
        let member = Member { group: self, request, limits, scratch: scratch.as_ref(), barrier, launched };
        algorithm.submit(&member, &Matched { met: &met, shape: &shape })?;
        Ok(Some((barrier, launches)))
    }

    /// The call, as all members see it.
    pub(super) fn case<'c>(&self, request: &'c Request, limits: &'c Limits) -> Case<'c> {
        Case::new(
            (Machine::of(&self.dev.worker.shared), limits),
            (self.count(), self.known.direct),
            (request.dtype, request.reduce),
            request.shape.as_ref(),
            self.dev.recording.is_some(),
        )
    }

    /// From which size on which algorithm is right for this group.
    pub(super) fn limits(&self) -> &Limits {
        self.dev.worker.shared.limits().of(self.count())
    }

    /// Where kernels wait for each other.
    fn signals(&self) -> &Signals {
        self.dev.worker.shared.signals.get().expect("an algorithm by kernels is chosen where they can meet")
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
        Ok(access)
    }

    /// A committed collective that touches these blocks has failed here. The blocks are kept until the gang has
    /// drained.
    pub(super) fn fail_on<'b>(&self, blocks: impl Iterator<Item = &'b BlockRef>, cause: &Error) {
        let dev = self.dev;
        dev.worker.suspects.borrow_mut().extend(blocks.cloned());
        // The peers count on this member; they must not wait for it.
        if !matches!(cause, Error::Aborted { .. }) {
            dev.session.gang.poison(dev.index(), cause.clone());
        }
    }

    /// Of `all_to_all_v`: what all members say together.
    pub(super) fn shape(&self, notices: &[Arc<Notice>]) -> Result<Shape> {
        let counts = |notice: &Arc<Notice>| barrier::exposed(notice).counts.clone().expect("all_to_all says how much");
        let (send, receive) = notices.iter().map(counts).unzip();
        let shape = Shape::AllToAll { send, receive };
        match shape.disagreement(self.count()) {
            None => Ok(shape),
            // Every member finds the same, and none has begun.
            Some((a, b)) => Err(self.not_what_is_expected((a, b), &shape, notices)),
        }
    }

    /// Member `a` sends member `b` another number of elements than `b` expects.
    fn not_what_is_expected(&self, (a, b): (usize, usize), shape: &Shape, notices: &[Arc<Notice>]) -> Error {
        let mut error = self.mismatch("counts", (a, &notices[a].call), (b, &notices[b].call));
        if let (Error::Mismatch { a_call, b_call, .. }, Shape::AllToAll { send, receive }) = (&mut error, shape) {
            let (out, into) = (send[a].part(b).len(), receive[b].part(a).len());
            *a_call = format!("all_to_all_v({out} elements for member {b})");
            *b_call = format!("all_to_all_v({into} elements from member {a})");
        }
        error
    }
}
