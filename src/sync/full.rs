//! The error of a push to a full ring.

/// The ring was full. Contains the element.
///
/// ```
/// let full = gpu_pool::extend::sync::ring::Full(7);
/// assert_eq!(full.into_inner(), 7);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ring is full")]
pub struct Full<T>(pub T);

impl<T> Full<T> {
    /// The element.
    ///
    /// ```
    /// assert_eq!(gpu_pool::extend::sync::ring::Full("x").into_inner(), "x");
    /// ```
    pub fn into_inner(self) -> T {
        self.0
    }
}

debug_as!(Full<T> [T], |self| "Full(_)");
