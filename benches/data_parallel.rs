//! Measures one forward pass of `Linear(5, 2)` over a batch of 30, spread over all devices: the toy of PyTorch's
//! DataParallel tutorial. The computation is negligible; the cost is driving the GPUs.
//!
//! Our side scatters the rows, multiplies, adds the bias and gathers, in one scope; the weights stay on their devices.
//! The peer is `torch.nn.DataParallel` on as many GPUs, in a Python process that answers each of our turns with one of
//! its own; without torch or GPUs there is no peer. torch scatters from GPU 0 and gathers there, our side from and to
//! the host. So torch gets the batch on GPU 0, and its time ends with a synchronisation of GPU 0. Target: at most 150
//! us on 2 GPUs (torch 2.11: 1263 us on 2, 3.78 ms on 8).
//!
//! * `<gpu or software>/forward/<devices>`: microseconds per forward pass
//! * `.../forward_on_device/1`: the same on one device, with the rows and the result on it, as torch has them

mod support;

use std::{
    cell::RefCell,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Instant,
};

use gpu_pool::{Device, DeviceBuffer, GpuPool, Matrix, PerDevice, Result};
use gpu_pool_train::{Activation, prelude::*};
use support::{Bench, MICROSECONDS, Side, gpus};

const BATCH: usize = 30;
const INPUTS: usize = 5;
const OUTPUTS: usize = 2;

/// A fully connected layer on one device.
struct Linear {
    weight: DeviceBuffer<f32>,
    bias: DeviceBuffer<f32>,
}

impl Linear {
    fn forward(&self, dev: &Device, x: &DeviceBuffer<f32>, rows: usize) -> Result<DeviceBuffer<f32>> {
        // SAFETY: the product writes all of it, since beta is 0.
        let mut y = unsafe { dev.uninit(rows * OUTPUTS)? };
        let weight = Matrix::new(&self.weight, OUTPUTS, INPUTS)?;
        dev.gemm(1.0, Matrix::new(x, rows, INPUTS)?, weight.t(), 0.0, &mut y)?;
        dev.activation_in_place(Activation::Identity.biased(&self.bias), &mut y)?;
        Ok(y)
    }
}

/// The whole pass, from and to host memory.
fn forward(pool: &GpuPool, model: &PerDevice<Linear>, batch: &[f32], out: &mut [f32]) -> Result<()> {
    pool.run_mut(out, OUTPUTS, |dev, shard, rows| {
        let x = dev.upload(shard.rows(batch, INPUTS))?;
        let y = model.borrow(dev)?.forward(dev, &x, rows.len() / OUTPUTS)?;
        dev.download_into(&y, rows)
    })
    .map(drop)
}

/// The pass alone.
fn forward_on_device(pool: &GpuPool, model: &PerDevice<Linear>, rows: &PerDevice<DeviceBuffer<f32>>) -> Result<()> {
    pool.run(|dev, _| model.borrow(dev)?.forward(dev, &*rows.borrow(dev)?, BATCH)).map(drop)
}

/// Numbers in -1..1.
fn random(len: usize, seed: u64) -> Vec<f32> {
    gpus::noise(len, seed).into_iter().map(|x| x as f32 / 2f32.powi(31) - 1.0).collect()
}

/// The CPU's result, in double precision.
fn reference(batch: &[f32], weight: &[f32], bias: &[f32]) -> Vec<f32> {
    let product = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
    let row = |x| weight.chunks_exact(INPUTS).zip(bias).map(move |(w, b)| (product(x, w) + f64::from(*b)) as f32);
    batch.chunks_exact(INPUTS).flat_map(row).collect()
}

