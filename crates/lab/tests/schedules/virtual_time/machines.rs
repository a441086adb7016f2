//! Machines as such: what is refused, what is shown, what goes through a file.

use gpu_pool::Error;
use gpu_pool_lab::{
    Topology,
    topology::{DeviceModel, KernelCost, Link, Path},
};

/// Why the machine cannot be.
fn refusal(machine: &Topology) -> String {
    match machine.validate() {
        Err(Error::InvalidArgument { why, .. }) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn machines_that_cannot_be_are_refused() {
    let pair = || Topology::new("pair").device(DeviceModel::default()).device(DeviceModel::default());
    let link = |from, to| Link::new(from, to, Path::new(1.0, 10.0));
    pair().link(link(0, 1)).link(link(1, 0)).validate().unwrap();

    assert_eq!(refusal(&Topology::new("nothing")), "a machine without devices");
    assert_eq!(refusal(&pair().link(link(0, 2))), "a link from device 0 to device 2 of 2 devices");
    assert_eq!(refusal(&pair().link(link(1, 1))), "a link from device 1 to itself");
    assert_eq!(refusal(&pair().link(link(0, 1)).link(link(0, 1))), "two links from device 0 to device 1");
    let with = |change: fn(&mut DeviceModel)| refusal(&pair().with_device(1, change));
    assert_eq!(with(|d| d.speed = 0.0), "device 1: speed is 0: it must be above zero");
    assert_eq!(with(|d| d.memory = 0), "device 1: no memory");
    assert_eq!(with(|d| d.memory_gbps = f64::INFINITY), "device 1: memory_gbps is inf: it must be above zero");
    assert_eq!(with(|d| d.copy_engines.down = 0), "device 1: a kind of copies without an engine");
    let many = "device 1: 1025 engines for a kind of copies: there can be 1 to 1024";
    assert_eq!(with(|d| d.copy_engines.peer = 1025), many);
    assert!(with(|d| d.up.gbps = f64::NAN).starts_with("device 1: up: gbps is NaN"));
    assert!(with(|d| d.wait_us = -1.0).starts_with("device 1: wait_us is -1"));
    let bad = |change: fn(&mut Link)| refusal(&pair().link(link(0, 1)).with_links(change));
    assert!(bad(|l| l.path.latency_us = 1e300).starts_with("link from device 0 to device 1: latency_us"));
    assert!(bad(|l| l.pull_gbps = Some(0.0)).contains("pull_gbps is 0"));
    assert!(bad(|l| l.path = l.path.clone().through("x", -2.0)).contains("gbps of port `x` is -2"));
    assert!(refusal(&pair().with_host(|host| host.copy_us = f64::NAN)).starts_with("host: copy_us is NaN"));
    let cost = KernelCost { reads: -1.0, ..KernelCost::default() };
    assert!(refusal(&pair().with_kernel("k", cost)).starts_with("kernel `k`: reads is -1"));
}

#[test]
fn presets_are_sound_and_know_their_peers() {
    let switch = Topology::nvswitch(16);
    let tree = Topology::pcie_tree(2, 2, 2);
    let nodes = Topology::two_nodes(3, 50.0, 10.0);
    for machine in [&switch, &tree, &nodes, &Topology::nvswitch(1)] {
        machine.validate().unwrap();
    }
    assert_eq!((switch.len(), tree.len(), nodes.len()), (16, 8, 6));
    assert_eq!(switch.links().len(), 16 * 15);
    assert_eq!(tree.peers(5), [4, 6, 7]);
    assert_eq!(nodes.peers(0), [1, 2, 3, 4, 5]);
    assert!(tree.clone().without_link(4, 5).peers(5) == [6, 7], "a right needs a link each way");

    let configs = tree.host_configs();
    assert_eq!(configs.len(), 8);
    assert_eq!(configs[5].peers.as_deref(), Some(&[4, 6, 7][..]));
    assert_eq!(configs[5].memory, tree.devices()[5].memory);
    assert_eq!(configs[5].name.as_deref(), Some("modelled PCIe GPU"));
}

#[test]
fn a_machine_is_shown_in_a_few_lines() {
    let shown = Topology::nvswitch(8).with_device(7, |device| device.speed = 0.5).to_string();
    let expected = "8 x H200 on NVSwitch
  devices 0-6: modelled H200, 141 GB at 4800 GB/s, 48900 GFLOP/s; from the host 55 GB/s after 2.6 us, \
to it 55 GB/s after 2.1 us
  device 7: modelled H200, 141 GB at 4800 GB/s, 48900 GFLOP/s, speed 0.5; from the host 55 GB/s after 2.6 us, \
to it 55 GB/s after 2.1 us
  56 links: 392.5 GB/s after 1.9 us, 375 GB/s when pulled
  port `NVLink into device 0` and 7 like it are shared, each by 7 paths
  port `NVLink out of device 0` and 7 like it are shared, each by 7 paths
  port `PCIe of device 0` and 7 like it are shared, each by 2 paths
  port `memory of host 0` is shared by 16 paths
  port `socket 0 of host 0` and 1 like it are shared, each by 4 paths
  calls: launch 4.7 us, copy 6.4 us, record 0.26 us, wait 0.31 us; wake-up 2.3 us
";
    assert_eq!(shown, expected);
    let tree = Topology::pcie_tree(2, 1, 2).to_string();
    assert!(tree.contains("8 ordered pairs without a link: staged through the host"), "{tree}");
}

#[cfg(feature = "topology-files")]
mod files {
    use super::*;
    use gpu_pool::extend::driver::host::{self, ExecutionOrder, MachineConfig};
    use proptest::prelude::*;
    use std::{
        path::{Path as FilePath, PathBuf},
        time::Duration,
    };

    fn machines() -> PathBuf {
        FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data/machines")
    }

    #[test]
    fn a_machine_goes_through_a_file_and_back() {
        let odd = KernelCost { reads: 0.1, writes: 1.0 / 3.0, operations: 1e9 };
        for machine in [
            Topology::nvswitch(4).with_kernel("add", odd).with_device(2, |device| device.copy_engines.peer = 3),
            Topology::pcie_tree(2, 1, 2).with_host(|host| host.wake_us = 0.1 + 0.2),
            Topology::two_nodes(2, 12.5, 3.0),
            Topology::pcie_tree(1, 1, 2)
                .on_hosts(3, &[gpu_pool_lab::topology::Nic { latency_us: 0.1, gbps: 1.0 / 3.0 }]),
        ] {
            let text = machine.to_toml().unwrap();
            assert_eq!(Topology::parse(&text).unwrap(), machine, "{text}");
        }
    }

    #[test]
    fn the_files_that_come_along_are_machines() {
        let files: Vec<_> = std::fs::read_dir(machines()).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(files.len() >= 3);
        for file in files {
            let machine = Topology::from_file(&file).unwrap();
            assert!(!machine.name().is_empty());
        }
        let slot = Topology::from_file(machines().join("two_cards_one_slot.toml")).unwrap();
        assert_eq!(slot.peers(0), [1]);
        assert_eq!(slot.devices()[1].speed, 0.9);
        assert_eq!(slot.devices()[1].wait_us, DeviceModel::default().wait_us, "what is not said is the default");
        assert_eq!(slot.kernels()["blur"].operations, 20.0);
        let hosts = Topology::from_file(machines().join("two_hosts_one_nic.toml")).unwrap();
        assert_eq!(hosts.peers(0), [1, 2, 3]);
        assert_eq!(hosts.rail(0, 3).unwrap().path.latency_us, 8.0);
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        let why = |text: &str| match Topology::parse(text) {
            Err(Error::InvalidArgument { why, .. }) => why,
            other => panic!("{other:?}"),
        };
        assert!(why("[[devices]]\nspeeed = 2").contains("speeed"), "a word that nobody knows");
        assert!(why("[[devices]]\nspeed = 'fast'").contains("line 2"));
        assert_eq!(why("[[devices]]\nspeed = -1"), "device 0: speed is -1: it must be above zero");
        assert_eq!(why("name = 'empty'"), "a machine without devices");
        let two = |hosts: &str| why(&format!("[[devices]]\n[[devices]]\n{hosts}"));
        assert!(two("[[hosts]]\nnics = []").contains("devices"), "a host says which devices it has");
        assert!(two("[[hosts]]\ndevices = [0]\nnics = [{ gpbs = 1 }]").contains("gpbs"));
        assert_eq!(two("[[hosts]]\ndevices = [0]"), "device 1 is on no host");
        let apart = "[[hosts]]\ndevices = [0]\n[[hosts]]\ndevices = [1]";
        assert_eq!(two(apart), "host 0: no NIC, and no link from device 0 to device 1");
        let absent = Topology::from_file("/no/such/machine.toml").unwrap_err().to_string();
        assert!(absent.contains("/no/such/machine.toml"), "{absent}");
    }

    /// 9e18 engines once were a panic, and 1e10 an abort for want of memory.
    #[test]
    fn no_number_in_a_file_is_too_much() {
        let numbers = [
            "9000000000000000000",
            "10000000000",
            "4294967296",
            "1025",
            "1e300",
            "-1",
            "0",
            "-0.0",
            "nan",
            "inf",
            "-inf",
            "1e-300",
            "9223372036854775807",
            "-9223372036854775808",
            "true",
            "\"1\"",
            "[]",
            "{}",
        ];
        let places = [
            "[[devices]]\nmemory = X",
            "[[devices]]\nspeed = X",
            "[[devices]]\nmemory_gbps = X",
            "[[devices]]\ngflops = X",
            "[[devices]]\nlaunch_us = X",
            "[[devices]]\nwait_us = X",
            "[[devices]]\ncopy_engines = X",
            "[[devices]]\ncopy_engines = { up = X }",
            "[[devices]]\ncopy_engines = { down = X, peer = X }",
            "[[devices]]\nup = { latency_us = X, gbps = 1 }",
            "[[devices]]\ndown = { latency_us = 1, gbps = X, uses = [{ port = 'p', gbps = X }] }",
            "[[devices]]\n[[devices]]\n[[links]]\nfrom = X\nto = 1\npath = { latency_us = 1, gbps = 1 }",
            "[[devices]]\n[[devices]]\n[[links]]\nfrom = 0\nto = X\npath = { latency_us = 1, gbps = 1 }",
            "[[devices]]\n[[devices]]\n[[links]]\nfrom = 0\nto = 1\npull_gbps = X\npath = { latency_us = X, gbps = X }",
            "[[devices]]\n[[hosts]]\ndevices = [X]",
            "[[devices]]\n[[devices]]\n[[hosts]]\ndevices = [0]\nnics = [{ latency_us = X, gbps = X }]\n\
             [[hosts]]\ndevices = [1]\nnics = [{ latency_us = 1, gbps = 1 }]",
            "[[devices]]\n[host]\nlaunch_us = X\nhost_function_us = X",
            "[[devices]]\n[kernels.k]\nreads = X\nwrites = X\noperations = X",
        ];
        for place in places {
            for number in numbers {
                builds_or_is_refused(&place.replace('X', number));
            }
        }
    }

    /// A text is refused in words, or it is a machine that a program runs on.
    fn builds_or_is_refused(text: &str) {
        match Topology::parse(text) {
            Err(Error::InvalidArgument { why, .. }) => assert!(!why.is_empty()),
            Err(other) => panic!("{other:?} for {text:?}"),
            Ok(machine) => {
                assert!(!machine.to_string().is_empty());
                let config = MachineConfig {
                    schedule: ExecutionOrder::Virtual,
                    topology: Some(std::sync::Arc::new(machine.clone())),
                    dry: true,
                    ..Default::default()
                };
                let gpus = host::machine_with(&machine.host_configs(), &config).unwrap();
                let (stream, event) = (gpus[0].stream_create(0).unwrap(), gpus[0].event_create(true).unwrap());
                gpus[0].event_record(event, stream).unwrap();
                if let Ok(memory) = gpus[0].mem_alloc(1 << 20) {
                    // SAFETY: in range, and the machine is dry.
                    unsafe { gpus[0].fill_u8(memory, 0, 1 << 20, stream) }.unwrap();
                }
                assert!(gpus[0].stream_wait_idle(stream, Duration::from_secs(600)).unwrap());
                assert_eq!(gpus[0].event_elapsed(event, event), Ok(Duration::ZERO));
            }
        }
    }

    fn number() -> impl Strategy<Value = String> {
        prop_oneof![
            any::<i64>().prop_map(|n| n.to_string()),
            any::<u64>().prop_map(|n| n.to_string()),
            any::<f64>().prop_map(|n| format!("{n:e}")),
            (0..5000i64).prop_map(|n| n.to_string()),
            (0.001..1e6).prop_map(|n: f64| n.to_string()),
            Just("1".to_owned()),
        ]
    }

    /// Lines of machine files, with any numbers, in any order.
    fn line() -> impl Strategy<Value = String> {
        const KEYS: [&str; 14] = [
            "name",
            "memory",
            "speed",
            "memory_gbps",
            "gflops",
            "launch_us",
            "wait_us",
            "from",
            "to",
            "pull_gbps",
            "copy_us",
            "reads",
            "writes",
            "operations",
        ];
        prop_oneof![
            Just("[[devices]]".to_owned()),
            Just("[[links]]\nfrom = 0\nto = 1\npath = { latency_us = 1, gbps = 1 }".to_owned()),
            Just("[host]".to_owned()),
            Just("[[hosts]]\ndevices = [0]".to_owned()),
            (number(), number()).prop_map(|(a, b)| format!("nics = [{{ latency_us = {a}, gbps = {b} }}]")),
            Just("[kernels.k]".to_owned()),
            (prop::sample::select(&KEYS[..]), number()).prop_map(|(key, number)| format!("{key} = {number}")),
            number().prop_map(|n| format!("copy_engines = {{ up = {n} }}")),
            (number(), number()).prop_map(|(a, b)| format!("up = {{ latency_us = {a}, gbps = {b} }}")),
            (number(), number()).prop_map(|(a, b)| format!("path = {{ latency_us = {a}, gbps = {b} }}")),
            "[ -~]{0,30}",
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_text_is_refused_or_a_machine(devices in 0..3usize, lines in prop::collection::vec(line(), 0..5)) {
            builds_or_is_refused(&("[[devices]]\n".repeat(devices) + &lines.join("\n")));
        }

        /// A valid file in which some characters were changed.
        #[test]
        fn a_damaged_file_is_refused_or_a_machine(
            at in any::<prop::sample::Index>(),
            with in "[ -~\n]{0,4}",
            cut in 0..9usize,
        ) {
            let whole = Topology::pcie_tree(1, 1, 2).to_toml().unwrap();
            let at = at.index(whole.len());
            let rest = whole.get(at + cut..).unwrap_or_default();
            builds_or_is_refused(&format!("{}{with}{rest}", &whole[..at]));
        }
    }
}
