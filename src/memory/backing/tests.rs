//! One suite for all backings, and what is special to windows.

use super::{super::link::Link, Backing, Choice, ChunkKind, Mapping, Mappings, Trial, open};
use crate::{
    driver::{
        Address, DriverRef, DriverResult, FaultKind, RawStream, check, faulty,
        host::{self, HostConfig},
    },
    testing::{FaultOp, FaultPlan, FaultRule, Injected},
};
use proptest::prelude::*;
use std::{cell::RefCell, collections::BTreeMap, ops::Range, sync::Arc, time::Duration};

const MIB: u64 = 1 << 20;
const G: u64 = 2 * MIB;
const MEMORY: u64 = 64 * MIB;

fn machine(devices: usize) -> Vec<DriverRef> {
    host::machine(&vec![HostConfig { memory: MEMORY, ..HostConfig::default() }; devices])
}

fn link_of(driver: &DriverRef) -> Arc<Link> {
    Arc::new(Link::new(0, 0, driver.clone()))
}

/// Which backing.
#[derive(Clone, Copy)]
struct Way(ChunkKind, Choice, &'static str);

const VMM: Way = Way(ChunkKind::Device, Choice::Vmm, "vmm");
const MALLOC: Way = Way(ChunkKind::Device, Choice::Malloc, "malloc");
const PINNED: Way = Way(ChunkKind::Pinned, Choice::Auto, "pinned");
const MANAGED: Way = Way(ChunkKind::Managed, Choice::Auto, "managed");

impl Way {
    fn open(self, link: &Arc<Link>) -> Box<dyn Backing> {
        let backing = open(link, self.0, self.1, Trial::default()).unwrap();
        assert_eq!(backing.name(), self.2);
        backing
    }
}

/// Nothing is free beside any place.
fn nothing(_: u32, _: Address) -> (u64, u64) {
    (0, 0)
}

fn unit_of(mapping: &Mapping) -> Range<Address> {
    mapping.address..mapping.address + mapping.bytes
}

fn fill(link: &Link, at: Address, bytes: u64, stream: RawStream) -> DriverResult {
    // SAFETY: the cases wait for their work, or the call is refused.
    unsafe { link.driver.fill_u8(at, 1, bytes as usize, stream) }
}

fn wait(link: &Link, stream: RawStream) {
    assert!(link.driver.stream_wait_idle(stream, Duration::from_secs(30)).unwrap());
}

/// Whether there is memory at an address.
fn is_there(link: &Link, at: Address) -> bool {
    let stream = link.driver.stream_create(0).unwrap();
    let there = fill(link, at, 1, stream).is_ok();
    wait(link, stream);
    // SAFETY: made above.
    unsafe { link.driver.stream_destroy(stream) }.unwrap();
    there
}

fn free(driver: &DriverRef) -> u64 {
    driver.memory_info().unwrap().0
}

/// `unmap` of units that no operation uses.
fn unmap(backing: &mut dyn Backing, mapping: &Mapping) -> DriverResult {
    // SAFETY: the cases wait for their work.
    unsafe { backing.unmap(mapping.region, unit_of(mapping)) }
}

mod suite {
    use super::*;

    pub fn grows_and_gives_back(way: Way) {
        let gpu = check::wrap(machine(1)).remove(0);
        let link = link_of(&gpu);
        let (mut backing, stream) = (way.open(&link), gpu.stream_create(0).unwrap());
        assert_eq!(backing.reserved(), 0);
        let small = backing.grow(3000, G, &nothing).unwrap();
        let large = backing.grow(7 * G, 4 * G, &nothing).unwrap();
        let total: u64 = small.iter().chain(&large).map(|mapping| mapping.bytes).sum();
        assert_eq!((backing.reserved(), small.len(), small[0].bytes), (total, 1, G));
        assert!(large.iter().map(|mapping| mapping.bytes).sum::<u64>() >= 7 * G);
        for pair in large.windows(2) {
            assert_eq!(unit_of(&pair[0]).end, pair[1].address);
        }
        if way.0 == ChunkKind::Device {
            assert_eq!(MEMORY - free(&gpu), total);
        }
        fill(&link, large[0].address, 7 * G, stream).unwrap();
        fill(&link, small[0].address, 3000, stream).unwrap();
        wait(&link, stream);
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
            assert!(!is_there(&link, mapping.address));
            assert_eq!(unmap(&mut *backing, mapping).unwrap_err().kind, FaultKind::InvalidArgument, "it is gone");
        }
        assert!(backing.driver_calls() > calls);
        assert_eq!((backing.reserved(), free(&gpu)), (0, MEMORY));
        let again = backing.grow(G, G, &nothing).unwrap();
        fill(&link, again[0].address, G, stream).unwrap();
        wait(&link, stream);
    }

    /// Blocks outlive their pool.
    pub fn memory_outlives_the_pool(way: Way) {
        let gpu = machine(1).remove(0);
        let link = link_of(&gpu);
        let mut backing = way.open(&link);
        let (a, b) = (backing.grow(G, G, &nothing).unwrap(), backing.grow(G, G, &nothing).unwrap());
        let (at, also) = (a[0].address, b[0].address);
        unmap(&mut *backing, &b[0]).unwrap();
        drop((b, backing));
        let stream = gpu.stream_create(0).unwrap();
        fill(&link, at, G, stream).unwrap();
        wait(&link, stream);
        assert!(is_there(&link, at) && !is_there(&link, also));
        std::thread::spawn(move || drop(a)).join().unwrap();
        assert!(!is_there(&link, at));
        assert_eq!(free(&gpu), MEMORY);
    }

    pub fn out_of_memory_changes_nothing(way: Way) {
        let gpu = machine(1).remove(0);
        let link = link_of(&gpu);
        let mut backing = way.open(&link);
        let kept = backing.grow(G, G, &nothing).unwrap();
        for bytes in [MEMORY + G, u64::MAX / 4 / G * G] {
            let before = (backing.reserved(), free(&gpu));
            let full = backing.grow(bytes, G, &nothing).map(drop);
            if way.0 == ChunkKind::Device || bytes > 1 << 60 {
                assert_eq!(full.unwrap_err().kind, FaultKind::OutOfMemory);
                assert_eq!((backing.reserved(), free(&gpu)), before);
            }
        }
        // What is wished for beyond what is needed can be done without.
        if way.0 == ChunkKind::Device {
            let rest = backing.grow(MEMORY - G, 2 * MEMORY, &nothing).unwrap();
            assert_eq!(free(&gpu), 0);
            rest.iter().for_each(|mapping| unmap(&mut *backing, mapping).unwrap());
        }
        unmap(&mut *backing, &kept[0]).unwrap();
    }

    /// With a checker: memory in use is not given back, and it is known who tried.
    pub fn memory_in_use_stays(way: Way) {
        let gpu = check::wrap(machine(1)).remove(0);
        let link = link_of(&gpu);
        let (mut backing, stream) = (way.open(&link), gpu.stream_create(0).unwrap());
        let a = backing.grow(G, G, &nothing).unwrap();
        fill(&link, a[0].address, 64, stream).unwrap();
        assert_eq!(unmap(&mut *backing, &a[0]).unwrap_err().kind, FaultKind::Misuse);
        assert_eq!(backing.reserved(), G);
        wait(&link, stream);
        unmap(&mut *backing, &a[0]).unwrap();
        assert_eq!(backing.reserved(), 0);
        drop(a);

        let b = backing.grow(G, G, &nothing).unwrap();
        fill(&link, b[0].address, 64, stream).unwrap();
        drop((b, backing));
        assert!(link.take_refused().is_some());
        wait(&link, stream);
    }

    /// What another thread knows comes with what it lets go of.
    pub fn a_region_remembers_who_let_go(way: Way) {
        let gpu = check::wrap(machine(1)).remove(0);
        let link = link_of(&gpu);
        let (mut backing, stream) = (way.open(&link), gpu.stream_create(0).unwrap());
        let a = backing.grow(G, G, &nothing).unwrap();
        fill(&link, a[0].address, 64, stream).unwrap();
        drop(backing);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                wait(&link, stream);
                a[0].home.remember(link.release());
            });
            waits.join().unwrap();
        });
        drop(a);
        assert!(link.take_refused().is_none() && free(&gpu) == MEMORY);
    }

    /// What a stuck stream may use is never given back; what lies beside it is.
    pub fn what_is_leaked_stays(way: Way) {
        let gpu = machine(1).remove(0);
        let link = link_of(&gpu);
        let mut backing = way.open(&link);
        let (a, b) = (backing.grow(G, G, &nothing).unwrap(), backing.grow(G, G, &nothing).unwrap());
        let (at, also) = (a[0].address, b[0].address);
        a[0].home.leak(&(at + 100..at + 200));
        assert_eq!(unmap(&mut *backing, &a[0]).unwrap_err().kind, FaultKind::InvalidArgument);
        assert!(backing.units_in(a[0].region, unit_of(&a[0])).is_empty());
        drop((a, b, backing));
        assert!(is_there(&link, at) && !is_there(&link, also));
    }

    /// Each call fails once, in every way: nothing leaks, and all works afterwards.
    pub fn a_failure_at_any_call_leaks_nothing(way: Way) {
        for fault in [Injected::Error, Injected::OutOfMemory, Injected::DeviceLost] {
            for n in 1.. {
                let plan = FaultPlan::new().on(FaultRule::new(fault).device(0).nth(n)).paused();
                let inner = machine(1);
                let gpus = faulty::wrap(inner.clone(), &plan);
                let link = link_of(&gpus[0]);
                plan.resume();
                let seen = RefCell::new(Vec::new());
                let faults = scenario(way, &link, &seen);
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
    fn scenario(way: Way, link: &Arc<Link>, seen: &RefCell<Vec<Address>>) -> Vec<String> {
        let faults = RefCell::new(Vec::new());
        let note = |fault: &dyn ToString| faults.borrow_mut().push(fault.to_string());
        let try_open = || open(link, way.0, Choice::Auto, Trial::default()).inspect_err(|fault| note(fault));
        let Ok(mut backing) = try_open().or_else(|_| try_open()) else { return faults.into_inner() };
        let mut grow = |backing: &mut dyn Backing, bytes| {
            let mut once = || {
                let before = backing.reserved();
                backing.grow(bytes, 2 * G, &nothing).inspect_err(|fault| {
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
    ($($way:ident $name:ident)+) => {$(
        mod $name {
            use super::*;
            conformance!(@ $way grows_and_gives_back memory_outlives_the_pool out_of_memory_changes_nothing memory_in_use_stays
                a_region_remembers_who_let_go what_is_leaked_stays a_failure_at_any_call_leaks_nothing);
        }
    )+};
    (@ $way:ident $($case:ident)+) => {$(#[test] fn $case() { suite::$case($way) })+};
}
conformance! { VMM vmm MALLOC malloc PINNED pinned MANAGED managed }

// ---- windows ----------------------------------------------------------------------------------------------------------

fn vmm(driver: &DriverRef) -> (Arc<Link>, Box<dyn Backing>) {
    let link = link_of(driver);
    let backing = VMM.open(&link);
    (link, backing)
}

fn window_of(plan: &FaultPlan) -> Result<u64, String> {
    let gpu = faulty::wrap(host::machine(&[HostConfig { memory: 4 << 30, ..HostConfig::default() }]), plan).remove(0);
    let backing = super::vmm::Vmm::open(&link_of(&gpu)).map_err(|fault| fault.to_string())?;
    let holes = backing.home.holes();
    assert_eq!(holes.len(), 1);
    Ok(holes[0].end - holes[0].start)
}

#[test]
fn a_window_is_as_large_as_can_be() {
    let fail = |n| FaultRule::new(Injected::OutOfMemory).op(FaultOp::VmReserve).nth(n);
    assert_eq!(window_of(&FaultPlan::new()), Ok(8 << 30));
    assert_eq!(window_of(&FaultPlan::new().on(fail(1))), Ok(4 << 30));
    assert!(window_of(&FaultPlan::new().on(fail(1)).on(fail(2))).is_err());
    let (_, backing) = vmm(&machine(1)[0]);
    drop(backing);
}

#[test]
fn growth_fills_in_what_is_missing() {
    let gpu = machine(1).remove(0);
    let (link, mut backing) = vmm(&gpu);
    let a = backing.grow(8 * G, 2 * G, &nothing).unwrap();
    assert_eq!((a.len(), a[3].bytes), (4, 2 * G));
    let start = a[0].address;
    unmap(&mut *backing, &a[1]).unwrap();
    // The unit after the hole is free: two granules are missing for three. Units that are not whole are smaller at the end.
    let free = |_, at| if at == start + 4 * G { (0, 2 * G) } else { (0, 0) };
    let b = backing.grow(3 * G, 2 * G, &free).unwrap();
    assert_eq!(b.iter().map(|m| (m.address, m.bytes)).collect::<Vec<_>>(), [(start + 3 * G, G)]);
    let stream = gpu.stream_create(0).unwrap();
    fill(&link, start + 3 * G, 3 * G, stream).unwrap();
    wait(&link, stream);
    // Nothing is missing, so nothing comes.
    let free = |_, at| if at == start + 3 * G { (0, 3 * G) } else { (0, 0) };
    assert!(backing.grow(2 * G, G, &free).unwrap().is_empty());
    let c = backing.grow(3 * G, 2 * G, &nothing).unwrap();
    assert_eq!(
        c.iter().map(|m| (m.address, m.bytes)).collect::<Vec<_>>(),
        [(start + 8 * G, 2 * G), (start + 10 * G, G)]
    );
}

#[test]
fn moved_units_are_the_same_memory() {
    let gpu = machine(1).remove(0);
    let (link, mut backing) = vmm(&gpu);
    // Everything there is, in units with gaps that no request fits in.
    let all = backing.grow(MEMORY, 4 * G, &nothing).unwrap();
    let start = all[0].address;
    assert_eq!((all.len(), free(&gpu)), (8, 0));
    let from: Vec<_> = [1, 3, 5].map(|i: usize| (all[i].region, unit_of(&all[i]))).to_vec();
    let free_beside = |_: u32, at: Address| {
        let ours = |at: Address| from.iter().any(|(_, unit)| unit.contains(&at));
        (if ours(at - 1) { 4 * G } else { 0 }, if ours(at) { 4 * G } else { 0 })
    };
    assert_eq!(backing.grow(12 * G, 4 * G, &free_beside).map(drop).unwrap_err().kind, FaultKind::OutOfMemory);
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
    fill(&link, start + MEMORY, 12 * G, stream).unwrap();
    wait(&link, stream);
    assert!(from.iter().all(|(_, unit)| !is_there(&link, unit.start)));
    // The holes are used again, and all of it goes.
    moved.to.iter().for_each(|mapping| unmap(&mut *backing, mapping).unwrap());
    let again = backing.grow(4 * G, 4 * G, &nothing).unwrap();
    assert_eq!(again[0].address, start + 4 * G);
    drop((moved, again, all, backing));
    assert_eq!(free(&gpu), MEMORY);
}

#[test]
fn a_move_that_fails_half_way_says_how_far_it_came() {
    let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).op(FaultOp::VmMove).nth(2));
    let gpu = faulty::wrap(machine(1), &plan).remove(0);
    let (link, mut backing) = vmm(&gpu);
    let all = backing.grow(8 * G, 2 * G, &nothing).unwrap();
    let from: Vec<_> = all.iter().map(|mapping| (mapping.region, unit_of(mapping))).collect();
    // SAFETY: nobody uses them.
    let moved = unsafe { backing.move_units(&from, 6 * G, &nothing) };
    assert!(moved.fault.is_some() && moved.to.len() == 1);
    assert_eq!(moved.from.to_vec(), from[..1]);
    assert_eq!((is_there(&link, from[0].1.start), is_there(&link, from[1].1.start)), (false, true));
    assert!(is_there(&link, moved.to[0].address));
    assert_eq!(backing.units_in(0, 0..u64::MAX).len(), 4);
}

// ---- trials -----------------------------------------------------------------------------------------------------------

fn opened(gpus: &[DriverRef], peer: bool) -> String {
    let (link, stream) = (link_of(&gpus[0]), gpus[0].stream_create(0).unwrap());
    let trial = Trial { stream: Some(stream), peer: gpus.get(1).filter(|_| peer) };
    match open(&link, ChunkKind::Device, Choice::Auto, trial) {
        Ok(mut backing) => {
            assert_eq!(backing.reserved(), 0);
            let some = backing.grow(G, G, &nothing).unwrap();
            fill(&link, some[0].address, G, stream).unwrap();
            wait(&link, stream);
            backing.name().to_owned()
        }
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_window_is_the_default() {
    assert_eq!(opened(&machine(1), false), "vmm");
    assert_eq!(opened(&machine(2), true), "vmm");
    assert_eq!(opened(&check::wrap(machine(2)), true), "vmm", "and the trial is no misuse");
    let none = HostConfig { virtual_memory: false, memory: MEMORY, ..HostConfig::default() };
    assert_eq!(opened(&host::machine(&[none.clone()]), false), "malloc");
    assert_eq!(opened(&host::machine(&[HostConfig { memory: MEMORY, ..HostConfig::default() }, none]), true), "vmm");
}

/// CUDA.jl#3112: copies report success and write nothing, but only to and from mapped memory.
#[test]
fn a_window_that_lies_is_not_used() {
    for lie in [Injected::Drop, Injected::Corrupt] {
        let rule = FaultRule::new(lie).op(FaultOp::VmMap);
        assert_eq!(opened(&faulty::wrap(machine(1), &FaultPlan::new().on(rule)), false), "malloc");
        // As text, as a user would have it.
        let text: FaultPlan =
            format!("0:vm-map:*:{}", if lie == Injected::Drop { "drop" } else { "corrupt" }).parse().unwrap();
        assert_eq!(opened(&faulty::wrap(machine(2), &text), false), "malloc");
        // Copies within the device are honest, and those to the peer's mappings are not.
        let plan = FaultPlan::new().on(rule.device(1));
        assert_eq!(opened(&faulty::wrap(machine(2), &plan), false), "vmm");
        assert_eq!(opened(&faulty::wrap(machine(2), &plan), true), "malloc");
        // Peers that lie about everything say nothing of windows alone, but the window is not to blame for less.
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

// ---- a pool without blocks --------------------------------------------------------------------------------------------

/// Free and live ranges of one window, in units of the granularity: what a heap knows.
#[derive(Default)]
struct Model {
    /// By first granule: granules, and whether they are live.
    cells: BTreeMap<u64, bool>,
}

impl Model {
    fn run(&self, at: u64, step: i64) -> u64 {
        let mut n = 0;
        while self.cells.get(&at.wrapping_add_signed(step * n as i64)) == Some(&false) {
            n += 1;
        }
        n
    }

    /// A free run of so many.
    fn find(&self, n: u64) -> Option<u64> {
        self.cells.keys().copied().find(|&at| self.run(at, 1) >= n)
    }

    fn add(&mut self, mappings: &Mappings) {
        for mapping in mappings {
            for at in mapping.address / G..(mapping.address + mapping.bytes) / G {
                assert_eq!(self.cells.insert(at, false), None, "two mappings at one place");
            }
        }
    }

    fn remove(&mut self, unit: &Range<Address>) {
        for at in unit.start / G..unit.end / G {
            assert_eq!(self.cells.remove(&at), Some(false));
        }
    }

    /// Units that are wholly free.
    fn free_units(&self, backing: &dyn Backing) -> Vec<(u32, Range<Address>)> {
        let units = backing.units_in(0, 0..u64::MAX).into_iter();
        let is_free = |unit: &Range<Address>| (unit.start / G..unit.end / G).all(|at| self.cells[&at] == false);
        units.filter(is_free).map(|unit| (0, unit)).collect()
    }
}

#[derive(Clone, Debug)]
enum Act {
    Take { n: u64, unit: u64 },
    Free { which: usize },
    Trim { which: usize },
    Gather { n: u64 },
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (1u64..9, 1u64..5).prop_map(|(n, unit)| Act::Take { n, unit }),
        4 => any::<usize>().prop_map(|which| Act::Free { which }),
        1 => any::<usize>().prop_map(|which| Act::Trim { which }),
        2 => (1u64..12).prop_map(|n| Act::Gather { n }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever comes and goes: what the window has is what the heap is told, all that is live keeps its bytes, and a growth
    /// brings what was asked for.
    #[test]
    fn a_heap_in_a_window(acts in prop::collection::vec(act(), 1..60)) {
        let gpu = machine(1).remove(0);
        let (link, mut backing) = vmm(&gpu);
        let stream = gpu.stream_create(0).unwrap();
        let host = gpu.host_alloc(8 * 16).unwrap();
        let mut model = Model::default();
        let mut live: Vec<(u64, u64, u8)> = Vec::new();
        for (step, act) in acts.into_iter().enumerate() {
            match act {
                Act::Take { n, unit } => {
                    if model.find(n).is_none() {
                        let free = |_: u32, at: Address| (model.run(at / G - 1, -1) * G, model.run(at / G, 1) * G);
                        match backing.grow(n * G, unit * G, &free) {
                            Ok(come) => {
                                prop_assert!(!come.is_empty());
                                model.add(&come);
                                prop_assert!(model.find(n).is_some(), "it was said to be enough");
                            }
                            Err(fault) => {
                                prop_assert_eq!(fault.kind, FaultKind::OutOfMemory);
                                let bytes = model.cells.len() as u64 * G;
                                prop_assert!(bytes + n * G > MEMORY, "there was enough");
                            }
                        }
                    }
                    if let Some(at) = model.find(n) {
                        (at..at + n).for_each(|cell| drop(model.cells.insert(cell, true)));
                        live.push((at, n, step as u8));
                        // Over all edges: the first and last bytes of each granule.
                        // SAFETY: live memory, waited for below.
                        unsafe { gpu.fill_u8(at * G, step as u8, (n * G) as usize, stream) }.unwrap();
                    }
                }
                Act::Free { which } if !live.is_empty() => {
                    let (at, n, value) = live.swap_remove(which % live.len());
                    for i in 0..n {
                        // SAFETY: as above.
                        unsafe { gpu.copy_to_host(host.add(16 * i as usize), (at + i) * G + G - 16, 16, stream) }.unwrap();
                    }
                    wait(&link, stream);
                    // SAFETY: zeroed at birth, and nothing is in flight.
                    let seen = unsafe { std::slice::from_raw_parts(host, 16 * n as usize) };
                    prop_assert!(seen.iter().all(|&byte| byte == value));
                    (at..at + n).for_each(|cell| drop(model.cells.insert(cell, false)));
                }
                Act::Trim { which } => {
                    wait(&link, stream);
                    let units = model.free_units(&*backing);
                    if let Some((region, unit)) = units.get(which % units.len().max(1)) {
                        // SAFETY: nothing uses it any more.
                        unsafe { backing.unmap(*region, unit.clone()) }.unwrap();
                        model.remove(unit);
                    }
                }
                Act::Gather { n } if model.find(n).is_none() => {
                    wait(&link, stream);
                    let units = model.free_units(&*backing);
                    let free = |_: u32, at: Address| (model.run(at / G - 1, -1) * G, model.run(at / G, 1) * G);
                    // SAFETY: nothing uses them any more.
                    let moved = unsafe { backing.move_units(&units, n * G, &free) };
                    prop_assert!(moved.fault.is_none());
                    moved.from.iter().for_each(|(_, unit)| model.remove(unit));
                    model.add(&moved.to);
                    prop_assert!(moved.to.is_empty() || model.find(n).is_some());
                }
                _ => {}
            }
            prop_assert_eq!(backing.reserved(), model.cells.len() as u64 * G);
            prop_assert_eq!(MEMORY - free(&gpu), backing.reserved());
        }
        wait(&link, stream);
    }
}
