//! A pool joins the cluster: which transport its processes use, and how it begins and ends.
//!
//! [`Builder::cluster`] keeps the [`Cluster`]; the runtime connects it when the devices are known. All processes
//! must come to one choice, so each tells what it would take, and rank 0's word is compared with it.

#[cfg(feature = "nccl")]
mod pads;

use super::control::{Bcast, Control};
use super::{Cluster, TransportChoice};
use crate::runtime::{BuilderInternals, Connect, DriverRef, Processes};
#[cfg(any(feature = "mpi", feature = "nccl"))]
use crate::traits::DeviceTransport;
use crate::{collective::Hierarchical, link::Linked, traits::Transport};
use gpu_pool::{Builder, Result, event};
use std::{any::Any, sync::Arc};

/// Values that live as long as the cluster, and end with it.
pub(super) type Ends = Box<dyn Any + Send + Sync>;

/// [`Builder`] with a [`Cluster`].
pub trait ClusterBuilder {
    /// This pool is one process's part of a cluster: [`Device::world`](gpu_pool::Device::world) is the group of all
    /// devices of all processes. Each process builds such a pool, and [`build`](Builder::build) returns when all have.
    /// They may have different numbers of devices, but of one kind: GPUs, or software GPUs. A process has one such pool
    /// at a time; with MPI one in its life, since MPI cannot begin twice.
    ///
    /// A process leaves when its pool is [closed](gpu_pool::GpuPool::close) or dropped.
    ///
    /// The page "More than one host" of the guide has an example.
    ///
    /// # Errors
    /// [`build`](Builder::build) then also returns:
    ///
    /// * [`Error::Cluster`]: rank 0 cannot listen, or cannot be reached; another secret, version or size; a rank that
    ///   is taken; a library that is missing, too old, cannot carry these devices, or does not begin within the time of
    ///   [`Cluster::connect_timeout`], here or in another process.
    /// * [`Error::HostTimeout`]: processes that have not come in the time of [`Cluster::connect_timeout`].
    /// * [`Error::HostLost`]: a process has ended meanwhile. [`Error::Transport`]: the library's own error.
    ///
    /// [`Error::Cluster`]: gpu_pool::Error::Cluster
    /// [`Error::HostTimeout`]: gpu_pool::Error::HostTimeout
    /// [`Error::HostLost`]: gpu_pool::Error::HostLost
    /// [`Error::Transport`]: gpu_pool::Error::Transport
    #[must_use]
    fn cluster(self, cluster: Cluster) -> Self;
}

impl ClusterBuilder for Builder {
    fn cluster(self, cluster: Cluster) -> Self {
        self.connect(Arc::new(cluster))
    }
}

#[doc(hidden)]
impl Connect for Cluster {
    fn connect(&self, drivers: &[DriverRef]) -> Result<Arc<dyn Processes>> {
        let software = drivers.iter().any(|driver| driver.info().compute_capability == (0, 0));
        let mut mpi = MpiPart::default();
        let by_mpi = self.needs_bcast();
        if by_mpi {
            mpi.load(self)?;
        }
        let bcast = |bytes: &mut [u8]| mpi.broadcast(self, bytes);
        let bcast: Option<Bcast<'_>> = if by_mpi { Some(&bcast) } else { None };
        let world = self.join(drivers.len(), bcast, |control| {
            let (transport, ends) = self.open(control, drivers, software, &mpi)?;
            Ok((transport, mpi.ends_behind(ends, self, control)))
        })?;
        Ok(Linked::new(world, Hierarchical))
    }
}

