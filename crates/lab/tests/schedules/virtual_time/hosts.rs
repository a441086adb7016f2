//! Several hosts: rails by hand, machines that are refused, and the cost model of an all-reduce against runs.

use super::{
    by_hand::{KB, Lab, machine},
    model::Model,
    run::{self, Way},
};
use crate::support::cases;
use gpu_pool::{Error, GpuPool, ReduceOp};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{
    Topology,
    topology::{DeviceModel, HostModel, Link, Nic, Path},
};

/// A byte takes two nanoseconds, and a copy passes two adapters of 2 us each.
const NIC: Nic = Nic { latency_us: 2.0, gbps: 0.5 };

/// Hosts of two devices.
fn pairs(hosts: usize, nics: &[Nic]) -> Topology {
    machine(2).on_hosts(hosts, nics)
}

/// Copies of 4000 bytes, all at once, from one device to another, and their ends in nanoseconds. They are asked for in
/// the order of their ends.
#[track_caller]
fn copies(machine: Topology, expected: &[(usize, usize, u128)]) {
    let lab = Lab::new(machine);
    let streams: Vec<_> = expected.iter().map(|&(from, ..)| (from, lab.stream(from))).collect();
    for (&(from, to, _), &(_, stream)) in expected.iter().zip(&streams) {
        lab.push(from, to, 4 * KB, stream);
    }
    let ends: Vec<_> = expected.iter().zip(&streams).map(|(e, &(device, stream))| (device, stream, e.2)).collect();
    lab.ends(&ends);
}

#[test]
fn a_copy_to_another_host_takes_both_latencies_and_the_bytes() {
    copies(pairs(2, &[NIC]), &[(0, 2, 12_000)]);
    // The local indexes differ: out of one rail, into the other.
    copies(pairs(2, &[NIC; 2]), &[(0, 3, 12_000)]);
}

#[test]
fn devices_that_share_an_adapter_take_turns() {
    copies(pairs(2, &[NIC]), &[(0, 2, 12_000), (1, 3, 20_000)]);
    copies(pairs(2, &[NIC; 2]), &[(0, 2, 12_000), (1, 3, 12_000)]);
}

#[test]
fn two_hosts_that_send_to_one_adapter_take_turns() {
    copies(pairs(3, &[NIC]), &[(2, 0, 12_000), (4, 1, 20_000)]);
    copies(pairs(3, &[NIC; 2]), &[(2, 0, 12_000), (5, 1, 12_000)]);
}

#[test]
fn an_adapter_carries_both_ways_at_once() {
    copies(pairs(2, &[NIC]), &[(0, 2, 12_000), (2, 0, 12_000)]);
}

#[test]
fn copies_inside_a_host_do_not_touch_its_adapter() {
    copies(pairs(2, &[NIC]), &[(0, 1, 9_000), (1, 2, 12_000)]);
    // The hosts' ports are not one: both copies would enter "device 1" otherwise.
    copies(pairs(2, &[NIC]), &[(0, 1, 9_000), (2, 3, 9_000)]);
}

#[test]
fn the_slower_adapter_sets_the_pace() {
    let fast = Nic { latency_us: 1.0, gbps: 4.0 };
    let hosts = |first, second| {
        let host = |devices: [usize; 2], nic| HostModel { devices: devices.into(), nics: vec![nic] };
        pairs(2, &[]).with_hosts(vec![host([0, 1], first), host([2, 3], second)])
    };
    copies(hosts(fast, NIC), &[(0, 2, 11_000)]);
    copies(hosts(NIC, fast), &[(0, 2, 11_000)]);
    copies(hosts(fast, fast), &[(0, 2, 3_000), (1, 3, 4_000)]);
}

#[test]
fn a_link_goes_before_the_rail() {
    let linked = pairs(2, &[NIC]).link(Link::new(0, 2, Path::new(1.0, 4.0)));
    assert!(linked.rail(0, 2).is_none() && linked.rail(2, 0).is_some());
    assert_eq!(linked.peers(0), [1, 2, 3]);
    copies(linked, &[(0, 2, 2_000), (2, 0, 12_000)]);
}

