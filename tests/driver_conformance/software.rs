//! What software GPUs promise beyond the driver's contract: strictness, survivable panics, no races, many devices.

use crate::rig::*;
use gpu_pool::extend::driver::{
    DriverRef, FaultKind, HostArg, HostKernel, KernelArg, Launch, LaunchDims, RawFunction,
    host::{self, HostConfig},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

fn slice(at: u64, bytes: usize, write: bool) -> KernelArg {
    KernelArg::Slice { address: at, bytes, write }
}

fn launch(s: &Stream, host: Option<HostKernel>, args: &[KernelArg]) -> gpu_pool::extend::driver::DriverResult {
    let dims = LaunchDims::cover(1);
    let launch = Launch { name: "test_kernel", function: RawFunction(0), host, dims, args, early: false };
    // SAFETY: the cases give what their kernels take.
    unsafe { s.of.launch(&launch, s.raw) }
}

/// # Safety
/// None needed.
unsafe fn panics(_: LaunchDims, _: &[HostArg]) {
    let nothing: &[u32] = &[];
    let at = std::hint::black_box(3);
    let _ = nothing[at];
}

/// # Safety
/// None needed.
unsafe fn nothing(_: LaunchDims, _: &[HostArg]) {}

#[test]
fn a_panicking_kernel_loses_its_device_only() {
    let rig = Rig::host(2);
    let (a, b) = rig.two().unwrap();
    let (s, other, e) = (stream(a), stream(a), event(a, false));
    let (sb, xb) = (stream(b), mem(b, 64));
    let gate = s.gate();
    launch(&s, Some(panics), &[]).unwrap();
    e.record(&s);
    e.hold(&other);
    e.hold(&sb);
    sb.fill(&xb, 4);
    gate.open();

    for lost in [a.stream_wait_idle(s.raw, LIMIT), a.stream_wait_idle(other.raw, LIMIT), a.event_wait(e.raw, LIMIT)] {
        let lost = lost.unwrap_err();
        assert_eq!((lost.kind, lost.code), (FaultKind::DeviceLost, 719));
        assert_eq!(lost.name, "CUDA_ERROR_LAUNCH_FAILED");
        assert!(lost.detail.contains("test_kernel") && lost.detail.contains("index out of bounds"), "{lost}");
    }
    assert_eq!(a.mem_alloc(1).unwrap_err().kind, FaultKind::DeviceLost);
    assert_eq!(a.stream_create(0).unwrap_err().kind, FaultKind::DeviceLost);
    assert_eq!(launch(&s, Some(nothing), &[]).unwrap_err().kind, FaultKind::DeviceLost);
    assert_eq!(a.stream_query(s.raw).unwrap_err().kind, FaultKind::DeviceLost);
    assert_eq!(b.event_wait(e.raw, LIMIT).unwrap_err().kind, FaultKind::DeviceLost, "the event's work failed");

    // The other device was not held up by the event, and goes on.
    sb.wait();
    assert_eq!(read_words(&xb), [4; 16]);
    std::mem::forget((s, other, e));
}

/// Frees on a lost device report it, and free.
#[test]
fn a_lost_devices_memory_comes_back() {
    let rig = Rig::host(2);
    let (a, b) = rig.two().unwrap();
    let (s, p) = (stream(a), pinned(a, 64));
    launch(&s, Some(panics), &[]).unwrap();
    assert!(a.stream_wait_idle(s.raw, LIMIT).is_err());
    // SAFETY: allocated above, no work is left.
    unsafe {
        assert_eq!(a.host_free(p.raw).unwrap_err().kind, FaultKind::DeviceLost);
        assert_eq!(b.host_free(p.raw).unwrap_err().kind, FaultKind::InvalidArgument, "it is gone already");
        assert_eq!(a.stream_destroy(s.raw).unwrap_err().kind, FaultKind::DeviceLost);
    }
    std::mem::forget((s, p));
}

#[test]
fn a_panicking_host_function_loses_its_device() {
    let rig = Rig::host(1);
    let s = stream(rig.one());
    rig.one().launch_host(s.raw, Box::new(|| panic!("not like this"))).unwrap();
    let lost = rig.one().stream_wait_idle(s.raw, LIMIT).unwrap_err();
    assert!(lost.kind == FaultKind::DeviceLost && lost.detail.contains("not like this"), "{lost}");
    std::mem::forget(s);
}

/// A host function is the user's code: when it runs, when it panics, and when what it owns is dropped.
#[test]
fn workers_survive_whatever_host_functions_do() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("a value panics when it is dropped");
        }
    }
    let holding = |bomb: Bomb| Box::new(move || drop(bomb));
    let rig = Rig::host(16);
    let (last, others) = rig.devices.split_last().unwrap();
    for (i, device) in others.iter().enumerate() {
        let s = stream(device);
        match i % 3 {
            0 => device.launch_host(s.raw, Box::new(|| std::panic::panic_any(Bomb))).unwrap(),
            1 => device.launch_host(s.raw, holding(Bomb)).unwrap(),
            _ => {
                let (open, gate) = std::sync::mpsc::channel::<()>();
                device.launch_host(s.raw, Box::new(move || gate.recv().unwrap())).unwrap();
                // These never run: a worker drops them.
                (0..3).for_each(|_| device.launch_host(s.raw, holding(Bomb)).unwrap());
                drop(open);
            }
        }
        assert_eq!(device.stream_wait_idle(s.raw, LIMIT).unwrap_err().kind, FaultKind::DeviceLost);
        // Refused, and dropped here.
        assert_eq!(device.launch_host(s.raw, holding(Bomb)).unwrap_err().kind, FaultKind::DeviceLost);
        std::mem::forget(s);
    }
    let s = stream(last);
    last.launch_host(s.raw, Box::new(|| {})).unwrap();
    s.wait();
    // What has not run when the machine ends is dropped by whoever ends it.
    let gate = pinned(last, 8);
    // SAFETY: the word is live for as long as the machine, and aligned.
    unsafe { last.wait_value(gate.raw as u64, 1, s.raw) }.unwrap();
    last.launch_host(s.raw, holding(Bomb)).unwrap();
    std::mem::forget((s, gate));
    drop(rig);
}

