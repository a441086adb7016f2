//! `all_reduce_norm`: an all-reduce, the sum with a residual, and a norm of the rows, in one call. It is what stands
//! between two layers of a transformer whose weights lie on several devices.
//!
//! Users call it on [`Device`] and [`Group`]. It uses the collectives below, the addition of
//! [`pointwise`](super::super::super::pointwise) and the kernels of the norms.
//!
//! Where kernels meet on the devices it is one kernel ([`norm`](crate::collective::algorithm::norm)), else
//! the three calls. Invariant: the bits are those of the three calls, which do not depend on the number of rows.

use super::{
    super::{row_dims, threads_of_row},
    check_eps, kernels,
};
use crate::{
    Device, DeviceBuffer, Element, Group,
    collective::{
        algorithm::norm::{NormCall, NormKernel, NormMemory, Rows},
        collectives,
        kernels::Part,
    },
    error::Result,
    fabric::{
        call::{Call, ThenNorm},
        descriptor::Area,
        types::DType,
    },
    kernel::{builtin::Float, real::Real},
    memory::{AsView, AsViewMut, DeviceCopy, DeviceView, DeviceViewMut, hazard::Access},
    ops::{family::rows_of, same_len},
};
use std::panic::Location;

/// A norm of rows with its weights, for [`Device::all_reduce_norm`]. The rows are as long as the weights.
#[derive(Clone, Copy)]
pub struct RowNorm<'a, T: Float> {
    gamma: DeviceView<'a, T>,
    /// None for an RMS norm.
    beta: Option<DeviceView<'a, T>>,
    eps: T::Acc,
}

impl<'a, T: Float> RowNorm<'a, T> {
    /// The norm of [`Device::rms_norm`].
    pub fn rms<G: AsView<Elem = T> + ?Sized>(gamma: &'a G, eps: T::Acc) -> Self {
        RowNorm { gamma: gamma.view(), beta: None, eps }
    }

    /// The norm of [`Device::layer_norm`].
    pub fn layer<G, B>(gamma: &'a G, beta: &'a B, eps: T::Acc) -> Self
    where
        G: AsView<Elem = T> + ?Sized,
        B: AsView<Elem = T> + ?Sized,
    {
        RowNorm { gamma: gamma.view(), beta: Some(beta.view()), eps }
    }

    /// What the members compare.
    fn told(&self) -> ThenNorm {
        ThenNorm::new(self.gamma.len(), self.beta.is_some(), self.eps.to_f64() as f32)
    }
}

impl<T: Float + Element> RowNorm<'_, T> {
    /// So many rows, for one kernel.
    fn rows(&self, rows: usize) -> Rows {
        let (cols, eps) = (self.gamma.len(), self.eps.to_f64() as f32);
        Rows {
            dtype: T::DTYPE,
            rows,
            cols,
            threads: threads_of_row(size_of::<T>(), cols),
            eps,
            layer: self.beta.is_some(),
        }
    }
}

impl Group<'_> {
    /// The kernel that carries out an `all_reduce_norm` of such rows, if one does.
    pub(crate) fn norm_kernel(&self, dtype: DType, rows: usize, cols: usize) -> Option<NormKernel> {
        let threads = threads_of_row(dtype.size(), cols);
        self.norm_plan(Rows { dtype, rows, cols, threads, eps: 0.0, layer: false })
    }
}

impl<T: Float> std::fmt::Debug for RowNorm<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.told().fmt(f)
    }
}

/// What a step back through a norm needs of each row: its mean (for a layer norm), and one over its deviation.
pub struct NormSaved<T: Float> {
    /// The means; none of an RMS norm.
    pub mean: Option<DeviceBuffer<T::Acc>>,
    /// `1 / sqrt(variance + eps)`; of an RMS norm `1 / sqrt(mean of x^2 + eps)`.
    pub rstd: DeviceBuffer<T::Acc>,
}

impl<T: Float> NormSaved<T> {
    /// Of so many rows, not written yet.
    #[track_caller]
    fn empty(dev: &Device, op: &'static str, rows: usize, has_mean: bool) -> Result<Self> {
        let mean = has_mean.then(|| dev.allocate(op, rows)).transpose()?;
        Ok(NormSaved { mean, rstd: dev.allocate(op, rows)? })
    }
}

