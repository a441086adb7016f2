//! The virtual clock: when an operation starts and ends on the machine that a [`Topology`] describes.
//!
//! It keeps the times of what operations share: engines, ports and the threads of the host. Times of streams are the
//! scheduler's. An operation that is booked starts as soon as its stream, its submission and its engine allow, and keeps
//! the engine until its bytes are through. That is when its own path and each port on it have had time for them; a port
//! takes the bytes of all operations one after the other, in the order of booking. So what a port has room for goes through
//! it side by side, and when there is too much, the port is busy all the time and the last operation ends when it would
//! if they shared it.
//!
//! Booking is in the order in which the scheduler chooses, which is that of the starting times; an operation that turns up
//! late (its thread was slow to submit it) comes after those that were chosen already.
//!
//! All arithmetic that decides is on integers, of picoseconds: at 400 GB/s a byte takes 2.5 of them, and 64 bits last
//! for 213 days. Bandwidths are turned into integers once for each operation, by IEEE operations that round the same
//! everywhere. So times do not depend on the computer.

use crate::{
    driver::LaunchDims,
    topology::{CopyEngines, DeviceModel, HostCosts, KernelCost, Path, Topology},
};
use smallvec::SmallVec;
use std::{
    collections::{BTreeMap, HashMap},
    thread::ThreadId,
};

/// Virtual time since the machine was made, in picoseconds.
pub(super) type Time = u64;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Page-locked or managed memory.
    Host,
    Device(usize),
}

/// An operation, as far as it has a price. The device whose stream it is on comes beside it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cost {
    /// Any copy: up, down, within (from == to), peer.
    Copy {
        from: Side,
        to: Side,
        bytes: usize,
    },
    Fill {
        bytes: usize,
    },
    /// With the bytes of the arguments that it reads, and of those that it writes.
    Kernel {
        name: &'static str,
        dims: LaunchDims,
        read: usize,
        written: usize,
    },
    /// Not constructed without the feature `blas`.
    #[cfg_attr(not(feature = "blas"), allow(dead_code))]
    Gemm {
        m: usize,
        n: usize,
        k: usize,
    },
    HostFunction,
    /// The scheduler has raised `ready` to the end of what is waited for.
    WaitEvent,
    /// A timing event's record.
    Stamp,
    WriteValue,
    WaitValue,
}

/// What costs a thread of the host time but is no operation of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostCall {
    /// Recording an event.
    Record,
    /// A wait came to its end.
    Wake,
    /// Asking an event or a stream whether it is done.
    Query,
}

pub(super) struct VirtualClock {
    devices: Vec<Device>,
    /// Ways between devices, by `from * devices + to`.
    links: Vec<Way>,
    /// When each port can take the next bytes.
    ports: Vec<Time>,
    /// What kernels cost whose cost is not the default.
    kernels: BTreeMap<String, KernelCost>,
    host: HostCosts,
    threads: HashMap<ThreadId, Time>,
}

struct Device {
    model: DeviceModel,
    up: Way,
    down: Way,
    /// When each engine is free, by [`Engine`].
    engines: [SmallVec<[Time; 2]>; Engine::COUNT],
}

/// A path, with its ports by number.
#[derive(Clone)]
struct Way {
    latency: Time,
    gbps: f64,
    /// When the destination's engine does it.
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

/// What an operation needs.
struct Demand {
    engine: Option<Engine>,
    /// Beside the work, without holding anything.
    latency: Time,
    /// From the start until the bytes are through or the kernel is done, if no port is busy.
    work: Time,
    /// What each port needs for the bytes.
    ports: SmallVec<[(usize, Time); 4]>,
}

impl Demand {
    fn on(engine: Engine, latency: Time, work: Time) -> Self {
        Demand { engine: Some(engine), latency, work, ports: SmallVec::new() }
    }