/// Addresses and numbers are those of devices that live: a process may make as many as it likes, one after the other.
#[test]
fn machines_come_and_go_in_their_thousands() {
    const DEVICES: usize = 16;
    let configs = vec![HostConfig::default(); DEVICES];
    // More than there are tags for keys. (That addresses are handed out again is a unit test: it would take a million.)
    for _ in 0..(1 << 17) / DEVICES {
        let gpus = host::machine(&configs);
        assert_eq!(gpus.len(), DEVICES);
    }
    let rig = Rig::host(2);
    let (s, x) = (stream(rig.one()), mem(rig.one(), 8));
    // SAFETY: in range, and waited for.
    unsafe { rig.one().fill_u8(x.raw, 1, 8, s.raw) }.unwrap();
    s.wait();
}

#[test]
fn stale_and_stray_addresses_are_refused() {
    let rig = Rig::host(2);
    let device = rig.one();
    let freed = mem(device, 100).raw;
    let (s, x, p) = (stream(device), mem(device, 100), pinned(device, 100));
    let foreign = host::machine(&[HostConfig::default()]).remove(0);
    let alien = mem(&foreign, 100);
    // SAFETY: the point is that none of these is submitted.
    let faults = unsafe {
        [
            device.fill_u8(freed, 0, 1, s.raw),
            device.fill_u8(x.raw + 1, 0, 100, s.raw),
            device.fill_u8(x.raw - 1, 0, 1, s.raw),
            device.fill_u8(12345, 0, 1, s.raw),
            device.fill_u8(x.raw, 0, usize::MAX, s.raw),
            device.copy_to_host(p.raw, freed, 10, s.raw),
            // Host memory must be page-locked (pytorch#130785: freed or pageable memory under a running copy).
            device.copy_to_device(x.raw, [0_u8; 10].as_ptr(), 10, s.raw),
            device.copy_to_device(x.raw, p.raw.add(91), 10, s.raw),
            device.copy_within(x.raw, x.raw + 9, 10, s.raw),
            device.mem_free(freed),
            device.mem_free(x.raw + 256),
            device.host_free(p.raw.add(1)),
            device.managed_free(p.raw),
            rig.devices[1].mem_free(x.raw),
            rig.devices[1].fill_u8(0, 0, 1, s.raw),
            launch(&s, Some(nothing), &[slice(freed, 4, false)]),
        ]
    };
    for (i, fault) in faults.into_iter().enumerate() {
        assert_eq!(fault.unwrap_err().kind, FaultKind::InvalidArgument, "number {i}");
    }
    // SAFETY: as above.
    let alien = unsafe { device.fill_u8(alien.raw, 0, 1, s.raw) };
    assert_eq!(alien.unwrap_err().kind, FaultKind::PeerDenied, "another machine's memory");
    s.wait();
    assert_eq!(
        device.stream_query(gpu_pool::extend::driver::RawStream(77)).unwrap_err().kind,
        FaultKind::InvalidArgument
    );
    assert_eq!(foreign.stream_query(s.raw).unwrap_err().kind, FaultKind::InvalidArgument);
}

