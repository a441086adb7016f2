//! Opens a backing, and falls back to single pieces where a window of addresses does not work.

use super::{
    Backing, BackingChoice, ProbeContext, chunks::Chunks, region::ChunkKind, verify::verify_backing, vmm::Vmm,
};
use crate::{driver::FaultKind, error::Result, memory::DeviceHandle};
use std::sync::Arc;

pub(crate) fn open(
    handle: &Arc<DeviceHandle>,
    kind: ChunkKind,
    choice: BackingChoice,
    probe: ProbeContext,
) -> Result<Box<dyn Backing>> {
    let chunks = || Box::new(Chunks::new(handle, kind)) as Box<dyn Backing>;
    if kind != ChunkKind::Device || choice == BackingChoice::Malloc {
        return Ok(chunks());
    }
    let device = handle.device;
    let try_out = |vmm: &mut Vmm| match verify_backing(vmm, probe) {
        // The peer may be the lost device.
        Err(fault) if fault.kind == FaultKind::DeviceLost && probe.peer.is_some() && handle.driver.bind().is_ok() => {
            verify_backing(vmm, ProbeContext { peer: None, ..probe })
        }
        tried => tried,
    };
    let opened = Vmm::open(handle).and_then(|mut vmm| {
        let good = choice == BackingChoice::Vmm || try_out(&mut vmm)?;
        Ok(good.then_some(vmm))
    });
    match opened {
        Ok(Some(vmm)) => return Ok(Box::new(vmm)),
        Ok(None) => {
            event!(warn, "memory_in_pieces", device, "copies of mapped memory do not arrive; memory comes in pieces");
        }
        Err(fault)
            if choice == BackingChoice::Vmm || matches!(fault.kind, FaultKind::DeviceLost | FaultKind::Misuse) =>
        {
            return Err(handle.error("open memory", fault));
        }
        Err(fault) if fault.kind == FaultKind::Unsupported => {}
        Err(fault) => {
            event!(warn, "memory_in_pieces", device, %fault, "no window of addresses; memory comes in pieces");
        }
    }
    Ok(chunks())
}
