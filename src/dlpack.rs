//! DLPack, both ways, without a copy: tensors of numpy, torch, CuPy, JAX as buffers, and buffers as their tensors.
//! Programs call it, most of them from Python's side. It uses [`Device::adopt`] and the `dlpark` crate.

use crate::{
    AsView, AsViewMut, Device, DeviceBuffer, DeviceCopy, DeviceView, PinnedBuffer,
    driver::{Address, host},
    error::{Error, Result, op_site::OpSite},
    memory::{Access, BlockRef, StreamCore},
};
pub use dlpark;
use dlpark::{DlpackElement, DlpackFlags, ffi::DLDevice, metadata::Dynamic, versioned};
use std::{fmt, ops::RangeBounds, panic::Location, sync::Arc};

/// A tensor of another library, from [`Device::from_dlpack`]: a buffer with a shape, which may be read-only.
///
/// Every operation of the crate reads it ([`AsView`]); [`into_buffer`](Self::into_buffer) is for those that write.
pub struct DlpackTensor<T: DeviceCopy> {
    buffer: DeviceBuffer<T>,
    shape: Vec<usize>,
    read_only: bool,
}

impl<T: DeviceCopy> DlpackTensor<T> {
    /// The lengths of its dimensions; the elements are compact, the last dimension's side by side.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Whether its producer forbids writing.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// The buffer, to write, too.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the tensor is [read-only](Self::is_read_only); copy it then ([`Device::copy`]).
    #[track_caller]
    pub fn into_buffer(self) -> Result<DeviceBuffer<T>> {
        invalid_if!(self.read_only, "into_buffer", "its producer forbids writing: copy it into a buffer");
        Ok(self.buffer)
    }
}

impl<T: DeviceCopy> AsView for DlpackTensor<T> {
    type Elem = T;
    fn view(&self) -> DeviceView<'_, T> {
        self.buffer.view()
    }
}

debug_as!(DlpackTensor<T> [T: DeviceCopy], |self| "{:?} of shape {:?}", self.buffer, self.shape);

struct Exported<T: DeviceCopy> {
    buffer: DeviceBuffer<T>,
    stream: Option<Arc<StreamCore>>,
}

impl<T: DeviceCopy> Drop for Exported<T> {
    fn drop(&mut self) {
        // Work of the other library may still use the memory on that stream: the next use comes after it.
        if let Some(stream) = &self.stream {
            let bytes = self.buffer.view().bytes();
            self.buffer.block.note(stream, stream.submit(), bytes, Access::Write);
        }
    }
}

/// A launch of the graph would not be ordered with the other library's work.
#[track_caller]
fn refuse_in_graph(op: &'static str, block: &BlockRef) -> Result<()> {
    invalid_if!(
        block.is_in_graph(),
        op,
        "a graph names this buffer, or has named it, and a launch would not ask the other library"
    );
    Ok(())
}

/// Tensors of other libraries, by DLPack.
impl Device {
    fn dl_device(&self) -> DLDevice {
        match self.worker.is_software() {
            true => DLDevice::CPU,
            false => DLDevice::cuda(self.worker.handle.driver.info().ordinal as i32),
        }
    }

