//! Tests of windows only: growth, moves, tests of their memory.

use super::{
    Backing, BackingChoice, ChunkKind, ProbeContext, open,
    tests::{G, MEMORY, VMM, fill, free, is_there, link_of, machine, nothing, unit_of, unmap, wait},
    vmm::Vmm,
};
use crate::lab::{FaultOp, FaultPlan, FaultRule, Injected, check, faulty};
use crate::{
    driver::{
        Address, DriverRef, FaultKind,
        host::{self, HostConfig},
    },
    memory::handle::DeviceHandle,
};
use std::sync::Arc;

pub(super) fn vmm(driver: &DriverRef) -> (Arc<DeviceHandle>, Box<dyn Backing>) {
    let handle = link_of(driver);
    let backing = VMM.open(&handle);
    (handle, backing)
}

fn window_of(plan: &FaultPlan) -> Result<u64, String> {
    let gpu = faulty::wrap(host::machine(&[HostConfig { memory: 4 << 30, ..HostConfig::default() }]), plan).remove(0);
    let backing = Vmm::open(&link_of(&gpu)).map_err(|fault| fault.to_string())?;
    let holes = backing.region.holes();
    assert_eq!(holes.len(), 1);
    Ok(holes[0].end - holes[0].start)
}

#[test]
fn a_window_is_as_large_as_can_be() {
    let fail = |n| FaultRule::new(Injected::OutOfMemory).op(FaultOp::VmReserve).nth(n);
    let plan = |failures| (1..=failures).fold(FaultPlan::new(), |plan, n| plan.on(fail(n)));
    assert_eq!([0, 1, 2, 3].map(|n| window_of(&plan(n)).unwrap() >> 30), [32, 16, 8, 4]);
    assert!(window_of(&plan(4)).is_err());
    let (_, backing) = vmm(&machine(1)[0]);
    drop(backing);
}

#[test]
fn growth_fills_in_what_is_missing() {
    let gpu = machine(1).remove(0);
    let (handle, mut backing) = vmm(&gpu);
    let a = backing.grow(8 * G, 2 * G, u64::MAX, &nothing).unwrap();
    assert_eq!((a.len(), a[3].bytes), (4, 2 * G));
    let start = a[0].address;
    unmap(&mut *backing, &a[1]).unwrap();
    // The unit after the hole is free, so only one of three granules is missing. The last unit may be smaller than the
    // others.
    let free = |_, at| if at == start + 4 * G { (0, 2 * G) } else { (0, 0) };
    let b = backing.grow(3 * G, 2 * G, u64::MAX, &free).unwrap();
    assert_eq!(b.iter().map(|m| (m.address, m.bytes)).collect::<Vec<_>>(), [(start + 3 * G, G)]);
    let stream = gpu.stream_create(0).unwrap();
    fill(&handle, start + 3 * G, 3 * G, stream).unwrap();
    wait(&handle, stream);
    // Nothing is missing, so nothing comes.
    let free = |_, at| if at == start + 3 * G { (0, 3 * G) } else { (0, 0) };
    assert!(backing.grow(2 * G, G, u64::MAX, &free).unwrap().is_empty());
    let c = backing.grow(3 * G, 2 * G, u64::MAX, &nothing).unwrap();
    assert_eq!(
        c.iter().map(|m| (m.address, m.bytes)).collect::<Vec<_>>(),
        [(start + 8 * G, 2 * G), (start + 10 * G, G)]
    );
}

#[test]
fn moved_units_are_the_same_memory() {
    let gpu = machine(1).remove(0);
    let (handle, mut backing) = vmm(&gpu);
    // All memory, in units; the free ones have gaps between them that no request fits in.
    let all = backing.grow(MEMORY, 4 * G, u64::MAX, &nothing).unwrap();
    let start = all[0].address;
    assert_eq!((all.len(), free(&gpu)), (8, 0));
    let from: Vec<_> = [1, 3, 5].map(|i: usize| (all[i].region, unit_of(&all[i]))).to_vec();
    let free_beside = |_: u32, at: Address| {
        let ours = |at: Address| from.iter().any(|(_, unit)| unit.contains(&at));
        (if ours(at - 1) { 4 * G } else { 0 }, if ours(at) { 4 * G } else { 0 })
    };
    assert_eq!(backing.grow(12 * G, 4 * G, u64::MAX, &free_beside).map(drop).unwrap_err().kind, FaultKind::OutOfMemory);
    // SAFETY: nobody uses them.
    let moved = unsafe { backing.move_units(&from, 12 * G, &free_beside) };
    assert!(moved.fault.is_none());
    assert_eq!(
        moved.from.iter().map(|(_, unit)| unit.clone()).collect::<Vec<_>>(),
        [1, 3, 5].map(|i: usize| unit_of(&all[i]))
    );
    let to: Vec<_> = moved.to.iter().map(|m| (m.address, m.bytes)).collect();
    assert_eq!(to, [0, 1, 2].map(|i| (start + MEMORY + i * 4 * G, 4 * G)));
    assert_eq!((backing.reserved(), free(&gpu)), (MEMORY, 0));
    let stream = gpu.stream_create(0).unwrap();
    fill(&handle, start + MEMORY, 12 * G, stream).unwrap();
    wait(&handle, stream);
    assert!(from.iter().all(|(_, unit)| !is_there(&handle, unit.start)));
    // The holes are used again, and all memory can be given back.
    moved.to.iter().for_each(|mapping| unmap(&mut *backing, mapping).unwrap());
    let again = backing.grow(4 * G, 4 * G, u64::MAX, &nothing).unwrap();
    assert_eq!(again[0].address, start + 4 * G);
    drop((moved, again, all, backing));
    assert_eq!(free(&gpu), MEMORY);
}

