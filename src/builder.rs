//! How a pool is built: settings, devices, threads, and the probe of the links between devices.
//!
//! Contradictory settings are refused before any device does work.

pub(crate) mod environment;
mod memory;
mod open;
pub(crate) mod probe;
mod settings;
mod share;
pub(crate) mod signal_pad;
mod ways;

use crate::collective::{Algorithm, ReduceOrder, Transfer, transfer};
use crate::driver::{DriverRef, FaultKind, Observer, host, module::Module, observe};
use crate::error::{Error, Result, UnknownName, op_site::OpSite};
use crate::fabric::{Codecs, processes::Connect};
use crate::memory::{BackingChoice, cache::Settings};
use crate::{pool::GpuPool, thread::worker, timeline::timed::Timed};
use std::{panic::Location, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

const DEFAULT_SOFTWARE_GPUS: usize = 4;
const MOST_SOFTWARE_GPUS: usize = 64;
const GPUS: &str = "CUDA devices";

/// The kind of a pool's devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// NVIDIA GPUs through the CUDA driver.
    Cuda,
    /// Software GPUs on the CPU, this many.
    Host(usize),
}

display_as!(Backend, |self, f| match self {
    Backend::Cuda => f.pad("cuda"),
    Backend::Host(count) => f.pad(&format!("host:{count}")),
});

impl FromStr for Backend {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let backend = match name.split_once(':') {
            None if name == "cuda" => Some(Backend::Cuda),
            None if name == "host" => Some(Backend::Host(DEFAULT_SOFTWARE_GPUS)),
            Some(("host", count)) => count.parse().ok().map(Backend::Host),
            _ => None,
        };
        backend.ok_or_else(|| UnknownName::new(name, "backend", "cuda, host or host:8"))
    }
}

/// Settings of a pool, from [`GpuPool::builder`].
///
/// A setting that the program does not make comes from the environment:
///
/// | variable | meaning |
/// |---|---|
/// | `GPU_POOL_BACKEND` | `cuda`, `host`, or `host:8` for eight software GPUs |
/// | `GPU_POOL_DEVICES` | ordinals, like `0,1` |
/// | `GPU_POOL_SHARE` | for tests: open each CUDA device 1 to 16 times: [`share_gpus`](Self::share_gpus) |
/// | `GPU_POOL_CHECK` | `races`, `memory` or `off`: read by `gpu-pool-lab`, and refused without it |
/// | `GPU_POOL_SEED` | a number: software GPUs run one operation at a time, in an order drawn from this seed |
/// | `GPU_POOL_FAULTS` | faults to inject after the pool is built: read by `gpu-pool-lab`, and refused without it |
/// | `GPU_POOL_MEMORY` | `auto`, `vmm` or `malloc`: [`memory_backing`](Self::memory_backing) |
/// | `GPU_POOL_RECORD_MEMORY` | `1` or `0`: [`record_memory`](Self::record_memory) |
/// | `GPU_POOL_ALGORITHM` | `auto`, `direct`, `inbox`, `exchange`, `copies`, `staged`, `host`, `ring`: [`Self::algorithm`] |
/// | `GPU_POOL_NCCL_REGISTER` | `1` or `0`: [`register_buckets`](Self::register_buckets) |
/// | `GPU_POOL_FLIGHT_RECORD` | a folder, or the beginning of a file's name: [`flight_record`](Self::flight_record) |
/// | `GPU_POOL_FLIGHT_RECORD_SIGNAL` | `1` or `0`: [`flight_record_on_signal`](Self::flight_record_on_signal) |
/// | `GPU_POOL_TIMEOUT` | the deadline: `500ms`, `30s` or `10m`; a bare number is seconds |
/// | `GPU_POOL_TRACE` | a file: [`trace`](Self::trace) |
/// | `GPU_POOL_LOG` | for programs without a `tracing` subscriber: `off`, `error`, `warn` (default), `info` or `debug` |
///
/// The crate warns once of other variables that begin with `GPU_POOL_`: they may be misspelt.
/// By default a pool has all CUDA devices, or 4 software GPUs if there is no CUDA device.
///
/// ```
/// let pool = gpu_pool::GpuPool::builder().host(2).weights(&[2.0, 1.0]).build()?;
/// assert_eq!(pool.run(|_, shard| Ok(shard.range(9).len()))?, [6, 3]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "nothing is built before `build`"]
pub struct Builder {
    backend: Option<Backend>,
    devices: Option<Vec<usize>>,
    sharing: Option<share::Sharing>,
    weights: Weights,
    modules: Vec<&'static Module>,
    memory: Settings,
    backing: Option<BackingChoice>,
    software_memory: Option<u64>,
    timeout: Option<Duration>,
    algorithm: Option<Algorithm>,
    reduce_order: ReduceOrder,
    register_buckets: Option<bool>,
    staged: bool,
    /// Device threads run on any CPU.
    roams: bool,
    /// The observer of the pool, which injects faults and keeps the time: see [`observe`].
    pub(crate) observer: Option<Arc<dyn Observer>>,
    schedule: Option<host::ExecutionOrder>,
    pub(crate) machine: host::MachineConfig,
    pub(crate) cluster: Option<Arc<dyn Connect>>,
    codecs: Codecs,
    trace: Option<PathBuf>,
    flight_record: Option<PathBuf>,
    flight_record_on_signal: Option<bool>,
}

