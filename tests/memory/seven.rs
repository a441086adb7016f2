//! Seven behaviours that have bitten the users of other pools, and that have cost them days each. What the first pool
//! of this crate (commit 14761c9) makes of each of these is in the README.

use crate::{
    on_both,
    rig::{
        BACKINGS, Gate, KIB, MIB, assert_at_rest, assert_empty, bytes_of, check_books, limited, on_backings,
        on_limited_pools, span,
    },
    support::{all_are, bytes, slow_add, until},
};
use gpu_pool::{DeviceBuffer, Error, memory::BackingChoice};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::*},
        mpsc,
    },
    thread,
    time::Duration,
};

on_both! {
    // https://github.com/JuliaGPU/CUDA.jl/issues/731: memory of device 0 that is freed while device 1 is current was
    // looked up in device 1's pool. Whoever frees it, it goes home, and is as good as new there.
    2: fn freed_with_another_device_current_731(gpus) {
        on_backings(|backing| {
            let pool = &limited(gpus, 2, backing, 10 * MIB).memory_reserve(10 * MIB as u64).build().unwrap();
            let before = pool.run(|dev, _| Ok(dev.stats().remote_frees)).unwrap();
            let quarters = pool.run(|dev, _| (0..16).map(|_| bytes_of(dev, MIB / 2)).collect::<Result<Vec<_>, _>>());
            let mut quarters = quarters.unwrap();
            // Eight of ten MiB of each device. One block in four is kept, the others are freed: by the other device, by
            // a thread that has no device, and by one that belongs to another pool.
            let other = gpus.pool(2);
            let mut kept = Vec::new();
            let mut freed: Vec<Vec<_>> = (0..3).map(|_| Vec::new()).collect();
            for device in &mut quarters {
                for (i, buffer) in device.drain(..).enumerate() {
                    if i % 4 == 0 { kept.push(buffer) } else { freed[i % 4 - 1].push(buffer) }
                }
            }
            let [by_peer, by_nobody, by_stranger]: [_; 3] = freed.try_into().unwrap();
            let halves: Vec<Mutex<Vec<DeviceBuffer<u8>>>> = (0..2).map(|_| Mutex::new(Vec::new())).collect();
            by_peer.into_iter().for_each(|buffer| halves[1 - buffer.device()].lock().push(buffer));
            pool.run(|dev, _| {
                halves[dev.index()].lock().clear();
                Ok(())
            })
            .unwrap();
            thread::spawn(move || drop(by_nobody)).join().unwrap();
            let by_stranger = Mutex::new(by_stranger);
            other.run(|_, _| { by_stranger.lock().clear(); Ok(()) }).unwrap();
            pool.run(|dev, _| {
                // Three quarters of each device are free again, in pieces of one and a half MiB.
                let joined = (0..4).map(|_| bytes_of(dev, 3 * MIB / 2)).collect::<Result<Vec<_>, _>>()?;
                let stats = dev.stats();
                assert_eq!((stats.in_use, stats.remote_frees - before[dev.rank()]), (8 * MIB as u64, 12), "{stats}");
                check_books(dev);
                drop(joined);
                Ok(())
            })
            .unwrap();
            drop(kept);
            assert_at_rest(pool);
        });
    }

    // https://github.com/JuliaGPU/CUDA.jl/issues/1522 (open): threads cannot free each other's objects, so they run out
    // of memory. Here each device frees what the other has made, and keeps some small result of every round.
    2: fn threads_free_each_others_objects_1522(gpus) {
        on_limited_pools(gpus, 2, 8 * MIB, |pool, _| {
            pool.run(|dev, _| {
                let mut kept = Vec::new();
                for round in 0..60 {
                    // Of another size every time, five of eight MiB.
                    let bytes = (3 + round % 29) * 4 * KIB + 256 * round;
                    let made: Vec<_> = (0..5 * MIB / bytes.next_multiple_of(16 * KIB))
                        .map(|_| bytes_of(dev, bytes))
                        .collect::<Result<_, _>>()?;
                    kept.push(bytes_of(dev, 300 * (1 + round % 40))?);
                    let made = dev.exchange(Arc::new(Mutex::new(made)))?;
                    made[1 - dev.rank()].lock().clear();
                    dev.barrier()?;
                }
                drop(kept);
                assert_empty(dev)
            })
            .unwrap();
        });
    }

    // The same: the peer that freed it has parked, or is stuck in its closure, and hands nothing over any more.
    2: fn a_peer_that_is_stuck_holds_nothing_back_1522(gpus) {
        on_limited_pools(gpus, 2, 16 * MIB, |pool, _| {
            for parked in [false, true] {
                let stuck = AtomicBool::new(!parked);
                let (to, from) = mpsc::channel::<DeviceBuffer<u8>>();
                let from = Mutex::new(from);
                pool.run(|dev, _| {
                    let to = to.clone();
                    if dev.rank() == 0 {
                        for _ in 0..24 {
                            to.send(bytes_of(dev, 600 * KIB)?).map_err(Error::custom)?;
                        }
                        // The peer has dropped them all; it is in its closure still, or its thread sleeps.
                        dev.barrier()?;
                        let whole = bytes_of(dev, 14 * MIB)?;
                        stuck.store(false, Release);
                        drop(whole);
                        return assert_empty(dev);
                    }
                    from.lock().iter().take(24).for_each(drop);
                    dev.barrier()?;
                    // Not a call of the library, so nothing of it gets to run on this thread.
                    until("the owner is served", || !stuck.load(Acquire))
                })
                .unwrap();
            }
        });
    }

    // https://github.com/pytorch/pytorch/issues/196257: memory goes back to the driver only after the last write that a
    // peer has queued to it.
    2: fn released_only_after_a_peers_last_write_196257(gpus) {
        on_backings(|backing| {
            let pool = limited(gpus, 2, backing, 12 * MIB).build().unwrap();
            for round in 0..3u8 {
                let gate = Gate::new(gpus);
                let (target, small) = pool
                    .on(&[0]).run(|dev, _| {
                        let (target, spare) = (dev.zeros::<u8>(6 * MIB)?, dev.zeros::<u8>(4 * MIB)?);
                        let small = bytes_of(dev, 300)?;
                        dev.synchronize()?;
                        drop(spare);
                        Ok((target, small))
                    })
                    .unwrap()
                    .remove(0);
                let target = Mutex::new(Some(target));
                pool.run(|dev, _| {
                    if dev.rank() == 1 {
                        let from = dev.upload(&vec![round; 6 * MIB])?;
                        let _busy = gate.hold_stream(dev)?;
                        // Queued, and not begun; then the buffer goes.
                        dev.copy(&from, target.lock().as_mut().unwrap())?;
                        drop(target.lock().take());
                        dev.barrier()?;
                        return dev.barrier();
                    }
                    dev.barrier()?;
                    // Nobody waits for the peer as long as there is memory that is over.
                    let other = dev.upload(&bytes(3 * MIB / 2, 3))?;
                    assert!(dev.download(&other)? == bytes(3 * MIB / 2, 3));
                    drop(other);
                    // On request: what the peer is going to write to stays.
                    let before = dev.stats();
                    dev.trim()?;
                    if gate.holds() {
                        let after = dev.stats();
                        assert!(
                            after.pending >= 6 * MIB as u64 && after.reserved >= 6 * MIB as u64,
                            "{before}\n{after}"
                        );
                    }
                    check_books(dev);
                    // Under pressure: it is waited for, then it goes. (Another thread lets the peer go on: this one
                    // waits.)
                    thread::scope(|s| {
                        s.spawn(|| {
                            thread::sleep(Duration::from_millis(30));
                            gate.open();
                        });
                        let data = bytes(9 * MIB + MIB / 2, round);
                        let whole = dev.upload(&data)?;
                        check_books(dev);
                        assert!(dev.download(&whole)? == data, "a late write of the peer has landed in it");
                        Ok::<_, Error>(())
                    })?;
                    dev.barrier()
                })
                .unwrap();
                drop(small);
                pool.trim().unwrap();
            }
            // A race would have been reported where the memory went back.
            assert_at_rest(&pool);
            pool.close().unwrap();
        });
    }

    // https://github.com/pytorch/pytorch/issues/196258: unmapping waited for the null stream of whatever device was
    // current.
    2: fn trimmed_with_another_device_current_196258(gpus) {
        if gpus.real() < 2 {
            return println!("skipped: there is no other GPU to make current");
        }
        let n = gpus.up_to(3);
        on_backings(|backing| {
            let pool = limited(gpus, n, backing, 16 * MIB).build().unwrap();
            for round in 0..3u8 {
                pool.run(|dev, _| {
                    let gate = Gate::new(gpus);
                    let next = (dev.rank() + 1) % n % gpus.real();
                    let side = dev.stream()?;
                    let mut x = dev.upload(&vec![0u32; MIB])?;
                    let idle = bytes_of(dev, 8 * MIB)?;
                    let keep = bytes_of(dev, 256)?;
                    dev.barrier()?;
                    make_current(dev, next)?;
                    gate.hold(&dev.on(&side), &mut x)?;
                    slow_add(&dev.on(&side), &mut x, 1, 1000)?;
                    drop((x, idle));
                    make_current(dev, next)?;
                    // What the side stream works on is left alone while there is something else.
                    let other = dev.upload(&vec![round; 3 * MIB])?;
                    make_current(dev, next)?;
                    assert!(all_are(&dev.download(&other)?, round));
                    drop(other);
                    dev.synchronize()?;
                    make_current(dev, next)?;
                    let trimmed = dev.trim()?;
                    if gate.holds() {
                        // All of what is idle has gone, nothing of what the side stream works on.
                        let stats = dev.stats();
                        assert!(trimmed >= 6 * MIB as u64, "{trimmed}, {stats}");
                        assert!(stats.pending >= 4 * MIB as u64, "{trimmed}, {stats}");
                    }
                    gate.open();
                    make_current(dev, next)?;
                    // All of it is needed: what the side stream did is waited for under the right context.
                    let data = vec![round; 13 * MIB];
                    let whole = dev.upload(&data)?;
                    make_current(dev, next)?;
                    assert!(dev.download(&whole)? == data);
                    drop((whole, keep));
                    make_current(dev, next)?;
                    dev.synchronize()?;
                    dev.trim()?;
                    assert_eq!(dev.stats().reserved, 0);
                    assert_empty(dev)
                })
                .unwrap();
            }
            pool.close().unwrap();
        });
    }

    // https://github.com/pytorch/pytorch/issues/189504: out of memory, although a block that fits had come back during
    // the wait that was to bring one.
    1: fn oom_after_sync_researches_pool_189504(gpus) {
        on_limited_pools(gpus, 1, 14 * MIB, |pool, _| {
            for _ in 0..3 {
                let gate = Gate::new(gpus);
                let fits = pool.run(|dev, _| bytes_of(dev, 8 * MIB)).unwrap().remove(0);
                let asked = AtomicBool::new(false);
                thread::scope(|s| {
                    s.spawn(|| {
                        until("the device asks for memory", || asked.load(Acquire)).unwrap();
                        // By now it waits, most likely.
                        thread::sleep(Duration::from_millis(50));
                        drop(fits);
                        gate.open();
                    });
                    pool.run(|dev, _| {
                        // Small, pending, and of no use; but it is what there is to wait for.
                        let mut pending = dev.zeros::<u32>(MIB)?;
                        gate.hold(dev, &mut pending)?;
                        drop(pending);
                        let side = dev.stream()?;
                        let side = dev.on(&side);
                        asked.store(true, Release);
                        let large = side.upload(&vec![3u8; 8 * MIB])?;
                        assert!(all_are(&side.download(&large)?, 3));
                        Ok(())
                    })
                    .unwrap();
                });
                assert_at_rest(pool);
            }
        });
    }

    // https://github.com/pytorch/pytorch/issues/71616: one stream that runs for long, at the head of the queue of
    // events, kept the blocks of all others from being used again.
    1: fn a_long_stream_does_not_block_others_71616(gpus) {
        on_limited_pools(gpus, 1, 64 * MIB, |pool, _| {
            pool.run(|dev, _| {
                let gate = Gate::new(gpus);
                let (long, short) = (dev.stream()?, dev.stream()?);
                let (long, short) = (dev.on(&long), dev.on(&short));
                // Freed first, and busy for long: large, and small.
                let (mut a, mut b) = (long.zeros::<u32>(2 * MIB)?, long.zeros::<u32>(10 * KIB)?);
                // Freed by another stream, and over; a little larger, so that a search by size comes to the others
                // first.
                let (c, d) = (short.zeros::<u8>(10 * MIB)?, short.zeros::<u8>(43 * KIB)?);
                short.synchronize()?;
                gate.hold(&long, &mut a)?;
                gate.hold(&long, &mut b)?;
                drop((a, b, c, d));
                let before = dev.stats();
                for round in 0..50u8 {
                    let x = short.upload(&vec![round; 8 * MIB])?;
                    let y = short.upload(&vec![round; 40 * KIB])?;
                    // These come to their end while the long one is under way.
                    assert!(all_are(&short.download(&x)?, round));
                    assert!(all_are(&short.download(&y)?, round));
                }
                let after = dev.stats();
                if gate.holds() {
                    assert_eq!((after.reserved, after.waits), (before.reserved, before.waits), "{before}\n{after}");
                    assert!(after.pending >= 8 * MIB as u64, "{after}");
                }
                gate.open();
                assert_empty(dev)
            })
            .unwrap();
        });
    }

    // https://github.com/JuliaGPU/CUDA.jl/issues/3112 (NVIDIA's bug 6098762): copies between devices into a pool's
    // memory silently wrote nothing once access rights had been set. Every byte, every pair, every chunk, every
    // backing.
    2: fn peer_copy_really_writes_on_each_backing_3112(gpus) {
        on_backings(|backing| {
            let n = gpus.up_to(3);
            // In a window there is room for all of them only if some lie over the edge of two mappings, each with its
            // own rights.
            let limit = if backing == BackingChoice::Vmm { 34 * MIB } else { 64 * MIB };
            let pool = limited(gpus, n, backing, limit).build().unwrap();
            for round in 0..2u8 {
                let sizes = [700 * KIB; 40].into_iter().chain([256, 5 * KIB, 3 * MIB + 5]);
                let sizes: Vec<usize> = sizes.collect();
                let made = pool.run(|dev, _| {
                    let made = sizes.iter().map(|&len| dev.zeros::<u8>(len)).collect::<Result<Vec<_>, _>>()?;
                    let edges: Vec<u64> = dev.memory_snapshot().chunks.iter().map(|chunk| chunk.address).collect();
                    let over = |x: &&DeviceBuffer<u8>| edges.iter().any(|&at| span(x).start < at && at < span(x).end);
                    assert_eq!(made.iter().filter(over).count() > 0, backing == BackingChoice::Vmm);
                    Ok(made)
                });
                let made = made.unwrap();
                let made: Vec<Mutex<Vec<DeviceBuffer<u8>>>> = made.into_iter().map(Mutex::new).collect();
                for shift in 1..n {
                    pool.run(|dev, _| {
                        let to = (dev.rank() + shift) % n;
                        let seed = round ^ (16 * shift as u8 + dev.rank() as u8);
                        let from = dev.upload(&bytes(3 * MIB + 5, seed))?;
                        for target in made[to].lock().iter_mut() {
                            dev.copy(&from.slice(..target.len()), target)?;
                        }
                        Ok(())
                    })
                    .unwrap();
                    pool.run(|dev, _| {
                        let from = (dev.rank() + n - shift) % n;
                        let expected = bytes(3 * MIB + 5, round ^ (16 * shift as u8 + from as u8));
                        for (i, target) in made[dev.rank()].lock().iter().enumerate() {
                            let found = dev.download(target)?;
                            assert!(
                                found == expected[..found.len()],
                                "{from} wrote nothing to block {i} of {}",
                                dev.rank()
                            );
                        }
                        Ok(())
                    })
                    .unwrap();
                }
                drop(made);
                pool.run(|dev, _| {
                    dev.trim()?;
                    assert_empty(dev)
                })
                .unwrap();
            }
        });
    }

    // The same: memory that takes copies and does not write them is found out when the pool is built, and not used.
    2: fn a_backing_that_lies_is_refused_3112(gpus) {
        for lie in [Injected::Drop, Injected::Corrupt] {
            for liar in 0..2 {
                let plan = FaultPlan::new().on(FaultRule::new(lie).device(liar).op(FaultOp::VmMap));
                let pool = gpus.builder(2).faults(plan.clone()).build().unwrap();
                assert!(!plan.fired().is_empty(), "nobody has tried the window");
                let (mut to, data) = (pool.run(|dev, _| dev.zeros::<u8>(5 * MIB)).unwrap(), bytes(5 * MIB, 77));
                let to: Vec<_> = to.drain(..).map(Mutex::new).collect();
                pool.run(|dev, _| {
                    let from = dev.upload(&data)?;
                    let within = from.copy_to(dev)?;
                    assert!(dev.download(&within)? == data, "{lie}: a copy within device {}", dev.rank());
                    dev.copy(&from, &mut *to[1 - dev.rank()].lock())?;
                    dev.barrier()?;
                    // (The copies are ordered before whatever is done to the buffers next.)
                    assert!(dev.download(&*to[dev.rank()].lock())? == data, "{lie}: a copy to device {}", dev.rank());
                    check_books(dev);
                    Ok(())
                })
                .unwrap();
                drop(to);
                pool.close().unwrap();
            }
        }
    }
}

/// The backings that the tests above go through are all that there are. Who adds one adds it there.
#[test]
fn all_backings_are_tried() {
    for backing in BACKINGS {
        match backing {
            BackingChoice::Vmm | BackingChoice::Malloc | BackingChoice::Auto => {}
        }
    }
}

/// Lets another device's context be the current one of this thread, as a user's own CUDA code may.
fn make_current(dev: &gpu_pool::Device, other: usize) -> Result<(), Error> {
    #[cfg(feature = "cuda")]
    if dev.cuda().is_ok() {
        let context = cudarc::driver::CudaContext::new(other).map_err(Error::custom)?;
        return context.bind_to_thread().map_err(Error::custom);
    }
    // Software GPUs have no current device.
    let _ = (dev, other);
    Ok(())
}
