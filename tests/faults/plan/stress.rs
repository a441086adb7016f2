//! Faults by chance: whatever comes together, every scope ends with the right data or with a typed error, and when the
//! faults end the pool is as good as new.

use super::{assert_works, collectives};
use crate::support::{bytes, cases, guarded};
use gpu_pool::{Error, GpuPool};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{FaultPlan, FaultRule, Injected};
use proptest::prelude::*;

/// An error that some of the injected faults explain.
fn is_explained(error: &Error) -> bool {
    match error {
        Error::OutOfMemory { .. } | Error::Driver { code: 999, .. } | Error::DeviceLost { code: 46 | 719, .. } => true,
        Error::Aborted { cause, .. } => is_explained(cause),
        _ => false,
    }
}

fn work(pool: &GpuPool, round: u8) -> Result<(), Error> {
    let kept = pool.run(|dev, _| dev.upload(&bytes(3000, dev.index() as u8 ^ round)))?;
    pool.run(|dev, _| {
        collectives(dev)?;
        let n = dev.count();
        for step in 0..n {
            let from = (dev.index() + step) % n;
            let stream = dev.stream()?;
            let dev = dev.on(&stream);
            let copy = kept[from].copy_to(&dev)?;
            assert_eq!(dev.download(&copy)?, bytes(3000, from as u8 ^ round));
        }
        Ok(())
    })?;
    let mut state = pool.per_device(|dev, _| dev.upload(&[f32::from(round); 9]))?;
    state.run(|dev, _, x| {
        dev.scale(x, 2.0)?;
        assert_eq!(dev.download(x)?, [2.0 * f32::from(round); 9]);
        collectives(dev)
    })?;
    Ok(())
}

/// A pool, as soon as the faults let it be built.
fn built(plan: &FaultPlan, count: usize, staged: bool) -> GpuPool {
    loop {
        let builder = GpuPool::builder().host(count).faults(plan.clone());
        match if staged { builder.without_peer_access() } else { builder }.build() {
            Ok(pool) => return pool,
            Err(error) => assert!(is_explained(&error), "{error}"),
        }
    }
}

fn calls_that_fail(seed: u64, count: usize, chance: f64, staged: bool) {
    let plan = FaultPlan::new()
        .seed(seed)
        .on(FaultRule::new(Injected::Error).chance(chance))
        .on(FaultRule::new(Injected::OutOfMemory).chance(chance));
    let pool = built(&plan, count, staged);
    for round in 0..8 {
        if let Err(error) = work(&pool, round) {
            assert!(is_explained(&error), "{error}, after {:?}", plan.fired());
        }
        plan.pause();
        work(&pool, round).unwrap();
        assert_works(&pool);
        plan.resume();
    }
    plan.pause();
    pool.close().unwrap();
}

/// One device after the other is lost, and those who are left go on, until there is none.
fn devices_that_are_lost(seed: u64, count: usize) {
    let plan = FaultPlan::new()
        .seed(seed)
        .on(FaultRule::new(Injected::DeviceLost).chance(0.004))
        .on(FaultRule::new(Injected::LaunchFailed).chance(0.004))
        .paused();
    let mut pool = built(&plan, count, false);
    for round in 0..60 {
        plan.resume();
        let done = work(&pool, round);
        plan.pause();
        match done {
            Ok(()) => assert_works(&pool),
            Err(error) => {
                assert!(is_explained(&error), "{error}, after {:?}", plan.fired());
                // Those who are lost and have not been heard of yet are heard of now.
                while let Err(error) = pool.run(|dev, _| collectives(dev)) {
                    assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
                    pool = match pool.survivors() {
                        Ok(rest) => rest,
                        Err(Error::DeviceLost { .. }) => continue,
                        Err(Error::NoDevice { .. }) => return,
                        Err(other) => panic!("{other}"),
                    };
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(3, 12), max_shrink_iters: 0, ..ProptestConfig::default() })]

    #[test]
    fn calls_fail_by_chance(seed: u64, count in 1usize..4, chance in 0.0005f64..0.02, staged: bool) {
        guarded(move || calls_that_fail(seed, count, chance, staged));
    }

    #[test]
    fn devices_are_lost_by_chance(seed: u64, count in 1usize..5) {
        guarded(move || devices_that_are_lost(seed, count));
    }
}
