//! Frees during an abort are parked until the gang has drained (safety rule 7): a peer's late store never lands in
//! a block that somebody else has got meanwhile; and nothing is lost by it.

use crate::{
    on_both,
    rig::{Gate, KIB, MIB, Rng, assert_at_rest, bytes_of, limited, on_limited_pools},
    support::{bytes, failure, slow_add, until},
};
use gpu_pool::{DeviceBuffer, Error, GpuPool};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::*},
    },
    thread,
    time::Duration,
};

/// All of a device's memory: written, and as it was written whenever it is looked at.
#[track_caller]
fn assert_untouched(pool: &GpuPool, device: usize, total: usize, seed: u8) {
    let checked = pool.on(&[device]).run(|dev, _| {
        let data = bytes(total, seed);
        let parts = data.chunks(total / 4).map(|part| dev.upload(part)).collect::<Result<Vec<_>, _>>()?;
        for _ in 0..3 {
            for (part, expected) in parts.iter().zip(data.chunks(total / 4)) {
                assert!(dev.download(part)? == expected, "somebody has written to memory that was not his any more");
            }
            thread::yield_now();
        }
        Ok(())
    });
    checked.unwrap();
}

on_both! {
    // A peer's slow copy into the owner's buffer, which the owner frees while it fails. The next scope gets the memory.
    2: fn a_late_copy_of_a_peer_does_not_land_in_a_reused_block(gpus) {
        on_limited_pools(gpus, 2, 16 * MIB, |pool, _| {
            for round in 0..4u8 {
                let gate = Gate::new(gpus);
                let target = pool.on(&[0]).run(|dev, _| dev.zeros::<u8>(8 * MIB)).unwrap().remove(0);
                let target = Mutex::new(Some(target));
                let (queued, failed) = (AtomicBool::new(false), AtomicBool::new(false));
                thread::scope(|s| {
                    s.spawn(|| {
                        until("device 0 has failed", || failed.load(Acquire)).unwrap();
                        thread::sleep(Duration::from_millis(20));
                        gate.open();
                    });
                    let error = failure(pool.run(|dev, _| {
                        if dev.rank() == 1 {
                            let from = dev.upload(&vec![0xee; 8 * MIB])?;
                            let _busy = gate.hold_stream(dev)?;
                            dev.copy(&from, target.lock().as_mut().unwrap())?;
                            queued.store(true, Release);
                            // And more that nobody waits for, of memory that this one frees during the abort.
                            let mut own = dev.upload(&vec![1u32; MIB])?;
                            slow_add(dev, &mut own, 1, 3000)?;
                            until("device 0 has failed", || dev.check().is_err())?;
                            return Ok(());
                        }
                        until("the copy is queued", || queued.load(Acquire))?;
                        drop(target.lock().take());
                        failed.store(true, Release);
                        Err::<(), _>(Error::custom("enough"))
                    }));
                    assert_eq!(error.to_string(), "enough");
                });
                // The very next use of the memory, all of it.
                assert_untouched(pool, 0, 14 * MIB, round);
                assert_at_rest(pool);
            }
        });
    }

    // The same freed by threads that are members of no gang, and by members of another, while the first one is
    // aborting.
    3: fn remote_frees_during_an_abort(gpus) {
        on_limited_pools(gpus, 3, 16 * MIB, |pool, _| {
            for round in 0..4u8 {
                let gate = Gate::new(gpus);
                let lent =
                    pool.on(&[0]).run(|dev, _| (0..3).map(|_| dev.zeros::<u8>(4 * MIB)).collect::<Result<Vec<_>, _>>());
                let lent: Vec<_> = lent.unwrap().remove(0).into_iter().map(|x| Mutex::new(Some(x))).collect();
                let (queued, freed) = (AtomicBool::new(false), AtomicUsize::new(0));
                thread::scope(|s| {
                    // Devices 0 and 2 are in gangs of their own: 0 uses what comes back at once, 2 frees.
                    s.spawn(|| {
                        until("the copies are queued", || queued.load(Acquire)).unwrap();
                        drop(lent[0].lock().take());
                        freed.fetch_add(1, Release);
                        pool.on(&[2]).run(|_, _| {
                            drop(lent[1].lock().take());
                            freed.fetch_add(1, Release);
                            Ok(())
                        })
                        .unwrap();
                    });
                    s.spawn(|| {
                        until("all are freed", || freed.load(Acquire) == 3).unwrap();
                        thread::sleep(Duration::from_millis(10));
                        gate.open();
                    });
                    s.spawn(|| {
                        until("some are freed", || freed.load(Acquire) >= 1).unwrap();
                        assert_untouched(pool, 0, 14 * MIB, round);
                    });
                    let error = failure(pool.on(&[1]).run(|dev, _| {
                        let from = dev.upload(&vec![0xee; 4 * MIB])?;
                        let _busy = gate.hold_stream(dev)?;
                        for lent in &lent {
                            dev.copy(&from, lent.lock().as_mut().unwrap())?;
                        }
                        queued.store(true, Release);
                        until("two are freed", || freed.load(Acquire) == 2)?;
                        drop(lent[2].lock().take());
                        freed.fetch_add(1, Release);
                        Err::<(), _>(Error::custom("enough"))
                    }));
                    assert_eq!(error.to_string(), "enough");
                });
                assert_untouched(pool, 0, 14 * MIB, round ^ 0x55);
                assert_at_rest(pool);
            }
        });
    }

    // The peer's operation fails half way, so that the memory itself does not know of what is still under way. Staged
    // copies and direct ones, at each of their calls.
    2: fn an_operation_that_failed_half_way(gpus) {
        for staged in [false, true] {
            for op in [FaultOp::Record, FaultOp::Wait, FaultOp::CopyUp, FaultOp::CopyDown, FaultOp::CopyPeer] {
                for n in 1..=3 {
                    let slow = Injected::Slow { per_copy: Duration::from_millis(4), per_megabyte: Duration::ZERO };
                    let plan = FaultPlan::new()
                        .on(FaultRule::new(Injected::Error).device(1).op(op).nth(n))
                        .on(FaultRule::new(slow).device(1).op(FaultOp::CopyUp))
                        .on(FaultRule::new(slow).device(1).op(FaultOp::CopyPeer))
                        .paused();
                    let builder = gpus.builder(2).memory_limit(16 << 20).faults(plan.clone());
                    let pool = if staged { builder.without_peer_access() } else { builder }.build().unwrap();
                    let target = pool.on(&[0]).run(|dev, _| dev.zeros::<u8>(3 * MIB)).unwrap().remove(0);
                    let target = Mutex::new(Some(target));
                    let done = pool.run(|dev, _| {
                        if dev.rank() == 1 {
                            let from = dev.upload(&vec![0xee; 3 * MIB])?;
                            let mut busy = dev.zeros::<u32>(1)?;
                            dev.synchronize()?;
                            slow_add(dev, &mut busy, 1, 5000)?;
                            plan.resume();
                            let copied = dev.copy(&from, target.lock().as_mut().unwrap());
                            plan.pause();
                            drop(target.lock().take());
                            return copied;
                        }
                        dev.barrier().or(Ok(()))
                    });
                    plan.pause();
                    let fired = plan.fired().iter().any(|fired| fired.fault == Injected::Error);
                    if let Err(error) = &done {
                        let fits = matches!(error, Error::Driver { code: 999, .. } | Error::Mismatch { .. });
                        assert!(fits, "{staged} {op:?} {n}: {error}");
                    }
                    assert!(done.is_err() || !fired || op == FaultOp::Wait, "{staged} {op:?} {n}");
                    assert_untouched(&pool, 0, 13 * MIB, n as u8);
                    assert_at_rest(&pool);
                    pool.close().unwrap();
                }
            }
        }
    }

    // Over and over, with everybody freeing everything on every thread, some in the abort and some after it: at the end
    // nothing is missing, and what lived through it is as it was.
    2: fn nothing_is_lost_in_many_aborts(gpus) {
        let n = gpus.up_to(3);
        on_limited_pools(gpus, n, 24 * MIB, |pool, _| {
            let keep: Vec<DeviceBuffer<u8>> = pool.run(|dev, _| dev.upload(&bytes(500 * KIB, 3))).unwrap();
            let others: Mutex<Vec<DeviceBuffer<u32>>> = Mutex::new(Vec::new());
            for round in 0..30u64 {
                let error = failure(pool.run(|dev, _| {
                    let mut rng = Rng(round * 8 + dev.rank() as u64);
                    for i in 0..40 {
                        let mut x = dev.zeros::<u32>(1 + rng.below(MIB / 8))?;
                        slow_add(dev, &mut x, 1, rng.below(300) as u32)?;
                        if rng.chance(3) {
                            others.lock().push(x);
                        }
                        if rng.chance(4) {
                            let gone = others.lock().pop();
                            drop(gone);
                        }
                        if i == 20 && dev.rank() as u64 == round % n as u64 {
                            return Err::<(), _>(Error::custom("enough"));
                        }
                    }
                    dev.barrier()
                }));
                assert_eq!(error.to_string(), "enough");
                if round % 5 == 0 {
                    let gone = std::mem::take(&mut *others.lock());
                    thread::spawn(move || drop(gone)).join().unwrap();
                    let live = pool.run(|dev, _| Ok(dev.stats().requested)).unwrap();
                    assert!(live.iter().all(|&bytes| bytes == 500 * KIB as u64), "round {round}: {live:?}");
                }
                pool.run(|dev, _| {
                    assert!(dev.download(&keep[dev.rank()])? == bytes(500 * KIB, 3), "round {round}");
                    Ok(())
                })
                .unwrap();
            }
            others.lock().clear();
            drop(keep);
            assert_at_rest(pool);
            pool.run(|dev, _| bytes_of(dev, 22 * MIB).map(drop)).unwrap();
        });
    }

    // What is freed in the abort is not handed out in it, to anyone: an allocation says why, and the block counts as in
    // use until all have drained. (This is the test that fails when nothing is parked: in the others the block's own
    // uses order what comes next, and no member can allocate before all have drained.)
    2: fn nothing_is_handed_out_in_an_abort(gpus) {
        let pool = limited(gpus, 2, gpu_pool::memory::BackingChoice::Auto, 8 * MIB).build().unwrap();
        // A panic of one who comes late would not be told.
        let seen = Mutex::new(None);
        let ready = AtomicBool::new(false);
        let error = failure(pool.run(|dev, _| {
            if dev.rank() == 1 {
                until("the other holds something", || ready.load(Acquire))?;
                return Err::<(), _>(Error::custom("enough"));
            }
            let held = Arc::new(bytes_of(dev, 5 * MIB)?);
            ready.store(true, Release);
            until("the other has failed", || dev.check().is_err())?;
            drop(held);
            let refused = [bytes_of(dev, 5 * MIB).map(drop), bytes_of(dev, 1).map(drop), dev.trim().map(drop)];
            *seen.lock() = Some((refused, dev.stats()));
            Ok(())
        }));
        assert_eq!(error.to_string(), "enough");
        let (refused, stats) = seen.into_inner().unwrap();
        for refused in refused {
            let error = failure(refused);
            assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
        }
        assert!(stats.in_use >= 5 * MIB as u64, "it was not parked: {stats}");
        assert_at_rest(&pool);
    }
}
