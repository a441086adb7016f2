//! Where a pool's memory comes from.
//!
//! # Contract
//!
//! A [`Backing`] takes memory from the driver in *units* and gives them back one by one. Units lie in *regions*: memory
//! of one region may be contiguous, so what is free in it coalesces over the edges of units. Only the pool's owner has
//! the backing; blocks, which may outlive the pool, have their [`Region`], whose drop gives back what is still there.
//!
//! * `vmm` ([`vmm`]): one window of addresses for a device, one region for ever. Units are mapped where they are
//!   missing, so that free memory on both sides counts, and may go again, or move, wherever they are. This is what ends
//!   the fragmentation of pytorch#35901, #152135 and #193400; PyTorch's expandable segments and DALI's
//!   `cuda_vm_resource` do the same.
//! * `malloc` ([`chunks`]): each unit is a region by itself, from `mem_alloc`. For devices without virtual memory, or
//!   with one that lies.
//! * `pinned`, `managed` ([`chunks`]): the same for page-locked and managed memory.
//!
//! **Believed when checked**: peer copies to memory with access rights of its own have silently written nothing
//! (CUDA.jl#3112, NVIDIA's bug 6098762). So [`open`] tries what a window's memory does ([`verify`]) and falls back on
//! `malloc`. The probe of pairs works on the pool's own buffers, whatever is behind them.
//!
//! **Errors.** A call that fails has changed nothing, but where it says so. Nothing here panics.

mod chunks;
mod holes;
#[cfg(test)]
mod model_tests;
mod region;
#[cfg(test)]
mod tests;
mod verify;
mod vmm;
#[cfg(test)]
mod window_tests;

pub(crate) use region::Region;

use super::{block::ChunkKind, handle::DeviceHandle};
use crate::{
    driver::{Address, DriverRef, DriverResult, Fault, FaultKind, RawStream},
    error::Result,
};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};

/// A unit that has come.
pub(crate) struct Mapping {
    pub region: u32,
    pub keep_alive: Arc<Region>,
    pub address: Address,
    pub bytes: u64,
}

/// Units in a region.
pub(crate) type Units = SmallVec<[(u32, Range<Address>); 4]>;
/// Units that have come.
pub(crate) type Mappings = SmallVec<[Mapping; 4]>;

/// How many bytes are free in a region right before an address, and how many from it on, says the pool.
pub(crate) type FreeAround<'a> = &'a dyn Fn(u32, Address) -> (u64, u64);

/// What came of [`Backing::move_units`]. Whether it went well or not, `from` is not there any more, and `to` is.
#[derive(Default)]
pub(crate) struct Moved {
    pub from: Units,
    pub to: Mappings,
    /// Why it ended early.
    pub fault: Option<Fault>,
}

/// Memory for one pool, from one device's driver.
pub(crate) trait Backing: Send {
    /// What it is called: `vmm`, `malloc`, `pinned`, `managed`.
    fn name(&self) -> &'static str;

    /// Takes memory so that `bytes` free and contiguous ones come to be; all of it or nothing. `free` tells what is
    /// free beside a place where memory might come. `vmm` maps only what is missing, where least is missing (of several
    /// such places the lowest), in units of `unit` bytes, of which the last may be smaller; none at all if nothing is
    /// missing. The others take one unit of `unit` bytes, or more, or of `bytes` if there are no more. What would take
    /// more than `budget` bytes from the driver fails as if there were no more.
    fn grow(&mut self, bytes: u64, unit: u64, budget: u64, free: FreeAround) -> DriverResult<Mappings>;

    /// The whole units that lie inside a range, in the order of their addresses.
    fn units_in(&self, region: u32, range: Range<Address>) -> Vec<Range<Address>>;

    /// Gives a unit back to the driver. After a fault other than [`FaultKind::Misuse`] it counts as gone, too.
    ///
    /// # Safety
    /// Nothing uses it any more, on any device.
    unsafe fn unmap(&mut self, region: u32, unit: Range<Address>) -> DriverResult;

