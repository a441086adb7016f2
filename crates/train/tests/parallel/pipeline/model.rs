//! The model of the tests: layers with a ReLU, whose backward pass can be split; and the same on one device.

use crate::support::Gpus;
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, Matrix};
use gpu_pool_train::{Activation, Pipeline, PipelineSchedule, Stage, StageContext, Work, prelude::*};
use std::ops::Range;

pub const WIDTH: usize = 8;

pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32) / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// The rows of a micro-batch: batches are not a multiple of them, and the sizes differ.
pub fn rows(micro: usize, micros: usize) -> Range<usize> {
    let all = 3 * micros - 2;
    micro * all / micros..(micro + 1) * all / micros
}

pub fn input(dev: &Device, micro: usize, micros: usize) -> Result<DeviceBuffer<f32>, Error> {
    let x = numbers(3 * micros * WIDTH, 5);
    let rows = rows(micro, micros);
    dev.upload(&x[rows.start * WIDTH..rows.end * WIDTH])
}

/// The sum of squares: twice the output is its gradient.
pub fn loss(dev: &Device, mut y: DeviceBuffer<f32>) -> Result<(DeviceBuffer<f32>, f32), Error> {
    let value = dev.download(&dev.dot(&y, &y)?)?[0];
    dev.scale(&mut y, 2.0)?;
    Ok((y, value))
}

/// `relu(x w + b)`.
pub struct Layer {
    pub w: DeviceBuffer<f32>,
    pub b: DeviceBuffer<f32>,
    pub dw: DeviceBuffer<f32>,
    pub db: DeviceBuffer<f32>,
}

pub struct Saved {
    x: DeviceBuffer<f32>,
    before: DeviceBuffer<f32>,
    dz: Option<DeviceBuffer<f32>>,
}

impl Layer {
    pub fn new(dev: &Device, stage: usize) -> Result<Self, Error> {
        let w: Vec<f32> = numbers(WIDTH * WIDTH, 100 + stage as u64).iter().map(|w| 0.6 * w).collect();
        let b: Vec<f32> = numbers(WIDTH, 200 + stage as u64).iter().map(|b| 0.1 * b + 0.1).collect();
        // Not zeros: the first micro-batch of a step replaces what is there.
        let (dw, db) = (dev.upload(&numbers(WIDTH * WIDTH, 1))?, dev.upload(&numbers(WIDTH, 2))?);
        Ok(Layer { w: dev.upload(&w)?, b: dev.upload(&b)?, dw, db })
    }

    pub fn update(&mut self, dev: &Device) -> Result<(), Error> {
        dev.axpy(-1e-3, &self.dw, &mut self.w)?;
        dev.axpy(-1e-3, &self.db, &mut self.b)
    }

    pub fn gradients(&self, dev: &Device) -> Result<Vec<f32>, Error> {
        Ok([dev.download(&self.dw)?, dev.download(&self.db)?].concat())
    }
}

fn matrix(x: &DeviceBuffer<f32>) -> Result<Matrix<'_>, Error> {
    Matrix::new(x, x.len() / WIDTH, WIDTH)
}

impl Stage for Layer {
    type Activation = DeviceBuffer<f32>;
    type Saved = Saved;

    fn forward(
        &mut self,
        dev: &Device,
        _: StageContext,
        x: DeviceBuffer<f32>,
    ) -> Result<(DeviceBuffer<f32>, Saved), Error> {
        let mut before = dev.zeros(x.len())?;
        dev.gemm(1.0, matrix(&x)?, matrix(&self.w)?, 0.0, &mut before)?;
        let y = dev.activation(Activation::Relu.biased(&self.b), &before)?;
        Ok((y, Saved { x, before, dz: None }))
    }

