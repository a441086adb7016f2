//! A training step of a perceptron of candle's: 8192 rows on one device by candle alone, and divided over all devices
//! by `gpu-pool-candle`. It belongs to `crates/candle`, which is a package of its own; on GPUs it wants its feature
//! `cuda`.
//!
//! * `<gpu or software>/candle_step/<devices>/<rows>`: milliseconds, the median of the steps after the first five; the
//!   peer is candle on one device, in the same run.
//! * `<gpu or software>/candle_adopt/<devices>`: microseconds for a tensor as a buffer, without a copy, and its drop.
//!
//! `cargo bench --bench candle -- --json FILE`

use candle_core::{D, DType, Device, Module, Tensor};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap, linear};
use gpu_pool::GpuPool;
use gpu_pool_candle::{DataParallel, Result, adopt, enter};
use std::{io::Write as _, time::Instant};

const WARM_UP: usize = 5;

struct Shape {
    rows: usize,
    width: usize,
    steps: usize,
}

fn model(weights: &VarBuilder, width: usize, x: &Tensor) -> candle_core::Result<Tensor> {
    let mut x = x.clone();
    for layer in 0..4 {
        x = linear(width, width, weights.pp(format!("layer{layer}")))?.forward(&x)?.relu()?;
    }
    x.sqr()?.mean(D::Minus1)?.mean_all()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Milliseconds of a step, with the wait for it.
fn timed(shape: &Shape, device: &Device, mut step: impl FnMut() -> Result<Tensor>) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..WARM_UP + shape.steps {
        let start = Instant::now();
        step()?.to_scalar::<f32>()?;
        device.synchronize()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(median(times.split_off(WARM_UP)))
}

fn alone(pool: &GpuPool, shape: &Shape) -> Result<f64> {
    let times = pool.try_run(|dev, place| {
        if place.index() > 0 {
            return Ok(0.0);
        }
        enter(dev, |device| {
            without_events(device);
            let weights = VarMap::new();
            let builder = VarBuilder::from_varmap(&weights, DType::F32, device);
            let x = Tensor::randn(0f32, 1.0, (shape.rows, shape.width), device)?;
            model(&builder, shape.width, &x)?;
            let mut sgd = SGD::new(weights.all_vars(), 1e-3)?;
            timed(shape, device, || {
                let loss = model(&builder, shape.width, &x)?;
                sgd.backward_step(&loss)?;
                Ok(loss)
            })
        })
    })?;
    Ok(times[0])
}

fn on_all(pool: &GpuPool, shape: &Shape) -> Result<f64> {
    let times = pool.try_run(|dev, place| {
        enter(dev, |device| {
            without_events(device);
            let weights = VarMap::new();
            let rows = shape.rows / place.count();
            let x = Tensor::randn(0f32, 1.0, (rows, shape.width), device)?;
            model(&VarBuilder::from_varmap(&weights, DType::F32, device), shape.width, &x)?;
            let mut replicas = DataParallel::new(dev, &weights)?;
            let mut sgd = SGD::new(weights.all_vars(), 1e-3)?;
            timed(shape, device, || {
                let (loss, gradients) = replicas.step(dev, |weights| Ok(model(&weights, shape.width, &x)?))?;
                sgd.step(&gradients)?;
                Ok(loss)
            })
        })
    })?;
    Ok(times.into_iter().fold(0.0, f64::max))
}

/// Microseconds of `adopt` and of the buffer's drop.
fn adopted(pool: &GpuPool) -> Result<f64> {
    const ROUNDS: usize = 10_000;
    let times = pool.try_run(|dev, _| {
        enter(dev, |device| {
            let x = Tensor::zeros(1 << 16, DType::F32, device)?;
            let mut times = Vec::new();
            for _ in 0..5 {
                let start = Instant::now();
                for _ in 0..ROUNDS {
                    // SAFETY: nothing uses it.
                    drop(unsafe { adopt::<f32>(dev, &x)? });
                }
                times.push(start.elapsed().as_secs_f64() * 1e6 / ROUNDS as f64);
            }
            Ok(median(times))
        })
    })?;
    Ok(times.into_iter().fold(0.0, f64::max))
}

/// Work of this program goes on candle's stream alone, so cudarc need not record an event for each use of a tensor.
fn without_events(device: &Device) {
    #[cfg(feature = "cuda")]
    if let Ok(cuda) = device.as_cuda_device() {
        // SAFETY: as above.
        unsafe { cuda.disable_event_tracking() };
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
}

fn main() -> anyhow::Result<()> {
    let json = std::env::args().skip_while(|argument| argument != "--json").nth(1);
    let pool = GpuPool::builder().build()?;
    let gpu = pool.run(|dev, _| Ok(dev.info().compute_capability != (0, 0)))?[0];
    let shape = match gpu {
        true => Shape { rows: 8192, width: 4096, steps: 40 },
        false => Shape { rows: 256, width: 128, steps: 20 },
    };
    // In turns.
    let (mut single, mut divided) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        single.push(alone(&pool, &shape)?);
        divided.push(on_all(&pool, &shape)?);
    }
    let (one, all) = (median(single), median(divided));
    // No division is faster than a device's own rows alone.
    let bound = alone(&pool, &Shape { rows: shape.rows / pool.device_count(), ..shape })?;
    let (kind, devices) = (if gpu { "gpu" } else { "software" }, pool.device_count());
    let case = format!("{kind}/candle_step/{devices}/{}", shape.rows);
    println!("{case}: {all:.3} ms, candle on one device {one:.3} ms: {:.2} times, bound {:.2}", one / all, one / bound);
    let adopted = adopted(&pool)?;
    println!("{kind}/candle_adopt/{devices}: {adopted:.3} us");
    if let Some(file) = json {
        let machine = std::env::var("GPU_POOL_MACHINE").unwrap_or_default();
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
        let peer = format!(r#""peer":"candle, one device","peer_value":{one},"ratio":{}"#, one / all);
        let none = r#""peer":null,"peer_value":null,"ratio":null"#.to_string();
        let adopt = format!("{kind}/candle_adopt/{devices}");
        for (case, value, unit, peer) in [(case, all, "ms", peer), (adopt, adopted, "us", none)] {
            let line = format!(r#""bench":"candle","case":"{case}","value":{value},"unit":"{unit}",{peer}"#);
            writeln!(file, r#"{{{line},"machine":"{machine}"}}"#)?;
        }
    }
    Ok(())
}
