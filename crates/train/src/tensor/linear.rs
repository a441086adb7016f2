//! Linear layers whose weights are spread over a group: by columns or by rows.
//!
//! Megatron's pair: a [`ColumnLinear`], an operation on each element, a [`RowLinear`]. It takes one all-reduce forward
//! (g, behind the second layer) and one backward (f, before the first).

mod blocks;
#[cfg(feature = "checkpoints")]
mod save;

use super::{Wide, balanced, columns, elements, fits, overlapped, part_of, put, scatter_rows};
use crate::runtime::{DeviceInternals, OpSite, Real};
use crate::{Activation, NormSaved, RowNorm, prelude::*};
use gpu_pool::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceView, Element, Group, Matrix, ReduceOp, Result, kernel::Float,
};
use std::{ops::Range, slice};

/// A device's part of a linear layer `y = x w + b`: weights, and their gradients in the same shapes. The buffers keep
/// their addresses. An optimizer changes the weights; a step back writes the gradients.
///
/// **Half types.** With `accumulate` the sums over calls are in `f32`, and the gradients are these, rounded: each call
/// is rounded once before it is added. That takes 4 bytes for each weight, from the first such call on, and a buffer in
/// each. Gradients that the program writes (zeros, say) count in place of the sums. A graph keeps the sums in `f32`
/// between launches if a call with `accumulate` came before the capture; else each launch begins with the rounded ones.
#[derive(Debug)]
pub struct LinearPart<T: Float> {
    /// `inputs x outputs`, row-major.
    pub weight: DeviceBuffer<T>,
    /// One number for each output.
    pub bias: DeviceBuffer<T>,
    /// The gradient of `weight`.
    pub weight_gradient: DeviceBuffer<T>,
    /// The gradient of `bias`.
    pub bias_gradient: DeviceBuffer<T>,
    /// The weights of blocks of rows whose exchange goes beside a product, the same on all members: `[1]` is one block,
    /// with its exchange after the product, and `[2, 1, 1]` half of the rows and two quarters. `None`: by size.
    pub blocks: Option<&'static [u16]>,
    wide: [Wide; 2],
    inputs: usize,
    outputs: usize,
}

impl<T: Float> LinearPart<T> {
    /// Inputs and outputs of this part.
    pub fn shape(&self) -> (usize, usize) {
        (self.inputs, self.outputs)
    }
}

impl<T: Float + Element> LinearPart<T> {
    fn new(dev: &Device, weight: &[T], bias: &[T], inputs: usize) -> Result<Self> {
        Ok(LinearPart {
            weight: dev.upload(weight)?,
            bias: dev.upload(bias)?,
            weight_gradient: dev.zeros(weight.len())?,
            bias_gradient: dev.zeros(bias.len())?,
            blocks: None,
            wide: Default::default(),
            inputs,
            outputs: bias.len(),
        })
    }

    /// `y = x w`, or `y = x w^T`.
    fn multiply(&self, dev: &Device, x: DeviceView<'_, T>, y: &mut impl AsViewMut<Elem = T>, back: bool) -> Result<()> {
        let w = Matrix::new(&self.weight, self.inputs, self.outputs)?;
        let (inner, w) = if back { (self.outputs, w.t()) } else { (self.inputs, w) };
        // Without terms `room` has made zeros.
        let Some(rows) = x.len().checked_div(inner) else { return Ok(()) };
        dev.gemm(T::Acc::of(1.0), Matrix::new(&x, rows, inner)?, w, T::Acc::of(0.0), &mut y.view_mut())
    }

    fn room(dev: &Device, [rows, cols, inner]: [usize; 3]) -> Result<DeviceBuffer<T>> {
        let len = elements("linear", rows, cols)?;
        if inner == 0 { dev.zeros(len) } else { dev.allocate("linear", len) }
    }

    fn product(&self, dev: &Device, x: DeviceView<'_, T>, rows: usize, back: bool) -> Result<DeviceBuffer<T>> {
        let (what, inner, cols) =
            if back { ("dy", self.outputs, self.inputs) } else { ("x", self.inputs, self.outputs) };
        fits("linear", what, x.len(), (rows, inner))?;
        let mut y = Self::room(dev, [rows, cols, inner])?;
        self.multiply(dev, x, &mut y, back)?;
        Ok(y)
    }

    fn add_bias(&self, dev: &Device, y: &mut impl AsViewMut<Elem = T>) -> Result<()> {
        let y = &mut y.view_mut();
        if y.is_empty() { Ok(()) } else { dev.activation_in_place(Activation::Identity.biased(&self.bias), y) }
    }

