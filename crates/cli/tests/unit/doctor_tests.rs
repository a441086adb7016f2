//! `doctor` on machines that are made up: trees of files, states of GPUs, devices that lie.

use super::{
    gpus::{self, Driver, Health},
    host, proof, received,
    report::{Level, Line},
    system::System,
};
use gpu_pool::GpuPool;
use gpu_pool_lab::{FaultPlan, prelude::*};
use std::{collections::BTreeMap, sync::mpsc, time::Duration};

/// A tree of files; a link is a file with the path where it leads.
#[derive(Default)]
struct Tree(BTreeMap<String, Vec<u8>>);

impl Tree {
    fn with(mut self, path: &str, text: impl Into<Vec<u8>>) -> Self {
        self.0.insert(path.to_owned(), text.into());
        self
    }
}

impl System for Tree {
    fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        self.0.get(path).cloned()
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let within = self.0.keys().filter_map(|path| path.strip_prefix(folder)?.strip_prefix('/')?.split('/').next());
        let mut names: Vec<String> = within.map(str::to_owned).collect();
        names.dedup();
        names
    }

    fn target(&self, link: &str) -> Option<String> {
        self.text(link)
    }
}

fn lines(add: impl FnOnce(&mut Vec<Line>)) -> Vec<Line> {
    let mut lines = Vec::new();
    add(&mut lines);
    lines
}

fn found(lines: &[Line]) -> Vec<(Level, &str)> {
    lines.iter().map(|line| (line.level, line.topic)).collect()
}

const LIMITS: &str = "Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 1048576              files
Max locked memory         8388608              8388608              bytes";

/// nccl#290: a container's `/dev/shm` has 64 MB.
#[test]
fn a_container_with_small_limits() {
    let tree = Tree::default()
        .with("/.dockerenv", "")
        .with("/proc/self/limits", LIMITS)
        .with("/proc/self/mounts", "proc /proc proc rw 0 0\nshm /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n");
    let lines = lines(|lines| host::limits(&tree, lines));
    use Level::{Note, Ok};
    assert_eq!(found(&lines), [(Ok, "container"), (Note, "/dev/shm"), (Note, "memlock"), (Note, "open files")]);
    assert!(lines[1].text.starts_with("64 MB") && lines[1].to_string().contains("\n                    -> start the"));
    assert!(lines[2].text.starts_with("8 MB") && lines[3].text.starts_with("1024:"));
}

#[test]
fn a_machine_with_large_limits() {
    let limits = LIMITS.replace("8388608 ", "unlimited ").replace("1024 ", "1048576 ");
    let tree = Tree::default()
        .with("/proc/self/limits", limits)
        .with("/proc/self/mounts", "tmpfs /dev/shm tmpfs rw,nosuid 0 0")
        .with("/proc/meminfo", "MemTotal:       16384000 kB\n");
    let lines = lines(|lines| host::limits(&tree, lines));
    assert!(lines.iter().all(|line| line.level == Level::Ok), "{lines:?}");
    assert_eq!(lines[0].text, "8000 MB");
}

/// Registers with ACS behind another extended capability.
fn bridge(control: u16) -> Vec<u8> {
    let mut registers = vec![0; 4096];
    registers[0x100..0x104].copy_from_slice(&(0x0001_u32 | 0x148 << 20).to_le_bytes());
    registers[0x148..0x14c].copy_from_slice(&0x0000_000d_u32.to_le_bytes());
    registers[0x14c..0x150].copy_from_slice(&(u32::from(control) << 16 | 0x5f).to_le_bytes());
    registers
}

