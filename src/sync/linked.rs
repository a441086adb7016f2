//! Intrusive lists: a box is its own list node, so a push or a pop does not allocate.
//!
//! [`Taken`] is such a list with an owner. [`Returns`](super::Returns) has the lists that threads share.

use super::shim::UnsafeCell;
use crate::contain::contain;
use std::{iter::FusedIterator, marker::PhantomData, ptr};

/// The field that makes a box a node of [`Returns`](super::Returns). It is used only while the box is in a list.
pub struct Link<T>(UnsafeCell<*mut T>);

// SAFETY: only this module uses the pointer, and only while it owns the node.
unsafe impl<T> Send for Link<T> {}
// SAFETY: as above: a shared `Link` gives access to nothing.
unsafe impl<T> Sync for Link<T> {}

impl<T> Default for Link<T> {
    fn default() -> Self {
        Link(UnsafeCell::new(ptr::null_mut()))
    }
}

debug_as!(Link<T> [T], |self| "Link");

/// A type that can be a node of [`Returns`](super::Returns).
///
/// # Safety
///
/// [`link`](Self::link) always returns the same field of `self`. No code replaces the field's content while the value
/// is in a [`Returns`](super::Returns) (where only the list's owner can reach it).
pub unsafe trait Linked: Sized + Send {
    fn link(&self) -> &Link<Self>;
}

/// A list of returned boxes, oldest first in each lane. Its drop drops the remaining boxes.
pub struct Taken<T: Linked> {
    first: *mut T,
    _owns: PhantomData<Box<T>>,
}

// SAFETY: the list owns its boxes.
unsafe impl<T: Linked> Send for Taken<T> {}

impl<T: Linked> Taken<T> {
    pub(super) fn none() -> Self {
        Taken { first: ptr::null_mut(), _owns: PhantomData }
    }

    /// Reverses a list and puts it in front.
    ///
    /// # Safety
    /// The list ends with null. Its nodes came from boxes; the caller owns them and passes them on.
    pub(super) unsafe fn prepend_turned(&mut self, mut list: *mut T) {
        while !list.is_null() {
            // SAFETY: the caller's promise.
            unsafe {
                let older = next_of(list);
                set_next(list, self.first);
                self.first = list;
                list = older;
            }
        }
    }
}

impl<T: Linked> Iterator for Taken<T> {
    type Item = Box<T>;

    #[inline]
    fn next(&mut self) -> Option<Box<T>> {
        if self.first.is_null() {
            return None;
        }
        let node = self.first;
        // SAFETY: this list owns the node, which came from a box; it is unlinked before it is returned.
        unsafe {
            self.first = next_of(node);
            Some(Box::from_raw(node))
        }
    }
}

impl<T: Linked> FusedIterator for Taken<T> {}

impl<T: Linked> Drop for Taken<T> {
    fn drop(&mut self) {
        // A box whose drop panics does not prevent the drop of the others.
        self.for_each(|value| {
            contain(|| drop(value));
        });
    }
}

debug_as!(Taken<T> [T: Linked], |self| empty = self.first.is_null());

/// # Safety
/// The node is the caller's.
#[inline(always)]
pub(super) unsafe fn set_next<T: Linked>(node: *mut T, next: *mut T) {
    // SAFETY: the caller's promise; only the owner of a node uses its link.
    unsafe { (*node).link().0.with_mut(|link| *link = next) };
}

/// # Safety
/// The node is the caller's.
#[inline(always)]
unsafe fn next_of<T: Linked>(node: *mut T) -> *mut T {
    // SAFETY: as in `set_next`.
    let next = unsafe { (*node).link().0.with(|link| *link) };
    // By its address, which was exposed: a push may have found another node where the one that it had seen was.
    ptr::with_exposed_provenance_mut(next.addr())
}
