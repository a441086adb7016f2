//! GPT-2 with its forward and its backward pass, by hand. Norms come before attention and perceptrons; the head's
//! weights are the embedding's. `train.rs` trains it.

use crate::{
    attention::{Attention, Saved},
    kernels::{Heads, Number},
};
use gpu_pool::{AsViewMut, Device, DeviceBuffer, DeviceView, DeviceViewMut, Error, Matrix, Result};
use gpu_pool_train::{Activation, BiasedActivation, prelude::*};

#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Words of the vocabulary.
    pub words: usize,
    /// Words of a sequence.
    pub context: usize,
    pub width: usize,
    pub heads: usize,
    pub layers: usize,
    /// Rows of a block of attention; a part of the context.
    pub block: usize,
}

/// GPT-2 small, 124 million parameters. Its 50257 words are padded to a multiple of 64, as is usual.
pub const GPT2: Shape = Shape { words: 50_304, context: 1024, width: 768, heads: 12, layers: 12, block: 256 };

/// Bytes of ASCII, for software GPUs.
pub const SMALL: Shape = Shape { words: 128, context: 32, width: 32, heads: 2, layers: 2, block: 16 };

/// The numbers of the parameters. First the rows of words and of places; then those of each layer; then the last norm.
const WORDS: usize = 0;
const PLACES: usize = 1;
const FIRST: usize = 2;
/// Of a layer. A norm is its factors and its biases, one after the other. A weight has a row for each output; behind it
/// comes its bias.
const NORM_1: usize = 0;
const QKV: usize = 1;
const QKV_BIAS: usize = 2;
const OUT: usize = 3;
const NORM_2: usize = 5;
const UP: usize = 6;
const UP_BIAS: usize = 7;
const DOWN: usize = 8;
const OF_LAYER: usize = 10;

const EPS: f64 = 1e-5;

impl Shape {
    fn last_norm(&self) -> usize {
        FIRST + OF_LAYER * self.layers
    }

    /// The number of elements of each parameter, in the order of the forward pass.
    pub fn sizes(&self) -> Vec<usize> {
        let d = self.width;
        let layer = [2 * d, 3 * d * d, 3 * d, d * d, d, 2 * d, 4 * d * d, 4 * d, 4 * d * d, d];
        let mut sizes = vec![self.words * d, self.context * d];
        (0..self.layers).for_each(|_| sizes.extend(layer));
        sizes.push(2 * d);
        sizes
    }

    /// The parameters at the start: those of GPT-2, from a fixed seed.
    pub fn parameters<T: Number>(&self, dev: &Device) -> Result<Vec<DeviceBuffer<T>>> {
        let build = |(i, len): (usize, usize)| {
            let mut x = dev.zeros::<T>(len)?;
            let kind = if i >= FIRST { (i - FIRST) % OF_LAYER } else { usize::MAX };
            let deviation = match kind {
                _ if i == self.last_norm() => 0.0,
                // Each layer adds two vectors to the residual.
                OUT | DOWN => 0.02 / (2.0 * self.layers as f64).sqrt(),
                QKV | UP | usize::MAX => 0.02,
                _ => 0.0,
            };
            if deviation > 0.0 {
                dev.normal(&mut x, T::factor(0.0), T::factor(deviation), i as u64, 0)?;
            } else if i == self.last_norm() || matches!(kind, NORM_1 | NORM_2) {
                dev.fill(&mut x.slice_mut(..self.width), T::of(1.0))?;
            }
            Ok(x)
        };
        self.sizes().into_iter().enumerate().map(build).collect()
    }
}

/// Writes a gradient.
pub type Write<'a, T> = dyn Fn(&mut DeviceViewMut<'_, T>) -> Result<()> + 'a;
/// Takes the number of a gradient, and the function that writes it.
pub type Give<'a, T> = dyn FnMut(usize, &Write<'_, T>) -> Result<()> + 'a;

/// A norm's output, with the mean and the factor of each row.
struct Normed<T: Number> {
    y: DeviceBuffer<T>,
    mean: DeviceBuffer<T::Acc>,
    rstd: DeviceBuffer<T::Acc>,
}

/// The values that a layer's step back needs.
struct Layer<T: Number> {
    x: DeviceBuffer<T>,
    norm_1: Normed<T>,
    attention: Saved<T>,
    mixed: DeviceBuffer<T>,
    middle: DeviceBuffer<T>,
    norm_2: Normed<T>,
    up: DeviceBuffer<T>,
    hidden: DeviceBuffer<T>,
}

