//! A random program against a reference model that knows nothing of pools: which addresses are taken, by which number.
//! (PyTorch `test_allocator_fuzz`: 10,000 steps, contents checked, random `empty_cache`; DALI's random tests; mimalloc
//! `test-stress`.)
//!
//! Several devices, each with several streams, and threads that only free. Sizes from 0 to 64 MiB under a limit that is
//! hit all the time, alignments up to 2 MiB, trims, frees on any thread, reads by peers, streams that come and go,
//! scopes that fail. Every block holds its number, written on its stream and looked at before it is freed. The checker
//! watches (S3); every few hundred steps the books are checked (S1, S2), and against the model whenever all is at rest.
//!
//! | variable | meaning |
//! |---|---|
//! | `GPU_POOL_FUZZ_STEPS` | steps, of all devices together (without it 8,000 with debug assertions, 60,000 without) |
//! | `GPU_POOL_FUZZ_SEED` | where to begin |
//!
//! `GPU_POOL_LONG=1 cargo test --release --test memory a_million_steps` is the long run.

mod model;
mod program;
mod tally;

use crate::{
    on_both,
    rig::{BACKINGS, assert_books},
    support::{self, Gpus},
};
use gpu_pool::{
    Builder, Error, GpuPool,
    host::ExecutionOrder,
    memory::{BackingChoice, BlockState},
};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use model::Model;
use parking_lot::Mutex;
use program::{LIMIT, Player, Shared};
use std::env;
use tally::{Rules, Tally};

/// Steps of one device within one scope.
const SCOPE: usize = 400;

fn number_from(variable: &str) -> Option<u64> {
    env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable}={text} is no number")))
}

fn steps() -> usize {
    let default = if cfg!(debug_assertions) { 8_000 } else { 60_000 };
    number_from("GPU_POOL_FUZZ_STEPS").map_or(default, |steps| steps as usize)
}

fn seed() -> u64 {
    number_from("GPU_POOL_FUZZ_SEED").unwrap_or(1)
}

