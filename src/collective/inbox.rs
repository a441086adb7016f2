//! Memory of a member's pool for what its peers' kernels send it: taken before the meeting, which tells them of it. A member that is
//! short of memory takes less.
//!
//! In a graph it is the graph's, as all memory that it names; one for all collectives of a capture, since their kernels run one after
//! the other.

use super::{Group, board::Area, choose::Way, exchange, plan::Shape, ring, run::Request, tuner::Limits};
use crate::{
    error::{Error, Result},
    op::Op,
};

/// The inbox, which `access` is to touch; none by ways that have none, where there is nothing to send, and where there is no memory
/// for an exchange: then it goes another way, to the same bits.
#[track_caller]
pub(super) fn inbox(
    group: &Group<'_>,
    request: &Request,
    (way, limits): (Way, &Limits),
    access: &mut Op<'_>,
) -> Result<Option<Area>> {
    let area = match (way, &request.shape) {
        (Way::RingKernel, Some(Shape::AllReduce { len: len @ 1.. })) => {
            take(group, request, ring::kernel::inboxes(group, request, *len, limits))?
        }
        (Way::Exchange, Some(shape)) if exchange::kernel::largest(group, request, shape) > 0 => {
            match take(group, request, exchange::kernel::inboxes(group, request, shape, limits)) {
                Err(Error::OutOfMemory { .. }) => return Ok(None),
                taken => taken?,
            }
        }
        _ => return Ok(None),
    };
    access.scratch(&area.block, area.bytes.clone())?;
    Ok(Some(area))
}

/// The first of these sizes that there is memory for; or what the graph has already.
#[track_caller]
fn take(group: &Group<'_>, request: &Request, sizes: impl Iterator<Item = usize>) -> Result<Area> {
    let kept = group.dev.recording.as_ref().map(|recording| &recording.inbox);
    let (mut short, mut tried) = (None, usize::MAX);
    for bytes in sizes {
        if bytes >= tried {
            continue;
        }
        tried = bytes;
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
