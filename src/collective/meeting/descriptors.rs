//! Every member tells every other one its call. When it has read all descriptors and they match, it commits the
//! sequence number on the group's word ([`commit`](super::commit)).
//!
//! Invariant: a collective runs on all members or on none. A member that fails before the commit aborts the gang's
//! word. A mismatch is found by every member alike, and no buffer is touched.

use super::{Meeting, note_call};
use crate::{
    collective::Request,
    driver::Address,
    error::{Error, Result},
    fabric::{Area, Body, Call, CompactDescriptor, Descriptor, Exposed, Origin, Payload, RecvScratch, Shape, Side},
};
use smallvec::{SmallVec, smallvec};
use std::{borrow::Cow, sync::Arc};

#[allow(
    clippy::large_enum_variant,
    reason = "it lives on the stack for the length of one call, and a box is an allocation"
)]
pub(crate) enum Descriptors {
    Compact(SmallVec<[CompactDescriptor; 8]>),
    Full(SmallVec<[Arc<Descriptor>; 8]>),
}

impl Descriptors {
    /// Meets the others for a collective whose kernels wait for each other. With `commits`, the launch gate is open
    /// when this returns `Ok`. Either all members send full descriptors (`in_full`), or all send compact ones.
    pub(crate) fn meet(
        meeting: &Meeting<'_>,
        request: &Request,
        scratch: Option<&Area>,
        in_full: bool,
        commits: bool,
    ) -> Result<Descriptors> {
        let address = |side| request.area(side).map_or(0, |area| area.address);
        let addresses = [Side::Source, Side::Destination].map(address);
        let fits = !in_full && request.shape.is_some();
        match fits.then(|| CompactDescriptor::of(&request.call, meeting.packed(), addresses)).flatten() {
            Some(own) => meeting.meet_compact(own, &request.call, commits).map(Descriptors::Compact),
            None => {
                let exposed = Exposed { scratch: scratch.map(RecvScratch::of), ..request.expose(None) };
                meeting.meet(request.call.clone(), Payload::Memory(exposed), commits).map(Descriptors::Full)
            }
        }
    }

    /// The shape of the collective: the request's, or what the members' descriptors give together.
    pub(crate) fn shape<'r>(&self, meeting: &Meeting<'_>, request: &'r Request) -> Result<Cow<'r, Shape>> {
        match (&request.shape, self) {
            (Some(shape), _) => Ok(Cow::Borrowed(shape)),
            (None, Descriptors::Full(all)) => meeting.shape(all).map(Cow::Owned),
            (None, Descriptors::Compact(_)) => unreachable!("a compact descriptor is of a shape that is known"),
        }
    }

    pub(crate) fn factor(&self, member: usize) -> f64 {
        match self {
            Descriptors::Compact(all) => all[member].factor(),
            Descriptors::Full(all) => all[member].exposed().factor,
        }
    }

    pub(crate) fn address(&self, member: usize, side: Side) -> Address {
        match self {
            Descriptors::Compact(all) => all[member].address(side),
            Descriptors::Full(all) => all[member].exposed().area(side).address,
        }
    }

    /// All that a member exposes. Panics when the descriptors are compact.
    pub(crate) fn exposed(&self, member: usize) -> &Exposed {
        match self {
            Descriptors::Compact(_) => unreachable!("algorithms that need more ask for full descriptors"),
            Descriptors::Full(all) => all[member].exposed(),
        }
    }
}

