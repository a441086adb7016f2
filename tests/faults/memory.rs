//! No memory: the one who asked is told how much there is, and what fits is served.

use crate::{
    on_both,
    rig::assert_works,
    support::{self, failure, guarded},
};
use gpu_pool::{Error, ReduceOp};

const MIB: usize = 1 << 20;

on_both! {
    1: fn a_memory_limit_holds_and_nothing_is_lost(gpus) {
        let pool = gpus.builder(1).memory_limit(64 * MIB as u64).build().unwrap();
        pool.run(|dev, _| {
            let kept = dev.upload(&[3u8; 100])?;
            let half = dev.zeros::<u8>(32 * MIB)?;
            let error = failure(dev.zeros::<u8>(48 * MIB));
            match error {
                Error::OutOfMemory { device: 0, op: "zeros", requested, in_use, capacity, .. } => {
                    assert!(requested >= 48 * MIB as u64 && capacity == 64 * MIB as u64, "{requested} {capacity}");
                    assert!(in_use >= 32 * MIB as u64 && in_use <= 34 * MIB as u64, "{in_use}");
                }
                other => panic!("{other}"),
            }
            // What fits is still served, from what is there.
            let small: Vec<_> = (0..100).map(|_| dev.zeros::<u8>(100)).collect::<Result<_, _>>()?;
            drop(half);
            let large = dev.zeros::<u8>(48 * MIB)?;
            assert!(dev.stats().reserved <= 64 * MIB as u64, "{:?}", dev.stats());
            assert_eq!(dev.download(&kept)?, [3; 100]);
            drop((small, large, kept));
            Ok(())
        })
        .unwrap();
        assert_works(&pool);
    }

    // Memory that failed requests have searched is still there for small ones.
    1: fn running_out_does_not_lose_the_free_parts_of_a_slab(gpus) {
        // Two chunks of 2 MiB: one is a slab for small blocks, the other a buffer of its own.
        let pool = gpus.builder(1).memory_limit(4 * MIB as u64).build().unwrap();
        pool.run(|dev, _| {
            let small = dev.upload(&[1u8; 1000])?;
            let large = dev.zeros::<u8>(2 * MIB)?;
            for _ in 0..3 {
                let error = failure(dev.zeros::<u8>(3 * MIB));
                assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
                // The slab has room for as many again.
                let more: Vec<_> = (0..64).map(|_| dev.zeros::<u8>(1000)).collect::<Result<_, _>>()?;
                drop(more);
            }
            assert_eq!(dev.download(&small)?, [1; 1000]);
            drop((small, large));
            // And a slab that is quite free can become something else.
            drop(dev.zeros::<u8>(4 * MIB)?);
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_software_gpu_runs_out_of_memory() {
    guarded(|| {
        let pool = support::builder().host(2).software_memory(32 * MIB as u64).build().unwrap();
        pool.run(|dev, _| {
            let first = dev.upload(&vec![dev.index() as u8; 12 * MIB])?;
            for _ in 0..3 {
                match failure(dev.upload(&vec![0u8; 24 * MIB])) {
                    Error::OutOfMemory { device, op: "upload", requested, in_use, free, capacity, .. } => {
                        assert_eq!((device, capacity), (dev.index(), 32 * MIB as u64));
                        assert!(requested >= 24 * MIB as u64 && in_use >= 12 * MIB as u64 && free < 24 * MIB as u64);
                    }
                    other => panic!("{other}"),
                }
                // The next that fits is served; over and over, so nothing leaks.
                let fits = dev.upload(&vec![7u8; 14 * MIB])?;
                assert_eq!(dev.download(&fits.slice(MIB..MIB + 5))?, [7; 5]);
            }
            assert_eq!(dev.download(&first.slice(12 * MIB - 3..))?, [dev.index() as u8; 3]);
            assert!(matches!(failure(dev.zeros::<f64>(usize::MAX / 4)), Error::OutOfMemory { .. }));
            Ok(())
        })
        .unwrap();
        assert_works(&pool);
    });
}

/// One member's lack of memory fails a collective for all, and only that.
#[test]
fn no_memory_for_scratch_fails_the_gang_not_the_pool() {
    guarded(|| {
        let pool = support::builder().host(2).software_memory(32 * MIB as u64).build().unwrap();
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<u8>(if dev.index() == 0 { 24 * MIB } else { 1 })?;
            let mut y = dev.zeros::<f32>(MIB)?;
            dev.fill(&mut x, 1)?;
            dev.all_reduce(&mut y, ReduceOp::Sum)?;
            let _hog = dev.zeros::<u8>(if dev.index() == 0 { 2 * MIB } else { 1 })?;
            let mut z = dev.zeros::<f32>(MIB / 2)?;
            dev.all_reduce(&mut z, ReduceOp::Sum)?;
            let mut all = dev.zeros::<f32>(2 * MIB)?;
            dev.all_reduce(&mut all, ReduceOp::Sum)
        }));
        assert!(matches!(&error, Error::OutOfMemory { device: 0, .. }), "{error}");
        assert_works(&pool);
    });
}

#[test]
fn too_little_memory_for_a_pool_is_an_error_of_build() {
    guarded(|| {
        let error = failure(support::builder().host(3).software_memory(1000).build());
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    });
}
