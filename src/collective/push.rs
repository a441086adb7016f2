//! Small collectives by kernels that send and wait for nothing but what they receive: data that carries its flags, or that goes
//! eagerly into rooms at the receivers, with flags behind ([`packets`](super::packets) has the plans).
//!
//! Where members cannot name each other's memory packets go through the host's. There a bus is what all wait for, and everything
//! to everyone is `n - 1` times what each has; so sums of more than a little go in two trips, one kernel each: parts to their
//! owners, who add them up, and sums to all. That is twice `(n - 1) / n`, and no flag that may only be written when all data before it
//! have arrived, of which [stages](super::staged) have three, one after the other.

use super::{
    Group, ReduceOp,
    choose::Way,
    direct,
    kernels::{self, Meet, Part, Push},
    packets::Packets,
    plan::{Counts, Shape, Side},
    run::Request,
    spin::Missed,
    tuner::Limits,
};
use crate::error::Result;
use smallvec::SmallVec;

/// Bytes of a block of a push: one packet of 8 bytes for each thread, so that all are on their way at once.
const PUSH_PER_BLOCK: usize = 512 * 8;

/// Submits this member's kernels, two for [`Way::PushTwice`]; when it fails, `missed` says how many were not.
pub(super) fn launch(
    group: &Group<'_>,
    request: &Request,
    shape: &Shape,
    factors: SmallVec<[f64; 8]>,
    missed: &mut Missed,
    (way, limits): (Way, &Limits),
) -> Result<()> {
    let factors = if matches!(request.reduce, ReduceOp::Scaled(_)) { &factors[..] } else { &[] };
    let trip = Trip { group, request, factors, meet: missed.meet, way, limits };
    if way != Way::PushTwice {
        let packets = shape.packets(group.count(), group.rank).expect("chosen for what packets can carry");
        return trip.launch(&packets, Side::Source);
    }
    let [parts, sums] = two_trips(shape, group.count(), group.rank).expect("chosen for what goes in parts");
    trip.launch(&parts, Side::Source)?;
    missed.times -= 1;
    // What this member has added up, from where it is to go.
    trip.launch(&sums, Side::Destination)
}

/// Elements of each member's part of a sum that everybody gets, if all parts are of one size.
pub(crate) fn part(shape: &Shape, n: usize) -> Option<usize> {
    match shape {
        Shape::AllReduce { len } if *len > 0 && len % n == 0 => Some(len / n),
        _ => None,
    }
}

/// Parts to their owners, and sums to all.
pub(super) fn two_trips(shape: &Shape, n: usize, me: usize) -> Option<[Packets; 2]> {
    let counts = Counts::Each(part(shape, n)?);
    let parts = Shape::ReduceScatter { counts: counts.clone(), in_place: true }.packets(n, me)?;
    let sums = Shape::AllGather { counts, in_place: true }.packets(n, me)?;
    Some([parts, sums])
}

struct Trip<'a> {
    group: &'a Group<'a>,
    request: &'a Request,
    factors: &'a [f64],
    meet: Meet,
    way: Way,
    limits: &'a Limits,
}

impl Trip<'_> {
    fn launch(&self, packets: &Packets, from: Side) -> Result<()> {
        let Trip { group, request, factors, meet, way, limits } = *self;
        let (dtype, op, size) = (request.dtype, request.reduce, request.dtype.size());
        // Who only receives has no source, who only sends no destination.
        let part = |side, start: usize| match request.area(side) {
            Some(area) => {
                Part { address: area.address + (start * size) as u64, bytes: area.bytes.len() - start * size }
            }
            None => Part { address: 0, bytes: 0 },
        };
        let source = part(from, packets.source);
        let destination = part(Side::Destination, packets.destination);
        let push = Push { n: packets.each, op, route: packets.route, factors, source, destination, meet };
        let bytes = packets.each * size;
        let (entry, blocks) = match way {
            Way::Eager => (kernels::eager(dtype), sending(bytes, limits)),
            _ => (kernels::push(dtype), pushing(bytes, limits)),
        };
        direct::launch_meeting(group.dev, &meet, request.call.op(), entry, blocks, &push.args())
    }
}

/// How many blocks a push of so many bytes has.
pub(crate) fn pushing(bytes: usize, limits: &Limits) -> u32 {
    direct::blocks_of(bytes, PUSH_PER_BLOCK, limits.push_blocks)
}

/// How many blocks a kernel has that sends so many bytes eagerly.
pub(crate) fn sending(bytes: usize, limits: &Limits) -> u32 {
    direct::blocks_of(bytes, limits.eager_per_block, limits.blocks)
}
