//! Memory that an algorithm takes for one collective, before the meeting: a member that is short of memory says so
//! before anybody has begun, or takes less. The meeting tells the peers of it.
//!
//! In a graph scratch is the graph's, as all memory that it names; one for all collectives of a capture, since their
//! kernels run one after the other.

use super::{
    Group,
    algorithm::{Scratch, Sizes},
    board::Area,
    request::Request,
};
use crate::{
    Device,
    error::{Error, Result},
    memory::{hazard::Access, pinned::Locality, stream::StreamCore},
    token::op::Op,
};
use std::{cell::RefCell, collections::VecDeque, sync::Arc};

/// Takes what is needed; `access` notes that the collective touches it.
#[track_caller]
pub(super) fn take(group: &Group<'_>, request: &Request, needed: Scratch, access: &mut Op<'_>) -> Result<Option<Area>> {
    let area = match needed {
        Scratch::None => return Ok(None),
        Scratch::Host(bytes) => {
            let pinned = &group.dev.worker.shared.pinned;
            let block = pinned.block(request.call.op(), bytes, Locality::Device(group.dev.index()))?;
            access.touch(&block, 0..bytes, Access::Write, false)?;
            return Ok(Some(Area { address: block.address, block, bytes: 0..bytes }));
        }
        Scratch::Device(sizes) => on_device(group, request, sizes)?,
        Scratch::Optional(sizes) => match on_device(group, request, sizes) {
            Err(Error::OutOfMemory { .. }) => return Ok(None),
            taken => taken?,
        },
    };
    access.scratch(&area.block, area.bytes.clone())?;
    Ok(Some(area))
}

/// The first of these sizes that there is memory for; or what the graph has already.
#[track_caller]
fn on_device(group: &Group<'_>, request: &Request, sizes: Sizes) -> Result<Area> {
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

/// Stages of calls that a device may not be through with, at most: they are page-locked memory, of which there must not
/// be as many as somebody may call ahead of his device.
const AHEAD: usize = 4;

/// Calls with a stage whose work may not be over: their streams, and how many operations these had then.
#[derive(Default)]
pub(crate) struct InFlight(RefCell<VecDeque<(Arc<StreamCore>, u64)>>);

impl InFlight {
    /// Waits on the host until there is room for a further stage: until the gang fails, or nothing completes for as
    /// long as the pool waits for anything.
    pub(super) fn room(dev: &Device, name: &'static str) -> Result<()> {
        let calls = &dev.worker.staging_calls.0;
        while calls.borrow().len() >= AHEAD {
            let (stream, last) = calls.borrow_mut().pop_front().expect("there are some");
            let gang = &dev.session.gang;
            let waited = stream.wait_host_unless(name, last, dev.worker.shared.deadline, &|| gang.is_aborted());
            // A peer's failure is the reason, not the deadline.
            waited.map_err(|e| if matches!(e, Error::Timeout { .. }) { gang.aborted().unwrap_or(e) } else { e })?;
        }
        Ok(())
    }

    /// A call's work is on the current stream.
    pub(super) fn note(dev: &Device) {
        dev.worker.staging_calls.0.borrow_mut().push_back((dev.stream.clone(), dev.stream.submitted()));
    }
}
