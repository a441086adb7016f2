//! `LocalOptimizer`: parameters of several devices, in groups, clipped by one norm.

use crate::{
    data_parallel::rig::{Real, SIZES},
    on_both,
    sharded::{by_hand, bytes, exact, pool_of, seed, start},
    support::{Gpus, failure},
};
use gpu_pool::{Device, DeviceBuffer, Error, ReduceOp, Result};
use gpu_pool_train::{LocalOptimizer, Optimizer, ParameterGroup};
use half::{bf16, f16};
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
    mpsc::channel,
};

const STEPS: usize = 3;

/// The numbers of the parameters that a device has: the first on all devices, and of the others each on one.
fn own(device: usize, n: usize, sizes: &[usize]) -> Vec<usize> {
    let rates = |odd: usize| (1..sizes.len()).filter(move |k| k % n == device && k % 2 == odd);
    [0].into_iter().chain(rates(0)).chain(rates(1)).collect()
}

/// Steps of AdamW are those of one thread that has all parameters, bit for bit. Odd parameters have twice the rate.
fn follows_the_formula<T: Real>(gpus: Gpus, sizes: &[usize], clip: f64, captured: bool) {
    let rates: Vec<f64> = (0..sizes.len()).map(|k| if k % 2 == 0 { 0.01 } else { 0.02 }).collect();
    let (weights, norms) = by_hand::<T>((sizes, &rates), 1, ReduceOp::Sum, clip, STEPS);
    for n in 1..=gpus.up_to(3) {
        let found = pool_of(gpus, n).run(|dev, _| {
            let own = own(dev.index(), n, sizes);
            let group = |rate: f64, odd: usize| {
                let sizes: Vec<usize> = own[1..].iter().filter(|&k| k % 2 == odd).map(|&k| sizes[k]).collect();
                ParameterGroup::new(Optimizer::adam_w(rate).clip(clip), &sizes)
            };
            let first = ParameterGroup::new(Optimizer::adam_w(0.01).clip(clip), &sizes[..1]).replicated();
            let mut optimizer = LocalOptimizer::<T>::new(dev, &[first, group(0.5, 0), group(0.02, 1)])?;
            optimizer.set_rate(1, 0.01)?;
            let buffers = |of: &dyn Fn(usize) -> Vec<T>| -> Result<Vec<DeviceBuffer<T>>> {
                own.iter().map(|&k| dev.upload(&of(k))).collect()
            };
            let mut weights = buffers(&|k| start(k, sizes[k]))?;
            let mut grads = buffers(&|k| vec![T::of(0.0); sizes[k]])?;
            let all = (0..n).collect::<Vec<_>>();
            let step = |dev: &Device, optimizer: &mut LocalOptimizer<T>, grads: &[_], weights: &mut [_]| {
                let norm = optimizer.step_in(&dev.group(&all)?, grads, weights)?.expect("it clips");
                Ok((!captured).then(|| dev.download(&norm)).transpose()?.map(|norm| norm[0]))
            };
            let graph = match captured {
                true => Some(dev.capture(|dev| step(dev, &mut optimizer, &grads, &mut weights))?.0),
                false => None,
            };
            let mut norms = Vec::new();
            for number in 0..STEPS {
                for (&k, grad) in own.iter().zip(&mut grads) {
                    let g: Vec<T> = (0..sizes[k]).map(|i| T::of(exact(seed(number, 0, k), i))).collect();
                    dev.upload_into(&g, grad)?;
                }
                match &graph {
                    Some(graph) => {
                        optimizer.prepare(dev)?;
                        dev.launch_graph(graph)?;
                    }
                    None => norms.extend(step(dev, &mut optimizer, &grads, &mut weights)?),
                }
            }
            assert_eq!(optimizer.steps(), STEPS as u64);
            Ok((own, weights.iter().map(|w| dev.download(w)).collect::<Result<Vec<_>>>()?, norms))
        });
        for (device, (own, found, own_norms)) in found.unwrap().into_iter().enumerate() {
            assert_eq!(own_norms, if captured { &[][..] } else { &norms }, "device {device} of {n}, sizes {sizes:?}");
            for (k, own) in own.into_iter().zip(&found) {
                let at = (0..own.len()).find(|&i| bytes(&own[i..=i]) != bytes(&weights[k][i..=i]));
                let what = at.map(|i| (i, own[i].wide(), weights[k][i].wide()));
                assert_eq!(what, None, "device {device} of {n}, parameter {k} of {sizes:?}");
            }
        }
    }
}