/// The passes over whole sequences of one device.
struct Passes<'a, T: Number> {
    dev: &'a Device,
    shape: Shape,
    parameters: &'a [DeviceView<'a, T>],
    rows: usize,
}

/// The loss of each word's successor, its label. The gradients are those of `scale` times the sum of the losses; they
/// come from the last parameter to the first one. `words` and `labels` are whole sequences.
pub fn pass<T: Number>(
    dev: &Device,
    shape: Shape,
    parameters: &[DeviceView<'_, T>],
    (words, labels): (&DeviceBuffer<u32>, &DeviceBuffer<u32>),
    scale: f64,
    give: &mut Give<'_, T>,
) -> Result<DeviceBuffer<T::Acc>> {
    let rows = words.len();
    let sizes = parameters.iter().map(|x| x.len());
    if rows == 0 || !rows.is_multiple_of(shape.context) || !sizes.eq(shape.sizes()) {
        return Err(Error::custom("whole sequences, and the parameters of the shape"));
    }
    Passes { dev, shape, parameters, rows }.run(words, labels, scale, give)
}

impl<T: Number> Passes<'_, T> {
    fn run(
        &self,
        words: &DeviceBuffer<u32>,
        labels: &DeviceBuffer<u32>,
        scale: f64,
        give: &mut Give<'_, T>,
    ) -> Result<DeviceBuffer<T::Acc>> {
        let Passes { dev, shape: Shape { width, layers, .. }, parameters, .. } = *self;
        let mut x = dev.embedding(&parameters[WORDS], width, words)?;
        // A sequence is one long row here, and the places are its bias.
        dev.activation_in_place(Activation::Identity.biased(&parameters[PLACES]), &mut x)?;
        let mut saved = Vec::new();
        for layer in 0..layers {
            let (y, layer) = self.forward(layer, x)?;
            saved.push(layer);
            x = y;
        }
        let last = self.shape.last_norm();
        let normed = self.norm(last, &x)?;
        let head = self.matrix(WORDS, width)?;
        let mut logits = dev.matmul(self.rows_of(&normed.y)?, head.t())?;
        let losses = dev.cross_entropy_in_place(&mut logits, labels, T::factor(scale))?;

        // Now the logits are their gradient.
        let dnormed = dev.matmul(self.rows_of(&logits)?, head)?;
        let mut dx = self.norm_backward(last, &normed, &x, &dnormed, give)?;
        for (layer, saved) in saved.into_iter().enumerate().rev() {
            dx = self.backward(layer, saved, dx, give)?;
        }
        give(PLACES, &|g| dev.column_sum_into(&dx, g))?;
        give(WORDS, &|g| {
            dev.gemm(T::factor(1.0), self.rows_of(&logits)?.t(), self.rows_of(&normed.y)?, T::factor(0.0), g)?;
            dev.embedding_backward(&dx, width, words, g)
        })?;
        Ok(losses)
    }

    fn forward(&self, layer: usize, x: DeviceBuffer<T>) -> Result<(DeviceBuffer<T>, Layer<T>)> {
        let (dev, at) = (self.dev, FIRST + OF_LAYER * layer);
        let norm_1 = self.norm(at + NORM_1, &x)?;
        let qkv = self.linear(at + QKV, &norm_1.y)?;
        let (mixed, attention) = self.attention().forward(dev, &qkv, self.parameters[at + QKV_BIAS])?;
        drop(qkv);
        let middle = self.residual(at + OUT, &mixed, &x)?;
        let norm_2 = self.norm(at + NORM_2, &middle)?;
        let up = self.linear(at + UP, &norm_2.y)?;
        let hidden = dev.activation(self.gelu(at), &up)?;
        let y = self.residual(at + DOWN, &hidden, &middle)?;
        Ok((y, Layer { x, norm_1, attention, mixed, middle, norm_2, up, hidden }))
    }

    fn backward(
        &self,
        layer: usize,
        saved: Layer<T>,
        dy: DeviceBuffer<T>,
        give: &mut Give<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (dev, at) = (self.dev, FIRST + OF_LAYER * layer);
        let mut dup = self.linear_backward(at + DOWN, &saved.hidden, &dy, give)?;
        dev.activation_backward_in_place(self.gelu(at), &mut dup, &saved.up)?;
        let dnormed = self.linear_backward(at + UP, &saved.norm_2.y, &dup, give)?;
        let mut dmiddle = self.norm_backward(at + NORM_2, &saved.norm_2, &saved.middle, &dnormed, give)?;
        dev.add_in_place(&mut dmiddle, &dy)?;
        let dmixed = self.linear_backward(at + OUT, &saved.mixed, &dmiddle, give)?;
        let dqkv = self.attention().backward(dev, &saved.attention, &dmixed)?;
        let dnormed = self.linear_backward(at + QKV, &saved.norm_1.y, &dqkv, give)?;
        let mut dx = self.norm_backward(at + NORM_1, &saved.norm_1, &saved.x, &dnormed, give)?;
        dev.add_in_place(&mut dx, &dmiddle)?;
        Ok(dx)
    }

    fn attention(&self) -> Attention {
        let Shape { context, width, heads, block, .. } = self.shape;
        Attention { heads: Heads { rows: self.rows, context, heads, head: width / heads }, block }
    }

    fn gelu(&self, at: usize) -> BiasedActivation<'_, T> {
        Activation::GeluTanh.biased(&self.parameters[at + UP_BIAS])
    }

    /// Weights, with so many columns.
    fn matrix(&self, parameter: usize, cols: usize) -> Result<Matrix<'_, T>> {
        let x = &self.parameters[parameter];
        Matrix::new(x, x.len() / cols, cols)
    }

    fn rows_of<'b>(&self, x: &'b DeviceBuffer<T>) -> Result<Matrix<'b, T>> {
        Matrix::new(x, self.rows, x.len() / self.rows)
    }

    /// A layer without its bias.
    fn linear(&self, weight: usize, x: &DeviceBuffer<T>) -> Result<DeviceBuffer<T>> {
        let cols = x.len() / self.rows;
        self.dev.matmul(self.rows_of(x)?, self.matrix(weight, cols)?.t())
    }

    /// A layer with its bias, which is the next parameter, and the residual that goes past it.
    fn residual(&self, weight: usize, x: &DeviceBuffer<T>, past: &DeviceBuffer<T>) -> Result<DeviceBuffer<T>> {
        let mut y = self.linear(weight, x)?;
        self.dev.activation_in_place(Activation::Identity.biased(&self.parameters[weight + 1]), &mut y)?;
        self.dev.add_in_place(&mut y, past)?;
        Ok(y)
    }

    /// Gives the gradients of a layer and its bias; returns that of its input.
    fn linear_backward(
        &self,
        weight: usize,
        x: &DeviceBuffer<T>,
        dy: &DeviceBuffer<T>,
        give: &mut Give<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (dev, rows) = (self.dev, self.rows_of(dy)?);
        give(weight + 1, &|g| dev.column_sum_into(dy, g))?;
        give(weight, &|g| dev.gemm(T::factor(1.0), rows.t(), self.rows_of(x)?, T::factor(0.0), g))?;
        dev.matmul(rows, self.matrix(weight, x.len() / self.rows)?)
    }

    fn norm(&self, parameter: usize, x: &DeviceBuffer<T>) -> Result<Normed<T>> {
        let (parameter, width) = (self.parameters[parameter], self.shape.width);
        let (gamma, beta) = (parameter.slice(..width), parameter.slice(width..));
        let (y, mean, rstd) = self.dev.layer_norm(x, &gamma, &beta, T::factor(EPS))?;
        Ok(Normed { y, mean, rstd })
    }

    /// Gives the gradient of a norm; returns that of its input.
    fn norm_backward(
        &self,
        parameter: usize,
        Normed { mean, rstd, .. }: &Normed<T>,
        x: &DeviceBuffer<T>,
        dy: &DeviceBuffer<T>,
        give: &mut Give<'_, T>,
    ) -> Result<DeviceBuffer<T>> {
        let (dev, width) = (self.dev, self.shape.width);
        give(parameter, &|g| {
            let (mut dgamma, mut dbeta) = g.view_mut().split_at_mut(width);
            dev.layer_norm_weights_backward(dy, x, mean, rstd, &mut dgamma, &mut dbeta)
        })?;
        dev.layer_norm_backward(dy, x, &self.parameters[parameter].slice(..width), mean, rstd)
    }
}
