//! Tensors as buffers, and buffers as tensors. [`collective`](crate::collective) and the gradients' exchange use this.

use crate::{Error, Result, device::candle_device};
use candle_core::{Layout, Shape, Storage, Tensor, WithDType};
use gpu_pool::{AsView, Device, DeviceBuffer, Element};

/// Elements that candle and gpu-pool have in common.
pub trait Number: WithDType + Element + private::OnGpu {}

mod private {
    #[cfg(feature = "cuda")]
    pub trait OnGpu:
        candle_core::cuda_backend::CudaDType + candle_core::cuda_backend::cudarc::driver::DeviceRepr
    {
    }
    #[cfg(not(feature = "cuda"))]
    pub trait OnGpu {}
}

macro_rules! numbers {
    ($($dtype:ident => $T:ty),+) => {
        $(impl private::OnGpu for $T {}
        impl Number for $T {})+

        /// Evaluates an expression in which `$T` is the type of this `DType`; or returns the error of call `$op`.
        macro_rules! dispatch {
            ($op:expr, $of:expr, $N:ident => $value:expr) => {
                match $of {
                    $(candle_core::DType::$dtype => { type $N = $T; $value })+
                    other => Err($crate::Error::unknown($op, other)),
                }
            };
        }
        pub(crate) use dispatch;
    };
}
numbers! {
    U8 => u8, U32 => u32, I32 => i32, I64 => i64, F16 => gpu_pool::half::f16, BF16 => gpu_pool::half::bf16,
    F32 => f32, F64 => f64
}

/// A copy of a tensor's elements, in row-major order, as a buffer. On a GPU it does not touch the host. (On a software
/// GPU the tensor is host memory.)
///
/// # Errors
/// [`Error::DType`] for elements that are no `T`; [`Error::Invalid`] for a tensor that is not on this device; those of
/// [`Device::upload`] and of candle.
#[track_caller]
pub fn to_buffer<T: Number>(dev: &Device, tensor: &Tensor) -> Result<DeviceBuffer<T>> {
    let tensor = located::<T>("to_buffer", dev, tensor)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => Ok(dev.upload(part(cpu.as_slice::<T>()?, layout))?),
        #[cfg(feature = "cuda")]
        Storage::Cuda(cuda) => gpu::on_stream(dev, &cuda.device, |dev| {
            // SAFETY: it is copied in stream order; candle frees it on the same stream, later.
            let from = unsafe { gpu::adopt::<T>(dev, cuda, layout, ())? };
            // SAFETY: the copy writes all of it.
            let mut to = unsafe { dev.uninit::<T>(from.len())? };
            dev.copy(&from, &mut to)?;
            Ok(to)
        }),
        _ => Err(candle_core::Error::NotCompiledWithCudaSupport.into()),
    }
}

/// A buffer's elements as a new tensor of candle's. It is one copy: candle frees its tensors itself, so it cannot take
/// memory of the pool. [`adopt`] goes without a copy: let candle allocate the tensor, and work on it as a buffer.
///
/// # Errors
/// [`Error::Invalid`] if the shape has another number of elements; those of [`Device::download`] and of candle.
#[track_caller]
pub fn to_tensor<V: AsView<Elem: Number>>(dev: &Device, buffer: &V, shape: impl Into<Shape>) -> Result<Tensor> {
    let (view, shape) = (buffer.view(), shape.into());
    let len = view.len();
    invalid_if!(len != shape.elem_count(), "to_tensor", "{len} elements for a shape of {shape:?}");
    match candle_device(dev)? {
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(device) => gpu::on_stream(dev, &device, |dev| {
            let storage = gpu::filled::<V::Elem>(dev, &device, view.len(), |dev, to| Ok(dev.copy(&view, to)?))?;
            let none = candle_core::op::BackpropOp::none();
            Ok(Tensor::from_storage(Storage::Cuda(storage), shape, none, false))
        }),
        device => Ok(Tensor::from_vec(dev.download(&view)?, shape, &device)?),
    }
}

