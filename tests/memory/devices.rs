//! Several devices: each has its own memory, and buffers go wherever they like. (RMM `MultidevicePool`,
//! `container_multidevice_tests.cu`; PyTorch `test_cuda_multigpu.py`; xla#40852, warp#1384, pytorch#15568.)

use crate::{
    on_both,
    rig::{BACKINGS, KIB, MIB, Rng, assert_at_rest, bytes_of, check_books, limited, on_limited_pools, on_pools, span},
    support::{all_are, bytes, failure, slow_add},
};
use gpu_pool::{DeviceBuffer, Error};
use parking_lot::Mutex;
use std::{sync::Arc, thread};

/// Buffers on their way, each with what it holds.
type Shelf = Mutex<Vec<(DeviceBuffer<u32>, u32)>>;

on_both! {
    // RMM: MultidevicePool, DifferentPoolsUnequal; PyTorch: test_memory_stats_multigpu. What one does, no other counts.
    2: fn each_device_has_its_own_books(gpus) {
        let n = gpus.up_to(4);
        on_pools(gpus, n, |pool, _| {
            for busy in 0..n {
                let before = pool.run(|dev, _| Ok(dev.stats())).unwrap();
                let held = pool
                    .on(&[busy]).run(|dev, _| {
                        (1..20).map(|i| bytes_of(dev, i * 100 * KIB)).collect::<Result<Vec<_>, _>>()
                    })
                    .unwrap()
                    .remove(0);
                assert!(held.iter().all(|buffer| buffer.device() == busy));
                let after = pool
                    .run(|dev, _| {
                        check_books(dev);
                        Ok(dev.stats())
                    })
                    .unwrap();
                for (device, (before, after)) in before.iter().zip(&after).enumerate() {
                    match device == busy {
                        true => assert_eq!(
                            (after.requested, after.allocations),
                            (19_000 * KIB as u64, before.allocations + 19)
                        ),
                        false => assert_eq!(before, after, "device {device} has noticed"),
                    }
                }
                drop(held);
            }
            assert_at_rest(pool);
        });
    }

    // RMM: CreateDestroy-, CreateMoveDestroy-, Resize-, ShrinkDifferentActiveDevice; thrust's multi_device. Made on one
    // device, used on another, dropped on a third, in vectors that grow and shrink meanwhile.
    2: fn made_moved_and_dropped_with_any_device_active(gpus) {
        let n = gpus.up_to(3);
        on_pools(gpus, n, |pool, _| {
            let shelves: Vec<Shelf> = (0..n).map(|_| Mutex::new(Vec::new())).collect();
            pool.run(|dev, _| {
                let mut rng = Rng(dev.rank() as u64);
                for number in 0..200u32 {
                    let mut x = dev.zeros::<u32>(1 + rng.below(40_000))?;
                    dev.fill(&mut x, number)?;
                    shelves[rng.below(n)].lock().push((x, number));
                    // Whatever lies here: whoever made it.
                    let taken = shelves[dev.rank()].lock().pop();
                    if let Some((x, number)) = taken.filter(|_| rng.chance(2)) {
                        let here = x.copy_to(dev)?;
                        drop(x);
                        assert!(all_are(&dev.download(&here)?, number));
                    }
                    if rng.chance(20) {
                        let mut shelf = shelves[rng.below(n)].lock();
                        let half = shelf.len() / 2;
                        shelf.truncate(half);
                    }
                }
                Ok(())
            })
            .unwrap();
            drop(shelves);
            assert_at_rest(pool);
        });
    }

    // https://github.com/openxla/xla/issues/40852: one chunk without access rights for the peers was a silent hang of
    // 56 minutes. llama.cpp#24491: granted to the owner only.
    2: fn every_pair_of_devices_reads_every_new_chunk(gpus) {
        let n = gpus.up_to(3);
        on_pools(gpus, n, |pool, _| {
            let mut all: Vec<Arc<Vec<DeviceBuffer<u8>>>> = Vec::new();
            for round in 0..4 {
                // Chunks of all kinds: for slabs, for large blocks, those that come between others.
                let sizes = [[300, 3 * MIB], [60 * KIB, 2 * MIB + 5], [128 * KIB, 400 * KIB], [MIB, 4 * MIB]][round];
                let made = pool
                    .run(|dev, _| {
                        sizes
                            .iter()
                            .map(|&len| dev.upload(&bytes(len, dev.rank() as u8)))
                            .collect::<Result<Vec<_>, _>>()
                    })
                    .unwrap();
                all.extend(made.into_iter().map(Arc::new));
                if round == 1 {
                    all.remove(0);
                    pool.run(|dev, _| dev.trim()).unwrap();
                }
                pool.run(|dev, _| {
                    // (The older ones are looked at again after every change.)
                    for theirs in all.iter().flat_map(|buffers| buffers.iter()) {
                        let found = dev.download(&theirs.copy_to(dev)?)?;
                        assert!(
                            found == bytes(theirs.len(), theirs.device() as u8),
                            "{} reads {}",
                            dev.rank(),
                            theirs.device()
                        );
                    }
                    Ok(())
                })
                .unwrap();
            }
        });
    }

    // https://github.com/NVIDIA/warp/issues/1384, pytorch#15568: a staged copy's page-locked block was used again while
    // the late peer still had to read it.
    2: fn recycled_staging_block_not_visible_to_late_peer(gpus) {
        let pool = gpus.staged(2);
        pool.run(|dev, _| {
            for round in 0..12u8 {
                let mine = Arc::new(dev.upload(&bytes(700 * KIB, 2 * round + dev.rank() as u8))?);
                let both = dev.exchange(mine)?;
                let mut busy = dev.zeros::<u32>(1)?;
                // This side is late with its half of the copy ...
                slow_add(dev, &mut busy, 1, 3000)?;
                let copy = both[1 - dev.rank()].copy_to(dev)?;
                // ... while the same staging memory serves other copies.
                let other = both[1 - dev.rank()].copy_to(dev)?;
                let up = dev.upload(&bytes(900 * KIB, 99))?;
                drop((both, other));
                assert!(dev.download(&copy)? == bytes(700 * KIB, 2 * round + 1 - dev.rank() as u8), "round {round}");
                assert!(dev.download(&up)? == bytes(900 * KIB, 99));
            }
            Ok(())
        })
        .unwrap();
        assert_at_rest(&pool);
    }

    // Each device's window is its own: no address means memory of two devices.
    2: fn devices_have_addresses_of_their_own(gpus) {
        let n = gpus.up_to(4);
        on_pools(gpus, n, |pool, _| {
            let all =
                pool.run(|dev, _| (0..40).map(|i| bytes_of(dev, i * 50 * KIB)).collect::<Result<Vec<_>, _>>()).unwrap();
            let mut spans: Vec<_> = all.iter().flatten().map(span).filter(|span| !span.is_empty()).collect();
            spans.sort_by_key(|span| span.start);
            assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
        });
    }

    // A panic (or an error) in one shard leaks nothing, of whatever was held by whomever.
    2: fn panic_in_one_shard_leaks_nothing(gpus) {
        let n = gpus.up_to(3);
        on_limited_pools(gpus, n, 32 * MIB, |pool, _| {
            for round in 0..12 {
                let culprit = round % n;
                let error = failure(pool.run(|dev, _| {
                    let mut mine: Vec<_> = (0..10).map(|i| dev.zeros::<u8>(i * 70 * KIB)).collect::<Result<_, _>>()?;
                    let lent = dev.exchange(Arc::new(mine.pop().unwrap()))?;
                    let _copy = lent[(dev.rank() + 1) % n].copy_to(dev)?;
                    if dev.rank() == culprit {
                        match round % 2 {
                            0 => panic!("round {round}"),
                            _ => return Err(Error::custom("round")),
                        }
                    }
                    dev.barrier()
                }));
                assert!(error.to_string().contains("round"), "{error}");
                assert_at_rest(pool);
                // All of it can be had.
                pool.run(|dev, _| bytes_of(dev, 30 * MIB).map(drop)).unwrap();
            }
        });
    }

    // All devices and threads of the application at once, nothing but allocation and frees: what PyTorch's TestMemPool
    // does with _multithread and _emptycache_multithread.
    2: fn all_at_once_with_trims(gpus) {
        for backing in BACKINGS {
            let n = gpus.up_to(4);
            let pool = limited(gpus, n, backing, 48 * MIB).build().unwrap();
            thread::scope(|s| {
                let (to, from) = std::sync::mpsc::sync_channel::<DeviceBuffer<u8>>(64);
                s.spawn(move || from.into_iter().for_each(drop));
                pool.run(|dev, _| {
                    let (to, mut rng) = (to.clone(), Rng(dev.index() as u64));
                    for i in 0..600 {
                        to.send(bytes_of(dev, rng.size(18))?).map_err(Error::custom)?;
                        if i % 40 == 0 {
                            dev.trim()?;
                            check_books(dev);
                        }
                    }
                    Ok(())
                })
                .unwrap();
                drop(to);
            });
            assert_at_rest(&pool);
        }
    }
}
