//! Memory that the library which moves bytes between processes uses directly: [`Group::register`].
//!
//! A rail works in a member's own memory where nothing is to be done inside the processes: in an all_reduce of a group
//! with one member in each process (`sums.rs`). Everywhere else it works in the library's scratch, which is never
//! registered.
//!
//! Invariant: memory that a transport knows is given to it only in calls in which all members' is, at one distance from
//! its beginning. So such a call says so where the processes compare their calls ([`HierarchicalCall::meet`]), and what
//! cannot say so goes through scratch ([`HierarchicalCall::is_registered`]).

use super::{
    super::{Group, transport::Transport},
    hierarchical::HierarchicalCall,
};
use crate::{
    Device, DeviceBuffer, DeviceCopy,
    error::{Error, Result, op_site::OpSite},
    fabric::descriptor::Area,
    memory::block::BlockRef,
};
use std::fmt;

/// Keeps the memory of a buffer registered with the library that moves bytes between processes: from
/// [`Group::register`].
///
/// Its drop ends that. It waits until the calls that use the memory are over on this device, since the library must not
/// let go of memory in use. The buffer may be dropped before; its memory stays until then. If the communicator ends
/// before, by an error or with the pool, the registration ends with it, and the drop does nothing.
#[must_use = "the memory is registered until this is dropped"]
pub struct Registered {
    /// None: nothing is registered.
    by: Option<(&'static str, Box<dyn Send + Sync>)>,
    _memory: BlockRef,
}

crate::sync::device_thread_only! { [] Registered }

impl Registered {
    /// The library that has registered the memory, such as `nccl`. None: there is nothing that could gain from it, see
    /// [`Group::register`].
    pub fn library(&self) -> Option<&'static str> {
        self.by.as_ref().map(|(name, _)| *name)
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered").field("library", &self.library()).finish_non_exhaustive()
    }
}

impl Group<'_> {
    /// Registers the memory of a buffer with the library that moves bytes between processes. NCCL then sends from it,
    /// and receives into it, without copies through its own buffers (`ncclCommRegister`). Nobody meets.
    ///
    /// The buffer must be one of `Device::exportable`, which has memory of its own: NCCL registers whole pages. It is
    /// used like any other, also in parts.
    ///
    /// **Where it is of use**: [`all_reduce`](Self::all_reduce) of a sum over NCCL in a group of all processes, which
    /// have one member each. Elsewhere (one process; several members in a process, where rails carry slices; MPI and
    /// shared memory) nothing is registered, [`Registered::library`] is `None`, and all goes as without: a hint that
    /// does not apply is no error, so that a program runs unchanged on one process and on software GPUs.
    ///
    /// **All members or none.** A call in which some members' memory is registered and others' is not is
    /// [`Error::WorldMismatch`] on all, and touches nothing (NCCL leaves it undefined). The parts of the buffer must
    /// begin at the same element on all members.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a buffer of the pool; [`Error::WrongDevice`], [`Error::WrongPool`];
    /// [`Error::Transport`] if the library refuses; [`Error::Aborted`], [`Error::HostLost`].
    #[track_caller]
    pub fn register<T: DeviceCopy>(&self, buffer: &DeviceBuffer<T>) -> Result<Registered> {
        const OP: &str = "register";
        let (dev, block, _here) = (self.dev, &buffer.block, OpSite::here(OP));
        dev.not_in_graph(OP)?;
        dev.check()?;
        if block.handle.pool != dev.worker.handle.pool {
            return Err(Error::wrong_pool(OP, dev.index()));
        }
        if buffer.device() != dev.index() {
            return Err(Error::wrong_device(OP, buffer.device(), dev.index()));
        }
        if !block.is_apart() {
            let why = "only a buffer of `Device::exportable` has memory of its own; others share pages with others";
            return Err(Error::invalid(OP, why));
        }
        let by = match self.transport_that_registers() {
            Some(transport) => transport.register(dev.index(), block)?.map(|guard| (transport.name(), guard)),
            None => None,
        };
        Ok(Registered { by, _memory: block.clone() })
    }

    /// Whether [`register`](Self::register) is of use.
    pub(crate) fn registers(&self) -> bool {
        self.transport_that_registers().is_some()
    }

    fn transport_that_registers(&self) -> Option<&dyn super::super::transport::DeviceTransport> {
        let across = self.across.as_ref()?;
        let world = &self.dev.session.world.as_ref()?.world;
        let Transport::Device(transport) = world.transport() else { return None };
        let whole = across.hosts.len() == world.devices().len();
        let here = self.dev.index();
        let single = across.places.len() == across.hosts.len() && across.places.iter().all(|at| at.device == here);
        (whole && single && transport.registers()).then_some(&**transport)
    }
}

impl Device {
    /// `len` zeros in a chunk of their own, which can be registered. Where there are no such chunks they are pooled.
    #[track_caller]
    pub(crate) fn zeros_dedicated<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        #[cfg(target_os = "linux")]
        {
            let bytes = len.saturating_mul(size_of::<T>());
            let (whole, _) = self.apart("zeros", bytes.max(1), &Default::default())?;
            Ok(DeviceBuffer::new(whole.block, len))
        }
        #[cfg(not(target_os = "linux"))]
        self.zeros(len)
    }
}

impl HierarchicalCall<'_, '_> {
    /// Whether a transport between devices knows this memory.
    pub fn is_registered(&self, area: &Area) -> bool {
        self.registered_at(area).is_some()
    }

    /// Where in registered memory it begins.
    pub fn registered_at(&self, area: &Area) -> Option<u64> {
        match self.link.world.transport() {
            Transport::Device(transport) => transport.registered(self.group.dev.index(), area.address),
            _ => None,
        }
    }
}
