//! The driver around the driver, without a pool.

use super::plan;
use gpu_pool::extend::driver::{
    FaultKind, HostArg, KernelArg, Launch, LaunchDims, ModuleImage,
    host::{self, HostConfig},
};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, faulty};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};

fn image() -> ModuleImage {
    ModuleImage { ptx: None, cubins: &[], packed: false, source: None, shared: false }
}

#[test]
fn what_a_lost_device_holds_is_given_back() {
    let plan = plan(FaultRule::new(Injected::DeviceLost).device(0).op(FaultOp::Record).nth(1));
    let inner = host::machine(&[HostConfig::default(), HostConfig::default()]);
    let gpus = faulty::wrap(inner.clone(), &plan);
    let (gpu, all) = (&gpus[0], inner[0].memory_info().unwrap().0);
    let (memory, pinned) = (gpu.mem_alloc(1 << 20).unwrap(), gpu.host_alloc(64).unwrap());
    let (stream, event) = (gpu.stream_create(0).unwrap(), gpu.event_create(false).unwrap());
    gpu.event_record(event, stream).unwrap();
    let ran = Arc::new(Mutex::new(false));
    let note = ran.clone();
    gpu.launch_host(
        stream,
        Box::new(move || {
            std::thread::sleep(Duration::from_millis(50));
            *note.lock() = true;
        }),
    )
    .unwrap();
    plan.resume();
    let lost = gpu.event_record(event, stream).unwrap_err();
    assert_eq!((lost.kind, lost.code), (FaultKind::DeviceLost, 46));
    // What was under way is waited for; then the loss is reported, also for what concerns its events elsewhere.
    assert_eq!(gpu.stream_wait_idle(stream, Duration::from_secs(300)), Err(lost.clone()));
    assert!(*ran.lock());
    assert_eq!(gpus[1].event_query(event), Err(lost.clone()));
    assert_eq!(gpus[1].event_wait(event, Duration::from_secs(300)), Err(lost.clone()));
    let other = gpus[1].stream_create(0).unwrap();
    assert_eq!(gpus[1].stream_wait_event(other, event), Err(lost.clone()));
    assert_eq!(gpus[1].stream_query(other), Ok(true));
    for (what, answer) in [
        ("bind", gpu.bind()),
        ("query", gpu.stream_query(stream).map(drop)),
        ("info", gpu.memory_info().map(drop)),
        ("alloc", gpu.mem_alloc(1).map(drop)),
        ("module", gpu.module_load(&image()).map(drop)),
    ] {
        assert_eq!(answer, Err(lost.clone()), "{what}");
    }
    // SAFETY: made above, given back once, and idle.
    unsafe {
        assert_eq!(gpu.mem_free(memory), Err(lost.clone()));
        assert_eq!(gpu.host_free(pinned), Err(lost.clone()));
        assert_eq!(gpu.event_destroy(event), Err(lost.clone()));
        assert_eq!(gpu.stream_destroy(stream), Err(lost.clone()));
        assert_eq!(inner[0].memory_info().unwrap().0, all);
        assert!(inner[0].mem_free(memory).is_err() && inner[0].host_free(pinned).is_err());
        assert!(inner[0].event_destroy(event).is_err() && inner[0].stream_destroy(stream).is_err());
    }
    assert_eq!(plan.fired().len(), 1);
}

/// Sets each word that it may write to 7, and panics if one that it reads is 0.
unsafe fn touch(_: LaunchDims, args: &[HostArg]) {
    for arg in args {
        let HostArg::Slice { ptr, bytes, write } = *arg else { continue };
        assert!(ptr.addr().is_multiple_of(4) && bytes == 64);
        if write {
            // SAFETY: the slice is this kernel's own while it runs.
            unsafe { ptr.write_bytes(7, bytes) };
        } else {
            // SAFETY: as above.
            let seen = unsafe { std::slice::from_raw_parts(ptr, bytes) };
            assert!(seen.iter().all(|&byte| byte != 0), "{seen:?}");
        }
    }
}

#[test]
fn a_kernel_and_a_peer_that_lies() {
    for (fault, wrong) in [(Injected::Drop, 64..=64), (Injected::Corrupt, 1..=16)] {
        let plan = FaultPlan::new().on(FaultRule::new(fault).device(0).op(FaultOp::Launch));
        let gpus = faulty::wrap(host::machine(&[HostConfig::default(), HostConfig::default()]), &plan);
        let (gpu, peer) = (&gpus[0], &*gpus[1]);
        gpu.enable_peer(peer).unwrap();
        let (near, far) = (gpu.mem_alloc(256).unwrap(), peer.mem_alloc(256).unwrap());
        let (stream, back) = (gpu.stream_create(0).unwrap(), gpu.host_alloc(256).unwrap());
        let function = gpu.function(gpu.module_load(&image()).unwrap(), "touch").unwrap();
        let slice = |address, write| KernelArg::Slice { address, bytes: 64, write };
        let dims = LaunchDims::cover(1);
        let run = |args: &[KernelArg]| {
            let launch = Launch { name: "touch", function, host: Some(touch), dims, args, early: false };
            // SAFETY: the arguments are live, and all is on one stream.
            unsafe { gpu.launch(&launch, stream) }
        };
        let seen = |at| {
            // SAFETY: as above; the memory is looked at only after the wait.
            unsafe { gpu.copy_to_host(back, at, 64, stream).unwrap() };
            assert!(gpu.stream_wait_idle(stream, Duration::from_secs(300)).unwrap());
            // SAFETY: 64 bytes of live memory that nobody writes any more.
            unsafe { std::slice::from_raw_parts(back, 64) }.to_vec()
        };
        // SAFETY: live memory; all is on one stream.
        unsafe { gpu.fill_u8(near, 0, 256, stream).and(gpu.fill_u8(far, 1, 256, stream)).unwrap() };
        run(&[slice(near, true)]).unwrap();
        assert_eq!((seen(near), plan.fired().len()), (vec![7; 64], 0));
        // Stores: at an address that is aligned to no more than it was.
        run(&[slice(far + 4, true)]).unwrap();
        let off = seen(far + 4).iter().filter(|&&byte| byte != 7).count();
        assert!(wrong.contains(&off), "{fault}: {off}");
        // Loads: they see something else, and never nothing.
        run(&[slice(far + 4, false), slice(near, true)]).unwrap();
        assert_eq!((seen(near), plan.fired().len()), (vec![7; 64], 2));
    }
}

