//! Tests of the clock: small machines with times calculated by hand, and the measured host copies that
//! `Topology::nvswitch` is fitted to.

use super::super::Link;
use super::*;

const US: Time = 1_000_000;

/// Two devices, a link of 1 GB/s (a byte takes a nanosecond) and 5 us each way; 2 GB/s and 3 us to the host.
fn machine() -> Topology {
    let host = || Path::new(3.0, 2.0).through("memory", 2.0);
    let device = || DeviceModel {
        memory_gbps: 10.0,
        gflops: 1.0,
        launch_us: 2.0,
        wait_us: 1.0,
        up: host(),
        down: host(),
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
    let mut clock = VirtualClock::new(&machine());
    // 5 us + 1000 bytes at a nanosecond each. The second stream's copy starts when these bytes are transferred.
    assert_eq!(clock.book(0, &copy(0, 1, 1000), 0), (0, 6 * US));
    assert_eq!(clock.start(0, &copy(0, 1, 1000), 0), US);
    assert_eq!(clock.book(0, &copy(0, 1, 1000), 0), (US, 7 * US));
}

#[test]
fn engines_are_apart_and_ports_shared() {
    let mut clock = VirtualClock::new(&machine());
    let up = |to| Cost::Copy { from: Side::Host, to: Side::Device(to), bytes: 4000 };
    let down = |from| Cost::Copy { from: Side::Device(from), to: Side::Host, bytes: 4000 };
    assert_eq!(clock.book(0, &up(0), 0), (0, 5 * US));
    // Another engine, but the same host memory.
    assert_eq!(clock.book(0, &down(0), 0), (0, 7 * US));
    assert_eq!(clock.book(1, &up(1), 0), (0, 9 * US));
    // The engine was occupied until then.
    assert_eq!(clock.start(1, &up(1), 0), 6 * US);
    // Separate ports and engines.
    assert_eq!(clock.book(0, &copy(0, 1, 1000), 0), (0, 6 * US));
    assert_eq!(clock.book(1, &copy(1, 0, 1000), 0), (0, 6 * US));
}

/// Host memory has enough bandwidth for two copies side by side, but not for more.
#[test]
fn a_port_with_room_delays_nobody() {
    let wide = machine().with_devices(|_, device| {
        device.up.uses[0].gbps = 5.0;
        device.down.uses[0].gbps = 5.0;
    });
    let mut clock = VirtualClock::new(&wide);
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
    let two = machine().with_device(0, |device| device.copy_engines.peer = 2).with_links(|link| link.path.uses.clear());
    let mut clock = VirtualClock::new(&two);
    let starts: Vec<Time> = (0..4).map(|_| clock.book(0, &copy(0, 1, 1000), 0).0).collect();
    assert_eq!(starts, [0, 0, US, US]);
}

#[test]
fn kernels_take_the_longer_of_bytes_and_operations() {
    let machine = machine()
        .with_kernel("flops", KernelCost { operations: 100.0, ..KernelCost::default() })
        .with_device(1, |device| device.speed = 0.5);
    let mut clock = VirtualClock::new(&machine);
    let dims = LaunchDims { grid: (2, 1, 1), block: (50, 2, 1), shared_bytes: 0 };
    let kernel = |name| Cost::Kernel { name, dims, read: 20_000, written: 10_000 };
    // 20 000 + 2 * 10 000 bytes at 10 GB/s.
    assert_eq!(clock.book(0, &kernel("bytes"), 0), (0, 6 * US));
    // 200 threads * 100 operations at 1 GFLOP/s, after the previous kernel.
    assert_eq!(clock.book(0, &kernel("flops"), 0), (4 * US, 26 * US));
    // Half the speed: twice the work, the same launch.
    assert_eq!(clock.book(1, &kernel("bytes"), 0), (0, 10 * US));
    // 2 * 10 * 20 * 30 operations.
    assert_eq!(clock.book(1, &Cost::Gemm { m: 10, n: 20, k: 30, count: 1, size: 4 }, 8 * US), (8 * US, 34 * US));
    // 10 000 bytes, read and written.
    assert_eq!(clock.book(0, &copy(0, 0, 10_000), 24 * US), (24 * US, 28 * US));
}

#[test]
fn pulling_may_be_slower() {
    let machine = machine().with_link(0, 1, |link| link.pull_gbps = Some(0.5));
    let mut clock = VirtualClock::new(&machine);
    assert_eq!(clock.book(0, &copy(0, 1, 1000), 0), (0, 6 * US), "device 0 pushes");
    assert_eq!(clock.book(1, &copy(0, 1, 1000), 9 * US), (9 * US, 16 * US), "device 1 pulls");
}

#[test]
fn a_pair_without_a_link_goes_by_way_of_the_host() {
    let machine = machine().without_link(0, 1);
    let mut clock = VirtualClock::new(&machine);
    // 3 us down and 3 us up, at 2 GB/s; the host's memory takes the bytes twice.
    assert_eq!(clock.book(0, &copy(0, 1, 1000), 0), (0, 7 * US));
    assert_eq!(clock.start(0, &copy(0, 1, 1000), 0), US);
}

#[test]
fn threads_pay_for_their_calls() {
    let mut clock = VirtualClock::new(&machine());
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
        let mut clock = VirtualClock::new(&Topology::nvswitch(8));
        let (bytes, rounds) = (16 << 20, 8);
        let mut ends = 0;
        for _ in 0..rounds {
            for device in 0..devices {
                let (here, host) = (Side::Device(device), Side::Host);
                for (from, to) in [(host, here)].iter().filter(|_| up).chain([(here, host)].iter().filter(|_| down)) {
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

/// Sums saturate: no cost and no number of costs wraps around.
#[test]
fn no_time_overflows() {
    let slow = machine()
        .with_devices(|_, device| {
            (device.memory_gbps, device.gflops, device.speed) = (1e-6, 1e-6, 1e-6);
            (device.up.gbps, device.up.latency_us, device.launch_us) = (1e-6, 86_400e6, 86_400e6);
        })
        .with_host(|host| host.launch_us = 86_400e6)
        .with_kernel("k", KernelCost { reads: 86_400e6, writes: 86_400e6, operations: 86_400e6 })
        .without_link(1, 0);
    slow.validate().unwrap();
    let dims =
        LaunchDims { grid: (u32::MAX, u32::MAX, u32::MAX), block: (u32::MAX, u32::MAX, u32::MAX), shared_bytes: 0 };
    let (host, n) = (Side::Host, usize::MAX);
    let costs = [
        copy(0, 0, n),
        copy(0, 1, n),
        copy(1, 0, n),
        Cost::Copy { from: host, to: Side::Device(0), bytes: n },
        Cost::Fill { bytes: n },
        Cost::Kernel { name: "k", dims, read: n, written: n },
        Cost::Gemm { m: n, n, k: n, count: n, size: 8 },
        Cost::HostFunction,
        Cost::WaitEvent,
    ];
    let mut clock = VirtualClock::new(&slow);
    for _ in 0..2 {
        for cost in &costs {
            let (start, end) = clock.book(0, cost, Time::MAX - 1);
            assert!(Time::MAX - 1 <= start && start <= end, "{cost:?}");
        }
    }
    let me = std::thread::current().id();
    for _ in 0..1000 {
        clock.submit(me, &Cost::HostFunction);
    }
    assert_eq!(clock.now(me), Time::MAX);
}
