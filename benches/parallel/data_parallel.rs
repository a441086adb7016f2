//! `DataParallel`'s step of SGD on a perceptron 784-2048-2048-10, in `f32` (no TF32), against PyTorch's
//! DistributedDataParallel (`peers/ddp.py`), one process per GPU, on the same GPUs in turn.
//!
//! * `.../data_parallel/<devices>/<batch>`: microseconds per step, over many in a row; `batch` rows over all devices
//! * `.../step_sharded/bf16/<devices>/<batch>`: the same with parameters of bf16, and AdamW whose state is divided
//!   among the devices; against DDP with fused AdamW, called and as one CUDA graph, and with ZeroRedundancyOptimizer,
//!   which gives every parameter as a whole to one process. This crate also keeps the parameters and the moments in
//!   f32; torch's are bf16.
//! * `.../step_sharded_graph/bf16/<devices>/<batch>`: the same model in one captured graph, which ends with the step of
//!   a `ShardedOptimizer`; against DDP in a graph, and against the step of `DataParallel`
//! * `.../step_captured/bf16/<devices>/<batch>`: the step that `DataParallel` captures and launches, in scopes of many
//!   and of one; against that graph, and DDP in a graph
//!
//! The rows are on their devices before the step, on both sides. DDP's host runs ahead of its GPUs. A step here is a
//! scope, which ends when the devices' streams are empty. Target: no slower than DDP at a batch of 8192.

use std::{cell::RefCell, ops::Range, slice, time::Instant};

use gpu_pool::{
    AsView, Device, DeviceBuffer, DeviceView, DeviceViewMut, GpuPool, Graph, Matrix, PerDevice, ReduceOp, Result, Shard,
};
use gpu_pool_train::{
    Activation::Identity, Activation::Relu, DataParallel, Gradients, Model, Optimizer, Parameter, ShardedOptimizer,
    prelude::*,
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
}

