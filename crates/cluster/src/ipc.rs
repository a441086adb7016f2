//! Memory of one process in another one's hands, on one host: for programs with a process for each GPU.
//!
//! The exporter makes a buffer with [`exportable`](ClusterDevice::exportable) and [`export`](ClusterBuffer::export)s
//! it. The result, an [`IpcBuffer`], is a value that goes to the other process by any way: a pipe, a file, a message.
//! There [`import`](ClusterDevice::import) makes a buffer of the same memory of it. No byte is copied.
//!
//! **Order.** `export` waits until the exporter's writes have completed, [`Imported::release`] until the importer's
//! uses have. In between the rule of Rust's borrows holds over processes: after `export` all of them only read; after
//! [`export_mut`](ClusterBuffer::export_mut) the importer has the memory alone. Everything else is [`Error::Borrowed`].
//!
//! **Trust.** An `IpcBuffer` names the exporter's socket, and has a random key that is good for one import. The
//! exporter's server gives the memory's descriptor only to processes of its own user. The importer compares bytes at
//! the memory's end, so it cannot take other memory for it.
//!
//! **Lives.** The memory stays until the exporter and all importers have dropped it or have ended. An importer that has
//! ended without a release is [`Error::HostLost`] for the exporter that waits for it.

mod chunk;
mod import;
mod server;
#[cfg(test)]
#[path = "../tests/unit/ipc/tests.rs"]
mod tests;
mod wire;

pub use import::Imported;

use crate::runtime::{
    Access, BufferInternals, DeviceInternals, ErrorInternals, ForeignMemory, Lending, OpSite, fits_blocks,
};
use chunk::Chunk;
use gpu_pool::{Device, DeviceBuffer, DeviceCopy, DeviceInfo, Error, Result};
use import::ask;
use serde::{Deserialize, Serialize};
use std::{
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};
use wire::{Key, Process};

const PROOF: usize = size_of::<Key>();
/// Between two looks: at whether the gang has failed, at guests that have a limit, and at processes that are ending.
const TICK: Duration = Duration::from_millis(20);

/// A buffer of another process, as a value that can be sent: from [`export`](ClusterBuffer::export), for
/// [`import`](ClusterDevice::import).
///
/// It is good for one import, in a process of the same user on the same machine, on the same GPU (memory of a software
/// GPU can be imported on any software GPU). It is a secret: each process of the same user that has it can have the
/// memory. It keeps nothing alive: the exporter keeps the buffer until the import.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpcBuffer {
    socket: String,
    process: Process,
    id: u64,
    key: Key,
    gpu: Gpu,
    element: String,
    len: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Gpu {
    Software,
    Cuda([u8; 16]),
}

impl Gpu {
    fn of(device: &DeviceInfo) -> Gpu {
        if device.compute_capability == (0, 0) { Gpu::Software } else { Gpu::Cuda(device.uuid) }
    }
}

display_as!(Gpu, |self, f| match self {
    Gpu::Software => f.write_str("a software GPU"),
    Gpu::Cuda(uuid) => write!(f, "GPU {:032x}", u128::from_be_bytes(*uuid)),
});

impl IpcBuffer {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The exporter's process id.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Refuses what cannot be imported as `T` on this GPU.
    #[track_caller]
    fn check<T>(&self, gpu: Gpu) -> Result<()> {
        let own = std::any::type_name::<T>();
        invalid_if!(self.element != own, "import", "the buffer is of {}, not of {own}", self.element);
        invalid_if!(self.gpu != gpu, "import", "the buffer is on {}, this is {gpu}", self.gpu);
        Ok(())
    }
}

debug_as! {
    IpcBuffer, |self|
    "IpcBuffer<{}>[{}] number {} of process {}, on {}", self.element, self.len, self.id, self.process.pid, self.gpu
}

/// Memory of several processes: this crate's methods on [`Device`]. Linux.
pub trait ClusterDevice {
    /// `len` zeros, in memory of their own, which other processes of this host may have:
    /// [`export`](ClusterBuffer::export).
    ///
    /// The memory is rounded up to the granularity of the driver, 2 MiB mostly. It is not pooled: it comes from the
    /// driver and goes back to it, at the end of the device's scope at the latest; and it counts neither in
    /// [`MemoryStats`](gpu_pool::memory::MemoryStats) nor against
    /// [`Builder::memory_limit`](gpu_pool::Builder::memory_limit).
    ///
    /// The page "Memory of two processes" of the guide has an example.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Driver`] for a device whose memory cannot be shared; [`Error::Aborted`].
    #[track_caller]
    fn exportable<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>>;

