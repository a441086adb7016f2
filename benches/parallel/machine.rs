//! The devices of this run, and the peers' processes.

use gpu_pool::{Builder, Device, DeviceBuffer, GpuPool, Result};
use gpu_pool_lab::{Check, prelude::*};
use gpu_pool_train::Parameter;

use crate::support::{child::Torch, gpus};

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
        // With `GPU_POOL_SHARE` a GPU is several devices: that measures the host's part, and torch has no such run.
        let hardware = gpus::device_count();
        let software = hardware == 0;
        let (kind, devices) = if software { ("software", 2) } else { ("gpu", hardware) };
        Machine { kind, software, devices }
    }

    /// A pool of the first `devices` devices, as in production: no checker, no records.
    pub fn pool(&self, devices: usize) -> GpuPool {
        build(gpus::builder(self.software, devices))
    }

    /// PyTorch's side: `benches/peers/<script>` on the first `devices` GPUs.
    pub fn torch(&self, script: &str, devices: usize) -> Option<Torch> {
        if self.software { None } else { Torch::start(script, devices) }
    }
}

/// Builds a pool as in production.
pub fn build(builder: Builder) -> GpuPool {
    builder.check(Check::Off).record_memory(false).build().expect("the devices can be opened")
}

/// Memory that an operation writes before anybody reads it.
pub fn uninit<T: Parameter>(dev: &Device, len: usize) -> Result<DeviceBuffer<T>> {
    // SAFETY: every bit pattern is a float, and the callers pass it to an operation that writes all of it.
    unsafe { dev.uninit(len) }
}
