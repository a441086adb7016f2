#![doc = include_str!("../README.md")]
//!
//! # Design
//!
//! One address space ends at one process. Beyond it this crate runs on existing engines: NCCL between GPUs, MPI
//! between hosts' memories, shared memory between software GPUs of one host.
//!
//! A [`Cluster`] says which processes belong together; [`cluster`](prelude::ClusterBuilder::cluster) connects them.
//! Then [`Device::world`](gpu_pool::Device::world) is the group of all devices of all processes. The guide's page "More
//! than one host" has launchers, ports, and what happens when a process dies.
//!
//! In errors a *host* is one of these processes, with its number (MPI's rank), whichever machine it is on.
//!
//! Control: each process has one TCP connection to rank 0, whose hub decides what all agree on: which collectives are
//! carried out and in which order, who has failed, who is lost. Headlines cross it, never data. Both sides prove that
//! they know the secret; the connection is not encrypted. Without a secret it stays on loopback, where every user of
//! the machine can connect. If rank 0 is lost, the cluster is.
//!
//! This crate implements the traits of the runtime's door to other processes (`fabric/processes.rs`,
//! `collective/across.rs`). It uses the runtime's public face and `gpu_pool::extend::cluster`.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(feature = "extend", allow(missing_docs, reason = "private parts in sight of tests"))]
#![cfg_attr(not(any(test, loom)), deny(clippy::disallowed_methods))]
#![cfg_attr(loom, allow(clippy::disallowed_types, clippy::disallowed_methods))]

#[macro_use(debug_as, display_as, fail_if, invalid_if, setters)]
extern crate gpu_pool;

/// An `Error::Cluster` of an operation, with a formatted reason.
macro_rules! cluster_error {
    ($op:expr, $($why:tt)+) => { gpu_pool::Error::Cluster { op: $op, why: format!($($why)+) } };
}

// The loopback cluster of the tests names this crate.
#[cfg(test)]
extern crate self as gpu_pool_cluster;

#[cfg(doctest)]
#[path = "../tests/unit/book.rs"]
mod book;
mod client;
mod collective;
mod connect;
#[cfg_attr(loom, allow(dead_code, reason = "there is no transport to open"))]
mod control;
mod exchange;
mod greet;
#[cfg_attr(any(loom, not(target_os = "linux")), allow(dead_code, reason = "processes share no memory"))]
mod hub;
#[cfg(target_os = "linux")]
pub mod ipc;
mod launch;
mod link;
mod mesh;
mod mutant;
#[cfg(all(target_os = "linux", not(loom)))]
mod near;
pub mod prelude;
mod process;
mod server;
#[cfg(target_os = "linux")]
mod socket;
#[cfg_attr(any(loom, not(feature = "nccl")), allow(dead_code, reason = "there is no transport between devices"))]
mod traits;
mod transport;
#[cfg_attr(any(loom, not(target_os = "linux")), allow(dead_code, reason = "processes share no memory"))]
mod wire;
#[cfg_attr(loom, deny(clippy::disallowed_types, clippy::disallowed_methods))]
#[cfg_attr(any(loom, not(target_os = "linux")), allow(dead_code, reason = "processes share no memory"))]
mod world;

/// Private parts for tests, such as the cluster within one process of `tests/support/loopback`. **Exempt from semver.**
#[cfg(feature = "extend")]
#[doc(hidden)]
pub mod extend {
    pub use crate::{
        collective::{Hierarchical, MOST_PIECES, PIECE},
        connect::FORCED,
        link::{Linked, link_of},
        mutant::{Rule, broken},
        traits::*,
    };
    #[cfg(all(feature = "mpi", any(target_os = "linux", target_os = "macos")))]
    pub mod mpi {
        pub use crate::transport::mpi::{Mpi, PIECE};
    }
    #[cfg(all(target_os = "linux", not(loom)))]
    pub mod shm {
        pub use crate::transport::shm::{RING, Shm};
    }
}
#[cfg(target_os = "linux")]
pub use ipc::{Imported, IpcBuffer};
pub use transport::libraries;
/// For `gpu-pool-cli`. **Exempt from semver.**
#[cfg(feature = "nccl")]
#[doc(hidden)]
pub use transport::nccl::peer;

/// The runtime's items for this crate besides its public interface.
mod runtime {
    pub(crate) use gpu_pool::extend::cluster::{collective::*, driver::*, memory::*, processes::*, *};
}

/// The methods of the runtime's private parts.
mod internals {
    pub(crate) use crate::runtime::{
        DeviceInternals as _, ErrorInternals as _, GroupInternals as _, PinnedInternals as _,
    };
}

