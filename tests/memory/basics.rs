//! What every allocator's suite asks first: sizes, alignments, distinct blocks, contents. (RMM `mr_ref_test_basic.hpp`
//! and `mr_ref_test_allocation.hpp`, TensorFlow `gpu_bfc_allocator_test.cc`, UMF `pool.hpp`.)

use crate::{
    on_both,
    rig::{
        KIB, MIB, Rng, aligned, assert_books, assert_empty, bytes_of, check_books, driver_calls, on_backings,
        on_devices, on_limited, span,
    },
    support::{all_are, failure, ramp},
};
use gpu_pool::{Device, DeviceBuffer, Error};
use std::ops::Range;

/// A block that holds its number.
struct Numbered {
    buffer: DeviceBuffer<u32>,
    number: u32,
}

impl Numbered {
    fn new(dev: &Device, bytes: usize, number: u32) -> Result<Self, Error> {
        let mut buffer = aligned(dev, bytes / 4, 4)?;
        dev.fill(&mut buffer, number)?;
        Ok(Numbered { buffer, number })
    }

    #[track_caller]
    fn check(&self, dev: &Device) -> Result<(), Error> {
        assert!(all_are(&dev.download(&self.buffer)?, self.number), "block {} was written to", self.number);
        Ok(())
    }
}

#[track_caller]
fn assert_disjoint(blocks: &[Numbered]) {
    let mut spans: Vec<Range<u64>> = blocks.iter().map(|b| span(&b.buffer)).filter(|span| !span.is_empty()).collect();
    spans.sort_by_key(|span| span.start);
    for pair in spans.windows(2) {
        assert!(pair[0].end <= pair[1].start, "{pair:x?} overlap");
    }
}