/// A tensor's memory as a buffer, without a copy, with [`Device::adopt`]. The tensor stays usable, and the buffer keeps
/// it alive. The other way round is the same call: make a tensor, adopt it, and let gpu-pool's operations fill it.
///
/// # Errors
/// [`Error::DType`]; [`Error::Invalid`] for a tensor that is not contiguous, or not on this device; on a GPU
/// [`gpu_pool::Error::InvalidArgument`] in a capture; those of [`Device::adopt`].
///
/// # Safety
/// Until the buffer's last use is over, nothing writes the tensor's memory but through the buffer, and if the buffer is
/// written, nothing reads it. The buffer's uses come after candle's work so far. Candle does not come after them by
/// itself: wait before ([`Device::synchronize`]).
#[track_caller]
pub unsafe fn adopt<T: Number>(dev: &Device, tensor: &Tensor) -> Result<DeviceBuffer<T>> {
    let tensor = located::<T>("adopt", dev, tensor)?;
    let (strides, shape) = (tensor.stride(), tensor.shape());
    invalid_if!(!tensor.is_contiguous(), "adopt", "strides of {strides:?} for a shape of {shape:?} are not contiguous");
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => {
            let memory = part(cpu.as_slice::<T>()?, layout);
            // SAFETY: the clone keeps the memory alive, and candle never moves it; the rest is the caller's promise.
            Ok(unsafe { dev.adopt(memory.as_ptr() as u64, memory.len(), tensor.clone())? })
        }
        #[cfg(feature = "cuda")]
        Storage::Cuda(cuda) => {
            // SAFETY: as above.
            let mut buffer = unsafe { gpu::adopt(dev, cuda, layout, tensor.clone())? };
            // As if it were used on candle's stream now: its further uses come after that.
            gpu::on_stream(dev, &cuda.device, |dev| {
                dev.cuda()?.write(&mut buffer)?;
                Ok(())
            })?;
            Ok(buffer)
        }
        _ => Err(candle_core::Error::NotCompiledWithCudaSupport.into()),
    }
}

/// The tensor, if it has elements of this type and lives on this device.
pub(crate) fn located<'t, T: Number>(op: &'static str, dev: &Device, tensor: &'t Tensor) -> Result<&'t Tensor> {
    if tensor.dtype() != <T as WithDType>::DTYPE {
        let (what, wanted) =
            (format!("a tensor of {:?}", tensor.shape()), format!("not of {:?}", <T as Element>::DTYPE));
        return Err(Error::DType { op, what, dtype: tensor.dtype(), wanted });
    }
    let device = candle_device(dev)?;
    let (here, at) = (device.same_device(tensor.device()), tensor.device());
    invalid_if!(!here, op, "the tensor is on {at:?}, and device {}'s are on {device:?}", dev.index());
    Ok(tensor)
}

pub(crate) fn part<'s, T>(all: &'s [T], layout: &Layout) -> &'s [T] {
    &all[layout.start_offset()..][..layout.shape().elem_count()]
}

#[cfg(feature = "cuda")]
pub(crate) mod gpu {
    //! candle's memory on GPUs.

    use super::Number;
    use crate::{Result, device};
    use candle_core::{
        CudaDevice, CudaStorage, Layout,
        cuda_backend::cudarc::driver::{CudaSlice, DevicePtr as _},
    };
    use gpu_pool::{Device, DeviceBuffer};

    pub fn on_stream<R>(dev: &Device, device: &CudaDevice, f: impl FnOnce(&Device) -> Result<R>) -> Result<R> {
        let stream = device::gpu::stream(dev, device)?;
        f(&dev.on(&stream))
    }

    /// The elements of a contiguous layout, in place.
    ///
    /// # Safety
    /// As [`Device::adopt`].
    pub unsafe fn adopt<T: Number>(
        dev: &Device,
        storage: &CudaStorage,
        layout: &Layout,
        keep: impl Send + 'static,
    ) -> Result<DeviceBuffer<T>> {
        let slice: &CudaSlice<T> = storage.as_cuda_slice()?;
        // candle's stream has the writes of its own work; it waits for nothing here.
        let (start, _recorded) = slice.device_ptr(slice.stream());
        let bytes = layout.start_offset() * size_of::<T>();
        // SAFETY: the caller's promise.
        Ok(unsafe { dev.adopt(start + bytes as u64, layout.shape().elem_count(), keep)? })
    }

    /// Fresh memory of candle's, filled by `fill`, as candle's storage.
    pub fn filled<T: Number>(
        dev: &Device,
        device: &CudaDevice,
        len: usize,
        fill: impl FnOnce(&Device, &mut DeviceBuffer<T>) -> Result<()>,
    ) -> Result<CudaStorage> {
        // SAFETY: `fill` writes all of it, on the same stream.
        let slice = unsafe { device.alloc::<T>(len)? };
        let storage = CudaStorage::wrap_cuda_slice(slice, device.clone());
        let layout = Layout::contiguous(len);
        // SAFETY: fresh memory, which nothing else names; candle frees it on the stream on which it is used here.
        let mut buffer = unsafe { adopt::<T>(dev, &storage, &layout, ())? };
        fill(dev, &mut buffer)?;
        Ok(storage)
    }
}
