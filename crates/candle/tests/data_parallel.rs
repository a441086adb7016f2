//! Data parallel against a plain loop of candle's on one device.

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap, linear, loss, ops};
use gpu_pool::{GpuPool, ReduceOp, gradients::GradientExchange};
use gpu_pool_candle::{DataParallel, Error, Result, enter};
use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    time::Duration,
};

/// Two layers, the same numbers in each run. The second weight is read twice.
fn model(weights: &VarBuilder, x: &Tensor) -> candle_core::Result<Tensor> {
    let hidden = linear(3, 5, weights.pp("first"))?.forward(x)?.tanh()?;
    let (a, b) = (linear(5, 2, weights.pp("second"))?, linear(5, 2, weights.pp("second"))?);
    a.forward(&hidden)? + b.forward(&hidden.sqr()?)?
}

fn numbers(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 37 + seed * 11) % 29) as f32 / 29.0 - 0.5).collect()
}

fn variables(device: &Device, seed: usize) -> Result<VarMap> {
    let mut weights = VarMap::new();
    let none = Tensor::zeros((1, 3), DType::F32, device)?;
    model(&VarBuilder::from_varmap(&weights, DType::F32, device), &none)?;
    let all: Vec<(String, Var)> =
        weights.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    for (name, var) in all {
        let fixed = numbers(var.elem_count(), name.len() + seed);
        weights.set_one(name, Tensor::from_vec(fixed, var.shape(), device)?)?;
    }
    Ok(weights)
}

fn values(weights: &VarMap) -> Result<BTreeMap<String, Vec<f32>>> {
    let data = weights.data().lock().unwrap();
    data.iter().map(|(name, var)| Ok((name.clone(), var.flatten_all()?.to_vec1()?))).collect()
}

fn near(a: &BTreeMap<String, Vec<f32>>, b: &BTreeMap<String, Vec<f32>>) {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, a) in a {
        let off = a.iter().zip(&b[name]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(off < 2e-6, "{name} differs by {off}");
    }
}

const ROWS: usize = 7;

/// Rows of the batch and their targets.
fn rows(own: std::ops::Range<usize>, device: &Device) -> Result<(Tensor, Tensor)> {
    let (x, y) = (numbers(ROWS * 3, 1), numbers(ROWS * 2, 2));
    let x = Tensor::from_slice(&x[own.start * 3..own.end * 3], ((), 3), device)?;
    Ok((x, Tensor::from_slice(&y[own.start * 2..own.end * 2], ((), 2), device)?))
}

fn one_device(steps: usize) -> Result<BTreeMap<String, Vec<f32>>> {
    let weights = variables(&Device::Cpu, 0)?;
    let (x, y) = rows(0..ROWS, &Device::Cpu)?;
    let mut sgd = SGD::new(weights.all_vars(), 0.1)?;
    for _ in 0..steps {
        sgd.backward_step(&loss::mse(&model(&VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu), &x)?, &y)?)?;
    }
    values(&weights)
}

#[test]
fn it_trains_as_one_device_does_with_uneven_rows() -> Result<()> {
    let wanted = one_device(4)?;
    for devices in [1, 2, 3, 8] {
        // 8 devices have 7 rows.
        let pool = GpuPool::builder().host(devices).build()?;
        let found = pool.try_run(|dev, shard| {
            enter(dev, |device| {
                let weights = variables(device, dev.index())?; // rank 0's count
                let own = shard.range(ROWS);
                let share = own.len() as f64 / ROWS as f64;
                let settings = GradientExchange::builder().reduce(ReduceOp::Scaled(share));
                let mut replicas = DataParallel::with(dev, &weights, settings)?;
                let mut sgd = SGD::new(weights.all_vars(), 0.1)?;
                for _ in 0..4 {
                    let gradients = if own.is_empty() {
                        replicas.step_without_rows(dev)?
                    } else {
                        let (x, y) = rows(own.clone(), device)?;
                        replicas.step(dev, |weights| Ok(loss::mse(&model(&weights, &x)?, &y)?))?.1
                    };
                    sgd.step(&gradients)?;
                }
                values(&weights)
            })
        })?;
        found.iter().for_each(|found| near(found, &wanted));
        assert!(found.iter().all(|other| other == &found[0]), "all devices have the same bits");
    }
    Ok(())
}

