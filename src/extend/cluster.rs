//! What `gpu-pool-cluster` needs: several processes.

pub use super::{ErrorInternals, OpGuard, OpSite, contain};
pub use crate::{
    builder::environment::parse_duration, collective::world::values::hash, fabric::transport, stall::StallTimer,
    token::op::Op,
};

/// Environment variables.
pub mod variables {
    pub use crate::variables::{NotText, os, text};
}

/// Drivers, and the gate of launches.
pub mod driver {
    pub use crate::driver::{Address, Driver, DriverRef, DriverResult, Fault, FaultKind, RawStream, host::in_process};
    #[cfg(feature = "cuda")]
    pub use crate::driver::{cuda, gate::blocking};
}

/// Blocks, and the order of their uses.
pub mod memory {
    pub use crate::memory::{
        backing::Region,
        block::{Block, BlockRef},
        fits_blocks,
        hazard::{Access, Lending},
    };
}

/// The lock-free parts, and what loom sees in place of std.
pub mod sync {
    pub use crate::sync::{Flag, Gate, Sequence, byte_ring, shim, site};
}

use self::memory::{BlockRef, Lending};
use crate::{
    Builder, Device, DeviceBuffer, DeviceCopy, Group, Result,
    fabric::{call::Call, transport::{Connect, World}},
};
use std::{sync::Arc, time::Duration};

/// Of [`Builder`].
pub trait BuilderInternals {
    /// The pool is this process's part of what `connect` connects it to.
    fn connect(self, connect: Arc<dyn Connect>) -> Self;
}

impl BuilderInternals for Builder {
    fn connect(mut self, connect: Arc<dyn Connect>) -> Self {
        self.cluster = Some(connect);
        self
    }
}

/// Of [`Device`].
pub trait DeviceInternals {
    /// The deadline of its pool.
    fn deadline(&self) -> Duration;

    /// `Err` once its gang has failed, or in a capture.
    ///
    /// # Errors
    /// [`Error::Aborted`](crate::Error::Aborted), [`Error::Graph`](crate::Error::Graph)
    #[track_caller]
    fn check_outside_graph(&self, op: &'static str) -> Result<()>;

    /// The processes of its pool's cluster.
    fn processes(&self) -> Option<&Arc<dyn World>>;

    /// Begins an operation that cannot be captured.
    ///
    /// # Errors
    /// [`Error::Aborted`](crate::Error::Aborted); in a capture.
    #[track_caller]
    fn op(&self, op: &'static str) -> Result<Op<'_>>;

    /// `len` zeros in a chunk of their own, which can be registered. Where there are no such chunks they are pooled.
    ///
    /// # Errors
    /// As [`Device::zeros`].
    #[track_caller]
    fn zeros_apart<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>>;

    /// At least `bytes` zeros in a chunk of their own, with a descriptor by which other processes map it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), the driver's.
    #[cfg(target_os = "linux")]
    #[track_caller]
    fn apart(
        &self,
        op: &'static str,
        bytes: usize,
        lending: &Arc<Lending>,
    ) -> Result<(DeviceBuffer<u8>, std::os::fd::OwnedFd)>;

    /// The memory of another process, `bytes` bytes with that process's contents.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), the driver's.
    #[cfg(target_os = "linux")]
    #[track_caller]
    fn import_memory(
        &self,
        op: &'static str,
        bytes: usize,
        memory: std::os::fd::BorrowedFd<'_>,
        lending: &Arc<Lending>,
    ) -> Result<DeviceBuffer<u8>>;
}

impl DeviceInternals for Device {
    fn deadline(&self) -> Duration {
        self.worker.shared.deadline
    }

    #[track_caller]
    fn check_outside_graph(&self, op: &'static str) -> Result<()> {
        self.not_in_graph(op)?;
        self.check()
    }

    fn processes(&self) -> Option<&Arc<dyn World>> {
        self.session.world.as_ref().map(|link| &link.world)
    }

    #[track_caller]
    fn op(&self, op: &'static str) -> Result<Op<'_>> {
        Device::op(self, op)
    }

    #[track_caller]
    fn zeros_apart<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        Device::zeros_apart(self, len)
    }

    #[cfg(target_os = "linux")]
    #[track_caller]
    fn apart(
        &self,
        op: &'static str,
        bytes: usize,
        lending: &Arc<Lending>,
    ) -> Result<(DeviceBuffer<u8>, std::os::fd::OwnedFd)> {
        Device::apart(self, op, bytes, lending)
    }

    #[cfg(target_os = "linux")]
    #[track_caller]
    fn import_memory(
        &self,
        op: &'static str,
        bytes: usize,
        memory: std::os::fd::BorrowedFd<'_>,
        lending: &Arc<Lending>,
    ) -> Result<DeviceBuffer<u8>> {
        let block = self.worker.cache.borrow_mut().import(op, bytes, memory, lending)?;
        Ok(DeviceBuffer::new(block, bytes))
    }
}

/// Of [`DeviceBuffer`].
pub trait BufferInternals {
    /// Its memory.
    fn block(&self) -> &BlockRef;

    /// The first `len` elements of its memory, as another type.
    fn reinterpret<U: DeviceCopy>(self, len: usize) -> DeviceBuffer<U>;
}

impl<T: DeviceCopy> BufferInternals for DeviceBuffer<T> {
    fn block(&self) -> &BlockRef {
        &self.block
    }

    fn reinterpret<U: DeviceCopy>(self, len: usize) -> DeviceBuffer<U> {
        DeviceBuffer::new(self.block, len)
    }
}

/// Of [`Group`].
pub trait GroupInternals {
    /// Exchanges bytes with all members, also those of other processes. `op`: the public operation.
    ///
    /// # Errors
    /// As [`Group::exchange`], and those of other processes.
    #[track_caller]
    fn exchange_bytes(&self, op: &'static str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>>;
}

impl GroupInternals for Group<'_> {
    #[track_caller]
    fn exchange_bytes(&self, op: &'static str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        Group::exchange_bytes(self, &Call::new(op), bytes)
    }
}
