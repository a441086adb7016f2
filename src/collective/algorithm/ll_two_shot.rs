//! All-reduce by two LL kernels: parts go to their owners, and sums go to all members.
//!
//! `choose` picks it for small and medium sums without peer access, where the bus to the host is the limit: everything
//! to everyone ([`ll`]) carries `n - 1` times the buffer over it, the two trips twice `(n - 1) / n`.
//! [`shm`](super::shm) has three flags that wait for all data before them.

use super::{Algorithm, Case, Matched, MeetBy, Member, Needs, Scratch, ll};
use crate::{
    error::Result,
    fabric::{Counts, Packets, Shape, Side},
};

pub(crate) struct LlTwoShot;

/// Four H200s add up 32 KB in 13.5 us by this algorithm and in 20.8 us by `shm`; 256 KB in 38.6 and 31.7 us.
const MOST: usize = 112 << 10;

impl Algorithm for LlTwoShot {
    about!("ll_two_shot", Staged, "packets");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        // Devices that share a GPU may share a hardware queue: there the second kernel of one device could stand in
        // front of the first kernel of another, and wait for it for ever.
        if !case.meets_in_host() || case.members == 2 || !case.machine.alone {
            return None;
        }
        let part = part(case.shape?, case.members)? * case.dtype.size();
        ll::sent_through_host(case, part, MOST).then_some(
            "not large, without peer access: parts to their owners and sums to all, as data that carries its flags, \
             through the host's memory",
        )
    }

    fn needs(&self, _: &Case<'_>) -> Needs {
        Needs { meeting: MeetBy::Kernels { launches: 2, in_full: false }, scratch: Scratch::None }
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        ll::blocks(case.largest(), case.limits)
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let [parts, sums] =
            two_trips(matched.shape, member.count(), member.rank).expect("chosen for what goes in parts of one size");
        let entry = ll::entry(member.request.dtype);
        let trip = |packets: &Packets, from| {
            let blocks = ll::blocks(ll::bytes(member, packets), member.limits);
            ll::trip(member, matched, packets, from, entry, blocks)
        };
        trip(&parts, Side::Source)?;
        // The own sums already lie in the destination.
        trip(&sums, Side::Destination)
    }
}

/// Elements of each member's part of an all-reduce, if all parts have one size.
fn part(shape: &Shape, n: usize) -> Option<usize> {
    match shape {
        Shape::AllReduce { len } if *len > 0 && len % n == 0 => Some(len / n),
        _ => None,
    }
}

pub(crate) fn two_trips(shape: &Shape, n: usize, me: usize) -> Option<[Packets; 2]> {
    let counts = Counts::Each(part(shape, n)?);
    let parts = Shape::ReduceScatter { counts: counts.clone(), in_place: true }.packets(n, me)?;
    let sums = Shape::AllGather { counts, in_place: true }.packets(n, me)?;
    Some([parts, sums])
}
