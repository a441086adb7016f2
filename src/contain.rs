//! Catches panics of user code that must not unwind into the library: drops, callbacks, `tracing` subscribers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{any::Any, fmt, mem, ops::Deref};

/// Runs `f` and catches its panic. False if `f` panicked.
///
/// In loom models nothing is caught, since loom reports its findings by panics.
pub fn contain(f: impl FnOnce()) -> bool {
    if cfg!(loom) {
        f();
        return true;
    }
    let Err(payload) = catch_unwind(AssertUnwindSafe(f)) else { return true };
    discard(payload);
    false
}

/// The text of a user's value; `instead` if its `Display` panics or fails.
pub(crate) fn text_of(value: &dyn fmt::Display, instead: &str) -> String {
    let mut text = None;
    contain(|| text = Some(value.to_string()));
    text.unwrap_or_else(|| instead.to_owned())
}

/// The text of a panic, if its payload is one.
pub fn payload_text(payload: &(dyn Any + Send)) -> Option<&str> {
    payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str))
}

/// Drops a panic's payload. The drop may panic itself; that second payload is leaked, since its drop may panic again.
pub fn discard(payload: Box<dyn Any + Send>) {
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        mem::forget(another);
    }
}

/// Calls the closure when it is dropped, also by a panic that unwinds.
pub(crate) struct Finally<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for Finally<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// A value of the user.
#[derive(Clone)]
pub struct Contained<T>(Option<T>);

impl<T> Contained<T> {
    /// A value.
    pub fn new(value: T) -> Self {
        Contained(Some(value))
    }

    /// Takes it out.
    pub fn into_inner(mut self) -> T {
        self.0.take().expect("only this and the drop take it")
    }
}

impl<T> Deref for Contained<T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().expect("who takes it has no use for it any more")
    }
}

impl<T> Drop for Contained<T> {
    fn drop(&mut self) {
        if let Some(value) = self.0.take() {
            contain(|| drop(value));
        }
    }
}
