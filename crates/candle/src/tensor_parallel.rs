//! Layers of which each device has a part, as candle's modules, with their backward passes. All devices call them in
//! one order, within [`enter`](crate::enter), and all have the same inputs and losses. The guide has a program.

use crate::collective::{all_gather, all_reduce, all_reduce_norm, sum_backward, sum_forward};
use crate::parts::{Part, PartBuilder};
use crate::{Error, Result};
use candle_core::{D, DType, Module, Tensor};
use candle_nn::{Init, RmsNorm};
use gpu_pool::{Device, ReduceOp};
use std::ops::Range;

/// A linear layer whose outputs are divided: each device has rows of the weight, and gets columns of the result.
/// [`RowParallel`] takes them as its input.
#[derive(Clone, Debug)]
pub struct ColumnParallel {
    weight: Tensor,
    bias: Option<Tensor>,
    gathers: bool,
}

impl ColumnParallel {
    /// A layer of this device's rows of the weight, and elements of the bias.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        ColumnParallel { weight, bias, gathers: false }
    }

    /// The layer with `inputs` and `outputs`, whose outputs are divided in units of the third number (heads, for
    /// example). It reads `weight`, and `bias` if there is one.
    ///
    /// # Errors
    /// Candle's, for weights that are missing or have another shape.
    pub fn load(
        dev: &Device,
        (inputs, outputs, unit): (usize, usize, usize),
        bias: bool,
        weights: &PartBuilder,
    ) -> Result<Self> {
        let part = Part::of(dev, 0, outputs, unit);
        let own = len_of(&part);
        let weight = weights.get_with_hints((own, inputs), "weight", part.clone().init(first_value(inputs)))?;
        let bias = bias.then(|| weights.get_with_hints(own, "bias", part)).transpose()?;
        Ok(ColumnParallel::new(weight, bias))
    }

    /// Layers with the same input as one, which is one product: this device's columns of the first layer, then those of
    /// the second, and so on. Their weights are copied.
    ///
    /// # Errors
    /// Candle's, for layers whose inputs differ, or of which only some have a bias.
    pub fn merged(layers: &[ColumnParallel]) -> Result<Self> {
        let weights: Vec<&Tensor> = layers.iter().map(|layer| &layer.weight).collect();
        let biases: Vec<&Tensor> = layers.iter().filter_map(|layer| layer.bias.as_ref()).collect();
        let bias = if biases.is_empty() { None } else { Some(Tensor::cat(&biases, 0)?) };
        Ok(ColumnParallel::new(Tensor::cat(&weights, 0)?, bias))
    }

    /// The layer, whose result has all columns on each device.
    #[must_use]
    pub fn gathered(self) -> Self {
        ColumnParallel { gathers: true, ..self }
    }
}

impl Module for ColumnParallel {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let own = linear(&sum_backward(x)?, &self.weight, self.bias.as_ref())?;
        if self.gathers { Ok(all_gather(&own, own.rank() - 1)?) } else { Ok(own) }
    }
}

/// A linear layer whose inputs are divided: each device has columns of the weight and of the input, and gets the whole
/// result, which is the sum of all devices' products. See [`ColumnParallel`].
#[derive(Clone, Debug)]
pub struct RowParallel {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl RowParallel {
    /// A layer of this device's columns of the weight, and the whole bias.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        RowParallel { weight, bias }
    }

    /// The layer with `inputs`, divided in units of the third number, and `outputs`. Reads `weight`, and `bias` if any.
    ///
    /// # Errors
    /// Candle's, for weights that are missing or have another shape.
    pub fn load(
        dev: &Device,
        (inputs, outputs, unit): (usize, usize, usize),
        bias: bool,
        weights: &PartBuilder,
    ) -> Result<Self> {
        let part = Part::of(dev, 1, inputs, unit).init(first_value(inputs));
        let weight = weights.get_with_hints((outputs, len_of(&part)), "weight", part)?;
        let bias = bias.then(|| weights.get(outputs, "bias")).transpose()?;
        Ok(RowParallel::new(weight, bias))
    }

    /// The layer, the addition of its result to `residual` in place, and the norm of that: [`all_reduce_norm`]. For
    /// inference. Errors: as [`all_reduce_norm`].
    pub fn forward_norm(&self, x: &Tensor, residual: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
        if let Some(bias) = &self.bias {
            residual.slice_set(&residual.broadcast_add(bias)?, 0, 0)?;
        }
        all_reduce_norm(&linear(x, &self.weight, None)?, residual, norm)
    }
}

impl Module for RowParallel {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let whole = sum_forward(&linear(x, &self.weight, None)?)?;
        self.bias.as_ref().map_or(Ok(whole.clone()), |bias| whole.broadcast_add(bias))
    }
}

/// An embedding whose vocabulary is divided: each device has the vectors of some words. The result is whole.
#[derive(Clone, Debug)]
pub struct VocabularyEmbedding {
    table: Tensor,
    own: Range<usize>,
}