#[test]
fn half_types_and_weights_of_the_step() -> Result<()> {
    let pool = GpuPool::builder().host(2).build()?;
    for dtype in [DType::F64, DType::F16, DType::BF16] {
        let found = pool.try_run(|dev, shard| {
            enter(dev, |device| {
                let weights = VarMap::new();
                weights.get(2, "w", candle_nn::Init::Const(1.0), dtype, device)?;
                let settings = GradientExchange::builder().reduce(ReduceOp::Scaled(1.0));
                let mut replicas = DataParallel::with(dev, &weights, settings)?;
                replicas.set_weight(1.0 + shard.index() as f64)?;
                // The gradient of the sum of squares is 2w: 2 here, times 1 + 2.
                let (_, gradients) = replicas.step(dev, |weights| Ok(weights.get(2, "w")?.sqr()?.sum_all()?))?;
                let w = weights.all_vars().remove(0);
                Ok(gradients.get(&w).expect("a gradient").to_dtype(DType::F32)?.to_vec1::<f32>()?)
            })
        })?;
        assert_eq!(found, [[6.0; 2]; 2], "{dtype:?}");
    }
    Ok(())
}

#[test]
fn models_that_differ_are_refused_on_all_devices() -> Result<()> {
    let pool = GpuPool::builder().host(3).build()?;
    pool.try_run(|dev, _| {
        enter(dev, |device| {
            let weights = variables(device, 0)?;
            if dev.index() == 2 {
                weights.get(4, "extra", candle_nn::Init::Const(0.0), DType::F32, device)?;
            }
            let refused = DataParallel::new(dev, &weights).unwrap_err();
            assert_eq!(
                refused.to_string(),
                "the models differ: device 0 has first.bias (F32 [5]), device 2 has extra (F32 [4])"
            );
            let mixed = VarMap::new();
            mixed.get(1, "a", candle_nn::Init::Const(0.0), DType::F32, device)?;
            mixed.get(1, "b", candle_nn::Init::Const(0.0), DType::F64, device)?;
            let refused = DataParallel::new(dev, &mixed).unwrap_err();
            assert!(matches!(&refused, Error::DType { what, .. } if what == "b"), "{refused}");
            Ok(())
        })
    })?;
    Ok(())
}

#[test]
fn weights_that_are_not_read_are_allowed_and_those_without_a_gradient_named() -> Result<()> {
    let pool = GpuPool::builder().host(2).build()?;
    pool.try_run(|dev, _| {
        enter(dev, |device| {
            let (weights, one) = (VarMap::new(), candle_nn::Init::Const(1.0));
            for name in ["blocked", "half_used", "never", "used"] {
                weights.get(2, name, one, DType::F32, device)?;
            }
            let var = |name: &str| weights.data().lock().unwrap()[name].clone();
            let mut replicas = DataParallel::new(dev, &weights)?;
            assert_eq!(replicas.names(), ["blocked", "half_used", "never", "used"]);
            let (_, gradients) = replicas.step(dev, |weights| {
                let used = weights.get(2, "used")?.sum_all()?;
                // Device 1 does not read it: its part of the average is zero.
                if dev.index() == 0 { Ok((used + weights.get(2, "half_used")?.sum_all()?)?) } else { Ok(used) }
            })?;
            let gradient = |name: &str| gradients.get(&var(name)).map(|x| x.to_vec1::<f32>().unwrap());
            assert_eq!(gradient("used"), Some(vec![1.0; 2]));
            assert_eq!(gradient("half_used"), Some(vec![0.5; 2]));
            assert_eq!((gradient("never"), gradient("blocked")), (None, None));

            // The fused operation has no backward pass.
            let blocked = |weights: VarBuilder| {
                let x = weights.get(2, "blocked")?.reshape((1, 2))?;
                let end = ops::softmax_last_dim(&x)?.sum_all()?;
                Ok((end + weights.get(2, "used")?.sum_all()?)?)
            };
            let mut lenient = DataParallel::new(dev, &weights)?.may_lack_gradients(&["block"]);
            let (_, gradients) = lenient.step(dev, blocked)?;
            assert!(gradients.get(&var("blocked")).is_none());
            let refused = replicas.step(dev, blocked).map(drop).unwrap_err();
            assert!(matches!(&refused, Error::NoGradient { names } if names == &["blocked"]), "{refused}");
            let after = replicas.step(dev, blocked).map(drop).unwrap_err();
            assert_eq!(after.to_string(), "step: an earlier step has failed");

            let mut replicas = DataParallel::new(dev, &weights)?;
            let beside = var("never");
            let refused = replicas
                .step(dev, |weights| Ok((weights.get(2, "used")? + beside.as_tensor())?.sum_all()?))
                .map(drop)
                .unwrap_err();
            assert!(matches!(&refused, Error::Untapped { name } if name == "never"), "{refused}");

            // A tensor of a step is of no use to another backward pass.
            let mut replicas = DataParallel::new(dev, &weights)?;
            let mut kept = None;
            replicas.step(dev, |weights| {
                let used = weights.get(2, "used")?;
                kept = Some(used.clone());
                Ok(used.sum_all()?)
            })?;
            let late = kept.expect("kept").sum_all()?.backward().map(drop).map_err(Error::from).unwrap_err();
            assert!(matches!(late, Error::NoDevice { op: "tap", .. }), "{late:?}");
            let unknown = replicas.step(dev, |weights| Ok(weights.get(2, "other")?)).map(drop).unwrap_err();
            assert!(unknown.to_string().contains("other"), "{unknown}");
            Ok(())
        })
    })?;
    Ok(())
}

