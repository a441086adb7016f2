//! Steps as graphs: the bits of called steps, and the same answers to what goes wrong.
//!
//! Guards against PyTorch issue #89546: a step of DDP that does not go into a graph.

use super::failures::faults_in;
use super::rig::{Bag, Real, SIZES, backward, bag, bits, either, number, refused};
use crate::{
    on_both,
    support::{Gpus, cases, failure, on_cuda},
};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, Result, Shard, collective::ReduceOrder};
use gpu_pool_train::{DataParallel, Gradients, Model, Optimizer};
use half::{bf16, f16};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Parameters, and buffers with the gradients of the next step.
struct Fed<T: Real> {
    bag: Bag<T>,
    next: Vec<DeviceBuffer<T>>,
}

impl<T: Real> Model<T> for Fed<T> {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<T>> {
        self.bag.parameters()
    }
}

type Training<T> = DataParallel<Fed<T>, T>;

fn fed<T: Real>(pool: &GpuPool, optimizer: Optimizer, sizes: &[usize]) -> Training<T> {
    let next = |dev: &Device| sizes.iter().map(|len| dev.zeros(*len)).collect::<Result<_>>();
    DataParallel::new(pool, optimizer, |dev| Ok(Fed { bag: bag(dev, sizes, 3)?, next: next(dev)? })).unwrap()
}

/// The gradients that `backward` gives in this step.
fn fill<T: Real>(dev: &Device, shard: &Shard, fed: &mut Fed<T>, step: u64, rows: usize) -> Result<()> {
    let share = shard.range(rows).len() as f64 * f64::from((1.0 / rows as f64) as f32);
    fed.next.iter_mut().enumerate().try_for_each(|(k, next)| {
        let g: Vec<T> = (0..next.len()).map(|i| T::of(share * number(1000 * (step + 1) + k as u64, i))).collect();
        dev.upload_into(&g, next)
    })
}

fn pass<T: Real>(dev: &Device, fed: &Fed<T>, gradients: &mut Gradients<'_, T>) -> Result<()> {
    (0..gradients.len()).rev().try_for_each(|k| gradients.write(k, |own| dev.copy(&fed.next[k], own)))
}

fn capture<T: Real>(model: &mut Training<T>, rows: usize) -> Result<()> {
    model.capture_step(rows, |dev, _, fed, gradients| pass(dev, fed, gradients))
}

fn launch<T: Real>(model: &mut Training<T>, steps: std::ops::Range<u64>, rows: usize) -> Result<()> {
    let (first, count) = (steps.start, steps.count());
    model.launch_steps(count, |dev, shard, fed, k| fill(dev, &shard, fed, first + k as u64, rows))
}

fn call<T: Real>(model: &mut Training<T>, sizes: &[usize], step: u64, rows: usize) -> Result<()> {
    let f = |dev: &Device, shard: Shard, _: &mut Fed<T>, gradients: &mut Gradients<'_, T>| {
        backward(gradients, dev, sizes, step, shard.range(rows).len())
    };
    model.step(rows, f).map(drop)
}

/// The parameters of every replica.
fn weights<T: Real>(model: &mut Training<T>) -> Vec<Vec<T>> {
    let own = |dev: &Device, fed: &mut Fed<T>| fed.bag.0.iter().map(|x| dev.download(x)).collect::<Result<Vec<_>>>();
    model.each(own).unwrap().into_iter().map(|own| own.concat()).collect()
}

#[track_caller]
fn compare<T: Real>(one: &mut Training<T>, other: &mut Training<T>, what: &str) {
    assert_eq!(one.steps(), other.steps(), "{what}");
    let norms = [&mut *one, &mut *other].map(|model| model.gradient_norms().unwrap().unwrap());
    assert_eq!(norms[0].iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits_of(&norms[1]), "{what}");
    for (device, (a, b)) in weights(one).iter().zip(weights(other)).enumerate() {
        assert!(bits(a) == bits(&b), "{what}: device {device}");
    }
}