collectives! {
    /// A collective with the work that follows it.
    errors " Those of all collectives. [`Error::InvalidArgument`](crate::Error::InvalidArgument) for lengths that do \
        not fit and an `eps` that is negative or not finite, `Mismatch` also for norms of different kinds, row \
        lengths or `eps`.";

    /// An all-reduce, the addition of a residual, and a norm of the rows, in one call: what follows a layer whose
    /// partial sums lie on all members (`parallel::RowLinear`). `residual` becomes
    /// `residual + sum`, and `x` the norm of that. Rows are as long as the norm's weights, and are as many as `x` has.
    /// Returns what the step back needs: then `residual` is the norm's input.
    ///
    /// The bits are those of [`all_reduce`](Self::all_reduce) (with [`ReduceOp::Sum`](crate::ReduceOp::Sum)),
    /// [`Device::add_assign`](crate::Device::add_assign), and [`Device::rms_norm`](crate::Device::rms_norm) or
    /// [`Device::layer_norm`](crate::Device::layer_norm), one after the other: the sum and the residual are rounded to
    /// the element's type each. The sum is in the order of ranks whatever its size, as with
    /// [`ReduceOrder::Rank`](crate::ReduceOrder). So the bits depend on a row's elements alone, not on the number of
    /// rows nor on the row's place. Members with the same residual and weights hold the same bits; each member's
    /// residual and weights are its own.
    ///
    /// Between GPUs with peer access one kernel does it all, for `f32`, `f16` and `bf16`, and rows of whole 16 bytes
    /// and at most 16384 elements; elsewhere it is the three calls. Few rows go by peers' inboxes
    /// ([`Algorithm::Inbox`](crate::Algorithm::Inbox)), many are read where they are
    /// ([`Algorithm::Direct`](crate::Algorithm::Direct)); either can be asked for. `Group::explain_norm` says which.
    ///
    /// Asynchronous on the current stream; can be captured.
    example {
        /// ```
        /// # use gpu_pool::{GpuPool, RowNorm};
        /// let pool = GpuPool::builder().host(2).build()?;
        /// let found = pool.run(|dev, _| {
        ///     let weight = dev.upload(&[1.0f32, 10.0])?;
        ///     let mut residual = dev.upload(&[0.0f32, 0.0, 1.0, 5.0])?; // 2 rows of 2
        ///     let mut x = dev.upload(&[1.0f32, -1.0, 1.5, -3.5])?; // this member's partial sums
        ///     let saved = dev.all_reduce_norm(&mut x, &mut residual, RowNorm::rms(&weight, 0.0))?;
        ///     assert_eq!(dev.download(&residual)?, [2.0, -2.0, 4.0, -2.0]);
        ///     assert_eq!(dev.download(&saved.rstd)?[0], 0.5);
        ///     dev.download(&x.slice(..2))
        /// })?;
        /// assert_eq!(found, [[1.0, -10.0], [1.0, -10.0]]);
        /// # Ok::<(), gpu_pool::Error>(())
        /// ```
    }
    fn all_reduce_norm<X, R>(
        &self, x: &mut X, residual: &mut R, norm: RowNorm<'_, X::Elem>,
    ) -> Result<NormSaved<X::Elem>>
    where [
        X: AsViewMut + ?Sized, R: AsViewMut<Elem = X::Elem> + ?Sized, X::Elem: Float + Element
    ]
    {
        let (x, residual) = (x.view_mut(), residual.view_mut());
        sum_and_norm("all_reduce_norm", self, None, residual, x, &norm)
    }

    /// [`all_reduce_norm`](Self::all_reduce_norm) out of place, with the same bits: `src` stays as it is, and `dst`
    /// becomes the norm.
    fn all_reduce_norm_into<S, R, D>(
        &self, src: &S, residual: &mut R, norm: RowNorm<'_, S::Elem>, dst: &mut D,
    ) -> Result<NormSaved<S::Elem>>
    where [
        S: AsView + ?Sized, R: AsViewMut<Elem = S::Elem> + ?Sized, D: AsViewMut<Elem = S::Elem> + ?Sized,
        S::Elem: Float + Element
    ]
    {
        let (src, residual, dst) = (src.view(), residual.view_mut(), dst.view_mut());
        same_len("all_reduce_norm_into", src.len(), dst.len())?;
        sum_and_norm("all_reduce_norm_into", self, Some(src), residual, dst, &norm)
    }
}