impl Cluster {
    fn open(
        &self,
        control: &Control,
        drivers: &[DriverRef],
        software: bool,
        mpi: &MpiPart,
    ) -> Result<(Transport, Ends)> {
        if self.size() == 1 {
            let none = cluster_error!("transport", "a cluster of one process needs no transport");
            return Ok((Transport::None(none), Box::new(())));
        }
        let one_machine = same_everywhere(&control.gather("machine", &machine()?)?);
        let choice = match self.transport_choice() {
            TransportChoice::Auto if !software => TransportChoice::Nccl,
            TransportChoice::Auto if mpi.is_loaded() || !one_machine => TransportChoice::Mpi,
            TransportChoice::Auto => TransportChoice::SharedMemory,
            given => given,
        };
        let told = control.gather("transport", format!("{choice:?}").as_bytes())?;
        if let Some(other) = told.iter().position(|one| *one != told[0]) {
            let [first, one] = [0, other].map(|host| String::from_utf8_lossy(&told[host]));
            let why = "give all processes one kind of device, one GPU_POOL_TRANSPORT";
            return Err(cluster_error!("transport", "rank 0 takes {first} and rank {other} {one}: {why}"));
        }
        match choice {
            TransportChoice::Nccl if software => Err(cluster_error!(
                "transport",
                "NCCL moves data between GPUs, and these are software GPUs: on one machine use GPU_POOL_TRANSPORT=shm, \
                 else start the processes by mpirun with the feature `mpi`"
            )),
            TransportChoice::Nccl => self.open_nccl(control, drivers, one_machine),
            TransportChoice::SharedMemory if !one_machine => Err(cluster_error!(
                "transport",
                "shared memory is for processes of one machine, and these are on several: use MPI (feature `mpi`)"
            )),
            TransportChoice::SharedMemory => self.open_shm(control),
            TransportChoice::Mpi | TransportChoice::Auto => mpi.open(self, control, drivers, software),
        }
    }

    #[cfg(all(target_os = "linux", not(loom)))]
    fn open_shm(&self, control: &Control) -> Result<(Transport, Ends)> {
        use super::transport::shm::{RING, Shm};
        let place = (self.rank(), self.size());
        let (set, get) = (|key: &str, value: &[u8]| control.local.set(key, value), |key: &str| control.local.get(key));
        let shm = Shm::connect(RING, "rings", place, set, get, &|| control.lost(), self.connect_timeout)?;
        Ok((Transport::Host(Arc::new(shm)), Box::new(())))
    }

    #[cfg(any(not(target_os = "linux"), loom))]
    fn open_shm(&self, _: &Control) -> Result<(Transport, Ends)> {
        Err(cluster_error!("transport", "shared memory between processes needs Linux"))
    }

    #[cfg(feature = "nccl")]
    fn open_nccl(&self, control: &Control, drivers: &[DriverRef], one_machine: bool) -> Result<(Transport, Ends)> {
        use super::transport::nccl::{Keys, MOST_BLOCKS, Nccl};
        let mut nccl = Nccl::new(self.rank(), &control.devices, Arc::new(lost(control)), self.connect_timeout)?;
        // All processes must come to one answer.
        let blocks = if forced() { 0 } else { MOST_BLOCKS };
        if control.gather("nccl/overlap", &[u8::from(forced() || apart(drivers))])?.iter().all(|told| *told == [1]) {
            nccl.overlap(blocks);
        }
        let nccl = Arc::new(nccl);
        let tell = tell_failure(control);
        nccl.when_failed(&tell);
        let set = |key: &str, value: &[u8]| control.local.set(key, value);
        let get = |key: &str| control.local.get(key);
        let connect = |device: usize| nccl.connect_rail(device, &drivers[device], &Keys { set: &set, get: &get });
        let connected: Result<()> = crossbeam::thread::scope(|scope| {
            let start = |device: usize| {
                let rail = scope.builder().spawn(move |_| connect(device));
                rail.map_err(|e| cluster_error!("transport", "no thread for device {device} could be started: {e}"))
            };
            let rails: Vec<_> = (0..drivers.len()).map(start).collect();
            rails.into_iter().try_for_each(|rail| rail?.join().unwrap_or_else(|p| std::panic::resume_unwind(p)))
        })
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        connected?;
        let alone = self.transport_choice() == TransportChoice::Nccl;
        nccl.set_pad(pads::open(control, drivers, (one_machine, alone), self.connect_timeout)?);
        let ending = nccl.clone();
        let ends = Ending::new(control, move || ending.close());
        Ok((Transport::Device(nccl), Box::new((ends, tell))))
    }

