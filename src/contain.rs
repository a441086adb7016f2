//! User code that must not unwind into the library: drops of users' values, callbacks, the user's `tracing` subscriber.

use std::{
    any::Any,
    mem,
    ops::Deref,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Runs what must not unwind; whether it came to its end.
///
/// In models nothing is caught: there a panic is how loom reports what it has found.
pub(crate) fn contain(f: impl FnOnce()) -> bool {
    if cfg!(loom) {
        f();
        return true;
    }
    let Err(payload) = catch_unwind(AssertUnwindSafe(f)) else { return true };
    discard(payload);
    false
}

/// Drops a panic's payload. That may panic, and the payload of that panic may panic when it is dropped: so that one is
/// leaked.
pub(crate) fn discard(payload: Box<dyn Any + Send>) {
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        mem::forget(another);
    }
}

/// A value of the user's. Wherever it is dropped, its drop is [contained](contain).
#[derive(Clone)]
pub(crate) struct Contained<T>(Option<T>);

impl<T> Contained<T> {
    pub(crate) fn new(value: T) -> Self {
        Contained(Some(value))
    }

    pub(crate) fn into_inner(mut self) -> T {
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

/// An event for the user's `tracing` subscriber: `event!(warn, fields, "text")`. A subscriber that panics does not
/// unwind into the library: many events are emitted in drops, or where other threads wait for this one.
macro_rules! event {
    ($level:ident, $($event:tt)+) => {{
        $crate::contain::contain(|| tracing::$level!($($event)+));
    }};
}
