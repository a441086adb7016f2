//! Carries a [`Plan`] out, piece by piece: while one piece is between the processes, the steps inside the process work
//! on others. One way for all kinds of memory: [`Rail`] has what differs.
//!
//! ```text
//! member     before 0 | before 1 | .. | meet | after 0 | after 1 | ..
//! rail                                   rail 0 | rail 1 | ..
//! ```
//!
//! All steps before are submitted, and their results staged, before the member arrives. There is one meeting for all
//! pieces. [`pending`](super::pending) lets the member do other work behind [`begin`], until [`end`]. Invariants: all
//! members do the steps of all pieces in one order, so waits for members of this process and waits for other processes
//! form no circle. A step inside that fails makes the gang fail immediately, so that no member of this process waits
//! for one that has given up. Then the messages go on without steps inside, since the other processes count on them.

use super::cut::Cut;
use super::device_rail::{self, DeviceRail};
use super::hierarchical::{Carrier, HierarchicalCall};
use super::host_rail::{self, HostRail};
use super::plan::Plan;
use super::relay::Relay;
use super::shared_rail::SharedRail;
use crate::runtime::{Area, Contained, Payload, Request, Shape, value_of};
use crate::traits::Commit;
use gpu_pool::Result;

/// A member's way to the other processes, for the pieces of one collective.
pub(super) trait Rail {
    type Piece: Landed;

    /// Takes the memory of a piece. Returns where the step before the rail puts this member's elements.
    fn add(&mut self, plan: &Plan<'_, '_, '_>, cut: &Cut<'_>) -> Result<Area>;

    /// Asynchronous: that step of the last piece has been submitted.
    fn stage(&mut self, plan: &Plan<'_, '_, '_>) -> Result<()>;

    /// All members of all processes meet, when all pieces are staged.
    fn meet(&mut self, plan: &Plan<'_, '_, '_>) -> Result<()>;

    /// Carries the next piece. None: all are there. After an error the other processes wait.
    fn carry_next(&mut self) -> Result<Option<Self::Piece>>;
}

/// A rail by the hosts' memory. It needs no gang or device once its pieces are staged, so another thread may carry it.
pub(super) trait HostSide: Rail<Piece: Send> + Send + 'static {
    /// Waits until all pieces are staged.
    fn staged(&self) -> Result<()>;

    /// This member's note to all processes at the meeting.
    fn note(&self) -> Vec<u8>;

    /// `proxied`: as it is told in the [`Arrival`](crate::traits::Arrival).
    fn committed(&mut self, commit: Commit, proxied: bool) -> Result<()>;

    /// [`Rail::meet`] of such a rail.
    fn meet_here(&mut self, plan: &Plan<'_, '_, '_>) -> Result<()> {
        self.staged()?;
        let note = Payload::Value(Contained::new(Box::new(self.note())));
        let (_, commit) =
            plan.hier.meet(note, |told| told.iter().flat_map(|told| value_of::<Vec<u8>>(told)).collect())?;
        plan.hier.done(self.committed(commit, false))
    }
}

pub(super) trait Landed {
    /// Returns where the step behind the rail finds it.
    fn land(self, plan: &Plan<'_, '_, '_>) -> Result<Area>;
}

pub(super) fn run(hier: &HierarchicalCall<'_, '_>, request: &Request, shape: &Shape) -> Result<()> {
    let Some(plan) = Plan::new(hier, (request.dtype, request.reduce), shape) else {
        unreachable!("what sends other elements to each member is elsewhere")
    };
    match hier.carrier()? {
        Carrier::Host(transport) => {
            let cuts = host_rail::cuts(&plan);
            match hier.common_memory(&transport) {
                Some(memory) => carry(&plan, request, &cuts, SharedRail::new(&plan, &cuts, memory)?),
                None => carry(&plan, request, &cuts, HostRail::new(&plan, transport)),
            }
        }
        Carrier::Device(transport) => {
            let (cuts, overlapped) = device_rail::cuts(&plan, &*transport);
            let relay = Relay::new(hier, transport, overlapped)?;
            if let Some(direct) = relay.direct(&plan, request.reduce, request.own.is_some()) {
                return relay.call_directly(&plan, request, direct);
            }
            hier.overlap(overlapped);
            carry(&plan, request, &cuts, DeviceRail::new(&relay))
        }
    }
}

fn carry(plan: &Plan<'_, '_, '_>, request: &Request, cuts: &[Cut<'_>], mut rail: impl Rail) -> Result<()> {
    begin(plan, request, cuts, &mut rail)?;
    rail.meet(plan)?;
    end(plan, request, cuts, &mut || plan.hier.done(rail.carry_next()))
}

/// The steps before the rail.
pub(super) fn begin(plan: &Plan<'_, '_, '_>, request: &Request, cuts: &[Cut<'_>], rail: &mut impl Rail) -> Result<()> {
    for cut in cuts {
        let to = rail.add(plan, cut)?;
        plan.hier.inside(plan.dtype, plan.inner, plan.before(cut), [&plan.from(request, cut), &to])?;
        plan.hier.done(rail.stage(plan))?;
    }
    Ok(())
}

/// The steps behind the rail. `next` gives the pieces, also after a failure inside: other processes count on them.
pub(super) fn end<P: Landed>(
    plan: &Plan<'_, '_, '_>,
    request: &Request,
    cuts: &[Cut<'_>],
    next: &mut dyn FnMut() -> Result<Option<P>>,
) -> Result<()> {
    let (hier, mut inside, mut rest) = (plan.hier, Ok(()), cuts.iter());
    while let (Some(piece), Some(cut)) = (next()?, rest.next()) {
        if inside.is_err() {
            continue;
        }
        let (shape, to) = (plan.after(cut), plan.to(request, cut));
        inside = hier.done(piece.land(plan).and_then(|from| hier.inside(plan.dtype, None, shape, [&from, &to])));
    }
    inside
}
