//! Small programs on the waist, with their times by hand.
//!
//! The machine: links of 1 GB/s (a byte takes a nanosecond) after 5 us; 2 GB/s to and from the host after 3 us, through
//! memory that takes 2 GB/s; kernels at 10 GB/s after 2 us; a wait for an event takes 1 us; calls cost nothing unless a
//! test says so. All of a test's operations are submitted at time 0 then.

use gpu_pool::extend::driver::{
    Address, DriverRef, HostArg, KernelArg, Launch, LaunchDims, ModuleImage, RawFunction, RawStream,
    host::{self, ExecutionOrder, MachineConfig},
};
use gpu_pool_lab::{
    Topology,
    topology::{DeviceModel, HostCosts, KernelCost, Link, Path},
};
use std::{sync::Arc, time::Duration};

pub const KB: usize = 1000;

pub fn machine(devices: usize) -> Topology {
    let device = DeviceModel {
        memory_gbps: 10.0,
        gflops: 1.0,
        launch_us: 2.0,
        wait_us: 1.0,
        up: Path::new(3.0, 2.0).through("memory", 2.0),
        down: Path::new(3.0, 2.0).through("memory", 2.0),
        ..DeviceModel::default()
    };
    let mut machine = (0..devices).fold(Topology::new("by hand"), |machine, _| machine.device(device.clone()));
    for from in 0..devices {
        for to in (0..devices).filter(|&to| to != from) {
            let path = Path::new(5.0, 1.0).through(format!("into {to}"), 1.0);
            machine = machine.link(Link::new(from, to, path));
        }
    }
    machine.with_host(|host| *host = HostCosts::FREE)
}

/// The machine's GPUs, dry, with what the tests need on each: memory, and a page-locked buffer.
pub struct Lab {
    gpus: Vec<DriverRef>,
    memory: Vec<Address>,
    functions: Vec<RawFunction>,
    pinned: *mut u8,
}

const ROOM: usize = 1 << 20;

impl Lab {
    pub fn new(machine: Topology) -> Self {
        machine.validate().unwrap();
        let configs = machine.host_configs();
        let settings = MachineConfig {
            schedule: ExecutionOrder::Virtual,
            topology: Some(Arc::new(machine)),
            dry: true,
            ..MachineConfig::default()
        };
        let gpus = host::machine_with(&configs, &settings).unwrap();
        for a in &gpus {
            for b in &gpus {
                if a.can_access_peer(&**b).unwrap() {
                    a.enable_peer(&**b).unwrap();
                }
            }
        }
        let image = ModuleImage { ptx: None, cubins: &[], packed: false, source: None, shared: false };
        let function = |gpu: &DriverRef| gpu.function(gpu.module_load(&image).unwrap(), "work").unwrap();
        Lab {
            memory: gpus.iter().map(|gpu| gpu.mem_alloc(ROOM).unwrap()).collect(),
            functions: gpus.iter().map(function).collect(),
            pinned: gpus[0].host_alloc(ROOM).unwrap(),
            gpus,
        }
    }

    pub fn stream(&self, device: usize) -> RawStream {
        self.gpus[device].stream_create(0).unwrap()
    }

    /// Pushes the first bytes from the stream's device to another one.
    pub fn push(&self, from: usize, to: usize, bytes: usize, stream: RawStream) {
        let (src, dst) = (&*self.gpus[from], &*self.gpus[to]);
        // SAFETY: the memory is live to the end of the test; the machine is dry, so nothing is read or written.
        unsafe { src.copy_peer(self.memory[to], dst, self.memory[from], src, bytes, stream) }.unwrap();
    }

    fn up(&self, device: usize, bytes: usize, stream: RawStream) {
        // SAFETY: as in `push`.
        unsafe { self.gpus[device].copy_to_device(self.memory[device], self.pinned, bytes, stream) }.unwrap();
    }

    fn down(&self, device: usize, bytes: usize, stream: RawStream) {
        // SAFETY: as in `push`.
        unsafe { self.gpus[device].copy_to_host(self.pinned, self.memory[device], bytes, stream) }.unwrap();
    }