/// `y` becomes the norm of `residual`, after the sum was added to that. In place without a source.
#[track_caller]
fn sum_and_norm<T: Float + Element>(
    op: &'static str,
    group: &Group<'_>,
    source: Option<DeviceView<'_, T>>,
    mut residual: DeviceViewMut<'_, T>,
    mut y: DeviceViewMut<'_, T>,
    norm: &RowNorm<'_, T>,
) -> Result<NormSaved<T>> {
    let dev = group.device();
    let _here = dev.worker.handle.enter(op, Location::caller());
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
            group.sum_for(call, source, y.view_mut())?;
            dev.add_assign(&mut residual, &y)?;
            launch(dev, residual.view(), norm, y, &mut saved)?;
        }
    }
    Ok(saved)
}

/// Source, residual and `y`.
type Buffers<'a, T> = (Option<DeviceView<'a, T>>, DeviceViewMut<'a, T>, DeviceViewMut<'a, T>);

/// By one kernel. It moves 16 bytes at once: buffers that begin elsewhere are copied on this device.
#[track_caller]
fn in_one<T: Float + Element>(
    group: &Group<'_>,
    call: Call,
    kernel: NormKernel,
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
        let mut beside = Vec::with_capacity(5);
        let memory = NormMemory {
            residual: touched(&mut beside, residual.view(), Access::Write),
            gamma: touched(&mut beside, gamma, Access::Read),
            beta: beta.map_or(Part::NONE, |beta| touched(&mut beside, beta, Access::Read)),
            mean: saved.mean.as_ref().map_or(Part::NONE, |mean| touched(&mut beside, mean.view(), Access::Write)),
            rstd: touched(&mut beside, saved.rstd.view(), Access::Write),
        };
        group.sum_by(call, source, y, beside, &NormCall { kernel, memory })?;
    }
    residual_copy.map_or(Ok(()), |copy| dev.copy(&copy, &mut residual))?;
    y_copy.map_or(Ok(()), |copy| dev.copy(&copy, &mut y))
}

/// Notes what the kernel touches.
fn touched<T: DeviceCopy>(beside: &mut Vec<(Area, Access)>, x: DeviceView<'_, T>, access: Access) -> Part {
    let area = Area { block: x.block.clone(), address: x.address(), bytes: x.bytes() };
    let part = Part { address: area.address, bytes: area.bytes.len() };
    beside.push((area, access));
    part
}

/// The norm of rows in a kernel of its own.
#[track_caller]
fn launch<T: Float>(
    dev: &Device,
    x: DeviceView<'_, T>,
    norm: &RowNorm<'_, T>,
    y: DeviceViewMut<'_, T>,
    NormSaved { mean, rstd }: &mut NormSaved<T>,
) -> Result<()> {
    let &RowNorm { gamma, beta, eps } = norm;
    let (rows, cols) = (rstd.len(), gamma.len());
    let dims = row_dims::<T>(rows, cols);
    let shape = (rows as u64, cols as u32);
    match (beta, mean) {
        (Some(beta), Some(mean)) => {
            let args = (x, gamma, beta, y, mean, rstd, shape.0, shape.1, eps);
            // SAFETY: `x` and `y` have `rows` rows of `cols` elements, mean and rstd one for each, the others `cols`.
            unsafe { dev.launch(&kernels::layer_norm::<T>(), dims, args) }
        }
        _ => {
            let args = (x, gamma, y, rstd, shape.0, shape.1, eps);
            // SAFETY: `x` and `y` have `rows` rows of `cols` elements, rstd one for each row, gamma `cols`.
            unsafe { dev.launch(&kernels::rms_norm::<T>(), dims, args) }
        }
    }
}
