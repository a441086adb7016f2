//! A backward pass that takes time and no core, as one of GPUs does: how much of an exchange is left beside it.

use std::{thread, time::Duration};

use gpu_pool::{Device, Group, LaunchDims, Module, Result, gradients::GradientExchange, kernel};

/// Only software GPUs run this.
pub static MODULE: Module = Module::ptx(".version 7.5\n.target sm_75\n.address_size 64\n");

kernel! {
    /// A layer's part of the pass.
    static LAYER: "layer" in MODULE, fn(gradient: &mut [f32], micros: u64) |_dims| {
        thread::sleep(Duration::from_micros(micros));
        gradient[0] = 1.0;
    }
}

const LAYERS: usize = 8;
/// Microseconds of a layer.
const LAYER_MICROS: u64 = 5000;

/// A member with gradients in as many buckets as there are layers.
pub struct Backward(GradientExchange);

impl Backward {
    pub fn new(group: &Group<'_>, bytes: usize) -> Result<Backward> {
        let layer = bytes / LAYERS;
        let exchange = GradientExchange::builder().first_bucket_bytes(layer).bucket_bytes(layer);
        Ok(Backward(exchange.build_in(group, &[layer / 4; LAYERS])?))
    }

    /// `beside`: buckets start when they are complete, not when all of them are.
    pub fn step(&mut self, dev: &Device, beside: bool) -> Result<()> {
        for layer in (0..LAYERS).rev() {
            // SAFETY: the kernel writes the gradient's first number.
            unsafe { dev.launch(&LAYER, LaunchDims::cover(1), (&mut self.0.grad_mut(layer)?, LAYER_MICROS))? };
            if beside {
                self.0.ready(dev, layer)?;
            }
        }
        for layer in (0..LAYERS).rev().filter(|_| !beside) {
            if layer + 1 == LAYERS {
                dev.synchronize()?;
            }
            self.0.ready(dev, layer)?;
        }
        self.0.finish(dev)?;
        dev.synchronize()
    }
}
