//! Stream order: memory is used again when every stream that has touched it is ordered before, and no sooner; who need
//! not wait does not. (DALI `async_pool_test.cu`, RMM `DeletedStream`, PyTorch `test_record_stream*`; rmm#850, #2251.)

use crate::{
    on_both,
    rig::{
        Gate, KIB, MIB, Rng, assert_at_rest, bytes_of, check_books, driver_calls, limited, on_backings, on_limited,
        on_limited_pools, on_pools,
    },
    support::{all_are, ramp, slow_add},
};
use gpu_pool::{Device, DeviceBuffer, Error, Stream};

on_both! {
    // CUDA: cuEventSynchronize.
    1: fn the_host_waits_for_an_event_and_not_for_later_work(gpus) {
        let (pool, other) = (gpus.pool(1), gpus.pool(1));
        let foreign = other.run(|dev, _| dev.record()).unwrap().remove(0);
        pool.run(|dev, _| {
            let (gate, mut x) = (Gate::new(gpus), dev.upload(&ramp(MIB, 3))?);
            let copied = dev.copy(&dev.upload(&ramp(MIB, 4))?, &mut x).and_then(|()| dev.record())?;
            gate.hold(dev, &mut x)?;
            dev.wait_on_host(&copied)?;
            assert!(copied.is_complete()?);
            assert!(matches!(dev.wait_on_host(&foreign), Err(Error::WrongPool { op: "wait_on_host", .. })));
            gate.open();
            dev.synchronize()
        })
        .unwrap();
    }

    // DALI: SingleStreamReuse.
    1: fn a_stream_gets_its_own_block_back_at_once(gpus) {
        on_pools(gpus, 1, |pool, _| {
            pool.run(|dev, _| {
                for bytes in [256, 10 * KIB, 128 * KIB, MIB, 20 * MIB] {
                    let gate = Gate::new(gpus);
                    let mut x = dev.zeros::<u32>(bytes / 4)?;
                    let address = x.address();
                    // Its work is under way all the time.
                    gate.hold(dev, &mut x)?;
                    drop(x);
                    let before = dev.stats();
                    for _ in 0..100 {
                        let again = dev.zeros::<u32>(bytes / 4)?;
                        assert_eq!(again.address(), address, "{bytes}");
                    }
                    let after = dev.stats();
                    assert_eq!((after.driver_calls, after.waits), (before.driver_calls, before.waits), "{bytes}");
                    gate.open();
                    dev.synchronize()?;
                }
                Ok(())
            })
            .unwrap();
            assert_at_rest(pool);
        });
    }

    // DALI: TwoStream. A block that a stream may still use is not given to another while there is one that nobody uses.
    1: fn two_streams_do_not_share_while_one_is_busy(gpus) {
        on_backings(|backing| {
            let pool = gpus.builder(1).memory_backing(backing).memory_reserve(64 * MIB as u64).build().unwrap();
            pool.run(|dev, _| {
                for bytes in [256, 10 * KIB, 128 * KIB, MIB, 5 * MIB] {
                    let gate = Gate::new(gpus);
                    let (a, b) = (dev.stream()?, dev.stream()?);
                    let (a, b) = (dev.on(&a), dev.on(&b));
                    let mut x = a.zeros::<u32>(bytes / 4)?;
                    let address = x.address();
                    gate.hold(&a, &mut x)?;
                    drop(x);
                    let before = dev.stats();
                    let y = b.upload(&ramp(bytes / 4, 1))?;
                    // It comes to its end although the other is busy.
                    assert_eq!(b.download(&y)?, ramp(bytes / 4, 1));
                    if gate.holds() {
                        assert_ne!(y.address(), address, "{bytes}");
                        assert_eq!(dev.stats().waits, before.waits, "{bytes}");
                    }
                    gate.open();
                }
                Ok(())
            })
            .unwrap();
            assert_at_rest(&pool);
        });
    }

    // The other way round: where there is nothing else it is shared, after one wait on the device; none if it is known
    // to come after already, or is over.
    1: fn a_steal_costs_one_wait_at_most(gpus) {
        on_limited(gpus, 6 * MIB, |dev| {
            let (a, b) = (dev.stream()?, dev.stream()?);
            let (a, b) = (dev.on(&a), dev.on(&b));
            let gate = Gate::new(gpus);
            let mut x = a.zeros::<u32>(MIB)?;
            gate.hold(&a, &mut x)?;
            slow_add(&a, &mut x, 7, 0)?;
            drop(x);
            let before = dev.stats();
            // Queued behind the gate, without a wait of the host.
            let mut y = b.zeros::<u32>(MIB)?;
            let after = dev.stats();
            if gate.holds() {
                assert_eq!((after.steals - before.steals, after.waits - before.waits), (1, 1), "{before}\n{after}");
            }
            gate.open();
            b.fill(&mut y, 3)?;
            assert!(all_are(&b.download(&y)?, 3));
            drop(y);
            // B comes after A now, and A has done nothing since: no wait for what A used, and none for its own.
            let before = dev.stats();
            for _ in 0..5 {
                drop(b.zeros::<u32>(5 * MIB / 4)?);
            }
            assert_eq!(dev.stats().waits, before.waits);
            Ok(())
        });
    }

    // The same where the ladder brings memory that lies partly in what another stream uses.
    1: fn a_wait_that_the_ladder_brings_is_counted(gpus) {
        let pool = limited(gpus, 1, gpu_pool::memory::BackingChoice::Vmm, 6 * MIB).build().unwrap();
        pool.run(|dev, _| {
            let (a, b) = (dev.stream()?, dev.stream()?);
            let (a, b) = (dev.on(&a), dev.on(&b));
            let gate = Gate::new(gpus);
            let mut x = a.zeros::<u32>(MIB)?;
            gate.hold(&a, &mut x)?;
            drop(x);
            let before = dev.stats();
            let y = bytes_of(&b, 5 * MIB)?;
            let after = dev.stats();
            if gate.holds() {
                assert_eq!((after.steals - before.steals, after.waits - before.waits), (1, 1), "{before}\n{after}");
            }
            gate.open();
            drop(y);
            Ok(())
        })
        .unwrap();
    }

    // https://github.com/rapidsai/rmm/issues/850 (open): its multi_stream_allocations benchmark is slower when the pool
    // was not warmed up, since streams take each other's blocks and wait. Waits are counted here, not time.
    1: fn unprewarmed_equals_prewarmed(gpus) {
        on_backings(|backing| {
            for bytes in [8, 40 * KIB, MIB] {
                let waits = [false, true].map(|warm| {
                    let builder = gpus.builder(1).memory_backing(backing);
                    let pool = if warm { builder.memory_reserve(32 * MIB as u64) } else { builder }.build().unwrap();
                    let waits = pool.run(|dev, _| {
                        let gates = [(); 4].map(|()| Gate::new(gpus));
                        let streams = (0..4).map(|_| dev.stream()).collect::<Result<Vec<_>, _>>()?;
                        let before = dev.stats().waits;
                        for _ in 0..4 {
                            for (stream, gate) in streams.iter().zip(&gates) {
                                let on = dev.on(stream);
                                let mut x = on.zeros::<u32>(bytes / 4)?;
                                gate.hold(&on, &mut x)?;
                            }
                        }
                        let waits = dev.stats().waits - before;
                        gates.iter().for_each(Gate::open);
                        Ok(waits)
                    });
                    waits.unwrap()[0]
                });
                assert_eq!(waits, [0, 0], "{bytes} bytes: [cold, warm]");
            }
        });
    }

    // https://github.com/rapidsai/rmm/issues/2251: a stream is destroyed, the driver uses its handle again for the next
    // one, and the pool takes the two for one. RMM: DeletedStream.
    1: fn destroyed_stream_handle_reused(gpus) {
        on_limited(gpus, 16 * MIB, |dev| {
            for round in 0..40u32 {
                let gate = Gate::new(gpus);
                let old = dev.stream()?;
                let mut out = dev.zeros::<u32>(MIB)?;
                {
                    let on = dev.on(&old);
                    let x = on.upload(&vec![round; MIB])?;
                    gate.hold(&on, &mut out)?;
                    // Read late, and freed, and then the stream goes.
                    on.copy(&x, &mut out)?;
                }
                drop(old);
                let new = dev.stream()?;
                let on = dev.on(&new);
                gate.open();
                let y = on.upload(&vec![u32::MAX; 2 * MIB])?;
                assert!(all_are(&dev.download(&out)?, round), "round {round}");
                assert!(all_are(&on.download(&y)?, u32::MAX), "round {round}");
            }
            Ok(())
        });
    }

    // PyTorch: test_record_stream_on_shifted_view. A part of it is used on another stream, and that part is what
    // counts.
    1: fn a_part_that_another_stream_uses(gpus) {
        on_limited(gpus, 12 * MIB, |dev| {
            let gate = Gate::new(gpus);
            let side = dev.stream()?;
            let side = dev.on(&side);
            let x = dev.upload(&vec![1u32; 2 * MIB])?;
            let mut out = dev.zeros::<u32>(1000)?;
            dev.synchronize()?;
            let base = x.address();
            // The side stream reads a thousand elements in the middle, late.
            let mut busy = dev.zeros::<u32>(1)?;
            gate.hold(&side, &mut busy)?;
            side.copy(&x.slice(MIB..MIB + 1000), &mut out)?;
            drop(x);
            // The first half is nobody's; the checker watches that the second is waited for.
            let first = dev.upload(&vec![2u32; MIB - 4096])?;
            if gate.holds() {
                assert_eq!(dev.download(&first)?[0], 2, "it comes to its end although the side stream is busy");
            }
            gate.open();
            let second = dev.upload(&vec![3u32; MIB])?;
            assert!(all_are(&dev.download(&second)?, 3));
            assert_eq!(dev.download(&out)?, [1; 1000]);
            assert!(first.address() >= base || second.address() >= base);
            Ok(())
        });
    }

    // PyTorch: test_caching_allocator_record_stream_oom: "allocations delayed by a record_stream call should still be
    // freed on an out-of-memory error".
    1: fn memory_that_side_streams_use_is_no_reason_for_an_oom(gpus) {
        on_limited(gpus, 36 * MIB, |dev| {
            let side = dev.stream()?;
            let mut sum = dev.on(&side).zeros::<u32>(2 * MIB)?;
            for round in 0..30u32 {
                // Each is held by the side stream for a while. Together they are many times the limit.
                let x = dev.upload(&vec![round; 2 * MIB])?;
                slow_add(&dev.on(&side), &mut sum.slice_mut(..1), 0, 2000)?;
                dev.on(&side).copy(&x, &mut sum)?;
                if round % 10 == 0 {
                    check_books(dev);
                }
            }
            assert!(all_are(&dev.download(&sum)?, 29));
            Ok(())
        });
    }

    // DALI: MultiStreamRandom, CrossStream, CrossStreamWithHogs, SingleStreamRandom: every block is filled with its
    // number on one stream, checked on another, freed while work is queued; hogs make streams late.
    1: fn cross_stream_with_hogs(gpus) {
        on_backings(|backing| {
            for (streams, hogs) in [(1, false), (4, false), (4, true)] {
                let pool = limited(gpus, 1, backing, 24 * MIB).build().unwrap();
                pool.run(|dev, _| cross_stream(dev, streams, hogs)).unwrap();
                assert_at_rest(&pool);
            }
        });
    }

    // The same on several devices at once, which also read each other's blocks.
    2: fn cross_stream_with_hogs_of_peers(gpus) {
        let n = gpus.up_to(3);
        on_limited_pools(gpus, n, 32 * MIB, |pool, _| {
            pool.run(|dev, _| {
                let streams = (0..3).map(|_| dev.stream()).collect::<Result<Vec<_>, _>>()?;
                let mut rng = Rng(7 + dev.rank() as u64);
                for round in 0..25u32 {
                    let number = round * 16 + dev.rank() as u32;
                    let own = dev.on(&streams[rng.below(3)]);
                    let lent = own.upload(&vec![number; 1 + rng.below(MIB / 2)])?;
                    let lent = dev.exchange(std::sync::Arc::new(lent))?;
                    let from = (dev.rank() + 1) % n;
                    let on = dev.on(&streams[rng.below(3)]);
                    hog(&on, &mut rng)?;
                    let copy = lent[from].copy_to(&on)?;
                    // The lender's block goes home from whichever thread is last, and is used again while this copy is
                    // late.
                    drop(lent);
                    let other = dev.on(&streams[rng.below(3)]);
                    let _again = other.upload(&vec![u32::MAX; copy.len()])?;
                    let found = on.download(&copy)?;
                    assert!(found.iter().all(|&x| x == round * 16 + from as u32), "round {round}");
                }
                Ok(())
            })
            .unwrap();
            assert_at_rest(pool);
        });
    }

    // pytorch#71616 among blocks that several streams have used: the one that was freed first waits for a stream that
    // runs for long, those behind it for none.
    1: fn blocks_of_several_streams_do_not_queue_behind_one_of_them(gpus) {
        on_backings(|backing| {
            for bytes in [64 * KIB, 512 * KIB] {
                let pool = limited(gpus, 1, backing, 4 * MIB).build().unwrap();
                pool.run(|dev, _| {
                    let (gate, soon) = (Gate::new(gpus), Gate::new(gpus));
                    let streams = [dev.stream()?, dev.stream()?, dev.stream()?];
                    let [long, short, other] = streams.each_ref().map(|stream| dev.on(stream));
                    let _busy = [soon.hold_stream(&short)?, soon.hold_stream(&other)?];
                    // All of the memory, each block used by two streams that are busy; the first one by the one that
                    // will be longest.
                    let mut all: Vec<DeviceBuffer<u8>> = Vec::new();
                    while let Ok(x) = bytes_of(dev, bytes) {
                        all.push(x);
                    }
                    let mut all = all.into_iter();
                    let first = all.next();
                    drop(first);
                    let mut first = dev.zeros::<u32>(bytes / 4)?;
                    gate.hold(&long, &mut first.slice_mut(..1))?;
                    short.fill(&mut first.slice_mut(1..2), 1)?;
                    let mut all: Vec<_> = all.collect();
                    for x in &mut all {
                        short.fill(&mut x.slice_mut(..1), 1)?;
                        other.fill(&mut x.slice_mut(1..2), 1)?;
                    }
                    let count = all.len();
                    drop(first);
                    all.into_iter().for_each(drop);
                    soon.open();
                    short.synchronize()?;
                    other.synchronize()?;
                    let fourth = dev.stream()?;
                    let fourth = dev.on(&fourth);
                    let mut again = Vec::new();
                    for i in 0..count {
                        again.push(fourth.zeros::<u32>(bytes / 4)?);
                        if gate.holds() {
                            // It comes to its end.
                            fourth.synchronize().map_err(|error| Error::custom(format!("{i} of {count}: {error}")))?;
                        }
                    }
                    gate.open();
                    Ok(())
                })
                .unwrap_or_else(|error| panic!("{bytes} bytes: {error}"));
                assert_at_rest(&pool);
            }
        });
    }

    // What the allocator itself does in the steady state of several streams: no driver call, no wait.
    1: fn streams_in_turn_need_no_driver_call(gpus) {
        on_backings(|backing| {
            // A small pool: one that may grow does so rather than let streams wait, as far as the host runs ahead.
            let pool = limited(gpus, 1, backing, 16 * MIB).build().unwrap();
            pool.run(|dev, _| {
                let streams = (0..4).map(|_| dev.stream()).collect::<Result<Vec<_>, _>>()?;
                let work = || {
                    for stream in &streams {
                        let on = dev.on(stream);
                        for bytes in [8, 4 * KIB, 100 * KIB, MIB] {
                            let mut x = on.zeros::<u32>(bytes / 4)?;
                            on.fill(&mut x, 1)?;
                        }
                        // Else it would depend on time how much is pending.
                        on.synchronize()?;
                    }
                    Ok::<_, Error>(())
                };
                for _ in 0..10 {
                    work()?;
                }
                dev.synchronize()?;
                let before = dev.stats();
                for _ in 0..100 {
                    work()?;
                }
                let after = dev.stats();
                assert_eq!((before.driver_calls, before.ladder), (after.driver_calls, after.ladder), "{after}");
                Ok(())
            })
            .unwrap();
        });
    }

    // Streams that come and go, with blocks of all sizes at rest in their lists: nothing is lost with them.
    1: fn what_streams_leave_behind_is_used_again(gpus) {
        on_limited(gpus, 8 * MIB, |dev| {
            for round in 0..100 {
                let stream = dev.stream()?;
                let on = dev.on(&stream);
                let kept: Vec<_> =
                    (0..20).map(|i| on.zeros::<u8>((round % 7 + 1) * 1000 * i)).collect::<Result<_, _>>()?;
                drop(kept);
                let whole = bytes_of(&on, 5 * MIB)?;
                drop(whole);
            }
            let calls = driver_calls(dev);
            let _ = bytes_of(dev, 6 * MIB)?;
            assert!(driver_calls(dev) <= calls + 20);
            Ok(())
        });
    }
}

