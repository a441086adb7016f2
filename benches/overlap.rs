//! Measures data-parallel training steps of a perceptron 784-2048-2048-10 in `f32` (no TF32), with stochastic gradient
//! descent: how much of the gradient exchange is exposed after the backward pass.
//!
//! The peer is PyTorch's DistributedDataParallel with bucket views, started by torchrun (`peers/ddp.py`): one process
//! per GPU, on the same GPUs, in turn. Both sides have DDP's bucket sizes, the same shapes, weights in torch's layout,
//! and cuBLAS for the products. Without torch there is no peer. Times are of many steps in a row, from idle devices to
//! idle devices, of the slowest member.
//!
//! * `<gpu or software>/step/<devices>/<batch>`: microseconds per step, `batch` rows over all devices
//! * `.../alone/...`: the same without exchange (DDP's `no_sync`)
//! * `.../exposed/...`: the difference of the two, in each turn

mod support;

use std::{cell::RefCell, time::Instant};

use gpu_pool::{Activation, Device, DeviceBuffer, GpuPool, GradientExchange, Matrix, PerDevice, Result, Shard};
use support::{Bench, MICROSECONDS, Side, child::Process, gpus};

/// Widths from the input to the output.
const WIDTHS: [usize; 4] = [784, 2048, 2048, 10];
const LAYERS: usize = WIDTHS.len() - 1;
const RATE: f32 = 0.01;

/// The state of a device, for one batch size.
struct Replica {
    rows: usize,
    weights: Vec<DeviceBuffer<f32>>,
    biases: Vec<DeviceBuffer<f32>>,
    /// The input, and the output of each layer.
    outputs: Vec<DeviceBuffer<f32>>,
    /// Gradients of the outputs.
    douts: Vec<DeviceBuffer<f32>>,
    labels: DeviceBuffer<i32>,
    /// Weight and bias of layer `l` are gradients `2 l` and `2 l + 1`.
    gradients: GradientExchange,
}

/// Numbers in -scale..scale.
fn random(len: usize, seed: u64, scale: f32) -> Vec<f32> {
    gpus::noise(len, seed).into_iter().map(|x| (x as f32 / 2f32.powi(31) - 1.0) * scale).collect()
}

impl Replica {
    fn new(dev: &Device, shard: &Shard, batch: usize) -> Result<Self> {
        let rows = shard.range(batch).len();
        let layers = || WIDTHS.windows(2).map(|pair| (pair[0], pair[1]));
        let weight = |(inputs, outputs): (usize, usize)| {
            dev.upload(&random(inputs * outputs, inputs as u64, 1.0 / (inputs as f32).sqrt()))
        };
        let seed = 100 + shard.index() as u64;
        let labels: Vec<i32> = gpus::noise(rows, seed).into_iter().map(|x| (x % 10) as i32).collect();
        let mut outputs = vec![dev.upload(&random(rows * WIDTHS[0], seed, 1.0))?];
        for (_, width) in layers() {
            outputs.push(dev.zeros(rows * width)?);
        }
        let sizes: Vec<usize> = layers().flat_map(|(inputs, outputs)| [inputs * outputs, outputs]).collect();
        Ok(Replica {
            rows,
            weights: layers().map(weight).collect::<Result<_>>()?,
            biases: layers().map(|(_, outputs)| dev.zeros(outputs)).collect::<Result<_>>()?,
            outputs,
            douts: layers().map(|(_, width)| dev.zeros(rows * width)).collect::<Result<_>>()?,
            labels: dev.upload(&labels)?,
            gradients: GradientExchange::builder().build(dev, &sizes)?,
        })
    }

    fn step(&mut self, dev: &Device) -> Result<()> {
        self.forward(dev)?;
        self.backward(dev)?;
        self.gradients.finish(dev)?;
        for layer in 0..LAYERS {
            for (what, x) in [&mut self.weights[layer], &mut self.biases[layer]].into_iter().enumerate() {
                dev.axpy(-RATE, &self.gradients.grad(2 * layer + what)?, x)?;
            }
        }
        Ok(())
    }

    fn forward(&mut self, dev: &Device) -> Result<()> {
        let rows = self.rows;
        for layer in 0..LAYERS {
            let (inputs, width) = (WIDTHS[layer], WIDTHS[layer + 1]);
            let (before, behind) = self.outputs.split_at_mut(layer + 1);
            let (x, y) = (Matrix::new(&before[layer], rows, inputs)?, &mut behind[0]);
            dev.gemm(1.0, x, Matrix::new(&self.weights[layer], width, inputs)?.t(), 0.0, y)?;
            let activation = if layer + 1 < LAYERS { Activation::Relu } else { Activation::Identity };
            dev.bias_activation_assign(activation, y, &self.biases[layer])?;
        }
        let (_, gradient) = dev.cross_entropy(&self.outputs[LAYERS], &self.labels, 1.0 / rows as f32)?;
        self.douts[LAYERS - 1] = gradient;
        Ok(())
    }

