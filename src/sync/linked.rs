//! Boxes that are their own list nodes: no allocation to put one into a list, and none to take it out.
//!
//! [`Taken`] is such a list with an owner. [`Returns`](super::Returns) has the lists that threads share.

use super::shim::UnsafeCell;
use crate::contain::contain;
use std::{fmt, iter::FusedIterator, marker::PhantomData, ptr};

/// The field that makes a box a node of [`Returns`](super::Returns). Whoever has the box in hand finds nothing of
/// interest in it.
pub struct Link<T>(UnsafeCell<*mut T>);

// SAFETY: only this module touches the pointer, and only where it owns the node.
unsafe impl<T> Send for Link<T> {}
// SAFETY: as above: a shared `Link` gives access to nothing.
unsafe impl<T> Sync for Link<T> {}

impl<T> Default for Link<T> {
    fn default() -> Self {
        Link(UnsafeCell::new(ptr::null_mut()))
    }
}

impl<T> fmt::Debug for Link<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Link")
    }
}

/// What can be a node of [`Returns`](super::Returns).
///
/// # Safety
///
/// [`link`](Self::link) always returns the same field of `self`, and nothing replaces that field's content while the
/// value is in a [`Returns`](super::Returns), where nobody but its owner gets at it anyhow.
pub unsafe trait Linked: Sized + Send {
    /// The field.
    fn link(&self) -> &Link<Self>;
}

/// What came home, oldest first in each lane. Dropping it drops the rest.
pub struct Taken<T: Linked> {
    /// A list of nodes that came from boxes and belong to this.
    first: *mut T,
    _owns: PhantomData<Box<T>>,
}

// SAFETY: it owns its boxes.
unsafe impl<T: Linked> Send for Taken<T> {}

impl<T: Linked> Taken<T> {
    pub(super) fn none() -> Self {
        Taken { first: ptr::null_mut(), _owns: PhantomData }
    }

    /// # Safety
    ///
    /// The node came from a box and is the caller's, who gives it away.
    unsafe fn prepend(&mut self, node: *mut T) {
        // SAFETY: the caller's promise.
        unsafe { set_next(node, self.first) };
        self.first = node;
    }

    /// Turns a list round and puts it in front.
    ///
    /// # Safety
    ///
    /// The nodes of the list, which ends with null, came from boxes and are the caller's, who gives them away.
    pub(super) unsafe fn prepend_turned(&mut self, mut list: *mut T) {
        while !list.is_null() {
            // SAFETY: the caller's promise.
            unsafe {
                let older = next_of(list);
                self.prepend(list);
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
        // SAFETY: the node is this one's, came from a box, and is taken off the list before it is given away.
        unsafe {
            self.first = next_of(node);
            Some(Box::from_raw(node))
        }
    }
}

impl<T: Linked> FusedIterator for Taken<T> {}

impl<T: Linked> Drop for Taken<T> {
    fn drop(&mut self) {
        // One that panics does not keep the others from being dropped.
        self.for_each(|value| {
            contain(|| drop(value));
        });
    }
}

impl<T: Linked> fmt::Debug for Taken<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Taken").field("empty", &self.first.is_null()).finish()
    }
}

/// # Safety
///
/// The node is the caller's.
#[inline(always)]
pub(super) unsafe fn set_next<T: Linked>(node: *mut T, next: *mut T) {
    // SAFETY: the caller's promise; only owners of a node touch its link.
    unsafe { (*node).link().0.with_mut(|link| *link = next) };
}

/// # Safety
///
/// The node is the caller's.
#[inline(always)]
unsafe fn next_of<T: Linked>(node: *mut T) -> *mut T {
    // SAFETY: as in `set_next`.
    unsafe { (*node).link().0.with(|link| *link) }
}
