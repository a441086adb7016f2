//! Allocation.

use crate::rig::*;
use gpu_pool::extend::driver::FaultKind;
use std::collections::HashSet;

pub fn addresses_are_aligned_and_distinct(rig: &Rig) {
    let all: Vec<_> = rig.devices.iter().flat_map(|device| [1, 100, 256, 70_000].map(|n| mem(device, n))).collect();
    assert!(all.iter().all(|m| m.raw % 256 == 0));
    assert_eq!(all.iter().map(|m| m.raw).collect::<HashSet<_>>().len(), all.len());
}

pub fn memory_info_moves(rig: &Rig) {
    let device = rig.one();
    let (before, total) = device.memory_info().unwrap();
    assert!(before <= total && total == device.info().total_memory || rig.cuda);
    let x = mem(device, 256 << 20);
    let (during, _) = device.memory_info().unwrap();
    assert!(during + (200 << 20) <= before, "{before} -> {during}");
    drop(x);
    let (after, _) = device.memory_info().unwrap();
    assert!(after >= during + (200 << 20), "{during} -> {after}");
}

pub fn running_out_of_memory_harms_nothing(rig: &Rig) {
    let device = rig.one();
    let total = device.info().total_memory as usize;
    let asked = device.mem_alloc(total + (1 << 30)).unwrap_err();
    assert_eq!(asked.kind, FaultKind::OutOfMemory, "{asked}");
    // Also when it is used up piece by piece.
    let (mut held, piece) = (Vec::new(), total / 8);
    let full = loop {
        match device.mem_alloc(piece) {
            Ok(raw) => held.push(Mem { of: device.clone(), raw, bytes: piece }),
            Err(full) => break full,
        }
    };
    assert_eq!((full.kind, full.code), (FaultKind::OutOfMemory, 2), "{full}");
    assert_eq!(full.name, "CUDA_ERROR_OUT_OF_MEMORY");
    drop(held);
    let (s, x) = (stream(device), mem(device, 4096));
    s.fill(&x, 5);
    s.wait();
    assert_eq!(read_words(&x), [5; 1024]);
}

pub fn empty_allocations_are_refused(rig: &Rig) {
    let device = rig.one();
    let kinds = [
        device.mem_alloc(0).map(drop).unwrap_err().kind,
        device.host_alloc(0).map(drop).unwrap_err().kind,
        device.managed_alloc(0).map(drop).unwrap_err().kind,
    ];
    assert_eq!(kinds, [FaultKind::InvalidArgument; 3]);
}

pub fn host_memory_starts_zeroed(rig: &Rig) {
    let device = rig.one();
    for bytes in [1, 1000, 3 << 20] {
        let (mut a, mut b) = (pinned(device, bytes), managed(device, bytes));
        assert!(a.all().iter().chain(b.all().iter()).all(|&byte| byte == 0));
        a.all().fill(1);
        b.all().fill(1);
    }
}

/// One address for the host and every device.
pub fn managed_memory_is_seen_by_all(rig: &Rig) {
    let mut shared = managed(rig.one(), 4096);
    shared.all().fill(0);
    for (i, device) in rig.devices.iter().enumerate() {
        let (s, by) = (stream(device), adder(device));
        by.add(&s, shared.raw as u64, 1024, 10);
        s.wait();
        assert_eq!(shared.words(), [10 * (i as u32 + 1); 1024]);
    }
}

/// Memory of other code is used like one's own from its adoption to its end, and is not freed by it.
pub fn foreign_memory_is_adopted(rig: &Rig) {
    let device = rig.one();
    // To another object of the GPU, its driver's memory is other code's; software GPUs adopt host memory.
    let (own, mut host) = (mem(device, 4096), vec![0u32; 1024]);
    let foreign = if rig.cuda { own.raw } else { host.as_mut_ptr() as u64 };
    // SAFETY: live memory, which nothing else uses.
    let adopted = unsafe { device.adopt(foreign, 4096).unwrap() };
    let s = stream(device);
    // SAFETY: as above; the stream is waited for.
    unsafe { device.fill_u32(adopted + 2048, 9, 512, s.raw).unwrap() };
    s.wait();
    // SAFETY: nothing in flight names it.
    unsafe { device.disown(adopted).unwrap() };
    if rig.cuda {
        assert_eq!(read_words(&own)[512..], [9; 512]);
    } else {
        assert_eq!((host[511], &host[512..]), (0, &[9; 512][..]));
        // SAFETY: it is refused.
        let gone = unsafe { device.fill_u32(adopted, 9, 4, s.raw) }.unwrap_err();
        let is_refused = |kind| matches!(kind, FaultKind::InvalidArgument | FaultKind::Misuse);
        assert!(is_refused(gone.kind), "{gone}");
        // SAFETY: it is refused: neither is the other's.
        let refused = unsafe { [device.mem_free(adopted), device.disown(adopted), device.disown(own.raw)] };
        assert!(refused.into_iter().all(|call| is_refused(call.unwrap_err().kind)));
    }
    // SAFETY: it is refused.
    let refused = unsafe { [device.adopt(foreign, 0), device.adopt(0, 4096)] };
    assert!(refused.into_iter().all(|call| call.unwrap_err().kind == FaultKind::InvalidArgument));
}

/// A stream of other code is one's own, but for its end.
pub fn a_foreign_stream_is_adopted(rig: &Rig) {
    let device = rig.one();
    let (s, x) = (stream(device), mem(device, 4096));
    // SAFETY: a live stream of this device.
    unsafe { device.stream_adopt(s.raw).unwrap() };
    s.fill(&x, 3);
    s.wait();
    assert_eq!(read_words(&x), [3; 1024]);
}