    fn backward(
        &mut self,
        dev: &Device,
        at: StageContext,
        mut saved: Saved,
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>, Error> {
        let dx = self.backward_input(dev, at, &mut saved, dy)?;
        self.backward_weights(dev, at, saved)?;
        Ok(dx)
    }

    fn backward_input(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: &mut Saved,
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>, Error> {
        let dz = dev.activation_backward(Activation::Relu.biased(&self.b), &dy, &saved.before)?;
        let dx = match at.is_first {
            true => None,
            false => {
                let mut dx = dev.zeros(dz.len())?;
                dev.gemm(1.0, matrix(&dz)?, matrix(&self.w)?.t(), 0.0, &mut dx)?;
                Some(dx)
            }
        };
        saved.dz = Some(dz);
        Ok(dx)
    }

    fn backward_weights(&mut self, dev: &Device, at: StageContext, saved: Saved) -> Result<(), Error> {
        let dz = saved.dz.expect("its first half comes before");
        let beta = if at.accumulate { 1.0 } else { 0.0 };
        dev.gemm(1.0, matrix(&saved.x)?.t(), matrix(&dz)?, beta, &mut self.dw)?;
        let mut db = dev.zeros(WIDTH)?;
        dev.column_sum_into(&dz, &mut db)?;
        if at.accumulate { dev.axpy(1.0, &db, &mut self.db) } else { dev.copy(&db, &mut self.db) }
    }
}

/// A layer that calls a function after each of its passes.
pub struct Around<F>(pub Layer, pub F);

impl<F: Fn(StageContext, Work) -> Result<(), Error>> Stage for Around<F> {
    type Activation = DeviceBuffer<f32>;
    type Saved = Saved;

    fn forward(
        &mut self,
        dev: &Device,
        at: StageContext,
        x: DeviceBuffer<f32>,
    ) -> Result<(DeviceBuffer<f32>, Saved), Error> {
        let done = self.0.forward(dev, at, x)?;
        (self.1)(at, Work::Forward).map(|()| done)
    }
    fn backward(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: Saved,
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>, Error> {
        let done = self.0.backward(dev, at, saved, dy)?;
        (self.1)(at, Work::Backward).map(|()| done)
    }
    fn backward_input(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: &mut Saved,
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>, Error> {
        let done = self.0.backward_input(dev, at, saved, dy)?;
        (self.1)(at, Work::BackwardInput).map(|()| done)
    }
    fn backward_weights(&mut self, dev: &Device, at: StageContext, saved: Saved) -> Result<(), Error> {
        self.0.backward_weights(dev, at, saved)?;
        (self.1)(at, Work::BackwardWeights)
    }
}

/// The losses of a step by micro-batch, and the gradients by stage.
pub type Found = (Vec<f32>, Vec<Vec<f32>>);

/// `steps` steps on one device without a pipeline, with an update after each: all micro-batches forward, then back;
/// each stage adds its gradients up in the order in which the schedule does.
pub fn on_one_device(gpus: Gpus, schedule: &PipelineSchedule, steps: usize) -> Found {
    let micros = schedule.micros();
    let run = gpus.pool(1).run(|dev, _| {
        let layers = (0..schedule.stages()).map(|stage| Layer::new(dev, stage));
        let mut layers = layers.collect::<Result<Vec<_>, _>>()?;
        let mut found = (Vec::new(), Vec::new());
        for _ in 0..steps {
            let mut losses = Vec::new();
            let mut saved: Vec<Vec<Option<Saved>>> = (0..layers.len()).map(|_| Vec::new()).collect();
            for micro in 0..micros {
                let mut x = input(dev, micro, micros)?;
                for (stage, layer) in layers.iter_mut().enumerate() {
                    let at = StageContext { stage, micro, is_first: stage == 0, accumulate: false };
                    let (y, keep) = layer.forward(dev, at, x)?;
                    saved[stage].push(Some(keep));
                    x = y;
                }
                let (mut dy, value) = loss(dev, x)?;
                losses.push(value);
                for (stage, layer) in layers.iter_mut().enumerate().rev() {
                    let at = StageContext { stage, micro, is_first: stage == 0, accumulate: false };
                    let saved = saved[stage][micro].as_mut().unwrap();
                    let Some(dx) = layer.backward_input(dev, at, saved, dy)? else { break };
                    dy = dx;
                }
            }
            for (stage, layer) in layers.iter_mut().enumerate() {
                let actions = schedule.actions(schedule.rank_of(stage)).iter();
                let adds =
                    actions.filter(|a| a.stage == stage && matches!(a.work, Work::Backward | Work::BackwardWeights));
                for (i, add) in adds.enumerate() {
                    let at = StageContext { stage, micro: add.micro, is_first: stage == 0, accumulate: i > 0 };
                    layer.backward_weights(dev, at, saved[stage][add.micro].take().unwrap())?;
                }
            }
            let gradients = layers.iter().map(|layer| layer.gradients(dev)).collect::<Result<_, _>>()?;
            found = (losses, gradients);
            layers.iter_mut().try_for_each(|layer| layer.update(dev))?;
        }
        Ok(found)
    });
    run.unwrap().remove(0)
}

pub fn pipeline(pool: &GpuPool, schedule: &PipelineSchedule) -> Result<Pipeline<Layer>, Error> {
    Pipeline::new(pool, schedule.clone(), Layer::new)
}

/// One step, and its gradients.
pub fn step<S: Stage<Activation = DeviceBuffer<f32>> + 'static>(
    pipeline: &mut Pipeline<S>,
    gradients: impl Fn(&Device, &mut S) -> Result<Vec<f32>, Error> + Sync,
) -> Result<Found, Error> {
    let micros = pipeline.schedule().micros();
    let losses = pipeline.step(|dev, micro| input(dev, micro, micros), |dev, _, y| loss(dev, y))?;
    Ok((losses, pipeline.each(|dev, _, stage| gradients(dev, stage))?))
}

/// The same as [`on_one_device`], by the pipeline.
pub fn pipelined(pool: &GpuPool, schedule: &PipelineSchedule, steps: usize) -> Result<Found, Error> {
    let mut pipeline = pipeline(pool, schedule)?;
    let mut found = (Vec::new(), Vec::new());
    for _ in 0..steps {
        found = step(&mut pipeline, |dev, layer| layer.gradients(dev))?;
        pipeline.each(|dev, _, layer| layer.update(dev))?;
    }
    Ok(found)
}
