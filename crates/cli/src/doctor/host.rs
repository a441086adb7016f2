//! The lines of `doctor` that need no GPU: limits of the system, PCIe, NUMA nodes, libraries, variables.

use super::{report::Line, system::System};

/// A library between processes, and its version or the reason why it is not of use.
pub type Library = (&'static str, Result<String, String>);

/// Least soft limit of open files: each chunk of memory that another process maps has a descriptor.
const FILES: u64 = 4096;
/// Least size of `/dev/shm` in bytes: NCCL takes about 10 MB there for each pair of GPUs.
const SHARED: u64 = 512 << 20;

/// The limits of this process and of the container that it is in.
pub fn limits(system: &dyn System, lines: &mut Vec<Line>) {
    if let Some(kind) = container(system) {
        lines.push(Line::ok("container", kind));
    }
    match shared_memory(system) {
        Some(bytes) if bytes < SHARED => lines.push(Line::note(
            "/dev/shm",
            format!("{} MB: NCCL and MPI may run out of it", bytes >> 20),
            "start the container with `--shm-size=1g` or `--ipc=host`, or mount it again with a larger size",
        )),
        Some(bytes) => lines.push(Line::ok("/dev/shm", format!("{} MB", bytes >> 20))),
        None => {}
    }
    match limit(system, "Max locked memory") {
        Some(bytes) if bytes < u64::MAX => lines.push(Line::note(
            "memlock",
            format!("{} MB: enough for GPUs, but NCCL and MPI over InfiniBand lock more", bytes >> 20),
            "between hosts: `ulimit -l unlimited`, or `--ulimit memlock=-1` of the container",
        )),
        Some(_) => lines.push(Line::ok("memlock", "unlimited")),
        None => {}
    }
    match limit(system, "Max open files") {
        Some(files) if files < FILES => lines.push(Line::note(
            "open files",
            format!("{files}: memory that other processes map needs a descriptor for each chunk"),
            format!("`ulimit -n {FILES}` or more"),
        )),
        Some(files) => lines.push(Line::ok("open files", files.to_string())),
        None => {}
    }
}

/// The soft limit of a line of `/proc/self/limits`.
fn limit(system: &dyn System, name: &str) -> Option<u64> {
    let limits = system.text("/proc/self/limits")?;
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

/// Bytes of `/dev/shm`: its mount option, or else half of the memory, the default of Linux.
fn shared_memory(system: &dyn System) -> Option<u64> {
    let mounts = system.text("/proc/self/mounts")?;
    let options = mounts.lines().rev().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        (words.next() == Some("/dev/shm")).then(|| words.nth(1).unwrap_or_default().to_owned())
    })?;
    match options.split(',').find_map(|option| option.strip_prefix("size=")) {
        Some(size) => {
            let digits = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let unit = match &size[digits.len()..] {
                "k" => 10,
                "m" => 20,
                "g" => 30,
                _ => 0,
            };
            Some(digits.parse::<u64>().ok()? << unit)
        }
        None => {
            let memory = system.text("/proc/meminfo")?;
            let total = memory.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
            Some(total.split_whitespace().next()?.parse::<u64>().ok()? << 9)
        }
    }
}

fn container(system: &dyn System) -> Option<&'static str> {
    let cgroup = system.text("/proc/1/cgroup").unwrap_or_default();
    match () {
        () if cgroup.contains("kubepods") => Some("Kubernetes"),
        () if system.bytes("/.dockerenv").is_some() || cgroup.contains("docker") => Some("Docker"),
        () if system.bytes("/run/.containerenv").is_some() => Some("Podman"),
        () if system.names("/singularity").len() + system.names("/.singularity.d").len() > 0 => Some("Apptainer"),
        () => None,
    }
}

/// The NUMA node of each GPU, and where its thread runs. `gpus` has their PCI addresses and the CPUs of their threads.
pub fn numa(system: &dyn System, gpus: &[(String, String)], lines: &mut Vec<Line>) {
    let nodes = system.text("/sys/devices/system/node/has_memory").unwrap_or_else(|| "0".to_owned());
    if !nodes.contains([',', '-']) {
        lines.push(Line::ok("NUMA", "one node"));
        return;
    }
    for (gpu, (bus, cpus)) in gpus.iter().enumerate() {
        match system.number(&format!("{}/numa_node", device(bus))) {
            Some(node @ 0..) => {
                let near = system.text(&format!("/sys/devices/system/node/node{node}/cpulist")).unwrap_or_default();
                let text =
                    format!("GPU {gpu} is on node {node} of {nodes}, CPUs {near}; its thread runs on CPUs {cpus}");
                lines.push(Line::ok("NUMA", text));
            }
            _ => lines.push(Line::note(
                "NUMA",
                format!("the firmware does not tell the node of GPU {gpu}; there are nodes {nodes}"),
                "bind the program by hand: `nvidia-smi topo -m` may know the node, `numactl --cpunodebind=N` binds",
            )),
        }
    }
}

/// The CPUs on which the calling thread may run.
pub fn own_cpus(system: &dyn System) -> Option<String> {
    let status = system.text("/proc/thread-self/status")?;
    Some(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().to_owned())
}

fn device(bus: &str) -> String {
    format!("/sys/bus/pci/devices/{}", bus.to_ascii_lowercase())
}

