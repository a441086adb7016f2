//! Borrowed parts of buffers, and traits by which operations take them. Invariant: a view never exceeds its buffer.

use super::{BlockRef, DeviceCopy};
use crate::driver::Address;
use std::{
    marker::PhantomData,
    ops::{Bound, Range, RangeBounds},
};

/// A shared part of a buffer.
#[derive(Clone, Copy)]
pub struct DeviceView<'a, T: DeviceCopy> {
    pub(crate) block: &'a BlockRef,
    /// Address of the first element; a field, so that cudarc can borrow it as a kernel argument.
    pub(crate) address: Address,
    pub(crate) len: usize,
    pub(crate) of: PhantomData<&'a T>,
}

/// An exclusive part of a buffer.
pub struct DeviceViewMut<'a, T: DeviceCopy> {
    pub(crate) block: &'a BlockRef,
    pub(crate) address: Address,
    pub(crate) len: usize,
    pub(crate) of: PhantomData<&'a mut T>,
}

/// Part of a buffer that may live on another device. Only copies and kernels take it.
#[derive(Clone, Copy)]
pub struct PeerView<'a, T: DeviceCopy>(pub(crate) DeviceView<'a, T>);

macro_rules! common {
    ($($view:ident)+) => {$(
        impl<T: DeviceCopy> $view<'_, T> {
            /// The address of the first element on the device.
            pub fn address(&self) -> Address {
                self.address
            }

            /// The ordinal of the device that has the memory.
            pub fn device(&self) -> usize {
                self.block.handle.device
            }

            pub(crate) fn bytes(&self) -> Range<usize> {
                let start = (self.address - self.block.address) as usize;
                start..start + self.len * size_of::<T>()
            }
        }
    )+};
}
common! { DeviceView DeviceViewMut }

impl<'a, T: DeviceCopy> DeviceView<'a, T> {
    /// A part of this view, by value and with the buffer's lifetime: `x.slice(..).slice(..)` borrows no temporary.
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[track_caller]
    pub fn slice(self, range: impl RangeBounds<usize>) -> DeviceView<'a, T> {
        let range = resolve(range, self.len);
        DeviceView { address: self.address + (range.start * size_of::<T>()) as u64, len: range.len(), ..self }
    }

    /// Names this part on another device's thread; see [`DeviceBuffer::peer`](crate::DeviceBuffer::peer).
    pub fn peer(self) -> PeerView<'a, T> {
        PeerView(self)
    }
}

impl<'a, T: DeviceCopy> DeviceViewMut<'a, T> {
    /// A part of this view, for reading. The view can be written again when the reader is done.
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[track_caller]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> DeviceView<'_, T> {
        self.view().slice(range)
    }

    /// A part of this view. It takes the view by value, so that `x.slice_mut(..).slice_mut(..)` borrows no temporary.
    ///
    /// To keep this view, borrow it first: `view.view_mut().slice_mut(..)`. That works for a view that has a name. A
    /// view without a name ends with its statement, so a part that was borrowed from it cannot outlive the statement.
    /// Leave `view_mut` out, or give the view a name:
    ///
    /// ```
    /// # use gpu_pool::*;
    /// # fn f(dev: &Device, x: &mut DeviceBuffer<f32>) -> Result<()> {
    /// let mut head = x.slice_mut(..8).slice_mut(..4);
    /// dev.scale(&mut head, 2.0)?;
    ///
    /// let mut eight = x.slice_mut(..8);
    /// let mut head = eight.view_mut().slice_mut(..4);
    /// dev.scale(&mut head, 2.0)?;
    /// dev.scale(&mut eight, 2.0) // `eight` is still there
    /// # }
    /// ```
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[track_caller]
    pub fn slice_mut(self, range: impl RangeBounds<usize>) -> DeviceViewMut<'a, T> {
        let range = resolve(range, self.len);
        DeviceViewMut { address: self.address + (range.start * size_of::<T>()) as u64, len: range.len(), ..self }
    }

    /// Two exclusive parts, split at an element.
    ///
    /// # Panics
    /// When `mid > len`.
    #[track_caller]
    pub fn split_at_mut(self, mid: usize) -> (DeviceViewMut<'a, T>, DeviceViewMut<'a, T>) {
        assert!(mid <= self.len, "split at {mid} of a device buffer of {} elements", self.len);
        let address = self.address + (mid * size_of::<T>()) as u64;
        let right = DeviceViewMut { block: self.block, address, len: self.len - mid, of: PhantomData };
        (DeviceViewMut { len: mid, ..self }, right)
    }
}

impl<T: DeviceCopy> PeerView<'_, T> {
    /// A part of it.
    ///
    /// # Panics
    /// When the range is out of bounds.
    #[track_caller]
    pub fn slice(self, range: impl RangeBounds<usize>) -> Self {
        PeerView(self.0.slice(range))
    }
}

