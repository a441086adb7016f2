//! The laboratory as the observer of a pool: the checker and the fault plan that a program or its environment asks for.
//!
//! [`LabBuilder`] keeps the settings in a builder, [`install`] those of all other builders. [`Lab`] wraps the pool's
//! drivers: the fault plan inside, the checker outside. Invariant: a setting of the program overrides the environment.

use super::{
    Topology,
    check::{self, Check},
    faulty::{self, FaultPlan},
};
use gpu_pool::extend::lab::{self, BuilderInternals, FailPoint, Machine, Observer};
use gpu_pool::{Builder, Result, error::Site, extend::driver::DriverRef};
use std::{any::Any, sync::Arc};

#[derive(Clone, Debug, Default)]
pub(crate) struct Lab {
    check: Option<Check>,
    /// The check if neither the program nor the environment names one.
    unnamed: Check,
    faults: Option<FaultPlan>,
    /// Whether the plan starts only when the pool is built.
    faults_wait: bool,
}

impl Lab {
    fn of(builder: &Builder) -> Lab {
        let observer = builder.observer();
        let lab = observer.as_deref().and_then(|observer| (observer as &dyn Any).downcast_ref::<Lab>());
        lab.cloned().unwrap_or_default()
    }

    pub(crate) fn plan(builder: &Builder) -> Option<FaultPlan> {
        Lab::of(builder).faults
    }
}

impl Observer for Lab {
    fn begin(&self, site: Site) -> Result<Arc<dyn Observer>> {
        let mut lab = self.clone();
        if lab.check.is_none() {
            lab.check = lab::variable("GPU_POOL_CHECK", site, parse_check)?;
        }
        if lab.faults.is_none() {
            let parse = |text: &str| text.parse::<FaultPlan>().map_err(|why| format!(": {why}"));
            // Faults are for the program, not for the pool's own probe: they begin when the pool is built.
            lab.faults = lab::variable("GPU_POOL_FAULTS", site, parse)?.map(FaultPlan::paused);
            lab.faults_wait = lab.faults.is_some();
        }
        Ok(Arc::new(lab))
    }

    fn watches_reads(&self) -> bool {
        self.check.unwrap_or(self.unnamed) != Check::Off
    }

    fn audits_memory(&self) -> bool {
        self.check.unwrap_or(self.unnamed) == Check::Memory
    }

    fn machine(&self, devices: usize) -> Option<Arc<dyn Machine>> {
        Some(Arc::new(Topology::nvswitch(devices)))
    }

    fn wrap(&self, drivers: Vec<DriverRef>) -> Vec<DriverRef> {
        let drivers = match &self.faults {
            Some(plan) => faulty::wrap(drivers, plan),
            None => drivers,
        };
        if self.watches_reads() { check::wrap(drivers) } else { drivers }
    }

    fn built(&self) {
        if let Some(plan) = self.faults.as_ref().filter(|_| self.faults_wait) {
            plan.resume();
        }
    }

    fn fails(&self, device: usize, point: FailPoint) -> bool {
        self.faults.as_ref().is_some_and(|plan| plan.fails(device, point))
    }
}

fn parse_check(text: &str) -> Result<Check, &'static str> {
    match text {
        "races" => Ok(Check::Races),
        "memory" => Ok(Check::Memory),
        "off" => Ok(Check::Off),
        _ => Err("; expected races, memory or off"),
    }
}

/// Lets all pools of this process that are built from now on read `GPU_POOL_CHECK` and `GPU_POOL_FAULTS`. A builder's
/// own settings take precedence.
///
/// ```
/// gpu_pool_lab::install();
/// let pool = gpu_pool::GpuPool::builder().host(2).build()?;
/// # Ok::<(), gpu_pool::Error>(())
/// ```
pub fn install() {
    lab::install(Arc::new(Lab::default()));
}

/// For unit tests of `gpu-pool`: checks for races, unless the program or the environment says otherwise.
#[doc(hidden)]
pub fn watching() -> Arc<dyn Observer> {
    Arc::new(Lab { unnamed: Check::Races, ..Lab::default() })
}

/// The laboratory's settings of a [`Builder`].
pub trait LabBuilder: Sized {
    /// Checks the pool's work for races and misuse of memory: see [`check`]. It works on software GPUs and on CUDA, and
    /// costs time. [`Check::Races`] needs no device memory; [`Check::Memory`] needs at least 256 bytes per buffer.
    ///
    /// The page "Testing without GPUs" of the guide has an example.
    fn check(self, check: Check) -> Self;

    /// Software GPUs that model this machine, in virtual time. The pool has all devices of the machine, unless
    /// [`host`](Builder::host) asks for fewer. The schedule must be
    /// [`Virtual`](gpu_pool::host::ExecutionOrder::Virtual), which is the default then.
    fn topology(self, topology: Topology) -> Self;

    /// With a [`topology`](Self::topology): operations take their virtual time, but compute nothing and touch no
    /// memory. For sizes that do not fit into this computer. Downloads return zeros or old contents. Without a topology
    /// [`build`](Builder::build) fails.
    fn dry(self) -> Self;

    /// Faults to inject.
    fn faults(self, plan: FaultPlan) -> Self;

    /// Settings that the program does not make come from `GPU_POOL_CHECK` and `GPU_POOL_FAULTS`, as after [`install`].
    fn lab(self) -> Self;
}

impl LabBuilder for Builder {
    fn check(self, check: Check) -> Self {
        let lab = Lab { check: Some(check), ..Lab::of(&self) };
        self.observed_by(Arc::new(lab))
    }

    fn faults(self, plan: FaultPlan) -> Self {
        let lab = Lab { faults: Some(plan), ..Lab::of(&self) };
        self.observed_by(Arc::new(lab))
    }

    fn topology(self, topology: Topology) -> Self {
        let mut builder = self.lab();
        builder.machine_config().topology = Some(Arc::new(topology));
        builder
    }

    fn dry(mut self) -> Self {
        self.machine_config().dry = true;
        self
    }

    fn lab(self) -> Self {
        let lab = Lab::of(&self);
        self.observed_by(Arc::new(lab))
    }
}