#[derive(Clone, Debug, Default)]
enum Weights {
    #[default]
    Even,
    Given(Vec<f64>),
    Measured,
}

setters! { Builder;
    /// The kind of devices.
    pub fn backend(self, backend: Backend) { self.backend = Some(backend); }

    /// Only these devices, by the driver's ordinals, in this order. The pool does not touch any other device.
    pub fn devices(self, ordinals: &[usize]) { self.devices = Some(ordinals.to_vec()); }

    /// The devices' shares of the data, one positive, finite number per device. A device with weight 2 gets twice as
    /// many rows as one with weight 1. Only ratios count.
    pub fn weights(self, weights: &[f64]) { self.weights = Weights::Given(weights.to_vec()); }

    /// Shares by measured speed: when the pool is built, each device streams through 64 MB a few times.
    pub fn weights_measured(self) { self.weights = Weights::Measured; }

    /// Device code to load on every device when the pool is built. Most of the crate's own kernels are loaded
    /// then, too; the others at their first launch.
    pub fn module(self, module: &'static Module) { self.modules.push(module); }

    /// The memory of each software GPU, in bytes (default 4 GiB). It uses host memory only for pages that are touched.
    pub fn software_memory(self, bytes: u64) { self.software_memory = Some(bytes); }

    /// The deadline (default 120 s): a wait fails after this time without progress. A stream shows progress at every
    /// sixteenth operation. A kernel that runs longer than the deadline looks stuck: set a longer one for such kernels.
    ///
    /// If the process is stopped (in a debugger, by `SIGSTOP`, with its virtual machine), each stop counts as at most a
    /// quarter of the deadline: host threads look at the clock several times before they give up. (So a deadline under
    /// 0.1 s may take 0.1 s.) Kernels that wait for peers' kernels use the GPU's clock, which does not stop.
    ///
    /// [`build`](Self::build) refuses a deadline of zero.
    pub fn timeout(self, deadline: Duration) { self.timeout = Some(deadline); }

    /// Where [flight records](crate::FlightRecord) go when a scope fails by a deadline, a deadlock or a panic, or has
    /// closures without progress. A folder that exists: to files in it, named by process and number. Else to files
    /// whose names begin so. No file is overwritten. Without this the log has a short text, at level `error`.
    pub fn flight_record(self, to: impl Into<PathBuf>) { self.flight_record = Some(to.into()); }

    /// Whether the signal `SIGUSR1` makes the pool write a [flight record](crate::FlightRecord) (default: no). The
    /// process then has a handler of that signal, and a thread that waits for it, until it ends. [`build`](Self::build)
    /// refuses it without the feature `signals`, and on other systems than Unix.
    pub fn flight_record_on_signal(self, on: bool) { self.flight_record_on_signal = Some(on); }

    /// Switches peer access off: copies between devices go through the host, and kernels cannot access peers' memory.
    /// For tests, and for machines with slow peer access. [`build`](Self::build) refuses it together with
    /// [`Algorithm::Direct`], which needs peer access.
    pub fn without_peer_access(self) { self.staged = true; }

    /// Whether each device's thread runs on the CPUs of its GPU's NUMA node only (default: yes). Threads that a
    /// closure starts inherit it: start threads for the whole machine, such as rayon's, outside of closures. It has no
    /// effect on machines with one node, where the firmware does not tell the node, and where the process may use fewer
    /// CPUs of the node than it has devices. Page-locked memory comes from the device's node in any case.
    pub fn numa_affinity(self, near: bool) { self.roams = !near; }

    /// The order in which software GPUs run their operations.
    pub fn schedule(self, schedule: host::ExecutionOrder) { self.schedule = Some(schedule); }

    /// The algorithm of collectives. Default: the fastest one for the operation, its size and the machine. An operation
    /// that this algorithm cannot do runs by the default. For tests, and for programs that know a better choice.
    pub fn algorithm(self, algorithm: Algorithm) { self.algorithm = Some(algorithm); }

    /// The order in which terms of a sum are added. With [`ReduceOrder::Rank`] the bits of a sum do not depend on the
    /// position of its terms in a buffer, the buffer's size, or the algorithm; `all_reduce` does not use the ring then.
    pub fn reduce_order(self, order: ReduceOrder) { self.reduce_order = order; }

    /// Whether each [`GradientExchange`](crate::gradients::GradientExchange), and so each `DataParallel` of
    /// `gpu-pool-train`, of a group where that is of use registers its buckets with NCCL, as by
    /// [`Group::register`](crate::Group::register) (default: no). All processes must agree. Buckets then have their
    /// own memory from the driver, mostly in 2 MiB units. Measure it: depending on the network it may be a loss.
    pub fn register_buckets(self, register: bool) { self.register_buckets = Some(register); }
}

impl Builder {
    /// `count` software GPUs, 1 to 64: the same code, without hardware.
    pub fn host(self, count: usize) -> Self {
        self.backend(Backend::Host(count))
    }

    /// NVIDIA GPUs.
    pub fn cuda(self) -> Self {
        self.backend(Backend::Cuda)
    }

    /// Writes the pool's work to a file, until it is closed or dropped: a Chrome trace, which
    /// <https://ui.perfetto.dev> opens. [`GpuPool::record_trace`] traces a part of a program.
    ///
    /// There is a row for each thread of a device, each stream, and each thread that calls the pool. Rows of threads
    /// have scopes, closures, jobs, tasks, operations, collectives (with algorithm, bytes, members) and waits, those of
    /// streams kernels, copies and waits. A wait names its cause, and an arrow leads from it. Counters show the memory.
    /// Stream times come from events, on the host's clock; software GPUs in virtual time have virtual times.
    ///
    /// The file is written by a thread of its own as the program goes: if the program is killed, the file lacks its
    /// last milliseconds and the closing bracket, which viewers do without. If that thread cannot keep up, records are
    /// dropped, and the counter `dropped` says how many. An existing file is replaced. In a cluster `trace.json`
    /// becomes `trace.0.json` in process 0; [`merge`](crate::trace::merge) puts files together. A process's further
    /// pool writes `trace.pool1.json`.
    pub fn trace(mut self, path: impl Into<PathBuf>) -> Self {
        self.trace = Some(path.into());
        self
    }

    /// Lets [`give`](crate::Device::give) and [`take`](crate::Device::take) carry values of this type to other
    /// processes. Known without it: buffers of all [`Element`](crate::Element)s, pairs of these, numbers and `String`,
    /// and `Vec`s of all. A `Pipeline` of `gpu-pool-train` needs it for no type.
    pub fn register_transfer<T: Transfer>(mut self) -> Self {
        self.codecs.insert(transfer::codec::<T>());
        self
    }

    /// Builds the process-wide pool of [`GpuPool::scope`]. Otherwise the first scope builds it with default settings.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the process-wide pool exists already; else as [`build`](Self::build).
    #[track_caller]
    pub fn build_global(self) -> Result<()> {
        let (site, _here) = (Location::caller(), OpSite::here("build_global"));
        let taken = || Error::invalid_at(site, "build_global", "the process-wide pool is there already");
        fail_if!(ways::GLOBAL.get().is_some(), taken());
        ways::GLOBAL.set(self.build()?).map_err(|_| taken())
    }

    /// Builds the pool: opens the devices in parallel, starts their threads, loads modules, probes each ordered pair.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when there is no such device or no driver, [`Error::InvalidArgument`] for settings that are
    /// impossible or contradict each other, [`Error::NestedScope`] on a device thread, and the driver's.
    #[track_caller]
    pub fn build(mut self) -> Result<GpuPool> {
        if worker::on_device_thread() {
            let OpSite { op, site } = OpSite::outermost("build", Location::caller());
            return Err(Error::NestedScope { op, site });
        }
        if let Some(topology) = &self.machine.topology {
            topology.validate(OpSite::place())?;
            self.backend.get_or_insert(Backend::Host(topology.configs().len()));
        }
        self.observer = self.observer();
        self.check_settings()?;
        self.read_environment()?;
        let zero = self.timeout.is_some_and(|deadline| deadline.is_zero());
        invalid_if!(zero, "build", "`timeout(0ns)`: the deadline must be longer than zero");
        if let Some(observer) = &self.observer {
            self.observer = Some(observer.begin(OpSite::place())?);
        }
        self.machine.schedule = match (&self.machine.topology, self.schedule.take()) {
            (Some(_), _) => host::ExecutionOrder::Virtual,
            (None, schedule) => schedule.unwrap_or_default(),
        };
        if let Some(choice) = self.backing {
            self.memory.choice = choice;
        }
        let drivers = match self.backend {
            Some(Backend::Host(count)) => self.software(count)?,
            Some(Backend::Cuda) => self.hardware()?,
            None => match cuda_devices() {
                Ok(_) => self.hardware()?,
                Err(reason) => {
                    event!(info, "software_gpus", %reason, "no CUDA device: using software GPUs");
                    self.software(DEFAULT_SOFTWARE_GPUS)?
                }
            },
        };
        let drivers = Timed::around(drivers);
        let Some(observer) = self.observer.clone() else { return self.with_drivers(drivers) };
        let pool = self.with_drivers(observer.wrap(drivers))?;
        observer.built();
        Ok(pool)
    }

    /// The ordinals of the devices to open, out of `count` devices. `twice`: the list may repeat an ordinal.
    #[track_caller]
    fn ordinals(&self, count: usize, what: &str, twice: bool) -> Result<Vec<usize>> {
        let Some(ordinals) = &self.devices else { return Ok((0..count).collect()) };
        invalid_if!(ordinals.is_empty(), "build", "`devices` with an empty list");
        for (i, &ordinal) in ordinals.iter().enumerate() {
            if ordinal >= count {
                let reason = format!("device {ordinal} was asked for, there are {count} {what} (0 to {})", count - 1);
                let instead = if what == GPUS { "; GPU_POOL_BACKEND=host takes software GPUs" } else { "" };
                return Err(Error::NoDevice { reason: reason + instead });
            }
            if !twice && ordinals[..i].contains(&ordinal) {
                return Err(Error::invalid("build", format_args!("`devices`: device {ordinal} is listed twice")));
            }
        }
        Ok(ordinals.clone())
    }

    #[track_caller]
    fn software(&self, count: usize) -> Result<Vec<DriverRef>> {
        let possible = (1..=MOST_SOFTWARE_GPUS).contains(&count);
        invalid_if!(!possible, "build", "{count} software GPUs: there can be 1 to {MOST_SOFTWARE_GPUS}");
        let mut configs = match &self.machine.topology {
            Some(topology) => topology.configs(),
            None => vec![host::HostConfig::default(); count],
        };
        let there = configs.len();
        invalid_if!(count > there, "build", "{count} software GPUs of a machine with {there} devices");
        configs.truncate(count);
        if let Some(memory) = self.software_memory {
            configs.iter_mut().for_each(|config| config.memory = memory);
        }
        let mut machine = self.machine.clone();
        if let Some(observer) = &self.observer {
            machine.watch_reads = observer.watches_reads();
            if machine.schedule == host::ExecutionOrder::Virtual && machine.topology.is_none() {
                machine.topology = observer.machine(count);
            }
        }
        let site = Location::caller();
        let all = host::machine_with(&configs, &machine).map_err(|fault| match fault.kind {
            FaultKind::InvalidArgument => Error::invalid_at(site, "build", fault.detail),
            _ => Error::NoDevice { reason: fault.detail },
        })?;
        Ok(self.ordinals(count, "software GPUs", false)?.into_iter().map(|i| all[i].clone()).collect())
    }

    #[track_caller]
    fn cuda_ordinals(&self) -> Result<Vec<usize>> {
        self.crowd(self.ordinals(cuda_devices()?, GPUS, self.shares())?)
    }

    #[cfg(feature = "cuda")]
    #[track_caller]
    fn hardware(&self) -> Result<Vec<DriverRef>> {
        let ordinals = self.cuda_ordinals()?;
        // Making a context takes about a second, and contexts can be made in parallel.
        let site = Location::caller();
        crossbeam::thread::scope(|scope| {
            let open = |(device, &ordinal): (usize, &usize)| {
                let opening = scope.builder().spawn(move |_| crate::driver::cuda::open(ordinal));
                opening.map_err(|e| Error::NoThread { op: "build", device: Some(device), why: e.to_string(), site })
            };
            let opening: Vec<_> = ordinals.iter().enumerate().map(open).collect();
            opening.into_iter().map(|device| device?.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
        })
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    #[cfg(not(feature = "cuda"))]
    #[track_caller]
    fn hardware(&self) -> Result<Vec<DriverRef>> {
        self.cuda_ordinals().map(|_| Vec::new())
    }

    pub(crate) fn observer(&self) -> Option<Arc<dyn Observer>> {
        self.observer.clone().or_else(observe::installed)
    }
}

#[cfg(feature = "cuda")]
fn cuda_devices() -> Result<usize> {
    match crate::driver::cuda::device_count()? {
        0 => Err(Error::NoDevice { reason: "the CUDA driver sees no device".to_owned() }),
        count => Ok(count),
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices() -> Result<usize> {
    Err(Error::NoDevice { reason: "this build of gpu-pool has no CUDA (feature `cuda` is off)".to_owned() })
}
