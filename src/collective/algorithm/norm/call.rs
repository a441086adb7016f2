//! An all-reduce, the sum with a residual, and a norm of the rows, in one call: one kernel ([`norm`](super)) where
//! kernels meet on the devices, else the collective and what the caller gives for the rest. Invariant: the bits are
//! those of the three calls, which do not depend on the number of rows.

use super::{NormCall, NormKernel, NormMemory, Rows, threads_of_row};
use crate::{
    Device, DeviceBuffer, Element, Group,
    collective::{Part, Request, ops::sum},
    driver::RawFunction,
    error::{Error, Result, op_site::OpSite},
    fabric::{Area, Call, DType, ThenNorm},
    kernel::{builtin::Float, real::Real},
    memory::{Access, AsView, AsViewMut, DeviceCopy, DeviceView, DeviceViewMut},
    ops::{rows_of, same_len},
};
use std::sync::Arc;

/// A norm of rows with its weights, for `all_reduce_norm`. The rows are as long as the weights.
#[derive(Clone, Copy)]
pub struct RowNorm<'a, T: Float> {
    #[doc(hidden)]
    pub gamma: DeviceView<'a, T>,
    /// None for an RMS norm.
    #[doc(hidden)]
    pub beta: Option<DeviceView<'a, T>>,
    #[doc(hidden)]
    pub eps: T::Acc,
}

impl<'a, T: Float> RowNorm<'a, T> {
    /// The norm of `rms_norm`.
    pub fn rms(gamma: &'a impl AsView<Elem = T>, eps: T::Acc) -> Self {
        RowNorm { gamma: gamma.view(), beta: None, eps }
    }

    /// The norm of `layer_norm`.
    pub fn layer(gamma: &'a impl AsView<Elem = T>, beta: &'a impl AsView<Elem = T>, eps: T::Acc) -> Self {
        RowNorm { gamma: gamma.view(), beta: Some(beta.view()), eps }
    }

    fn told(&self) -> ThenNorm {
        ThenNorm::new(self.gamma.len(), self.beta.is_some(), self.eps.to_f64() as f32)
    }
}

impl<T: Float + Element> RowNorm<'_, T> {
    fn rows(&self, rows: usize) -> Rows {
        let (cols, eps) = (self.gamma.len(), self.eps.to_f64() as f32);
        let threads = threads_of_row(size_of::<T>(), cols);
        Rows { dtype: T::DTYPE, rows, cols, threads, eps, layer: self.beta.is_some() }
    }
}

impl Group<'_> {
    /// The kernel that carries out an `all_reduce_norm` of such rows, if one does.
    pub(crate) fn norm_kernel(&self, dtype: DType, rows: usize, cols: usize) -> Option<NormKernel> {
        let threads = threads_of_row(dtype.size(), cols);
        self.norm_plan(Rows { dtype, rows, cols, threads, eps: 0.0, layer: false })
    }
}

debug_as!(RowNorm<'_, T> [T: Float], |self|
    cols = self.gamma.len(), layer = self.beta.is_some(), eps = self.eps);

/// The values of each row for a step back through a norm: its mean (for a layer norm), and one over its deviation.
pub struct NormSaved<T: Float> {
    /// The means; none of an RMS norm.
    pub mean: Option<DeviceBuffer<T::Acc>>,
    /// `1 / sqrt(variance + eps)`; of an RMS norm `1 / sqrt(mean of x^2 + eps)`.
    pub rstd: DeviceBuffer<T::Acc>,
}

debug_as!(NormSaved<T> [T: Float], |self| mean = self.mean, rstd = self.rstd);

impl<T: Float> NormSaved<T> {
    #[track_caller]
    fn empty(dev: &Device, op: &'static str, rows: usize, has_mean: bool) -> Result<Self> {
        let mean = has_mean.then(|| dev.allocate(op, rows)).transpose()?;
        Ok(NormSaved { mean, rstd: dev.allocate(op, rows)? })
    }
}

