//! Collectives on candle's tensors, with their backward passes. All devices of the scope call them, within
//! [`enter`](crate::enter), in one order. [`tensor_parallel`] is made of them.
//!
//! [`tensor_parallel`]: crate::tensor_parallel

use crate::device::with_token;
use crate::memory::{Number, dispatch, part};
use crate::{Error, Result};
use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor, backend::BackendStorage as _};
#[cfg(feature = "cuda")]
use candle_core::{CudaStorage, DType};
use candle_nn::{Module as _, RmsNorm};
use gpu_pool::{Device, DeviceBuffer, ReduceOp};

/// The sum, maximum, .. of all devices' tensors, on each of them. It has no backward pass: see [`sum_forward`] and
/// [`sum_backward`].
///
/// # Errors
/// [`NoDevice`](crate::Error::NoDevice) outside of [`enter`](crate::enter); [`DType`](crate::Error::DType); those of
/// [`Device::all_reduce`] and of candle.
pub fn all_reduce(x: &Tensor, op: ReduceOp) -> Result<Tensor> {
    run(x, Step::Reduce(op))
}

/// The tensor of the device with this rank, on each of them. It has no backward pass. Errors: as [`all_reduce`].
pub fn broadcast(x: &Tensor, root: usize) -> Result<Tensor> {
    run(x, Step::Broadcast(root))
}

/// All devices' parts of a dimension in a row, on each of them; they need not have one size. Backward, each device gets
/// its own part of the gradient: it is right if all devices do the same with the result. Errors: as [`all_reduce`];
/// [`Candle`](crate::Error::Candle) if there is no such dimension.
pub fn all_gather(x: &Tensor, dim: usize) -> Result<Tensor> {
    // Parts lie in a row in memory only along the first dimension.
    let first = x.transpose(0, dim)?.contiguous()?;
    let rows = with_token("all_gather", |dev| Ok(dev.exchange(first.dim(0)?)?))?;
    let gathered = run_tracked(&first, Step::Gather(rows))?;
    Ok(gathered.transpose(0, dim)?.contiguous()?)
}

/// Forward the sum of all devices' tensors, backward the identity: behind parts of a sum. (Megatron's `g`.) Errors: as
/// [`all_reduce`].
pub fn sum_forward(x: &Tensor) -> Result<Tensor> {
    run_tracked(x, Step::Reduce(ReduceOp::Sum))
}

/// Forward the identity, backward the sum of all devices' gradients: before layers of which each device has a part.
/// (Megatron's `f`.) Errors: as [`all_reduce`], in the backward pass.
pub fn sum_backward(x: &Tensor) -> Result<Tensor> {
    // A tensor without a gradient needs no copy.
    if x.track_op() { run_tracked(x, Step::SumGradient) } else { Ok(x.clone()) }
}

/// The sum of all devices' `x`, added to `residual` in place, and the norm of the rows of that, which is the result. It
/// is what stands between two layers of a transformer: on GPUs with peer access it is one kernel. It has no backward
/// pass, and is for inference.
///
/// `residual` is the same on all devices. Tensors that share its memory change with it.
///
/// # Errors
/// [`Invalid`](crate::Error::Invalid) for a residual of another shape or type than `x`, one that is not contiguous, or
/// one that is tracked for a backward pass; else as [`all_reduce`].
pub fn all_reduce_norm(x: &Tensor, residual: &Tensor, norm: &RmsNorm) -> Result<Tensor> {
    const OP: &str = "all_reduce_norm";
    let alike = (x.shape(), x.dtype()) == (residual.shape(), residual.dtype());
    invalid_if!(!alike, OP, "{:?} of {:?} and a residual of {:?}", x.shape(), x.dtype(), residual.shape());
    let usable = residual.is_contiguous() && !residual.track_op();
    invalid_if!(!usable, OP, "the residual changes in place: it must be contiguous, and must not be tracked");
    #[cfg(feature = "cuda")]
    if let candle_core::Device::Cuda(device) = x.device() {
        let x = &x.contiguous()?;
        match x.dtype() {
            DType::F32 => return on_gpu::sum_and_norm::<f32>(OP, device, x, residual, norm),
            DType::F16 => return on_gpu::sum_and_norm::<gpu_pool::half::f16>(OP, device, x, residual, norm),
            DType::BF16 => return on_gpu::sum_and_norm::<gpu_pool::half::bf16>(OP, device, x, residual, norm),
            _ => {}
        }
    }
    let sum = (residual + all_reduce(x, ReduceOp::Sum)?)?;
    residual.slice_set(&sum, 0, 0)?;
    Ok(norm.forward(&sum)?)
}

#[cfg(feature = "cuda")]
mod on_gpu {
    use super::*;
    use crate::memory::gpu;
    use candle_core::{CudaDevice, Storage, backend::BackendDevice as _, op::BackpropOp};
    use gpu_pool::kernel::Float;
    use gpu_pool_train::{RowNorm, ops::AllReduceNorm as _};

