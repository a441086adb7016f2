//! `Builder::memory_slack`: free memory is moved together before more is taken than the most that was ever in use,
//! times so much. What fragmentation costs without it: pytorch#193400.

use crate::support::{self, all_are, slow_add};
use gpu_pool::{
    Builder, Device, DeviceBuffer, Result,
    memory::{BackingChoice, MemoryStats},
};

const MIB: usize = 1 << 20;

fn builder() -> Builder {
    support::builder().host(1).module(&support::MODULE)
}

/// Pieces of 4 MiB side by side, every other one free.
fn comb(dev: &Device, count: usize) -> Result<Vec<DeviceBuffer<u8>>> {
    let mut all: Vec<_> = (0..2 * count).map(|i| dev.upload(&vec![i as u8; 4 * MIB])).collect::<Result<_>>()?;
    let mut odd = 0..;
    all.retain(|_| odd.next().is_some_and(|i: usize| i % 2 == 1));
    Ok(all)
}

/// Whether the pieces that were kept hold what they held.
fn assert_intact(dev: &Device, kept: &[DeviceBuffer<u8>]) -> Result<()> {
    for (i, piece) in kept.iter().enumerate() {
        assert!(dev.download(piece)? == vec![2 * i as u8 + 1; 4 * MIB], "piece {i}");
    }
    Ok(())
}

fn fragmented(builder: Builder) -> MemoryStats {
    let pool = builder.build().unwrap();
    let stats = pool.run(|dev, _| {
        let kept = comb(dev, 8)?;
        let large: Vec<_> = (0..2).map(|_| dev.upload(&vec![9u8; 16 * MIB])).collect::<Result<_>>()?;
        assert_intact(dev, &kept)?;
        for large in &large {
            assert!(dev.download(large)? == vec![9u8; 16 * MIB]);
        }
        Ok(dev.stats())
    });
    let stats = stats.unwrap()[0];
    pool.close().unwrap();
    stats
}

/// 64 MiB are in use at most; with a bound no more is taken, without one 32 MiB more are.
#[test]
fn holes_are_used_before_more_is_taken() {
    support::guarded(|| {
        let free = fragmented(builder());
        assert!(free.peak == 64 << 20 && free.reserved >= 96 << 20, "{free:?}");
        let bound = fragmented(builder().memory_slack(1.0));
        assert_eq!((bound.peak, bound.reserved, bound.peak_reserved), (64 << 20, 64 << 20, 64 << 20));
        assert!(bound.driver_calls > free.driver_calls, "moves are calls");
        // A bound that no memory reaches.
        assert_eq!(fragmented(builder().memory_slack(f64::MAX)).reserved, free.reserved);
        // 64 * 1.3 leaves room for the first, not for the second.
        let some = fragmented(builder().memory_slack(1.3));
        assert_eq!(some.peak_reserved, 80 << 20);
    });
}

/// Where nothing can move, memory is taken nevertheless.
#[test]
fn a_bound_that_cannot_be_kept_is_no_error() {
    support::guarded(|| {
        let stats = fragmented(builder().memory_slack(1.0).memory_backing(BackingChoice::Malloc));
        assert!(stats.reserved >= 96 << 20, "{stats:?}");
    });
}

/// What moves is in use by streams still: the checker would tell of a mapping that goes away under an operation, and so
/// would the sums.
#[test]
fn work_in_flight_is_waited_for() {
    support::guarded(|| {
        let pool = builder().memory_slack(1.0).build().unwrap();
        pool.run(|dev, _| {
            let side = dev.stream()?;
            for round in 0..2 {
                let mut pieces: Vec<_> = (0..8).map(|_| dev.zeros::<u32>(MIB)).collect::<Result<_>>()?;
                for piece in &mut pieces {
                    slow_add(&dev.on(&side), piece, round, 1000)?;
                }
                let mut odd = 0..;
                pieces.retain(|_| odd.next().is_some_and(|i: usize| i % 2 == 1));
                let large = dev.zeros::<u32>(4 * MIB)?;
                assert!(all_are(&dev.download(&large)?, 0), "somebody wrote to it");
                for piece in &pieces {
                    assert!(all_are(&dev.download(piece)?, round));
                }
            }
            assert_eq!(dev.stats().peak_reserved, 32 << 20);
            Ok(())
        })
        .unwrap();
        pool.close().unwrap();
    });
}

/// Random sizes up to 32 MiB, as RMM's `random_allocations` has them: less is taken than without the bound, and what is
/// live holds what it held.
#[test]
fn random_sizes_stay_near_the_bound() {
    support::guarded(|| {
        let run = |builder: Builder| {
            let pool = builder.build().unwrap();
            let stats = pool.run(|dev, _| {
                let mut seed = 12345u64;
                let mut draw = move |n: usize| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (seed >> 33) as usize % n
                };
                let mut live: Vec<(DeviceBuffer<u32>, u32)> = Vec::new();
                for i in 0..150u32 {
                    if !live.is_empty() && (draw(2) == 0 || live.len() > 12) {
                        let (gone, value) = live.swap_remove(draw(live.len()));
                        let ends = [gone.slice(..1), gone.slice(gone.len() - 1..)];
                        for end in ends {
                            assert_eq!(dev.download(&end)?, [value]);
                        }
                        continue;
                    }
                    let mut x = dev.zeros::<u32>(1 + draw(8 * MIB))?;
                    dev.fill(&mut x, i)?;
                    live.push((x, i));
                }
                Ok(dev.stats())
            });
            stats.unwrap()[0]
        };
        let (free, bound) = (run(builder()), run(builder().memory_slack(1.05)));
        let ratio = |stats: MemoryStats| stats.peak_reserved as f64 / stats.peak as f64;
        assert_eq!(free.peak, bound.peak);
        println!("without a bound {:.3}, with one {:.3}", ratio(free), ratio(bound));
        assert!(ratio(bound) < 1.2 && ratio(bound) < ratio(free), "{} against {}", ratio(bound), ratio(free));
    });
}

/// It is a promise about memory, not about calls: a program that repeats itself and fits makes none.
#[test]
fn a_steady_program_makes_no_calls() {
    support::guarded(|| {
        let pool = builder().memory_slack(1.1).build().unwrap();
        let step = || {
            pool.run(|dev, _| {
                let kept: Vec<_> = (1..20).map(|i| dev.zeros::<u8>(i * 300_000)).collect::<Result<_>>()?;
                drop(kept);
                Ok(dev.stats().driver_calls)
            })
            .unwrap()[0]
        };
        let first = step();
        (0..5).for_each(|_| assert_eq!(step(), first));
    });
}

#[test]
fn less_than_is_in_use_is_refused() {
    for slack in [0.9, f64::NAN, f64::INFINITY] {
        let error = builder().memory_slack(slack).build().map(drop).unwrap_err();
        assert!(error.to_string().contains("a number of at least 1"), "{error}");
    }
}