    /// A tensor of another library on this device (a software GPU's tensors lie on the CPU), without a copy. All rules
    /// of [`adopt`](Self::adopt) hold; the tensor is released after the buffer's last use.
    ///
    /// ```
    /// use gpu_pool::GpuPool;
    ///
    /// let pool = GpuPool::builder().host(1).build()?;
    /// let found = pool.run(|dev, _| {
    ///     let mut x = dev.upload(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
    ///     dev.scale(&mut x, 2.0)?;
    ///     let tensor = dev.to_dlpack(x, &[2, 3])?;                  // to another library
    ///     // SAFETY: nothing else uses the tensor.
    ///     let back = unsafe { dev.from_dlpack::<f32>(tensor)? };    // and from one
    ///     assert_eq!(back.shape(), [2, 3]);
    ///     dev.download(&back)
    /// })?;
    /// assert_eq!(found, [[2.0, 4.0, 6.0, 8.0, 10.0, 12.0]]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// Streams: by DLPack's protocol the consumer gives its stream to the producer (`__dlpack__(stream=..)`), which
    /// orders its work before it. Give it the stream on which the buffer is used first, or wait for the producer.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a tensor of another device or element type, or one that is not compact; as
    /// [`adopt`](Self::adopt). The tensor is released then.
    ///
    /// # Safety
    /// As [`adopt`](Self::adopt): until the tensor is released nothing else uses the memory, but in the order of
    /// streams. A read-only tensor may be read meanwhile.
    #[track_caller]
    pub unsafe fn from_dlpack<T: DeviceCopy + DlpackElement>(
        &self,
        tensor: versioned::Dlpack,
    ) -> Result<DlpackTensor<T>> {
        let op = "from_dlpack";
        let _here = OpSite::here(op);
        let site = Location::caller();
        let bad = |why: &dyn fmt::Display| Error::invalid_at(site, op, why);
        let described = tensor.validate().map_err(|error| bad(&error))?;
        let (own, its) = (self.dl_device(), described.device());
        if (own.device_type, own.device_id) != (its.device_type, its.device_id) {
            return Err(bad(&format_args!("a tensor of {its:?}, where device {} is {own:?}", self.index())));
        }
        if !described.is_compact().map_err(|error| bad(&error))? {
            return Err(bad(&"its elements are not compact: make it contiguous"));
        }
        // SAFETY: the caller's promise: a live tensor.
        let address = unsafe { described.offset_data_ptr::<T>() }.map_err(|error| bad(&error))?;
        let shape: Vec<usize> = described.shape().iter().map(|&length| length as usize).collect();
        let (len, read_only) = (described.num_elements(), tensor.flags().contains(DlpackFlags::READ_ONLY));
        // SAFETY: the caller's promise; the tensor keeps the memory.
        let buffer = unsafe { self.adopt_as(op, address.expose_provenance() as u64, len, tensor)? };
        Ok(DlpackTensor { buffer, shape, read_only })
    }

    /// A buffer as a tensor for another library, without a copy. The host waits until the buffer's last uses are over,
    /// so any stream may use it next. When that library releases the tensor, on any thread, the memory goes back to its
    /// device's pool: that library's work must be over by then. [`to_dlpack_on`](Self::to_dlpack_on) needs no waits.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the product of `shape` is not the buffer's length, if a graph names the buffer, or
    /// has named it, and on a software GPU without memory; [`Error::Borrowed`] if another process has the buffer;
    /// [`Error::WrongDevice`], [`Error::WrongPool`]; [`Error::Timeout`]; the driver's. The buffer is dropped then.
    #[track_caller]
    pub fn to_dlpack<T: DeviceCopy + DlpackElement>(
        &self,
        mut buffer: DeviceBuffer<T>,
        shape: &[usize],
    ) -> Result<versioned::Dlpack> {
        let mut op = self.op("to_dlpack")?;
        refuse_in_graph(op.name, &buffer.block)?;
        op.writes(&buffer.view_mut())?;
        buffer.block.wait_host(op.name, Access::Write, self.worker.shared.deadline)?;
        drop(op);
        let (address, len) = (buffer.address(), buffer.len());
        self.export::<T>("to_dlpack", (address, len), shape, DlpackFlags::empty(), Exported { buffer, stream: None })
    }

    /// A part of a shared buffer as a read-only tensor for another library, without a copy; the buffer lives until that
    /// library releases the tensor. The host waits until the part is written. Meanwhile devices and other tensors may
    /// read the buffer, and no code can write it: it is shared. Example: `dev.to_dlpack_part(&shared, 2..4, &[1, 2])?`.
    ///
    /// # Errors
    /// As [`to_dlpack`](Self::to_dlpack).
    ///
    /// # Panics
    /// When the range is out of bounds, as slices of the standard library do.
    #[track_caller]
    pub fn to_dlpack_part<T: DeviceCopy + DlpackElement>(
        &self,
        buffer: &Arc<DeviceBuffer<T>>,
        range: impl RangeBounds<usize>,
        shape: &[usize],
    ) -> Result<versioned::Dlpack> {
        let (mut op, part) = (self.op("to_dlpack_part")?, buffer.slice(range));
        refuse_in_graph(op.name, part.block)?;
        op.reads(&part)?;
        part.block.wait_host(op.name, Access::Read, self.worker.shared.deadline)?;
        drop(op);
        let place = (part.address(), part.len());
        self.export::<T>("to_dlpack_part", place, shape, DlpackFlags::READ_ONLY, buffer.clone())
    }

