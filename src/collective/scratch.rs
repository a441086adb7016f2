//! Scratch memory that an algorithm takes for one collective, before the meeting, which tells the peers. So a member
//! that is short of memory takes less, or says so before any member has begun. All collectives of a capture share one
//! scratch, the graph's, since their kernels run one after the other.

use super::{Request, Scratch, algorithm::Sizes};
use crate::error::{Error, Result};
use crate::memory::{Access, Locality};
use crate::{Device, fabric::Area, token::op::Op};

#[track_caller]
pub(super) fn take(dev: &Device, request: &Request, needed: Scratch, access: &mut Op<'_>) -> Result<Option<Area>> {
    let area = match needed {
        Scratch::None => return Ok(None),
        Scratch::Host(bytes) => {
            let pinned = &dev.worker.shared.pinned;
            let block = pinned.block(request.call.op, bytes, Locality::Device(dev.index()))?;
            access.touch(&block, 0..bytes, Access::Write, false)?;
            return Ok(Some(Area { address: block.address, block, bytes: 0..bytes }));
        }
        Scratch::Device(sizes) => on_device(dev, request, sizes)?,
        Scratch::Optional(sizes) => match on_device(dev, request, sizes) {
            Err(Error::OutOfMemory { .. }) => return Ok(None),
            taken => taken?,
        },
    };
    access.scratch(&area.block, area.bytes.clone())?;
    Ok(Some(area))
}

/// Memory of the first of these sizes that is available; in a capture the graph's scratch, if that is large enough.
#[track_caller]
fn on_device(dev: &Device, request: &Request, sizes: Sizes) -> Result<Area> {
    let kept = dev.recording.as_ref().map(|recording| &recording.recv_scratch);
    let (mut short, mut tried) = (None, usize::MAX);
    for bytes in sizes {
        if bytes >= tried {
            continue;
        }
        tried = bytes;
        if let Some(area) = kept.and_then(|kept| kept.borrow().clone()).filter(|area| area.bytes.len() >= bytes) {
            return Ok(area);
        }
        match dev.allocate::<u8>(request.call.op, bytes) {
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