/// Plays `steps` steps on a pool: in scopes, of which some fail, with everything compared between them.
fn play(pool: &GpuPool, steps: usize, seed: u64, rules: Rules) {
    println!("GPU_POOL_FUZZ_SEED={seed} GPU_POOL_FUZZ_STEPS={steps} {rules:?}");
    let n = pool.device_count();
    let shared = Shared::new(n);
    let players: Vec<Mutex<Player>> = (0..n).map(|device| Mutex::new(Player::new(device, seed, rules))).collect();
    for scope in 0.. {
        // Scopes that fail make fewer steps.
        if players.iter().map(|player| player.lock().steps()).sum::<usize>() >= steps {
            break;
        }
        // Every eighth scope fails, now on this device, now on that one.
        let fails = (rules.aborts && scope % 8 == 7).then_some(scope / 8 % n);
        let played = pool.run(|dev, _| {
            let mut player = players[dev.index()].lock();
            let mut streams = player.begin(dev)?;
            let until = if fails == Some(dev.index()) { SCOPE / 2 } else { SCOPE };
            for _ in 0..until {
                player.step(dev, &mut streams, &shared)?;
            }
            match fails {
                Some(device) if device == dev.index() => Err(Error::custom("planned")),
                _ => Ok(()),
            }
        });
        match (fails, played) {
            (None, Ok(_)) => {}
            (Some(_), Err(error)) if error.to_string() == "planned" => {
                players.iter().for_each(|player| player.lock().forget_contents());
                shared.forget_contents();
            }
            (_, other) => panic!("seed {seed}, scope {scope}: {other:?}"),
        }
        shared.settle();
        // Everything is at rest: the pool's books must be the model's.
        pool.run(|dev, _| {
            let snapshot = dev.memory_snapshot();
            assert_books(&snapshot);
            let live = snapshot.blocks.iter().filter(|block| block.state == BlockState::Live);
            let model = shared.models[dev.index()].lock();
            model.assert_is(live, &snapshot.stats);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("seed {seed}, scope {scope}: {error}"));
    }
    let mut tally = Tally::default();
    for player in players {
        tally.add(&player.into_inner().end());
    }
    drop(shared);
    println!("{tally}");
    tally.assert_worth_it(steps, rules);
    crate::rig::assert_at_rest(pool);
    let stats = pool.run(|dev, _| Ok(dev.stats())).unwrap();
    println!("{}", stats[0]);
    assert!(stats.iter().all(|stats| stats.peak_reserved <= LIMIT as u64));
}

fn builder(gpus: Gpus, devices: usize, backing: BackingChoice) -> Builder {
    gpus.builder(devices).memory_backing(backing).memory_limit(LIMIT as u64)
}

fn on_devices(gpus: Gpus, most: usize, steps: usize, backing: BackingChoice, seed: u64) {
    let pool = builder(gpus, gpus.up_to(most), backing).build().unwrap();
    play(&pool, steps, seed, Rules { aborts: true, faults: false, alone: false });
    pool.close().unwrap();
}

on_both! {
    1: fn a_random_program_in_a_window(gpus) { on_devices(gpus, 3, steps(), BackingChoice::Vmm, seed()); }
    1: fn a_random_program_of_single_allocations(gpus) {
        on_devices(gpus, 3, steps(), BackingChoice::Malloc, seed() + 1);
    }

    // S4: one call in a few hundred fails, whichever it is; nothing else changes.
    1: fn a_random_program_with_faults(gpus) {
        for (i, backing) in BACKINGS.into_iter().enumerate() {
            let ops = [
                FaultOp::Alloc,
                FaultOp::Free,
                FaultOp::VmMap,
                FaultOp::VmUnmap,
                FaultOp::VmMove,
                FaultOp::EventCreate,
                FaultOp::Record,
                FaultOp::Wait,
                FaultOp::EventWait,
                FaultOp::Fill,
                FaultOp::WriteValue,
                FaultOp::MemoryInfo,
            ];
            let mut plan = FaultPlan::new().seed(seed());
            for op in ops {
                plan = plan.on(FaultRule::new(Injected::Error).op(op).chance(0.004));
            }
            for op in [FaultOp::Alloc, FaultOp::VmMap] {
                plan = plan.on(FaultRule::new(Injected::OutOfMemory).op(op).chance(0.05));
            }
            let plan = plan.paused();
            let pool = builder(gpus, gpus.up_to(2), backing).faults(plan.clone()).build().unwrap();
            plan.resume();
            play(&pool, steps() / 2, seed() + 2 + i as u64, Rules { aborts: false, faults: true, alone: false });
            assert!(plan.fired().len() > steps() / 2000, "hardly any fault: {}", plan.fired().len());
            plan.pause();
            pool.close().unwrap();
        }
    }
}

/// One operation at a time in an order drawn from the seed, one device: the same program is the same run.
#[test]
fn a_random_program_in_steps() {
    support::guarded(|| {
        let traces: Vec<_> = (0..6)
            .map(|i| {
                let seed = seed() + i / 2;
                let schedule = ExecutionOrder::Seeded(seed);
                let builder = Gpus::software().builder(1).schedule(schedule).memory_limit(LIMIT as u64);
                let pool = builder.build().unwrap();
                play(&pool, 1200, seed, Rules { aborts: false, faults: false, alone: true });
                let trace = pool.trace();
                pool.close().unwrap();
                trace
            })
            .collect();
        for pair in traces.chunks(2) {
            assert!(pair[0].is_some() && pair[0] == pair[1], "the same seed gave another run");
        }
    });
}

/// The long run, whatever the number of devices: 10^6 steps of each without debug assertions, which takes less than a
/// minute; 10^5 with them.
#[test]
fn a_million_steps() {
    if !support::long() {
        return println!("skipped: GPU_POOL_LONG=1 runs it");
    }
    let default = if cfg!(debug_assertions) { 100_000 } else { 1_000_000 };
    let steps = number_from("GPU_POOL_FUZZ_STEPS").map_or(default, |steps| steps as usize);
    let gpus = Gpus::software();
    on_devices(gpus, 4, steps, BackingChoice::Vmm, seed() + 100);
    on_devices(gpus, 4, steps, BackingChoice::Malloc, seed() + 101);
}

/// The model itself, without a pool.
#[test]
fn the_model_notices() {
    let taken = |at: u64, bytes: usize| {
        let second = move || {
            let mut model = Model::default();
            model.allocated(4096, 1000, 1);
            model.allocated(at, bytes, 2);
        };
        std::panic::catch_unwind(second).is_err()
    };
    assert!(taken(4096, 1) && taken(5000, 10) && taken(4000, 100) && taken(0, 1 << 20), "an overlap is an error");
    assert!(!taken(5096, 1) && !taken(0, 4096));
}
