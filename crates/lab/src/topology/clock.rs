//! The virtual clock: when an operation starts and ends on the machine that a [`Topology`] describes.
//!
//! The clock keeps the times of engines, ports and host threads; the scheduler keeps the times of streams. A booked
//! operation starts as soon as its stream, its submission and its engine allow. Each port on its path takes the bytes
//! in the order of booking; [`super`] has the model. Operations are booked by starting time; one whose thread was slow
//! to submit it comes after those that were already chosen.
//!
//! Decisions use only integers, in picoseconds: at 400 GB/s a byte takes 2.5 ps, and 64 bits last for 213 days. Sums
//! saturate there. Bandwidths are converted once for each operation, by IEEE operations that round the same everywhere.
//! So times do not depend on the computer.

use super::{CopyEngines, DeviceModel, HostCosts, KernelCost, Path, Topology};
use gpu_pool::{
    LaunchDims,
    extend::lab::{Clock, Cost, HostCall, Side, Time},
};
use smallvec::SmallVec;
use std::{
    any::Any,
    collections::{BTreeMap, HashMap},
    thread::ThreadId,
};

pub(super) struct VirtualClock {
    devices: Vec<Device>,
    links: HashMap<(usize, usize), Way>,
    ports: Vec<Time>,
    kernels: BTreeMap<String, KernelCost>,
    host: HostCosts,
    threads: HashMap<ThreadId, Time>,
}

struct Device {
    model: DeviceModel,
    up: Way,
    down: Way,
    engines: [SmallVec<[Time; 2]>; Engine::COUNT],
}

struct Unbooked {
    device: usize,
    engines: [SmallVec<[Time; 2]>; Engine::COUNT],
}

#[derive(Clone)]
struct Way {
    latency: Time,
    gbps: f64,
    /// Bandwidth if the destination's engine copies.
    pull_gbps: f64,
    uses: SmallVec<[(usize, f64); 4]>,
}

#[derive(Clone, Copy)]
enum Engine {
    Up,
    Down,
    Peer,
    HostThread,
    Compute,
}

impl Engine {
    const COUNT: usize = 5;
}

struct Demand {
    engine: Option<Engine>,
    /// Time that the operation takes without occupying a resource.
    latency: Time,
    /// Time from the start until the bytes are transferred or the kernel has ended, if no port is busy.
    work: Time,
    ports: SmallVec<[(usize, Time); 4]>,
}

impl Demand {
    fn on(engine: Engine, latency: Time, work: Time) -> Self {
        Demand { engine: Some(engine), latency, work, ports: SmallVec::new() }
    }

    fn free(latency: Time) -> Self {
        Demand { engine: None, latency, work: 0, ports: SmallVec::new() }
    }
}

impl VirtualClock {
    /// The clock of a [valid](Topology::validate) machine.
    pub fn new(topology: &Topology) -> Self {
        let mut numbers = BTreeMap::new();
        let devices: Vec<Device> = topology.devices().iter().map(|model| Device::new(model, &mut numbers)).collect();
        let mut links = HashMap::with_capacity(topology.links().len());
        for link in topology.links().iter().cloned().chain(topology.rails()) {
            let way = Way::new(&link.path, &mut numbers);
            let pull_gbps = link.pull_gbps.unwrap_or(way.gbps);
            links.insert((link.from, link.to), Way { pull_gbps, ..way });
        }
        let (ports, kernels, host) = (vec![0; numbers.len()], topology.kernels().clone(), *topology.host());
        VirtualClock { devices, links, ports, kernels, host, threads: HashMap::new() }
    }

    fn spend(&mut self, thread: ThreadId, microseconds: f64) -> Time {
        let now = self.threads.entry(thread).or_default();
        *now = now.saturating_add(micro(microseconds));
        *now
    }

    fn with_engine(&self, device: usize, demand: &Demand, ready: Time) -> Time {
        let engine = demand.engine.and_then(|engine| self.devices[device].engines[engine as usize].iter().min());
        ready.max(engine.copied().unwrap_or(0))
    }

    fn demand(&self, device: usize, cost: &Cost) -> Demand {
        let model = &self.devices[device].model;
        let memory = |bytes: f64| bytes * ps_per_byte(model.memory_gbps);
        let operations = |count: f64| count * ps_per_byte(model.gflops);
        let compute = |work: f64| Demand::on(Engine::Compute, micro(model.launch_us), pico(work / model.speed));
        match *cost {
            Cost::Copy { from: Side::Device(from), to: Side::Device(to), bytes } if from == to => {
                compute(memory(2.0 * bytes as f64))
            }
            Cost::Copy { from, to, bytes } => self.copy(device, from, to, bytes as f64),
            Cost::Fill { bytes } => compute(memory(bytes as f64)),
            Cost::Kernel { name, dims, read, written } => {
                let cost = self.kernels.get(name).copied().unwrap_or_default();
                let bytes = cost.reads * read as f64 + cost.writes * written as f64;
                compute(operations(cost.operations * threads(dims)).max(memory(bytes)))
            }
            Cost::Gemm { m, n, k, count, size } => {
                let [m, n, k, count, size] = [m, n, k, count, size].map(|x| x as f64);
                compute(operations(2.0 * count * m * n * k).max(memory(size * count * (m * k + k * n + m * n))))
            }
            Cost::HostFunction => Demand::on(Engine::HostThread, 0, micro(self.host.host_function_us)),
            Cost::WaitEvent | Cost::WaitValue => Demand::free(micro(model.wait_us)),
            Cost::WriteValue | Cost::Stamp => Demand::free(0),
        }
    }