    fn backward(&mut self, dev: &Device) -> Result<()> {
        let rows = self.rows;
        for layer in (0..LAYERS).rev() {
            let (inputs, width) = (WIDTHS[layer], WIDTHS[layer + 1]);
            let (below, here) = self.douts.split_at_mut(layer);
            let dy = Matrix::new(&here[0], rows, width)?;
            dev.column_sum(&here[0], &mut self.gradients.grad_mut(2 * layer + 1)?)?;
            self.gradients.ready(dev, 2 * layer + 1)?;
            let x = Matrix::new(&self.outputs[layer], rows, inputs)?;
            dev.gemm(1.0, dy.t(), x, 0.0, &mut self.gradients.grad_mut(2 * layer)?)?;
            self.gradients.ready(dev, 2 * layer)?;
            if let Some(dx) = below.last_mut() {
                dev.gemm(1.0, dy, Matrix::new(&self.weights[layer], width, inputs)?, 0.0, dx)?;
                dev.activation_backward_assign(Activation::Relu, dx, &self.outputs[layer])?;
            }
        }
        Ok(())
    }
}

/// Microseconds per step, over `steps` in a row.
fn time(model: &mut PerDevice<Replica>, sync: bool, steps: usize) -> f64 {
    let times = model.run(|dev, _, replica| {
        replica.gradients.set_sync(sync)?;
        dev.synchronize()?;
        dev.barrier()?;
        let clock = Instant::now();
        (0..steps).try_for_each(|_| replica.step(dev))?;
        dev.synchronize()?;
        Ok(clock.elapsed().as_secs_f64() * 1e6)
    });
    times.expect("steps").into_iter().fold(0.0, f64::max) / steps as f64
}

/// Replicas with the same steps are equal, bit for bit.
fn assert_equal(model: &mut PerDevice<Replica>) {
    let weights = model.run(|dev, _, replica| dev.download(&replica.weights[LAYERS - 1]));
    let weights = weights.expect("the weights");
    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(weights.iter().all(|x| x[0].is_finite() && bits(x) == bits(&weights[0])), "the replicas drifted apart");
}

/// Sends the peer an order, and returns its answer.
fn ask(peer: &RefCell<Process>, batch: usize, sync: bool, steps: usize) -> f64 {
    let mut peer = peer.borrow_mut();
    peer.order(&format!("{batch}:{}", if sync { "step" } else { "alone" }), steps);
    peer.answer()
}

fn main() {
    let mut bench = Bench::new("overlap");
    let hardware = gpus::count();
    let software = hardware == 0;
    let case = if software { "software" } else { "gpu" };
    bench.set_turns(2, bench.size(15, 3));
    for devices in gpus::powers(if software { 2 } else { hardware }) {
        let batches: &[usize] = if software { &[64] } else { &[8192, 65536] };
        let name = |what: &str, batch: usize| format!("{case}/{what}/{devices}/{batch}");
        if !batches.iter().any(|&batch| ["step", "alone", "exposed"].iter().any(|what| bench.wants(&name(what, batch))))
        {
            continue;
        }
        let peer = if software { None } else { Process::torch("ddp.py", devices, &[&devices.to_string()]) };
        let peer = peer.map(RefCell::new);
        for &batch in batches {
            let builder = GpuPool::builder();
            let builder = match software {
                true => builder.host(devices),
                false => builder.cuda().devices(&(0..devices).collect::<Vec<_>>()),
            };
            let pool = builder.build().expect("the devices can be opened");
            let mut model = pool.per_device(|dev, shard| Replica::new(dev, &shard, batch)).expect("memory for it");
            time(&mut model, true, 3);
            assert_equal(&mut model);
            let model = RefCell::new(model);
            let steps = bench.size((200_000 / batch).clamp(5, 20), 2);
            // Without exchange replicas drift apart, which does not change the time.
            let ours = |sync| time(&mut model.borrow_mut(), sync, steps);
            for (what, sync) in [("step", true), ("alone", false)] {
                let theirs = |peer| Side::new("DDP", move || ask(peer, batch, sync, steps));
                let peers = peer.iter().map(theirs).collect();
                bench.compare(&name(what, batch), MICROSECONDS, Side::new("gpu-pool", || ours(sync)), peers);
            }
            if devices > 1 {
                let theirs =
                    |peer| Side::new("DDP", move || ask(peer, batch, true, steps) - ask(peer, batch, false, steps));
                let peers = peer.iter().map(theirs).collect();
                let ours = Side::new("gpu-pool", || ours(true) - ours(false));
                bench.compare(&name("exposed", batch), MICROSECONDS, ours, peers);
            }
        }
    }
    bench.finish();
}
