//! The meeting in short: for collectives whose kernels meet on the devices, all that a peer needs fits into a message.
//!
//! A [`Notice`](super::board::Notice) is shared memory: a peer that reads it fetches its lines from the sender's cache
//! one by one, and lets go of it by a locked instruction on one more. With a message per peer that is what a meeting
//! costs, so here there is nothing behind the message. The peers' memory is not kept alive by it either: a member's
//! stream passes the collective only after the peers' kernels (the exit rule), and its own hazards keep it until then.
//!
//! To the members of the whole gang it goes as a [headline](super::headlines), which they all read: one line of the
//! cache each way.

use super::{
    DType, Group, ReduceOp,
    board::{Body, Notice},
    call::{Call, LAUNCH, Origin},
    headlines::Words,
    names::{self, Name, Spot},
    plan::Side,
    request::Request,
};
use crate::{
    driver::Address,
    error::{Error, Result, Site},
};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// In a byte of a headline: nothing.
const NONE: u64 = 0xff;
/// By what stands for them there; the one with a factor comes after them.
const REDUCTIONS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg];

/// What a member tells the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Brief {
    origin: Origin,
    op: Name,
    site: Spot,
    count: usize,
    reduce: Option<ReduceOp>,
    /// Ordinals of the group's members, 4 bits each, by rank; and how many.
    members: (u64, u8),
    dtype: Option<DType>,
    root: Option<u32>,
    source: Address,
    destination: Address,
}

impl Brief {
    /// In short, if it can be said so.
    pub(super) fn of(request: &Request, members: (u64, u8)) -> Option<Brief> {
        let call = &request.call;
        let (op, site, count, dtype, root) = call.in_short()?;
        let address = |side| request.area(side).map_or(0, |area| area.address);
        request.shape.as_ref()?;
        let (op, site) = names::numbers(op, site);
        Some(Brief {
            origin: call.origin,
            op,
            site,
            count,
            reduce: call.reduction(),
            members,
            dtype: Some(dtype),
            root,
            source: address(Side::Source),
            destination: address(Side::Destination),
        })
    }

    /// Of the launch of a graph with so many collectives.
    pub(super) fn of_launch(origin: Origin, count: usize, site: Site, members: (u64, u8)) -> Brief {
        let (reduce, dtype, root, source, destination) = Default::default();
        let (op, site) = names::numbers(LAUNCH, site);
        Brief { origin, op, site, count, reduce, members, dtype, root, source, destination }
    }

    /// Of a barrier.
    pub(super) fn of_barrier(call: &Call, members: (u64, u8)) -> Brief {
        let (reduce, dtype, root, source, destination) = Default::default();
        let Call { origin, op, site, count, .. } = *call;
        let (op, site) = names::numbers(op, site);
        Brief { origin, op, site, count, reduce, members, dtype, root, source, destination }
    }

    /// Where a member's buffer begins.
    pub(super) fn address(&self, side: Side) -> Address {
        match side {
            Side::Source => self.source,
            Side::Destination => self.destination,
        }
    }

    /// What the member's elements are multiplied by.
    pub(super) fn factor(&self) -> f64 {
        if let Some(ReduceOp::Scaled(factor)) = self.reduce { factor } else { 1.0 }
    }

    /// In full, for a report.
    pub(super) fn call(&self) -> Call {
        let plain = Call::at(self.op.text(), self.site.site());
        let call = Call { origin: self.origin, count: self.count, dtype: self.dtype, ..plain };
        call.with(self.reduce, self.root)
    }

    /// As a headline, if it can be one.
    pub(super) fn words(&self) -> Option<Words> {
        let byte = |x: u64| (x < NONE).then_some(x);
        let op = byte(self.op.bits())?;
        let root = self.root.map_or(Some(NONE), |root| byte(root.into()))?;
        let dtype = self.dtype.map_or(NONE, |dtype| dtype as u64);
        let (reduce, factor) = match self.reduce {
            None => (NONE, 0.0),
            Some(ReduceOp::Scaled(factor)) => (REDUCTIONS.len() as u64, factor),
            Some(op) => (REDUCTIONS.iter().position(|known| *known == op)? as u64, 0.0),
        };
        let what = op | dtype << 8 | reduce << 16 | root << 24 | self.site.bits() << 32;
        let [origin, factor] = [self.origin.bits(), factor.to_bits()];
        Some([what, self.count as u64, origin, factor, self.source, self.destination])
    }