#[test]
fn memory_freed_under_queued_work_loses_the_device() {
    let rig = Rig::host(1);
    let device = rig.one();
    let (s, x) = (stream(device), mem(device, 100));
    let gate = s.gate();
    // SAFETY: it is the caller's bug that is tested; the software GPU reports it.
    unsafe { device.fill_u8(x.raw, 1, 100, s.raw) }.unwrap();
    drop(x);
    gate.open();
    let lost = device.stream_wait_idle(s.raw, LIMIT).unwrap_err();
    assert_eq!((lost.kind, lost.code), (FaultKind::DeviceLost, 700), "{lost}");
    std::mem::forget(s);
}

#[test]
fn memory_unmapped_under_queued_work_loses_the_device() {
    let rig = Rig::host(1);
    let device = rig.one();
    let Some(unit) = device.vm_granularity() else { return };
    let (s, at) = (stream(device), device.vm_reserve(2 * unit as u64).unwrap());
    // SAFETY: it is the caller's bug that is tested; the software GPU reports it.
    unsafe {
        device.vm_map(at, unit).unwrap();
        device.vm_map(at + unit as u64, unit).unwrap();
        assert_eq!(device.fill_u8(at, 1, 2 * unit + 1, s.raw).unwrap_err().kind, FaultKind::InvalidArgument);
        let gate = s.gate();
        device.fill_u8(at, 1, 2 * unit, s.raw).unwrap();
        device.vm_unmap(at + unit as u64, unit).unwrap();
        gate.open();
        let lost = device.stream_wait_idle(s.raw, LIMIT).unwrap_err();
        assert_eq!((lost.kind, lost.code), (FaultKind::DeviceLost, 700), "{lost}");
        // What is given back on a lost device is given back; nothing else works.
        assert_eq!(device.vm_unmap(at, unit).unwrap_err().kind, FaultKind::DeviceLost);
        assert_eq!(device.vm_release(at, 2 * unit as u64).unwrap_err().kind, FaultKind::DeviceLost);
        assert_eq!(device.vm_map(at, unit).unwrap_err().kind, FaultKind::DeviceLost);
    }
    std::mem::forget(s);
}

/// A mapping that goes while a kernel writes to it is a wrong program, and no crash: the kernel ends first.
#[test]
fn memory_unmapped_under_a_running_kernel_is_kept() {
    static STAGE: AtomicUsize = AtomicUsize::new(0);
    /// # Safety
    /// One slice.
    unsafe fn slow(_: LaunchDims, args: &[HostArg]) {
        let [HostArg::Slice { ptr, bytes, .. }] = args else { panic!("wrong arguments") };
        STAGE.store(1, Ordering::SeqCst);
        while STAGE.load(Ordering::SeqCst) < 2 {
            thread::yield_now();
        }
        // SAFETY: the caller's promise.
        unsafe { ptr.write_bytes(7, *bytes) };
    }
    let rig = Rig::host(1);
    let device = rig.one();
    let Some(unit) = device.vm_granularity() else { return };
    let (s, t, at) = (stream(device), stream(device), device.vm_reserve(unit as u64).unwrap());
    // SAFETY: it is the caller's bug that is tested.
    unsafe {
        device.vm_map(at, unit).unwrap();
        launch(&s, Some(slow), &[slice(at, unit, true)]).unwrap();
        while STAGE.load(Ordering::SeqCst) < 1 {
            thread::yield_now();
        }
        device.vm_unmap(at, unit).unwrap();
        device.vm_map(at, unit).unwrap();
        // The new one's operation waits for it, since it is the same place.
        device.fill_u8(at, 1, unit, t.raw).unwrap();
        STAGE.store(2, Ordering::SeqCst);
        s.wait();
        t.wait();
        device.vm_unmap(at, unit).unwrap();
        device.vm_release(at, unit as u64).unwrap();
    }
}

