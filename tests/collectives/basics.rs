//! Collectives: right sums, the same bits everywhere and every time, on every route, stream, length and gang.

use crate::{
    on_both, rig,
    support::{self, failure, guarded, slow_add},
};
use gpu_pool::{AsView, Device, Error, GpuPool, ReduceOp};
use std::{sync::Arc, thread};

/// Numbers of both signs and many sizes, the same for the same rank and length.
fn numbers(len: usize, rank: usize) -> Vec<f64> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(rank as u64 + 1) ^ len as u64;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let unit = (state >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
            unit * f64::powi(2.0, (state % 13) as i32)
        })
        .collect()
}

/// What the sum over ranks is, and how far off a sum in another precision may be at each place.
fn reference(len: usize, ranks: usize, epsilon: f64) -> Vec<(f64, f64)> {
    let mut sums = vec![(0.0, 0.0); len];
    for rank in 0..ranks {
        for (sum, x) in sums.iter_mut().zip(numbers(len, rank)) {
            sum.0 += x;
            sum.1 += x.abs();
        }
    }
    // Each of the additions rounds once, and so did the conversion of the terms.
    sums.into_iter().map(|(sum, size)| (sum, size * epsilon * (ranks + 1) as f64)).collect()
}

fn lengths(ranks: usize) -> Vec<usize> {
    vec![0, 1, ranks - 1, ranks, ranks + 1, 1000, 100_003]
}

/// Every rank's result for every length, both types and both operations, as bits.
fn all_reduced(dev: &Device, lengths: &[usize]) -> Result<Vec<Vec<u64>>, Error> {
    let mut out = Vec::new();
    for &len in lengths {
        let host = numbers(len, dev.rank());
        for op in [ReduceOp::Sum, ReduceOp::Avg] {
            let mut x = dev.upload(&host.iter().map(|&x| x as f32).collect::<Vec<_>>())?;
            dev.all_reduce(&mut x, op)?;
            out.push(dev.download(&x)?.into_iter().map(|x| f64::from(x).to_bits()).collect());
            let mut x = dev.upload(&host)?;
            dev.all_reduce(&mut x, op)?;
            out.push(dev.download(&x)?.into_iter().map(f64::to_bits).collect());
        }
    }
    Ok(out)
}

/// Runs [`all_reduced`] and compares with the reference, among the ranks, and with a second run.
fn check(pool: &GpuPool, gang: &[usize], lengths: &[usize]) {
    let n = gang.len();
    let run = || pool.on(gang).run(|dev, _| all_reduced(dev, lengths)).unwrap();
    let found = run();
    for rank in 1..n {
        assert!(found[0] == found[rank], "ranks 0 and {rank} of {n} hold different bits");
    }
    assert!(found == run(), "the second run gave other bits");
    let mut results = found[0].iter();
    for &len in lengths {
        for divisor in [1.0, n as f64] {
            for epsilon in [f64::from(f32::EPSILON), f64::EPSILON] {
                for (i, (bits, (sum, bound))) in
                    results.next().unwrap().iter().zip(reference(len, n, epsilon)).enumerate()
                {
                    let (x, sum, bound) = (f64::from_bits(*bits), sum / divisor, 2.0 * bound / divisor);
                    assert!((x - sum).abs() <= bound, "{n} ranks, {len} elements, at {i}: {x}, not {sum} +- {bound}");
                }
            }
        }
    }
    assert!(results.next().is_none());
}