    /// A kernel of 10 * 10 threads that reads so many bytes.
    fn kernel(&self, device: usize, bytes: usize, stream: RawStream) {
        unsafe fn work(_: LaunchDims, _: &[HostArg]) {
            panic!("nothing runs on a dry machine");
        }
        let launch = Launch {
            name: "work",
            function: self.functions[device],
            host: Some(work),
            dims: LaunchDims { grid: (10, 1, 1), block: (10, 1, 1), shared_bytes: 0 },
            args: &[KernelArg::Slice { address: self.memory[device], bytes, write: false }],
            early: false,
        };
        // SAFETY: as in `push`.
        unsafe { self.gpus[device].launch(&launch, stream) }.unwrap();
    }

    /// All later work of `after` waits for what `before` has been given.
    fn order(&self, (a, before): (usize, RawStream), (b, after): (usize, RawStream)) {
        let event = self.gpus[a].event_create(false).unwrap();
        self.gpus[a].event_record(event, before).unwrap();
        self.gpus[b].stream_wait_event(after, event).unwrap();
    }

    /// When a stream has done what it was given, in nanoseconds. A thread's clock goes only forward: ask for the
    /// streams in the order of their ends.
    fn end(&self, device: usize, stream: RawStream) -> u128 {
        let gpu = &*self.gpus[device];
        assert!(gpu.stream_wait_idle(stream, Duration::from_secs(600)).unwrap());
        host::virtual_now(gpu).expect("the machine has a clock").as_nanos()
    }

    /// Each stream of a device ends at its time.
    #[track_caller]
    pub fn ends(&self, expected: &[(usize, RawStream, u128)]) {
        for &(device, stream, nanos) in expected {
            assert_eq!(self.end(device, stream), nanos, "{stream:?} of device {device}");
        }
    }
}

#[test]
fn a_copy_takes_latency_and_bytes() {
    let lab = Lab::new(machine(2));
    let stream = lab.stream(0);
    lab.push(0, 1, 4 * KB, stream);
    assert_eq!(lab.end(0, stream), 9_000);
}

#[test]
fn copies_of_one_stream_pay_the_latency_each() {
    let lab = Lab::new(machine(2));
    let stream = lab.stream(0);
    lab.push(0, 1, 4 * KB, stream);
    lab.push(0, 1, 4 * KB, stream);
    assert_eq!(lab.end(0, stream), 18_000);
}

#[test]
fn copies_of_two_streams_queue_for_the_engine() {
    let lab = Lab::new(machine(3));
    let (a, b) = (lab.stream(0), lab.stream(0));
    lab.push(0, 1, 4 * KB, a);
    // To another device, through another port: what they share is the engine.
    lab.push(0, 2, 4 * KB, b);
    lab.ends(&[(0, a, 9_000), (0, b, 13_000)]);
}

#[test]
fn a_second_engine_takes_the_second_copy() {
    let lab = Lab::new(machine(3).with_device(0, |device| device.copy_engines.peer = 2));
    let (a, b) = (lab.stream(0), lab.stream(0));
    lab.push(0, 1, 4 * KB, a);
    lab.push(0, 2, 4 * KB, b);
    lab.ends(&[(0, a, 9_000), (0, b, 9_000)]);
}

#[test]
fn copies_to_one_device_share_its_port() {
    let lab = Lab::new(machine(3));
    let (a, b) = (lab.stream(0), lab.stream(1));
    lab.push(0, 2, 4 * KB, a);
    lab.push(1, 2, 4 * KB, b);
    assert_eq!(lab.end(0, a), 9_000, "the lower device goes first");
    assert_eq!(lab.end(1, b), 13_000);
}

#[test]
fn engines_of_different_kinds_overlap() {
    let lab = Lab::new(machine(2));
    let (copy, up, kernel) = (lab.stream(0), lab.stream(0), lab.stream(0));
    lab.up(0, 4 * KB, up); // 3 us + 4000 bytes at 2 GB/s
    lab.kernel(0, 70 * KB, kernel); // 2 us + 70 000 bytes at 10 GB/s
    lab.push(0, 1, 5 * KB, copy); // 5 us + 5000 bytes at 1 GB/s
    lab.ends(&[(0, up, 5_000), (0, kernel, 9_000), (0, copy, 10_000)]);
}