    /// It takes time, and nothing else.
    fn free(latency: Time) -> Self {
        Demand { engine: None, latency, work: 0, ports: SmallVec::new() }
    }
}

impl VirtualClock {
    /// The clock of a machine that [`Topology::validate`] has nothing against, with as many devices at least; without
    /// one, that of [`Topology::nvswitch`].
    pub fn new(topology: Option<&Topology>, devices: usize) -> Self {
        match topology {
            Some(topology) => Self::of(topology),
            None => Self::of(&Topology::nvswitch(devices)),
        }
    }

    fn of(topology: &Topology) -> Self {
        let mut numbers = BTreeMap::new();
        let devices: Vec<Device> = topology.devices().iter().map(|model| Device::new(model, &mut numbers)).collect();
        let count = devices.len();
        // Where there is no link but a right all the same, bytes go by way of the host.
        let mut links: Vec<_> =
            (0..count * count).map(|i| devices[i / count].down.then(&devices[i % count].up)).collect();
        for link in topology.links() {
            let way = Way::new(&link.path, &mut numbers);
            let pull_gbps = link.pull_gbps.unwrap_or(way.gbps);
            links[link.from * count + link.to] = Way { pull_gbps, ..way };
        }
        VirtualClock {
            devices,
            links,
            ports: vec![0; numbers.len()],
            kernels: topology.kernels().clone(),
            host: *topology.host(),
            threads: HashMap::new(),
        }
    }

    // ---- threads of the host ----------------------------------------------------------------------------------------

    /// A thread submits an operation: its clock moves on by what the call costs. The result is when the operation is in
    /// its stream.
    pub fn submit(&mut self, thread: ThreadId, cost: &Cost) -> Time {
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

    /// A thread makes another call.
    pub fn call(&mut self, thread: ThreadId, call: HostCall) {
        self.spend(
            thread,
            match call {
                HostCall::Record => self.host.record_us,
                HostCall::Wake => self.host.wake_us,
                HostCall::Query => self.host.query_us,
            },
        );
    }

    fn spend(&mut self, thread: ThreadId, microseconds: f64) -> Time {
        let now = self.threads.entry(thread).or_default();
        *now += micro(microseconds);
        *now
    }

    /// A thread goes on after something that ended at `time`.
    pub fn raise(&mut self, thread: ThreadId, time: Time) {
        let now = self.threads.entry(thread).or_default();
        *now = time.max(*now);
    }

    /// The thread's clock; 0 for one that has called nothing yet.
    pub fn now(&self, thread: ThreadId) -> Time {
        self.threads.get(&thread).copied().unwrap_or(0)
    }

    // ---- operations -------------------------------------------------------------------------------------------------

    /// When an operation of `device` would start if it were booked now. `ready` is the latest of its submission, the end
    /// of what comes before it in its stream, and the end of what it waits for.
    pub fn start(&self, device: usize, cost: &Cost, ready: Time) -> Time {
        self.with_engine(device, &self.demand(device, cost), ready)
    }

    /// Books engine and ports for an operation: when it starts, as [`start`](Self::start) said, and when it has finished.
    pub fn book(&mut self, device: usize, cost: &Cost, ready: Time) -> (Time, Time) {
        let demand = self.demand(device, cost);
        let start = self.with_engine(device, &demand, ready);
        let mut through = start + demand.work;
        for &(port, time) in &demand.ports {
            let free = &mut self.ports[port];
            *free = start.max(*free) + time;
            through = through.max(*free);
        }
        if let Some(engine) = demand.engine
            && let Some(free) = self.devices[device].engines[engine as usize].iter_mut().min()
        {
            *free = through;
        }
        (start, through + demand.latency)
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
            Cost::Gemm { m, n, k } => {
                let [m, n, k] = [m, n, k].map(|x| x as f64);
                compute(operations(2.0 * m * n * k).max(memory(4.0 * (m * k + k * n + m * n))))
            }
            Cost::HostFunction => Demand::on(Engine::HostThread, 0, micro(self.host.host_function_us)),
            Cost::WaitEvent | Cost::WaitValue => Demand::free(micro(model.wait_us)),
            Cost::WriteValue | Cost::Stamp => Demand::free(0),
        }
    }

