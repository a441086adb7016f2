//! Backings: where a cache's memory comes from.
//!
//! A [`Backing`] takes memory from the driver in *units* and gives them back one by one. Units lie in *regions*, whose
//! memory may be contiguous. Blocks may outlive the pool: each keeps its [`Region`], whose drop gives back the rest.
//!
//! * `vmm` ([`vmm`]): one window of addresses per device, one region for ever. Units are mapped where memory is
//!   missing, so that free memory on both sides counts, and may be unmapped or moved anywhere. This ends the
//!   fragmentation of pytorch#35901, #152135 and #193400; PyTorch's expandable segments and DALI's `cuda_vm_resource`
//!   do the same.
//! * `malloc` ([`chunks`]): each unit is a region, from `mem_alloc`. For devices without virtual memory, or with
//!   virtual memory that does not work.
//! * `pinned`, `managed` ([`chunks`]): the same for page-locked and managed memory.
//!
//! Peer copies to memory with access rights of its own have silently written nothing (CUDA.jl#3112, NVIDIA's bug
//! 6098762). So [`open()`] tests the memory of a window ([`verify`]) and falls back to `malloc`.
//!
//! **Errors.** A call that fails has changed nothing, except where its documentation says so. Nothing here panics.

mod chunks;
mod holes;
#[cfg(test)]
#[path = "../../../tests/unit/memory/backing/model_tests.rs"]
mod model_tests;
mod open;
mod region;
#[cfg(test)]
#[path = "../../../tests/unit/memory/backing/tests.rs"]
mod tests;
mod verify;
mod vmm;
#[cfg(test)]
#[path = "../../../tests/unit/memory/backing/window_tests.rs"]
mod window_tests;

pub(crate) use open::open;
pub(crate) use region::ChunkKind;
pub use region::Region;

use crate::{
    driver::{Address, DriverRef, DriverResult, Fault, RawStream},
    error::UnknownName,
};
use smallvec::SmallVec;
use std::{ops::Range, str::FromStr, sync::Arc};

pub(crate) struct Mapping {
    pub region: u32,
    pub keep_alive: Arc<Region>,
    pub address: Address,
    pub bytes: u64,
}

/// Units, each with its region's number.
pub(crate) type Units = SmallVec<[(u32, Range<Address>); 4]>;
pub(crate) type Mappings = SmallVec<[Mapping; 4]>;

/// How many bytes of a region are free right before an address, and how many from it on?
pub(crate) type FreeAround<'a> = &'a dyn Fn(u32, Address) -> (u64, u64);

/// Even after a fault: memory at `from` is gone from there, and is at `to`.
#[derive(Default)]
pub(crate) struct Moved {
    pub from: Units,
    pub to: Mappings,
    pub fault: Option<Fault>,
}

/// A source of memory for one cache, from one device's driver.
pub(crate) trait Backing: Send {
    fn name(&self) -> &'static str;

    /// Takes memory, so that `bytes` free bytes lie together; all of it or nothing. `free` tells what is free around an
    /// address where memory might be added.
    ///
    /// `vmm` maps only the missing bytes, where the fewest are missing (among equals at the lowest address), in units
    /// of `unit` bytes, of which the last may be smaller. It maps nothing if nothing is missing. The others take one
    /// unit of at least `unit` bytes, or of `bytes` if memory is short. A request that needs more than `budget` bytes
    /// from the driver fails as if memory were exhausted.
    fn grow(&mut self, bytes: u64, unit: u64, budget: u64, free: FreeAround) -> DriverResult<Mappings>;

    fn units_in(&self, region: u32, range: Range<Address>) -> Vec<Range<Address>>;

    /// Gives a unit back to the driver. Nothing uses it any more, on any device. It counts as gone also after a fault,
    /// except [`Misuse`](crate::driver::FaultKind::Misuse).
    unsafe fn unmap(&mut self, region: u32, unit: Range<Address>) -> DriverResult;

    /// Moves units, so that `bytes` free bytes lie together: like [`grow`](Self::grow), but with memory that the pool
    /// has. `from` lists the units that may move, in order of preference; `free` counts all as free. Units next to the
    /// chosen address stay there. Moves nothing if there is no such address, or not enough to move. `vmm` only.
    ///
    /// Nothing uses these units any more, on any device.
    unsafe fn move_units(&mut self, from: &[(u32, Range<Address>)], bytes: u64, free: FreeAround) -> Moved;

    /// Whether units lie in a window, where they may be adjacent and may move.
    fn is_window(&self) -> bool {
        false
    }

    fn reserved(&self) -> u64;

    fn driver_calls(&self) -> u64;
}

/// Where device memory comes from: [`Builder::memory_backing`](crate::Builder::memory_backing).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BackingChoice {
    /// A window of virtual addresses if the device has them and their memory passes a test; else single allocations.
    #[default]
    Auto,
    /// A window of virtual addresses; without it the pool is not built.
    Vmm,
    /// Single allocations.
    Malloc,
}

display_as!(BackingChoice, |self, f| f.pad(&format!("{self:?}").to_lowercase()));

impl FromStr for BackingChoice {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "auto" => Ok(BackingChoice::Auto),
            "vmm" => Ok(BackingChoice::Vmm),
            "malloc" => Ok(BackingChoice::Malloc),
            _ => Err(UnknownName::new(name, "kind of memory", "auto, vmm or malloc")),
        }
    }
}

#[derive(Clone, Copy, Default)]
pub(crate) struct ProbeContext<'a> {
    /// An idle stream of the device. None: the test makes one.
    pub stream: Option<RawStream>,
    /// Another device, if peer access will be used.
    pub peer: Option<&'a DriverRef>,
}
