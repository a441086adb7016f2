//! One suite for all backings.

use super::{Backing, BackingChoice, ChunkKind, Mapping, ProbeContext, open};
use crate::lab::{FaultPlan, FaultRule, Injected, check, faulty};
use crate::{
    driver::{
        Address, DriverRef, DriverResult, FaultKind, RawStream,
        host::{self, HostConfig},
    },
    memory::handle::DeviceHandle,
};
use smallvec::SmallVec;
use std::{cell::RefCell, ops::Range, sync::Arc, time::Duration};

const MIB: u64 = 1 << 20;
pub(super) const G: u64 = 2 * MIB;
pub(super) const MEMORY: u64 = 64 * MIB;

pub(super) fn machine(devices: usize) -> Vec<DriverRef> {
    host::machine(&vec![HostConfig { memory: MEMORY, ..HostConfig::default() }; devices])
}

pub(super) fn link_of(driver: &DriverRef) -> Arc<DeviceHandle> {
    Arc::new(DeviceHandle::new(0, 0, driver.clone(), Arc::default(), 1, None))
}

/// A backing under test: kind, choice, and expected name.
#[derive(Clone, Copy)]
pub(super) struct Case(ChunkKind, BackingChoice, &'static str);

pub(super) const VMM: Case = Case(ChunkKind::Device, BackingChoice::Vmm, "vmm");
const MALLOC: Case = Case(ChunkKind::Device, BackingChoice::Malloc, "malloc");
const PINNED: Case = Case(ChunkKind::Pinned, BackingChoice::Auto, "pinned");
const MANAGED: Case = Case(ChunkKind::Managed, BackingChoice::Auto, "managed");

type InUse = (DriverRef, Arc<DeviceHandle>, Box<dyn Backing>, RawStream, SmallVec<[Mapping; 4]>);

impl Case {
    pub fn open(self, handle: &Arc<DeviceHandle>) -> Box<dyn Backing> {
        let backing = open(handle, self.0, self.1, ProbeContext::default()).unwrap();
        assert_eq!(backing.name(), self.2);
        backing
    }

    /// [`on`](Self::on) the only device of a machine.
    fn alone(self) -> (DriverRef, Arc<DeviceHandle>, Box<dyn Backing>) {
        self.on(machine(1).remove(0))
    }

    /// The device, its handle, and the backing there.
    fn on(self, gpu: DriverRef) -> (DriverRef, Arc<DeviceHandle>, Box<dyn Backing>) {
        let handle = link_of(&gpu);
        let backing = self.open(&handle);
        (gpu, handle, backing)
    }

    /// With a checker: a device, its handle, the backing there, and a stream that still uses the mapping.
    fn in_use(self) -> InUse {
        let gpu = check::wrap(machine(1)).remove(0);
        let handle = link_of(&gpu);
        let (mut backing, stream) = (self.open(&handle), gpu.stream_create(0).unwrap());
        let a = backing.grow(G, G, u64::MAX, &nothing).unwrap();
        fill(&handle, a[0].address, 64, stream).unwrap();
        (gpu, handle, backing, stream, a)
    }
}

/// Answers that nothing is free around any address.
pub(super) fn nothing(_: u32, _: Address) -> (u64, u64) {
    (0, 0)
}

pub(super) fn unit_of(mapping: &Mapping) -> Range<Address> {
    mapping.address..mapping.address + mapping.bytes
}

pub(super) fn fill(handle: &DeviceHandle, at: Address, bytes: u64, stream: RawStream) -> DriverResult {
    // SAFETY: the cases wait for their work, or the call is refused.
    unsafe { handle.driver.fill_u8(at, 1, bytes as usize, stream) }
}

pub(super) fn wait(handle: &DeviceHandle, stream: RawStream) {
    assert!(handle.driver.stream_wait_idle(stream, Duration::from_secs(30)).unwrap());
}

/// Whether there is memory at an address.
pub(super) fn is_there(handle: &DeviceHandle, at: Address) -> bool {
    let stream = handle.driver.stream_create(0).unwrap();
    let there = fill(handle, at, 1, stream).is_ok();
    wait(handle, stream);
    // SAFETY: made above.
    unsafe { handle.driver.stream_destroy(stream) }.unwrap();
    there
}

pub(super) fn free(driver: &DriverRef) -> u64 {
    driver.memory_info().unwrap().0
}

/// `unmap` of units that no operation uses.
pub(super) fn unmap(backing: &mut dyn Backing, mapping: &Mapping) -> DriverResult {
    // SAFETY: the cases wait for their work.
    unsafe { backing.unmap(mapping.region, unit_of(mapping)) }
}

mod suite {
    use super::*;

    pub fn grows_and_gives_back(kind: Case) {
        let (gpu, handle, mut backing) = kind.on(check::wrap(machine(1)).remove(0));
        let stream = gpu.stream_create(0).unwrap();
        assert_eq!(backing.reserved(), 0);
        let small = backing.grow(3000, G, u64::MAX, &nothing).unwrap();
        let large = backing.grow(7 * G, 4 * G, u64::MAX, &nothing).unwrap();
        let total: u64 = small.iter().chain(&large).map(|mapping| mapping.bytes).sum();
        assert_eq!((backing.reserved(), small.len(), small[0].bytes), (total, 1, G));
        assert!(large.iter().map(|mapping| mapping.bytes).sum::<u64>() >= 7 * G);
        for pair in large.windows(2) {
            assert_eq!(unit_of(&pair[0]).end, pair[1].address);
        }
        if kind.0 == ChunkKind::Device {
            assert_eq!(MEMORY - free(&gpu), total);
        }
        fill(&handle, large[0].address, 7 * G, stream).unwrap();
        fill(&handle, small[0].address, 3000, stream).unwrap();
        wait(&handle, stream);
        let last = large.last().unwrap();
        let all = large[0].address..unit_of(last).end;
        let units: Vec<_> = large.iter().map(unit_of).collect();
        assert_eq!(backing.units_in(last.region, all.clone()), units);
        assert_eq!(backing.units_in(last.region, all.start..all.end - 1), units[..units.len() - 1]);
        let calls = backing.driver_calls();
        for mapping in small.iter().chain(&large) {
            let part = mapping.address..mapping.address + mapping.bytes / 2;
            // SAFETY: refused, since units are whole.
            let refused = unsafe { backing.unmap(mapping.region, part) }.unwrap_err();
            assert_eq!(refused.kind, FaultKind::InvalidArgument);
            unmap(&mut *backing, mapping).unwrap();
            assert!(!is_there(&handle, mapping.address));
            assert_eq!(unmap(&mut *backing, mapping).unwrap_err().kind, FaultKind::InvalidArgument, "it is gone");
        }
        assert!(backing.driver_calls() > calls);
        assert_eq!((backing.reserved(), free(&gpu)), (0, MEMORY));
        let again = backing.grow(G, G, u64::MAX, &nothing).unwrap();
        fill(&handle, again[0].address, G, stream).unwrap();
        wait(&handle, stream);
    }

    /// Blocks outlive their pool.
    pub fn memory_outlives_the_pool(kind: Case) {
        let (gpu, handle, mut backing) = kind.alone();
        let [a, b] = [(); 2].map(|()| backing.grow(G, G, u64::MAX, &nothing).unwrap());
        let (at, also) = (a[0].address, b[0].address);
        unmap(&mut *backing, &b[0]).unwrap();
        drop((b, backing));
        let stream = gpu.stream_create(0).unwrap();
        fill(&handle, at, G, stream).unwrap();
        wait(&handle, stream);
        assert!(is_there(&handle, at) && !is_there(&handle, also));
        std::thread::spawn(move || drop(a)).join().unwrap();
        assert!(!is_there(&handle, at));
        assert_eq!(free(&gpu), MEMORY);
    }

    pub fn out_of_memory_changes_nothing(kind: Case) {
        let (gpu, _handle, mut backing) = kind.alone();
        let kept = backing.grow(G, G, u64::MAX, &nothing).unwrap();
        for bytes in [MEMORY + G, u64::MAX / 4 / G * G] {
            let before = (backing.reserved(), free(&gpu));
            let full = backing.grow(bytes, G, u64::MAX, &nothing).map(drop);
            if kind.0 == ChunkKind::Device || bytes > 1 << 60 {
                assert_eq!(full.unwrap_err().kind, FaultKind::OutOfMemory);
                assert_eq!((backing.reserved(), free(&gpu)), before);
            }
        }
        // A unit larger than the request is a wish only: the request succeeds without it.
        if kind.0 == ChunkKind::Device {
            let rest = backing.grow(MEMORY - G, 2 * MEMORY, u64::MAX, &nothing).unwrap();
            assert_eq!(free(&gpu), 0);
            rest.iter().for_each(|mapping| unmap(&mut *backing, mapping).unwrap());
        }
        unmap(&mut *backing, &kept[0]).unwrap();
    }

    /// With a checker: memory in use is not given back, and the report names the caller.
    pub fn memory_in_use_stays(kind: Case) {
        let (_gpu, handle, mut backing, stream, a) = kind.in_use();
        assert_eq!(unmap(&mut *backing, &a[0]).unwrap_err().kind, FaultKind::Misuse);
        assert_eq!(backing.reserved(), G);
        wait(&handle, stream);
        unmap(&mut *backing, &a[0]).unwrap();
        assert_eq!(backing.reserved(), 0);
        drop(a);

        let b = backing.grow(G, G, u64::MAX, &nothing).unwrap();
        fill(&handle, b[0].address, 64, stream).unwrap();
        drop((b, backing));
        assert!(handle.take_refused().is_some());
        wait(&handle, stream);
    }

    /// The knowledge of another thread comes with the memory that it frees.
    pub fn a_region_remembers_who_let_go(kind: Case) {
        let (gpu, handle, backing, stream, a) = kind.in_use();
        drop(backing);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                wait(&handle, stream);
                a[0].keep_alive.remember(handle.release());
            });
            waits.join().unwrap();
        });
        drop(a);
        assert!(handle.take_refused().is_none() && free(&gpu) == MEMORY);
    }

    /// Memory that a stuck stream may use is never given back; memory beside it is.
    pub fn what_is_leaked_stays(kind: Case) {
        let (_gpu, handle, mut backing) = kind.alone();
        let [a, b] = [(); 2].map(|()| backing.grow(G, G, u64::MAX, &nothing).unwrap());
        let (at, also) = (a[0].address, b[0].address);
        a[0].keep_alive.leak(&(at + 100..at + 200));
        assert_eq!(unmap(&mut *backing, &a[0]).unwrap_err().kind, FaultKind::InvalidArgument);
        assert!(backing.units_in(a[0].region, unit_of(&a[0])).is_empty());
        drop((a, b, backing));
        assert!(is_there(&handle, at) && !is_there(&handle, also));
    }

    /// Each call fails once, in every way. Nothing leaks, and everything works afterwards.
    pub fn a_failure_at_any_call_leaks_nothing(kind: Case) {
        for fault in [Injected::Error, Injected::OutOfMemory, Injected::DeviceLost] {
            for n in 1.. {
                let plan = FaultPlan::new().on(FaultRule::new(fault).device(0).nth(n)).paused();
                let inner = machine(1);
                let gpus = faulty::wrap(inner.clone(), &plan);
                let handle = link_of(&gpus[0]);
                plan.resume();
                let seen = RefCell::new(Vec::new());
                let faults = scenario(kind, &handle, &seen);
                let fired = !plan.fired().is_empty();
                plan.pause();
                let seen = seen.into_inner();
                let plain = link_of(&inner[0]);
                assert!(seen.iter().all(|&at| !is_there(&plain, at)), "{fault:?} at call {n}: {faults:?}");
                assert_eq!(free(&inner[0]), MEMORY, "{fault:?} at call {n}: {faults:?}");
                if !fired {
                    assert!(faults.is_empty(), "{faults:?}");
                    assert!(n > 3);
                    break;
                }
                if fault != Injected::DeviceLost {
                    assert!(faults.len() <= 1, "{faults:?}");
                }
            }
        }
    }

    /// Opens, grows, moves, gives a part back, and drops the rest; each once more if it fails.
    fn scenario(kind: Case, handle: &Arc<DeviceHandle>, seen: &RefCell<Vec<Address>>) -> Vec<String> {
        let faults = RefCell::new(Vec::new());
        let note = |fault: &dyn ToString| faults.borrow_mut().push(fault.to_string());
        // With a test of the memory, where there is one.
        let choice = if kind.1 == BackingChoice::Vmm { BackingChoice::Auto } else { kind.1 };
        let try_open = || open(handle, kind.0, choice, ProbeContext::default()).inspect_err(|fault| note(fault));
        let Ok(mut backing) = try_open().or_else(|_| try_open()) else { return faults.into_inner() };
        let grow = |backing: &mut dyn Backing, bytes| {
            let mut once = || {
                let before = backing.reserved();
                backing.grow(bytes, 2 * G, u64::MAX, &nothing).inspect_err(|fault| {
                    note(fault);
                    assert_eq!(backing.reserved(), before);
                })
            };
            let grown = once().or_else(|_| once());
            let come = grown.iter().flatten().map(|mapping| mapping.address);
            seen.borrow_mut().extend(come);
            grown
        };
        let (Ok(a), Ok(b)) = (grow(&mut *backing, 2 * G), grow(&mut *backing, 5 * G)) else {
            return faults.into_inner();
        };
        // SAFETY: nobody uses it.
        if let Err(fault) = unsafe { backing.unmap(a[0].region, unit_of(&a[0])) } {
            note(&fault);
        }
        if backing.name() == "vmm" {
            let from: Vec<_> = b.iter().map(|mapping| (mapping.region, unit_of(mapping))).collect();
            // SAFETY: nobody uses it.
            let moved = unsafe { backing.move_units(&from, 4 * G, &nothing) };
            seen.borrow_mut().extend(moved.to.iter().map(|mapping| mapping.address));
            assert_eq!(moved.from.len(), moved.to.len());
            if let Some(fault) = moved.fault {
                note(&fault);
            }
        }
        drop((a, b));
        drop(backing);
        faults.into_inner()
    }
}

macro_rules! conformance {
    ($($kind:ident $name:ident)+) => {$(
        mod $name {
            use super::*;
            conformance!(@ $kind grows_and_gives_back memory_outlives_the_pool out_of_memory_changes_nothing
                memory_in_use_stays a_region_remembers_who_let_go what_is_leaked_stays
                a_failure_at_any_call_leaks_nothing);
        }
    )+};
    (@ $kind:ident $($case:ident)+) => {$(#[test] fn $case() { suite::$case($kind) })+};
}
conformance! { VMM vmm MALLOC malloc PINNED pinned MANAGED managed }