fn bits_of(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn optimizers() -> [Optimizer; 3] {
    [Optimizer::adam_w(0.01).clip(0.5), Optimizer::sgd(0.1).momentum(0.9).nesterov().decay(0.01), Optimizer::sgd(0.1)]
}

/// Launched steps, called ones between them, other numbers of steps in a scope: the bits of called steps alone.
fn same_bits<T: Real>(gpus: Gpus, n: usize, sizes: &[usize], bucket: usize) {
    let pool = gpus.unwatched(n).reduce_order(ReduceOrder::Rank).build().unwrap();
    for (optimizer, sharded) in optimizers().into_iter().flat_map(|optimizer| [(optimizer, false), (optimizer, true)]) {
        let optimizer = either(optimizer.bucket_bytes(bucket), sharded);
        let what = format!("{n} devices, {optimizer:?}");
        for rows in [13, 2] {
            let [mut graphs, mut calls] = [(); 2].map(|()| fed::<T>(&pool, optimizer, sizes));
            capture(&mut graphs, rows).unwrap();
            assert_eq!(graphs.steps(), 0);
            launch(&mut graphs, 0..1, rows).unwrap();
            launch(&mut graphs, 1..4, rows).unwrap();
            call(&mut graphs, sizes, 4, rows).unwrap();
            launch(&mut graphs, 5..5, rows).unwrap();
            launch(&mut graphs, 5..7, rows).unwrap();
            (0..7).try_for_each(|step| call(&mut calls, sizes, step, rows)).unwrap();
            compare(&mut graphs, &mut calls, &what);
            graphs.verify().unwrap();
        }
    }
}

on_both! {
    1: fn a_captured_step_has_the_bits_of_a_called_one(gpus) {
        for n in [1, 2, 3].into_iter().filter(|n| *n <= gpus.up_to(3)) {
            same_bits::<f32>(gpus, n, &SIZES, 9_000);
        }
        same_bits::<bf16>(gpus, gpus.up_to(2), &SIZES, 9_000);
        same_bits::<f16>(gpus, gpus.up_to(2), &[5000, 3], 100);
    }

    // A gradient that no device gives is named. One that some devices give counts as zero on the others.
    1: fn gradients_that_are_not_given_count_as_zero(gpus) {
        let pool = gpus.pool(gpus.up_to(3));
        for sharded in [false, true] {
            let optimizer = either(Optimizer::adam(0.1).bucket_bytes(100), sharded);
            let [mut graphs, mut calls] = [(); 2].map(|()| fed::<f32>(&pool, optimizer, &SIZES));
            let some = |dev: &Device, shard: Shard, fed: &mut Fed<f32>, gradients: &mut Gradients<'_>| {
                let given = |k: &usize| *k != 2 && (*k != 4 || shard.index() == 0);
                (0..SIZES.len()).rev().filter(given).try_for_each(|k| {
                    gradients.write(k, |own| dev.copy(&fed.next[k], own))
                })
            };
            graphs.capture_step(7, some).unwrap();
            assert!(graphs.unused().is_empty(), "no step was made");
            launch(&mut graphs, 0..3, 7).unwrap();
            assert_eq!(graphs.unused(), [2]);
            for step in 0..3 {
                calls.step(7, |dev, shard, fed, gradients| {
                    fill(dev, &shard, fed, step, 7)?;
                    some(dev, shard, fed, gradients)
                }).unwrap();
            }
            compare(&mut graphs, &mut calls, "some gradients");
        }
    }

    // The host reads a norm after it has launched the next step, which then changes nothing either.
    1: fn gradients_that_are_not_finite_change_nothing(gpus) {
        let pool = gpus.unwatched(gpus.up_to(3)).build().unwrap();
        for (bad, sharded) in [(f32::NAN, false), (f32::INFINITY, true), (3e38, false)] {
            let optimizer = either(Optimizer::adam(0.1), sharded);
            let [mut graphs, mut calls] = [(); 2].map(|()| fed::<f32>(&pool, optimizer, &[3000, 2]));
            capture(&mut graphs, 5).unwrap();
            let filled = AtomicUsize::new(0);
            let broken = |graphs: &mut Training<f32>, count: usize, at: usize| {
                graphs.launch_steps(count, |dev, shard, fed, k| {
                    filled.fetch_max(k + 1, Relaxed);
                    fill(dev, &shard, fed, k as u64, 5)?;
                    if k == at && shard.index() == 0 { dev.fill(&mut fed.next[0], bad) } else { Ok(()) }
                })
            };
            let error = failure(broken(&mut graphs, 6, 2));
            let Error::NotFinite { op: "DataParallel::launch_steps", step: 2, norm, site } = &error else {
                panic!("{error}")
            };
            assert!(!norm.is_finite() && site.file().starts_with("crates/train/tests"), "{error}");
            (0..2).try_for_each(|step| call(&mut calls, &[3000, 2], step, 5)).unwrap();
            assert_eq!((graphs.steps(), filled.load(Relaxed)), (2, 4), "one step more");
            assert!(bits(&weights(&mut graphs)[0]) == bits(&weights(&mut calls)[0]));
            // It goes on with the same graph, and sees the last step of a call, too.
            for at in [0, 1] {
                launch(&mut graphs, 2..4, 5).unwrap();
                (2..4).try_for_each(|step| call(&mut calls, &[3000, 2], step, 5)).unwrap();
                compare(&mut graphs, &mut calls, "after a step that was not finite");
                let steps = graphs.steps();
                let error = failure(broken(&mut graphs, at + 1, at));
                assert!(matches!(error, Error::NotFinite { step, .. } if step == steps + at as u64), "{error}");
                (0..at as u64).try_for_each(|step| call(&mut calls, &[3000, 2], step, 5)).unwrap();
                assert!(bits(&weights(&mut graphs)[0]) == bits(&weights(&mut calls)[0]));
            }
            // A called step that is not finite, and each call that may find it.
            for found in 0..3 {
                graphs.step(5, |dev, _, _, g| g.write(0, |own| dev.fill(own, bad))).unwrap();
                let steps = graphs.steps();
                let error = match found {
                    0 => failure(launch(&mut graphs, 0..3, 5)),
                    1 => failure(graphs.verify()),
                    _ => {
                        failure(graphs.each(|_, _| Err::<(), _>(Error::custom("fails"))));
                        failure(graphs.clear_poison())
                    }
                };
                assert!(matches!(error, Error::NotFinite { step, .. } if step + 1 == steps), "{error}");
                assert!(bits(&weights(&mut graphs)[0]) == bits(&weights(&mut calls)[0]));
                // A scope has failed, so the graph may be invalid.
                capture(&mut graphs, 5).unwrap();
                launch(&mut graphs, 7..8, 5).unwrap();
                call(&mut calls, &[3000, 2], 7, 5).unwrap();
                compare(&mut graphs, &mut calls, "after a called step that was not finite");
            }
        }
    }

    1: fn wrong_calls_are_typed_errors(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        let mut model = fed::<f32>(&pool, Optimizer::sgd(0.1), &[4, 2]);
        assert!(refused(launch(&mut model, 0..1, 2)).contains("`capture_step` comes first"));
        assert!(refused(capture(&mut model, 0)).contains("0 rows"));
        // These fail in the scope: recover, and go on.
        let mut wrong = |what: &str, f: fn(&Device, &mut Fed<f32>, &mut Gradients<'_>) -> Result<()>| {
            let error = refused(model.capture_step(2, |dev, _, fed, gradients| f(dev, fed, gradients)));
            assert!(error.contains(what), "{error}");
            assert!(matches!(failure(model.step(2, |_, _, _, _| Ok(()))), Error::Poisoned { .. }));
            model.clear_poison().unwrap();
            refused(launch(&mut model, 0..1, 2));
        };
        wrong("no gradient", |_, _, _| Ok(()));
        wrong("gradient 1 was given already", |dev, _, g| {
            g.write(1, |g| dev.fill(g, 0.0))?;
            g.write(1, |g| dev.fill(g, 0.0))
        });
        wrong("2", |dev, _, g| g.write(2, |g| dev.fill(g, 0.0)));
        wrong("download", |dev, fed, g| {
            pass(dev, fed, g)?;
            dev.download(&fed.next[0]).map(drop)
        });
        // These have done nothing. A graph writes where accumulated gradients lie, so only a `step` may follow them.
        capture(&mut model, 2).unwrap();
        model.accumulate(2, |dev, _, fed, g| pass(dev, fed, g)).unwrap();
        assert!(refused(capture(&mut model, 2)).contains("accumulate"));
        assert!(refused(launch(&mut model, 0..1, 2)).contains("accumulate"));
        call(&mut model, &[4, 2], 0, 2).unwrap();
        launch(&mut model, 0..2, 2).unwrap();
        // A parameter is at another place than in the graph.
        model.each(|dev, fed| { fed.bag.0[1] = dev.upload(&dev.download(&fed.bag.0[1])?)?; Ok(()) }).unwrap();
        assert!(refused(launch(&mut model, 2..3, 2)).contains("capture the step again"));
        capture(&mut model, 2).unwrap();
        launch(&mut model, 2..3, 2).unwrap();
        assert_eq!(model.steps(), 4);
        // More steps than can be counted, which is found without a look at each.
        assert!(refused(model.launch_steps(usize::MAX, |_, _, _, _| Ok(()))).contains("2^53"));
        // A graph outlives a panic of the program's, unless it has collectives.
        failure(model.launch_steps(1, |_, _, _, _| panic!("the program's mistake")));
        model.clear_poison().unwrap();
        if pool.device_count() == 1 {
            launch(&mut model, 3..4, 2).unwrap();
        } else {
            assert!(matches!(failure(launch(&mut model, 3..4, 2)), Error::GraphInvalidated { .. }));
        }
        model.verify().unwrap();
    }

    // A step between may have had other parameters, whose places the device has in a table.
    2: fn parameters_that_were_elsewhere_meanwhile(gpus) {
        let pool = gpus.unwatched(gpus.up_to(3)).build().unwrap();
        for sharded in [false, true] {
            let optimizer = either(Optimizer::adam(0.1), sharded);
            let [mut graphs, mut calls] = [(); 2].map(|()| fed::<f32>(&pool, optimizer, &[64, 64]));
            capture(&mut graphs, 4).unwrap();
            let swap = |_: &Device, fed: &mut Fed<f32>| { fed.bag.0.swap(0, 1); Ok(()) };
            launch(&mut graphs, 0..1, 4).unwrap();
            graphs.each(swap).unwrap();
            call(&mut graphs, &[64, 64], 1, 4).unwrap();
            graphs.each(swap).unwrap();
            launch(&mut graphs, 2..4, 4).unwrap();
            call(&mut calls, &[64, 64], 0, 4).unwrap();
            calls.each(swap).unwrap();
            call(&mut calls, &[64, 64], 1, 4).unwrap();
            calls.each(swap).unwrap();
            (2..4).try_for_each(|step| call(&mut calls, &[64, 64], step, 4)).unwrap();
            compare(&mut graphs, &mut calls, "swapped and swapped back");
        }
    }

    4: fn groups_and_some_devices(gpus) {
        let pool = gpus.pool(4);
        let next = |dev: &Device| Ok(vec![dev.zeros::<f32>(5)?]);
        let build = |dev: &Device| Ok(Fed { bag: bag(dev, &[5], 3)?, next: next(dev)? });
        // Two groups may stop at different steps.
        let mut grid = DataParallel::new_in(
            &pool,
            |dev| dev.group(&[dev.rank() % 2, dev.rank() % 2 + 2]),
            Optimizer::sgd(0.1),
            build,
        ).unwrap();
        let error = failure(capture(&mut grid, 4));
        assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("groups"), "{error}");
        let make = || DataParallel::new_on(&pool, &[3, 1], Optimizer::sgd(0.1), build).unwrap();
        let (mut graphs, mut calls) = (make(), make());
        capture(&mut graphs, 3).unwrap();
        launch(&mut graphs, 0..2, 3).unwrap();
        (0..2).try_for_each(|step| call(&mut calls, &[5], step, 3)).unwrap();
        compare(&mut graphs, &mut calls, "some devices");
    }

    // Before its first launch a call that fails has changed nothing; after it, `clear_poison` says so.
    2: fn closures_that_fail(gpus) {
        let pool = gpus.pool(gpus.up_to(3));
        for sharded in [false, true] {
            let optimizer = either(Optimizer::adam(0.1).clip(1.0), sharded);
            let [mut graphs, mut calls] = [(); 2].map(|()| fed::<f32>(&pool, optimizer, &SIZES));
            for model in [&mut graphs, &mut calls] {
                call(model, &SIZES, 0, 7).unwrap();
            }
            let n = pool.device_count();
            for bad in 0..n {
                let error = failure(graphs.capture_step(7, |dev, shard, fed, gradients| match shard.index() == bad {
                    true => Err(Error::custom("no capture")),
                    false => pass(dev, fed, gradients),
                }));
                assert!(error.to_string().contains("no capture"), "{error}");
                graphs.clear_poison().unwrap();
                capture(&mut graphs, 7).unwrap();
                let fails = |at: usize| move |dev: &Device, shard: Shard, fed: &mut Fed<f32>, k: usize| {
                    if k == at && shard.index() == bad { return Err(Error::custom("no data")) }
                    fill(dev, &shard, fed, k as u64, 7)
                };
                let error = failure(graphs.launch_steps(3, fails(0)));
                assert!(error.to_string().contains("no data"), "{error}");
                assert!(matches!(failure(launch(&mut graphs, 0..1, 7)), Error::Poisoned { .. }));
                graphs.clear_poison().unwrap();
                compare(&mut graphs, &mut calls, "nothing has changed");
                // A graph with collectives does not survive a failed scope.
                let error = failure(launch(&mut graphs, 0..1, 7));
                let Error::GraphInvalidated { op: "DataParallel::launch_steps", site, .. } = error else {
                    panic!("{error}")
                };
                assert!(site.file().starts_with("crates/train/tests"), "{error}");
                capture(&mut graphs, 7).unwrap();
                launch(&mut graphs, 5..6, 7).unwrap();
                call(&mut calls, &SIZES, 5, 7).unwrap();
                compare(&mut graphs, &mut calls, "it goes on");
                if bad + 1 == n {
                    failure(graphs.launch_steps(3, fails(1)));
                    let error = failure(graphs.clear_poison()).to_string();
                    assert!(error.contains("an update was under way"), "{error}");
                }
            }
        }
    }
}

