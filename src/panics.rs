//! Where a device closure panicked.
//!
//! `catch_unwind` yields the payload but not the place, and a panic without its place is a complaint of its own
//! (pytorch#18055). A hook that runs before the user's hook notes place and payload in a thread-local. It changes
//! nothing else, unless the thread [asked for silence](hush): then the user's hook is not called.
//!
//! `resume_unwind` calls no hook, and a closure may have caught other panics before. So a payload gets the place of the
//! panic that it came with: the text must be the same, at the same address. A payload that was caught and is passed on
//! still has its place; a new one has none. What cannot be told apart: two payloads of one type that are not text, and
//! one literal that is both the text of a panic that was caught and of a payload that was resumed.

use crate::{
    contain::discard,
    error::{Error, Result},
};
use once_cell::sync::OnceCell;
use std::{
    any::{Any, TypeId},
    cell::{Cell, RefCell},
    io,
    marker::PhantomData,
    panic::{self, AssertUnwindSafe, catch_unwind},
    thread,
};

/// The place of a panic of which nothing else is known.
pub(crate) const UNKNOWN: &str = "an unknown place";

/// The last panics of a thread that are remembered: a closure may catch some before it passes one on.
const REMEMBERED: usize = 8;

thread_local! {
    /// The oldest first.
    static NOTED: RefCell<Vec<Noted>> = const { RefCell::new(Vec::new()) };
    static HUSHED: Cell<bool> = const { Cell::new(false) };
}

/// Until it is dropped, panics of this thread, and of the threads of pools that it builds, print nothing. Those of
/// other threads do, so that tests beside this one are not touched.
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

/// A panic that the hook has seen.
struct Noted {
    of: Payload,
    place: String,
}

/// What tells a payload from others: its type, and of a text the address and what it says. The text is not copied
/// between the hook and the catch.
#[derive(PartialEq, Eq)]
struct Payload(TypeId, Option<(usize, String)>);

impl Payload {
    fn of(payload: &(dyn Any + Send)) -> Self {
        Payload(payload.type_id(), text(payload).map(|text| (text.as_ptr().addr(), text.to_owned())))
    }
}

fn text(payload: &(dyn Any + Send)) -> Option<&str> {
    payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str))
}

fn note(info: &panic::PanicHookInfo<'_>) {
    let Some(at) = info.location() else { return };
    let _ = NOTED.try_with(|noted| {
        if let Ok(mut noted) = noted.try_borrow_mut() {
            if noted.len() == REMEMBERED {
                noted.remove(0);
            }
            noted.push(Noted { of: Payload::of(info.payload()), place: at.to_string() });
        }
    });
}

/// Adds the hook, once per process.
pub(crate) fn note_places() {
    static ONCE: OnceCell<()> = OnceCell::new();
    let add = || {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            note(info);
            if !is_hushed() {
                before(info);
            }
        }));
    };
    // A thread that panics may not change the hook (std panics then, which aborts the process): another one does it.
    // Nobody waits for that one: if a hook has called this, the change waits until the hook has returned.
    let _ = ONCE.get_or_try_init(|| {
        if thread::panicking() {
            return thread::Builder::new().name("gpu-pool:hook".to_owned()).spawn(add).map(drop);
        }
        add();
        Ok::<_, io::Error>(())
    });
}

/// Runs a part of what a device thread does: its panic is an error. The payload is dropped here, before anybody hears
/// of the error, since its drop is the user's code.
pub(crate) fn catch<R>(device: usize, f: impl FnOnce() -> R) -> Result<R> {
    // What was noted before is not about this.
    NOTED.with_borrow_mut(Vec::clear);
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        let of = Payload::of(&*payload);
        let noted = NOTED.take();
        let place = noted.into_iter().rev().find(|noted| noted.of == of).map(|noted| noted.place);
        error(device, payload, place)
    })
}

/// The error for the panic that has ended another thread: what that thread had noted of its place is gone.
pub(crate) fn of_thread(device: usize, payload: Box<dyn Any + Send>) -> Error {
    error(device, payload, None)
}

fn error(device: usize, payload: Box<dyn Any + Send>, place: Option<String>) -> Error {
    let message = text(&*payload).unwrap_or("a payload that is not text").to_owned();
    discard(payload);
    Error::Panicked { device, message, place: place.unwrap_or_else(|| UNKNOWN.to_owned()) }
}
