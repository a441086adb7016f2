//! How much a pool may take, takes in advance, and gives back. (RMM `limiting_resource_adaptor` and pool sizes, PyTorch
//! `test_set_per_process_memory_fraction`, TensorFlow `TestCustomMemoryLimit`, cubecl's capped pools, UMF
//! `sharedLimits` and `trimMemory`.)

use crate::{
    on_both,
    rig::{
        BACKINGS, Gate, KIB, MIB, assert_at_rest, assert_empty, bytes_of, check_books, driver_calls, limited,
        on_backings, on_devices, on_limited_pools, on_pools, span,
    },
    support::{Gpus, all_are, builder, failure},
};
use gpu_pool::{Builder, DeviceBuffer, Error, memory::BackingChoice};

/// Devices of 64 MiB; GPUs have what they have.
fn small_devices(gpus: Gpus, count: usize, backing: BackingChoice) -> Builder {
    gpus.builder(count).software_memory(64 * MIB as u64).memory_backing(backing)
}

on_both! {
    // RMM: TooBig, OverLimit, UnderLimitDueToFrees, InitialAndMaxPoolSizeEqual; TF: TestCustomMemoryLimit; cubecl:
    // capped_sliced_pool_errors_instead_of_growing, capped_sliced_pool_reuses_freed_memory.
    1: fn a_limit_is_kept_and_can_be_used_up(gpus) {
        on_backings(|backing| {
            for reserve in [0, 8 * MIB as u64] {
                let pool = limited(gpus, 1, backing, 8 * MIB).memory_reserve(reserve).build().unwrap();
                pool.run(|dev, _| {
                    for _ in 0..3 {
                        let error = failure(bytes_of(dev, 8 * MIB + 1));
                        assert!(
                            matches!(error, Error::OutOfMemory { capacity, .. } if capacity == 8 * MIB as u64),
                            "{error}"
                        );
                        let whole = bytes_of(dev, 8 * MIB)?;
                        let error = failure(bytes_of(dev, 1));
                        assert!(matches!(error, Error::OutOfMemory { free: 0, .. }), "{error}");
                        drop(whole);
                        let (a, b) = (bytes_of(dev, 5 * MIB)?, bytes_of(dev, 3 * MIB)?);
                        failure(bytes_of(dev, MIB));
                        drop(b);
                        let c = bytes_of(dev, 2 * MIB)?;
                        let stats = dev.stats();
                        assert!(stats.peak_reserved <= 8 * MIB as u64, "{stats}");
                        check_books(dev);
                        drop((a, c));
                    }
                    assert_empty(dev)
                })
                .unwrap();
            }
        });
    }

    // RMM: NonAlignedPoolSize; cubecl: max_pool_size_below_alignment_never_overshoots. Limits that are no multiple of
    // what the driver gives, and smaller than that.
    1: fn limits_of_odd_sizes_are_never_overshot(gpus) {
        on_backings(|backing| {
            for limit in [0, 1, 100 * KIB, MIB, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 3 * MIB, 5 * MIB + 12345] {
                // Too small for the pool's own trials, perhaps; then it says so.
                let pool = match limited(gpus, 1, backing, limit).build() {
                    Ok(pool) => pool,
                    Err(Error::OutOfMemory { .. }) if limit < 2 * MIB => continue,
                    Err(other) => panic!("{limit}: {other}"),
                };
                pool.run(|dev, _| {
                    let mut live = Vec::new();
                    for bytes in [300 * KIB, 100 * KIB, 10 * KIB, KIB] {
                        while let Ok(buffer) = bytes_of(dev, bytes) {
                            live.push(buffer);
                            assert!(dev.stats().reserved <= limit as u64, "{limit}: {}", dev.stats());
                        }
                    }
                    check_books(dev);
                    // Single allocations can be of any size, mappings are of 2 MiB.
                    let usable = if backing == BackingChoice::Malloc { limit } else { limit / (2 * MIB) * 2 * MIB };
                    let used = dev.stats().in_use as usize;
                    assert!(used + 128 * KIB >= usable, "{limit}: only {used} of {usable} bytes can be used");
                    drop(live);
                    assert_empty(dev)
                })
                .unwrap();
            }
        });
    }

    // PyTorch: test_set_per_process_memory_fraction, test_get_..., test_allocator_memory_fraction_setting; CUDA.jl:
    // limits in %.
    1: fn a_limit_in_per_cent(gpus) {
        on_backings(|backing| {
            for (percent, mib) in [(50.0, 32), (25.0, 16), (100.0, 64)] {
                let pool = small_devices(gpus, 1, backing).memory_limit_percent(percent).build().unwrap();
                pool.run(|dev, _| {
                    let most = (dev.info().total_memory as f64 * percent / 100.0) as usize;
                    if !gpus.is_cuda() {
                        assert_eq!(most, mib * MIB);
                    }
                    let error = failure(bytes_of(dev, most + 1));
                    assert!(matches!(error, Error::OutOfMemory { capacity, .. } if capacity == most as u64), "{error}");
                    if !gpus.is_cuda() && percent < 100.0 {
                        let whole = bytes_of(dev, most)?;
                        assert_eq!(dev.stats().reserved, most as u64);
                        drop(whole);
                    }
                    Ok(())
                })
                .unwrap();
            }
        });
    }

    // RMM: AllocateNinetyPercent, TwoLargeBuffers, ForceGrowth; TF: TestForceAllowGrowth,
    // AllocationsAndDeallocationsWithGrowth.
    1: fn nearly_all_of_a_device(gpus) {
        on_backings(|backing| {
            let most = if gpus.is_cuda() { 8 << 30 } else { 64 * MIB };
            let cases: [&[usize]; 4] = [&[90], &[47, 47], &[10, 20, 30, 35], &[95]];
            for case in cases {
                let pool = small_devices(gpus, 1, backing).build().unwrap();
                for _ in 0..3 {
                    pool.run(|dev, _| {
                        let all = case
                            .iter()
                            .map(|percent| bytes_of(dev, most / 100 * percent))
                            .collect::<Result<Vec<_>, _>>()?;
                        check_books(dev);
                        drop(all);
                        assert_empty(dev)
                    })
                    .unwrap();
                }
                assert_at_rest(&pool);
            }
            // One after the other in the same pool. (A large piece of a single allocation cannot go back while a part
            // lives.)
            let pool = small_devices(gpus, 1, backing).build().unwrap();
            for case in cases {
                pool.run(|dev, _| {
                    case.iter()
                        .map(|percent| bytes_of(dev, most / 100 * percent))
                        .collect::<Result<Vec<_>, _>>()
                        .map(drop)
                })
                .unwrap_or_else(|error| if backing == BackingChoice::Vmm { panic!("{error}") } else { Vec::new() });
            }
            assert_at_rest(&pool);
        });
    }

    // RMM: InitialAndMaxPoolSizeEqual, PoolSize; "reserve-ahead" of the issue.
    1: fn what_is_reserved_needs_no_driver_call(gpus) {
        on_backings(|backing| {
            // Two also probe each other when they are built.
            let pool =
                gpus.builder(gpus.up_to(2)).memory_backing(backing).memory_reserve(32 * MIB as u64).build().unwrap();
            pool.run(|dev, _| {
                let before = dev.stats();
                assert_eq!((before.reserved, before.in_use), (32 * MIB as u64, 0), "{before}");
                let large = bytes_of(dev, 20 * MIB)?;
                let small = (0..100).map(|i| bytes_of(dev, 1000 * (i % 5))).collect::<Result<Vec<_>, _>>()?;
                assert_eq!(driver_calls(dev), before.driver_calls);
                drop((large, small));
                let whole = bytes_of(dev, 32 * MIB)?;
                assert_eq!(driver_calls(dev), before.driver_calls);
                drop(whole);
                Ok(())
            })
            .unwrap();
        });
    }

    // RMM: ThrowMaxLessThanInitial. What cannot be reserved is an error of the build, and the device is as it was.
    1: fn a_reserve_beyond_the_limit_is_refused(gpus) {
        on_backings(|backing| {
            let error = failure(limited(gpus, 1, backing, 8 * MIB).memory_reserve(16 * MIB as u64).build());
            assert!(matches!(error, Error::InvalidArgument { op: "build", .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("memory_reserve(16777216)") && text.contains("memory_limit(8388608)"), "{text}");
            let error = failure(small_devices(gpus, 1, backing).memory_reserve(1 << 50).build());
            assert!(matches!(error, Error::InvalidArgument { op: "build", .. }), "{error}");
            assert!(error.to_string().contains("memory_reserve(1125899906842624)"), "{error}");
            let error =
                failure(small_devices(gpus, 1, backing).memory_limit_percent(25.0).memory_reserve(1 << 50).build());
            assert!(matches!(error, Error::InvalidArgument { op: "build", .. }), "{error}");
            assert!(error.to_string().contains("memory_limit_percent(25)"), "{error}");
            // Virtual memory comes in 2 MiB, so less than the limit can be had of it: the error says what was asked
            // for.
            let odd = limited(gpus, 1, backing, 8 * MIB - 1).memory_reserve(8 * MIB as u64 - 1).build();
            let asked = 8 * MIB as u64 - 1;
            match odd {
                Ok(pool) => pool.close().unwrap(),
                Err(Error::OutOfMemory { requested, capacity, .. }) => {
                    assert_eq!((requested, capacity), (asked, asked))
                }
                Err(other) => panic!("{other}"),
            }
            let pool = limited(gpus, 1, backing, 8 * MIB).memory_reserve(8 * MIB as u64).build().unwrap();
            pool.run(|dev, _| bytes_of(dev, 8 * MIB).map(drop)).unwrap();
        });
    }

    // UMF: trimMemory; PyTorch: empty_cache, TestMemPool's test_empty_cache(_inactive),
    // test_garbage_collect_expandable.
    1: fn trim_gives_back_what_is_free(gpus) {
        on_pools(gpus, 1, |pool, _| {
            pool.run(|dev, _| {
                assert_eq!((dev.trim()?, dev.stats().reserved), (0, 0), "what the pool's own trials took has gone");
                let mut kept = Vec::new();
                for round in 0..5 {
                    let large = (0..4).map(|_| bytes_of(dev, 7 * MIB)).collect::<Result<Vec<_>, _>>()?;
                    let small = (0..500).map(|_| bytes_of(dev, 3000)).collect::<Result<Vec<_>, _>>()?;
                    let before = dev.stats();
                    assert_eq!(dev.trim()?, before.reserved - dev.stats().reserved);
                    assert!(dev.stats().reserved >= dev.stats().in_use);
                    check_books(dev);
                    drop((large, small));
                    kept.push(dev.upload(&vec![round as u8; 3 * MIB])?);
                    dev.synchronize()?;
                    let before = dev.stats();
                    let trimmed = dev.trim()?;
                    let after = dev.stats();
                    assert_eq!(trimmed, before.reserved - after.reserved);
                    check_books(dev);
                    // What stays is what something lies in that is kept.
                    for chunk in dev.memory_snapshot().chunks {
                        let used = |x: &DeviceBuffer<u8>| {
                            span(x).start < chunk.address + chunk.bytes && chunk.address < span(x).end
                        };
                        assert!(kept.iter().any(used), "{round}: {chunk:x?} is free and still there\n{after}");
                    }
                    for (round, kept) in kept.iter().enumerate() {
                        assert!(all_are(&dev.download(kept)?, round as u8));
                    }
                }
                drop(kept);
                dev.synchronize()?;
                dev.trim()?;
                assert_eq!(dev.stats().reserved, 0, "{}", dev.stats());
                assert_eq!(dev.trim()?, 0);
                // It goes on as ever.
                dev.zeros::<u8>(5 * MIB).map(drop)
            })
            .unwrap();
            assert_at_rest(pool);
        });
    }

    // What is given back is there for others: another pool on the same devices gets it. (UMF: sharedLimits.)
    1: fn what_one_pool_gives_back_another_may_have(gpus) {
        if gpus.is_cuda() {
            return; // It would have to fill the GPU up, on which others may be at work.
        }
        on_backings(|backing| {
            let pool = small_devices(gpus, 1, backing).build().unwrap();
            // Filled by one kind of memory, then by pieces of another size.
            pool.run(|dev, _| {
                for bytes in [56 * MIB, 14 * MIB, 600 * KIB, 100 * KIB] {
                    let some = (0..56 * MIB / bytes).map(|_| bytes_of(dev, bytes)).collect::<Result<Vec<_>, _>>()?;
                    drop(some);
                    dev.trim()?;
                    assert_eq!(dev.stats().reserved, 0, "{bytes}: {}", dev.stats());
                }
                Ok(())
            })
            .unwrap();
        });
    }

    // Trimming does not wait, and takes nothing that is used. (cf. `seven.rs` for peers.)
    1: fn trim_leaves_what_is_pending(gpus) {
        on_devices(gpus, 1, |dev| {
                let gate = Gate::new(gpus);
                let side = dev.stream()?;
                let side = dev.on(&side);
                let mut x = side.zeros::<u32>(2 * MIB)?;
                gate.hold(&side, &mut x)?;
                drop(x);
                dev.trim()?;
                if gate.holds() {
                    let stats = dev.stats();
                    assert_eq!((stats.reserved, stats.pending), (8 * MIB as u64, 8 * MIB as u64), "{stats}");
                }
                gate.open();
                side.synchronize()?;
                dev.trim()?;
                assert_eq!((dev.stats().reserved, dev.stats().pending), (0, 0));
                Ok(())
        });
    }

    // A limit is a limit of one device; PyTorch: TestMemPool's test_limited_memory_with_allocator.
    2: fn a_limit_is_each_devices_own(gpus) {
        let n = gpus.up_to(3);
        on_limited_pools(gpus, n, 8 * MIB, |pool, _| {
            let all = pool.run(|dev, _| bytes_of(dev, 7 * MIB)).unwrap();
            assert_eq!(all.iter().map(|x| x.device()).collect::<Vec<_>>(), (0..n).collect::<Vec<_>>());
            drop(all);
            assert_at_rest(pool);
        });
    }
}

/// Not a number from 0 to 100.
#[test]
fn per_cents_that_are_none() {
    for percent in [-1.0, 100.1, f64::NAN, f64::INFINITY] {
        let error = builder().host(1).memory_limit_percent(percent).build().map(drop).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { op: "build", .. }), "{error}");
    }
}

/// A window that there must be, or else no pool; and what there is without.
#[test]
fn the_backing_is_what_was_asked_for() {
    let addresses = BACKINGS.map(|backing| {
        let pool = builder().host(1).memory_backing(backing).build().unwrap();
        // In a window two allocations of the driver make one piece; else they cannot.
        pool.run(|dev, _| {
            let (a, b) = (bytes_of(dev, 4 * MIB)?, bytes_of(dev, 4 * MIB)?);
            drop((a, b));
            let calls = driver_calls(dev);
            bytes_of(dev, 8 * MIB)?;
            Ok(driver_calls(dev) - calls)
        })
        .unwrap()[0]
    });
    assert_eq!(addresses[0], 0, "a window");
    assert!(addresses[1] > 0, "single allocations");
}
