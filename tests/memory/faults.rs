//! Failure atomicity (S4): a call of the driver fails, whichever it is; the books are right
//! afterwards, contents are what they were, and the next allocation that fits is served. (RMM `UpstreamFailure`, UMF
//! `freeErrorPropagation`, mimalloc `malloc-nomem`; "fault_at_every_backing_call".)

use crate::{
    on_both,
    rig::{KIB, MIB, Rng, aligned, assert_at_rest, bytes_of, check_books, limited},
    support::{Gpus, all_are, cases},
};
use gpu_pool::{Device, DeviceBuffer, Error, memory::BackingChoice};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use std::{sync::Arc, thread};

/// What the pool asks of the driver.
const OPS: [FaultOp; 16] = [
    FaultOp::Alloc,
    FaultOp::Free,
    FaultOp::VmReserve,
    FaultOp::VmMap,
    FaultOp::VmUnmap,
    FaultOp::VmMove,
    FaultOp::MemoryInfo,
    FaultOp::EventCreate,
    FaultOp::Record,
    FaultOp::Wait,
    FaultOp::EventQuery,
    FaultOp::EventWait,
    FaultOp::StreamQuery,
    FaultOp::StreamWait,
    FaultOp::WriteValue,
    FaultOp::Fill,
];
/// Each device may take this much; the program lives on the edge of it.
const LIMIT: usize = 24 * MIB;

/// A block with what is in it, if that is known.
struct Held {
    buffer: DeviceBuffer<u32>,
    number: Option<u32>,
}

impl Held {
    fn new(dev: &Device, bytes: usize, number: u32) -> Result<Self, Error> {
        let mut held = Held { buffer: aligned(dev, bytes / 4, 4)?, number: None };
        // If this fails the block is there all the same, and goes.
        dev.fill(&mut held.buffer, number)?;
        held.number = Some(number);
        Ok(held)
    }

    fn check(&self, dev: &Device) -> Result<(), Error> {
        let Some(number) = self.number else { return Ok(()) };
        let found = dev.download(&self.buffer)?;
        assert!(all_are(&found, number), "block {number} was written to");
        Ok(())
    }
}

/// What may go wrong here and there.
fn planned(error: &Error) -> bool {
    matches!(error, Error::Driver { code: 999, .. } | Error::OutOfMemory { .. })
}

/// A program that takes every way through the pool: growth, reuse, steals, remote frees, every rung of the ladder,
/// trims. Goes on after failures. What is still held at the end.
fn program(dev: &Device, seed: u64) -> Result<Vec<Held>, Error> {
    let mut rng = Rng(seed);
    let mut live: Vec<Held> = Vec::new();
    let attempt = |done: Result<(), Error>| match done {
        Err(error) if !planned(&error) => Err(error),
        _ => Ok(()),
    };
    let side = loop {
        match dev.stream() {
            Ok(stream) => break stream,
            Err(error) => attempt(Err(error))?,
        }
    };
    for number in 0..36u32 {
        let on = dev.on(&side);
        let dev = if number % 3 == 0 { &*on } else { dev };
        let done = match number {
            // Small and large, and together more than there is.
            0..12 => {
                Held::new(dev, [600 * KIB, 5 * KIB, 3 * MIB][number as usize % 3], number).map(|held| live.push(held))
            }
            // Pending on one stream, wanted on the other.
            12 | 20 => {
                live.truncate(3);
                Held::new(dev, 9 * MIB, number).map(drop)
            }
            13 | 21 => Held::new(dev, 11 * MIB, number).map(|held| live.push(held)),
            // More than fits.
            14 => Held::new(dev, LIMIT - 2 * MIB, number).map(drop),
            // Freed by somebody else.
            15 | 24 => {
                let gone = live.pop();
                thread::scope(|s| s.spawn(|| drop(gone)).join()).expect("a free does not panic");
                Ok(())
            }
            16 | 30 => dev.trim().map(drop),
            17 => dev.synchronize(),
            18 => {
                live.clear();
                Ok(())
            }
            // All of it, once in pieces and once as a whole.
            28 => Held::new(dev, LIMIT - 4 * MIB, number).map(drop),
            _ => {
                let held = Held::new(dev, rng.size(22), number);
                if let Some(old) = live.get(rng.below(live.len().max(1))) {
                    attempt(old.check(dev))?;
                }
                held.map(|held| live.push(held))
            }
        };
        attempt(done)?;
    }
    Ok(live)
}

/// Calls from one attempt to the next, as each attempt builds a pool: all calls with `GPU_POOL_LONG=1`.
fn stride(gpus: Gpus) -> usize {
    if gpus.is_cuda() { 5 } else { cases(4, 1) }
}