#[test]
fn rails_are_the_same_both_ways() {
    let machine = Topology::nvswitch(3).on_hosts(3, &[NIC, Nic { latency_us: 1.0, gbps: 7.0 }]);
    machine.validate().unwrap();
    for a in 0..machine.len() {
        assert_eq!(machine.peers(a).len(), machine.len() - 1);
        for b in 0..machine.len() {
            let (there, back) = (machine.rail(a, b), machine.rail(b, a));
            assert_eq!((there.is_some(), back.is_some()), (a / 3 != b / 3, a / 3 != b / 3), "{a} and {b}");
            if let (Some(there), Some(back)) = (there, back) {
                assert_eq!(there.path.latency_us, back.path.latency_us);
                assert_eq!(there.path.gbps, back.path.gbps);
                let ports = |link: &Link| link.path.uses.iter().map(|used| used.port.clone()).collect::<Vec<_>>();
                assert!(ports(&there).iter().all(|port| !ports(&back).contains(port)), "{there:?}");
            }
        }
    }
}

#[test]
fn hosts_that_cannot_be_are_refused() {
    let refusal = |hosts: &[(&[usize], &[Nic])]| {
        let four = (0..4).fold(Topology::new("four"), |machine, _| machine.device(DeviceModel::default()));
        let host = |&(devices, nics): &(&[usize], &[Nic])| HostModel { devices: devices.into(), nics: nics.into() };
        match four.with_hosts(hosts.iter().map(host).collect()).validate() {
            Ok(()) => String::new(),
            Err(Error::InvalidArgument { why, .. }) => why,
            Err(other) => panic!("{other:?}"),
        }
    };
    let nic = &[NIC][..];
    assert_eq!(refusal(&[(&[0, 1], nic), (&[2, 3], nic)]), "");
    assert_eq!(refusal(&[(&[3, 1], nic), (&[2, 0], nic)]), "");
    assert_eq!(refusal(&[(&[0, 1, 2, 3], &[])]), "", "one host needs no network");
    assert_eq!(refusal(&[(&[0, 1, 2, 3], nic), (&[], nic)]), "host 1: no devices");
    assert_eq!(refusal(&[(&[0, 1], nic), (&[2, 4], nic)]), "host 1: device 4 of 4 devices");
    assert_eq!(refusal(&[(&[0, 1], nic), (&[2, 1], nic)]), "host 1: device 1 is on host 0, too");
    assert_eq!(refusal(&[(&[0, 0], nic), (&[2, 3], nic)]), "host 0: device 0 is on host 0, too");
    assert_eq!(refusal(&[(&[0, 1], nic), (&[3], nic)]), "device 2 is on no host");
    let bare = "host 1: no NIC, and no link from device 0 to device 2";
    assert_eq!(refusal(&[(&[0, 1], nic), (&[2, 3], &[])]), bare);
    let slow = [NIC, Nic { gbps: 0.0, ..NIC }];
    assert_eq!(refusal(&[(&[0, 1], &slow), (&[2, 3], nic)]), "host 0: NIC 1: gbps is 0: it must be above zero");
    let early = [Nic { latency_us: -1.0, ..NIC }];
    assert!(refusal(&[(&[0, 1], nic), (&[2, 3], &early)]).starts_with("host 1: NIC 0: latency_us is -1"));
}

#[test]
fn hosts_are_shown() {
    let shown = Topology::nvswitch(2).on_hosts(3, &[NIC]).to_string();
    assert!(shown.starts_with("3 hosts of 2 x H200 on NVSwitch\n"), "{shown}");
    assert!(shown.contains("  hosts 0-2: 2 devices, 1 x NIC with 0.5 GB/s each way after 2 us, shared\n"), "{shown}");
    assert!(!shown.contains("staged"), "{shown}");
    let one = Topology::nvswitch(2).with_hosts(vec![HostModel { devices: vec![0, 1], nics: vec![] }]).to_string();
    assert!(one.contains("  host 0: 2 devices, no NIC\n"), "{one}");
}

/// With real data: the hierarchy adds up what the ring adds up.
#[test]
fn both_ways_give_the_sum() {
    let machine = Topology::nvswitch(2).on_hosts(3, &[NIC; 2]);
    let pool = GpuPool::builder().topology(machine).build().unwrap();
    for way in [Way::Flat, Way::Hierarchy] {
        let sums = pool.run(|dev, _| {
            let mut x = dev.upload(&(0..100).map(|i| (i * (dev.rank() + 1)) as f32).collect::<Vec<_>>())?;
            run::all_reduce(dev, &mut x, way, 2)?;
            dev.download(&x)
        });
        let expected: Vec<f32> = (0..100).map(|i| (i * 21) as f32).collect();
        assert!(sums.unwrap().iter().all(|sum| *sum == expected), "{way:?}");
    }
}

