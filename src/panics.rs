//! The source location of panics in device closures.
//!
//! `catch_unwind` returns the payload but not the location (pytorch#18055). So a hook, which runs before the user's,
//! stores both in a thread-local. It changes nothing else, unless the thread has [silenced panics](silence_panics).
//!
//! `resume_unwind` calls no hook, and a closure may have caught other panics before. So a payload gets the location of
//! the panic that created it: its text must be equal and at the same address. Two payloads of one type that are not
//! text cannot be distinguished.

use crate::{
    contain::{discard, payload_text},
    error::{Error, Result},
};
use once_cell::sync::OnceCell;
use std::any::{Any, TypeId};
use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::{io, marker::PhantomData, thread};

/// The text for an unknown location.
pub(crate) const UNKNOWN: &str = "an unknown place";

/// Number of last panics that are stored per thread: a closure may catch some before it passes one on.
const REMEMBERED: usize = 8;

thread_local! {
    static NOTED: RefCell<Vec<Noted>> = const { RefCell::new(Vec::new()) };
    static SILENCED: Cell<bool> = const { Cell::new(false) };
}

/// Until it is dropped, panics of this thread, and of the threads of pools that it builds, print nothing. Panics of
/// other threads do, so that concurrent tests are not affected.
pub struct SilencedPanics {
    before: bool,
    // The guard must stay on its thread.
    _thread: PhantomData<*const ()>,
}

/// Silences this thread's panics, for runs that repeat a known failure.
pub fn silence_panics() -> SilencedPanics {
    inherit(true)
}

/// Whether this thread's panics are silent. A thread that works for this one [inherits](inherit) the setting.
pub(crate) fn is_silenced() -> bool {
    SILENCED.try_with(Cell::get).unwrap_or(false)
}

pub(crate) fn inherit(silenced: bool) -> SilencedPanics {
    SilencedPanics { before: SILENCED.replace(silenced), _thread: PhantomData }
}

impl Drop for SilencedPanics {
    fn drop(&mut self) {
        let _ = SILENCED.try_with(|silenced| silenced.set(self.before));
    }
}

struct Noted {
    of: Payload,
    place: String,
}

/// The identity of a payload: its type, and a text's address and content. A text is not copied between hook and catch.
#[derive(PartialEq, Eq)]
struct Payload(TypeId, Option<(usize, String)>);

impl Payload {
    fn of(payload: &(dyn Any + Send)) -> Self {
        Payload(payload.type_id(), payload_text(payload).map(|text| (text.as_ptr().addr(), text.to_owned())))
    }
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

pub(crate) fn note_places() {
    static ONCE: OnceCell<()> = OnceCell::new();
    let add = || {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            note(info);
            if !is_silenced() {
                before(info);
            }
        }));
    };
    // A panicking thread must not change the hook (std would panic, which aborts the process), so another thread does
    // it. No thread waits for it: if a hook has called this, the change waits until that hook has returned.
    let _ = ONCE.get_or_try_init(|| {
        if thread::panicking() {
            return thread::Builder::new().name("gpu-pool:hook".to_owned()).spawn(add).map(drop);
        }
        add();
        Ok::<_, io::Error>(())
    });
}

/// Runs a part of a device thread's work, and turns a panic into an error. The payload is dropped here, before the
/// error is returned, since its drop is user code.
pub(crate) fn catch<R>(device: usize, f: impl FnOnce() -> R) -> Result<R> {
    NOTED.with_borrow_mut(Vec::clear);
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        let of = Payload::of(&*payload);
        let noted = NOTED.take();
        let place = noted.into_iter().rev().find(|noted| noted.of == of).map(|noted| noted.place);
        error(device, payload, place)
    })
}

/// The error for a panic. Its place is lost together with the thread that it has ended.
pub(crate) fn error(device: usize, payload: Box<dyn Any + Send>, place: Option<String>) -> Error {
    let message = payload_text(&*payload).unwrap_or("a payload that is not text").to_owned();
    discard(payload);
    Error::Panicked { device, message, place: place.unwrap_or_else(|| UNKNOWN.to_owned()) }
}
