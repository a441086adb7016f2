//! Predefined machines.
//!
//! # Sources of the numbers of `nvswitch`
//!
//! Measured on hosts with H200 GPUs on NVSwitch (driver 580), unless the table says otherwise:
//!
//! | number | value | source |
//! |---|---|---|
//! | link, pushing | 392.5 GB/s | the middle of 390-395, measured with one copy engine |
//! | the link's ports | 392.5 GB/s | an assumption: they take no more than one copy engine sends |
//! | link, pulling | 375 GB/s | **fitted** to `Device::all_reduce` of 1 GB, see below |
//! | latency of a peer copy | 1.9 us | time of a 4 KB copy, back to back in one stream (`benches/results/4xH200`) |
//! | latency of a copy up, down | 2.6, 2.1 us | likewise |
//! | host copies | 55 GB/s | measured, one direction alone |
//! | their ports, per device | 96 GB/s | fitted to the table of copies by 1 to 8 GPUs at once; off by 10 % at most |
//! | their ports, per host | 80 GB/s up, 180 GB/s down | likewise |
//! | their ports, per socket | 110 GB/s down | likewise |
//! | `wait_us` | 2.6 us | **fitted** to one number: the copy-engine ring all-reduce of 256 MB on 8 devices, 1355 us |
//! | calls of the host | see `host_costs` | measured with one thread and with eight; between them a straight line |
//! | `launch_us`, `wake_us` | 2.3 us each | half each of what launch + synchronise takes beyond the launch |
//! | products, operations | 48900 GFLOP/s | 50 products of 4000 x 4000 in 131 ms, measured |
//! | memory | 141 GB, 4800 GB/s | the data sheet |
//!
//! The bandwidth of pulling was fitted on 2 and 4 H200s (`benches/results`, `predict`). That all-reduce is a ring, so
//! each device pulls from one other device. In patterns that are no permutation 55-240 GB/s were measured.
//!
//! For 4 H200s the model predicted 321, 578, 1091, 2117 and 4169 us for 64 MB to 1 GB; 328, 583, 1099, 2124 and 4173 us
//! were measured later (`crates/lab/tests/schedules/virtual_time/all_reduce.rs`). The ring's submission takes 273 us in
//! the model; measured: 400 us. So predictions that the host limits, like 64 devices below 256 MB, are rather too low.
//!
//! A machine with more than eight devices has more hosts on one switch, with the same links. That is an assumption.

use super::{DeviceModel, HostCosts, Link, Nic, Path, Topology};

/// Devices per host of [`Topology::nvswitch`], and per socket.
const HOST: usize = 8;
const SOCKET: usize = 4;

fn between(alone: f64, eight: f64, threads: usize) -> f64 {
    alone + (eight - alone) * (threads.clamp(1, 8) - 1) as f64 / 7.0
}

/// When `threads` threads of a process call the driver. A query is assumed to cost as much as a record.
pub(super) fn host_costs(threads: usize) -> HostCosts {
    HostCosts {
        launch_us: between(3.9, 4.7, threads),
        copy_us: between(1.46, 6.4, threads),
        record_us: between(0.14, 0.26, threads),
        wait_us: between(0.13, 0.31, threads),
        value_us: between(0.8, 1.3, threads),
        query_us: between(0.14, 0.26, threads),
        wake_us: 2.3,
        host_function_us: 2.3,
    }
}

fn h200(device: usize, host: usize, place: usize) -> DeviceModel {
    let pcie = format!("PCIe of device {device}");
    let memory = format!("memory of host {host}");
    let socket = format!("socket {} of host {host}", place / SOCKET);
    DeviceModel {
        name: "modelled H200".into(),
        memory: 141_000_000_000,
        memory_gbps: 4800.0,
        gflops: 48_900.0,
        launch_us: 2.3,
        wait_us: 2.6,
        up: Path::new(2.6, 55.0).through(&pcie, 96.0).through(&memory, 80.0),
        down: Path::new(2.1, 55.0).through(&pcie, 96.0).through(&memory, 180.0).through(socket, 110.0),
        ..DeviceModel::default()
    }
}

fn nvlink(from: usize, to: usize) -> Link {
    let gbps = 392.5;
    let path = Path::new(1.9, gbps)
        .through(format!("NVLink out of device {from}"), gbps)
        .through(format!("NVLink into device {to}"), gbps);
    Link { pull_gbps: Some(375.0), ..Link::new(from, to, path) }
}

fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |from| (0..count).filter(move |&to| to != from).map(move |to| (from, to)))
}

impl Topology {
    /// `n` H200 GPUs on NVSwitch: every pair has a direct link, and the links of a device share its port. The numbers
    /// are calibrated: the head of `src/topology/presets.rs` lists their sources, and `examples/predict` compares
    /// predictions with measurements.
    ///
    /// ```
    /// # use gpu_pool_lab::Topology;
    /// let machine = Topology::nvswitch(8);
    /// assert_eq!(machine.peers(3), [0, 1, 2, 4, 5, 6, 7]);
    /// ```
    pub fn nvswitch(n: usize) -> Self {
        let mut machine = Topology::new(format!("{n} x H200 on NVSwitch"));
        machine.devices = (0..n).map(|device| h200(device, device / HOST, device % HOST)).collect();
        machine.links = pairs(n).map(|(from, to)| nvlink(from, to)).collect();
        machine.host = host_costs(n);
        machine
    }

    /// A PCIe 4.0 server: `sockets` sockets with `switches` switches each, and `devices` devices on each switch.
    /// Devices of a socket are peers (through their switch, or over both switches' uplinks); across sockets there is no
    /// peer access, and copies are staged through the host.
    ///
    /// Round figures for x16 slots, not measured by this crate: 26 GB/s within a switch, 25 to and from the host, 20
    /// between switches; an uplink carries 25 GB/s each way for all its devices; the memory of a socket takes 80.
    ///
    /// ```
    /// # use gpu_pool_lab::Topology;
    /// let machine = Topology::pcie_tree(2, 1, 4);
    /// assert_eq!(machine.peers(0), [1, 2, 3]);
    /// ```
    pub fn pcie_tree(sockets: usize, switches: usize, devices: usize) -> Self {
        let count = sockets * switches * devices;
        let switch = |device: usize| device / devices;
        let socket = |device: usize| switch(device) / switches;
        let (uplink, memory) = (25.0, 80.0);
        let rise = |path: Path, device: usize| path.through(format!("switch {} to the host", switch(device)), uplink);
        let fall = |path: Path, device: usize| path.through(format!("host to switch {}", switch(device)), uplink);
        let model = |device: usize| {
            let own = format!("memory of socket {}", socket(device));
            DeviceModel {
                name: "modelled PCIe GPU".into(),
                memory: 24 << 30,
                up: fall(Path::new(2.6, 25.0), device).through(&own, memory),
                down: rise(Path::new(2.1, 25.0), device).through(&own, memory),
                ..DeviceModel::default()
            }
        };
        let link = |(from, to): (usize, usize)| {
            let path = if switch(from) == switch(to) {
                Path::new(2.5, 26.0)
            } else {
                fall(rise(Path::new(3.5, 20.0), from), to)
            };
            let path = path
                .through(format!("slot of device {from}, out"), 26.0)
                .through(format!("slot of device {to}, in"), 26.0);
            Link::new(from, to, path)
        };
        let mut machine = Topology::new(format!("{count} GPUs on PCIe, {sockets} sockets x {switches} switches"));
        machine.devices = (0..count).map(model).collect();
        machine.links = pairs(count).filter(|&(a, b)| socket(a) == socket(b)).map(link).collect();
        machine.host = host_costs(count);
        machine
    }

    /// Two hosts of `per_node` H200 GPUs on NVSwitch: [`nvswitch`](Self::nvswitch) [`on_hosts`](Self::on_hosts). Each
    /// device has its own network adapter, which carries `gbps` (1e9 bytes per second) each way. A copy takes
    /// `latency_us`, half of it in either adapter.
    ///
    /// ```
    /// # use gpu_pool_lab::Topology;
    /// // One 400 Gbit/s adapter per device.
    /// let machine = Topology::two_nodes(8, 50.0, 10.0);
    /// assert_eq!(machine.len(), 16);
    /// ```
    pub fn two_nodes(per_node: usize, gbps: f64, latency_us: f64) -> Self {
        let nics = vec![Nic { latency_us: latency_us / 2.0, gbps }; per_node];
        let name = format!("2 nodes of {per_node} x H200, {gbps} GB/s between");
        Topology::nvswitch(per_node).on_hosts(2, &nics).with_name(name)
    }
}