use gpu_pool::Result;
use launch::{By, Launch, Read, Variables, no_launcher, wrong};
use runtime::{parse_duration, variables};
use std::time::Duration;

/// The transport moves data between processes. A library that is missing, too old, or cannot carry these devices is an
/// [`Error::Cluster`](gpu_pool::Error::Cluster) when the pool is built. The error names the library to install or use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransportChoice {
    /// NCCL on GPUs; where all are on one machine, one in each process, small sums go by own kernels, which write into
    /// each other's memory ([`Group::explain`](gpu_pool::Group::explain) says so). On software GPUs MPI if its launcher
    /// has started the processes, else shared memory, which needs all of them on one machine.
    #[default]
    Auto,
    /// NCCL 2.19.1 or newer, between GPUs, for all that goes between processes. Feature `nccl`.
    Nccl,
    /// MPI, between the memories of hosts; the devices' data are staged there. Feature `mpi`.
    Mpi,
    /// Shared memory, between the processes of one machine; the devices' data are staged there. Linux.
    SharedMemory,
}

/// The processes that work as one, and this one's place among them.
///
/// It is a description, which any thread may have: nothing is opened until a pool is built with it
/// ([`cluster`](prelude::ClusterBuilder::cluster)). All processes give the same size, address, secret, times and
/// transport. Its `Debug` text leaves the secret out.
///
/// ```
/// use gpu_pool_cluster::Cluster;
/// use std::time::Duration;
///
/// let cluster = Cluster::tcp("127.0.0.1:29600", 0, 2, "many letters")?.heartbeat_timeout(Duration::from_secs(10));
/// assert_eq!((cluster.rank(), cluster.size()), (0, 2));
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[derive(Clone)]
pub struct Cluster {
    launch: Launch,
    secret: Vec<u8>,
    heartbeat_timeout: Duration,
    connect_timeout: Duration,
    transport: TransportChoice,
}

debug_as! {
    Cluster, |self|
    launch = self.launch, heartbeat_timeout = self.heartbeat_timeout, connect_timeout = self.connect_timeout,
    transport = self.transport, ..
}

impl Cluster {
    const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(30);
    const CONNECT_TIMEOUT: Duration = Duration::from_secs(300);

    /// As this process's launcher says. The first of these that has set its variables counts: `GPU_POOL_RANK`,
    /// `GPU_POOL_SIZE`, `GPU_POOL_MASTER` and `GPU_POOL_PORT`; `mpirun` of Open MPI; of MPICH; `torchrun`; `srun`.
    /// `GPU_POOL_MASTER` and `GPU_POOL_PORT` are also the address of rank 0 under the others, if they are set.
    ///
    /// Also read: `GPU_POOL_SECRET`, `GPU_POOL_SILENCE` (a time like `30s`), and `GPU_POOL_TRANSPORT` (`auto`, `nccl`,
    /// `mpi` or `shm`).
    ///
    /// # Errors
    /// [`Error::Cluster`](gpu_pool::Error::Cluster) if no launcher has started this process, if a variable is missing,
    /// not UTF-8 or not understood, or with more than 65,536 processes. It names the variable, and never has a secret.
    pub fn from_env() -> Result<Cluster> {
        Cluster::launched()?.ok_or_else(no_launcher)
    }

    /// [`from_env`](Self::from_env), but `None` if no launcher started this process: for programs that also run alone.
    ///
    /// ```
    /// use gpu_pool::GpuPool;
    /// use gpu_pool_cluster::{Cluster, prelude::*};
    ///
    /// let mut builder = GpuPool::builder().host(2);
    /// if let Some(cluster) = Cluster::launched()? {
    ///     builder = builder.cluster(cluster);
    /// }
    /// let pool = builder.build()?;
    /// // All devices of all processes.
    /// pool.run(|dev, _| dev.world()?.barrier())?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Cluster`](gpu_pool::Error::Cluster) as for [`from_env`](Self::from_env), but not for the lack of a
    /// launcher.
    pub fn launched() -> Result<Option<Cluster>> {
        Cluster::from_variables(&|name| variables::text(name))
    }

