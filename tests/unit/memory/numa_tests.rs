use super::*;
use crate::lab::prelude::*;
use crate::lab::{Check, texts};
use crate::{Device, GpuPool, PinnedBuffer, Result};
use proptest::prelude::*;

/// Machines with several nodes, for tests on machines with one.
pub(super) mod fake {
    use super::Nodes;
    use std::cell::RefCell;

    thread_local! {
        static FAKE: RefCell<Option<Nodes>> = const { RefCell::new(None) };
    }

    pub(in super::super) fn here() -> Option<Nodes> {
        FAKE.with_borrow(Option::clone)
    }

    /// Pools that `build` makes have `count` nodes, and their devices are near `devices`.
    pub(crate) fn nodes<R>(count: u32, devices: &[usize], build: impl FnOnce() -> R) -> R {
        nodes_with_cpus(count, devices, &[], build)
    }

    /// The same, where each device is near these CPUs.
    pub(crate) fn nodes_with_cpus<R>(count: u32, devices: &[usize], cpus: &[&[u32]], build: impl FnOnce() -> R) -> R {
        let cpus = cpus.iter().map(|cpus| cpus.to_vec()).collect();
        FAKE.set(Some(Nodes { online: (0..count).collect(), devices: devices.to_vec(), cpus, fake: true }));
        let built = build();
        FAKE.set(None);
        built
    }
}

#[test]
fn lists_of_nodes() {
    assert_eq!(list("0"), Some(vec![0]));
    assert_eq!(list("0-1,3"), Some(vec![0, 1, 3]));
    assert_eq!(list(""), Some(vec![]));
    assert_eq!(list("0-x"), None);
    assert_eq!(list("0-1023").map(|nodes| nodes.len()), Some(1024));
    assert_eq!(list("0-4294967295"), None, "16 GB of numbers");
    assert_eq!(list(&"0-1023,".repeat(1000)), None);
}

proptest! {
    #![proptest_config(texts::cases(256))]

    #[test]
    fn any_text_is_a_list_or_none(text in texts::like(&["0-1,3", "0-4294967295,", "4294967295", "7-3"])) {
        prop_assert!(list(&text).is_none_or(|nodes| nodes.len() <= NODES));
    }

    #[test]
    fn a_list_that_is_written_is_read(nodes in proptest::collection::vec((0u32..1000, 0u32..3), 0..20)) {
        let text: Vec<String> = nodes.iter().map(|&(first, more)| format!("{first}-{}", first + more)).collect();
        let all: Vec<u32> = nodes.iter().flat_map(|&(first, more)| first..=first + more).collect();
        prop_assert_eq!(list(&text.join(",")), Some(all));
    }
}

/// A DGX has two nodes, and says where each GPU is. Other machines say less.
#[test]
fn machines_say_where_their_devices_are() {
    let machine = |online: &'static str| {
        move |path: &str| match path {
            "/sys/devices/system/node/online" => Some(format!("{online}\n")),
            "/sys/devices/system/node/node3/cpulist" => Some("4-5,8\n".to_owned()),
            "/sys/bus/pci/devices/0000:1b:00.0/numa_node" => Some("0\n".to_owned()),
            "/sys/bus/pci/devices/0000:9d:00.0/numa_node" => Some("3\n".to_owned()),
            "/sys/bus/pci/devices/0000:ff:00.0/numa_node" => Some("-1\n".to_owned()),
            _ => None,
        }
    };
    let ids = ["0000:1B:00.0", "0000:9D:00.0", "0000:FF:00.0", "0000:EE:00.0", ""];
    let two = Nodes::from(&ids, machine("0,3"));
    assert_eq!((two.count(), &two.devices[..]), (2, &[0, 1, 0, 0, 0][..]));
    assert_eq!((two.place(0), two.place(1)), (Some(Node(0)), Some(Node(3))));
    assert_eq!((two.of_device(1), two.of_device(99)), (1, 0));
    assert_eq!(two.cpus, [vec![], vec![4, 5, 8], vec![], vec![], vec![]]);
    let one = Nodes::from(&ids, machine("0"));
    assert_eq!((one.count(), one.of_device(1), one.place(0), one.here()), (1, 0, None, 0));
    assert!(one.cpus.iter().all(Vec::is_empty), "there is nothing to choose");
    assert_eq!(Nodes::from(&["", ""], machine("0-1")).count(), 1, "software GPUs");
    assert_eq!(Nodes::from(&ids, |_| None).count(), 1);
    // Nodes without memory do not count.
    let bare = |path: &str| if path.ends_with("has_memory") { Some("0".to_owned()) } else { machine("0-1")(path) };
    assert_eq!(Nodes::from(&ids, bare).count(), 1);
}

fn pool(check: Check) -> GpuPool {
    fake::nodes(2, &[0, 1, 1], || GpuPool::builder().host(3).check(check).build().unwrap())
}

/// Each device thread, by default, on two nodes.
#[cfg(target_os = "linux")]
#[test]
fn device_threads_run_near_their_devices() {
    let allowed = affinity::get().unwrap();
    let [a, b, ..] = allowed[..] else { return println!("skipped: this process may use one CPU") };
    let seen = |cpus: &[&[u32]], near: bool| {
        let build = || GpuPool::builder().host(2).check(Check::Off).numa_affinity(near).build().unwrap();
        fake::nodes_with_cpus(2, &[0, 1], cpus, build).run(|_, _| Ok(affinity::get().unwrap())).unwrap()
    };
    assert_eq!(seen(&[&[a], &[b]], true), [[a], [b]]);
    assert_eq!(seen(&[&[a], &[b]], false), [&allowed[..]; 2]);
    // Two threads would share a CPU.
    assert_eq!(seen(&[&[a], &[a]], true), [&allowed[..]; 2]);
    assert_eq!(seen(&[&[a, b], &[a, b]], true), [[a, b]; 2]);
    // CPUs that this process may not use.
    assert_eq!(seen(&[&[a], &[1023]], true), [&[a][..], &allowed]);
    assert_eq!(affinity::get().unwrap(), allowed, "the thread that builds stays where it is");
}