/// Makes the stream late, now and then.
fn hog(dev: &Device, rng: &mut Rng) -> Result<(), Error> {
    if rng.chance(3) {
        let mut x = dev.zeros::<u32>(1)?;
        slow_add(dev, &mut x, 1, 1500)?;
    }
    Ok(())
}

fn cross_stream(dev: &Device, streams: usize, hogs: bool) -> Result<(), Error> {
    let mut rng = Rng(streams as u64 + u64::from(hogs));
    let streams: Vec<Stream> = (0..streams).map(|_| dev.stream()).collect::<Result<_, _>>()?;
    let mut live: Vec<(DeviceBuffer<u32>, u32)> = Vec::new();
    for number in 0..400 {
        let on = dev.on(&streams[rng.below(streams.len())]);
        if hogs {
            hog(&on, &mut rng)?;
        }
        let room = 16 * MIB - live.iter().map(|(x, _)| 4 * x.len()).sum::<usize>();
        let size = rng.size(21);
        if size < room && (live.is_empty() || rng.chance(2)) {
            let mut x = on.zeros::<u32>(size / 4)?;
            on.fill(&mut x, number)?;
            live.push((x, number));
        } else if !live.is_empty() {
            let (mut x, number) = live.swap_remove(rng.below(live.len()));
            match rng.below(3) {
                0 => assert!(all_are(&on.download(&x)?, number), "block {number} was written to"),
                // Freed while this is queued.
                1 => on.fill(&mut x, u32::MAX)?,
                _ => {}
            }
        }
        if number % 50 == 0 {
            check_books(dev);
        }
    }
    for (x, number) in live {
        assert!(all_are(&dev.download(&x)?, number), "block {number} was written to");
    }
    Ok(())
}