/// Panics when the range is out of bounds.
#[track_caller]
pub(super) fn resolve(range: impl RangeBounds<usize>, len: usize) -> Range<usize> {
    let start = match range.start_bound() {
        Bound::Included(&a) => a,
        Bound::Excluded(&a) => a.checked_add(1).expect("the range starts beyond usize::MAX"),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&b) => b.checked_add(1).expect("the range ends beyond usize::MAX"),
        Bound::Excluded(&b) => b,
        Bound::Unbounded => len,
    };
    assert!(start <= end && end <= len, "range {start}..{end} of a buffer of {len} elements");
    start..end
}

/// Memory that an operation can read: buffers, views, exclusive views, and references to them.
///
/// The element is an associated type, not a parameter, so that it is always inferred.
///
/// An operation calls [`view`](Self::view), or [`view_mut`](AsViewMut::view_mut), once for each argument, before it
/// does anything else. So your own type may return a different part at each call.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no buffer or view of this device: only copies and kernels take peers",
    label = "not memory of this device",
    note = "`Device::copy` and the arguments of `Device::launch` take `x.peer()`; elsewhere, use `x.copy_to(dev)?`",
    note = "a slice of the host gets there by `Device::upload`"
)]
pub trait AsView {
    /// The element type.
    type Elem: DeviceCopy;
    /// The whole buffer or view, shared.
    fn view(&self) -> DeviceView<'_, Self::Elem>;
}

/// Memory that an operation can write.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no buffer or exclusive view that this device can write: only copies and kernels take peers",
    label = "not memory that is written here",
    note = "what is written is a `&mut DeviceBuffer`, or a `DeviceViewMut` from `x.view_mut()` or `x.slice_mut(..)`"
)]
pub trait AsViewMut: AsView {
    /// The whole buffer or view, exclusive. The view of a value without a name ends with the statement: see
    /// [`DeviceViewMut::slice_mut`].
    fn view_mut(&mut self) -> DeviceViewMut<'_, Self::Elem>;
}

/// A forgotten `?`: no result is memory, so the condition never holds. The compiler says it in our words.
#[diagnostic::on_unimplemented(
    message = "a `?` is missing: this is a `Result`, not a buffer or view",
    label = "put a `?` behind the call that has returned it"
)]
pub trait QuestionMark {}

#[doc(hidden)]
impl<V: AsView, E> AsView for Result<V, E>
where
    for<'never> Result<V, E>: QuestionMark,
{
    type Elem = V::Elem;
    fn view(&self) -> DeviceView<'_, V::Elem> {
        unreachable!("no result is `QuestionMark`")
    }
}
#[doc(hidden)]
impl<V: AsViewMut, E> AsViewMut for Result<V, E>
where
    for<'never> Result<V, E>: QuestionMark,
{
    fn view_mut(&mut self) -> DeviceViewMut<'_, V::Elem> {
        unreachable!("no result is `QuestionMark`")
    }
}

impl<T: DeviceCopy> AsView for DeviceView<'_, T> {
    type Elem = T;
    fn view(&self) -> DeviceView<'_, T> {
        *self
    }
}
impl<T: DeviceCopy> AsView for DeviceViewMut<'_, T> {
    type Elem = T;
    fn view(&self) -> DeviceView<'_, T> {
        DeviceView { block: self.block, address: self.address, len: self.len, of: PhantomData }
    }
}
impl<T: DeviceCopy> AsViewMut for DeviceViewMut<'_, T> {
    fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        DeviceViewMut { block: self.block, address: self.address, len: self.len, of: PhantomData }
    }
}
macro_rules! references {
    ($($Ref:ty),+) => {$(
        impl<V: AsView + ?Sized> AsView for $Ref {
            type Elem = V::Elem;
            fn view(&self) -> DeviceView<'_, V::Elem> {
                (**self).view()
            }
        }
    )+};
}
references! { &V, &mut V, std::sync::Arc<V>, Box<V> }
impl<V: AsViewMut + ?Sized> AsViewMut for &mut V {
    fn view_mut(&mut self) -> DeviceViewMut<'_, V::Elem> {
        (**self).view_mut()
    }
}

/// The source of [`Device::copy`](crate::Device::copy): memory of this device, or of a peer through
/// [`peer()`](crate::DeviceBuffer::peer).
pub trait CopySource {
    /// The element type.
    type Elem: DeviceCopy;
    #[doc(hidden)]
    fn source(&self) -> DeviceView<'_, Self::Elem>;
}
impl<V: AsView + ?Sized> CopySource for V {
    type Elem = V::Elem;
    #[doc(hidden)]
    fn source(&self) -> DeviceView<'_, V::Elem> {
        self.view()
    }
}
impl<T: DeviceCopy> CopySource for PeerView<'_, T> {
    type Elem = T;
    #[doc(hidden)]
    fn source(&self) -> DeviceView<'_, T> {
        self.0
    }
}