on_both! {
    1: fn parameters_of_several_devices_are_clipped_by_one_norm(gpus) {
        for captured in [false, true] {
            follows_the_formula::<f32>(gpus, &[1], 0.5, captured);
            follows_the_formula::<f32>(gpus, &SIZES, 3.0, captured);
            follows_the_formula::<f16>(gpus, &[2049, 5, 4096], 1e9, captured);
            follows_the_formula::<bf16>(gpus, &SIZES, 3.0, captured);
        }
    }

    // As of `clip_grad_norm_` with an optimizer that skips such a step.
    1: fn a_local_norm_that_is_not_finite_changes_nothing(gpus) {
        pool_of(gpus, 1)
            .run(|dev, _| {
                let groups = [ParameterGroup::new(Optimizer::adam(0.1).clip(1.0), &[3, 0])];
                let mut optimizer = LocalOptimizer::new(dev, &groups)?;
                let mut weights = [dev.upload(&[1.0f32, 2.0, 3.0])?, dev.zeros(0)?];
                let grads = [dev.upload(&[1.0f32, f32::NAN, 1.0])?, dev.zeros(0)?];
                let norm = optimizer.step(dev, &grads, &mut weights)?.expect("it clips");
                assert!(dev.download(&norm)?[0].is_nan());
                assert_eq!(dev.download(&weights[0])?, [1.0, 2.0, 3.0]);
                Ok(())
            })
            .unwrap();
    }

    1: fn wrong_local_steps_are_refused(gpus) {
        let pool = pool_of(gpus, 1);
        let optimizer = pool.on_device(0).run(|dev| {
            let sgd = Optimizer::sgd(0.1);
            let clips = [ParameterGroup::new(sgd, &[1]), ParameterGroup::new(sgd.clip(1.0), &[1])];
            let mut optimizer = LocalOptimizer::new(dev, &[ParameterGroup::new(sgd, &[8])])?;
            let (g, mut w) = (dev.upload(&[1.0f32; 9])?, dev.upload(&[1.0f32; 9])?);
            for error in [
                failure(LocalOptimizer::<f32>::new(dev, &clips)),
                failure(optimizer.step(dev, &[&g], &mut [&mut w])),
                failure(optimizer.step(dev, &[&g.slice(..8)], &mut [w.slice_mut(1..)])),
                failure(optimizer.step::<&DeviceBuffer<f32>, &mut DeviceBuffer<f32>>(dev, &[], &mut [])),
                failure(optimizer.set_rate(1, 0.1)),
                failure(optimizer.set_rate(0, -0.1)),
            ] {
                assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            }
            optimizer.step(dev, &[g.slice(..8)], &mut [w.slice_mut(..8)])?;
            assert!(dev.download(&w)?[..8].iter().all(|w| *w == 0.9));
            Ok(optimizer)
        });
        // A scope that fails after a step may have left it half done.
        let mut optimizer = Some(optimizer.unwrap());
        let failed = pool.on_device(0).run(|dev| {
            let own = optimizer.as_mut().expect("made above");
            own.step(dev, &[dev.upload(&[1.0f32; 8])?], &mut [dev.upload(&[1.0f32; 8])?])?;
            Err::<(), _>(Error::custom("a test"))
        });
        assert!(failed.is_err());
        let refused = pool.on_device(0).run(|dev| {
            let own = optimizer.as_mut().expect("made above");
            own.step(dev, &[dev.zeros::<f32>(8)?], &mut [dev.zeros::<f32>(8)?]).map(drop)
        });
        assert!(failure(refused).to_string().contains("has failed"));
    }

    /// Jobs of one visit: one steps, another one fails. The optimizer has nothing to do with that.
    1: fn a_failed_job_beside_is_no_failed_step(gpus) {
        let pool = pool_of(gpus, 1);
        let made = Arc::new(AtomicUsize::new(0));
        let counted = made.clone();
        let jobs = pool.jobs_with(move |dev| {
            counted.fetch_add(1, SeqCst);
            let optimizer = LocalOptimizer::new(dev, &[ParameterGroup::new(Optimizer::sgd(0.1), &[1])])?;
            Ok((optimizer, dev.upload(&[1.0f32])?))
        });
        let jobs = jobs.build().unwrap();
        let (go, gone) = channel::<()>();
        let (begin, begun) = channel();
        let blocked = (*jobs).submit(move |_| {
            begin.send(()).unwrap();
            Ok(gone.recv().is_err())
        });
        begun.recv().unwrap();
        let step = || {
            let step = jobs.submit(|dev, (optimizer, w)| {
                optimizer.step(dev, &[dev.upload(&[1.0f32])?], &mut [&mut *w])?;
                dev.download(&*w)
            });
            step.unwrap()
        };
        let first = step();
        let fails = (*jobs).submit(|_| Err::<(), _>(Error::custom("a test"))).unwrap();
        drop(go);
        assert!(blocked.unwrap().wait().unwrap());
        assert_eq!(first.wait().unwrap(), [0.9]);
        fails.wait().unwrap_err();
        assert_eq!(step().wait().unwrap(), [0.9 - 0.1]);
        assert_eq!(made.load(SeqCst), 1);
    }
}
