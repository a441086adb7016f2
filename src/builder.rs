//! How a pool comes to be: which devices, which settings, and the probe of what connects them.

mod collectives;
mod environment;
pub(crate) mod measure;
mod memory;
mod open;
pub(crate) mod probe;
mod settings;
mod share;
pub(crate) mod signal_pad;

pub(crate) use environment::seed;

use crate::{
    Algorithm, ReduceOrder, Tune,
    driver::{
        DriverRef, FaultKind,
        check::{self, Check},
        faulty, host,
        module::Module,
    },
    error::{Error, Result},
    memory::{BackingChoice, cache::Settings},
    pool::GpuPool,
    testing::FaultPlan,
    thread::worker,
    topology::Topology,
};
use std::{panic::Location, sync::Arc, time::Duration};

/// Software GPUs where no number is given and there is no CUDA device.
const DEFAULT_SOFTWARE_GPUS: usize = 4;
/// Software GPUs of one pool.
const MOST_SOFTWARE_GPUS: usize = 64;

/// What the devices of a pool are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// NVIDIA GPUs through the CUDA driver.
    Cuda,
    /// Software GPUs on the CPU, this many.
    Host(usize),
}

/// Settings of a pool, from [`GpuPool::builder`].
///
/// What is not set here comes from the environment, and then from what is there:
///
/// | variable | meaning |
/// |---|---|
/// | `GPU_POOL_BACKEND` | `cuda`, `host`, or `host:8` for eight software GPUs |
/// | `GPU_POOL_DEVICES` | ordinals, like `0,1` |
/// | `GPU_POOL_SHARE` | for tests: how many times each CUDA device is opened, 1 to 16: [`share_gpus`](Self::share_gpus) |
/// | `GPU_POOL_CHECK` | `races`, `memory` or `off`: [`check`](Self::check) |
/// | `GPU_POOL_SEED` | a number: software GPUs run one operation at a time in an order drawn from it |
/// | `GPU_POOL_FAULTS` | what is to go wrong and when, from when the pool is built: [`FaultPlan`], as text |
/// | `GPU_POOL_MEMORY` | `auto`, `vmm` or `malloc`: [`memory_backing`](Self::memory_backing) |
/// | `GPU_POOL_RECORD_MEMORY` | `1` or `0`: [`record_memory`](Self::record_memory) |
/// | `GPU_POOL_ALGORITHM` | how collectives are carried out: `auto`, `direct`, `exchange`, `copies`, `staged`, `host` or `ring`: [`algorithm`](Self::algorithm) |
/// | `GPU_POOL_TUNE` | where the collectives have their limits from: `auto`, `off`, `table` or `measure`: [`tune`](Self::tune) |
/// | `GPU_POOL_TIMEOUT` | the deadline: `500ms`, `30s` or `10m`; a bare number is seconds |
///
/// A variable that begins with `GPU_POOL_` and is none of these, say a misspelt one, is warned of once (by `tracing`).
/// Without any of it: all CUDA devices; where there is none, 4 software GPUs.
///
/// ```
/// # use gpu_pool::GpuPool;
/// let pool = GpuPool::builder().host(2).weights(&[2.0, 1.0]).build()?;
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
    tune: Option<Tune>,
    staged: bool,
    check: Option<Check>,
    schedule: Option<host::Schedule>,
    machine: host::MachineConfig,
    faults: Option<FaultPlan>,
    /// The plan begins when the pool is built.
    faults_wait: bool,
}

#[derive(Clone, Debug, Default)]
enum Weights {
    #[default]
    Even,
    Given(Vec<f64>),
    Measured,
}