/// IOMMU and ACS: both send traffic between GPUs on PCIe through the CPU, and may let it fail.
pub fn pcie(system: &dyn System, buses: &[String], lines: &mut Vec<Line>) {
    let translated = |bus: &&String| {
        let kind = system.text(&format!("{}/iommu_group/type", device(bus)));
        kind.is_some_and(|kind| kind.starts_with("DMA"))
    };
    match buses.iter().filter(translated).count() {
        0 => lines.push(Line::ok("IOMMU", "off, or it passes the GPUs' addresses through")),
        count => lines.push(Line::note(
            "IOMMU",
            format!("it translates the addresses of {count} GPUs: copies between GPUs on PCIe are slow, and may fail"),
            "unless this is a virtual machine's host: boot with `iommu=pt`, or switch the IOMMU off in the firmware",
        )),
    }
    let mut bridges: Vec<String> = buses.iter().flat_map(|bus| redirecting(system, bus)).collect();
    bridges.sort();
    bridges.dedup();
    match &bridges[..] {
        [] => lines.push(Line::ok("ACS", "no bridge above the GPUs is known to redirect their traffic")),
        bridges => lines.push(Line::note(
            "ACS",
            format!("{} send what goes between GPUs up to the CPU", bridges.join(", ")),
            format!("as root, on bare metal: `setpci -s {} ECAP_ACS+6.w=0000`, for each of them", bridges[0]),
        )),
    }
}

/// The bridges above a device that redirect requests between peers. Only root can read so far into their registers.
fn redirecting(system: &dyn System, bus: &str) -> Vec<String> {
    let path = system.target(&device(bus)).unwrap_or_default();
    let is_address = |part: &&str| part.len() == 12 && part.as_bytes()[4] == b':' && part.as_bytes()[10] == b'.';
    let above = path.split('/').filter(is_address).filter(|part| !part.eq_ignore_ascii_case(bus));
    let redirects = |part: &&str| {
        let registers = system.bytes(&format!("/sys/bus/pci/devices/{part}/config")).unwrap_or_default();
        /// Request redirect, completion redirect.
        const REDIRECT: u16 = 0b1100;
        access_control(&registers).is_some_and(|control| control & REDIRECT != 0)
    };
    above.filter(redirects).map(str::to_owned).collect()
}

/// The control word of the extended capability ACS (PCI Express Base Specification, 7.7.8).
fn access_control(registers: &[u8]) -> Option<u16> {
    let word = |at: usize| Some(u32::from_le_bytes(registers.get(at..at + 4)?.try_into().ok()?));
    /// The place of the first extended capability.
    const FIRST: usize = 0x100;
    /// The number of ACS.
    const ACS: u32 = 0x000d;
    let mut at = FIRST;
    // A list that goes in a circle ends, too.
    for _ in 0..48 {
        let header = word(at)?;
        if header & 0xffff == ACS {
            return Some((word(at + 4)? >> 16) as u16);
        }
        at = (header >> 20) as usize;
        if at < FIRST {
            return None;
        }
    }
    None
}

/// The number of NVIDIA's GPUs on the PCI bus. A container sees those of its host, too.
pub fn on_the_bus(system: &dyn System) -> usize {
    let is_gpu = |name: &&String| {
        let read = |file: &str| system.text(&format!("/sys/bus/pci/devices/{name}/{file}")).unwrap_or_default();
        // Class 03: display controllers.
        read("vendor") == "0x10de" && read("class").starts_with("0x03")
    };
    system.names("/sys/bus/pci/devices").iter().filter(is_gpu).count()
}

/// The libraries between processes.
pub fn libraries(found: &[Library], lines: &mut Vec<Line>) {
    for (name, found) in found {
        lines.push(match found {
            Ok(version) => Line::ok(name, version.trim_start_matches(name).trim()),
            Err(why) => Line::note(name, "not found: only several processes need it", why),
        });
    }
}

/// The variables that are set and have no effect, and those of others that slow GPUs down.
pub fn variables(unknown: &[(String, Option<String>)], value: &dyn Fn(&str) -> Option<String>, lines: &mut Vec<Line>) {
    for (name, near) in unknown {
        let text = format!("{name} has no effect: gpu-pool does not know it");
        lines.push(match near {
            Some(near) => Line::wrong("variables", text, format!("use {near}")),
            None => Line::note("variables", text, "unset it"),
        });
    }
    let slow = [
        ("CUDA_LAUNCH_BLOCKING", "each launch waits for its end"),
        ("NCCL_P2P_DISABLE", "NCCL goes through the host"),
        ("NCCL_DEBUG", "NCCL writes to stdout"),
    ];
    for (name, effect) in slow {
        if let Some(value) = value(name).filter(|value| !matches!(&**value, "" | "0" | "WARN" | "VERSION")) {
            lines.push(Line::note("variables", format!("{name}={value}: {effect}"), "unset it when you measure"));
        }
    }
    if let Some(visible) = value("CUDA_VISIBLE_DEVICES") {
        lines.push(Line::ok("variables", format!("CUDA_VISIBLE_DEVICES={visible}: other GPUs are hidden")));
    }
    if unknown.is_empty() {
        lines.push(Line::ok("variables", "those of gpu-pool that are set are known"));
    }
}