    pub fn sum_and_norm<T: Number + Float<Acc = f32>>(
        op: &'static str,
        device: &CudaDevice,
        x: &Tensor,
        residual: &Tensor,
        norm: &RmsNorm,
    ) -> Result<Tensor> {
        with_token(op, |dev| {
            let adopted = |of: &Tensor| {
                let (storage, layout) = of.storage_and_layout();
                match &*storage {
                    // SAFETY: candle's own stream is the token's, so all uses are in order, also the next ones of
                    // candle, and the end of the memory. Only the residual is written, and it is not tracked.
                    Storage::Cuda(cuda) if device.same_device(&cuda.device) && layout.is_contiguous() => unsafe {
                        gpu::adopt::<T>(dev, cuda, layout, ())
                    },
                    _ => Err(Error::invalid(op, "its tensors must be contiguous, and on one device")),
                }
            };
            let (from, mut to_add, weight) = (adopted(x)?, adopted(residual)?, adopted(norm.weight())?);
            let range = |of: &DeviceBuffer<T>| of.address()..of.address() + (of.len() * size_of::<T>()) as u64;
            let changed = range(&to_add);
            if [range(&from), range(&weight)].iter().any(|of| of.start < changed.end && changed.start < of.end) {
                return Err(Error::invalid(op, "the residual changes in place: no other tensor may share its memory"));
            }
            let rows = RowNorm::rms(&weight, norm.eps() as f32);
            let storage = gpu::filled::<T>(dev, device, from.len(), |dev, to| {
                dev.all_reduce_norm_into(&from, &mut to_add, rows, to)?;
                Ok(())
            })?;
            Ok(Tensor::from_storage(Storage::Cuda(storage), x.shape(), BackpropOp::none(), false))
        })
    }
}

fn run(x: &Tensor, step: Step) -> Result<Tensor> {
    Ok(x.contiguous()?.apply_op1_no_bwd(&Collective(step))?)
}

fn run_tracked(x: &Tensor, step: Step) -> Result<Tensor> {
    Ok(x.contiguous()?.apply_op1(Collective(step))?)
}

#[derive(Clone, Debug)]
enum Step {
    Reduce(ReduceOp),
    Broadcast(usize),
    /// By rank: rows.
    Gather(Vec<usize>),
    SumGradient,
}

struct Collective(Step);

impl Collective {
    fn shape(&self, of: &Shape) -> Shape {
        match &self.0 {
            Step::Gather(rows) => {
                let mut dims = of.dims().to_vec();
                dims[0] = rows.iter().sum();
                dims.into()
            }
            _ => of.clone(),
        }
    }

    fn fill<T: Number>(&self, dev: &Device, from: &DeviceBuffer<T>, to: &mut DeviceBuffer<T>) -> Result<()> {
        match &self.0 {
            Step::Reduce(op) => dev.all_reduce_into(from, to, *op)?,
            Step::Broadcast(root) => {
                dev.copy(from, to)?;
                dev.broadcast(to, *root)?;
            }
            Step::Gather(rows) => {
                let width = to.len() / rows.iter().sum::<usize>().max(1);
                dev.all_gather_v(from, to, &rows.iter().map(|rows| rows * width).collect::<Vec<_>>())?;
            }
            Step::SumGradient => dev.copy(from, to)?,
        }
        Ok(())
    }

    /// On a software GPU: through its own memory, which candle's tensors cannot take.
    fn on_host<T: Number>(&self, own: &[T], len: usize) -> Result<CpuStorage> {
        if matches!(self.0, Step::SumGradient) {
            return Ok(T::to_cpu_storage(own));
        }
        with_token(self.name(), |dev| {
            let (from, mut to) = (dev.upload(own)?, dev.zeros::<T>(len)?);
            self.fill(dev, &from, &mut to)?;
            Ok(T::to_cpu_storage_owned(dev.download(&to)?))
        })
    }

    /// In candle's own memory.
    #[cfg(feature = "cuda")]
    fn on_gpu<T: Number>(&self, own: &CudaStorage, l: &Layout, len: usize) -> Result<CudaStorage> {
        use crate::memory::gpu;
        with_token(self.name(), |dev| {
            // SAFETY: candle's own stream is the token's. candle writes and frees the memory on it, after the reads
            // here; when a collective is over there, so are all its reads by peers.
            let from = unsafe { gpu::adopt::<T>(dev, own, l, ())? };
            gpu::filled(dev, &own.device, len, |dev, to| self.fill(dev, &from, to))
        })
    }
}

impl CustomOp1 for Collective {
    fn name(&self) -> &'static str {
        match self.0 {
            Step::Reduce(_) => "all_reduce",
            Step::Broadcast(_) => "broadcast",
            Step::Gather(_) => "all_gather",
            Step::SumGradient => "sum_backward",
        }
    }

    fn cpu_fwd(&self, own: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let shape = self.shape(l.shape());
        let len = shape.elem_count();
        let out: Result<_> = dispatch!(self.name(), own.dtype(), T => self.on_host(part(own.as_slice::<T>()?, l), len));
        Ok((out?, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, own: &CudaStorage, l: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        let shape = self.shape(l.shape());
        let len = shape.elem_count();
        let out: Result<_> = dispatch!(self.name(), own.dtype(), T => self.on_gpu::<T>(own, l, len));
        Ok((out?, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(match &self.0 {
            Step::Reduce(_) => gradient.clone(),
            Step::Broadcast(_) => return Err(candle_core::Error::BackwardNotSupported { op: self.name() }),
            Step::Gather(rows) => {
                let rank = with_token(self.name(), |dev| Ok(dev.rank()))?;
                gradient.narrow(0, rows[..rank].iter().sum(), rows[rank])?
            }
            Step::SumGradient => all_reduce(gradient, ReduceOp::Sum)?,
        }))
    }
}
