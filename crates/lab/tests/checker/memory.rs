//! Memory that was not written yet, is freed too early, or is gone.

use crate::rig::*;
use gpu_pool::extend::driver::{Address, FaultKind};
use gpu_pool_lab::check::{Kind, annotate};
use std::time::Duration;

#[test]
fn bytes_that_nobody_has_written_are_read() {
    let gpu = &gpus(1)[0];
    let (x, to, s) = (memory(gpu), pinned(gpu), stream(gpu));
    // SAFETY: in range; waited for below.
    unsafe { gpu.fill_u8(x, 1, 100, s) }.unwrap();
    assert_eq!(caught(down(gpu, to, x, s), Kind::UninitializedRead).bytes, 100..BYTES);
    fill(gpu, x, 1, s).unwrap();
    down(gpu, to, x, s).unwrap();
    // Page-locked and managed memory begins zeroed.
    // SAFETY: as above.
    unsafe { gpu.copy_to_device(x, pinned(gpu) as *const u8, BYTES, s) }.unwrap();
    let managed = gpu.managed_alloc(BYTES).unwrap() as Address;
    down(gpu, to, managed, s).unwrap();
    idle(gpu, s);
}

#[test]
fn memory_is_freed_while_it_is_in_use() {
    let [a, b] = &two_gpus();
    let (xa, xb, sa, sb) = (memory(a), memory(b), stream(a), stream(b));
    fill(a, xa, 1, sa).unwrap();
    order(a, sa, b, sb);
    peer(b, xb, a, xa, sb).unwrap();
    idle(a, sa);
    // SAFETY: the checker refuses it, and then it is out of use.
    let report = caught(unsafe { a.mem_free(xa) }, Kind::FreeInUse);
    assert_eq!((report.now.op, report.before.as_ref().unwrap().device), ("mem_free", Some(1)));
    fill(a, xa, 1, sb).unwrap_err();
    idle(b, sb);
    // SAFETY: as above.
    unsafe { a.mem_free(xa) }.unwrap();

    let (p, m) = (pinned(a), a.managed_alloc(BYTES).unwrap());
    down(b, p, xb, sb).unwrap();
    fill(b, m as Address, 1, sb).unwrap();
    // SAFETY: as above.
    unsafe {
        caught(a.host_free(p as *mut u8), Kind::FreeInUse);
        caught(a.managed_free(m), Kind::FreeInUse);
        idle(b, sb);
        a.host_free(p as *mut u8).unwrap();
        a.managed_free(m).unwrap();
    }
}

/// What was submitted to a lost device can never be waited for; its memory goes back all the same.
#[test]
fn a_lost_devices_memory_is_freed() {
    let gpu = &gpus(1)[0];
    let (x, p, s) = (memory(gpu), pinned(gpu), stream(gpu));
    fill(gpu, x, 1, s).unwrap();
    down(gpu, p, x, s).unwrap();
    gpu.launch_host(s, Box::new(|| panic!("a panic that loses the device"))).unwrap();
    assert_eq!(gpu.stream_wait_idle(s, Duration::from_secs(300)).unwrap_err().kind, FaultKind::DeviceLost);
    // SAFETY: nothing runs on the device any more.
    let freed = unsafe { [gpu.mem_free(x), gpu.host_free(p as *mut u8)] };
    assert_eq!(freed.map(|freed| freed.unwrap_err().kind), [FaultKind::DeviceLost; 2]);
    // SAFETY: it is gone already.
    caught(unsafe { gpu.mem_free(x) }, Kind::UseAfterFree);
}

#[test]
fn freed_memory_is_used() {
    let gpu = &gpus(1)[0];
    let (x, s) = (memory(gpu), stream(gpu));
    fill(gpu, x, 1, s).unwrap();
    idle(gpu, s);
    let freed = line() + 2;
    // SAFETY: waited for.
    annotate("let go", || unsafe { gpu.mem_free(x) }).unwrap();
    let report = caught(fill(gpu, x, 2, s), Kind::UseAfterFree);
    let by = report.allocation.as_ref().unwrap().freed.unwrap().unwrap();
    assert_eq!((by.0, by.1.line(), by.1.file()), ("let go", freed, file!()));
    // SAFETY: refused.
    caught(unsafe { gpu.mem_free(x) }, Kind::UseAfterFree);
    // What was never allocated is the driver's business.
    // SAFETY: as above.
    let unknown = unsafe { gpu.mem_free(x + (1 << 30)) }.unwrap_err();
    assert_eq!((unknown.kind, unknown.report), (FaultKind::InvalidArgument, None));
}

/// The same address, handed out again by the driver, is another buffer's.
#[test]
fn an_address_is_another_buffers_after_a_free() {
    let gpu = &gpus(1)[0];
    let (s, t) = (stream(gpu), stream(gpu));
    let mut seen = std::collections::HashMap::new();
    for round in 0..200 {
        let x = pinned(gpu);
        *seen.entry(x).or_insert(0) += 1;
        fill(gpu, x, 1, if round % 2 == 0 { s } else { t }).unwrap();
        idle(gpu, if round % 2 == 0 { s } else { t });
        // SAFETY: waited for.
        unsafe { gpu.host_free(x as *mut u8) }.unwrap();
    }
    assert!(seen.values().any(|&n| n > 1), "the allocator has given no address twice, so nothing was tested");
}