    #[cfg(not(feature = "nccl"))]
    fn open_nccl(&self, _: &Control, _: &[DriverRef], _: bool) -> Result<(Transport, Ends)> {
        let why = "this program was built without the feature `nccl`, which moves data between GPUs";
        Err(cluster_error!("transport", "{why}"))
    }
}

#[derive(Default)]
struct MpiPart {
    #[cfg(feature = "mpi")]
    mpi: Option<Arc<super::transport::mpi::Mpi>>,
}

#[cfg(feature = "mpi")]
impl MpiPart {
    fn load(&mut self, cluster: &Cluster) -> Result<()> {
        let mpi = super::transport::mpi::Mpi::load(cluster.connect_timeout)?;
        if (mpi.rank(), mpi.size()) != (cluster.rank(), cluster.size()) {
            let told = format!("the launcher says rank {} of {}", cluster.rank(), cluster.size());
            let found = format!("{} says rank {} of {}", mpi.version(), mpi.rank(), mpi.size());
            let to_do = "name the launcher's own library by GPU_POOL_MPI";
            return Err(cluster_error!("transport", "{told}, and {found}: {to_do}"));
        }
        self.mpi = Some(Arc::new(mpi));
        Ok(())
    }

    fn is_loaded(&self) -> bool {
        self.mpi.is_some()
    }

    /// Ends MPI behind any transport: the launcher takes a process that never ends MPI for a failed one.
    fn ends_behind(&self, ends: Ends, cluster: &Cluster, control: &Control) -> Ends {
        let Some(mpi) = self.mpi.clone() else { return ends };
        let limit = last_wait(cluster);
        Box::new((ends, Ending::new(control, move || mpi.close(limit))))
    }

    fn broadcast(&self, cluster: &Cluster, bytes: &mut [u8]) -> Result<()> {
        self.mpi.as_ref().map_or(Ok(()), |mpi| mpi.broadcast(bytes, cluster.connect_timeout))
    }

    fn open(
        &self,
        cluster: &Cluster,
        control: &Control,
        drivers: &[DriverRef],
        software: bool,
    ) -> Result<(Transport, Ends)> {
        let mut loaded = MpiPart { mpi: self.mpi.clone() };
        if loaded.mpi.is_none() {
            loaded.load(cluster)?;
        }
        let Some(mpi) = loaded.mpi else { unreachable!("loaded") };
        let (ending, limit) = (mpi.clone(), last_wait(cluster));
        let ends = Ending::new(control, move || ending.close(limit));
        // All processes must come to one choice: their libraries may differ.
        let takes = (!software && mpi.is_cuda_aware()) || forced();
        if !control.gather("mpi/devices", &[u8::from(takes)])?.iter().all(|told| *told == [1]) {
            return Ok((Transport::Host(mpi), Box::new(ends)));
        }
        let transport = Arc::new(super::transport::mpi::DeviceMpi::new(mpi, drivers, lost(control)));
        let tell = tell_failure(control);
        transport.when_failed(&tell);
        Ok((Transport::Device(transport), Box::new((ends, tell))))
    }
}

