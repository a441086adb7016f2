//! Steps of a pipeline on two devices: against PyTorch's, against what the schedule allows, and what a hop costs.
//!
//! * `gpu/pipeline/<1f1b or gpipe>/<layers>x<width>x<rows>`: milliseconds of a step, forward and backward, of 8
//!   micro-batches of so many rows. A stage is so many times a linear layer and ReLU, without TF32. Peers: `torch`, and
//!   `best`: (micro-batches + stages - 1) x the forward and backward pass of one micro-batch in one stage, measured
//!   alone on the same GPU by turns. Targets of 1F1B: see `parallel_tables.py`
//! * `software/pipeline/sleep/..`, `software/pipeline/virtual/..`: see `theory`
//! * `<gpu or software>/hop/<devices>`: microseconds of a step for each hop, with stages that do nothing. Target: 10 us

mod hop;
mod theory;

use std::{cell::RefCell, time::Instant};

use gpu_pool::{Device, DeviceBuffer, GpuPool, PerDevice, Result};
use gpu_pool_train::{Pipeline, PipelineSchedule, Stage, StageContext, prelude::*};

use crate::{
    Machine,
    machine::uninit,
    stack::{Saved, Stack},
    support::{Bench, MILLISECONDS, Side},
};

/// Micro-batches of a step.
const MICROS: usize = 8;
/// Devices, and stages.
const RANKS: usize = 2;

impl Stage for Stack {
    type Activation = DeviceBuffer<f32>;
    type Saved = Saved;

    fn forward(&mut self, dev: &Device, _: StageContext, x: DeviceBuffer<f32>) -> Result<(DeviceBuffer<f32>, Saved)> {
        Stack::forward(self, dev, x)
    }

    fn backward(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: Saved,
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>> {
        Stack::backward(self, dev, saved, dy, at.accumulate, at.is_first)
    }
}

/// Layers, width, and rows of a micro-batch.
type Shape = (usize, usize, usize);

/// The batch: inputs on the first device, targets on the last.
struct Batch {
    parts: Vec<DeviceBuffer<f32>>,
    /// What `best` measures; on the last device.
    alone: Stack,
}

impl Batch {
    fn new(dev: &Device, (layers, width, rows): Shape) -> Result<Self> {
        let part = |micro| {
            let mut x = uninit(dev, rows * width)?;
            dev.normal(&mut x, 0.0, 1.0, dev.index() as u64, (micro * rows * width) as u64)?;
            Ok(x)
        };
        let parts = (0..MICROS).map(part).collect::<Result<_>>()?;
        Ok(Batch { parts, alone: Stack::new(dev, layers, width, 7)? })
    }

    fn part(&self, dev: &Device, micro: usize) -> Result<DeviceBuffer<f32>> {
        let mut x = uninit(dev, self.parts[micro].len())?;
        dev.copy(&self.parts[micro], &mut x)?;
        Ok(x)
    }

    /// The gradient of the mean squared error, and the error, which stays on the device.
    fn loss(&self, dev: &Device, micro: usize, y: DeviceBuffer<f32>) -> Result<(DeviceBuffer<f32>, DeviceBuffer<f32>)> {
        let (mut dy, n) = (y, self.parts[micro].len() as f32);
        dev.sub_in_place(&mut dy, &self.parts[micro])?;
        let mut error = dev.dot(&dy, &dy)?;
        dev.scale(&mut error, 1.0 / n)?;
        dev.scale(&mut dy, 2.0 / n)?;
        Ok((dy, error))
    }