    fn copy(&self, device: usize, from: Side, to: Side, bytes: f64) -> Demand {
        let (way, engine) = match (from, to) {
            (Side::Host, Side::Host) => (&self.devices[device].up, Engine::Up),
            (Side::Host, Side::Device(to)) => (&self.devices[to].up, Engine::Up),
            (Side::Device(from), Side::Host) => (&self.devices[from].down, Engine::Down),
            (Side::Device(from), Side::Device(to)) => (&self.links[from * self.devices.len() + to], Engine::Peer),
        };
        let pulled = matches!(from, Side::Device(source) if source != device);
        let gbps = if pulled { way.pull_gbps } else { way.gbps };
        let mut demand = Demand::on(engine, way.latency, transfer(bytes, gbps));
        for &(port, gbps) in &way.uses {
            let time = transfer(bytes, gbps);
            match demand.ports.iter_mut().find(|(other, _)| *other == port) {
                Some((_, all)) => *all += time,
                None => demand.ports.push((port, time)),
            }
        }
        demand
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
    /// Gives each port that it meets for the first time the next number.
    fn new(path: &Path, numbers: &mut BTreeMap<String, usize>) -> Self {
        let mut number = |port: &str| {
            let next = numbers.len();
            *numbers.entry(port.to_owned()).or_insert(next)
        };
        let uses = path.uses.iter().map(|used| (number(&used.port), used.gbps)).collect();
        Way { latency: micro(path.latency_us), gbps: path.gbps, pull_gbps: path.gbps, uses }
    }

    /// This way and then another one, piece by piece.
    fn then(&self, next: &Way) -> Way {
        let gbps = self.gbps.min(next.gbps);
        let uses = self.uses.iter().chain(&next.uses).copied().collect();
        Way { latency: self.latency + next.latency, gbps, pull_gbps: gbps, uses }
    }
}

fn threads(dims: LaunchDims) -> f64 {
    [dims.grid, dims.block].iter().map(|&(x, y, z)| f64::from(x) * f64::from(y) * f64::from(z)).product()
}

/// Picoseconds of a byte at a rate in GB/s; of an operation at GFLOP/s.
fn ps_per_byte(gbps: f64) -> f64 {
    1000.0 / gbps
}

fn transfer(bytes: f64, gbps: f64) -> Time {
    pico(bytes * ps_per_byte(gbps))
}

/// To the next picosecond.
fn pico(picoseconds: f64) -> Time {
    picoseconds.round() as Time
}

fn micro(microseconds: f64) -> Time {
    pico(microseconds * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Link;

    const US: Time = 1_000_000;

    /// Two devices, a link of 1 GB/s (a byte takes a nanosecond) and 5 us each way; 2 GB/s and 3 us to the host.
    fn machine() -> Topology {
        let device = || DeviceModel {
            memory_gbps: 10.0,
            gflops: 1.0,
            launch_us: 2.0,
            wait_us: 1.0,
            up: Path::new(3.0, 2.0).through("memory", 2.0),
            down: Path::new(3.0, 2.0).through("memory", 2.0),
            ..DeviceModel::default()
        };
        let link = |from, to| Link::new(from, to, Path::new(5.0, 1.0).through(format!("port of {to}"), 1.0));
        Topology::new("test")
            .device(device())
            .device(device())
            .link(link(0, 1))
            .link(link(1, 0))
            .with_host(|host| *host = HostCosts { launch_us: 4.0, wake_us: 7.0, ..HostCosts::FREE })
    }

    fn copy(from: usize, to: usize, bytes: usize) -> Cost {
        Cost::Copy { from: Side::Device(from), to: Side::Device(to), bytes }
    }

    #[test]
    fn latency_holds_nothing() {
        let mut clock = VirtualClock::new(Some(&machine()), 2);
        // 5 us + 1000 bytes at a nanosecond each. The second stream's copy starts when the bytes are through.
        assert_eq!(clock.book(0, &copy(0, 1, 1000), 0), (0, 6 * US));
        assert_eq!(clock.start(0, &copy(0, 1, 1000), 0), US);
        assert_eq!(clock.book(0, &copy(0, 1, 1000), 0), (US, 7 * US));
    }

    #[test]
    fn engines_are_apart_and_ports_shared() {
        let mut clock = VirtualClock::new(Some(&machine()), 2);
        let up = |to| Cost::Copy { from: Side::Host, to: Side::Device(to), bytes: 4000 };
        let down = |from| Cost::Copy { from: Side::Device(from), to: Side::Host, bytes: 4000 };
        assert_eq!(clock.book(0, &up(0), 0), (0, 5 * US));
        // Another engine, but the same memory of the host.
        assert_eq!(clock.book(0, &down(0), 0), (0, 7 * US));
        assert_eq!(clock.book(1, &up(1), 0), (0, 9 * US));
        // The engine was held for that long.
        assert_eq!(clock.start(1, &up(1), 0), 6 * US);
        // Ports and engines of their own.
        assert_eq!(clock.book(0, &copy(0, 1, 1000), 0), (0, 6 * US));
        assert_eq!(clock.book(1, &copy(1, 0, 1000), 0), (0, 6 * US));
    }

    /// The memory of the host takes two copies side by side, and more are too much for it.
    #[test]
    fn a_port_with_room_delays_nobody() {
        let wide = machine().with_devices(|_, device| {
            device.up.uses[0].gbps = 5.0;
            device.down.uses[0].gbps = 5.0;
        });
        let mut clock = VirtualClock::new(Some(&wide), 2);
        let up = |to| Cost::Copy { from: Side::Host, to: Side::Device(to), bytes: 10_000 };
        let down = |from| Cost::Copy { from: Side::Device(from), to: Side::Host, bytes: 10_000 };
        // 3 us + 10 000 bytes at 2 GB/s; the port needs 2 us for each of them.
        assert_eq!(clock.book(0, &up(0), 0), (0, 8 * US));
        assert_eq!(clock.book(0, &down(0), 0), (0, 8 * US));
        assert_eq!(clock.book(1, &up(1), 0), (0, 9 * US));
        assert_eq!(clock.book(1, &down(1), 0), (0, 11 * US));
    }

    #[test]
    fn two_engines_take_two_copies() {
        let two =
            machine().with_device(0, |device| device.copy_engines.peer = 2).with_links(|link| link.path.uses.clear());
        let mut clock = VirtualClock::new(Some(&two), 2);
        let starts: Vec<Time> = (0..4).map(|_| clock.book(0, &copy(0, 1, 1000), 0).0).collect();
        assert_eq!(starts, [0, 0, US, US]);
    }

    #[test]
    fn kernels_take_the_longer_of_bytes_and_operations() {
        let machine = machine()
            .with_kernel("flops", KernelCost { operations: 100.0, ..KernelCost::default() })
            .with_device(1, |device| device.speed = 0.5);
        let mut clock = VirtualClock::new(Some(&machine), 2);
        let dims = LaunchDims { grid: (2, 1, 1), block: (50, 2, 1), shared_bytes: 0 };
        let kernel = |name| Cost::Kernel { name, dims, read: 20_000, written: 10_000 };
        // 20 000 + 2 * 10 000 bytes at 10 GB/s.
        assert_eq!(clock.book(0, &kernel("bytes"), 0), (0, 6 * US));
        // 200 threads * 100 operations at 1 GFLOP/s, after the one before.
        assert_eq!(clock.book(0, &kernel("flops"), 0), (4 * US, 26 * US));
        // Half the speed: twice the work, the same launch.
        assert_eq!(clock.book(1, &kernel("bytes"), 0), (0, 10 * US));
        // 2 * 10 * 20 * 30 operations.
        assert_eq!(clock.book(1, &Cost::Gemm { m: 10, n: 20, k: 30 }, 8 * US), (8 * US, 34 * US));
        // 10 000 bytes, read and written.
        assert_eq!(clock.book(0, &copy(0, 0, 10_000), 24 * US), (24 * US, 28 * US));
    }

    #[test]
    fn pulling_may_be_slower() {
        let machine = machine().with_link(0, 1, |link| link.pull_gbps = Some(0.5));
        let mut clock = VirtualClock::new(Some(&machine), 2);
        assert_eq!(clock.book(0, &copy(0, 1, 1000), 0), (0, 6 * US), "device 0 pushes");
        assert_eq!(clock.book(1, &copy(0, 1, 1000), 9 * US), (9 * US, 16 * US), "device 1 pulls");
    }

    #[test]
    fn a_pair_without_a_link_goes_by_way_of_the_host() {
        let machine = machine().without_link(0, 1);
        let mut clock = VirtualClock::new(Some(&machine), 2);
        // 3 us down and 3 us up, at 2 GB/s; the host's memory takes the bytes twice.
        assert_eq!(clock.book(0, &copy(0, 1, 1000), 0), (0, 7 * US));
        assert_eq!(clock.start(0, &copy(0, 1, 1000), 0), US);
    }

    #[test]
    fn threads_pay_for_their_calls() {
        let mut clock = VirtualClock::new(Some(&machine()), 2);
        let (me, other) = (std::thread::current().id(), std::thread::spawn(|| ()).thread().id());
        let fill = Cost::Fill { bytes: 10_000 };
        assert_eq!(clock.submit(me, &fill), 4 * US);
        assert_eq!(clock.submit(me, &fill), 8 * US);
        assert_eq!(clock.book(0, &fill, 8 * US), (8 * US, 11 * US));
        clock.raise(me, 11 * US);
        clock.call(me, HostCall::Wake);
        assert_eq!((clock.now(me), clock.now(other)), (18 * US, 0));
        clock.raise(me, 0);
        assert_eq!(clock.now(me), 18 * US);
        clock.call(me, HostCall::Record);
        clock.call(me, HostCall::Query);
        assert_eq!(clock.now(me), 18 * US, "free on this machine");
    }

    /// The table of host copies in the project's measurements, GB/s for each GPU: one direction, the other, both.
    #[test]
    fn host_copies_by_several_devices() {
        let rate = |devices: usize, up: bool, down: bool| {
            let mut clock = VirtualClock::new(Some(&Topology::nvswitch(8)), 8);
            let (bytes, rounds) = (16 << 20, 8);
            let mut ends = 0;
            for _ in 0..rounds {
                for device in 0..devices {
                    let (here, host) = (Side::Device(device), Side::Host);
                    for (from, to) in [(host, here)].iter().filter(|_| up).chain([(here, host)].iter().filter(|_| down))
                    {
                        ends = ends.max(clock.book(device, &Cost::Copy { from: *from, to: *to, bytes }, 0).1);
                    }
                }
            }
            (bytes * rounds) as f64 / (ends as f64 / 1000.0)
        };
        let measured = [(1, 55.0, 52.0, 48.0), (2, 37.0, 55.0, 29.0), (4, 19.0, 27.0, 13.0), (8, 11.0, 21.0, 7.6)];
        for (devices, up, down, both) in measured {
            for (what, modelled, measured) in [
                ("up", rate(devices, true, false), up),
                ("down", rate(devices, false, true), down),
                ("both", rate(devices, true, true), both),
            ] {
                let off = modelled / measured - 1.0;
                println!("{devices} {what}: {modelled:.1} modelled, {measured} measured, {:+.0} %", 100.0 * off);
                assert!(off.abs() < 0.1, "{devices} devices {what}: {modelled:.1} GB/s, measured {measured}");
            }
        }
    }
}