/// A Python process that times torch's DataParallel.
struct Torch {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

const SCRIPT: &str = "
import sys, time, torch
models = {}
for line in sys.stdin:
    devices, passes = map(int, line.split())
    if devices > torch.cuda.device_count():
        print(flush=True)
        continue
    if devices not in models:
        model = torch.nn.Linear(5, 2).cuda()
        model = torch.nn.DataParallel(model, list(range(devices))) if devices > 1 else model
        models[devices] = model, torch.randn(30, 5, device='cuda:0')
    model, x = models[devices]
    times = []
    with torch.no_grad():
        for _ in range(passes):
            start = time.perf_counter()
            y = model(x)
            torch.cuda.synchronize(0)
            times.append((time.perf_counter() - start) * 1e6)
    assert y.shape == (30, 2)
    print(*times, flush=True)
";

impl Torch {
    /// `None` without a Python with torch and a GPU.
    fn start() -> Option<Self> {
        let mut child = Command::new("python3")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let orders = child.stdin.take()?;
        let answers = BufReader::new(child.stdout.take()?);
        let mut torch = Torch { child, orders, answers };
        // The first passes create contexts, which takes seconds. With one GPU there is no answer for two.
        torch.times(2, 3);
        (!torch.times(1, 3).is_empty()).then_some(torch)
    }

    /// `None` without torch.
    fn side(torch: &RefCell<Option<Torch>>, devices: usize, passes: usize) -> Option<Side<'_>> {
        torch.borrow().is_some().then(|| {
            Side::sampling("torch DataParallel", move |samples| {
                samples.extend(torch.borrow_mut().as_mut().expect("it is there").times(devices, passes));
            })
        })
    }

    /// Microseconds of single passes; empty if torch cannot run them.
    fn times(&mut self, devices: usize, passes: usize) -> Vec<f64> {
        let mut line = String::new();
        let asked = writeln!(self.orders, "{devices} {passes}").and_then(|()| self.answers.read_line(&mut line));
        asked.map_or_else(|_| Vec::new(), |_| line.split_whitespace().filter_map(|time| time.parse().ok()).collect())
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn main() {
    let mut bench = Bench::new("data_parallel");
    let hardware = gpus::count();
    let software = hardware == 0;
    let case = if software { "software" } else { "gpu" };
    let torch = RefCell::new(if software { None } else { Torch::start() });
    let (batch, weight, bias) = (random(BATCH * INPUTS, 1), random(OUTPUTS * INPUTS, 2), random(OUTPUTS, 3));
    let expected = reference(&batch, &weight, &bias);
    let passes = bench.size(50, 10);
    for devices in gpus::powers(if software { 4 } else { hardware }) {
        let builder = GpuPool::builder();
        let builder = match software {
            true => builder.host(devices),
            false => builder.cuda().devices(&(0..devices).collect::<Vec<_>>()),
        };
        let pool = builder.build().expect("the devices can be opened");
        let model = pool.per_device(|dev, _| Ok(Linear { weight: dev.upload(&weight)?, bias: dev.upload(&bias)? }));
        let model = model.expect("little memory");
        let ours = |pass: &mut dyn FnMut() -> f64, samples: &mut Vec<f64>| {
            // In the first passes of a turn threads still wake up from the peer's turn.
            samples.extend((0..passes + 5).map(|_| pass()).skip(5));
        };
        let whole = Side::sampling("gpu-pool", |samples| {
            let mut pass = || {
                let mut out = [f32::NAN; BATCH * OUTPUTS];
                let clock = Instant::now();
                forward(&pool, &model, &batch, &mut out).expect("a forward pass");
                let micros = clock.elapsed().as_secs_f64() * 1e6;
                assert!(out.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{out:?} is not {expected:?}");
                micros
            };
            ours(&mut pass, samples);
        });
        let peer = || Torch::side(&torch, devices, passes).into_iter().collect();
        bench.compare(&format!("{case}/forward/{devices}"), MICROSECONDS, whole, peer());
        if devices == 1 {
            let rows = pool.per_device(|dev, _| dev.upload(&batch)).expect("little memory");
            let alone = Side::sampling("gpu-pool", |samples| {
                let mut pass = || {
                    let clock = Instant::now();
                    forward_on_device(&pool, &model, &rows).expect("a forward pass");
                    clock.elapsed().as_secs_f64() * 1e6
                };
                ours(&mut pass, samples);
            });
            bench.compare(&format!("{case}/forward_on_device/1"), MICROSECONDS, alone, peer());
        }
    }
    bench.finish();
}