    /// A buffer of the memory that another process has exported. `T` is the exporter's element type, by its full name.
    ///
    /// # Errors
    /// * [`Error::InvalidArgument`]: another element type; another GPU; the exporter's user is another one; it was
    ///   imported already; the exporter has dropped the buffer or has withdrawn the export; no exporter has made it.
    /// * [`Error::HostLost`]: the exporter has ended. [`Error::HostTimeout`]: it has not answered for the pool's
    ///   deadline. In both, `host` is its process id.
    /// * [`Error::Cluster`]: the answer contradicts itself, or the memory that came is not the exporter's.
    /// * [`Error::Aborted`], the driver's.
    #[track_caller]
    fn import<T: DeviceCopy>(&self, ipc: &IpcBuffer) -> Result<Imported<T>>;

    /// Waits until every process that has imported a buffer has released it, and every export was imported, but for no
    /// longer than `limit`. Returns immediately if there was no export. Nothing on the device waits.
    ///
    /// # Errors
    /// * [`Error::HostLost`] once for an importer that has ended without a release; `host` is its process id. If it
    ///   could write, the contents are unspecified.
    /// * [`Error::HostTimeout`] after `limit`, with the importers; [`Error::Cluster`] if an export was not imported:
    ///   [`withdraw`](ClusterBuffer::withdraw) ends it.
    /// * [`Error::InvalidArgument`] for a buffer that is not [`exportable`](Self::exportable); [`Error::Aborted`].
    #[track_caller]
    fn wait_released<T: DeviceCopy>(&self, buffer: &DeviceBuffer<T>, limit: Duration) -> Result<()>;
}

impl ClusterDevice for Device {
    #[track_caller]
    fn exportable<T: DeviceCopy>(&self, len: usize) -> Result<DeviceBuffer<T>> {
        const { fits_blocks::<T>() };
        let _here = OpSite::here("exportable");
        self.check_outside_graph("exportable")?;
        let bytes = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(PROOF));
        let bytes = bytes.ok_or_else(|| Error::invalid("exportable", "more bytes than any memory has"))?;
        let (lending, proof) = (Arc::<Lending>::default(), wire::random("exportable")?);
        let (mut whole, memory) = self.apart("exportable", bytes, &lending)?;
        let chunk = whole.len();
        self.upload_into(&proof, &mut whole.slice_mut(chunk - PROOF..))?;
        whole.block().region().attach(Chunk {
            memory,
            bytes: (bytes - PROOF) as u64,
            chunk: chunk as u64,
            element: wire::element::<T>(),
            proof,
            deadline: self.deadline(),
            lending,
            loans: Default::default(),
            changed: Default::default(),
        });
        Ok(whole.reinterpret(len))
    }

    #[track_caller]
    fn import<T: DeviceCopy>(&self, ipc: &IpcBuffer) -> Result<Imported<T>> {
        const { fits_blocks::<T>() };
        let _here = OpSite::here("import");
        self.check_outside_graph("import")?;
        ipc.check::<T>(Gpu::of(self.info()))?;
        let (lease, reply, memory) = ask(ipc, self.deadline(), &|| self.check())?;
        let exclusive = reply.exclusive != 0;
        let told = usize::try_from(reply.chunk).ok().zip(usize::try_from(reply.bytes).ok());
        let fits = |&(chunk, bytes): &(usize, usize)| bytes.checked_add(PROOF).is_some_and(|bytes| bytes <= chunk);
        let Some((chunk, bytes)) = told.filter(fits) else {
            return Err(cluster_error!("import", "the exporter's answer contradicts itself"));
        };
        let same =
            reply.element == wire::element::<T>() && ipc.len.checked_mul(size_of::<T>() as u64) == Some(bytes as u64);
        invalid_if!(!same, "import", "the exporter's buffer has another type or length than this says");
        let lending = Arc::new(if exclusive { Lending::default() } else { Lending::read_only() });
        let whole = self.import_memory("import", chunk, memory.as_fd(), &lending)?;
        whole.block().region().attach(lease);
        let proof = self.download(&whole.slice(chunk - PROOF..))?;
        fail_if!(proof != reply.proof, cluster_error!("import", "the memory that came is not the exporter's"));
        Ok(Imported { buffer: whole.reinterpret(ipc.len()), exclusive })
    }

    #[track_caller]
    fn wait_released<T: DeviceCopy>(&self, buffer: &DeviceBuffer<T>, limit: Duration) -> Result<()> {
        let (op, begun, _here) = ("wait_released", Instant::now(), OpSite::here("wait_released"));
        let chunk = chunk_of(op, buffer)?;
        loop {
            self.check()?;
            let mut loans = chunk.loans.lock();
            if let Some(importer) = loans.lost.pop() {
                let why = "it ended without a release".into();
                return Err(Error::HostLost { host: importer as usize, op, why });
            }
            if !chunk.lending.is_lent() {
                return Ok(());
            }
            if begun.elapsed() >= limit {
                let missing: Vec<usize> = loans.held.iter().map(|pid| *pid as usize).collect();
                return Err(match missing.is_empty() {
                    true => cluster_error!(op, "an export was not imported for {limit:?}; `withdraw` ends it"),
                    false => Error::HostTimeout { op: op.into(), waited: limit, missing },
                });
            }
            chunk.changed.wait_for(&mut loans, TICK);
        }
    }
}

