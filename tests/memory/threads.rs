//! Only the owner allocates; anyone may free: on other devices' threads, on threads of the application, on threads that
//! are ending, before and after the owner has moved on. (RMM `mr_ref_test_mt.hpp`, DALI, UMF, mimalloc `test-stress`,
//! snmalloc `msgpass`; CUDA.jl#731, #737, #1522, #2216; FBGEMM#530: free on a thread that has no context.)

use crate::{
    on_both,
    rig::{
        KIB, MIB, Rng, assert_at_rest, assert_empty, bytes_of, check_books, limited, on_backings, on_limited_pools,
        on_pools,
    },
    support::until,
};
use gpu_pool::{DeviceBuffer, Error};
use parking_lot::Mutex;
use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::*},
        mpsc::{channel, sync_channel},
    },
    thread,
};

on_both! {
    // RMM: AllocFreeDifferentThreads{DefaultStream, PerThreadDefaultStream, SameStream, DifferentStream},
    // PerThreadToStreamDealloc.
    2: fn freed_on_every_other_thread_in_random_order(gpus) {
        let n = gpus.up_to(4);
        on_pools(gpus, n, |pool, _| {
            for round in 0..3u64 {
                let made = pool
                    .run(|dev, _| {
                        let side = dev.stream()?;
                        let mut rng = Rng(100 * round + dev.index() as u64);
                        (0..120)
                            .map(|i| {
                                let on = dev.on(&side);
                                let dev = if i % 2 == 0 { dev } else { &*on };
                                dev.upload(&vec![i as u8; rng.size(19)])
                            })
                            .collect::<Result<Vec<_>, _>>()
                    })
                    .unwrap();
                // Shuffled over as many threads as there are devices, and as many of the application.
                let mut rng = Rng(round);
                let mut hands: Vec<Vec<DeviceBuffer<u8>>> = (0..2 * n).map(|_| Vec::new()).collect();
                let mut all: Vec<_> = made.into_iter().flatten().collect();
                while !all.is_empty() {
                    let buffer = all.swap_remove(rng.below(all.len()));
                    hands[rng.below(2 * n)].push(buffer);
                }
                let hands: Vec<_> = hands.into_iter().map(|hand| Mutex::new(Some(hand))).collect();
                thread::scope(|s| {
                    for hand in &hands[n..] {
                        s.spawn(|| drop(hand.lock().take()));
                    }
                    pool.run(|dev, _| {
                        drop(hands[dev.index()].lock().take());
                        // They allocate meanwhile.
                        for i in 0..50 {
                            assert_eq!(dev.download(&dev.upload(&vec![i as u8; 5000])?)?, vec![i as u8; 5000]);
                        }
                        Ok(())
                    })
                    .unwrap();
                });
            }
            let frees = pool.run(|dev, _| {
                assert_empty(dev)?;
                Ok(dev.stats().remote_frees)
            });
            assert!(frees.unwrap().iter().all(|&n| n > 0));
        });
    }

    // CUDA.jl#731: the owner is busy with something else, or with nothing.
    1: fn free_after_owner_moved_on(gpus) {
        let pool = gpus.pool(1);
        for rounds in 0..20 {
            let buffers = pool.run(|dev, _| (0..20).map(|_| dev.zeros::<u8>(300 * KIB)).collect::<Result<Vec<_>, _>>());
            let buffers = buffers.unwrap().remove(0);
            assert_eq!(buffers.len(), 20);
            thread::spawn(move || drop(buffers)).join().unwrap();
            let reserved = pool.run(|dev, _| {
                assert_empty(dev)?;
                Ok(dev.stats().reserved)
            });
            assert!(reserved.unwrap()[0] <= 10 * MIB as u64, "round {rounds}: what came back is not used again");
        }
    }

    // mimalloc's test-stress and snmalloc's multi_threadatexit: threads die while things that they have made survive,
    // and thread-local storage drops things when hardly anything of the thread is left.
    1: fn threads_die_and_free_what_they_hold(gpus) {
        thread_local! {
            static HELD: RefCell<Vec<DeviceBuffer<u8>>> = const { RefCell::new(Vec::new()) };
        }
        let pool = gpus.pool(gpus.up_to(2));
        for _ in 0..5 {
            let made = pool.run(|dev, _| (0..40).map(|i| dev.zeros(1000 * i)).collect::<Result<Vec<_>, _>>()).unwrap();
            let threads: Vec<_> = made
                .into_iter()
                .map(|buffers| thread::spawn(move || HELD.with_borrow_mut(|held| held.extend(buffers))))
                .collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            // The same on the devices' own threads, which do not end before the pool does.
            pool.run(|dev, _| {
                let buffers = (0..10).map(|_| dev.zeros(100 * KIB)).collect::<Result<Vec<_>, _>>()?;
                HELD.with_borrow_mut(|held| *held = buffers);
                Ok(())
            })
            .unwrap();
        }
        pool.run(|dev, _| {
            HELD.with_borrow_mut(Vec::clear);
            assert_empty(dev)
        })
        .unwrap();
        pool.run(|dev, _| {
            let buffers = (0..10).map(|_| dev.zeros(100 * KIB)).collect::<Result<Vec<_>, _>>()?;
            HELD.with_borrow_mut(|held| *held = buffers);
            Ok(())
        })
        .unwrap();
        // Now the device threads end, and with them what they hold.
        pool.close().unwrap();
    }

    // snmalloc's msgpass: producers, proxies who pass on, consumers; UMF: multiThreadedMallocFreeRandomSizes.
    1: fn msgpass(gpus) {
        on_backings(|backing| {
            let n = gpus.up_to(3);
            // What is under way is bounded, so the pool must not need more than a small multiple of it.
            let pool = limited(gpus, n, backing, 48 * MIB).build().unwrap();
            const MESSAGES: usize = 1500;
            thread::scope(|s| {
                let (to_proxies, from_producers) = sync_channel::<Vec<DeviceBuffer<u8>>>(8);
                let from_producers = Arc::new(Mutex::new(from_producers));
                let (to_consumer, from_proxies) = sync_channel(8);
                for _ in 0..2 {
                    let (from, to) = (from_producers.clone(), to_consumer.clone());
                    s.spawn(move || {
                        loop {
                            let Ok(mut message) = ({ from.lock().recv() }) else { break };
                            // A proxy keeps some for itself.
                            if message.len() > 2 {
                                message.truncate(2);
                            }
                            to.send(message).unwrap();
                        }
                    });
                }
                drop(to_consumer);
                let passed = s.spawn(move || from_proxies.into_iter().map(|message| message.len()).sum::<usize>());
                pool.run(|dev, _| {
                    let (to, mut rng) = (to_proxies.clone(), Rng(dev.index() as u64));
                    let mut sent = 0;
                    while sent < MESSAGES {
                        let batch = 1 + rng.below(16);
                        let message = (0..batch).map(|_| bytes_of(dev, rng.size(16))).collect::<Result<Vec<_>, _>>()?;
                        sent += batch;
                        to.send(message).map_err(Error::custom)?;
                        if sent % 64 == 0 {
                            check_books(dev);
                        }
                    }
                    Ok(())
                })
                .unwrap();
                drop(to_proxies);
                assert!(passed.join().unwrap() > 0);
            });
            assert_at_rest(&pool);
        });
    }

    // snmalloc's two_alloc_types: frees of one pool on the threads of another, which have devices of the same numbers.
    1: fn pools_do_not_take_each_others_blocks(gpus) {
        let n = gpus.up_to(2);
        let (one, two) = (gpus.pool(n), gpus.pool(n));
        for _ in 0..10 {
            let of_one =
                one.run(|dev, _| (0..20).map(|i| dev.zeros::<u8>(1 << i)).collect::<Result<Vec<_>, _>>()).unwrap();
            let of_one: Vec<_> = of_one.into_iter().map(|buffers| Mutex::new(Some(buffers))).collect();
            two.run(|dev, _| {
                let before = dev.stats().remote_frees;
                drop(of_one[dev.index()].lock().take());
                check_books(dev);
                let stats = dev.stats();
                assert_eq!(
                    (stats.in_use, stats.remote_frees),
                    (0, before),
                    "another pool's block was taken in: {stats}"
                );
                Ok(())
            })
            .unwrap();
            assert_at_rest(&one);
        }
    }

    // The owner never looks into its inbox for long, and then needs what lies there.
    // (`owner_never_drains_then_oom_recovers`)
    2: fn owner_never_drains_then_oom_recovers(gpus) {
        on_limited_pools(gpus, 2, 16 * MIB, |pool, _| {
            pool.run(|dev, _| {
                let before = dev.stats().remote_frees;
                let mine = match dev.rank() {
                    0 => (0..30).map(|_| bytes_of(dev, 500 * KIB).map(Some)).collect::<Result<Vec<_>, _>>()?,
                    _ => Vec::new(),
                };
                let held = dev.exchange(Arc::new(Mutex::new(mine)))?;
                if dev.rank() == 1 {
                    held[0].lock().iter_mut().for_each(|buffer| drop(buffer.take()));
                    return dev.barrier();
                }
                dev.barrier()?;
                // 15 of 16 MiB lie in the inbox; the owner has not looked.
                let whole = bytes_of(dev, 14 * MIB)?;
                assert_eq!(dev.stats().remote_frees - before, 30);
                drop(whole);
                assert_empty(dev)
            })
            .unwrap();
        });
    }

    // A device thread frees its own block while it is within the pool: in the callback of an out-of-memory.
    1: fn handles_are_counted_over_threads(gpus) {
        let pool = gpus.pool(1);
        for _ in 0..20 {
            let shared = Arc::new(pool.run(|dev, _| dev.upload(&[5u8; 1000])).unwrap().remove(0));
            let (alive, barrier) = (AtomicUsize::new(0), std::sync::Barrier::new(8));
            thread::scope(|s| {
                for _ in 0..8 {
                    let own = shared.clone();
                    let (alive, barrier) = (&alive, &barrier);
                    s.spawn(move || {
                        barrier.wait();
                        alive.fetch_add(usize::from(own.len() == 1000), Relaxed);
                        drop(own);
                    });
                }
                drop(shared);
            });
            assert_eq!(alive.into_inner(), 8);
            assert_at_rest(&pool);
        }
    }

    // A scope ends while buffers are still on their way between threads. (`scope_exit_with_bufs_in_rings`)
    2: fn scope_exit_with_bufs_in_rings(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.pool(n);
        let (to, from) = channel();
        for round in 0..5 {
            pool.run(|dev, _| {
                let to = to.clone();
                for i in 0..10 {
                    to.send((dev.index(), i, dev.upload(&vec![i as u32; 5000])?)).map_err(Error::custom)?;
                }
                Ok(())
            })
            .unwrap();
            // Half of them are read in the next scope; the others are never seen again.
            let read: Vec<_> = from.try_iter().collect();
            assert_eq!(read.len(), 10 * n, "{round}");
            pool.run(|dev, _| {
                for (device, i, buffer) in &read {
                    if i % 2 == 0 && *device == dev.index() {
                        assert_eq!(dev.download(buffer)?, vec![*i as u32; 5000]);
                    }
                }
                Ok(())
            })
            .unwrap();
        }
        drop((to, from));
        assert_at_rest(&pool);
    }

    // Owner and others all the time: nothing is lost, and the sum is right whenever it is looked at.
    2: fn counters_are_right_while_others_free(gpus) {
        let pool = gpus.pool(2);
        let done = AtomicUsize::new(0);
        pool.run(|dev, _| {
            let held = dev.exchange(Arc::new(Mutex::new(Vec::new())))?;
            let (mine, theirs) = (&held[dev.rank()], &held[1 - dev.rank()]);
            let mut rng = Rng(dev.rank() as u64);
            for _ in 0..2000 {
                mine.lock().push(bytes_of(dev, rng.size(15))?);
                let gone = theirs.lock().pop();
                drop::<Option<DeviceBuffer<u8>>>(gone);
                if rng.chance(50) {
                    check_books(dev);
                }
            }
            done.fetch_add(1, Relaxed);
            until("the other is done", || done.load(Relaxed) == 2)?;
            mine.lock().clear();
            assert_empty(dev)
        })
        .unwrap();
    }
}
