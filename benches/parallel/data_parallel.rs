//! `DataParallel`'s step of SGD on a perceptron 784-2048-2048-10, in `f32` (no TF32), against PyTorch's
//! DistributedDataParallel (`peers/ddp.py`), one process per GPU, on the same GPUs in turn.
//!
//! * `.../data_parallel/<devices>/<batch>`: microseconds per step, over many in a row; `batch` rows over all devices
//! * `.../step_sharded/bf16/<devices>/<batch>`: the same with parameters of bf16, and AdamW whose state is divided
//!   among the devices; against DDP with fused AdamW, called and as one CUDA graph, and with ZeroRedundancyOptimizer,
//!   which gives every parameter as a whole to one process. This crate also keeps the parameters and the moments in
//!   f32; torch's are bf16.
//!
//! The rows are on their devices before the step, on both sides. DDP's host runs ahead of its GPUs. A step here is a
//! scope, which ends when the devices' streams are empty. Target: no slower than DDP at a batch of 8192.

use std::{cell::RefCell, time::Instant};

use gpu_pool::{Device, DeviceBuffer, GpuPool, Matrix, PerDevice, Result, Shard};
use gpu_pool_train::{
    Activation::Identity, Activation::Relu, DataParallel, Gradients, Model, Optimizer, Parameter, prelude::*,
};

use half::bf16;

use crate::{
    Machine,
    machine::uninit,
    support::{Bench, MICROSECONDS, Side, child::Torch, gpus},
};

/// Widths from the input to the output.
const WIDTHS: [usize; 4] = [784, 2048, 2048, 10];
const LAYERS: usize = WIDTHS.len() - 1;

struct Perceptron<T: Parameter> {
    /// Weight and bias of layer `l` are parameters `2 l` and `2 l + 1`. A weight is `outputs x inputs`.
    parameters: Vec<DeviceBuffer<T>>,
}

impl<T: Parameter> Model<T> for Perceptron<T> {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<T>> {
        self.parameters.iter_mut().collect()
    }
}

impl<T: Parameter> Perceptron<T> {
    fn new(dev: &Device) -> Result<Self> {
        let mut parameters = Vec::new();
        for (layer, pair) in WIDTHS.windows(2).enumerate() {
            let (mut weight, spread) = (uninit(dev, pair[0] * pair[1])?, 1.0 / (pair[0] as f32).sqrt());
            dev.uniform(&mut weight, -spread..spread, layer as u64, 0)?;
            parameters.extend([weight, dev.zeros(pair[1])?]);
        }
        Ok(Perceptron { parameters })
    }

    fn weight(&self, layer: usize) -> Result<Matrix<'_, T>> {
        Matrix::new(&self.parameters[2 * layer], WIDTHS[layer + 1], WIDTHS[layer])
    }

    /// The forward and the backward pass.
    fn pass(&self, dev: &Device, rows: &Rows<T>, gradients: &mut Gradients<'_, T>) -> Result<()> {
        let count = rows.labels.len();
        let mut outputs: Vec<DeviceBuffer<T>> = Vec::new();
        for layer in 0..LAYERS {
            let mut y = uninit(dev, count * WIDTHS[layer + 1])?;
            let x = Matrix::new(outputs.last().unwrap_or(&rows.x), count, WIDTHS[layer])?;
            dev.gemm(1.0, x, self.weight(layer)?.t(), 0.0, &mut y)?;
            let activation = if layer + 1 < LAYERS { Relu } else { Identity };
            dev.activation_in_place(activation.biased(&self.parameters[2 * layer + 1]), &mut y)?;
            outputs.push(y);
        }
        let logits = outputs.pop().expect("there are layers");
        let (_losses, mut dy) = dev.cross_entropy(&logits, &rows.labels, gradients.scale)?;
        for layer in (0..LAYERS).rev() {
            let x = outputs.pop();
            gradients.write(2 * layer + 1, |db| dev.column_sum_into(&dy, db))?;
            let dz = Matrix::new(&dy, count, WIDTHS[layer + 1])?;
            let input = Matrix::new(x.as_ref().unwrap_or(&rows.x), count, WIDTHS[layer])?;
            gradients.write(2 * layer, |dw| dev.gemm(1.0, dz.t(), input, 0.0, dw))?;
            if let Some(x) = x {
                let mut dx = uninit(dev, x.len())?;
                dev.gemm(1.0, dz, self.weight(layer)?, 0.0, &mut dx)?;
                dev.activation_backward_in_place(Relu, &mut dx, &x)?;
                dy = dx;
            }
        }
        Ok(())
    }
}