#[test]
fn a_device_that_fails_in_a_step_ends_it_on_all_devices() -> Result<()> {
    let pool = GpuPool::builder().host(3).build()?;
    let failed = pool.try_run(|dev, shard| {
        enter(dev, |device| {
            let weights = variables(device, 0)?;
            let mut replicas = DataParallel::new(dev, &weights)?;
            let (x, y) = rows(shard.range(ROWS), device)?;
            let found = replicas.step(dev, |weights| {
                let loss = loss::mse(&model(&weights, &x)?, &y)?;
                // A shape that does not fit, after the forward pass.
                if dev.index() == 1 { Ok(loss.reshape((1, 2))?) } else { Ok(loss) }
            });
            let error = found.map(drop).unwrap_err();
            match dev.index() {
                1 => assert!(matches!(error, Error::Candle(_)), "{error:?}"),
                _ => assert!(matches!(error, Error::Pool(gpu_pool::Error::Aborted { .. })), "{error:?}"),
            }
            Err::<(), _>(error)
        })
    });
    assert!(matches!(failed.unwrap_err(), Error::Candle(_)), "the scope returns the cause");
    let losses = pool.try_run(|dev, shard| {
        enter(dev, |device| {
            let weights = variables(device, 0)?;
            let (x, y) = rows(shard.range(ROWS), device)?;
            let mut replicas = DataParallel::new(dev, &weights)?;
            let (loss, _) = replicas.step(dev, |weights| Ok(loss::mse(&model(&weights, &x)?, &y)?))?;
            Ok(loss.to_scalar::<f32>()?)
        })
    })?;
    assert_eq!(losses.len(), 3, "the pool still works");
    Ok(())
}

/// The identity. Its backward pass calls a closure.
struct Probe<F>(F);
impl<F: Fn() + Send + Sync> candle_core::CustomOp1 for Probe<F> {
    fn name(&self) -> &'static str {
        "probe"
    }
    fn cpu_fwd(
        &self,
        s: &candle_core::CpuStorage,
        l: &candle_core::Layout,
    ) -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
        Ok((s.clone(), l.shape().clone()))
    }
    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        (self.0)();
        Ok(Some(gradient.clone()))
    }
}

/// The exchange of the last layer's gradient meets the other device. If it began after the backward pass, the first
/// device would come to its first layer while the second one still sleeps.
#[test]
fn gradients_are_exchanged_during_the_backward_pass() -> Result<()> {
    static LAST_LAYER: AtomicUsize = AtomicUsize::new(0);
    let pool = GpuPool::builder().host(2).build()?;
    let seen = pool.try_run(|dev, _| {
        enter(dev, |device| {
            let weights = variables(device, 0)?;
            let settings = GradientExchange::builder().bucket_bytes(1).first_bucket_bytes(1).ready_order(false);
            let mut replicas = DataParallel::with(dev, &weights, settings)?;
            assert_eq!(replicas.buckets(), 4);
            static AT_FIRST_LAYER: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
            let (x, second) = (rows(0..ROWS, device)?.0, dev.index() == 1);
            replicas.step(dev, |weights| {
                let hidden = linear(3, 5, weights.pp("first"))?.forward(&x)?;
                let hidden = hidden.apply_op1(Probe(move || {
                    AT_FIRST_LAYER[usize::from(second)].store(LAST_LAYER.load(SeqCst), SeqCst);
                }))?;
                let end = linear(5, 2, weights.pp("second"))?.forward(&hidden)?;
                let end = end.apply_op1(Probe(move || {
                    if second {
                        std::thread::sleep(Duration::from_millis(300));
                    }
                    LAST_LAYER.fetch_add(1, SeqCst);
                }))?;
                Ok(end.sum_all()?)
            })?;
            Ok(AT_FIRST_LAYER[dev.index()].load(SeqCst))
        })
    })?;
    assert_eq!(seen, [2, 2], "both last layers are over before either first one begins");
    Ok(())
}
