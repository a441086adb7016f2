//! Threads and memory end with their pools, also after faults: lost devices, stuck streams, builds that fail.

use crate::support::{again, cases, guarded, printed, ramp, task, until};
use gpu_pool::{DeviceBuffer, Error, GpuPool, ReduceOp};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected};
use std::{fs, time::Duration};

/// Random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn yes(&mut self) -> bool {
        self.below(2) == 0
    }
}

fn random_plan(random: &mut Random, count: usize) -> FaultPlan {
    const FAULTS: [Injected; 5] =
        [Injected::OutOfMemory, Injected::Error, Injected::LaunchFailed, Injected::DeviceLost, Injected::Stuck];
    const OPS: [Option<FaultOp>; 14] = [
        None,
        Some(FaultOp::Alloc),
        Some(FaultOp::Free),
        Some(FaultOp::HostAlloc),
        Some(FaultOp::StreamCreate),
        Some(FaultOp::StreamWait),
        Some(FaultOp::StreamQuery),
        Some(FaultOp::Record),
        Some(FaultOp::EventWait),
        Some(FaultOp::CopyUp),
        Some(FaultOp::CopyDown),
        Some(FaultOp::CopyPeer),
        Some(FaultOp::Launch),
        Some(FaultOp::Fill),
    ];
    let mut plan = FaultPlan::new().seed(random.below(1 << 30) as u64);
    for _ in 0..1 + random.below(2) {
        let mut rule = FaultRule::new(random.of(&FAULTS)).device(random.below(count));
        if let Some(op) = random.of(&OPS) {
            rule = rule.op(op);
        }
        let n = 1 + random.below(30) as u64;
        plan = plan.on(match random.below(3) {
            0 => rule.nth(n),
            1 => rule.from(n),
            _ => rule.chance(0.01),
        });
    }
    plan
}

fn work(pool: &GpuPool) -> Result<Vec<DeviceBuffer<u32>>, Error> {
    let kept = pool.run(|dev, _| dev.upload(&ramp(3000, dev.index() as u32)))?;
    pool.run(|dev, _| {
        let mut x = dev.upload(&[1.0f32; 5000])?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.barrier()?;
        let from = (dev.index() + 1) % dev.count();
        let stream = dev.stream()?;
        let copy = kept[from].copy_to(&dev.on(&stream))?;
        assert_eq!(dev.download(&copy)?, ramp(3000, from as u32));
        assert_eq!(dev.download(&x)?, [dev.count() as f32; 5000]);
        Ok(())
    })?;
    let mut state = pool.per_device(|dev, _| dev.zeros::<u8>(1 << 20))?;
    state.run(|dev, _, x| dev.fill(x, 3))?;
    Ok(kept)
}

/// A pool's life under a plan of faults.
fn live(seed: u64) -> String {
    let mut random = Random(seed);
    let count = 1 + random.below(3);
    let plan = random_plan(&mut random, count);
    let builder = GpuPool::builder().host(count).timeout(Duration::from_millis(60)).faults(plan.clone());
    let builder = if random.yes() { builder.without_peer_access() } else { builder };
    let early = random.below(4) == 0;
    if !early {
        plan.pause();
    }
    let pool = match builder.build() {
        Ok(pool) => pool,
        Err(error) => return format!("{plan}: build: {error}"),
    };
    plan.resume();
    let mut kept = Vec::new();
    let mut errors = String::new();
    for _ in 0..2 {
        match work(&pool) {
            Ok(buffers) => kept.extend(buffers),
            Err(error) => errors += &format!("{error}; "),
        }
    }
    let rest = if random.yes() { pool.survivors().ok() } else { None };
    if random.yes() {
        kept.clear();
    }
    drop(pool);
    if let Some(Err(error)) = rest.map(|rest| work(&rest)) {
        errors += &format!("survivors: {error}; ");
    }
    drop(kept);
    format!("{plan}: {errors}")
}

/// The names of the process's threads.
fn threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().filter_map(|task| task.ok());
    let mut names: Vec<_> = tasks
        .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
        .map(|name| name.trim().to_owned())
        .collect();
    names.sort();
    names
}

/// Resident megabytes.
fn memory() -> usize {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096 / (1 << 20)
}

/// More than this many megabytes is a leak: a machine that stays has some ten, and there are many pools.
const GROWTH: usize = 64;

/// The process whose threads and memory are counted.
#[test]
fn child() {
    let Some(task) = task() else { return };
    let (from, to) = task.split_once("..").unwrap();
    let seeds = from.parse::<u64>().unwrap()..to.parse().unwrap();
    guarded(move || {
        // What the process keeps for good is there before the counting begins.
        (0..3).for_each(|_| drop(work(&GpuPool::builder().host(3).build().unwrap()).unwrap()));
        // A thread is on the system's list until shortly after its join.
        let own = || threads().iter().any(|name| name.starts_with("gpu-pool"));
        until("the first threads end", || !own()).unwrap();
        let (before, begun) = (threads(), memory());
        for seed in seeds {
            let story = live(seed);
            // A worker of a software GPU may be the one that drops the last handle; then its end is not waited for.
            let ended = until("threads end", || threads() == before);
            assert!(ended.is_ok(), "{seed}: {:?} are left, {before:?} were there: {story}", threads());
        }
        let grown = memory().saturating_sub(begun);
        assert!(grown < GROWTH, "{grown} MB more than {begun} MB");
    });
}

/// Each seed is one pool. The first ones have stuck streams, lost devices, and builds that fail.
#[test]
fn threads_and_memory_end_with_their_pools_after_faults() {
    let mut process = again(&["threads::child"], cases("0..16", "0..300"));
    printed(process.env("GPU_POOL_LOG", "off"), 1);
}
