//! The devices of this run, and the peers' processes.

use std::cell::RefCell;

use gpu_pool::{Builder, Check, Device, DeviceBuffer, GpuPool, Parameter, Result};

use crate::support::{Side, child::Process, gpus};

pub struct Machine {
    /// `gpu` or `software`: the first part of every case's name.
    pub kind: &'static str,
    /// True without GPUs, and so without peers.
    pub software: bool,
    /// How many devices; software GPUs are two.
    pub devices: usize,
}

impl Machine {
    pub fn new() -> Self {
        let hardware = gpus::count();
        let software = hardware == 0;
        // With `GPU_POOL_SHARE` a GPU is several devices: that measures the host's part, and torch has no such run.
        let share = std::env::var("GPU_POOL_SHARE").ok().and_then(|times| times.parse().ok()).unwrap_or(1);
        let (kind, devices) = if software { ("software", 2) } else { ("gpu", hardware * share) };
        Machine { kind, software, devices }
    }

    /// A pool of the first `devices` devices, as in production: no checker, no records.
    pub fn pool(&self, devices: usize) -> GpuPool {
        let builder = match self.software {
            true => GpuPool::builder().host(devices),
            false => GpuPool::builder().cuda().devices(&(0..devices).collect::<Vec<_>>()),
        };
        build(builder)
    }

    /// PyTorch's side: `benches/peers/<script>` on the first `devices` GPUs.
    pub fn torch(&self, script: &str, devices: usize) -> Option<Torch> {
        let process = if self.software { None } else { Process::torch(script, devices, &[&devices.to_string()], &[]) };
        if process.is_none() && !self.software {
            println!("no torch with {devices} GPUs: {script} is not among the peers");
        }
        process.map(|process| Torch(RefCell::new(process)))
    }
}

/// Builds a pool as in production.
pub fn build(builder: Builder) -> GpuPool {
    builder.check(Check::Off).record_memory(false).build().expect("the devices can be opened")
}

/// A Python process that times PyTorch.
pub struct Torch(RefCell<Process>);

impl Torch {
    /// Sends an order, and returns the answer.
    pub fn ask(&self, order: &str, number: usize) -> f64 {
        let mut process = self.0.borrow_mut();
        process.order(order, number);
        process.answer()
    }

    /// A side that gets the same order at every turn.
    pub fn side<'a>(&'a self, name: &'a str, order: String, number: usize) -> Side<'a> {
        Side::new(name, move || self.ask(&order, number))
    }
}

/// Memory that an operation writes before anybody reads it.
pub fn uninit<T: Parameter>(dev: &Device, len: usize) -> Result<DeviceBuffer<T>> {
    // SAFETY: every bit pattern is a float, and the callers pass it to an operation that writes all of it.
    unsafe { dev.uninit(len) }
}