/// What the model says of a machine, against runs, within 3 %.
fn is_modelled(hosts: usize, each: usize, nics: usize, sizes: &[usize]) {
    let nic = Nic { latency_us: 5.0, gbps: 50.0 };
    let machine = Topology::nvswitch(each).on_hosts(hosts, &vec![nic; nics]);
    let model = Model::of(&machine).unwrap();
    for (&bytes, ran) in sizes.iter().zip(run::times(&machine, sizes).unwrap()) {
        for (way, ran, modelled) in
            [(Way::Flat, ran[0], model.flat(bytes)), (Way::Hierarchy, ran[1], model.hierarchy(bytes))]
        {
            let off = 100.0 * (modelled / ran - 1.0);
            let what = format!("{hosts} hosts of {each}, {nics} NICs, {bytes} bytes, {way:?}");
            println!("{what}: {ran:.1} us ran, {modelled:.1} modelled, {off:+.2} %");
            assert!(off.abs() < 3.0, "{what}: {ran} us ran, {modelled} modelled");
        }
    }
}

const SIZES: [usize; 7] = [1 << 10, 1 << 13, 1 << 16, 1 << 20, 1 << 22, 1 << 26, 1 << 30];

#[test]
fn the_model_agrees_with_runs_on_up_to_16_devices() {
    for (hosts, each) in [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2), (2, 4), (4, 4), (2, 8)] {
        is_modelled(hosts, each, each, cases(&[1 << 10, 1 << 20, 1 << 30], &SIZES));
    }
}

#[test]
fn the_model_agrees_with_runs_on_32_and_64_devices() {
    let all: &[(usize, usize, &[usize])] = &[
        (4, 8, &[1 << 20]),
        (4, 8, &[1 << 10, 1 << 30]),
        (8, 4, &[1 << 10, 1 << 30]),
        // Half a minute without optimisation.
        (8, 8, &[1 << 20]),
    ];
    for &(hosts, each, sizes) in cases(&all[..1], all) {
        is_modelled(hosts, each, each, sizes);
    }
}

#[test]
fn the_model_agrees_with_runs_where_devices_share_an_adapter() {
    for (hosts, each, nics) in [(2, 8, 1), (2, 8, 4), (4, 2, 1), (4, 4, 2), (8, 2, 1)] {
        is_modelled(hosts, each, nics, cases(&[1 << 10, 1 << 22, 1 << 28], &SIZES));
    }
}

/// Every device of a host with one adapter sends almost as much through it as the ring does, and has the host's own
/// phases besides.
#[test]
fn the_ring_wins_only_with_few_adapters_and_much_data() {
    let crossing = |hosts: usize, nics: usize| {
        let nic = Nic { latency_us: 5.0, gbps: 50.0 };
        let machine = Topology::nvswitch(8).on_hosts(hosts, &vec![nic; nics]);
        Model::of(&machine).unwrap().crossing(1 << 10..=1 << 36)
    };
    assert_eq!([2, 16, 128].map(|hosts| crossing(hosts, 8)), [None; 3]);
    assert_eq!(crossing(2, 1), None);
    assert!(crossing(16, 1).is_some_and(|bytes| (1 << 30..1 << 33).contains(&bytes)));
    assert!(crossing(16, 1) < crossing(128, 1), "each step more costs the ring");
}

/// The flat ring and the hierarchy of hosts with one device are the same calls.
#[test]
fn one_device_on_each_host_is_one_ring() {
    let machine = Topology::nvswitch(1).on_hosts(4, &[NIC]);
    let time = |call: fn(&gpu_pool::Device, &mut gpu_pool::DeviceBuffer<f32>) -> gpu_pool::Result<()>| {
        let pool = GpuPool::builder().topology(machine.clone()).dry().build().unwrap();
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(1 << 20)?;
            let start = dev.record_timed()?;
            call(dev, &mut x)?;
            let end = dev.record_timed()?;
            dev.synchronize()?;
            end.elapsed_since(&start)
        })
        .unwrap()
    };
    let flat = time(|dev, x| dev.all_reduce(x, ReduceOp::Sum));
    assert_eq!(flat, time(|dev, x| run::all_reduce(dev, x, Way::Hierarchy, 1)));
}
