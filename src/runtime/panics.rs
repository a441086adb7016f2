//! Where a device closure panicked.
//!
//! `catch_unwind` yields the payload but not the place, and a panic without its place is a complaint of its own
//! (pytorch#18055). A hook that runs before the user's hook notes the place in a thread-local. It changes nothing else,
//! unless the thread [asked for silence](hush): then the user's hook is not called.

use crate::error::Error;
use once_cell::sync::OnceCell;
use std::{
    any::Any,
    cell::{Cell, RefCell},
    marker::PhantomData,
    panic::{self, AssertUnwindSafe, catch_unwind},
};

thread_local! {
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
    static HUSHED: Cell<bool> = const { Cell::new(false) };
}

/// Until it is dropped, panics of this thread, and of the threads of pools that it builds, print nothing. Those of other
/// threads do, so that tests beside this one are not touched.
pub(crate) struct Hushed {
    before: bool,
    // It belongs to the thread that made it.
    _thread: PhantomData<*const ()>,
}

/// Silences this thread's panics: for runs that are expected to fail again as they have before.
pub(crate) fn hush() -> Hushed {
    inherit(true)
}

/// Whether this thread's panics are silent. A thread that is started on behalf of this one [inherits](inherit) it.
pub(crate) fn is_hushed() -> bool {
    HUSHED.try_with(Cell::get).unwrap_or(false)
}

/// As silent as the thread that started this one.
pub(crate) fn inherit(hushed: bool) -> Hushed {
    Hushed { before: HUSHED.replace(hushed), _thread: PhantomData }
}

impl Drop for Hushed {
    fn drop(&mut self) {
        let _ = HUSHED.try_with(|hushed| hushed.set(self.before));
    }
}

/// Adds the hook, once per process.
pub(crate) fn note_places() {
    static ONCE: OnceCell<()> = OnceCell::new();
    ONCE.get_or_init(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if let Some(at) = info.location() {
                let _ = PLACE.try_with(|place| {
                    if let Ok(mut place) = place.try_borrow_mut() {
                        *place = Some(at.to_string());
                    }
                });
            }
            if !is_hushed() {
                before(info);
            }
        }));
    });
}

/// Runs what must not unwind; whether it came to its end. A panic's payload may panic in turn when it is dropped, and
/// that one's payload too: the second is leaked.
pub(crate) fn contain(f: impl FnOnce()) -> bool {
    let Err(payload) = catch_unwind(AssertUnwindSafe(f)) else { return true };
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(another);
    }
    false
}

/// The error for a payload that this thread has just caught. Whoever caught it drops it within [`contain`].
pub(crate) fn error(device: usize, payload: &(dyn Any + Send)) -> Error {
    let message = payload
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a payload that is not text".to_owned());
    let place = PLACE.with(|place| place.borrow_mut().take()).unwrap_or_else(|| "an unknown place".to_owned());
    Error::Panicked { device, message, place }
}
