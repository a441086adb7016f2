//! A perceptron 784-2048-2048-10 in `f32` with stochastic gradient descent: what `overlap` and `cluster` train against
//! PyTorch's DistributedDataParallel (`peers/ddp.py`), with its bucket sizes and shapes.

// Each bench compiles this file itself and uses a part of it.
#![allow(dead_code)]

use gpu_pool::{Device, DeviceBuffer, Group, Matrix, Result, gradients::GradientExchange};
use gpu_pool_train::{Activation, prelude::*};

use crate::support::gpus;

/// Widths from the input to the output.
const WIDTHS: [usize; 4] = [784, 2048, 2048, 10];
const LAYERS: usize = WIDTHS.len() - 1;
const RATE: f32 = 0.01;

/// The state of a device, for one batch size.
pub struct Replica {
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
    /// A member of the group, with its part of `batch` rows.
    pub fn new(group: &Group<'_>, batch: usize) -> Result<Self> {
        let (dev, shard) = (group.device(), group.shard());
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
            gradients: GradientExchange::builder().build_in(group, &sizes)?,
        })
    }

    /// Whether steps exchange gradients.
    pub fn set_sync(&mut self, sync: bool) -> Result<()> {
        self.gradients.set_sync(sync)
    }

    pub fn last_weights(&self, dev: &Device) -> Result<Vec<f32>> {
        dev.download(&self.weights[LAYERS - 1])
    }

    pub fn step(&mut self, dev: &Device) -> Result<()> {
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
            dev.activation_in_place(activation.biased(&self.biases[layer]), y)?;
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
            dev.column_sum_into(&here[0], &mut self.gradients.grad_mut(2 * layer + 1)?)?;
            self.gradients.ready(dev, 2 * layer + 1)?;
            let x = Matrix::new(&self.outputs[layer], rows, inputs)?;
            dev.gemm(1.0, dy.t(), x, 0.0, &mut self.gradients.grad_mut(2 * layer)?)?;
            self.gradients.ready(dev, 2 * layer)?;
            if let Some(dx) = below.last_mut() {
                dev.gemm(1.0, dy, Matrix::new(&self.weights[layer], width, inputs)?, 0.0, dx)?;
                dev.activation_backward_in_place(Activation::Relu, dx, &self.outputs[layer])?;
            }
        }
        Ok(())
    }
}