impl Builder {
    /// Which kind of devices.
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = Some(backend);
        self
    }

    /// `count` software GPUs, 1 to 64: the same code, without hardware.
    pub fn host(self, count: usize) -> Self {
        self.backend(Backend::Host(count))
    }

    /// NVIDIA GPUs.
    pub fn cuda(self) -> Self {
        self.backend(Backend::Cuda)
    }

    /// These devices only, by the driver's ordinals; their order is the pool's. Nothing touches any other device.
    pub fn devices(mut self, ordinals: &[usize]) -> Self {
        self.devices = Some(ordinals.to_vec());
        self
    }

    /// Shares of the devices, one positive, finite number each: a device with weight 2 gets twice the rows. Only ratios
    /// count.
    pub fn weights(mut self, weights: &[f64]) -> Self {
        self.weights = Weights::Given(weights.to_vec());
        self
    }

    /// Shares by measured speed: each device streams through 64 MB a few times when the pool is built.
    pub fn weights_measured(mut self) -> Self {
        self.weights = Weights::Measured;
        self
    }

    /// Device code to load on every device when the pool is built. The crate's own kernels are always loaded.
    pub fn module(mut self, module: &'static Module) -> Self {
        self.modules.push(module);
        self
    }

    /// The memory of each software GPU, in bytes (default 4 GiB); it is taken from the host as it is used.
    pub fn software_memory(mut self, bytes: u64) -> Self {
        self.software_memory = Some(bytes);
        self
    }

    /// The deadline (default 120 s): a wait in which nothing advances for this long has failed. Streams show that they
    /// advance at every sixteenth operation; a kernel that runs for longer than the deadline cannot be told from one
    /// that is stuck, so with such kernels set it higher.
    ///
    /// Each time that the process is stopped (in a debugger, by `SIGSTOP`, with its virtual machine), that counts as a
    /// quarter of the deadline at most, since nothing could advance: host threads look at the clock several times
    /// before they give up. (So a deadline of less than 0.1 s may come as late as that.) Kernels that wait for peers'
    /// kernels go by the GPU's clock, which runs on.
    ///
    /// [`build`](Self::build) refuses a deadline of zero.
    pub fn timeout(mut self, deadline: Duration) -> Self {
        self.timeout = Some(deadline);
        self
    }

    /// Copies between devices go through the host even where a direct way was found, and kernels cannot name peers'
    /// memory: for tests, and for machines whose peer access is slow. [`build`](Self::build) refuses it together with
    /// [`Algorithm::Direct`], which needs peer access.
    pub fn without_peer_access(mut self) -> Self {
        self.staged = true;
        self
    }

    /// Watches the pool's work for mistakes; see [`driver::check`](crate::driver::check). Works on software GPUs and on
    /// CUDA, and costs time; [`Check::Races`] needs no device memory, [`Check::Memory`] at least 256 bytes for each
    /// buffer.
    ///
    /// ```
    /// # use gpu_pool::{Check, Error, GpuPool, LaunchDims, Module, driver::check::Kind, kernel};
    /// # static MODULE: Module = Module::ptx("");
    /// kernel! {
    ///     static OFF_BY_ONE: "off_by_one" in MODULE, fn(x: &mut [f32]) |_| {
    ///         // SAFETY (which does not hold): the loop should end before `x.len()`.
    ///         for i in 0..=x.len() { unsafe { *x.as_mut_ptr().add(i) = 1.0 } }
    ///     }
    /// }
    /// let pool = GpuPool::builder().host(1).module(&MODULE).check(Check::Memory).build()?;
    /// let result = pool.run(|dev, _| {
    ///     let mut x = dev.zeros::<f32>(1000)?;
    ///     unsafe { dev.launch(&OFF_BY_ONE, LaunchDims::cover(1000), (&mut x,)) }
    /// });
    /// let Err(Error::Misuse { report, .. }) = result else { panic!("the overrun was not seen") };
    /// assert_eq!((report.kind, report.bytes.clone()), (Kind::OutOfBounds, 4000..4004));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn check(mut self, check: Check) -> Self {
        self.check = Some(check);
        self
    }

    /// The order in which software GPUs run their operations.
    pub fn schedule(mut self, schedule: host::Schedule) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// Software GPUs of this machine, in virtual time: as many as it has devices, unless [`host`](Self::host) says
    /// less. It needs the schedule [`Virtual`](host::Schedule::Virtual), which is then the default.
    pub fn topology(mut self, topology: Topology) -> Self {
        self.machine.topology = Some(Arc::new(topology));
        self
    }

    /// With a [`topology`](Self::topology): operations only take their time; nothing is computed, and memory is not
    /// touched. For sizes that this computer could not hold. What is downloaded is zeros, or what was there; without a
    /// topology the pool is not built.
    pub fn dry(mut self) -> Self {
        self.machine.dry = true;
        self
    }

    /// Faults to come, on whichever devices.
    pub fn faults(mut self, plan: FaultPlan) -> Self {
        self.faults = Some(plan);
        self
    }

    /// Builds the process-wide pool, which [`GpuPool::scope`] uses. Without this, the first scope builds it with the
    /// defaults.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when it is there already; else as [`build`](Self::build).
    #[track_caller]
    pub fn build_global(self) -> Result<()> {
        let site = Location::caller();
        let taken = || Error::invalid_at(site, "build_global", "the process-wide pool is there already");
        if crate::pool::GLOBAL.get().is_some() {
            return Err(taken());
        }
        crate::pool::GLOBAL.set(self.build()?).map_err(|_| taken())
    }

    /// Builds the pool: opens the devices in parallel, starts their threads, loads the modules, probes each ordered
    /// pair of devices.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when there is no such device or no driver, [`Error::InvalidArgument`] for settings that
    /// cannot be or that contradict each other, [`Error::NestedScope`] on a device thread, and the driver's.
    #[track_caller]
    pub fn build(mut self) -> Result<GpuPool> {
        if worker::on_device_thread() {
            return Err(Error::NestedScope { op: "build" });
        }
        if let Some(topology) = &self.machine.topology {
            topology.validate()?;
            self.backend.get_or_insert(Backend::Host(topology.len()));
        }
        self.check_settings()?;
        self.read_environment()?;
        self.check_timeout()?;
        self.machine.schedule = match (&self.machine.topology, self.schedule.take()) {
            (Some(_), _) => host::Schedule::Virtual,
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
                    event!(info, %reason, "no CUDA device: using software GPUs");
                    self.software(DEFAULT_SOFTWARE_GPUS)?
                }
            },
        };
        let drivers = match &self.faults {
            Some(plan) => faulty::wrap(drivers, plan),
            None => drivers,
        };
        let drivers = match self.check {
            Some(Check::Races | Check::Memory) => check::wrap(drivers),
            Some(Check::Off) | None => drivers,
        };
        let begins = self.faults.clone().filter(|_| self.faults_wait);
        let pool = self.with_drivers(drivers)?;
        if let Some(plan) = begins {
            plan.resume();
        }
        Ok(pool)
    }

    /// The ordinals to open of `count` that are there; `twice` if one may be listed more than once.
    #[track_caller]
    fn ordinals(&self, count: usize, what: &str, twice: bool) -> Result<Vec<usize>> {
        let Some(ordinals) = &self.devices else { return Ok((0..count).collect()) };
        if ordinals.is_empty() {
            return Err(Error::invalid("build", "`devices` with an empty list"));
        }
        for (i, &ordinal) in ordinals.iter().enumerate() {
            if ordinal >= count {
                let reason = format!("device {ordinal} was asked for, there are {count} {what} (0 to {})", count - 1);
                return Err(Error::NoDevice { reason });
            }
            if !twice && ordinals[..i].contains(&ordinal) {
                return Err(Error::invalid("build", format_args!("`devices`: device {ordinal} is listed twice")));
            }
        }
        Ok(ordinals.clone())
    }

    #[track_caller]
    fn software(&self, count: usize) -> Result<Vec<DriverRef>> {
        if !(1..=MOST_SOFTWARE_GPUS).contains(&count) {
            let why = format!("{count} software GPUs: there can be 1 to {MOST_SOFTWARE_GPUS}");
            return Err(Error::invalid("build", why));
        }
        let mut configs = match &self.machine.topology {
            Some(topology) if count > topology.len() => {
                let why = format!("{count} software GPUs of a machine with {} devices", topology.len());
                return Err(Error::invalid("build", why));
            }
            Some(topology) => topology.host_configs(),
            None => vec![host::HostConfig::default(); count],
        };
        configs.truncate(count);
        if let Some(memory) = self.software_memory {
            configs.iter_mut().for_each(|config| config.memory = memory);
        }
        let machine =
            host::MachineConfig { watch_reads: !matches!(self.check, None | Some(Check::Off)), ..self.machine.clone() };
        let all = host::machine_with(&configs, &machine).map_err(|fault| match fault.kind {
            FaultKind::InvalidArgument => Error::invalid("build", fault.detail),
            _ => Error::NoDevice { reason: fault.detail },
        })?;
        Ok(self.ordinals(count, "software GPUs", false)?.into_iter().map(|i| all[i].clone()).collect())
    }

    #[track_caller]
    fn cuda_ordinals(&self) -> Result<Vec<usize>> {
        self.crowd(self.ordinals(cuda_devices()?, "CUDA devices", self.shares())?)
    }

    #[cfg(feature = "cuda")]
    #[track_caller]
    fn hardware(&self) -> Result<Vec<DriverRef>> {
        let ordinals = self.cuda_ordinals()?;
        // Making a context takes a second or so, and they can be made side by side.
        crossbeam::thread::scope(|scope| {
            let opening: Vec<_> =
                ordinals.iter().map(|&i| scope.spawn(move |_| crate::driver::cuda::open(i))).collect();
            opening.into_iter().map(|device| device.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).collect()
        })
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    #[cfg(not(feature = "cuda"))]
    #[track_caller]
    fn hardware(&self) -> Result<Vec<DriverRef>> {
        self.cuda_ordinals().map(|_| Vec::new())
    }

    /// The faults to come.
    pub(crate) fn fault_plan(&self) -> Option<&FaultPlan> {
        self.faults.as_ref()
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