/// `residual` becomes `residual + sum`, and `y` the norm of that. In place without a source. `apart` does it where no
/// kernel does it all: `y` is the sum then.
#[track_caller]
pub fn sum_and_norm<T: Float + Element>(
    op: &'static str,
    group: &Group<'_>,
    source: Option<DeviceView<'_, T>>,
    residual: DeviceViewMut<'_, T>,
    mut y: DeviceViewMut<'_, T>,
    norm: &RowNorm<'_, T>,
    apart: impl FnOnce(DeviceViewMut<'_, T>, DeviceViewMut<'_, T>, &mut NormSaved<T>) -> Result<()>,
) -> Result<NormSaved<T>> {
    let dev = group.device();
    let _here = OpSite::here(op);
    let cols = norm.gamma.len();
    let rows = rows_of(op, y.len(), cols)?;
    check_eps(op, norm.eps)?;
    same_len(op, y.len(), residual.len())?;
    same_len(op, cols, norm.beta.map_or(cols, |beta| beta.len()))?;
    // Before the others count on this member.
    let mut saved = NormSaved::empty(dev, op, rows, norm.beta.is_some())?;
    let call = Call::new(op).elements(T::DTYPE, y.len()).norm(norm.told());
    let kernel = group.norm_in_one(norm.rows(rows))?;
    match kernel {
        Some(kernel) => in_one(group, call, kernel, (source, residual, y), norm, &mut saved)?,
        None => {
            group.run(sum(call, source, y.view_mut()))?;
            apart(residual, y, &mut saved)?;
        }
    }
    Ok(saved)
}

type Buffers<'a, T> = (Option<DeviceView<'a, T>>, DeviceViewMut<'a, T>, DeviceViewMut<'a, T>);

/// By one kernel. It moves 16 bytes at once: buffers that begin elsewhere are copied on this device.
#[track_caller]
fn in_one<T: Float + Element>(
    group: &Group<'_>,
    call: Call,
    (kernel, function): (NormKernel, RawFunction),
    (source, mut residual, mut y): Buffers<'_, T>,
    norm: &RowNorm<'_, T>,
    saved: &mut NormSaved<T>,
) -> Result<()> {
    let (dev, op) = (group.device(), call.op);
    let copy = |x: DeviceView<'_, T>| -> Result<Option<DeviceBuffer<T>>> {
        if x.address().is_multiple_of(16) {
            return Ok(None);
        }
        let mut aligned = dev.allocate(op, x.len())?;
        dev.copy(&x, &mut aligned)?;
        Ok(Some(aligned))
    };
    // In place `y` holds the partial sums.
    let source_copy = source.map_or(Ok(None), copy)?;
    let (gamma_copy, beta_copy) = (copy(norm.gamma)?, norm.beta.map_or(Ok(None), copy)?);
    let (mut residual_copy, mut y_copy) = (copy(residual.view())?, copy(y.view())?);
    let source = source_copy.as_ref().map(|copy| copy.view()).or(source);
    let gamma = gamma_copy.as_ref().map_or(norm.gamma, |copy| copy.view());
    let beta = beta_copy.as_ref().map(|copy| copy.view()).or(norm.beta);
    {
        let residual = residual_copy.as_mut().map_or_else(|| residual.view_mut(), |copy| copy.view_mut());
        let y = y_copy.as_mut().map_or_else(|| y.view_mut(), |copy| copy.view_mut());
        let mut operands = Vec::with_capacity(5);
        let memory = NormMemory {
            residual: touched(&mut operands, residual.view(), Access::Write),
            gamma: touched(&mut operands, gamma, Access::Read),
            beta: beta.map_or(Part::NONE, |beta| touched(&mut operands, beta, Access::Read)),
            mean: saved.mean.as_ref().map_or(Part::NONE, |mean| touched(&mut operands, mean.view(), Access::Write)),
            rstd: touched(&mut operands, saved.rstd.view(), Access::Write),
        };
        let by = NormCall { kernel, function, memory };
        let mut request = Request { extra: operands, ..sum(call, source, y) };
        request.own = group.across().map(|_| Arc::new(by.own(&request)));
        group.run_by(request, Some(&by))?;
    }
    residual_copy.map_or(Ok(()), |copy| dev.copy(&copy, &mut residual))?;
    y_copy.map_or(Ok(()), |copy| dev.copy(&copy, &mut y))
}

fn touched<T: DeviceCopy>(operands: &mut Vec<(Area, Access)>, x: DeviceView<'_, T>, access: Access) -> Part {
    let area = Area { block: x.block.clone(), address: x.address(), bytes: x.bytes() };
    let part = Part { address: area.address, bytes: area.bytes.len() };
    operands.push((area, access));
    part
}

/// `Err` unless the variance stays a number that is not negative.
#[track_caller]
pub fn check_eps<A: Real>(op: &'static str, eps: A) -> Result<()> {
    match eps.to_f64() {
        x if x >= 0.0 && x.is_finite() => Ok(()),
        x => Err(Error::invalid(op, format_args!("an eps of {x}: a finite number from 0 on is possible"))),
    }
}