    /// Takes units from where they are to where `bytes` free and contiguous ones come to be, as [`grow`](Self::grow)
    /// would, but with memory that is ours already. `from` is what may move, in order of preference, all of it free in
    /// the eyes of `free`; what lies beside the place is left there. Moves nothing if there is no such place, or not
    /// enough to move. `vmm` only.
    ///
    /// # Safety
    /// Nothing uses these units any more, on any device.
    unsafe fn move_units(&mut self, from: &[(u32, Range<Address>)], bytes: u64, free: FreeAround) -> Moved;

    /// Whether units lie in a window, where they may touch and move.
    fn is_window(&self) -> bool {
        false
    }

    /// Bytes taken from the driver.
    fn reserved(&self) -> u64;

    /// Calls of the driver so far.
    fn driver_calls(&self) -> u64;
}

/// What device memory is taken from: [`Builder::memory_backing`](crate::Builder::memory_backing).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackingChoice {
    /// A window if there can be one and its memory does what it should, else single allocations.
    #[default]
    Auto,
    /// A window of addresses, or the pool is not built.
    Vmm,
    /// Single allocations.
    Malloc,
}

/// What [`open`] may use to try memory out.
#[derive(Clone, Copy, Default)]
pub(crate) struct ProbeContext<'a> {
    /// A stream of the device that is idle; else one is made.
    pub stream: Option<RawStream>,
    /// Another device, if peers are to be used.
    pub peer: Option<&'a DriverRef>,
}

/// A backing for one kind of memory of a device.
pub(crate) fn open(
    handle: &Arc<DeviceHandle>,
    kind: ChunkKind,
    choice: BackingChoice,
    probe: ProbeContext,
) -> Result<Box<dyn Backing>> {
    let chunks = || Box::new(chunks::Chunks::new(handle, kind)) as Box<dyn Backing>;
    if kind != ChunkKind::Device || choice == BackingChoice::Malloc {
        return Ok(chunks());
    }
    let device = handle.device;
    let try_out = |vmm: &mut vmm::Vmm| match verify::verify_backing(vmm, probe) {
        // The other device may be the one that is lost.
        Err(fault) if fault.kind == FaultKind::DeviceLost && probe.peer.is_some() && handle.driver.bind().is_ok() => {
            verify::verify_backing(vmm, ProbeContext { peer: None, ..probe })
        }
        tried => tried,
    };
    let opened = vmm::Vmm::open(handle).and_then(|mut vmm| {
        let good = choice == BackingChoice::Vmm || try_out(&mut vmm)?;
        Ok(good.then_some(vmm))
    });
    match opened {
        Ok(Some(vmm)) => return Ok(Box::new(vmm)),
        Ok(None) => {
            event!(
                warn,
                device,
                "copies to and from mapped memory do not arrive; memory is allocated in single pieces"
            );
        }
        Err(fault)
            if choice == BackingChoice::Vmm || matches!(fault.kind, FaultKind::DeviceLost | FaultKind::Misuse) =>
        {
            return Err(handle.error("open memory", fault));
        }
        Err(fault) if fault.kind == FaultKind::Unsupported => {}
        Err(fault) => {
            event!(warn, device, %fault, "no window of addresses; memory is allocated in single pieces");
        }
    }
    Ok(chunks())
}

/// Faults with the driver's codes and names, for what the driver is not asked.
fn fault(kind: FaultKind, code: i32, name: &str, detail: String) -> Fault {
    Fault { kind, code, name: name.to_owned(), detail, report: None }
}

fn invalid(detail: String) -> Fault {
    fault(FaultKind::InvalidArgument, 1, "CUDA_ERROR_INVALID_VALUE", detail)
}

fn out_of_memory(detail: String) -> Fault {
    fault(FaultKind::OutOfMemory, 2, "CUDA_ERROR_OUT_OF_MEMORY", detail)
}

fn unsupported(detail: &str) -> Fault {
    fault(FaultKind::Unsupported, 801, "CUDA_ERROR_NOT_SUPPORTED", detail.to_owned())
}