    fn copy(&self, device: usize, from: Side, to: Side, bytes: f64) -> Demand {
        let detour;
        let (way, engine) = match (from, to) {
            (Side::Host, Side::Host) => (&self.devices[device].up, Engine::Up),
            (Side::Host, Side::Device(to)) => (&self.devices[to].up, Engine::Up),
            (Side::Device(from), Side::Host) => (&self.devices[from].down, Engine::Down),
            (Side::Device(from), Side::Device(to)) => match self.links.get(&(from, to)) {
                Some(way) => (way, Engine::Peer),
                // Devices with peer access but without a link copy through host memory.
                None => {
                    detour = self.devices[from].down.then(&self.devices[to].up);
                    (&detour, Engine::Peer)
                }
            },
        };
        let pulled = matches!(from, Side::Device(source) if source != device);
        let gbps = if pulled { way.pull_gbps } else { way.gbps };
        let mut demand = Demand::on(engine, way.latency, transfer(bytes, gbps));
        for &(port, gbps) in &way.uses {
            let time = transfer(bytes, gbps);
            match demand.ports.iter_mut().find(|(other, _)| *other == port) {
                Some((_, all)) => *all = all.saturating_add(time),
                None => demand.ports.push((port, time)),
            }
        }
        demand
    }
}

impl Clock for VirtualClock {
    fn submit(&mut self, thread: ThreadId, cost: &Cost) -> Time {
        let host = &self.host;
        self.spend(
            thread,
            match cost {
                Cost::Copy { .. } => host.copy_us,
                Cost::Fill { .. } | Cost::Kernel { .. } | Cost::Gemm { .. } | Cost::HostFunction => host.launch_us,
                Cost::WaitEvent => host.wait_us,
                Cost::Stamp => host.record_us,
                Cost::WriteValue | Cost::WaitValue => host.value_us,
            },
        )
    }

    fn call(&mut self, thread: ThreadId, call: HostCall) {
        self.spend(
            thread,
            match call {
                HostCall::Record => self.host.record_us,
                HostCall::Wake => self.host.wake_us,
                HostCall::Query => self.host.query_us,
            },
        );
    }

    fn raise(&mut self, thread: ThreadId, time: Time) {
        let now = self.threads.entry(thread).or_default();
        *now = time.max(*now);
    }

    fn now(&self, thread: ThreadId) -> Time {
        self.threads.get(&thread).copied().unwrap_or(0)
    }

    fn start(&self, device: usize, cost: &Cost, ready: Time) -> Time {
        self.with_engine(device, &self.demand(device, cost), ready)
    }

    fn book(&mut self, device: usize, cost: &Cost, ready: Time) -> (Time, Time) {
        let demand = self.demand(device, cost);
        let start = self.with_engine(device, &demand, ready);
        let mut through = start.saturating_add(demand.work);
        for &(port, time) in &demand.ports {
            let free = &mut self.ports[port];
            *free = start.max(*free).saturating_add(time);
            through = through.max(*free);
        }
        if let Some(engine) = demand.engine
            && let Some(free) = self.devices[device].engines[engine as usize].iter_mut().min()
        {
            *free = through;
        }
        (start, through.saturating_add(demand.latency))
    }

    fn unbooked(&self, device: usize) -> Box<dyn Any + Send> {
        Box::new(Unbooked { device, engines: self.devices[device].engines.clone() })
    }

    fn restore(&mut self, before: Box<dyn Any + Send>) {
        let Ok(before) = before.downcast::<Unbooked>() else { return };
        self.devices[before.device].engines = before.engines;
    }
}

impl Device {
    fn new(model: &DeviceModel, numbers: &mut BTreeMap<String, usize>) -> Self {
        let CopyEngines { up, down, peer } = model.copy_engines;
        let engines = [up, down, peer, 1, 1].map(|count| SmallVec::from_elem(0, count));
        let (up, down) = (Way::new(&model.up, numbers), Way::new(&model.down, numbers));
        Device { model: model.clone(), up, down, engines }
    }
}

impl Way {
    /// Numbers the ports of a path: a port that is new gets the next number.
    fn new(path: &Path, numbers: &mut BTreeMap<String, usize>) -> Self {
        let mut number = |port: &str| {
            let next = numbers.len();
            *numbers.entry(port.to_owned()).or_insert(next)
        };
        let uses = path.uses.iter().map(|used| (number(&used.port), used.gbps)).collect();
        Way { latency: micro(path.latency_us), gbps: path.gbps, pull_gbps: path.gbps, uses }
    }

    /// This path followed by another one; the copy is pipelined.
    fn then(&self, next: &Way) -> Way {
        let gbps = self.gbps.min(next.gbps);
        let uses = self.uses.iter().chain(&next.uses).copied().collect();
        Way { latency: self.latency.saturating_add(next.latency), gbps, pull_gbps: gbps, uses }
    }
}

fn threads(dims: LaunchDims) -> f64 {
    [dims.grid, dims.block].iter().map(|&(x, y, z)| f64::from(x) * f64::from(y) * f64::from(z)).product()
}

/// Picoseconds per byte at a rate in GB/s; or per operation at a rate in GFLOP/s.
fn ps_per_byte(gbps: f64) -> f64 {
    1000.0 / gbps
}

fn transfer(bytes: f64, gbps: f64) -> Time {
    pico(bytes * ps_per_byte(gbps))
}

/// Rounds up to whole picoseconds.
fn pico(picoseconds: f64) -> Time {
    picoseconds.round() as Time
}

fn micro(microseconds: f64) -> Time {
    pico(microseconds * 1e6)
}

#[cfg(test)]
#[path = "../../tests/unit/topology/clock_tests.rs"]
mod tests;
