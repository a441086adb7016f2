//! A stage of the pipelines: so many times a linear layer and ReLU, of one width, with weights in torch's layout.

use gpu_pool::{Device, DeviceBuffer, Matrix, Result};
use gpu_pool_train::{Activation::Relu, prelude::*};

use crate::machine::uninit;

pub struct Stack {
    width: usize,
    layers: Vec<Layer>,
}

struct Layer {
    weight: DeviceBuffer<f32>,
    bias: DeviceBuffer<f32>,
    dweight: DeviceBuffer<f32>,
    dbias: DeviceBuffer<f32>,
}

/// What the backward pass of a micro-batch needs.
pub struct Saved {
    /// The input of each layer.
    inputs: Vec<DeviceBuffer<f32>>,
    /// The last layer's product, without bias: its output has gone to the next stage.
    last: DeviceBuffer<f32>,
}

impl Stack {
    pub fn new(dev: &Device, layers: usize, width: usize, seed: u64) -> Result<Self> {
        let spread = 1.0 / (width as f32).sqrt();
        let layer = |number: usize| {
            let mut weight = uninit(dev, width * width)?;
            dev.uniform(&mut weight, -spread..spread, seed, (number * width * width) as u64)?;
            let (dweight, dbias) = (dev.zeros(width * width)?, dev.zeros(width)?);
            Ok(Layer { weight, bias: dev.zeros(width)?, dweight, dbias })
        };
        Ok(Stack { width, layers: (0..layers).map(layer).collect::<Result<_>>()? })
    }

    pub fn forward(&self, dev: &Device, x: DeviceBuffer<f32>) -> Result<(DeviceBuffer<f32>, Saved)> {
        let (n, rows) = (self.width, x.len() / self.width);
        let (mut inputs, mut x) = (Vec::with_capacity(self.layers.len()), x);
        for (number, layer) in self.layers.iter().enumerate() {
            let mut y = uninit(dev, rows * n)?;
            let weight = Matrix::new(&layer.weight, n, n)?;
            dev.gemm(1.0, Matrix::new(&x, rows, n)?, weight.t(), 0.0, &mut y)?;
            inputs.push(x);
            if number + 1 == self.layers.len() {
                let out = dev.activation(Relu.biased(&layer.bias), &y)?;
                return Ok((out, Saved { inputs, last: y }));
            }
            dev.activation_in_place(Relu.biased(&layer.bias), &mut y)?;
            x = y;
        }
        unreachable!("a stage has a layer")
    }

    /// Leaves the gradients of the weights in the stage: added to those that are there, if `accumulate`. Returns the
    /// gradient of the input, unless the stage is the first one.
    pub fn backward(
        &mut self,
        dev: &Device,
        saved: Saved,
        dy: DeviceBuffer<f32>,
        accumulate: bool,
        is_first: bool,
    ) -> Result<Option<DeviceBuffer<f32>>> {
        let (n, rows, beta) = (self.width, dy.len() / self.width, if accumulate { 1.0 } else { 0.0 });
        let Saved { mut inputs, last } = saved;
        let mut dy = dy;
        let mut above: Option<DeviceBuffer<f32>> = None;
        for (number, layer) in self.layers.iter_mut().enumerate().rev() {
            match &above {
                // The output of this layer, which is positive where what ReLU got was.
                Some(output) => dev.activation_backward_in_place(Relu, &mut dy, output)?,
                None => dev.activation_backward_in_place(Relu.biased(&layer.bias), &mut dy, &last)?,
            }
            let x = inputs.pop().expect("an input for each layer");
            if accumulate {
                let mut sum = uninit(dev, n)?;
                dev.column_sum_into(&dy, &mut sum)?;
                dev.add_in_place(&mut layer.dbias, &sum)?;
            } else {
                dev.column_sum_into(&dy, &mut layer.dbias)?;
            }
            let dz = Matrix::new(&dy, rows, n)?;
            dev.gemm(1.0, dz.t(), Matrix::new(&x, rows, n)?, beta, &mut layer.dweight)?;
            if number == 0 && is_first {
                return Ok(None);
            }
            let mut dx = uninit(dev, rows * n)?;
            dev.gemm(1.0, dz, Matrix::new(&layer.weight, n, n)?, 0.0, &mut dx)?;
            dy = dx;
            above = Some(x);
        }
        Ok(Some(dy))
    }
}
