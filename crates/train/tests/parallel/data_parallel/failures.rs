//! Gradients that are not finite, wrong calls, closures and drivers that fail; and many interleavings.

use super::rig::{Bag, SIZES, backward, bag, bags, bits, either, refused, step, weights};
use crate::{
    on_both,
    support::{Gpus, cases, failure, on_cuda, until},
};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, Result};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{Explorer, FaultPlan};
use gpu_pool_train::{DataParallel, LearningRate, Model, Optimizer};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::*},
};

on_both! {
    // NaN and infinity are reported, and do not get into the parameters.
    1: fn gradients_that_are_not_finite_change_nothing(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        for (bad, sharded) in [(f32::NAN, false), (f32::INFINITY, true), (3e38, false)] {
            let optimizer = either(Optimizer::adam(0.1), sharded);
            let make = || bags::<f32>(&pool, optimizer, &[3000, 2], 0);
            let (mut model, mut other) = (make(), make());
            step(&mut model, &[3000, 2], 0, 4).unwrap();
            step(&mut other, &[3000, 2], 0, 4).unwrap();
            let poison = |model: &mut DataParallel<Bag>| model.step(4, |dev, shard, _, gradients| {
                gradients.write(1, |g| dev.fill(g, if shard.index() == 0 { bad } else { 1.0 }))?;
                gradients.write(0, |g| dev.fill(g, bad))
            });
            poison(&mut model).unwrap();
            let error = failure(step(&mut model, &[3000, 2], 1, 4));
            let Error::NotFinite { op: "DataParallel::step", step: 1, norm, site } = &error else { panic!("{error}") };
            assert!(!norm.is_finite() && site.file().starts_with("crates/train/tests"), "{error}");
            assert_eq!(model.steps(), 1);
            assert_eq!(bits(&weights(&mut model).unwrap()[0]), bits(&weights(&mut other).unwrap()[0]));
            // It goes on as if nothing had been, and the last step is seen, too.
            step(&mut model, &[3000, 2], 1, 4).unwrap();
            step(&mut other, &[3000, 2], 1, 4).unwrap();
            model.verify().unwrap();
            assert_eq!(bits(&weights(&mut model).unwrap()[0]), bits(&weights(&mut other).unwrap()[0]));
            poison(&mut model).unwrap();
            assert!(matches!(failure(model.verify()), Error::NotFinite { step: 2, .. }));
            model.verify().unwrap();
        }
    }

    1: fn wrong_calls_are_typed_errors(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        let empty = DataParallel::new(&pool, Optimizer::sgd(0.1), |_| Ok(Bag::<f32>(Vec::new())));
        assert!(refused(empty).contains("no parameters"));
        refused(DataParallel::new(&pool, Optimizer::sgd(f64::NAN), |dev| bag::<f32>(dev, &[1], 0)));
        if pool.device_count() == 2 {
            // Each device says that it is the first one.
            let groups = DataParallel::new_in(
                &pool,
                |dev| dev.group(&[dev.rank(), 1 - dev.rank()]),
                Optimizer::sgd(0.1),
                |dev| bag::<f32>(dev, &[1], 0),
            );
            assert!(matches!(failure(groups), Error::Mismatch { .. }));
        }
        let mut model = bags::<f32>(&pool, Optimizer::sgd(0.1), &[4, 2], 0);
        assert!(refused(model.step(0, |_, _, _, _| Ok(()))).contains("0 rows"));
        assert!(refused(model.accumulate(0, |_, _, _, _| Ok(()))).contains("0 rows"));
        refused(model.set_rate(-1.0));
        // What is right in `f64` alone: a step would make NaN or infinity of it.
        for wrong in [Optimizer::adam(0.1).eps(0.0), Optimizer::adam(0.1).eps(1e-50), Optimizer::sgd(1e300)] {
            refused(DataParallel::new(&pool, wrong, |dev| bag::<f32>(dev, &[1], 0)));
        }
        refused(model.set_rate(1e300));
        let growing = Optimizer::sgd(1.0).schedule(LearningRate::Exponential { factor: 1e30 });
        let mut grows = bags::<f32>(&pool, growing, &[1], 0);
        let small = |grows: &mut DataParallel<Bag>| {
            grows.step(2, |dev, _, _, g| g.write(0, |g| dev.fill(g, 1e-35)))
        };
        small(&mut grows).unwrap();
        small(&mut grows).unwrap();
        for _ in 0..2 {
            assert!(refused(small(&mut grows)).contains("the rate of step 2 is 1"));
        }
        grows.verify().unwrap();
        step(&mut model, &[4, 2], 0, 2).unwrap();
        // These fail in the scope: recover, and go on.
        assert!(refused(model.step(2, |_, _, _, _| Ok(()))).contains("no gradient"));
        assert!(matches!(failure(step(&mut model, &[4, 2], 0, 2)), Error::Poisoned { .. }));
        model.clear_poison().unwrap();
        assert!(refused(model.step(2, |dev, _, _, g| {
            g.write(1, |g| dev.fill(g, 0.0))?;
            g.write(1, |g| dev.fill(g, 0.0))
        })).contains("gradient 1"));
        model.clear_poison().unwrap();
        refused(model.step(2, |dev, _, _, g| g.write(2, |g| dev.fill(g, 0.0))));
        model.clear_poison().unwrap();
        let error = refused(model.step(2, |dev, _, bag, g| {
            bag.0[1] = dev.zeros(3)?;
            g.write(1, |g| dev.fill(g, 0.0))
        }));
        assert!(error.contains("parameter 1 has 3 elements, and had 2"), "{error}");
        // Nothing has changed, but the model is wrong until somebody makes it right.
        model.clear_poison().unwrap();
        model.each(|dev, bag| { bag.0[1] = dev.zeros(2)?; Ok(()) }).unwrap();
        step(&mut model, &[4, 2], 0, 2).unwrap();
        model.verify().unwrap();
    }

    // `test_parallel_apply_passes_exception`: wherever a closure fails, its error comes back, nothing has changed, and
    // after `clear_poison` all goes on as if nothing had been.
    2: fn closures_that_fail(gpus) {
        let pool = gpus.pool(gpus.up_to(3));
        for sharded in [false, true] {
            let optimizer = either(Optimizer::adam(0.1).clip(1.0).bucket_bytes(100), sharded);
            let make = || bags::<f32>(&pool, optimizer, &SIZES, 0);
            let (mut model, mut other) = (make(), make());
            for number in 0..4 {
                let fails = |model: &mut DataParallel<Bag>, panics: bool, after| {
                    let ended = model.step(9, |dev, shard, _, gradients| {
                        let given = AtomicUsize::new(0);
                        if dev.rank() == 1 {
                            // In the midst of the backward pass.
                            for k in (0..SIZES.len()).rev().take(after) {
                                gradients.write(k, |own| dev.fill(own, 1.0))?;
                                given.fetch_add(1, Relaxed);
                            }
                            assert!(!panics, "a closure panics");
                            return Err(Error::custom(format!("failed after {}", given.load(Relaxed))));
                        }
                        backward(gradients, dev, &SIZES, number, shard.range(9).len())
                    });
                    failure(ended)
                };
                for after in [0, 3, SIZES.len()] {
                    assert_eq!(fails(&mut model, false, after).to_string(), format!("failed after {after}"));
                    assert!(matches!(failure(step(&mut model, &SIZES, number, 9)), Error::Poisoned { .. }));
                    model.clear_poison().unwrap();
                }
                assert!(matches!(fails(&mut model, true, 2), Error::Panicked { device: 1, .. }));
                model.clear_poison().unwrap();
                // Gradients of a pass before are forgotten, too.
                let held = model.accumulate(9, |dev, shard, _, gradients| {
                    backward(gradients, dev, &SIZES, 77, shard.range(9).len())
                });
                assert_eq!(held.unwrap().len(), pool.device_count());
                fails(&mut model, false, 1);
                model.clear_poison().unwrap();
                step(&mut model, &SIZES, number, 9).unwrap();
                step(&mut other, &SIZES, number, 9).unwrap();
            }
            model.verify().unwrap();
            let (found, expected) = (weights(&mut model).unwrap(), weights(&mut other).unwrap());
            assert!(found.iter().zip(&expected).all(|(a, b)| bits(a) == bits(b)));
        }
    }

    // Memory runs out within the backward pass of one device.
    2: fn memory_that_runs_out(gpus) {
        let plan: FaultPlan = "1:alloc:1+:oom".parse().unwrap();
        let plan = plan.paused();
        let pool = gpus.builder(2).faults(plan.clone()).build().unwrap();
        let mut model = bags::<f32>(&pool, Optimizer::adam(0.1).sharded(), &SIZES, 0);
        step(&mut model, &SIZES, 0, 4).unwrap();
        let before = weights(&mut model).unwrap();
        plan.resume();
        let error = failure(model.step(4, |dev, shard, _, gradients| {
            let _activations = dev.zeros::<u8>(64 << 20)?;
            backward(gradients, dev, &SIZES, 1, shard.range(4).len())
        }));
        assert!(matches!(error, Error::OutOfMemory { device: 1, .. }), "{error}");
        plan.pause();
        model.clear_poison().unwrap();
        assert!(bits(&before[0]) == bits(&weights(&mut model).unwrap()[1]));
        step(&mut model, &SIZES, 1, 4).unwrap();
        model.verify().unwrap();
    }

    // The update was launched: all of it, but nobody knows how far it got. The parameters of all devices may be equal.
    2: fn a_scope_that_fails_after_the_update(gpus) {
        for sharded in [false, true] {
            let plan: FaultPlan = "1:stream-wait:1:error".parse().unwrap();
            let plan = plan.paused();
            let pool = gpus.builder(2).faults(plan.clone()).build().unwrap();
            let mut model = bags::<f32>(&pool, either(Optimizer::sgd(0.1), sharded), &SIZES, 0);
            plan.resume();
            assert!(matches!(failure(step(&mut model, &SIZES, 0, 4)), Error::Driver { device: 1, .. }));
            plan.pause();
            for _ in 0..2 {
                assert!(failure(model.clear_poison()).to_string().contains("under way"));
                assert!(matches!(failure(step(&mut model, &SIZES, 0, 4)), Error::Poisoned { .. }));
            }
            assert_eq!(plan.fired().len(), 1);
        }
    }

    // No group updates its parameters before the closures of all groups have ended: one that fails late has changed
    // nothing.
    2: fn a_group_waits_for_the_closures_of_the_others(gpus) {
        let pool = gpus.pool(2);
        let make = |dev: &Device| bag::<f32>(dev, &SIZES, 0);
        let mut model =
            DataParallel::new_in(&pool, |dev| dev.group(&[dev.rank()]), Optimizer::sgd(0.1), make).unwrap();
        let before = weights(&mut model).unwrap();
        let error = failure(model.step(4, |dev, _, _, gradients| {
            if dev.rank() == 0 {
                return backward(gradients, dev, &SIZES, 0, 1);
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
            Err(Error::custom("too late"))
        }));
        assert_eq!(error.to_string(), "too late");
        assert!(matches!(failure(model.each(|_, _| Ok(()))), Error::Poisoned { .. }));
        model.clear_poison().unwrap();
        assert_eq!(model.steps(), 0);
        assert!(weights(&mut model).unwrap() == before);
        step(&mut model, &SIZES, 0, 4).unwrap();
        // A group that was not finite before is reported, whether or not its devices have looked.
        for (first, second) in [(0, 20), (20, 0)] {
            model.step(4, |dev, _, _, gradients| {
                gradients.write(0, |g| dev.fill(g, if dev.rank() == 1 { f32::NAN } else { 1.0 }))
            }).unwrap();
            let steps = model.steps();
            failure(model.step(4, |dev, _, _, gradients| {
                let wait = if dev.rank() == 1 { first } else { second };
                std::thread::sleep(std::time::Duration::from_millis(wait));
                if dev.rank() == 1 { backward(gradients, dev, &SIZES, 0, 1) } else { Err(Error::custom("fails")) }
            }));
            let error = failure(model.clear_poison());
            assert!(matches!(error, Error::NotFinite { step, .. } if step + 1 == steps), "{error}");
            assert_eq!(model.steps(), steps);
        }
        step(&mut model, &SIZES, 0, 4).unwrap();
        model.verify().unwrap();
    }

    // A group has made its step, and has left the scope, when another one fails.
    2: fn a_group_that_is_a_step_ahead(gpus) {
        /// `calls`: of the first device's `parameters` in a step. The second call comes with the step under way.
        struct Late(Bag, usize, Arc<AtomicBool>, Arc<AtomicUsize>);
        impl Model for Late {
            fn parameters(&mut self) -> Vec<&mut DeviceBuffer<f32>> {
                if self.1 == 0 {
                    self.3.fetch_add(1, SeqCst);
                } else if self.2.load(SeqCst) {
                    until("the other one is ahead", || self.3.load(SeqCst) >= 2).unwrap();
                    panic!("too late");
                }
                self.0.parameters()
            }
        }
        let (pool, late, calls) = (gpus.pool(2), Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let make = |dev: &Device| Ok(Late(bag(dev, &SIZES, 0)?, dev.rank(), late.clone(), calls.clone()));
        let mut model =
            DataParallel::new_in(&pool, |dev| dev.group(&[dev.rank()]), Optimizer::sgd(0.1), make).unwrap();
        let one = |model: &mut DataParallel<Late>| {
            model.step(4, |dev, _, _, gradients| backward(gradients, dev, &SIZES, 0, 1))
        };
        one(&mut model).unwrap();
        calls.store(0, SeqCst);
        late.store(true, SeqCst);
        assert!(matches!(failure(one(&mut model)), Error::Panicked { .. }));
        late.store(false, SeqCst);
        assert!(failure(model.clear_poison()).to_string().contains("under way"));
        assert!(matches!(failure(model.each(|_, _| Ok(()))), Error::Poisoned { .. }));
    }
}

/// The same as `faults_at_every_action`, where one kernel of each device ends the step.
#[test]
fn faults_in_a_step_by_kernels_that_meet() {
    on_cuda(2, |gpus| {
        let [recovered, lost] = faults(gpus, true, 9);
        assert!(recovered > 0 && lost > 0, "{recovered} recovered, {lost} lost");
    });
}

/// A fault at each call of the driver within a step: the step succeeds or returns a typed error. After an error either
/// `clear_poison` finds all parameters equal, or it says that it cannot help, and the model stays poisoned. The pool
/// works.
#[test]
fn faults_at_every_action() {
    crate::support::guarded(|| {
        let found = [false, true].map(|sharded| faults(Gpus::software(), sharded, cases(7, 1)));
        let [recovered, lost] = [0, 1].map(|k| found[0][k] + found[1][k]);
        assert!(recovered > 0 && lost > 0, "{recovered} recovered, {lost} lost");
    });
}

fn faults(gpus: Gpus, sharded: bool, every: usize) -> [usize; 2] {
    let optimizer = either(Optimizer::adam(0.1).clip(1.0).bucket_bytes(100), sharded);
    let make = |pool: &GpuPool| bags::<f32>(pool, optimizer, &[40, 3, 30], 0);
    faults_in((gpus, every), make, |_| (), |model, number| step(model, &[40, 3, 30], number, 4))
}

/// A fault at each `every`-th call of the driver within `run`, which gets its number and needs `ready` before it is
/// first called, and after a failure. Counts how often `clear_poison` has helped, and how often not.
pub fn faults_in<M: Model>(
    (gpus, every): (Gpus, usize),
    make: impl Fn(&GpuPool) -> DataParallel<M>,
    ready: impl Fn(&mut DataParallel<M>),
    run: impl Fn(&mut DataParallel<M>, u64) -> Result<()>,
) -> [usize; 2] {
    let [mut recovered, mut lost] = [0; 2];
    for at in (1..).step_by(every) {
        let plan = format!("1:any:{at}:error").parse::<FaultPlan>().unwrap().paused();
        let pool = gpus.unwatched(2).faults(plan.clone()).build().unwrap();
        let mut model = make(&pool);
        ready(&mut model);
        run(&mut model, 0).unwrap();
        plan.resume();
        let ended = run(&mut model, 1).and_then(|()| model.verify());
        plan.pause();
        if plan.fired().is_empty() {
            ended.unwrap();
            break;
        }
        // A step that has succeeded is seen by `verify`, which may have failed itself.
        if let Err(error) = ended {
            assert!(matches!(error, Error::Driver { .. } | Error::DeviceLost { .. }), "call {at}: {error}");
            match model.clear_poison() {
                Ok(()) => recovered += 1,
                Err(error) => {
                    lost += 1;
                    assert!(error.to_string().contains("under way"), "call {at}: {error}");
                    assert!(matches!(failure(model.verify()), Error::Poisoned { .. }));
                    model = make(&pool);
                }
            }
            ready(&mut model);
        }
        model.verify().unwrap();
        run(&mut model, 2).unwrap();
        model.verify().unwrap();
    }
    [recovered, lost]
}

/// Any order of the devices' work gives the same bits.
#[test]
fn in_many_interleavings() {
    let expected = parking_lot::Mutex::new(None);
    let explorer = Explorer::new().devices(3).seeds(cases(5, 100));
    let explored = explorer.run(|pool| {
        for sharded in [false, true] {
            let optimizer = Optimizer::adam_w(0.1).clip(0.5).bucket_bytes(9000);
            let optimizer = either(optimizer, sharded);
            let mut model = DataParallel::new(pool, optimizer, |dev| bag::<f32>(dev, &[2500, 3, 2100], 0))?;
            model.accumulate(2, |dev, _, _, gradients| backward(gradients, dev, &[2500, 3, 2100], 5, 1))?;
            step(&mut model, &[2500, 3, 2100], 0, 5)?;
            step(&mut model, &[2500, 3, 2100], 1, 2)?;
            model.verify()?;
            let found = weights(&mut model)?.swap_remove(0);
            let mut expected = expected.lock();
            assert!(bits(expected.get_or_insert_with(|| found.clone())) == bits(&found), "sharded: {sharded}");
        }
        Ok(())
    });
    if let Err(failure) = explored {
        panic!("{failure}");
    }
}