/// The fallback is tested by force.
#[test]
fn virtual_memory_can_be_lacking() {
    let device = host::machine(&[HostConfig { virtual_memory: false, ..HostConfig::default() }]).remove(0);
    assert_eq!(device.vm_granularity(), None);
    // SAFETY: none of these does anything.
    let faults = unsafe {
        [
            device.vm_reserve(2 << 20).map(drop),
            device.vm_release(2 << 20, 2 << 20),
            device.vm_map(2 << 20, 2 << 20),
            device.vm_unmap(2 << 20, 2 << 20),
            device.vm_move(2 << 20, 4 << 20, 2 << 20),
        ]
    };
    assert!(faults.into_iter().all(|fault| fault.unwrap_err().kind == FaultKind::Unsupported));
}

#[test]
fn launches_without_right_or_twin_are_refused() {
    let rig = Rig::host(2);
    let (a, b) = rig.two().unwrap();
    let (s, x, theirs) = (stream(a), mem(a, 100), mem(b, 100));
    let kind = |launched: gpu_pool::extend::driver::DriverResult| launched.unwrap_err().kind;
    assert_eq!(kind(launch(&s, Some(nothing), &[slice(theirs.raw, 4, false)])), FaultKind::PeerDenied);
    let missing = launch(&s, None, &[]).unwrap_err();
    assert!(missing.kind == FaultKind::NotFound && missing.detail.contains("test_kernel"), "{missing}");
    // `&mut` may not alias.
    let (left, right) = (slice(x.raw, 52, true), slice(x.raw + 48, 52, false));
    assert_eq!(kind(launch(&s, Some(nothing), &[left, right])), FaultKind::InvalidArgument);
    launch(&s, Some(nothing), &[slice(x.raw, 48, true), slice(x.raw + 48, 52, true), slice(0, 0, true)]).unwrap();
    launch(&s, Some(nothing), &[slice(x.raw, 52, false), slice(x.raw + 48, 52, false)]).unwrap();
    s.wait();
}

#[test]
fn machines_can_lack_peer_links() {
    let none = HostConfig { peers: Some(vec![]), ..HostConfig::default() };
    let all = HostConfig { name: Some("big".into()), memory: 1 << 20, ..HostConfig::default() };
    let gpus = host::machine(&[none, all]);
    assert!(!gpus[0].can_access_peer(&*gpus[1]).unwrap() && gpus[1].can_access_peer(&*gpus[0]).unwrap());
    assert_eq!(gpus[0].enable_peer(&*gpus[1]).unwrap_err().kind, FaultKind::PeerDenied);
    gpus[1].enable_peer(&*gpus[0]).unwrap();
    assert_eq!((gpus[1].info().name.as_str(), gpus[1].info().total_memory), ("big", 1 << 20));
    assert_ne!(gpus[0].info().uuid, gpus[1].info().uuid);
    let other = host::machine(&[HostConfig::default()]);
    assert!(!gpus[1].can_access_peer(&*other[0]).unwrap());
}

/// # Safety
/// One slice of words.
unsafe fn slow_increment(_: LaunchDims, args: &[HostArg]) {
    let [HostArg::Slice { ptr, bytes, .. }] = args else { panic!("wrong arguments") };
    // SAFETY: the caller's promise.
    let x = unsafe { std::slice::from_raw_parts_mut(ptr.cast::<u32>(), bytes / 4) };
    let old = x[0];
    thread::yield_now();
    x.iter_mut().for_each(|x| *x = old + 1);
}

/// A forgotten event is a wrong program, not a data race in Rust: kernels on the same bytes never overlap in time.
#[test]
fn unordered_conflicts_exclude_each_other() {
    let rig = Rig::host(2);
    let (a, b) = rig.two().unwrap();
    b.enable_peer(&**a).unwrap();
    let x = mem(a, 4096);
    write(&x, &[0; 4096]);
    let streams = [stream(a), stream(a), stream(b), stream(b)];
    for _ in 0..250 {
        streams.iter().for_each(|s| launch(s, Some(slow_increment), &[slice(x.raw, 4096, true)]).unwrap());
    }
    streams.iter().for_each(Stream::wait);
    assert_eq!(read_words(&x), [1000; 1024]);
}

#[test]
fn readers_run_at_once() {
    static INSIDE: AtomicUsize = AtomicUsize::new(0);
    /// # Safety
    /// None needed.
    unsafe fn meet(_: LaunchDims, _: &[HostArg]) {
        let start = Instant::now();
        INSIDE.fetch_add(1, Ordering::SeqCst);
        while INSIDE.load(Ordering::SeqCst) < 2 && start.elapsed() < LIMIT {
            thread::yield_now();
        }
    }
    let rig = Rig::host(1);
    let (s, t, x) = (stream(rig.one()), stream(rig.one()), mem(rig.one(), 64));
    let start = Instant::now();
    launch(&s, Some(meet), &[slice(x.raw, 64, false)]).unwrap();
    launch(&t, Some(meet), &[slice(x.raw, 64, false)]).unwrap();
    s.wait();
    t.wait();
    assert!(start.elapsed() < LIMIT);
}

