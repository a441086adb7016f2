//! What `gpu-pool-cluster` needs: several processes.

pub use super::{ErrorInternals, OpGuard, OpSite, contain};
pub use crate::{
    builder::environment::parse_duration,
    collective::world::values::hash,
    fabric::{call::Call, transport},
    stall::StallTimer,
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
        block::{Block, BlockRef, fits_blocks},
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
    fabric::transport::{Connect, World},
};
#[cfg(target_os = "linux")]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::{sync::Arc, time::Duration};

internals! {
    /// Of a builder.
    trait BuilderInternals [] () for Builder {
        /// The pool is this process's part of what `connect` connects it to.
        fn connect[](self: Self, connect: Arc<dyn Connect>) -> Self;
    }
}

impl Builder {
    fn connect(mut self, connect: Arc<dyn Connect>) -> Self {
        self.cluster = Some(connect);
        self
    }
}

internals! {
    /// Of a device.
    trait DeviceInternals [] () for Device {
        /// The deadline of its pool.
        fn deadline[](self: &Self) -> Duration;
        /// `Err` in a capture, and once its gang has failed.
        fn check_outside_graph[](self: &Self, op: &'static str) -> Result<()>;
        /// The processes of its pool's cluster.
        fn processes[](self: &Self) -> Option<&Arc<dyn World>>;
        /// Begins an operation that cannot be captured.
        fn op[](self: &Self, op: &'static str) -> Result<Op<'_>>;
        /// `len` zeros in a chunk of their own, which can be registered. Where there are no such chunks they are
        /// pooled.
        fn zeros_dedicated[T: DeviceCopy](self: &Self, len: usize) -> Result<DeviceBuffer<T>>;
    }
}

impl Device {
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
}

#[cfg(target_os = "linux")]
internals! {
    /// Memory of several processes.
    trait ForeignMemory [] () for Device {
        /// At least `bytes` zeros in a chunk of their own, with a descriptor by which other processes map it.
        fn apart[](
            self: &Self,
            op: &'static str,
            bytes: usize,
            lending: &Arc<Lending>,
        ) -> Result<(DeviceBuffer<u8>, OwnedFd)>;
        /// The memory of another process, `bytes` bytes with that process's contents.
        fn import_memory[](
            self: &Self,
            op: &'static str,
            bytes: usize,
            memory: BorrowedFd<'_>,
            lending: &Arc<Lending>,
        ) -> Result<DeviceBuffer<u8>>;
    }
}

#[cfg(target_os = "linux")]
impl Device {
    #[track_caller]
    fn import_memory(
        &self,
        op: &'static str,
        bytes: usize,
        memory: BorrowedFd<'_>,
        lending: &Arc<Lending>,
    ) -> Result<DeviceBuffer<u8>> {
        let block = self.worker.cache.borrow_mut().import(op, bytes, memory, lending)?;
        Ok(DeviceBuffer::new(block, bytes))
    }
}

internals! {
    /// Of a buffer.
    trait BufferInternals [T: DeviceCopy] (T) for DeviceBuffer<T> {
        /// Its memory.
        fn block[](self: &Self) -> &BlockRef;
        /// The first `len` elements of its memory, as another type.
        fn reinterpret[U: DeviceCopy](self: Self, len: usize) -> DeviceBuffer<U>;
    }
}

impl<T: DeviceCopy> DeviceBuffer<T> {
    fn block(&self) -> &BlockRef {
        &self.block
    }

    fn reinterpret<U: DeviceCopy>(self, len: usize) -> DeviceBuffer<U> {
        DeviceBuffer::new(self.block, len)
    }
}

internals! {
    /// Of a group.
    trait GroupInternals ['d] ('d) for Group<'d> {
        /// All members' bytes, also those of other processes.
        fn exchange_bytes[](self: &Self, call: &Call, own: Vec<u8>) -> Result<Vec<Vec<u8>>>;
    }
}