/// A device's rows of the batch.
struct Rows<T: Parameter> {
    x: DeviceBuffer<T>,
    labels: DeviceBuffer<u32>,
}

impl<T: Parameter> Rows<T> {
    fn new(dev: &Device, shard: &Shard, batch: usize) -> Result<Self> {
        let (rows, seed) = (shard.range(batch).len(), 100 + shard.index() as u64);
        let mut x = uninit(dev, rows * WIDTHS[0])?;
        dev.normal(&mut x, 0.0, 1.0, seed, 0)?;
        let labels: Vec<u32> = gpus::noise(rows, seed).into_iter().map(|x| x % WIDTHS[LAYERS] as u32).collect();
        Ok(Rows { x, labels: dev.upload(&labels)? })
    }
}

struct Training<T: Parameter> {
    model: DataParallel<Perceptron<T>, T>,
    data: PerDevice<Rows<T>>,
    batch: usize,
}

impl<T: Parameter> Training<T> {
    fn new(pool: &GpuPool, optimizer: Optimizer, batch: usize) -> Result<Self> {
        let model = DataParallel::new(pool, optimizer, Perceptron::new)?;
        Ok(Training { model, data: pool.per_device(|dev, shard| Rows::new(dev, &shard, batch))?, batch })
    }

    fn step(&mut self) -> Result<()> {
        let data = &self.data;
        let pass = |dev: &Device, _: Shard, model: &mut Perceptron<T>, gradients: &mut Gradients<'_, T>| {
            model.pass(dev, &*data.borrow(dev)?, gradients)
        };
        self.model.step(self.batch, pass).map(drop)
    }

    /// Microseconds per step.
    fn time(&mut self, steps: usize) -> Result<f64> {
        let clock = Instant::now();
        (0..steps).try_for_each(|_| self.step())?;
        Ok(clock.elapsed().as_secs_f64() * 1e6 / steps as f64)
    }
}

pub fn run(bench: &mut Bench, machine: &Machine) {
    let batch = if machine.software { 64 } else { 8192 };
    for devices in gpus::powers(machine.devices).filter(|&devices| devices > 1 || machine.devices == 1) {
        let peers = [("DDP", "step")];
        let case = format!("{}/data_parallel/{devices}/{batch}", machine.kind);
        compare::<f32>(bench, machine, (devices, batch), &case, Optimizer::sgd(0.01), &peers);
        let peers = [
            ("DDP, fused AdamW", "adamw"),
            ("DDP in a graph, fused AdamW", "adamw_graph"),
            ("ZeroRedundancyOptimizer", "zero"),
        ];
        let case = format!("{}/step_sharded/bf16/{devices}/{batch}", machine.kind);
        compare::<bf16>(bench, machine, (devices, batch), &case, Optimizer::adam_w(1e-3).sharded(), &peers);
    }
}

/// One case, against peers with these names and orders.
fn compare<T: Parameter>(
    bench: &mut Bench,
    machine: &Machine,
    (devices, batch): (usize, usize),
    case: &str,
    optimizer: Optimizer,
    peers: &[(&'static str, &str)],
) {
    if !bench.wants(case) {
        return;
    }
    let pool = machine.pool(devices);
    let training = RefCell::new(Training::<T>::new(&pool, optimizer, batch).expect("memory for it"));
    training.borrow_mut().time(3).expect("the first steps");
    training.borrow_mut().model.verify().expect("the replicas are equal");
    let torch = machine.torch("ddp.py", devices);
    let steps = bench.size(20, 2);
    bench.set_turns(2, bench.size(15, 3));
    let ours = Side::new("gpu-pool", || training.borrow_mut().time(steps).expect("steps"));
    let side = |torch, &(name, what): &(&'static str, &str)| Torch::side(torch, name, format!("{batch}:{what}"), steps);
    let peers = torch.iter().flat_map(|torch| peers.iter().map(move |peer| side(torch, peer))).collect();
    bench.compare(case, MICROSECONDS, ours, peers);
}