#[test]
fn acs_and_iommu_stand_in_the_way() {
    let tree = |control, group: &str| {
        Tree::default()
            .with("/sys/bus/pci/devices/0000:41:00.0", "/sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0")
            .with("/sys/bus/pci/devices/0000:41:00.0/iommu_group/type", group)
            .with("/sys/bus/pci/devices/0000:40:01.1/config", bridge(control))
    };
    let buses = ["0000:41:00.0".to_owned()];
    let bad = lines(|lines| host::pcie(&tree(0x1d, "DMA-FQ\n"), &buses, lines));
    assert_eq!(found(&bad), [(Level::Note, "IOMMU"), (Level::Note, "ACS")]);
    assert!(bad[1].text.starts_with("0000:40:01.1 send"), "{}", bad[1]);
    let good = lines(|lines| host::pcie(&tree(0x11, "identity\n"), &buses, lines));
    assert_eq!(found(&good), [(Level::Ok, "IOMMU"), (Level::Ok, "ACS")]);
}

#[test]
fn a_list_of_capabilities_in_a_circle_ends() {
    let mut registers = bridge(0x1d);
    registers[0x148..0x14c].copy_from_slice(&(0x0001_u32 | 0x100 << 20).to_le_bytes());
    let tree = Tree::default()
        .with("/sys/bus/pci/devices/0000:41:00.0", "/sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0")
        .with("/sys/bus/pci/devices/0000:40:01.1/config", registers);
    let lines = lines(|lines| host::pcie(&tree, &["0000:41:00.0".to_owned()], lines));
    assert_eq!(lines[1].level, Level::Ok);
}

#[test]
fn each_gpu_has_a_numa_node() {
    let tree = Tree::default()
        .with("/sys/devices/system/node/has_memory", "0-1\n")
        .with("/sys/devices/system/node/node1/cpulist", "32-63\n")
        .with("/sys/bus/pci/devices/0000:c1:00.0/numa_node", "1\n")
        .with("/sys/bus/pci/devices/0000:41:00.0/numa_node", "-1\n");
    let tree = tree.with("/proc/thread-self/status", "Name:\tgpu-pool:0\nCpus_allowed_list:\t40-63\n");
    let placed = ["0000:C1:00.0", "0000:41:00.0"].map(|bus| (bus.to_owned(), host::own_cpus(&tree).unwrap()));
    let two = lines(|lines| host::numa(&tree, &placed, lines));
    assert_eq!(two[0].text, "GPU 0 is on node 1 of 0-1, CPUs 32-63; its thread runs on CPUs 40-63");
    assert_eq!(two[1].level, Level::Note);
    let one = lines(|lines| host::numa(&tree.with("/sys/devices/system/node/has_memory", "0\n"), &placed, lines));
    assert_eq!(one, [Line::ok("NUMA", "one node")]);
}

#[test]
fn gpus_on_the_bus_are_counted() {
    let device = |tree: Tree, name: &str, vendor: &str, class: &str| {
        let path = format!("/sys/bus/pci/devices/{name}");
        tree.with(&format!("{path}/vendor"), vendor).with(&format!("{path}/class"), class)
    };
    let tree = device(Tree::default(), "0000:01:00.0", "0x10de\n", "0x030200\n");
    let tree = device(tree, "0000:01:00.1", "0x10de\n", "0x040300\n");
    let tree = device(tree, "0000:02:00.0", "0x8086\n", "0x030000\n");
    assert_eq!(host::on_the_bus(&tree), 1);
}

#[test]
fn variables_without_effect_are_named() {
    let unknown =
        [("GPU_POOL_TIMOUT".to_owned(), Some("GPU_POOL_TIMEOUT".to_owned())), ("GPU_POOL_TIMOUT".to_owned(), None)];
    let value = |name: &str| (name == "CUDA_LAUNCH_BLOCKING").then(|| "1".to_owned());
    let lines = lines(|lines| host::variables(&unknown, &value, lines));
    assert_eq!(lines.iter().map(|line| line.level).collect::<Vec<_>>(), [Level::Wrong, Level::Note, Level::Note]);
    assert_eq!(lines[0].to_do.as_deref(), Some("use GPU_POOL_TIMEOUT"));
    assert!(lines[2].text.starts_with("CUDA_LAUNCH_BLOCKING=1"));
}