    /// Of a headline to these members.
    pub(super) fn of_words(words: Words, members: (u64, u8)) -> Brief {
        let [what, count, origin, factor, source, destination] = words;
        let byte = |at: u32| Some(what >> at & NONE).filter(|byte| *byte < NONE);
        let reduction =
            |code: u64| REDUCTIONS.get(code as usize).copied().unwrap_or(ReduceOp::Scaled(f64::from_bits(factor)));
        Brief {
            origin: Origin::of_bits(origin),
            op: Name::of_bits(what & NONE),
            site: Spot::of_bits(what >> 32),
            count: count as usize,
            reduce: byte(16).map(reduction),
            members,
            dtype: byte(8).map(|code| DType::ALL[code as usize]),
            root: byte(24).map(|root| root as u32),
            source,
            destination,
        }
    }

    /// Whether it is to this group.
    pub(super) fn is_of(&self, group: &Group<'_>) -> bool {
        group.known.in_short == Some(self.members)
    }

    fn matches(&self, other: &Brief) -> bool {
        let reduces = match (self.reduce, other.reduce) {
            (Some(a), Some(b)) => a.matches(b),
            (a, b) => a.is_none() && b.is_none(),
        };
        let same =
            (self.count, self.members, self.dtype, self.root) == (other.count, other.members, other.dtype, other.root);
        same && reduces && (self.op, self.origin) == (other.op, other.origin)
    }
}

impl Group<'_> {
    /// Ordinals of the members, by rank, and how many: of pools whose kernels can meet, which are small.
    pub(super) fn in_short(&self) -> (u64, u8) {
        self.known.in_short.expect("a kernel can meet its peers")
    }

    /// [`meet`](Group::meet) in short. When this returns `Ok`, the call is committed; with `spins`, the launch gate is
    /// open.
    pub(super) fn meet_briefly(&self, own: Brief, call: &Call, spins: bool) -> Result<SmallVec<[Brief; 8]>> {
        let dev = self.dev;
        dev.check()?;
        self.calls(call);
        let mut absent = None;
        if !self.announce(&own) {
            self.tell_all(call, || Body::Brief(own), &mut absent)?;
        }
        let mut all: SmallVec<[Brief; 8]> = smallvec![own; self.count()];
        let mut in_full: SmallVec<[(usize, Arc<Notice>); 2]> = SmallVec::new();
        self.receive_all(call, &mut absent, |member, body| {
            match body {
                Body::Brief(brief) if brief.members != own.members => {
                    return Err(self.other_group(call, member, &brief.call()));
                }
                Body::Brief(brief) => all[member] = brief,
                Body::Call(notice) if !self.is(&notice) => {
                    return Err(self.other_group(call, member, &notice.call));
                }
                Body::Call(notice) => in_full.push((member, notice)),
                Body::Headline(_) | Body::Step(_) => unreachable!("opened; and steps end with their collective"),
            }
            Ok(())
        })?;
        if let Some(error) = absent {
            return Err(error);
        }
        if !in_full.is_empty() || !all.iter().all(|brief| brief.matches(&own)) {
            let full = |member| in_full.iter().find(|(at, _)| *at == member).map(|(_, notice)| notice.call.clone());
            return Err(self.differing(|member| full(member).unwrap_or_else(|| all[member].call())));
        }
        self.commit(spins)?;
        Ok(all)
    }

    /// The members' calls are not all the same: every member compares them in the same order, so every member reports
    /// the same pair.
    pub(super) fn differing(&self, call: impl Fn(usize) -> Call) -> Error {
        let first = call(0);
        let differs = |member: usize| first.differs(&call(member)).map(|what| (what, member));
        let (what, member) = (1..self.count()).find_map(differs).unwrap_or(("call", self.count() - 1));
        self.mismatch(what, (0, &first), (member, &call(member)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::panic::Location;

    proptest! {
        #[test]
        fn a_headline_says_all_of_it(
            (count, origin, source, destination, factor) in any::<(usize, u64, u64, u64, f64)>(),
            (dtype, reduce, root) in (0..=DType::ALL.len(), 0..=REDUCTIONS.len() + 1, prop::option::of(0u32..255)),
        ) {
            let members = (0x3210, 4);
            let call = Call { count, origin: Origin::of_bits(origin), ..Call::at("reduce", Location::caller()) };
            let reduce = match reduce {
                0 => None,
                1 => Some(ReduceOp::Scaled(factor)),
                k => Some(REDUCTIONS[k - 2]),
            };
            let dtype = DType::ALL.get(dtype).copied();
            let brief = Brief { dtype, reduce, root, source, destination, ..Brief::of_barrier(&call, members) };
            let words = brief.words().unwrap();
            // Compared as text: a factor may be a NaN.
            prop_assert_eq!(format!("{:?}", Brief::of_words(words, members)), format!("{brief:?}"));
        }
    }

    #[test]
    fn a_root_that_has_no_room_goes_another_way() {
        let brief = Brief { root: Some(255), ..Brief::of_barrier(&Call::new("broadcast"), (0x10, 2)) };
        assert_eq!(brief.words(), None);
    }
}