/// The forward and the backward pass. `write` is given the number of each gradient, and what writes it.
fn pass<T: Parameter>(
    dev: &Device,
    parameters: &[DeviceView<'_, T>],
    rows: &Rows<T>,
    scale: f32,
    mut write: impl FnMut(usize, &dyn Fn(&mut DeviceViewMut<'_, T>) -> Result<()>) -> Result<()>,
) -> Result<()> {
    let count = rows.labels.len();
    let weight = |layer: usize| Matrix::new(&parameters[2 * layer], WIDTHS[layer + 1], WIDTHS[layer]);
    let mut outputs: Vec<DeviceBuffer<T>> = Vec::new();
    for layer in 0..LAYERS {
        let mut y = uninit(dev, count * WIDTHS[layer + 1])?;
        let x = Matrix::new(outputs.last().unwrap_or(&rows.x), count, WIDTHS[layer])?;
        dev.gemm(1.0, x, weight(layer)?.t(), 0.0, &mut y)?;
        let activation = if layer + 1 < LAYERS { Relu } else { Identity };
        dev.activation_in_place(activation.biased(&parameters[2 * layer + 1]), &mut y)?;
        outputs.push(y);
    }
    let logits = outputs.pop().expect("there are layers");
    let (_losses, mut dy) = dev.cross_entropy(&logits, &rows.labels, scale)?;
    for layer in (0..LAYERS).rev() {
        let x = outputs.pop();
        write(2 * layer + 1, &|db| dev.column_sum_into(&dy, db))?;
        let dz = Matrix::new(&dy, count, WIDTHS[layer + 1])?;
        let input = Matrix::new(x.as_ref().unwrap_or(&rows.x), count, WIDTHS[layer])?;
        write(2 * layer, &|dw| dev.gemm(1.0, dz.t(), input, 0.0, dw))?;
        if let Some(x) = x {
            let mut dx = uninit(dev, x.len())?;
            dev.gemm(1.0, dz, weight(layer)?, 0.0, &mut dx)?;
            dev.activation_backward_in_place(Relu, &mut dx, &x)?;
            dy = dx;
        }
    }
    Ok(())
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
        self.model.step(self.batch, pass_of(&self.data)).map(drop)
    }

    /// Microseconds per step.
    fn time(&mut self, steps: usize) -> Result<f64> {
        let clock = Instant::now();
        (0..steps).try_for_each(|_| self.step())?;
        Ok(clock.elapsed().as_secs_f64() * 1e6 / steps as f64)
    }

    fn capture(&mut self) -> Result<()> {
        self.model.capture_step(self.batch, pass_of(&self.data))
    }

    /// Microseconds per step of the captured one, with so many in a scope.
    fn time_captured(&mut self, steps: usize, scope: usize) -> Result<f64> {
        let clock = Instant::now();
        (0..steps / scope).try_for_each(|_| self.model.launch_steps(scope, |_, _, _, _| Ok(())))?;
        Ok(clock.elapsed().as_secs_f64() * 1e6 / (steps / scope * scope) as f64)
    }
}

fn pass_of<T: Parameter>(
    data: &PerDevice<Rows<T>>,
) -> impl Fn(&Device, Shard, &mut Perceptron<T>, &mut Gradients<'_, T>) -> Result<()> {
    |dev, _, model, gradients| {
        let parameters: Vec<_> = model.parameters.iter().map(|parameter| parameter.view()).collect();
        let scale = gradients.scale;
        pass(dev, &parameters, &*data.borrow(dev)?, scale, |i, f| gradients.write(i, |gradient| f(gradient)))
    }
}

/// The same training as a graph of each device, with all parameters in one buffer, and all gradients in another.
struct Captured<T: Parameter> {
    graph: Graph,
    optimizer: ShardedOptimizer<T>,
    weights: DeviceBuffer<T>,
}

impl<T: Parameter> Captured<T> {
    fn new(dev: &Device, shard: &Shard, optimizer: Optimizer, batch: usize) -> Result<Self> {
        let (model, rows) = (Perceptron::<T>::new(dev)?, Rows::new(dev, shard, batch)?);
        let mut places: Vec<Range<usize>> = Vec::new();
        for parameter in &model.parameters {
            let start = places.last().map_or(0, |place| place.end);
            places.push(start..start + parameter.len());
        }
        let all = places.last().map_or(0, |place| place.end);
        let mut weights = uninit(dev, all)?;
        for (parameter, place) in model.parameters.iter().zip(&places) {
            dev.copy(parameter, &mut weights.slice_mut(place.clone()))?;
        }
        let everyone: Vec<usize> = (0..shard.count()).collect();
        let mut optimizer = ShardedOptimizer::new(&dev.group(&everyone)?, optimizer, ReduceOp::Sum, &[all])?;
        let mut gradients = dev.zeros(optimizer.len())?;
        let mut step = |dev: &Device| {
            let parameters: Vec<_> = places.iter().map(|place| weights.slice(place.clone())).collect();
            let write = |i: usize, f: &dyn Fn(&mut DeviceViewMut<'_, T>) -> Result<()>| {
                f(&mut gradients.slice_mut(places[i].clone()))
            };
            pass(dev, &parameters, &rows, 1.0 / batch as f32, write)?;
            optimizer.step(dev, &mut gradients, slice::from_mut(&mut weights)).map(drop)
        };
        // The first product loads cuBLAS.
        step(dev)?;
        let (graph, ()) = dev.capture(step)?;
        Ok(Captured { graph, optimizer, weights })
    }

    fn steps(&mut self, dev: &Device, steps: usize) -> Result<()> {
        for _ in 0..steps {
            self.optimizer.prepare(dev)?;
            dev.launch_graph(&self.graph)?;
        }
        Ok(())
    }
}

fn compare_captured(bench: &mut Bench, machine: &Machine, devices: usize, batch: usize) {
    let case = format!("{}/step_sharded_graph/bf16/{devices}/{batch}", machine.kind);
    if !bench.wants(&case) && !bench.wants(&case.replace("step_sharded_graph", "step_captured")) {
        return;
    }
    let pool = machine.pool(devices);
    let optimizer = Optimizer::adam_w(1e-3);
    let called = RefCell::new(Training::<bf16>::new(&pool, optimizer.sharded(), batch).expect("memory for it"));
    let captured = pool.per_device(|dev, shard| Captured::<bf16>::new(dev, &shard, optimizer, batch));
    let captured = RefCell::new(captured.expect("memory for it"));
    // Both have made as many steps, and add up in other orders.
    let last = WIDTHS[LAYERS] * WIDTHS[LAYERS - 1];
    called.borrow_mut().time(4).expect("the first steps");
    let called_weights = called.borrow_mut().model.each(|dev, model| dev.download(&model.parameters[2 * LAYERS - 2]));
    let captured_weights = captured.borrow_mut().run(|dev, _, captured| {
        captured.steps(dev, 3)?;
        let end = captured.weights.len() - WIDTHS[LAYERS];
        dev.download(&captured.weights.slice(end - last..end))
    });
    for (a, b) in called_weights.expect("weights").concat().iter().zip(captured_weights.expect("weights").concat()) {
        assert!((a.to_f32() - b.to_f32()).abs() < 6e-3, "{case}: {a} and {b}");
    }
    let torch = machine.torch("ddp.py", devices);
    let steps = bench.size(20, 2);
    bench.set_turns(2, bench.size(15, 3));
    let ours = Side::new("gpu-pool", || {
        let clock = Instant::now();
        captured.borrow_mut().run(|dev, _, captured| captured.steps(dev, steps)).expect("steps");
        clock.elapsed().as_secs_f64() * 1e6 / steps as f64
    });
    let mut peers = vec![Side::new("DataParallel of gpu-pool", || called.borrow_mut().time(steps).expect("steps"))];
    let ddp =
        torch.iter().map(|torch| torch.side("DDP in a graph, fused AdamW", format!("{batch}:adamw_graph"), steps));
    peers.extend(ddp.clone());
    bench.compare(&case, MICROSECONDS, ours, peers);
    // The same by `DataParallel`.
    let case = format!("{}/step_captured/bf16/{devices}/{batch}", machine.kind);
    let model = RefCell::new(Training::<bf16>::new(&pool, optimizer.sharded(), batch).expect("memory for it"));
    model.borrow_mut().time(1).expect("a step that loads cuBLAS");
    model.borrow_mut().capture().expect("a graph");
    let many = || model.borrow_mut().time_captured(steps, steps).expect("steps");
    let mut peers = vec![
        Side::new("a scope for each step", || model.borrow_mut().time_captured(steps, 1).expect("steps")),
        Side::new("a graph by hand", || {
            let clock = Instant::now();
            captured.borrow_mut().run(|dev, _, captured| captured.steps(dev, steps)).expect("steps");
            clock.elapsed().as_secs_f64() * 1e6 / steps as f64
        }),
    ];
    peers.extend(ddp);
    bench.compare(&case, MICROSECONDS, Side::new("gpu-pool", many), peers);
    model.borrow_mut().model.verify().expect("the replicas are equal");
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
        if devices > 1 {
            compare_captured(bench, machine, devices, batch);
        }
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