    fn weights_back(&mut self, dev: &Device, [x, dy]: [DeviceView<'_, T>; 2], rows: usize, add: bool) -> Result<()> {
        if self.outputs == 0 {
            return Ok(());
        }
        if !add {
            let lens = [self.weight_gradient.len(), self.bias_gradient.len()];
            self.wide.iter_mut().zip(lens).try_for_each(|(wide, len)| wide.forget::<T>(dev, len))?;
        }
        if rows > 0 {
            let (x, dy) = (Matrix::new(&x, rows, self.inputs)?, Matrix::new(&dy, rows, self.outputs)?);
            if add && Wide::is_for::<T>() {
                let mut piece = dev.allocate("linear", self.weight_gradient.len())?;
                dev.gemm(T::Acc::of(1.0), x.t(), dy, T::Acc::of(0.0), &mut piece)?;
                self.wide[0].add(dev, &piece, &mut self.weight_gradient)?;
            } else {
                let beta = T::Acc::of(f64::from(u8::from(add)));
                dev.gemm(T::Acc::of(1.0), x.t(), dy, beta, &mut self.weight_gradient)?;
            }
        } else if !add {
            // The sum over no rows: not left to a library.
            dev.fill(&mut self.weight_gradient, T::narrow(T::Acc::default()))?;
        }
        if !add {
            return dev.column_sum_into(&dy, &mut self.bias_gradient);
        }
        let mut sum = dev.zeros(self.outputs)?;
        dev.column_sum_into(&dy, &mut sum)?;
        put(dev, &sum, (&mut self.bias_gradient, &mut self.wide[1]), true)
    }
}

/// A linear layer cut by columns: `y[:, own] = x w[:, own] + b[own]`. All members have all of `x`; each gets its
/// columns of `y`. Sizes need not divide: a member may have more columns than another, or none.
///
/// Forward exchanges nothing. Backward sums `x`'s gradient over members (Megatron's f), beside those of the weights.
///
/// The page "Tensor parallel" of the guide has an example.
#[derive(Debug)]
pub struct ColumnLinear<T: Float> {
    /// The own columns.
    pub part: LinearPart<T>,
}

/// A linear layer cut by rows: `y = sum over the members of x[:, own] w[own, :]`, `+ b`. Each member has its columns of
/// `x`, as a [`ColumnLinear`] leaves them; all get all of `y`.
///
/// Forward the products are summed over the members (Megatron's g), large ones in [blocks](LinearPart::blocks). The
/// bias is added once, to the sum. Backward nothing is exchanged; all members compute the same gradient of the bias.
#[derive(Debug)]
pub struct RowLinear<T: Float> {
    /// The own rows, and all of the bias.
    pub part: LinearPart<T>,
}

impl<T: Float + Element> ColumnLinear<T> {
    /// This member's columns of `weight`, row-major, in rows as long as `bias`. All members give the same weights.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) if `weight` is not rows of that length; those of
    /// [`Device::upload`].
    #[track_caller]
    pub fn new(group: &Group<'_>, weight: &[T], bias: &[T]) -> Result<Self> {
        let _here = OpSite::here("ColumnLinear::new");
        Self::in_units(group, weight, bias, 1)
    }

    /// [`new`](Self::new) with columns in whole units, as of [`part_of`]: the heads of attention. Errors: as
    /// [`new`](Self::new); also if the columns are not whole units.
    #[track_caller]
    pub fn in_units(group: &Group<'_>, weight: &[T], bias: &[T], unit: usize) -> Result<Self> {
        let _here = OpSite::here("ColumnLinear::in_units");
        let (inputs, outputs) = whole_shape("ColumnLinear::new", weight, bias)?;
        let own = part_of(group, group.rank(), outputs, unit)?;
        let weight = columns(weight, outputs, own.clone());
        Ok(ColumnLinear { part: LinearPart::new(group.device(), &weight, &bias[own], inputs)? })
    }

    /// This member's columns of `y`, in a new buffer: `rows x own outputs`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) if `x` is not `rows x inputs`; those of
    /// [`Device::gemm`].
    #[track_caller]
    pub fn forward(&self, group: &Group<'_>, x: &impl AsView<Elem = T>, rows: usize) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("ColumnLinear::forward");
        let mut y = self.part.product(group.device(), x.view(), rows, false)?;
        self.part.add_bias(group.device(), &mut y)?;
        Ok(y)
    }

