//! [`DeviceBuffer`]: device memory that a user owns. Every operation of the crate takes it through the traits of
//! [`view`](super::view).

use super::{
    BlockRef, DeviceCopy,
    view::{AsView, AsViewMut, DeviceView, DeviceViewMut, PeerView},
};
use crate::driver::Address;
use std::{marker::PhantomData, ops::RangeBounds};

/// `len` elements of `T` in the memory of one device.
///
/// * A buffer is used together with a [`&Device`](crate::Device): all operations are methods there. They refuse a
///   buffer of another device with [`Error::WrongDevice`](crate::Error::WrongDevice). Only copies and kernels cross
///   devices, through [`peer`](Self::peer).
/// * A buffer may be sent to any thread, shared, and dropped anywhere, also after its pool has ended. The memory goes
///   back to its own device's pool, and is used again only after every device is done with it.
/// * The library orders the operations on a buffer, over streams and devices, in the order of the calls.
///
/// ```
/// # let pool = gpu_pool::GpuPool::builder().host(2).build()?;
/// let sums = pool.run(|dev, shard| {
///     let x = dev.upload(&vec![1.0f32; 100 + shard.index()])?;
///     dev.download(&dev.sum(&x.slice(50..))?)
/// })?;
/// assert_eq!(sums, [[50.0], [51.0]]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
pub struct DeviceBuffer<T: DeviceCopy> {
    pub(crate) block: BlockRef,
    pub(crate) len: usize,
    pub(crate) of: PhantomData<T>,
}

impl<T: DeviceCopy> DeviceBuffer<T> {
    pub(crate) fn new(block: BlockRef, len: usize) -> Self {
        DeviceBuffer { block, len, of: PhantomData }
    }

    /// Ordinal, in the pool, of the device that the memory belongs to.
    pub fn device(&self) -> usize {
        self.block.handle.device
    }

    /// The address on the device, for your own `unsafe` code. It is 256-byte aligned, but for memory of
    /// [other code](crate::Device::adopt).
    pub fn address(&self) -> Address {
        self.block.address
    }

    /// A part, shared.
    ///
    /// # Panics
    /// When the range is out of bounds, as slices of the standard library do.
    #[track_caller]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> DeviceView<'_, T> {
        self.view().slice(range)
    }

    /// A part, exclusive.
    ///
    /// # Panics
    /// When the range is out of bounds.
    ///
    /// Two exclusive parts do not compile unless they come from [`split_at_mut`](Self::split_at_mut).
    #[track_caller]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> DeviceViewMut<'_, T> {
        self.view_mut().slice_mut(range)
    }

    /// Two exclusive parts, split at an element.
    ///
    /// # Panics
    /// When `mid > len`.
    #[track_caller]
    pub fn split_at_mut(&mut self, mid: usize) -> (DeviceViewMut<'_, T>, DeviceViewMut<'_, T>) {
        self.view_mut().split_at_mut(mid)
    }

    /// Names this buffer on another device's thread: copies and kernels there may read it.
    pub fn peer(&self) -> PeerView<'_, T> {
        PeerView(self.view())
    }
}

impl<T: DeviceCopy> AsView for DeviceBuffer<T> {
    type Elem = T;
    fn view(&self) -> DeviceView<'_, T> {
        DeviceView { block: &self.block, address: self.block.address, len: self.len, of: PhantomData }
    }
}

impl<T: DeviceCopy> AsViewMut for DeviceBuffer<T> {
    fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        DeviceViewMut { block: &self.block, address: self.block.address, len: self.len, of: PhantomData }
    }
}