    fn from_variables(variables: Read<'_>) -> Result<Option<Cluster>> {
        let misunderstood = |name: &str, text: &str, expected: &str| {
            wrong(format!("{name} is `{text}`, which is not understood; expected {expected}"))
        };
        let variables = Variables(variables);
        let Some(launch) = Launch::from(&variables)? else { return Ok(None) };
        let secret = variables.raw("GPU_POOL_SECRET")?.unwrap_or_default();
        let blank = secret.trim().is_empty() && !secret.is_empty();
        fail_if!(blank, wrong("GPU_POOL_SECRET is blank: a secret has letters"));
        let mut cluster = Cluster::new(launch, secret);
        if let Some(text) = variables.text("GPU_POOL_SILENCE")? {
            let expected = "a time above zero like 500ms or 30s";
            let time = parse_duration(&text).ok_or_else(|| misunderstood("GPU_POOL_SILENCE", &text, expected))?;
            cluster.heartbeat_timeout = time;
        }
        cluster.transport = match variables.text("GPU_POOL_TRANSPORT")?.as_deref() {
            None | Some("auto") => TransportChoice::Auto,
            Some("nccl") => TransportChoice::Nccl,
            Some("mpi") => TransportChoice::Mpi,
            Some("shm") => TransportChoice::SharedMemory,
            Some(text) => return Err(misunderstood("GPU_POOL_TRANSPORT", text, "auto, nccl, mpi or shm")),
        };
        Ok(Some(cluster))
    }

    /// Process `rank` of `size`, with rank 0 at `address`: a name or an IP address, and a TCP port, such as
    /// `"node1:29600"` or `"[::1]:29600"`. Port 0 is one of the system's choice, for a single process. All processes
    /// have the same secret. It may be empty if the address is one of loopback.
    ///
    /// [`local_rank`](Self::local_rank) is then 0, and [`local_size`](Self::local_size) 1.
    ///
    /// # Errors
    /// [`Error::Cluster`](gpu_pool::Error::Cluster) if the address has no port, if there is no such rank, or if there
    /// are more than 65,536 processes. Faults of the address itself, or of the secret, come out when the pool is built.
    pub fn tcp(address: &str, rank: usize, size: usize, secret: impl Into<String>) -> Result<Cluster> {
        let parts = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let Some((host, port)) = parts.filter(|(host, _)| !host.is_empty()) else {
            return Err(cluster_error!("address", "the address `{address}` is not like `node1:29600`"));
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let launch = Launch { rank, size, local_rank: 0, local_size: 1, master: Some((host, port)), by: By::Hand };
        Ok(Cluster::new(launch.checked()?, secret.into()))
    }

    fn new(launch: Launch, secret: String) -> Cluster {
        let (heartbeat_timeout, connect_timeout) = (Self::HEARTBEAT_TIMEOUT, Self::CONNECT_TIMEOUT);
        let (secret, transport) = (secret.into_bytes(), TransportChoice::Auto);
        Cluster { launch, secret, heartbeat_timeout, connect_timeout, transport }
    }

    /// The number of this process: 0, 1, .. In errors it is the *host*.
    pub fn rank(&self) -> usize {
        self.launch.rank
    }

    /// The number of processes.
    pub fn size(&self) -> usize {
        self.launch.size
    }

    /// The number of this process among those of its machine, if the launcher has told; else 0. With a process for each
    /// GPU it is the GPU's ordinal: `builder.devices(&[cluster.local_rank()])`.
    pub fn local_rank(&self) -> usize {
        self.launch.local_rank
    }

    /// The number of processes on this machine, if the launcher has told; else 1.
    pub fn local_size(&self) -> usize {
        self.launch.local_size
    }

    pub(crate) fn transport_choice(&self) -> TransportChoice {
        self.transport
    }
}

setters! { Cluster;
    /// A process without a heartbeat for this long is lost: 30 seconds if not set. A shorter limit than 10 ms counts as
    /// 10 ms. Everywhere the same. A process whose connection ends is lost immediately.
    ///
    /// Processes speak by themselves, from a thread of their own, also during long computations: only one that is
    /// stopped, or cut off, is silent. (For one that does not get on, there is
    /// [`Builder::timeout`](gpu_pool::Builder::timeout).)
    pub fn heartbeat_timeout(self, limit: Duration) { self.heartbeat_timeout = limit.max(Duration::from_millis(10)); }

    /// How long the processes wait for each other while their pools are built: 5 minutes if not set. A shorter limit
    /// than 10 ms counts as 10 ms. So long they also wait until the name of rank 0's machine is known.
    pub fn connect_timeout(self, limit: Duration) { self.connect_timeout = limit.max(Duration::from_millis(10)); }

    /// The transport, which moves data between processes: [`TransportChoice::Auto`] if not set. Everywhere the same.
    pub fn transport(self, transport: TransportChoice) { self.transport = transport; }
}

// The models drive private parts.
#[cfg(all(test, loom))]
#[path = "../../../loom_tests/cluster.rs"]
mod models;

#[cfg(test)]
#[path = "../tests/unit/texts.rs"]
mod texts;
