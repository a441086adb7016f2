//! [`UnifiedBuffer`]: managed memory. Invariant: no two devices get the same element for writing, and the host waits
//! for them.

use super::view::{DeviceView, DeviceViewMut};
use super::{Block, BlockRef, DeviceCopy, DeviceHandle, History, Origin, Region, backing::ChunkKind, fits_blocks};
use crate::error::{Error, Result};
use crate::{driver::Address, parts::Parts, shard::Shard};
use std::{marker::PhantomData, sync::Arc, time::Duration};

/// `len` elements of `T` in managed memory: one address on the host and on every device.
///
/// A scope gives each device its own rows, so no two touch one element, and the host cannot look while they work:
///
/// ```
/// let pool = gpu_pool::GpuPool::builder().host(3).build()?;
/// let mut table = pool.unified::<f32>(3 * 4)?;
/// table.as_mut_slice()?.fill(1.0);
/// pool.with(table.rows_mut(4)).run(|dev, shard, mut rows| {
///     dev.scale(&mut rows, shard.index() as f32)
/// })?;
/// assert_eq!(table.as_slice()?, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
///
/// A run replaces the usual `for (gpu, dev) in devices() { ..; synchronize() }` over unified memory and synchronises.
pub struct UnifiedBuffer<T: DeviceCopy> {
    pub(super) block: BlockRef,
    pub(super) len: usize,
    pub(super) deadline: Duration,
    of: PhantomData<T>,
}

impl<T: DeviceCopy> UnifiedBuffer<T> {
    pub(crate) fn address(&self) -> Address {
        self.block.address
    }

    #[track_caller]
    pub(crate) fn new(handle: &Arc<DeviceHandle>, len: usize, deadline: Duration) -> Result<Self> {
        const { fits_blocks::<T>() };
        let bytes = len.saturating_mul(size_of::<T>()).max(1);
        invalid_if!(bytes > isize::MAX as usize, "unified", "{len} elements are more than memory can hold");
        let ptr = handle.check_alloc("unified", bytes, handle.driver.managed_alloc(bytes))?;
        let region = Region::chunk(handle, ChunkKind::Managed, ptr as u64, bytes as u64);
        // Managed memory is not pooled: it has no owner, and goes back to the driver with its last handle.
        let at = (ptr as u64, bytes);
        let block = Block::new_free(handle, ChunkKind::Managed, None, &region, Origin::Region, at, History::default());
        Ok(UnifiedBuffer { block: BlockRef::activate(block), len, deadline, of: PhantomData })
    }

    /// Rows of `width` elements for the devices to read; [`GpuPool::with`](crate::GpuPool::with) splits them
    /// over the devices. The host may read at the same time. Devices that write the memory are waited for on the
    /// devices, as for all memory. `pool.with(table.rows(3)).run(|dev, shard, rows| ..)`, for example.
    pub fn rows(&self, width: usize) -> UnifiedRows<'_, T> {
        UnifiedRows { buffer: self, width }
    }

    /// Rows of `width` elements for the devices to write; [`GpuPool::with`](crate::GpuPool::with) splits them.
    pub fn rows_mut(&mut self, width: usize) -> UnifiedRowsMut<'_, T> {
        UnifiedRowsMut { buffer: self, width }
    }

    #[track_caller]
    fn count_rows(&self, op: &'static str, width: usize) -> Result<usize> {
        let len = self.len;
        invalid_if!(width == 0 || !len.is_multiple_of(width), op, "{len} elements are not whole rows of {width}");
        Ok(len / width)
    }
}

/// The rows of a [`UnifiedBuffer`], as [`Parts`]: each device gets a shared view of its own rows.
#[derive(Debug)]
pub struct UnifiedRows<'e, T: DeviceCopy> {
    buffer: &'e UnifiedBuffer<T>,
    width: usize,
}

impl<'e, T: DeviceCopy> Parts for UnifiedRows<'e, T> {
    type Part = DeviceView<'e, T>;

    #[track_caller]
    fn split(self, shards: &[Shard]) -> Result<Vec<Self::Part>> {
        let UnifiedRows { buffer, width } = self;
        let rows = buffer.count_rows("rows", width)?;
        let (block, len) = (&buffer.block, buffer.len);
        let all = DeviceView { block, address: block.address, len, of: PhantomData };
        let part = |shard: &Shard| {
            let own = shard.range(rows);
            all.slice(own.start * width..own.end * width)
        };
        Ok(shards.iter().map(part).collect())
    }
}

/// The rows of a [`UnifiedBuffer`], as [`Parts`]: each device gets an exclusive view of its own rows.
#[derive(Debug)]
pub struct UnifiedRowsMut<'e, T: DeviceCopy> {
    buffer: &'e mut UnifiedBuffer<T>,
    width: usize,
}

impl<'e, T: DeviceCopy> Parts for UnifiedRowsMut<'e, T> {
    type Part = DeviceViewMut<'e, T>;

    #[track_caller]
    fn split(self, shards: &[Shard]) -> Result<Vec<Self::Part>> {
        let UnifiedRowsMut { buffer, width } = self;
        let rows = buffer.count_rows("rows_mut", width)?;
        let (block, len) = (&buffer.block, buffer.len);
        let mut rest = DeviceViewMut { block, address: block.address, len, of: PhantomData };
        let mut parts = Vec::with_capacity(shards.len());
        for shard in shards {
            let (part, behind) = rest.split_at_mut(shard.range(rows).len() * width);
            parts.push(part);
            rest = behind;
        }
        Ok(parts)
    }
}