    /// [`forward`](Self::forward) with sequence parallel: `x` is this member's [part](part_of) of the rows. Returns all
    /// rows of `x`, by an all-gather beside the product of the own ones if they are large, and the columns of `y`.
    /// Errors: as [`forward`](Self::forward), and those of [`Group::all_gather_v`].
    #[track_caller]
    pub fn forward_from_rows(
        &self,
        group: &Group<'_>,
        x: &impl AsView<Elem = T>,
        rows: usize,
    ) -> Result<(DeviceBuffer<T>, DeviceBuffer<T>)> {
        let _here = OpSite::here("ColumnLinear::forward_from_rows");
        let (x, mut y) = self.part.gathered(group, x, (rows, false))?;
        self.part.add_bias(group.device(), &mut y)?;
        Ok((x, y))
    }

    /// The gradient of `x`, the same on all members, in a new buffer; and those of the own weights, which replace the
    /// last ones, or are added to them with `accumulate`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) for other shapes; those of [`Device::gemm`] and
    /// [`Group::all_reduce`].
    #[track_caller]
    pub fn backward(
        &mut self,
        group: &Group<'_>,
        x: &impl AsView<Elem = T>,
        dy: &impl AsView<Elem = T>,
        rows: usize,
        accumulate: bool,
    ) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("ColumnLinear::backward");
        let (x, dy) = (x.view(), dy.view());
        fits("linear", "x", x.len(), (rows, self.part.inputs))?;
        let mut dx = self.part.product(group.device(), dy, rows, true)?;
        overlapped(group, true, |group| group.all_reduce(&mut dx, ReduceOp::Sum))?;
        self.part.weights_back(group.device(), [x, dy], rows, accumulate)?;
        Ok(dx)
    }

    /// [`backward`](Self::backward) with sequence parallel: of the gradient of `x` each member gets its [part](part_of)
    /// of the rows, by a reduce-scatter. `x` is all rows, from
    /// [`forward_from_rows`](Self::forward_from_rows). Errors: as [`backward`](Self::backward).
    #[track_caller]
    pub fn backward_to_rows(
        &mut self,
        group: &Group<'_>,
        x: &impl AsView<Elem = T>,
        dy: &impl AsView<Elem = T>,
        rows: usize,
        accumulate: bool,
    ) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("ColumnLinear::backward_to_rows");
        let (x, dy) = (x.view(), dy.view());
        fits("linear", "x", x.len(), (rows, self.part.inputs))?;
        let dx = self.part.product(group.device(), dy, rows, true)?;
        let part = overlapped(group, true, |group| scatter_rows(group, &dx, rows, self.part.inputs))?;
        self.part.weights_back(group.device(), [x, dy], rows, accumulate)?;
        Ok(part)
    }
}

impl<T: Float + Element> RowLinear<T> {
    /// This member's rows of `weight`, which is row-major with as many columns as `bias` has elements, and all of the
    /// bias. All members give the same weights. Errors: as [`ColumnLinear::new`].
    #[track_caller]
    pub fn new(group: &Group<'_>, weight: &[T], bias: &[T]) -> Result<Self> {
        let _here = OpSite::here("RowLinear::new");
        Self::in_units(group, weight, bias, 1)
    }

    /// [`new`](Self::new) with rows in whole units, as of [`part_of`]: the units of the layer before it. Errors: as
    /// [`new`](Self::new); also if the rows are not whole units.
    #[track_caller]
    pub fn in_units(group: &Group<'_>, weight: &[T], bias: &[T], unit: usize) -> Result<Self> {
        let _here = OpSite::here("RowLinear::in_units");
        let (inputs, outputs) = whole_shape("RowLinear::new", weight, bias)?;
        let Range { start, end } = part_of(group, group.rank(), inputs, unit)?;
        let weight = &weight[start * outputs..end * outputs];
        Ok(RowLinear { part: LinearPart::new(group.device(), weight, bias, end - start)? })
    }

    /// `y`, the same on all members, in a new buffer: `rows x outputs`. `x` is this member's columns.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) if `x` is not `rows x own inputs`; those of
    /// [`Device::gemm`] and [`Group::all_reduce`].
    #[track_caller]
    pub fn forward(&self, group: &Group<'_>, x: &impl AsView<Elem = T>, rows: usize) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("RowLinear::forward");
        self.part.sums(group, (x, rows), slice::from_ref(&(0..rows)), |group, mut y, _| {
            group.all_reduce(&mut y, ReduceOp::Sum)?;
            self.part.add_bias(group.device(), &mut y)
        })
    }

