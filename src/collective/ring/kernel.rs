//! The ring in one kernel on each member, which writes to its successor alone: `kernels/ring.cu` has the protocol.
//!
//! What has been added up so far goes to the successor's *inbox*, memory of its pool that it takes before the meeting and tells of
//! there. A member that is short of memory takes less. All know the smallest, and cut alike.
//!
//! In a graph the inbox is the graph's, as all memory that it names; one for all rings of a capture, since their kernels run one
//! after the other.

use super::{
    super::{
        Group, ReduceOp,
        board::{Area, Notice},
        choose::Way,
        direct,
        kernels::{self, Cut, Meet, Ring, Round},
        plan::{Shape, Side},
        run::{Request, lent},
        tuner::Limits,
    },
    cut,
};
use crate::{
    error::{Error, Result},
    op::Op,
};
use std::sync::Arc;

/// Bytes of the largest chunk of an all-reduce of `len` elements.
fn largest(group: &Group<'_>, request: &Request, len: usize) -> usize {
    let size = request.dtype.size();
    cut::chunk(0, group.count(), len, size).len() * size
}

/// Memory of this member for what its predecessor sends, which `access` is to touch; none by other ways, and where there are no
/// elements.
#[track_caller]
pub(in super::super) fn inbox(
    group: &Group<'_>,
    request: &Request,
    (way, limits): (Way, &Limits),
    access: &mut Op<'_>,
) -> Result<Option<Area>> {
    let (Way::RingKernel, Some(Shape::AllReduce { len: len @ 1.. })) = (way, &request.shape) else { return Ok(None) };
    let area = take(group, request, *len, limits)?;
    access.scratch(&area.block, area.bytes.clone())?;
    Ok(Some(area))
}

#[track_caller]
fn take(group: &Group<'_>, request: &Request, len: usize, limits: &Limits) -> Result<Area> {
    let chunk = largest(group, request, len);
    let kept = group.dev.recording.as_ref().map(|recording| &recording.inbox);
    let mut short = None;
    for bytes in cut::inboxes(chunk, cut::blocks(chunk, limits)) {
        if let Some(area) = kept.and_then(|kept| kept.borrow().clone()).filter(|area| area.bytes.len() >= bytes) {
            return Ok(area);
        }
        match group.dev.allocate::<u8>(request.call.op(), bytes) {
            Ok(buffer) => {
                let area = Area { block: buffer.block.clone(), address: buffer.address(), bytes: 0..bytes };
                kept.map(|kept| kept.replace(Some(area.clone())));
                return Ok(area);
            }
            Err(error @ Error::OutOfMemory { .. }) => short = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(short.expect("there is a smallest size"))
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