impl Meeting<'_> {
    /// Meets all members of the group. Returns their descriptors by rank, with this member's own. After `Ok` the call
    /// is committed: every member carries it out. `spins`: by kernels that wait for each other.
    pub(crate) fn meet(&self, call: Call, payload: Payload, spins: bool) -> Result<SmallVec<[Arc<Descriptor>; 8]>> {
        let dev = self.dev;
        if call.origin != Origin::CAPTURE {
            dev.not_in_graph_at(call.site, call.op)?;
        }
        let gang = &dev.session.gang;
        gang.check()?;
        let _entry = note_call(dev, &call, self.ordinals());
        dev.worker.handle.progress.advance();
        let own = Arc::new(Descriptor { call, group: self.ranks().clone(), payload });
        // A member that has left spoils this meeting, but not the next one of the members that stay. So this member
        // still sends its descriptor to them, and takes theirs out of the rings.
        let mut absent = None;
        self.post_to_all(&own.call, || Body::Full(own.clone()), &mut absent)?;
        let mut all: SmallVec<[Arc<Descriptor>; 8]> = smallvec![own.clone(); self.count()];
        let mut compact: SmallVec<[(usize, Call); 2]> = SmallVec::new();
        self.receive_all(&own.call, &mut absent, |member, body| {
            match body {
                Body::Full(theirs) if theirs.group == *self.ranks() => all[member] = theirs,
                Body::Full(theirs) => return Err(self.other_group(&own.call, member, &theirs.call)),
                Body::Compact(theirs) if self.membership.packed != Some(theirs.members()) => {
                    return Err(self.other_group(&own.call, member, &theirs.call()));
                }
                Body::Compact(theirs) => compact.push((member, theirs.call())),
                Body::Broadcast(_) | Body::Step(_) => unreachable!("opened; and steps end with their collective"),
            }
            Ok(())
        })?;
        if let Some(error) = absent {
            return Err(error);
        }
        if !compact.is_empty() || all.iter().skip(1).any(|theirs| all[0].call.differs(&theirs.call).is_some()) {
            let theirs = |member| compact.iter().find(|(at, _)| *at == member).map(|(_, call)| call.clone());
            return Err(self.differing(|member| theirs(member).unwrap_or_else(|| all[member].call.clone())));
        }
        self.commit(spins)?;
        Ok(all)
    }

    /// `Ok`: committed, and with `spins` the launch gate is open.
    pub(crate) fn meet_compact(
        &self,
        own: CompactDescriptor,
        call: &Call,
        spins: bool,
    ) -> Result<SmallVec<[CompactDescriptor; 8]>> {
        let dev = self.dev;
        let gang = &dev.session.gang;
        dev.worker.shared.check_kernels(gang);
        gang.check()?;
        let _entry = note_call(dev, call, self.ordinals());
        let mut absent = None;
        if !self.post_broadcast(&own) {
            self.post_to_all(call, || Body::Compact(own), &mut absent)?;
        }
        let mut all: SmallVec<[CompactDescriptor; 8]> = smallvec![own; self.count()];
        let mut full: SmallVec<[(usize, Arc<Descriptor>); 2]> = SmallVec::new();
        self.receive_all(call, &mut absent, |member, body| {
            match body {
                Body::Compact(theirs) if theirs.members() != own.members() => {
                    return Err(self.other_group(call, member, &theirs.call()));
                }
                Body::Compact(theirs) => all[member] = theirs,
                Body::Full(theirs) if theirs.group != *self.ranks() => {
                    return Err(self.other_group(call, member, &theirs.call));
                }
                Body::Full(theirs) => full.push((member, theirs)),
                Body::Broadcast(_) | Body::Step(_) => unreachable!("opened; and steps end with their collective"),
            }
            Ok(())
        })?;
        if let Some(error) = absent {
            return Err(error);
        }
        if !full.is_empty() || !all.iter().all(|theirs| theirs.matches(&own)) {
            let theirs = |member| full.iter().find(|(at, _)| *at == member).map(|(_, full)| full.call.clone());
            return Err(self.differing(|member| theirs(member).unwrap_or_else(|| all[member].call())));
        }
        self.commit(spins)?;
        Ok(all)
    }

    /// The error for calls that do not all match. Members compare in one order, so all report one pair.
    fn differing(&self, call: impl Fn(usize) -> Call) -> Error {
        let first = call(0);
        let differs = |member: usize| first.differs(&call(member)).map(|what| (what, member));
        let (what, member) = (1..self.count()).find_map(differs).unwrap_or(("call", self.count() - 1));
        self.mismatch(what, (0, &first), (member, &call(member)))
    }

    /// The error for a member that calls another group. It fails the gang: else the others would not hear of it.
    fn other_group(&self, call: &Call, member: usize, theirs: &Call) -> Error {
        let error = self.mismatch("group", (self.rank, call), (member, theirs));
        self.dev.session.gang.poison(self.dev.index(), error.clone());
        error
    }

    /// Of `all_to_all_v`: the shape, from all members' counts.
    fn shape(&self, descriptors: &[Arc<Descriptor>]) -> Result<Shape> {
        let counts = |of: &Arc<Descriptor>| of.exposed().counts.clone().expect("all_to_all says how much");
        let (send, receive) = descriptors.iter().map(counts).unzip();
        let shape = Shape::AllToAll { send, receive };
        match shape.disagreement(self.count()) {
            None => Ok(shape),
            Some((a, b)) => Err(self.not_what_is_expected((a, b), &shape, descriptors)),
        }
    }

    /// The error for a member `a` that sends member `b` another number of elements than `b` expects.
    fn not_what_is_expected(&self, (a, b): (usize, usize), shape: &Shape, descriptors: &[Arc<Descriptor>]) -> Error {
        let mut error = self.mismatch("counts", (a, &descriptors[a].call), (b, &descriptors[b].call));
        if let (Error::Mismatch { a_call, b_call, .. }, Shape::AllToAll { send, receive }) = (&mut error, shape) {
            let (out, into) = (send[a].part(b).len(), receive[b].part(a).len());
            *a_call = format!("all_to_all_v({out} elements for member {b})");
            *b_call = format!("all_to_all_v({into} elements from member {a})");
        }
        error
    }
}
