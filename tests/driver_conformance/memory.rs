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