/// The program with the `n`-th call of an operation failing, for every `n`.
fn sweep(gpus: Gpus, backing: BackingChoice, op: FaultOp, fault: Injected) {
    for n in (1..).step_by(stride(gpus)) {
        let plan = FaultPlan::new().on(FaultRule::new(fault).device(0).op(op).nth(n)).paused();
        let pool = limited(gpus, 1, backing, LIMIT).faults(plan.clone()).build().unwrap();
        plan.resume();
        pool.run(|dev, _| {
            let live = program(dev, n)?;
            plan.pause();
            // S1 and S2.
            check_books(dev);
            live.iter().try_for_each(|held| held.check(dev))?;
            let held: usize = live.iter().map(|held| 4 * held.buffer.len()).sum();
            assert_eq!(dev.stats().requested, held as u64, "{op:?} {n}: {}", dev.stats());
            // The next one that fits.
            drop(live);
            dev.synchronize()?;
            let whole = bytes_of(dev, LIMIT - 2 * MIB)?;
            check_books(dev);
            drop(whole);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{backing:?} {op:?} {n}: {error}, {:?}", plan.fired()));
        assert_at_rest(&pool);
        pool.trim().unwrap();
        let stats = pool.run(|dev, _| Ok(dev.stats())).unwrap()[0];
        assert_eq!(stats.reserved, 0, "{backing:?} {op:?} {n}: {stats}");
        pool.close().unwrap();
        if plan.fired().is_empty() {
            println!("{backing:?} {op:?}: {} calls", n - 1);
            break;
        }
    }
}

fn sweep_all(gpus: Gpus, backing: BackingChoice, ops: &[FaultOp]) {
    ops.iter().for_each(|&op| sweep(gpus, backing, op, Injected::Error));
}

on_both! {
    1: fn fault_at_every_call_for_memory_of_a_window(gpus) { sweep_all(gpus, BackingChoice::Vmm, &OPS[..7]); }
    1: fn fault_at_every_call_for_events_of_a_window(gpus) { sweep_all(gpus, BackingChoice::Vmm, &OPS[7..12]); }
    1: fn fault_at_every_call_for_streams_of_a_window(gpus) { sweep_all(gpus, BackingChoice::Vmm, &OPS[12..]); }
    1: fn fault_at_every_call_for_single_allocations(gpus) { sweep_all(gpus, BackingChoice::Malloc, &OPS[..7]); }
    1: fn fault_at_every_call_for_events_of_single_allocations(gpus) {
        sweep_all(gpus, BackingChoice::Malloc, &OPS[7..12]);
    }
    1: fn fault_at_every_call_for_streams_of_single_allocations(gpus) {
        sweep_all(gpus, BackingChoice::Malloc, &OPS[12..]);
    }

    1: fn no_memory_at_every_call_for_memory(gpus) {
        for (backing, op) in [
            (BackingChoice::Vmm, FaultOp::VmMap),
            (BackingChoice::Vmm, FaultOp::VmMove),
            (BackingChoice::Malloc, FaultOp::Alloc),
        ] {
            sweep(gpus, backing, op, Injected::OutOfMemory);
        }
    }

    // The build takes memory, too: it fails with the fault, or does without; and the next one works.
    1: fn fault_at_every_call_of_the_build(gpus) {
        for op in OPS {
            for n in 1..200 {
                let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).device(0).op(op).nth(n));
                let built =
                    limited(gpus, 1, BackingChoice::Auto, LIMIT).memory_reserve(8 << 20).faults(plan.clone()).build();
                plan.pause();
                let fired = !plan.fired().is_empty();
                match built {
                    Ok(pool) => {
                        pool.run(|dev, _| {
                            check_books(dev);
                            assert!(dev.stats().reserved >= 8 << 20);
                            bytes_of(dev, LIMIT - 2 * MIB).map(drop)
                        })
                        .unwrap();
                        pool.close().unwrap();
                    }
                    Err(error) => assert!(fired && planned(&error), "{op:?} {n}: {error}"),
                }
                if !fired {
                    break;
                }
            }
        }
    }

    // With a peer: its waits for this device's memory fail, and this device's for the peer.
    2: fn faults_of_one_device_do_not_spoil_the_others_books(gpus) {
        for op in [
            FaultOp::Record,
            FaultOp::Wait,
            FaultOp::CopyPeer,
            FaultOp::EventCreate,
            FaultOp::VmMap,
            FaultOp::EventWait,
        ] {
            for n in (1..).step_by(stride(gpus)) {
                let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).device(1).op(op).nth(n)).paused();
                let pool = limited(gpus, 2, BackingChoice::Auto, LIMIT).faults(plan.clone()).build().unwrap();
                let kept = pool.run(|dev, _| dev.upload(&vec![dev.rank() as u8; MIB])).unwrap();
                let kept: Vec<_> = kept.into_iter().map(Arc::new).collect();
                plan.resume();
                let done = pool.run(|dev, _| {
                    for round in 0..3u8 {
                        let mine = Arc::new(dev.upload(&vec![round; 4 * MIB])?);
                        let both = dev.exchange(mine)?;
                        let copy = both[1 - dev.rank()].copy_to(dev)?;
                        drop(both);
                        let next = dev.upload(&vec![99u8; 4 * MIB])?;
                        assert!(all_are(&dev.download(&copy)?, round));
                        drop((next, copy));
                    }
                    Ok(())
                });
                plan.pause();
                if let Err(error) = &done {
                    assert!(planned(error), "{op:?} {n}: {error}");
                }
                pool.run(|dev, _| {
                    check_books(dev);
                    assert!(all_are(&dev.download(&*kept[dev.rank()])?, dev.rank() as u8));
                    bytes_of(dev, LIMIT - 4 * MIB).map(drop)
                })
                .unwrap_or_else(|error| panic!("{op:?} {n}: {error}, {:?}", plan.fired()));
                drop(kept);
                assert_at_rest(&pool);
                pool.close().unwrap();
                if plan.fired().is_empty() {
                    done.unwrap();
                    break;
                }
            }
        }
    }
}