on_both! {
    // RMM: AllocationsAreDifferent, RandomAllocations; TF: NoDups.
    1: fn random_allocations_are_disjoint_and_keep_what_was_written(gpus) {
        on_devices(gpus, 1, |dev| {
                let mut rng = Rng(1);
                let blocks = (0..100)
                    .map(|i| Numbered::new(dev, rng.below(5 * MIB), i))
                    .collect::<Result<Vec<_>, _>>()?;
                assert_disjoint(&blocks);
                check_books(dev);
                blocks.iter().try_for_each(|block| block.check(dev))?;
                drop(blocks);
                assert_empty(dev)
        });
    }

    // RMM: MixedRandomAllocationFree; TF: AllocationsAndDeallocations(WithGrowth).
    1: fn random_allocations_and_frees(gpus) {
        on_devices(gpus, 1, |dev| {
                let mut rng = Rng(2);
                let mut live: Vec<Numbered> = Vec::new();
                for i in 0..2000 {
                    if live.is_empty() || live.len() < 200 && rng.below(100) < 53 {
                        live.push(Numbered::new(dev, rng.size(22), i)?);
                    } else {
                        let gone = live.swap_remove(rng.below(live.len()));
                        if rng.chance(4) {
                            gone.check(dev)?;
                        }
                    }
                    if i % 100 == 0 {
                        assert_disjoint(&live);
                        check_books(dev);
                    }
                }
                live.iter().try_for_each(|block| block.check(dev))?;
                drop(live);
                assert_empty(dev)
        });
    }

    // RMM: 0, 4 B, 1 KiB, 1 MiB, 1 GiB, 1 PiB; CUDA.jl's 10^20; rmm#307, TF's AllocateZeroBufSize.
    1: fn zero_len_and_1_pib(gpus) {
        on_devices(gpus, 1, |dev| {
                let nothing = [bytes_of(dev, 0)?, bytes_of(dev, 0)?, dev.zeros(0)?];
                assert!(nothing.iter().all(|x| x.is_empty() && x.address() != 0));
                for bytes in [4, KIB, MIB, if gpus.is_cuda() { 1 << 30 } else { 64 * MIB }] {
                    let x = Numbered::new(dev, bytes, 7)?;
                    x.check(dev)?;
                }
                let before = dev.stats();
                for bytes in [1 << 50, (1 << 50) - 1, isize::MAX as usize, usize::MAX - 255, usize::MAX] {
                    let error = failure(bytes_of(dev, bytes));
                    assert!(
                        matches!(error, Error::OutOfMemory { requested, device: 0, .. } if requested == bytes as u64),
                        "{error}"
                    );
                }
                // More elements than there are addresses.
                let error = failure(aligned::<u64>(dev, usize::MAX / 4, 8));
                assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
                let after = dev.stats();
                assert_eq!(
                    (before.reserved, before.driver_calls),
                    (after.reserved, after.driver_calls),
                    "not even tried"
                );
                // ... and the next one that fits is served.
                Numbered::new(dev, MIB, 9)?.check(dev)?;
                drop(nothing);
                assert_empty(dev)
        });
    }

    // RMM: AlignMultiple, ThrowOnInvalidAllocationAlignment, ForwardsAlignment; xla#40979.
    1: fn alignment_1_to_2_mib(gpus) {
        on_devices(gpus, 1, |dev| {
                let mut kept = Vec::new();
                for shift in 0..=21 {
                    for bytes in [0, 1, 300, 100 * KIB, 200 * KIB, 3 * MIB + 5] {
                        let x = aligned::<u8>(dev, bytes, 1 << shift)?;
                        assert!(x.address().is_multiple_of(1 << shift), "{:#x} for 2^{shift}", x.address());
                        assert!(x.address().is_multiple_of(256), "{:#x}", x.address());
                        if bytes < MIB {
                            kept.push(x);
                        }
                    }
                }
                check_books(dev);
                for align in [0, 3, 255, 257, 4 << 20, usize::MAX, 1 << 63] {
                    let error = failure(aligned::<u8>(dev, 100, align));
                    assert!(matches!(error, Error::InvalidArgument { .. }), "{align}: {error}");
                }
                drop(kept);
                assert_empty(dev)
        });
    }

    // An aligned request must be served wherever memory for it is free, also under a limit that leaves no room to
    // spare.
    1: fn alignment_costs_no_more_than_it_must(gpus) {
        on_limited(gpus, 8 * MIB, |dev| {
            for _ in 0..3 {
                let small = dev.zeros::<u8>(100)?;
                let x = aligned::<u8>(dev, 2 * MIB, 2 * MIB)?;
                let y = aligned::<u8>(dev, MIB, MIB)?;
                assert!(x.address().is_multiple_of(2 << 20) && y.address().is_multiple_of(1 << 20));
                // What lies between the blocks is not lost.
                let between = dev.zeros::<u8>(700 * KIB)?;
                check_books(dev);
                drop((x, small, y, between));
            }
            assert_empty(dev)
        });
    }

    // TF: TracksSizes, AllocatedVsRequested; PyTorch: test_memory_allocation, test_memory_stats.
    1: fn counters_tell_what_was_asked_for_and_what_it_took(gpus) {
        on_devices(gpus, 1, |dev| {
                let mut rng = Rng(3);
                let (mut live, mut asked, mut peak, mut served) = (Vec::new(), 0, 0, dev.stats().allocations);
                for _ in 0..300 {
                    if !live.is_empty() && rng.chance(3) {
                        let gone: DeviceBuffer<u8> = live.swap_remove(rng.below(live.len()));
                        asked -= gone.len() as u64;
                    } else {
                        let x = bytes_of(dev, rng.size(21))?;
                        asked += x.len() as u64;
                        served += 1;
                        live.push(x);
                    }
                    let stats = dev.stats();
                    peak = stats.in_use.max(peak);
                    assert_eq!((stats.requested, stats.allocations, stats.peak), (asked, served, peak), "{stats}");
                    // Rounding: 256 bytes, or an eighth for small blocks, or a grain of the heap.
                    let most: usize = live.iter().map(|x| x.len() + (x.len() / 8).max(512)).sum();
                    assert!(stats.in_use <= most as u64, "{most} {stats}");
                }
                check_books(dev);
                drop(live);
                assert_empty(dev)
        });
    }

    // TF: ExerciseCoalescing; RMM arena: Superblock*Merge*, CoalesceAfterFull; UMF and PyTorch alike.
    1: fn coalescing_ends_where_it_began(gpus) {
        on_backings(|backing| {
            let pool = gpus.builder(1).memory_backing(backing).memory_reserve(16 * MIB as u64).build().unwrap();
            pool.run(|dev, _| {
                let first = bytes_of(dev, 16 * MIB)?.address();
                let calls = driver_calls(dev);
                let mut rng = Rng(4);
                for round in 0..1024 {
                    let mut parts = Vec::new();
                    let mut left = 16 * MIB;
                    while left > 200 * KIB {
                        let bytes = (200 * KIB + rng.below(3 * MIB)).min(left) & !4095;
                        parts.push(bytes_of(dev, bytes)?);
                        left -= bytes;
                    }
                    assert_eq!(driver_calls(dev), calls, "round {round}");
                    while !parts.is_empty() {
                        parts.swap_remove(rng.below(parts.len()));
                    }
                    if round % 128 == 0 {
                        assert_books(&dev.memory_snapshot());
                    }
                    assert_eq!(bytes_of(dev, 16 * MIB)?.address(), first, "round {round}: something did not coalesce");
                }
                assert_empty(dev)
            })
            .unwrap();
        });
    }

    // snalloc's test_consolidaton_bug: a large request after many small ones were freed; TF: BM_Allocation's sizes.
    1: fn small_blocks_that_are_free_serve_large_requests(gpus) {
        on_limited(gpus, 8 * MIB, |dev| {
            for bytes in [256, 3 * KIB, 20 * KIB, 100 * KIB, 128 * KIB] {
                let small = (0..6 * MIB / bytes).map(|_| bytes_of(dev, bytes)).collect::<Result<Vec<_>, _>>()?;
                check_books(dev);
                drop(small);
                // All of it is in slabs now, and all of them are empty.
                bytes_of(dev, 6 * MIB)?;
                check_books(dev);
            }
            assert_empty(dev)
        });
    }

    // PyTorch: test_cachingAllocator_raw_alloc (contents of reused memory are old bytes, not the new owner's).
    1: fn reused_memory_is_zeroed_when_zeros_are_asked_for(gpus) {
        gpus.run(1, |dev| {
            for bytes in [64 * KIB, MIB] {
                let dirty = dev.upload(&ramp(bytes / 4, 5))?;
                let address = dirty.address();
                drop(dirty);
                let clean = dev.zeros::<u32>(bytes / 4)?;
                assert_eq!(clean.address(), address, "the memory was not used again, so this tests nothing");
                assert!(all_are(&dev.download(&clean)?, 0));
            }
            Ok(())
        });
    }
}