#[track_caller]
fn chunk_of<'b, T: DeviceCopy>(op: &'static str, buffer: &'b DeviceBuffer<T>) -> Result<&'b Chunk> {
    let why = "only a buffer of `Device::exportable` has memory of its own, which other processes may have";
    match buffer.block().region().attached() {
        Some(chunk) => Ok(chunk),
        None => Err(Error::invalid(op, why)),
    }
}

/// Memory of several processes: this crate's methods on [`DeviceBuffer`]. Linux.
pub trait ClusterBuffer {
    /// Lets another process read this [`exportable`](ClusterDevice::exportable) buffer. Waits for the last writes.
    ///
    /// Until that process has [released](Imported::release) it, all processes may only read: a write is
    /// [`Error::Borrowed`]. There may be several exports at a time; each is good for one import.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other buffers, and one that a graph names; [`Error::Borrowed`] while another
    /// process may write it; [`Error::Timeout`]; [`Error::Cluster`] without socket or thread for the exporter's server.
    #[track_caller]
    fn export(&self) -> Result<IpcBuffer>;

    /// Lends this [`exportable`](ClusterDevice::exportable) buffer to another process. Waits for the last uses.
    ///
    /// Until that process has [released](Imported::release) it, every use here is [`Error::Borrowed`]. Errors: as
    /// [`export`](Self::export); [`Error::Borrowed`] also while other processes may read it.
    #[track_caller]
    fn export_mut(&mut self) -> Result<IpcBuffer>;

    /// Ends the exports that no process has imported: they are of no use any more, and lend the buffer to no process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a buffer that is not [`exportable`](ClusterDevice::exportable).
    #[track_caller]
    fn withdraw(&self) -> Result<()>;
}

impl<T: DeviceCopy> ClusterBuffer for DeviceBuffer<T> {
    #[track_caller]
    fn export(&self) -> Result<IpcBuffer> {
        lend(self, "export", Access::Read)
    }

    #[track_caller]
    fn export_mut(&mut self) -> Result<IpcBuffer> {
        lend(self, "export_mut", Access::Write)
    }

    #[track_caller]
    fn withdraw(&self) -> Result<()> {
        server::withdraw(self.block().region(), chunk_of("withdraw", self)?);
        Ok(())
    }
}

#[track_caller]
fn lend<T: DeviceCopy>(buffer: &DeviceBuffer<T>, op: &'static str, access: Access) -> Result<IpcBuffer> {
    let _here = OpSite::here(op);
    let (chunk, block) = (chunk_of(op, buffer)?, buffer.block());
    invalid_if!(block.is_in_graph(), op, "a graph names this buffer, and its launches would not ask other processes");
    let gpu = Gpu::of(block.driver().info());
    fail_if!(!chunk.lend(access), Error::borrowed(op, buffer.device()));
    let lent = || {
        block.wait_host(op, access, chunk.deadline)?;
        let key = wire::random(op)?;
        let (server, id) = server::register(block.region(), access == Access::Write, key)?;
        let (socket, element) = (server.name.clone(), std::any::type_name::<T>().to_owned());
        Ok(IpcBuffer { socket, process: server.process, id, key, gpu, element, len: buffer.len() as u64 })
    };
    lent().inspect_err(|_| chunk.end(None, false))
}
