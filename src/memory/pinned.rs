//! [`PinnedBuffer`]: page-locked host memory that knows which copies are in flight.
//!
//! Users make it with `pool.pinned` and `dev.pinned`; the memory comes from [`PinnedPool`]. Invariant: a host access
//! waits for every conflicting copy first.

mod pool;

pub(crate) use pool::{Locality, PinnedPool};

use super::{DeviceCopy, block::BlockRef};
use crate::{driver::Address, error::Result};
use std::{marker::PhantomData, ops::RangeBounds, time::Duration};

/// `len` elements of `T` in page-locked host memory. Copies from and to it do not wait, and run at the full speed of
/// the bus.
///
/// There is no `Deref<Target = [T]>`: a host access may have to wait for a copy, and the wait can fail.
/// [`as_slice`](Self::as_slice) and [`slice`](Self::slice) wait for copies that write the memory,
/// [`as_mut_slice`](Self::as_mut_slice) waits for all copies. Dropping a buffer in flight defers its reuse. So the
/// classic mistakes cannot be written: reading before the copy has arrived, freeing during a copy (pytorch#130785,
/// pytorch#127612).
///
/// ```
/// # let pool = gpu_pool::GpuPool::builder().host(1).build()?;
/// let mut batch = pool.pinned::<f32>(1000)?;
/// batch.as_mut_slice()?.fill(2.0);
/// let sums = pool.run(|dev, _| {
///     let x = dev.upload_pinned(&batch)?; // does not wait
///     dev.download(&dev.sum(&x)?)
/// })?;
/// assert_eq!(sums[0], [2000.0]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
pub struct PinnedBuffer<T: DeviceCopy> {
    pub(crate) block: BlockRef,
    /// Where it begins in the block, in bytes: 0, but for a part that was [split off](Self::split_off).
    pub(crate) start: usize,
    pub(super) len: usize,
    pub(super) deadline: Duration,
    of: PhantomData<T>,
}

impl<T: DeviceCopy> PinnedBuffer<T> {
    /// A part of the contents. Waits for copies that write the buffer.
    ///
    /// ```
    /// # let pool = gpu_pool::GpuPool::builder().host(1).build()?;
    /// let mut results = pool.pinned::<f32>(4)?;
    /// pool.with(vec![&mut results]).run(|dev, _, results| {
    ///     let x = dev.upload(&[1.0, 2.0, 3.0, 4.0])?;
    ///     dev.download_pinned(&x, results) // does not wait
    /// })?;
    /// assert_eq!(results.slice(1..3)?, [2.0, 3.0]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`as_slice`](Self::as_slice).
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[track_caller]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<&[T]> {
        let range = (range.start_bound().cloned(), range.end_bound().cloned());
        Ok(&self.as_slice()?[range])
    }

    /// Takes the elements from `at` on away, as a buffer of their own. It shares the block: a wait for one buffer is a
    /// wait for the uses of both.
    pub(crate) fn split_off(&mut self, at: usize) -> PinnedBuffer<T> {
        assert!(at <= self.len, "a buffer of {} elements is split at {at}", self.len);
        let (start, len) = (self.start + at * size_of::<T>(), self.len - at);
        self.len = at;
        PinnedBuffer { block: self.block.clone(), start, len, deadline: self.deadline, of: PhantomData }
    }

    /// The address of the first element.
    pub(crate) fn address(&self) -> Address {
        self.block.address + self.start as u64
    }

    /// Whether a host access might have to wait.
    pub fn in_flight(&self) -> bool {
        self.block.hazards.in_flight()
    }
}

#[cfg(test)]
mod tests {
    use crate::GpuPool;
    use crate::lab::Check;
    use crate::lab::prelude::*;

    #[test]
    fn parts_share_a_block_and_nothing_else() {
        let pool = GpuPool::builder().host(1).check(Check::Races).build().unwrap();
        let in_use = || pool.shared.pinned.in_use()[0];
        let before = in_use();
        let mut first = pool.pinned::<u32>(1000).unwrap();
        let with_block = in_use();
        let mut second = first.split_off(400);
        assert_eq!((first.len(), second.len(), in_use()), (400, 600, with_block));
        let (x, y) = (first.as_mut_slice().unwrap(), second.as_mut_slice().unwrap());
        x.fill(1);
        y.fill(2);
        x.fill(3);
        let parts = pool.run(|dev, _| {
            let (x, y) = (dev.upload_pinned(&first)?, dev.upload_pinned(&second)?);
            Ok([dev.download(&x)?, dev.download(&y)?])
        });
        let [parts] = <[_; 1]>::try_from(parts.unwrap()).unwrap();
        assert_eq!(parts, [vec![3; 400], vec![2; 600]]);
        let held = in_use();
        drop(first);
        assert_eq!(in_use(), held, "the second has the block, too");
        drop(second);
        assert_eq!(held - in_use(), with_block - before);
    }
}