#[test]
fn a_move_that_fails_half_way_says_how_far_it_came() {
    let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).op(FaultOp::VmMove).nth(2));
    let gpu = faulty::wrap(machine(1), &plan).remove(0);
    let (handle, mut backing) = vmm(&gpu);
    let all = backing.grow(8 * G, 2 * G, u64::MAX, &nothing).unwrap();
    let from: Vec<_> = all.iter().map(|mapping| (mapping.region, unit_of(mapping))).collect();
    // SAFETY: nobody uses them.
    let moved = unsafe { backing.move_units(&from, 6 * G, &nothing) };
    assert!(moved.fault.is_some() && moved.to.len() == 1);
    assert_eq!(moved.from.to_vec(), from[..1]);
    assert_eq!((is_there(&handle, from[0].1.start), is_there(&handle, from[1].1.start)), (false, true));
    assert!(is_there(&handle, moved.to[0].address));
    assert_eq!(backing.units_in(0, 0..u64::MAX).len(), 4);
}

// ---- tests of a window's memory

fn opened(gpus: &[DriverRef], peer: bool) -> String {
    let (handle, stream) = (link_of(&gpus[0]), gpus[0].stream_create(0).unwrap());
    let probe = ProbeContext { stream: Some(stream), peer: gpus.get(1).filter(|_| peer) };
    match open(&handle, ChunkKind::Device, BackingChoice::Auto, probe) {
        Ok(mut backing) => {
            assert_eq!(backing.reserved(), 0);
            let some = backing.grow(G, G, u64::MAX, &nothing).unwrap();
            fill(&handle, some[0].address, G, stream).unwrap();
            wait(&handle, stream);
            backing.name().to_owned()
        }
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_window_is_the_default() {
    assert_eq!(opened(&machine(1), false), "vmm");
    assert_eq!(opened(&machine(2), true), "vmm");
    assert_eq!(opened(&check::wrap(machine(2)), true), "vmm", "and the probe is no misuse");
    let none = HostConfig { virtual_memory: false, memory: MEMORY, ..HostConfig::default() };
    assert_eq!(opened(&host::machine(std::slice::from_ref(&none)), false), "malloc");
    assert_eq!(opened(&host::machine(&[HostConfig { memory: MEMORY, ..HostConfig::default() }, none]), true), "vmm");
}

/// CUDA.jl#3112: copies report success and write nothing, but only to and from mapped memory.
#[test]
fn a_window_that_lies_is_not_used() {
    for lie in [Injected::Drop, Injected::Corrupt] {
        let rule = FaultRule::new(lie).op(FaultOp::VmMap);
        assert_eq!(opened(&faulty::wrap(machine(1), &FaultPlan::new().on(rule)), false), "malloc");
        // The same plan as text, as a user would write it.
        let text: FaultPlan =
            format!("0:vm-map:*:{}", if lie == Injected::Drop { "drop" } else { "corrupt" }).parse().unwrap();
        assert_eq!(opened(&faulty::wrap(machine(2), &text), false), "malloc");
        // Copies within the device work, and those to the peer's mappings do not.
        let plan = FaultPlan::new().on(rule.device(1));
        assert_eq!(opened(&faulty::wrap(machine(2), &plan), false), "vmm");
        assert_eq!(opened(&faulty::wrap(machine(2), &plan), true), "malloc");
        // A peer that fails in every copy says nothing about windows; the window is given up all the same.
        let all = FaultPlan::new().on(FaultRule::new(lie).device(0).peer(1));
        assert_eq!(opened(&faulty::wrap(machine(2), &all), true), "malloc");
    }
}

#[test]
fn a_trial_that_cannot_be_made_is_no_reason_to_fail() {
    let plan = |fault, op| FaultPlan::new().on(FaultRule::new(fault).op(op).nth(1));
    for op in
        [FaultOp::VmReserve, FaultOp::VmMap, FaultOp::Fill, FaultOp::CopyWithin, FaultOp::VmUnmap, FaultOp::HostAlloc]
    {
        let gpus = faulty::wrap(machine(1), &plan(Injected::Error, op));
        let expected = if op == FaultOp::VmReserve { "vmm" } else { "malloc" };
        assert_eq!(opened(&gpus, false), expected, "{op:?}");
    }
    let lost = opened(&faulty::wrap(machine(1), &plan(Injected::DeviceLost, FaultOp::VmMap)), false);
    assert!(lost.contains("fallen off the bus"), "{lost}");
}
