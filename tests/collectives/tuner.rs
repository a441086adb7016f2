//! Limits that are measured when a pool is built: whatever they are, every result is right, and they are not nonsense.

use crate::{
    rig,
    support::{Gpus, all_are, on_cuda},
};
use gpu_pool::{Algorithm, DType, GpuPool, ReduceOp, Tune};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use std::time::Instant;

fn build(gpus: Gpus, n: usize, tune: Tune) -> GpuPool {
    let clock = Instant::now();
    let pool = rig::builder(gpus, n).check(Check::Off).algorithm(Algorithm::Auto).tune(tune).build().unwrap();
    println!("{tune:?}: {n} devices in {:?}: {}", clock.elapsed(), pool.report().collectives);
    pool
}

/// The largest power of two of bytes that is pushed, or 0.
fn pushed(pool: &GpuPool) -> usize {
    let sizes = (2..30).rev().map(|log| 1 << log);
    sizes.into_iter().find(|&bytes| pool.explain(DType::I32, ReduceOp::Sum, bytes).meets == "packets").unwrap_or(0)
}

mod cuda {
    use super::*;

    #[test]
    fn pools_that_measure_agree_and_are_right() {
        on_cuda(2, |gpus| {
            for n in [2, gpus.up_to(8)] {
                let pools = [build(gpus, n, Tune::Measure), build(gpus, n, Tune::Measure)];
                let limits = pools.each_ref().map(pushed);
                let meet = pools[0].explain(DType::I32, ReduceOp::Sum, 1 << 20).meets == "flags";
                let text = &pools[0].report().collectives;
                // Or that it took too long. Devices that share a GPU are not measured.
                let tried = text.contains("measured when") || text.contains("since measuring");
                assert_eq!(tried, meet && !pools[0].report().shares_gpus(), "{text}");
                // The machine may be busy with something else, but not that busy.
                let [a, b] = limits.map(|bytes| bytes.max(1 << 10));
                assert!(a.max(b) / a.min(b) <= 8, "{limits:?}");
                // All limits that it could be, and a part of a size that is large.
                for pool in &pools {
                    pool.run(|dev, _| {
                        for log in (0..21).chain([23]) {
                            for len in [(1 << log) - 1, 1 << log, (1 << log) + 1] {
                                let mut x = dev.upload(&vec![1.0 + dev.rank() as f32; len])?;
                                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                                let want = (n * (n + 1) / 2) as f32;
                                assert!(all_are(&dev.download(&x)?, want), "{len} elements");
                            }
                        }
                        Ok(())
                    })
                    .unwrap();
                    // Measuring has given back what it took.
                    assert!(pool.memory_stats().iter().all(|stats| stats.in_use == 0));
                }
            }
        });
    }

    #[test]
    fn known_machines_have_a_table() {
        on_cuda(2, |gpus| {
            let pool = build(gpus, 2, Tune::Auto);
            let (report, name) = (pool.report(), &pool.report().devices[0].name);
            let direct = report.peers.iter().all(|peer| peer.verified);
            let direct = direct && !report.shares_gpus();
            let known = name == "NVIDIA H200" && direct && report.devices.iter().all(|device| device.name == *name);
            assert_eq!(report.collectives.starts_with("table for NVIDIA H200"), known, "{}", report.collectives);
            assert!(build(gpus, 2, Tune::Off).report().collectives.starts_with("default:"));
        });
    }
}

/// How a sum is carried out changes no bit of it: neither by packets and flags, nor by the number of blocks.
#[test]
fn bits_do_not_depend_on_it() {
    fn sums(gpus: Gpus) {
        let n = gpus.up_to(4);
        let of = |tune| {
            build(gpus, n, tune).run(|dev, _| {
                let mut found = Vec::new();
                for len in [100, 10_000, 70_000, 1_000_000] {
                    let noise = (0..len).map(|i| ((i * 7919 + dev.rank() * 104_729) % 10_007) as f32 / 3.0);
                    let mut x = dev.upload(&noise.collect::<Vec<_>>())?;
                    dev.all_reduce(&mut x, ReduceOp::Sum)?;
                    found.extend(dev.download(&x)?.into_iter().map(f32::to_bits));
                }
                Ok(found)
            })
        };
        let [off, measured, table] = [Tune::Off, Tune::Measure, Tune::Table].map(|tune| of(tune).unwrap());
        assert!(off == measured && off == table && off.windows(2).all(|pair| pair[0] == pair[1]));
    }
    crate::support::on_host(2, sums);
    on_cuda(2, sums);
}