    /// [`forward`](Self::forward) with the residual and the norm that follow, by one
    /// [`all_reduce_norm`](crate::ops::AllReduceNorm::all_reduce_norm). `residual`, the same on all members, becomes
    /// `residual + bias`, and then that plus the sum. Returns the norm of it in a new buffer, and the values for the
    /// norm's step back; `residual` is that norm's input, and its gradient is this layer's `dy`, too.
    ///
    /// # Errors
    /// As [`forward`](Self::forward); those of
    /// [`AllReduceNorm::all_reduce_norm`](crate::ops::AllReduceNorm::all_reduce_norm).
    #[track_caller]
    pub fn forward_norm(
        &self,
        group: &Group<'_>,
        x: &impl AsView<Elem = T>,
        rows: usize,
        residual: &mut impl AsViewMut<Elem = T>,
        norm: RowNorm<'_, T>,
    ) -> Result<(DeviceBuffer<T>, NormSaved<T>)> {
        let _here = OpSite::here("RowLinear::forward_norm");
        let (mut residual, dev) = (residual.view_mut(), group.device());
        fits("RowLinear::forward_norm", "the residual", residual.len(), (rows, self.part.outputs))?;
        let mut y = self.part.product(dev, x.view(), rows, false)?;
        self.part.add_bias(dev, &mut residual)?;
        let saved = group.all_reduce_norm(&mut y, &mut residual, norm)?;
        Ok((y, saved))
    }

    /// [`forward`](Self::forward) with sequence parallel: of `y` each member gets its [part](part_of) of the rows, by a
    /// reduce-scatter. Errors: as [`forward`](Self::forward).
    #[track_caller]
    pub fn forward_to_rows(
        &self,
        group: &Group<'_>,
        x: &impl AsView<Elem = T>,
        rows: usize,
    ) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("RowLinear::forward_to_rows");
        let (me, count, outputs) = (group.rank(), group.count(), self.part.outputs);
        let parts: Vec<_> = (0..count).map(|rank| balanced(rank, count, rows)).collect();
        let mut part = LinearPart::room(group.device(), [parts[me].len(), outputs, 1])?;
        self.part.sums(group, (x, rows), &parts, |group, y, block| {
            let counts: Vec<_> = block.iter().map(|rows| rows.len() * outputs).collect();
            let filled = (block[me].start - parts[me].start) * outputs;
            let mut part = part.slice_mut(filled..filled + counts[me]);
            group.reduce_scatter_v(&y, &mut part, &counts, ReduceOp::Sum)?;
            self.part.add_bias(group.device(), &mut part)
        })?;
        Ok(part)
    }

    /// The gradient of the own columns of `x`, in a new buffer; and those of the own weights, which replace the last
    /// ones, or are added to them with `accumulate`. `dy` is the same on all members.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](gpu_pool::Error::InvalidArgument) for other shapes; those of [`Device::gemm`].
    #[track_caller]
    pub fn backward(
        &mut self,
        group: &Group<'_>,
        x: &impl AsView<Elem = T>,
        dy: &impl AsView<Elem = T>,
        rows: usize,
        accumulate: bool,
    ) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("RowLinear::backward");
        let (x, dy) = (x.view(), dy.view());
        fits("linear", "x", x.len(), (rows, self.part.inputs))?;
        let dx = self.part.product(group.device(), dy, rows, true)?;
        self.part.weights_back(group.device(), [x, dy], rows, accumulate)?;
        Ok(dx)
    }

    /// [`backward`](Self::backward) with sequence parallel: `dy` is this member's [part](part_of) of the rows. An
    /// all-gather comes first, of large rows beside the product of the own ones. Errors: as
    /// [`backward`](Self::backward), and those of [`Group::all_gather_v`].
    #[track_caller]
    pub fn backward_from_rows(
        &mut self,
        group: &Group<'_>,
        x: &impl AsView<Elem = T>,
        dy: &impl AsView<Elem = T>,
        rows: usize,
        accumulate: bool,
    ) -> Result<DeviceBuffer<T>> {
        let _here = OpSite::here("RowLinear::backward_from_rows");
        let x = x.view();
        fits("linear", "x", x.len(), (rows, self.part.inputs))?;
        let (dy, dx) = self.part.gathered(group, dy, (rows, true))?;
        self.part.weights_back(group.device(), [x, dy.view()], rows, accumulate)?;
        Ok(dx)
    }
}

fn whole_shape<T>(op: &'static str, weight: &[T], bias: &[T]) -> Result<(usize, usize)> {
    let (inputs, outputs) = (weight.len() / bias.len().max(1), bias.len());
    fits(op, "weight", weight.len(), (inputs, outputs))?;
    Ok((inputs, outputs))
}
