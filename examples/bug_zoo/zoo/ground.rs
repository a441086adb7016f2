//! The devices that a program runs on: software or CUDA, with or without the checker.

use super::{
    bare::{self, Gpu},
    exhibit::Trouble,
};
use gpu_pool::{
    Builder, Error, GpuPool,
    extend::driver::{
        DriverRef,
        host::{self, ExecutionOrder, HostConfig, MachineConfig},
    },
};
use gpu_pool_lab::{Check, FaultPlan, check, faulty, prelude::*};
use std::time::Duration;

/// Which devices, and whether the checker watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ground {
    pub cuda: bool,
    pub check: bool,
    /// The schedule of software GPUs.
    pub schedule: ExecutionOrder,
}

impl Ground {
    /// Software GPUs, at full speed.
    pub fn software(check: bool) -> Ground {
        Ground { cuda: false, check, schedule: ExecutionOrder::Threaded }
    }

    /// Software GPUs, one operation at a time, in a seeded order.
    pub fn seeded(check: bool, seed: u64) -> Ground {
        Ground { cuda: false, check, schedule: ExecutionOrder::Seeded(seed) }
    }

    /// Real GPUs.
    pub fn cuda(check: bool) -> Ground {
        Ground { cuda: true, check, schedule: ExecutionOrder::Threaded }
    }

    /// The first `N` devices, bare.
    pub fn bare<const N: usize>(&self) -> Result<[Gpu; N], Trouble> {
        self.bare_with(&FaultPlan::new())
    }

    /// The first `N` devices, bare, with planned faults.
    pub fn bare_with<const N: usize>(&self, plan: &FaultPlan) -> Result<[Gpu; N], Trouble> {
        let raw = faulty::wrap(self.drivers(N)?, plan);
        let seen = if self.check { check::wrap(raw.clone()) } else { raw.clone() };
        let gpus = bare::gpus(seen, raw, !self.cuda)?;
        Ok(gpus.try_into().unwrap_or_else(|_| unreachable!("one for each driver")))
    }

    fn drivers(&self, count: usize) -> Result<Vec<DriverRef>, Error> {
        if self.cuda {
            return open(count);
        }
        let machine = MachineConfig { schedule: self.schedule.clone(), watch_reads: self.check, ..Default::default() };
        host::machine_with(&vec![HostConfig::default(); count], &machine).map_err(Error::custom)
    }

    /// A pool of the first `count` devices.
    pub fn pool(&self, count: usize) -> Result<GpuPool, Trouble> {
        Ok(self.builder(count).build()?)
    }

    /// The builder of that pool.
    pub fn builder(&self, count: usize) -> Builder {
        let builder = GpuPool::builder().timeout(Duration::from_secs(60)).schedule(self.schedule.clone());
        let builder = builder.check(if self.check { Check::Races } else { Check::Off });
        match self.cuda {
            true => builder.cuda().devices(&(0..count).collect::<Vec<_>>()),
            false => builder.host(count),
        }
    }
}

#[cfg(feature = "cuda")]
fn open(count: usize) -> Result<Vec<DriverRef>, Error> {
    (0..count).map(gpu_pool::extend::driver::cuda::open).collect()
}

#[cfg(not(feature = "cuda"))]
fn open(_count: usize) -> Result<Vec<DriverRef>, Error> {
    Err(Error::NoDevice { reason: "this build has no CUDA".to_owned() })
}

/// Number of CUDA devices.
#[cfg(feature = "cuda")]
pub fn cuda_devices() -> usize {
    gpu_pool::extend::driver::cuda::device_count().unwrap_or(0)
}

/// Number of CUDA devices.
#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> usize {
    0
}