#[test]
fn a_sick_gpu_has_a_line_for_each_fault() {
    let well = Health { links: 18, links_up: 18, uncorrected: Some(0), ..Health::default() };
    let one = lines(|lines| gpus::health(0, &well, lines));
    assert_eq!(found(&one), [(Level::Ok, "health")]);
    assert!(one[0].text.contains("18 NVLinks up"));
    let sick = Health {
        divided: true,
        uncorrected: Some(3),
        slowed: vec!["too hot"],
        links: 18,
        links_up: 16,
        others: vec![4711],
        exclusive: Some("no process"),
    };
    let lines = lines(|lines| gpus::health(2, &sick, lines));
    let topics: Vec<_> = lines.iter().map(|line| line.topic).collect();
    assert_eq!(topics, ["MIG", "ECC", "clock", "NVLink", "mode", "processes"]);
    assert_eq!(lines[1].level, Level::Wrong);
    assert!(lines[3].text.contains("2 of its 18 links") && lines[5].text.contains("4711"));
    assert!(lines.iter().all(|line| line.text.contains("GPU 2") && line.to_do.is_some()));
}

#[test]
fn an_old_driver_and_a_gpu_without_kernels_are_wrong() {
    let driver = |version: &str| Driver { version: version.to_owned(), cuda: (12, 2), nvml: "12".to_owned() };
    let judged = |version| lines(|lines| gpus::driver(&driver(version), lines))[0].level;
    assert_eq!([judged("530.41.03"), judged("535.54.03")], [Level::Wrong, Level::Ok]);
    let mut info = GpuPool::builder().host(1).build().unwrap().report().devices[0].clone();
    let judged = [(7, 0), (7, 5), (8, 9), (9, 0), (12, 0)].map(|capability| {
        info.compute_capability = capability;
        lines(|lines| gpus::device(0, &info, lines))[0].level
    });
    use Level::{Ok, Wrong};
    assert_eq!(judged, [Wrong, Ok, Ok, Ok, Ok]);
}

#[test]
fn software_gpus_pass_the_proof() {
    let pool = GpuPool::builder().host(3).build().unwrap();
    let lines = lines(|lines| proof::all(&pool, lines));
    assert_eq!(found(&lines), [(Level::Ok, "page-locked"), (Level::Ok, "proof")]);
    assert!(lines[1].text.starts_with("6 ordered pairs"), "{}", lines[1]);
}

/// The lines of the steps before the one that hangs say what works.
#[test]
fn a_step_that_hangs_hides_no_other() {
    for (hangs, last) in [(true, "no answer for 0 s"), (false, "panicked")] {
        let (steps, answers) = mpsc::channel();
        steps.send((vec![Line::ok("NVML", "found")], false)).unwrap();
        let kept = hangs.then_some(steps);
        let lines = received(&answers, Duration::ZERO);
        drop(kept);
        assert_eq!(found(&lines), [(Level::Ok, "NVML"), (Level::Wrong, "driver")]);
        assert!(lines[1].text.contains(last), "{}", lines[1]);
    }
}

/// The proof finds a link that lies from some copy on; the probe at the build finds one that always lies.
#[test]
fn a_link_that_lies_is_found_and_named() {
    let wrong = |faults: &str| {
        let faults: FaultPlan = faults.parse().unwrap();
        let pool = GpuPool::builder().host(3).faults(faults).build().unwrap();
        let mut lines = lines(|lines| proof::all(&pool, lines));
        lines.retain(|line| line.level == Level::Wrong);
        lines
    };
    let always = wrong("0>2:copy-peer:*:corrupt");
    assert!(
        always.len() == 1 && always[0].topic == "link" && always[0].text.starts_with("0 -> 2: claimed"),
        "{always:?}"
    );
    let later = wrong("0>2:copy-peer:4+:corrupt");
    assert!(!later.is_empty() && later.iter().all(|line| line.topic == "proof"), "{later:?}");
    assert!(later.iter().all(|line| !line.text.contains("GPUs 0 and 1") && !line.text.contains("GPUs 1 and 2")));
}
