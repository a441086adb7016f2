//! [`PinnedBuffer`]: page-locked host memory. Invariant: a host access waits for every conflicting copy first.

mod pool;

pub(crate) use pool::{Locality, PinnedPool};

use super::{BlockRef, DeviceCopy, view::resolve};
use crate::{driver::Address, error::Result};
use std::{
    marker::PhantomData,
    ops::{Range, RangeBounds},
    time::Duration,
};

/// `len` elements of `T` in page-locked host memory. Copies from and to it do not wait, and run at full bus speed.
///
/// There is no `Deref<Target = [T]>`: a host access may have to wait for a copy, and the wait can fail.
/// [`as_slice`](Self::as_slice) and [`slice`](Self::slice) wait for copies that write the memory,
/// [`as_mut_slice`](Self::as_mut_slice) waits for all copies. Dropping a buffer in flight defers its reuse. So classic
/// mistakes cannot be written: reads before the copy has arrived, frees during a copy (pytorch#130785, pytorch#127612).
///
/// The page "Memory" of the guide has an example.
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

    /// A part of the buffer, to [upload](crate::Device::upload_pinned). It waits for no copy.
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[track_caller]
    pub fn range(&self, range: impl RangeBounds<usize>) -> PinnedView<'_, T> {
        let Range { start, end } = resolve(range, self.len);
        let (start, len) = (self.start + start * size_of::<T>(), end - start);
        PinnedView { block: &self.block, start, len, of: PhantomData }
    }

    /// A part of the buffer, to [download](crate::Device::download_pinned) to. It waits for no copy.
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[track_caller]
    pub fn range_mut(&mut self, range: impl RangeBounds<usize>) -> PinnedViewMut<'_, T> {
        PinnedViewMut(self.range(range))
    }

    /// Takes the elements from `at` on away. The new buffer shares the block: a wait for one is a wait for both.
    pub(crate) fn split_off(&mut self, at: usize) -> PinnedBuffer<T> {
        assert!(at <= self.len, "a buffer of {} elements is split at {at}", self.len);
        let (start, len) = (self.start + at * size_of::<T>(), self.len - at);
        self.len = at;
        PinnedBuffer { block: self.block.clone(), start, len, deadline: self.deadline, of: PhantomData }
    }

    pub(crate) fn address(&self) -> Address {
        self.range(..).address()
    }

    /// Whether a host access might have to wait.
    pub fn in_flight(&self) -> bool {
        self.block.hazards.in_flight()
    }
}

/// A shared part of a [`PinnedBuffer`]: [`PinnedBuffer::range`].
#[derive(Clone, Copy)]
pub struct PinnedView<'a, T: DeviceCopy> {
    pub(crate) block: &'a BlockRef,
    start: usize,
    pub(super) len: usize,
    of: PhantomData<&'a T>,
}

/// An exclusive part of a [`PinnedBuffer`]: [`PinnedBuffer::range_mut`].
pub struct PinnedViewMut<'a, T: DeviceCopy>(pub(crate) PinnedView<'a, T>);

impl<T: DeviceCopy> PinnedView<'_, T> {
    pub(crate) fn address(&self) -> Address {
        self.block.address + self.start as u64
    }

    pub(crate) fn bytes(&self) -> Range<usize> {
        self.start..self.start + self.len * size_of::<T>()
    }
}

/// Page-locked memory that a copy reads: a [`PinnedBuffer`], and parts of it.
pub trait AsPinned {
    /// The element type.
    type Elem: DeviceCopy;
    /// The whole buffer or part, shared.
    fn pinned_view(&self) -> PinnedView<'_, Self::Elem>;
}

/// Page-locked memory that a copy writes: a [`PinnedBuffer`], and exclusive parts of it.
pub trait AsPinnedMut: AsPinned {
    /// The whole buffer or part, exclusive.
    fn pinned_view_mut(&mut self) -> PinnedViewMut<'_, Self::Elem>;
}

macro_rules! pinned {
    ($($type:ty: |$own:ident| $view:expr;)+) => {$(
        impl<T: DeviceCopy> AsPinned for $type {
            type Elem = T;

            fn pinned_view(&self) -> PinnedView<'_, T> {
                let $own = self;
                $view
            }
        }
    )+};
}
pinned! {
    PinnedBuffer<T>: |buffer| buffer.range(..);
    PinnedView<'_, T>: |view| *view;
    PinnedViewMut<'_, T>: |view| view.0;
}

impl<T: DeviceCopy> AsPinnedMut for PinnedBuffer<T> {
    fn pinned_view_mut(&mut self) -> PinnedViewMut<'_, T> {
        self.range_mut(..)
    }
}

impl<T: DeviceCopy> AsPinnedMut for PinnedViewMut<'_, T> {
    fn pinned_view_mut(&mut self) -> PinnedViewMut<'_, T> {
        PinnedViewMut(self.0)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/memory/pinned_tests.rs"]
mod tests;
