//! The ring in one kernel on each member, which writes to its successor alone: `kernels/ring.cu` has the protocol.
//!
//! What has been added up so far goes to the successor's [inbox](super::super::inbox). All know the smallest, and cut alike.

use super::{
    super::{
        Group, ReduceOp,
        board::Notice,
        direct,
        kernels::{self, Cut, Meet, Ring, Round},
        plan::Side,
        run::{Request, lent},
        tuner::Limits,
    },
    cut,
};
use crate::error::Result;
use std::sync::Arc;

/// Bytes of the largest chunk of an all-reduce of `len` elements.
fn largest(group: &Group<'_>, request: &Request, len: usize) -> usize {
    let size = request.dtype.size();
    cut::chunk(0, group.count(), len, size).len() * size
}

/// The sizes of inbox that an all-reduce of some elements may have, from the best down.
pub(in super::super) fn inboxes(
    group: &Group<'_>,
    request: &Request,
    len: usize,
    limits: &Limits,
) -> impl Iterator<Item = usize> + use<> {
    let chunk = largest(group, request, len);
    cut::inboxes(chunk, cut::blocks(chunk, limits))
}

/// Submits this member's kernel, for some elements. The meeting on the host is over and committed: whatever comes of this, the
/// meeting of the kernels is counted.
pub(in super::super) fn launch(
    group: &Group<'_>,
    request: &Request,
    len: usize,
    notices: &[Arc<Notice>],
    limits: &Limits,
    meet: Meet,
) -> Result<()> {
    let (dev, n, name) = (group.dev, group.count(), request.call.op());
    let chunk = largest(group, request, len);
    let inbox = |member: usize| lent(&notices[member]).inbox.expect("every member has one");
    let room = (0..n).map(|member| inbox(member).1).min().expect("there are members");
    let cutting = cut::cutting(chunk, cut::blocks(chunk, limits), room);
    let sendings = cutting.rounds * cutting.abreast * 2 * (n - 1);
    assert!(u32::try_from(sendings).is_ok(), "they are counted in 32 bits; a terabyte has some millions");
    let own = |side| request.area(side).expect("all_reduce has a buffer").address;
    let next = (group.rank + 1) % n;
    let ring = Ring {
        from: own(Side::Source),
        to: own(Side::Destination),
        next_to: lent(&notices[next]).destination.as_ref().expect("all_reduce has a buffer").address,
        inbox: inbox(group.rank).0,
        next_inbox: inbox(next).0,
    };
    let cut = Cut {
        bytes: (len * request.dtype.size()) as u64,
        chunk: chunk as u64,
        piece: cutting.piece as u64,
        rounds: cutting.rounds as u32,
        abreast: cutting.abreast as u32,
        slots: cutting.slots as u32,
        spare: 0,
    };
    let factor = if request.reduce == ReduceOp::Avg { 1.0 / n as f64 } else { 1.0 };
    let round = Round { meet, ring, cut, dtype: request.dtype, factor };
    direct::launch_meeting(dev, &meet, name, kernels::ring(request.dtype), cutting.blocks as u32, &round.args())
}