/// Host functions that block, one per device, leave the workers free.
#[test]
fn blocked_host_functions_hold_up_nobody() {
    let rig = Rig::host(8);
    let held: Vec<_> = rig.devices.iter().map(stream).collect();
    let gates: Vec<_> = held.iter().map(Stream::gate).collect();
    for device in &rig.devices {
        let (s, x) = (stream(device), mem(device, 64));
        s.fill(&x, 8);
        s.wait();
        assert_eq!(read_words(&x), [8; 16]);
    }
    gates.into_iter().for_each(Gate::open);
    held.iter().for_each(Stream::wait);
}

#[test]
fn sixty_four_devices() {
    let rig = Rig::host(64);
    crate::events::a_relay_through_all_devices(&rig);
    crate::streams::devices_work_from_their_own_threads(&rig);
}

/// The last handle's drop lets runnable work finish, gives up what waits for ever, and returns.
#[test]
fn dropping_a_machine_ends_it() {
    let done = Arc::new(AtomicUsize::new(0));
    let device = host::machine(&[HostConfig::default()]).remove(0);
    let (s, stuck) = (device.stream_create(0).unwrap(), device.stream_create(0).unwrap());
    let flag = device.host_alloc(8).unwrap();
    // SAFETY: an aligned word that lives as long as the machine.
    unsafe { device.wait_value(flag as u64, 1, stuck) }.unwrap();
    let never = done.clone();
    let count_wrongly = move || {
        never.fetch_add(100, Ordering::SeqCst);
    };
    device.launch_host(stuck, Box::new(count_wrongly)).unwrap();
    for _ in 0..10 {
        let done = done.clone();
        let slow = move || {
            thread::sleep(Duration::from_millis(2));
            done.fetch_add(1, Ordering::SeqCst);
        };
        device.launch_host(s, Box::new(slow)).unwrap();
    }
    drop(device);
    assert_eq!(done.load(Ordering::SeqCst), 10);
    assert_eq!(Arc::strong_count(&done), 1, "operations that will not run are dropped");
}

/// A host function may own the last handle: the worker that drops it does not wait for itself.
#[test]
fn the_last_handle_may_go_on_a_worker() {
    let device = host::machine(&[HostConfig::default()]).remove(0);
    let s = device.stream_create(0).unwrap();
    let (gone, wait) = mpsc::channel();
    let (start, started) = mpsc::channel::<()>();
    let own: DriverRef = device.clone();
    let f = move || {
        started.recv().unwrap();
        drop(own);
        gone.send(()).unwrap();
    };
    device.launch_host(s, Box::new(f)).unwrap();
    drop(device);
    start.send(()).unwrap();
    wait.recv_timeout(LIMIT).unwrap();
}

/// A panicking kernel while other streams of its device, and waits on values, are under way.
#[test]
fn losing_a_busy_device_hangs_nobody() {
    for round in 0..20 {
        let rig = Rig::host(2);
        let (a, b) = rig.two().unwrap();
        let streams: Vec<_> = (0..6).map(|_| stream(a)).collect();
        let (flag, x, sb) = (pinned(b, 8), mem(a, 4096), stream(b));
        // SAFETY: an aligned word that lives until the end.
        unsafe { a.wait_value(flag.raw as u64, 1, streams[5].raw) }.unwrap();
        let mut lost = false;
        for i in 0..40 {
            for s in &streams[..4] {
                lost |= launch(s, Some(slow_increment), &[slice(x.raw, 4096, true)]).is_err();
            }
            let e = a.event_create(false);
            if i == 10 + round {
                lost |= launch(&streams[4], Some(panics), &[]).is_err();
            }
            if let Ok(e) = e {
                // On a lost device each of these may fail.
                lost |= a.event_record(e, streams[i % 5].raw).is_err();
                b.stream_wait_event(sb.raw, e).unwrap();
            }
        }
        // The panicking kernel's own stream first: the others may be done before it gets its turn.
        assert!(a.stream_wait_idle(streams[4].raw, LIMIT).is_err());
        assert!(streams.iter().all(|s| a.stream_wait_idle(s.raw, LIMIT).is_err()), "{lost}");
        sb.wait();
        std::mem::forget((streams, x));
    }
}