    /// [`to_dlpack`](Self::to_dlpack) for a library that works on this stream (a `CUstream` as a number, as in
    /// `__dlpack__(stream=..)`): the stream waits on the device, and the memory's next use comes after that work.
    ///
    /// # Errors
    /// As [`to_dlpack`](Self::to_dlpack) and [`adopt_stream`](Self::adopt_stream).
    ///
    /// # Safety
    /// As [`adopt_stream`](Self::adopt_stream); and the library uses the tensor on no other stream.
    #[track_caller]
    pub unsafe fn to_dlpack_on<T: DeviceCopy + DlpackElement>(
        &self,
        mut buffer: DeviceBuffer<T>,
        shape: &[usize],
        stream: u64,
    ) -> Result<versioned::Dlpack> {
        let _here = OpSite::here("to_dlpack_on");
        // SAFETY: the caller's promise.
        let stream = unsafe { self.adopt_stream(stream)? };
        let consumer = self.on(&stream);
        let mut op = consumer.op("to_dlpack_on")?;
        refuse_in_graph(op.name, &buffer.block)?;
        op.writes(&buffer.view_mut())?;
        drop(op);
        let ((address, len), stream) = ((buffer.address(), buffer.len()), Some(stream.core.clone()));
        self.export::<T>("to_dlpack_on", (address, len), shape, DlpackFlags::empty(), Exported { buffer, stream })
    }

    #[track_caller]
    fn export<T: DeviceCopy + DlpackElement>(
        &self,
        op: &'static str,
        (address, len): (Address, usize),
        shape: &[usize],
        flags: DlpackFlags,
        owner: impl Send + 'static,
    ) -> Result<versioned::Dlpack> {
        let shape = shape_of(op, shape, len)?;
        let driver = &*self.worker.handle.driver;
        let data = match self.worker.is_software() {
            true => host::in_process(driver, address, len * size_of::<T>())
                .ok_or_else(|| Error::invalid(op, "this software GPU has no memory"))?,
            false => std::ptr::with_exposed_provenance_mut(address as usize),
        };
        // SAFETY: the owner, which the tensor keeps, has so many elements of this type at this address.
        unsafe { tensor::<T>(op, shape, data, (self.dl_device(), flags), owner) }
    }
}

impl<T: DeviceCopy + DlpackElement> PinnedBuffer<T> {
    /// Page-locked memory as a tensor of the CPU for another library, without a copy. The host waits until the buffer's
    /// copies are over. When that library releases the tensor, on any thread, the memory goes back to its pool.
    /// `pinned.into_dlpack(&[rows, columns])?`, for example.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the product of `shape` is not the buffer's length; as
    /// [`as_mut_slice`](Self::as_mut_slice). The buffer is dropped then.
    #[track_caller]
    pub fn into_dlpack(mut self, shape: &[usize]) -> Result<versioned::Dlpack> {
        let op = "into_dlpack";
        let shape = shape_of(op, shape, self.len())?;
        let data = self.as_mut_slice()?.as_mut_ptr();
        // SAFETY: the buffer, which the tensor keeps, has so many elements of this type there.
        unsafe { tensor::<T>(op, shape, data.cast(), (DLDevice::CPU, DlpackFlags::empty()), self) }
    }
}

#[track_caller]
fn shape_of(op: &'static str, shape: &[usize], len: usize) -> Result<Vec<i64>> {
    match shape.iter().try_fold(1usize, |product, &length| product.checked_mul(length)) {
        Some(product) if product == len => Ok(shape.iter().map(|&length| length as i64).collect()),
        _ => Err(Error::invalid(op, format_args!("{len} elements in the shape {shape:?}"))),
    }
}

/// # Safety
/// `owner` keeps elements of this type and shape at `data`.
#[track_caller]
unsafe fn tensor<T: DlpackElement>(
    op: &'static str,
    shape: Vec<i64>,
    data: *mut u8,
    (device, flags): (DLDevice, DlpackFlags),
    owner: impl Send + 'static,
) -> Result<versioned::Dlpack> {
    let tensor = Dynamic::compact(shape).initialize(Box::new(owner));
    let mut tensor = tensor.map_err(|error| Error::invalid(op, error))?;
    tensor.set_data(data.cast()).set_dtype(T::DTYPE).set_device(device);
    tensor.set_flags(flags).map_err(|error| Error::invalid(op, error))?;
    // SAFETY: the caller's promise.
    Ok(unsafe { tensor.finish() })
}