fn address<T: crate::DeviceCopy>(buffer: &PinnedBuffer<T>) -> u64 {
    buffer.block.address
}

/// Each device's memory belongs to its node: it goes back there, wherever it is dropped, and is used again there.
#[test]
fn blocks_go_home_to_their_own_node() {
    for check in [Check::Races, Check::Memory] {
        let pool = pool(check);
        // One device after the other: while one checks the red zones of dropped memory, another one would find no
        // block.
        let of = |device| pool.on(&[device]).run(|dev, _| dev.pinned::<u32>(10_000)).unwrap().remove(0);
        let make = || (0..3).map(of).collect::<Vec<_>>();
        let first = make();
        let at: Vec<u64> = first.iter().map(address).collect();
        // Dropped in another order, on other threads.
        let mut rest = first.into_iter().rev();
        let last = rest.next();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(last));
        });
        drop(rest);
        let bound = pool.shared.pinned.owners();
        assert_eq!(bound.len(), 2);
        let again = make();
        let home = |buffer: &PinnedBuffer<u32>| bound.iter().position(|home| buffer.block.is_owned_by(home));
        assert_eq!(again.iter().map(home).collect::<Vec<_>>(), [Some(0), Some(1), Some(1)]);
        let mut seen: Vec<u64> = again.iter().map(address).collect();
        assert_eq!(seen[0], at[0], "the only block of its node");
        seen[1..].sort_unstable();
        let mut others = at[1..].to_vec();
        others.sort_unstable();
        assert_eq!(seen[1..], others);
        drop(again);
        pool.close().unwrap();
    }
}

/// Staging memory comes from the device's node, too; the pool's own memory from the node of the calling thread.
#[test]
fn staging_is_near_its_device() {
    let pool = pool(Check::Races);
    let in_use = || pool.shared.pinned.in_use();
    let before = in_use();
    let other = pool.on(&[2]).run(|dev, _| dev.upload(&[1u8; 100])).unwrap();
    let after = in_use();
    assert_eq!(before[0], after[0]);
    assert!(after[1] > before[1]);
    let own = pool.pinned::<u8>(1000).unwrap();
    assert!(in_use()[0] > after[0], "this thread is on the first");
    drop((other, own));
    pool.close().unwrap();
}

/// A buffer dropped in flight: the next owner waits, on each node (pytorch#127612).
#[test]
fn memory_in_flight_is_not_used_too_early() {
    for check in [Check::Races, Check::Memory] {
        let pool = pool(check);
        let round = |dev: &Device, value: u32| -> Result<Vec<u32>> {
            let mut host = dev.pinned::<u32>(100_000)?;
            host.as_mut_slice()?.fill(value);
            let x = dev.upload_pinned(&host)?;
            drop(host);
            // The same block, if there is no other. Its copy must have been read.
            dev.pinned::<u32>(100_000)?.as_mut_slice()?.fill(!value);
            dev.download(&x)
        };
        for value in 0..20 {
            for seen in pool.run(|dev, _| round(dev, value)).unwrap() {
                assert!(seen.iter().all(|x| *x == value), "{value}");
            }
        }
        pool.close().unwrap();
    }
}

/// The calling thread's policy.
#[cfg(target_os = "linux")]
fn mode() -> Option<i32> {
    policy::get().map(|(mode, _)| mode)
}

/// The node of a page that is there.
#[cfg(target_os = "linux")]
fn node_of(at: *const u8) -> Option<u32> {
    let mut node: i32 = -1;
    let flags: libc::c_ulong = 3;
    // SAFETY: a live word, no mask, and an address that the kernel only looks up.
    let result = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut node, std::ptr::null::<u8>(), 0 as libc::c_ulong, at, flags)
    };
    (result == 0).then_some(node as u32)
}

/// The policy is set for the call only; refusals change nothing.
#[cfg(target_os = "linux")]
#[test]
fn the_policy_is_restored() {
    let before = mode();
    let within = Node(0).near(mode);
    assert_eq!(mode(), before);
    match (before, within) {
        (Some(_), Some(1)) => {}
        _ => println!("memory policies are refused here: {before:?}, {within:?}"),
    }
    Node(1023).near(|| ());
    Node(u32::MAX).near(|| ());
    assert_eq!(mode(), before);
}

/// Pages lie where they were asked for.
#[cfg(target_os = "linux")]
#[test]
fn pages_lie_on_their_node() {
    let online = fs::read_to_string("/sys/devices/system/node/has_memory").ok().and_then(|text| list(text.trim()));
    let online = online.unwrap_or_default();
    if online.len() < 2 {
        println!("skipped: this machine has one NUMA node");
        return;
    }
    if Node(online[0]).near(mode) != Some(1) {
        println!("skipped: memory policies are refused here");
        return;
    }
    for node in online {
        const BYTES: usize = 64 << 20;
        let layout = std::alloc::Layout::from_size_align(BYTES, 4096).unwrap();
        // SAFETY: the size is not zero; fresh zeros, freed once.
        unsafe {
            let at = std::alloc::alloc_zeroed(layout);
            Node(node).take(at, BYTES);
            for page in [0, BYTES / 2, BYTES - 4096] {
                assert_eq!(node_of(at.add(page)), Some(node));
            }
            std::alloc::dealloc(at, layout);
        }
    }
}
