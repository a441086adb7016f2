//! All-reduce around a ring by copy engines and events, and by kernels that add. No kernel spins.
//!
//! `choose` picks it for sums of `f32` and `f64` where kernels cannot wait for each other and a ring is asked for or
//! would be the choice, without peer access, and in virtual time. Chunk `c` is added up from rank `c` onwards, as in
//! [`ring`](super::ring); an average is multiplied by `1 / n` at the end.
//!
//! Rank `r` reads only from its predecessor:
//!
//! ```text
//! reduce-scatter, step s:  chunk (r - 1 - s) of the predecessor is copied to scratch and added to the own one
//! all-gather, step s:      chunk (r - s) of the predecessor replaces the own one
//! ```
//!
//! After the first phase rank `r` holds the whole sum of chunk `r + 1`. Each step waits, on the GPU, for the event that
//! the predecessor recorded after its previous step. Out of place, the first step reads the predecessor's source, and a
//! chunk of the own source is copied to the destination before a partial sum is added to it.
//!
//! These events suffice: in the second phase rank `r` overwrites chunk `c` only after the complete sum of `c` came back
//! to it, so after the successor had read the old contents. The final event, which goes to the predecessor, covers the
//! last reads of the second phase.

use super::{super::launch, Algorithm, Case, Matched, MeetBy, Member, Needs, Scratch, ring::cut};
use crate::{
    collective::{Combination, RemotePtr},
    error::Result,
    fabric::{ReduceOp, Shape, Side, types},
};
use std::ops::Range;

pub(crate) struct RingCe;

impl Algorithm for RingCe {
    about!("ring_ce", Ring, "events");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        if !case.rings() {
            None
        } else if case.machine.virtual_time {
            Some("virtual time is for copies; what kernels do with peers' memory is not modelled")
        } else if case.meets_in_host() {
            None
        } else if !case.direct {
            Some("not all members have peer access: a ring keeps every link of the host busy in turn")
        } else {
            let large = case.auto() && !case.engines() && case.bytes >= cut::least(case.members);
            (large && case.nameable() && !case.meets_on_devices())
                .then_some("large enough for a ring; kernels cannot meet here, so by copies: the bits are the same")
        }
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        let by_kernels = case.meets_on_devices();
        (case.wants(types::Algorithm::Ring) && case.rings() && !by_kernels).then_some("asked for")
    }

    fn needs(&self, case: &Case<'_>) -> Needs {
        let largest = match case.shape {
            Some(Shape::AllReduce { len }) => cut::chunk(0, case.members, *len, case.dtype.size()).len(),
            _ => 0,
        };
        Needs { meeting: MeetBy::Events, scratch: Scratch::device(std::iter::once(largest * case.dtype.size())) }
    }

    fn packs(&self) -> bool {
        false
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let &Shape::AllReduce { len } = matched.shape else { unreachable!("a ring is chosen for all-reduces") };
        // There is one member, or nothing to add.
        let Some(scratch) = member.scratch else { return Ok(()) };
        let ranks = member.count();
        let previous = (member.rank + ranks - 1) % ranks;
        member.wait_for_start(matched, previous)?;
        let own = |side| member.local(member.own(side, 0, len));
        let ring = Ring {
            member,
            first: member.remote(matched, previous, Side::Source),
            peer: member.remote(matched, previous, Side::Destination),
            source: member.request.source.is_some().then(|| own(Side::Source)),
            own: own(Side::Destination),
        };
        ring.run(len, member.local(scratch.address))
    }
}

struct Ring<'g> {
    member: &'g Member<'g>,
    first: RemotePtr,
    peer: RemotePtr,
    source: Option<RemotePtr>,
    own: RemotePtr,
}

impl Ring<'_> {
    fn run(&self, len: usize, scratch: RemotePtr) -> Result<()> {
        let member = self.member;
        let (n, rank) = (member.count(), member.rank);
        let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
        let factor = (self.member.request.reduce == ReduceOp::Avg).then(|| 1.0 / n as f64);
        let chunk = |back: usize| cut::chunk((rank + 2 * n - back) % n, n, len, self.member.request.dtype.size());
        for step in 0..n - 1 {
            if step > 0 {
                member.await_step(previous)?;
            }
            let range = chunk(1 + step);
            if !range.is_empty() {
                self.fetch(if step == 0 { self.first } else { self.peer }, &range, scratch)?;
                if let Some(source) = self.source {
                    self.fetch(source, &range, self.at(self.own, &range))?;
                }
                let last = step == n - 2;
                self.add(&range, scratch, factor.filter(|_| last))?;
            }
            member.send_step(next, member.record()?)?;
        }
        for step in 0..n - 1 {
            member.await_step(previous)?;
            let range = chunk(step);
            if !range.is_empty() {
                self.fetch(self.peer, &range, self.at(self.own, &range))?;
            }
            if step < n - 2 {
                member.send_step(next, member.record()?)?;
            }
        }
        member.send_step(previous, member.record()?)?;
        member.await_step(next)
    }

    fn at(&self, remote: RemotePtr, range: &Range<usize>) -> RemotePtr {
        remote.offset(range.start * self.member.request.dtype.size())
    }

    fn fetch(&self, from: RemotePtr, range: &Range<usize>, to: RemotePtr) -> Result<()> {
        let (from, bytes) = (self.at(from, range), range.len() * self.member.request.dtype.size());
        self.member.copy(self.member.stream, to, from, bytes)
    }

    fn add(&self, range: &Range<usize>, arrived: RemotePtr, factor: Option<f64>) -> Result<()> {
        let (dtype, own) = (self.member.request.dtype, self.at(self.own, range));
        let combine = |op, sources: &[RemotePtr], factors: &[f64]| {
            let combination = Combination { len: range.len(), sources, destinations: &[own], factors };
            combination.submit(self.member, (dtype, op), launch::blocks(range.len() * dtype.size()))
        };
        combine(ReduceOp::Sum, &[own, arrived], &[])?;
        factor.map_or(Ok(()), |factor| combine(ReduceOp::Scaled(factor), &[own], &[factor]))
    }
}