/// Several buckets of several chunks for each warp: by the kernel that ends a step with sharded state.
#[test]
fn larger_models() {
    on_cuda(2, |gpus| same_bits::<bf16>(gpus, gpus.up_to(4), &[300_000, 5, 1_000_003, 77, 200_000], 1 << 20));
}

/// Faults at the driver's calls within captured steps.
#[test]
fn faults_within_launches() {
    crate::support::guarded(|| {
        let make = |pool: &GpuPool| fed::<f32>(pool, Optimizer::adam(0.1).clip(1.0).sharded(), &[40, 3, 30]);
        let run = |model: &mut Training<f32>, number: u64| launch(model, 2 * number..2 * number + 2, 4);
        let every = (Gpus::software(), cases(2, 1));
        let [recovered, lost] = faults_in(every, make, |model| capture(model, 4).unwrap(), run);
        assert!(recovered > 0 && lost > 0, "{recovered} recovered, {lost} lost");
    });
}

/// A loaded checkpoint is where the next launch goes on.
#[cfg(feature = "checkpoints")]
#[test]
fn a_graph_goes_on_from_a_checkpoint() {
    let pool = GpuPool::builder().host(2).build().unwrap();
    let optimizer = Optimizer::adam_w(0.01).sharded();
    let [mut graphs, mut calls] = [(); 2].map(|()| fed::<f32>(&pool, optimizer, &SIZES));
    capture(&mut graphs, 4).unwrap();
    launch(&mut graphs, 0..2, 4).unwrap();
    let file = std::env::temp_dir().join(format!("captured-{}.safetensors", std::process::id()));
    graphs.save(&file).unwrap();
    launch(&mut graphs, 7..9, 4).unwrap();
    graphs.load(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    launch(&mut graphs, 2..4, 4).unwrap();
    (0..4).try_for_each(|step| call(&mut calls, &SIZES, step, 4)).unwrap();
    compare(&mut graphs, &mut calls, "after a load");
}