on_both! {
    1: fn all_reduce_is_right_and_the_same_everywhere(gpus) {
        let most = gpus.up_to(8);
        let pool = rig::pool(gpus, most);
        for n in 1..=most {
            check(&pool, &(0..n).collect::<Vec<_>>(), &lengths(n));
        }
    }

    2: fn all_reduce_without_peer_access(gpus) {
        let n = gpus.up_to(4);
        let pool = gpus.staged(n);
        check(&pool, &(0..n).collect::<Vec<_>>(), &lengths(n));
        check(&pool, &[1, 0], &[7, 1_200_003]);
    }

    2: fn gangs_in_any_order(gpus) {
        let n = gpus.up_to(5);
        let pool = rig::pool(gpus, n);
        check(&pool, &(0..n).rev().collect::<Vec<_>>(), &lengths(n));
        check(&pool, &[n - 1, 0], &lengths(2));
        check(&pool, &[n - 1], &lengths(1));
    }

    2: fn on_other_streams_behind_slow_work(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let found = pool.run(|dev, _| {
            let streams = [dev.stream()?, dev.stream()?];
            let (a, b) = (dev.on(&streams[0]), dev.on(&streams[1]));
            let mut x = dev.upload(&vec![1.0f32; 10_001])?;
            let mut busy = dev.zeros::<u32>(10)?;
            // The devices get there at different times.
            slow_add(&a, &mut busy, 1, 10_000 * (dev.rank() as u32 + 1))?;
            a.scale(&mut x, 2.0)?;
            b.all_reduce(&mut x, ReduceOp::Sum)?;
            a.scale(&mut x, 0.5)?;
            a.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.all_reduce(&mut x, ReduceOp::Avg)?;
            b.download(&x)
        });
        assert_eq!(found.unwrap(), vec![vec![(n * n) as f32; 10_001]; n]);
    }

    2: fn views_at_odd_offsets(gpus) {
        for staged in [false, true] {
            let n = gpus.up_to(3);
            let pool = if staged { gpus.staged(n) } else { rig::pool(gpus, n) };
            let found = pool.run(|dev, _| {
                // Another place in each device's buffer.
                let start = 1 + 3 * dev.rank();
                let mut x = dev.upload(&vec![1.0f64; 1200])?;
                dev.all_reduce(&mut x.slice_mut(start..start + 1001), ReduceOp::Sum)?;
                dev.download(&x)
            });
            for (rank, x) in found.unwrap().into_iter().enumerate() {
                let inside = 1 + 3 * rank..1002 + 3 * rank;
                assert!(x.iter().enumerate().all(|(i, &x)| x == if inside.contains(&i) { n as f64 } else { 1.0 }));
            }
        }
    }

    2: fn in_unified_memory(gpus) {
        for staged in [false, true] {
            let n = gpus.up_to(3);
            let pool = if staged { gpus.staged(n) } else { rig::pool(gpus, n) };
            let mut table = pool.unified::<f32>(n * 501).unwrap();
            for (rank, rows) in table.as_mut_slice().unwrap().chunks_mut(501).enumerate() {
                rows.fill(rank as f32 + 1.0);
            }
            pool.with(table.rows_mut(501)).run(|dev, _, mut rows| dev.all_reduce(&mut rows, ReduceOp::Sum)).unwrap();
            assert_eq!(table.as_slice().unwrap(), vec![(n * (n + 1) / 2) as f32; n * 501]);
        }
    }

    // Managed memory is at home everywhere, and so is no sign of whose it is.
    2: fn from_device_memory_to_unified_memory(gpus) {
        let n = gpus.up_to(4);
        for way in rig::WAYS {
            let pool = way.pool(gpus, n);
            for root in 0..n {
                let mut table = pool.unified::<u32>(n * 501).unwrap();
                pool.with(table.rows_mut(501)).run(|dev, _, mut rows| match dev.rank() == root {
                    true => dev.broadcast(&mut dev.upload(&(0..501).collect::<Vec<u32>>())?, root),
                    false => dev.broadcast(&mut rows, root),
                })
                .unwrap();
                for (rank, rows) in table.as_slice().unwrap().chunks(501).enumerate() {
                    assert!(rank == root || rows.iter().copied().eq(0..501), "{way:?}, from {root} to {rank}");
                }
            }
        }
    }

    2: fn not_a_number_and_infinity_are_passed_on(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let found = pool.run(|dev, _| {
            let last = dev.rank() == n - 1;
            let inf = if last { f32::NEG_INFINITY } else { f32::INFINITY };
            let mut x = dev.upload(&[if last { f32::NAN } else { 1.0 }, f32::INFINITY, inf, f32::MAX, -0.0])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.download(&x)
        });
        for x in found.unwrap() {
            assert!(x[0].is_nan() && x[1] == f32::INFINITY && x[2].is_nan() && x[3] == f32::INFINITY, "{x:?}");
            assert_eq!(x[4].to_bits(), (-0.0f32).to_bits());
        }
    }

    2: fn two_hundred_in_a_row_mixed_with_all_else(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let found = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.0f64; 100])?;
            let mut y = dev.upload(&[dev.rank() as f32])?;
            for i in 0..200usize {
                dev.all_reduce(&mut x, ReduceOp::Avg)?;
                match i % 5 {
                    0 => dev.scale(&mut x, 2.0)?,
                    1 => dev.scale(&mut x, 0.5)?,
                    2 => dev.barrier()?,
                    3 => assert_eq!(dev.exchange((i, dev.rank()))?, (0..n).map(|r| (i, r)).collect::<Vec<_>>()),
                    _ => {
                        dev.fill(&mut y, dev.rank() as f32)?;
                        dev.all_reduce(&mut y, ReduceOp::Sum)?;
                    }
                }
            }
            Ok((dev.download(&x)?, dev.download(&y)?))
        });
        // Averages of equal numbers; with three devices the reciprocal rounds.
        for (x, y) in found.unwrap() {
            assert!(x.iter().all(|x| (x - 1.0).abs() < 1e-12), "{x:?}");
            assert_eq!(y, [(n * (n - 1) / 2) as f32]);
        }
    }

    2: fn back_to_back_without_a_wait(gpus) {
        for staged in [false, true] {
            let n = gpus.up_to(4);
            let pool = if staged { gpus.staged(n) } else { rig::pool(gpus, n) };
            let found = pool.run(|dev, _| {
                let mut x = dev.upload(&vec![1.0f32; 4099])?;
                for _ in 0..200 {
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    dev.scale(&mut x, 1.0 / n as f32)?;
                }
                dev.download(&x)
            });
            assert!(found.unwrap().iter().flatten().all(|x| (x - 1.0).abs() < 1e-4));
        }
    }

    2: fn two_application_threads(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        thread::scope(|s| {
            for caller in 1..3 {
                let pool = &pool;
                s.spawn(move || {
                    for round in 0..30 {
                        let value = (caller * 1000 + round) as f64;
                        let found = pool.run(|dev, _| {
                            let mut x = dev.upload(&vec![value; 999])?;
                            dev.all_reduce(&mut x, ReduceOp::Sum)?;
                            dev.all_reduce(&mut x.slice_mut(7..), ReduceOp::Avg)?;
                            dev.download(&x)
                        });
                        for x in found.unwrap() {
                            assert!(x.iter().all(|x| (x - value * n as f64).abs() <= 1e-9 * value), "{value}");
                        }
                    }
                });
            }
        });
    }

    // When an all-reduce has passed on a device's own stream, no peer reads its buffer any more.
    2: fn the_buffer_may_be_changed_right_after(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let found = pool.run(|dev, _| {
            let mut results = Vec::new();
            let mut busy = dev.zeros::<u32>(1)?;
            for round in 0..10 {
                let mut x = dev.upload(&vec![round as f32; 50_000])?;
                if dev.rank() == round % n {
                    slow_add(dev, &mut busy, 1, 3_000)?;
                }
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                let mut keep = dev.zeros::<f32>(50_000)?;
                dev.copy(&x, &mut keep)?;
                // At once, and then the memory is somebody else's.
                dev.fill(&mut x, f32::NAN)?;
                drop(x);
                results.push(keep);
            }
            results.iter().map(|x| dev.download(x)).collect::<Result<Vec<_>, _>>()
        });
        for rounds in found.unwrap() {
            for (round, x) in rounds.into_iter().enumerate() {
                assert!(x.iter().all(|&x| x == (round * n) as f32), "round {round}");
            }
        }
    }

    2: fn exchange_gives_everyone_everything_in_rank_order(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        let gang: Vec<usize> = (0..n).rev().collect();
        let found = pool.on(&gang).run(|dev, _| {
            let text = dev.exchange(format!("rank {} is device {}", dev.rank(), dev.index()))?;
            let none = dev.exchange(())?;
            let large = dev.exchange(Arc::new(vec![dev.rank(); 10_000]))?;
            // Device memory, too.
            let buffers = dev.exchange(Arc::new(dev.upload(&[dev.rank() as u32])?))?;
            let values =
                buffers.iter().map(|x| Ok(dev.download(&x.copy_to(dev)?)?[0])).collect::<Result<Vec<_>, Error>>();
            assert_eq!((none.len(), large[n - 1][9_999]), (n, n - 1));
            Ok((text, values?))
        });
        let text: Vec<String> = (0..n).map(|r| format!("rank {r} is device {}", n - 1 - r)).collect();
        let values: Vec<u32> = (0..n as u32).collect();
        assert_eq!(found.unwrap(), vec![(text, values); n]);
    }

    2: fn exchanged_values_must_be_of_one_type(gpus) {
        let pool = rig::pool(gpus, 2);
        let errors = pool.run(|dev, _| {
            Ok(match dev.rank() {
                0 => failure(dev.exchange([0u8; 4])),
                _ => failure(dev.exchange(0u32)),
            })
        });
        for error in errors.unwrap() {
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { what: "dtype", .. }), "{text}");
            assert!(text.contains("exchange([u8; 4])") && text.contains("exchange(u32)"), "{text}");
        }
    }

    1: fn a_gang_of_one_needs_nobody(gpus) {
        let pool = rig::pool(gpus, 1);
        let found = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.5f32, -2.0])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.all_reduce(&mut x, ReduceOp::Avg)?;
            dev.barrier()?;
            assert_eq!(dev.exchange("alone")?, ["alone"]);
            assert_eq!(x.view().len(), 2);
            dev.download(&x)
        });
        assert_eq!(found.unwrap(), [[1.5, -2.0]]);
    }
}

#[test]
fn sixteen_software_devices() {
    guarded(|| {
        let pool = support::builder().host(16).build().unwrap();
        check(&pool, &(0..16).collect::<Vec<_>>(), &lengths(16));
    });
}