    /// Milliseconds of the forward and backward pass of a micro-batch in one stage, over all micro-batches in a row.
    fn time_alone(&mut self, dev: &Device) -> Result<f64> {
        let inputs = (0..MICROS).map(|micro| self.part(dev, micro)).collect::<Result<Vec<_>>>()?;
        let gradients = (0..MICROS).map(|micro| self.part(dev, micro)).collect::<Result<Vec<_>>>()?;
        dev.synchronize()?;
        let clock = Instant::now();
        for (x, dy) in inputs.into_iter().zip(gradients) {
            let (_y, saved) = self.alone.forward(dev, x)?;
            self.alone.backward(dev, saved, dy, true, false)?;
        }
        dev.synchronize()?;
        Ok(clock.elapsed().as_secs_f64() * 1e3 / MICROS as f64)
    }
}

fn step(pipeline: &mut Pipeline<Stack>, batch: &PerDevice<Batch>) -> Result<f64> {
    let clock = Instant::now();
    pipeline.step(
        |dev, micro| batch.borrow(dev)?.part(dev, micro),
        |dev, micro, y| batch.borrow(dev)?.loss(dev, micro, y),
    )?;
    Ok(clock.elapsed().as_secs_f64() * 1e3)
}

pub fn run(bench: &mut Bench, machine: &Machine) {
    hop::run(bench, machine);
    theory::run(bench);
    let shapes: &[Shape] = match machine.software {
        true => &[(2, 32, 4)],
        false => &[(1, 256, 16), (2, 1024, 64), (4, 2048, 512), (4, 2048, 4096)],
    };
    if machine.devices < RANKS {
        return;
    }
    let case =
        |name: &str, (layers, width, rows): Shape| format!("{}/pipeline/{name}/{layers}x{width}x{rows}", machine.kind);
    let names = ["1f1b", "gpipe"];
    if !shapes.iter().any(|&shape| names.iter().any(|name| bench.wants(&case(name, shape)))) {
        return;
    }
    let (pool, torch) = (machine.pool(RANKS), machine.torch("pp.py", RANKS));
    for &shape in shapes {
        for name in names {
            if bench.wants(&case(name, shape)) {
                let torch = torch.as_ref().map(|torch| {
                    let (layers, width, rows) = shape;
                    torch.side("torch", format!("{name}:{layers}:{width}:{rows}:{MICROS}"), steps_of(shape))
                });
                compare(bench, &case(name, shape), &pool, name, shape, torch);
            }
        }
    }
}

/// Steps in a turn.
fn steps_of((_, _, rows): Shape) -> usize {
    if rows > 1000 { 1 } else { 5 }
}

fn compare(bench: &mut Bench, case: &str, pool: &GpuPool, name: &str, shape: Shape, torch: Option<Side<'_>>) {
    let (layers, width, _) = shape;
    let schedule = match name {
        "gpipe" => PipelineSchedule::gpipe(RANKS, MICROS),
        _ => PipelineSchedule::one_f_one_b(RANKS, MICROS),
    };
    let batch = RefCell::new(pool.per_device(|dev, _| Batch::new(dev, shape)).expect("memory for it"));
    let pipeline =
        Pipeline::new(pool, schedule.expect("a schedule"), |dev, stage| Stack::new(dev, layers, width, stage as u64));
    let mut pipeline = pipeline.expect("a stage on each device");
    for _ in 0..3 {
        step(&mut pipeline, &batch.borrow()).expect("the first steps");
    }
    let ours = Side::sampling("gpu-pool", |samples| {
        // The first step of a turn wakes the threads up.
        step(&mut pipeline, &batch.borrow()).expect("a step");
        let times = (0..steps_of(shape)).map(|_| step(&mut pipeline, &batch.borrow()).expect("a step"));
        samples.extend(times);
    });
    let best = Side::sampling("best", |samples| {
        for _ in 0..=steps_of(shape) {
            let times = batch.borrow_mut().on(&[RANKS - 1]).run(|dev, _, batch| batch.time_alone(dev));
            samples.push(times.expect("a stage")[0] * (MICROS + RANKS - 1) as f64);
        }
    });
    bench.set_turns(1, bench.size(9, 3));
    bench.compare(case, MILLISECONDS, ours, torch.into_iter().chain([best]).collect());
}