#[cfg(any(test, feature = "extend"))]
thread_local! {
    /// As if MPI took addresses of software GPUs' memory, and each device had a GPU of its own with room for all.
    pub static FORCED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

#[cfg(any(feature = "mpi", feature = "nccl"))]
fn forced() -> bool {
    #[cfg(any(test, feature = "extend"))]
    return FORCED.get();
    #[cfg(not(any(test, feature = "extend")))]
    false
}

#[cfg(not(feature = "mpi"))]
impl MpiPart {
    fn load(&mut self, _: &Cluster) -> Result<()> {
        Err(cluster_error!(
            "environment",
            "where is rank 0? MPI's launchers tell only MPI, and this program was built without the feature `mpi`: \
             build with it, or set GPU_POOL_MASTER and GPU_POOL_PORT"
        ))
    }

    fn is_loaded(&self) -> bool {
        false
    }

    fn ends_behind(&self, ends: Ends, _: &Cluster, _: &Control) -> Ends {
        ends
    }

    fn broadcast(&self, _: &Cluster, _: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn open(&self, _: &Cluster, _: &Control, _: &[DriverRef], _: bool) -> Result<(Transport, Ends)> {
        Err(cluster_error!(
            "transport",
            "software GPUs of several machines need MPI, and this program was built without the feature `mpi`"
        ))
    }
}

/// Whether each device has a GPU of its own.
#[cfg(feature = "nccl")]
fn apart(drivers: &[DriverRef]) -> bool {
    let uuids = drivers.iter().map(|driver| driver.info().uuid);
    uuids.clone().enumerate().all(|(at, uuid)| uuids.clone().take(at).all(|other| other != uuid))
}

/// Ends a transport with the cluster's last handle; not after a loss, when others may never come to their end.
struct Ending {
    control: Control,
    end: Box<dyn Fn() -> Result<()> + Send + Sync>,
}

impl Ending {
    #[cfg_attr(not(any(feature = "mpi", feature = "nccl")), expect(dead_code, reason = "shared memory ends by itself"))]
    fn new(control: &Control, end: impl Fn() -> Result<()> + Send + Sync + 'static) -> Ending {
        Ending { control: control.clone(), end: Box::new(end) }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if self.control.check().is_err() || std::thread::panicking() {
            return;
        }
        if let Err(error) = (self.end)() {
            event!(warn, "transport_ended_badly", %error, "the transport between processes did not end well");
        }
    }
}

/// How long the end of MPI waits for the other processes. One of them may write a checkpoint before it closes its pool.
#[cfg(feature = "mpi")]
fn last_wait(cluster: &Cluster) -> std::time::Duration {
    cluster.connect_timeout.max(cluster.heartbeat_timeout)
}

/// Under this name a process tells that its transport has failed, and why.
#[cfg(any(feature = "mpi", feature = "nccl"))]
fn failed_by(host: usize) -> String {
    format!("transport/failed/{host}")
}

/// Why calls of a transport between devices will not end: the end of the cluster, or of the transport elsewhere.
#[cfg(any(feature = "mpi", feature = "nccl"))]
fn lost(control: &Control) -> impl Fn() -> Option<gpu_pool::Error> + Send + Sync + 'static {
    let (control, own, size) = (control.clone(), control.host, control.size());
    let others = move || (0..size).filter(move |&host| host != own);
    others().for_each(|host| control.local.ask(&failed_by(host)));
    move || {
        let elsewhere = |host: usize| {
            let why = String::from_utf8_lossy(&control.local.known(&failed_by(host))?).into_owned();
            Some(gpu_pool::Error::AbortedByHost { host, device: None, cause: why })
        };
        control.check().err().or_else(|| others().find_map(elsewhere))
    }
}

/// Tells the other processes that the transport has failed here: their calls would never end.
#[cfg(any(feature = "mpi", feature = "nccl"))]
fn tell_failure(control: &Control) -> Arc<crate::traits::Tell> {
    let control = control.clone();
    Arc::new(move |error| {
        let told = control.local.set(&failed_by(control.host), super::wire::cut(error.to_string()).as_bytes());
        if let Err(error) = told {
            event!(debug, "transport_failed", %error, "the others know by themselves that the transport has failed");
        }
    })
}

/// An identity of this machine; nothing where the system does not say.
pub(super) fn machine() -> Result<Vec<u8>> {
    let read = |file: &str| match std::fs::read(file) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(cluster_error!("transport", "which machine is this? {file}: {e}"))
        }
        read => Ok(read.unwrap_or_default()),
    };
    // A boot's number: containers of one machine have it in common, and so have their processes' memory.
    Ok([read("/proc/sys/kernel/random/boot_id")?, read("/proc/sys/kernel/hostname")?].concat())
}

pub(super) fn same_everywhere(all: &[Vec<u8>]) -> bool {
    all.iter().all(|one| *one == all[0] && !one.is_empty())
}
