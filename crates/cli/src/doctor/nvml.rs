//! The state of the GPUs, by the driver's management library, NVML. It is found at run time.

use super::gpus::{Driver, Health};
use nvml_wrapper::{
    Nvml,
    bitmasks::device::ThrottleReasons,
    enum_wrappers::device::{ComputeMode, EccCounter, MemoryError},
};
use std::ffi::OsStr;

/// The most NVLinks of a GPU.
const LINKS: u32 = 18;

/// Opens the library; the error says why it is not there.
pub fn open() -> Result<Nvml, String> {
    // Containers have no name without a version.
    let opened = Nvml::builder().lib_path(OsStr::new("libnvidia-ml.so.1")).init();
    opened.map_err(|error| error.to_string())
}

/// The versions of the driver.
pub fn driver(nvml: &Nvml) -> Option<Driver> {
    let cuda = nvml.sys_cuda_driver_version().ok()?;
    let cuda = (nvml_wrapper::cuda_driver_version_major(cuda), nvml_wrapper::cuda_driver_version_minor(cuda));
    Some(Driver { version: nvml.sys_driver_version().ok()?, cuda, nvml: nvml.sys_nvml_version().unwrap_or_default() })
}

/// The state of the GPU at a PCI address. None if the library does not know it, as for a part of a GPU (MIG).
pub fn health(nvml: &Nvml, bus: &str) -> Option<Health> {
    let gpu = nvml.device_by_pci_bus_id(bus).ok()?;
    let reasons = gpu.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
    let named = [
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "too hot"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "hot"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "the power supply asks for it"),
        (ThrottleReasons::SW_POWER_CAP, "its limit of power"),
        (ThrottleReasons::HW_SLOWDOWN, "the hardware asks for it"),
    ];
    let links: Vec<bool> = (0..LINKS).filter_map(|link| gpu.link_wrapper_for(link).is_active().ok()).collect();
    let own = std::process::id();
    let others = gpu.running_compute_processes().unwrap_or_default().into_iter().map(|process| process.pid);
    Some(Health {
        divided: gpu.mig_mode().is_ok_and(|mode| mode.current != 0),
        uncorrected: gpu.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile).ok(),
        slowed: named.into_iter().filter(|(reason, _)| reasons.contains(*reason)).map(|(_, why)| why).collect(),
        links: links.len(),
        links_up: links.into_iter().filter(|up| *up).count(),
        others: others.filter(|pid| *pid != own).collect(),
        exclusive: match gpu.compute_mode() {
            Ok(ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread) => Some("one process at a time"),
            Ok(ComputeMode::Prohibited) => Some("no process"),
            _ => None,
        },
    })
}