impl VocabularyEmbedding {
    /// The embedding of `words` words, with vectors of `width`. It reads `weight`.
    ///
    /// # Errors
    /// Candle's, for a weight that is missing or has another shape.
    pub fn load(dev: &Device, words: usize, width: usize, weights: &PartBuilder) -> Result<Self> {
        let part = Part::of(dev, 0, words, 1).init(Init::Randn { mean: 0.0, stdev: 1.0 });
        let own = part.cut.clone().expect("a part of the words").1;
        let table = weights.get_with_hints((own.len(), width), "weight", part)?;
        Ok(VocabularyEmbedding { table, own })
    }

    /// The words of this device.
    pub fn words(&self) -> Range<usize> {
        self.own.clone()
    }

    /// This device's vectors of words that the host knows, and zeros for words of other devices: all devices' sum is
    /// the result of the layer. For inference.
    ///
    /// # Errors
    /// Candle's.
    pub fn partial(&self, words: &[u32]) -> Result<Tensor> {
        if self.own.is_empty() {
            return Ok(Tensor::zeros((words.len(), self.table.dim(1)?), self.table.dtype(), self.table.device())?);
        }
        // candle's index for a row of zeros.
        let local = |&word: &u32| match self.own.contains(&(word as usize)) {
            true => word - self.own.start as u32,
            false => u32::MAX,
        };
        let index = Tensor::from_iter(words.iter().map(local), self.table.device())?;
        Ok(self.table.index_select(&index, 0)?)
    }

    /// This device's vectors.
    pub fn table(&self) -> &Tensor {
        &self.table
    }
}

impl Module for VocabularyEmbedding {
    /// The vectors of words of any shape, of type u32.
    fn forward(&self, words: &Tensor) -> candle_core::Result<Tensor> {
        let (index, here) = local(words, &self.own)?;
        let (shape, width) = ([words.dims(), &[self.table.dim(1)?]].concat(), self.table.dim(1)?);
        let vectors = if self.own.is_empty() {
            // Zeros. The backward pass goes through them, as on all devices.
            self.table.sum_keepdim(0)?.broadcast_as((words.elem_count(), width))?.reshape(shape)?
        } else {
            let found = self.table.index_select(&index.flatten_all()?, 0)?.reshape(((), width))?;
            let here = here.flatten_all()?.to_dtype(self.table.dtype())?.unsqueeze(1)?;
            found.broadcast_mul(&here)?.reshape(shape)?
        };
        Ok(sum_forward(&vectors)?)
    }
}

/// The mean cross-entropy of rows of logits of which each device has the columns `own`, and of whole targets (u32). No
/// device gets all logits. The result is the same on all devices; the gradient is that of the own columns.
///
/// # Errors
/// [`Error::Invalid`] if the columns are not those of `own`; those of the collectives and of candle.
pub fn vocabulary_cross_entropy(logits: &Tensor, own: &Range<usize>, targets: &Tensor) -> Result<Tensor> {
    let (rows, columns) = logits.dims2()?;
    invalid_if!(columns != own.len(), "vocabulary_cross_entropy", "{columns} columns for {own:?}");
    let logits = logits.to_dtype(DType::F32)?;
    let none = Tensor::full(f32::NEG_INFINITY, (rows, 1), logits.device())?;
    let largest = if own.is_empty() { none } else { logits.detach().max_keepdim(D::Minus1)? };
    let largest = all_reduce(&largest, ReduceOp::Max)?;
    let exponents = logits.broadcast_sub(&largest)?.exp()?.sum_keepdim(D::Minus1)?;
    let target = if own.is_empty() {
        logits.sum_keepdim(D::Minus1)? // zeros; the backward pass goes through them, as on all devices
    } else {
        let (index, here) = local(targets, own)?;
        (logits.gather(&index.unsqueeze(1)?, 1)? * here.to_dtype(DType::F32)?.unsqueeze(1)?)?
    };
    let all = sum_forward(&Tensor::cat(&[exponents, target], 1)?)?;
    Ok(((all.narrow(1, 0, 1)?.log()? + largest)? - all.narrow(1, 1, 1)?)?.mean_all()?)
}

/// Indices in this device's range, 0 where a word is elsewhere; and whether it is here.
fn local(words: &Tensor, own: &Range<usize>) -> candle_core::Result<(Tensor, Tensor)> {
    let words = words.to_dtype(DType::I64)?;
    let (start, end) = (own.start as i64, own.end as i64);
    let here = (words.ge(start)? * words.lt(end)?)?;
    let index = (words.broadcast_sub(&Tensor::new(start, words.device())?)? * here.to_dtype(DType::I64)?)?;
    Ok((index.to_dtype(DType::U32)?.contiguous()?, here))
}

fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> candle_core::Result<Tensor> {
    candle_nn::Linear::new(weight.clone(), bias.cloned()).forward(x)
}

/// candle's for linear layers (Kaiming). It goes by the inputs of the whole layer, not by those of a part.
fn first_value(inputs: usize) -> Init {
    Init::Randn { mean: 0.0, stdev: (2.0 / inputs as f64).sqrt() }
}

fn len_of(part: &Part) -> usize {
    part.cut.as_ref().map_or(0, |(_, own, _)| own.len())
}