/// As allocations are: given back also when the call fails; a move that fails is not made.
#[test]
fn mappings_are_given_back_in_any_case() {
    let rules = [FaultOp::VmMap, FaultOp::VmUnmap, FaultOp::VmMove, FaultOp::VmReserve, FaultOp::VmRelease];
    let rules = rules.map(|op| FaultRule::new(Injected::OutOfMemory).op(op).nth(1));
    let plan = rules.into_iter().fold(FaultPlan::new(), FaultPlan::on).paused();
    let inner = host::machine(&[HostConfig::default()]);
    let gpu = faulty::wrap(inner.clone(), &plan).remove(0);
    let Some(unit) = gpu.vm_granularity() else { return };
    let all = inner[0].memory_info().unwrap().0;
    plan.resume();
    let kind = |result: gpu_pool::extend::driver::DriverResult| result.unwrap_err().kind;
    assert_eq!(kind(gpu.vm_reserve(4 * unit as u64).map(drop)), FaultKind::OutOfMemory);
    let at = gpu.vm_reserve(4 * unit as u64).unwrap();
    let to = at + 2 * unit as u64;
    // SAFETY: nothing uses any of it.
    unsafe {
        assert_eq!(kind(gpu.vm_map(at, unit)), FaultKind::OutOfMemory);
        gpu.vm_map(at, unit).unwrap();
        assert_eq!(kind(gpu.vm_move(at, to, unit)), FaultKind::OutOfMemory);
        gpu.vm_move(at, to, unit).unwrap();
        assert_eq!(kind(gpu.vm_unmap(to, unit)), FaultKind::OutOfMemory);
        assert_eq!(inner[0].memory_info().unwrap().0, all);
        assert_eq!(kind(gpu.vm_unmap(to, unit)), FaultKind::InvalidArgument, "it is gone");
        assert_eq!(kind(gpu.vm_release(at, 4 * unit as u64)), FaultKind::OutOfMemory);
        assert_eq!(kind(gpu.vm_release(at, 4 * unit as u64)), FaultKind::InvalidArgument, "it is gone");
    }
    assert_eq!(plan.fired().len(), 5);
}

/// CUDA.jl#3112: copies to and from mapped memory do nothing, wherever it has moved to; copies of allocations do.
#[test]
fn mapped_memory_may_lie() {
    let plan: FaultPlan = "0:vm-map:1:drop".parse().unwrap();
    let gpu = faulty::wrap(host::machine(&[HostConfig::default()]), &plan).remove(0);
    let Some(unit) = gpu.vm_granularity() else { return };
    let (stream, host) = (gpu.stream_create(0).unwrap(), gpu.host_alloc(8).unwrap());
    let at = gpu.vm_reserve(4 * unit as u64).unwrap();
    let [bad, good, to] = [0, 1, 3].map(|i| at + i * unit as u64);
    let (own, other) = (gpu.mem_alloc(64).unwrap(), gpu.mem_alloc(64).unwrap());
    // SAFETY: live memory, waited for.
    let copied = |dst: u64, src: u64| unsafe {
        gpu.fill_u8(src, 1, 8, stream).unwrap();
        gpu.fill_u8(dst, 2, 8, stream).unwrap();
        gpu.copy_within(dst, src, 8, stream).unwrap();
        gpu.copy_to_host(host, dst, 8, stream).unwrap();
        assert!(gpu.stream_wait_idle(stream, Duration::from_secs(300)).unwrap());
        host.read()
    };
    // SAFETY: nothing uses it.
    unsafe {
        gpu.vm_map(bad, unit).unwrap();
        gpu.vm_map(good, unit).unwrap();
    }
    assert_eq!([copied(own, bad), copied(bad, own), copied(bad + 64, bad)], [2; 3]);
    assert_eq!([copied(own, other), copied(good, own), copied(own, good)], [1; 3]);
    // SAFETY: nothing uses it.
    unsafe { gpu.vm_move(bad, to, unit) }.unwrap();
    assert_eq!([copied(own, to), copied(to, own)], [2; 2]);
    // SAFETY: as above.
    unsafe {
        gpu.vm_unmap(to, unit).unwrap();
        gpu.vm_map(to, unit).unwrap();
    }
    assert_eq!([copied(own, to), copied(to, own)], [1; 2], "other memory");
}
