//! The lines of `doctor` about each GPU, from the facts of NVML and of the pool.

use super::report::Line;
use gpu_pool::DeviceInfo;

/// The versions of the driver.
#[derive(Clone, Debug)]
pub struct Driver {
    pub version: String,
    /// The newest CUDA that it supports.
    pub cuda: (i32, i32),
    pub nvml: String,
}

/// The state of a GPU.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Into instances (MIG).
    pub divided: bool,
    /// Errors of its memory that ECC could not correct, since the driver was loaded. None without ECC.
    pub uncorrected: Option<u64>,
    /// Why its clock is slow.
    pub slowed: Vec<&'static str>,
    pub links: usize,
    pub links_up: usize,
    /// Other processes on it.
    pub others: Vec<u32>,
    /// Which processes may use it, if not all.
    pub exclusive: Option<&'static str>,
}

/// The oldest driver that is supported.
const OLDEST: u32 = 535;

pub fn driver(driver: &Driver, lines: &mut Vec<Line>) {
    let major: u32 = driver.version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(OLDEST);
    let Driver { version, cuda: (cuda, minor), nvml } = driver;
    let text = format!("NVIDIA {version}, CUDA {cuda}.{minor}, NVML {nvml}");
    lines.push(match major {
        ..OLDEST => Line::wrong("driver", text, format!("install driver {OLDEST} or newer")),
        _ => Line::ok("driver", text),
    });
}

/// The device itself, and its kernels.
pub fn device(gpu: usize, info: &DeviceInfo, lines: &mut Vec<Line>) {
    let (major, minor) = info.compute_capability;
    let gib = info.total_memory as f64 / f64::from(1 << 30);
    let text = format!("{gpu}: {} {}, {gib:.0} GiB, compute capability {major}.{minor}", info.name, info.pci_bus_id);
    lines.push(match (major, minor) {
        (8 | 9, _) => Line::ok("GPU", text + ": machine code is there"),
        (7, 5) | (10.., _) => Line::ok("GPU", text + ": the driver compiles the kernels, once"),
        _ => Line::wrong("GPU", text + ": no kernels for it", "7.5 is the lowest: leave it out by GPU_POOL_DEVICES"),
    });
    if !info.stream_values {
        lines.push(Line::note(
            "GPU",
            format!("{gpu}: streams cannot write and wait for words"),
            "nothing breaks, but collectives wait by events; a newer driver may help",
        ));
    }
}

/// The state of a GPU; one line if it is well.
pub fn health(gpu: usize, health: &Health, lines: &mut Vec<Line>) {
    let before = lines.len();
    let mut add = |line| lines.push(line);
    if health.divided {
        add(Line::note(
            "MIG",
            format!("GPU {gpu} is divided into instances, which cannot reach each other's memory"),
            format!("`nvidia-smi -i {gpu} -mig 0`, unless you want the parts"),
        ));
    }
    if let Some(errors @ 1..) = health.uncorrected {
        add(Line::wrong(
            "ECC",
            format!("GPU {gpu} had {errors} errors of its memory that could not be corrected"),
            format!("`nvidia-smi -i {gpu} -r`; if they come back, the GPU must be replaced"),
        ));
    }
    if !health.slowed.is_empty() {
        add(Line::note(
            "clock",
            format!("GPU {gpu} is slowed down: {}", health.slowed.join(", ")),
            "look at cooling and power (`nvidia-smi -q -d PERFORMANCE`); do not trust times until it is over",
        ));
    }
    if health.links_up > 0 && health.links_up < health.links {
        let Health { links, links_up, .. } = health;
        add(Line::note(
            "NVLink",
            format!("GPU {gpu}: {} of its {links} links are down", links - links_up),
            "compare with its neighbours: `nvidia-smi nvlink -s`; if only this GPU has fewer, it needs a service",
        ));
    }
    if let Some(who) = health.exclusive {
        add(Line::note("mode", format!("GPU {gpu} is for {who}"), format!("`nvidia-smi -i {gpu} -c DEFAULT`")));
    }
    if !health.others.is_empty() {
        let pids: Vec<String> = health.others.iter().map(u32::to_string).collect();
        add(Line::note(
            "processes",
            format!("GPU {gpu} has other processes: {}", pids.join(", ")),
            "they take memory and time; kernels of two processes that wait for peers take turns and are slow",
        ));
    }
    if lines.len() == before {
        let links = match health.links_up {
            0 => "no NVLink",
            count => &format!("{count} NVLinks up"),
        };
        let ecc = if health.uncorrected.is_some() { "no errors of memory" } else { "memory without ECC" };
        lines.push(Line::ok("health", format!("GPU {gpu}: {links}, {ecc}, not slowed down, no other process")));
    }
}