#[test]
fn up_and_down_share_the_memory_of_the_host() {
    let lab = Lab::new(machine(2));
    let (up, down) = (lab.stream(0), lab.stream(1));
    lab.up(0, 4 * KB, up);
    lab.down(1, 4 * KB, down);
    lab.ends(&[(0, up, 5_000), (1, down, 7_000)]);
}

#[test]
fn kernels_of_one_device_take_turns() {
    let lab = Lab::new(machine(1));
    let (a, b) = (lab.stream(0), lab.stream(0));
    lab.kernel(0, 40 * KB, a);
    lab.kernel(0, 40 * KB, b);
    lab.ends(&[(0, a, 6_000), (0, b, 10_000)]);
}

#[test]
fn a_kernel_can_be_given_operations() {
    let cost = KernelCost { reads: 0.5, operations: 30.0, ..KernelCost::default() };
    let lab = Lab::new(machine(1).with_kernel("work", cost));
    let stream = lab.stream(0);
    lab.kernel(0, 20 * KB, stream); // 100 threads * 30 operations at 1 GFLOP/s are longer than 10 000 bytes
    assert_eq!(lab.end(0, stream), 5_000);
    lab.kernel(0, 200 * KB, stream); // 100 000 bytes are longer
    assert_eq!(lab.end(0, stream), 17_000);
}

#[test]
fn a_slow_device_takes_longer() {
    let lab = Lab::new(machine(2).with_device(1, |device| device.speed = 0.25));
    let (fast, slow) = (lab.stream(0), lab.stream(1));
    lab.kernel(0, 40 * KB, fast);
    lab.kernel(1, 40 * KB, slow);
    lab.ends(&[(0, fast, 6_000), (1, slow, 18_000)]);
}

#[test]
fn events_carry_time_over_devices() {
    let lab = Lab::new(machine(3));
    let streams = [lab.stream(0), lab.stream(1), lab.stream(2)];
    lab.kernel(0, 10 * KB, streams[0]); // 3
    lab.push(0, 1, KB, streams[0]); // 9
    lab.order((0, streams[0]), (1, streams[1])); // 10
    lab.push(1, 2, 2 * KB, streams[1]); // 17
    lab.order((1, streams[1]), (2, streams[2])); // 18
    lab.kernel(2, 20 * KB, streams[2]); // 22
    // Not waited for by anyone: it does not count.
    lab.push(0, 1, 90 * KB, streams[0]);
    lab.ends(&[(1, streams[1], 17_000), (2, streams[2], 22_000)]);
}

#[test]
fn a_wait_for_what_is_over_costs_no_more_than_itself() {
    let lab = Lab::new(machine(2));
    let (short, long) = (lab.stream(0), lab.stream(1));
    lab.kernel(0, 10 * KB, short); // 3
    lab.kernel(1, 80 * KB, long); // 10
    lab.order((0, short), (1, long)); // 11
    lab.kernel(1, 10 * KB, long); // 14
    assert_eq!(lab.end(1, long), 14_000);
}

#[test]
fn a_slow_host_holds_the_devices_up() {
    let lab = Lab::new(machine(1).with_host(|host| (host.launch_us, host.wake_us) = (8.0, 7.0)));
    let stream = lab.stream(0);
    // Submitted at 8, 16 and 24 us; each is done before the next one comes.
    (0..3).for_each(|_| lab.kernel(0, 10 * KB, stream));
    assert_eq!(lab.end(0, stream), 34_000, "24 to submit, 3 to run, 7 to wake up");
}

#[test]
fn timing_events_read_the_virtual_clock() {
    let lab = Lab::new(machine(2));
    let gpu = &lab.gpus[0];
    let (stream, start, end) = (lab.stream(0), gpu.event_create(true).unwrap(), gpu.event_create(true).unwrap());
    lab.kernel(0, 10 * KB, stream);
    gpu.event_record(start, stream).unwrap();
    lab.push(0, 1, 12_345, stream);
    gpu.event_record(end, stream).unwrap();
    lab.end(0, stream);
    assert_eq!(gpu.event_elapsed(start, end).unwrap(), Duration::from_nanos(5_000 + 12_345));
}
