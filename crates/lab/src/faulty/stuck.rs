//! Operations that do not complete until they are released.
//!
//! A stream waits for a word in page-locked memory or a blocking host function. No thread spins, no driver call hangs.

use super::plan::Release;
use gpu_pool::extend::driver::{DriverRef, DriverResult, RawEvent, RawStream};
use parking_lot::{Condvar, Mutex};
use std::{sync::Arc, time::Duration};

/// How long the drop waits for a released stream before it leaks the word's memory.
const FAREWELL: Duration = Duration::from_secs(1);

pub(super) struct Stuck {
    inner: DriverRef,
    held: Mutex<Held>,
    /// For blocking host functions: the last round that is released.
    gate: Arc<(Mutex<u64>, Condvar)>,
}

#[derive(Default)]
struct Held {
    released: u64,
    word: Option<Word>,
    waits: Vec<RawEvent>,
}

#[derive(Clone, Copy)]
struct Word {
    address: u64,
    writer: RawStream,
}

impl Stuck {
    pub fn new(inner: &DriverRef) -> Self {
        Stuck { inner: inner.clone(), held: Mutex::default(), gate: Arc::default() }
    }

    pub fn hold(&self, stream: RawStream) -> DriverResult {
        let mut held = self.held.lock();
        let round = held.released + 1;
        if !self.inner.info().stream_values {
            let gate = self.gate.clone();
            let wait = move || {
                let (released, changed) = &*gate;
                changed.wait_while(&mut released.lock(), |released| *released < round);
            };
            return self.inner.launch_host(stream, Box::new(wait));
        }
        let word = match held.word {
            Some(word) => word,
            None => *held.word.insert(self.word()?),
        };
        let event = self.inner.event_create(false)?;
        // SAFETY: the word is live until the wait has passed (see the drop), and aligned, as all allocations are.
        let waits = unsafe { self.inner.wait_value(word.address, round, stream) };
        let recorded = waits.and_then(|()| self.inner.event_record(event, stream));
        held.waits.push(event);
        recorded
    }

    fn word(&self) -> DriverResult<Word> {
        let address = self.inner.host_alloc(8)? as u64;
        let writer = self.inner.stream_create(0).inspect_err(|_| {
            // SAFETY: just allocated, and no operation uses it.
            let _ = unsafe { self.inner.host_free(address as *mut u8) };
        })?;
        Ok(Word { address, writer })
    }
}

impl Release for Stuck {
    fn release(&self) {
        let mut held = self.held.lock();
        held.released += 1;
        let (released, changed) = &*self.gate;
        *released.lock() = held.released;
        changed.notify_all();
        if let Some(word) = held.word {
            // SAFETY: the word is live and aligned; only its waits and this write use it. A really lost device has
            // dropped its waits.
            let _ = unsafe { self.inner.write_value(word.address, held.released, word.writer) };
        }
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        self.release();
        let held = self.held.get_mut();
        let Some(word) = held.word.take() else { return };
        let mut over = self.inner.stream_wait_idle(word.writer, FAREWELL).unwrap_or(true);
        for event in held.waits.drain(..) {
            over &= self.inner.event_wait(event, FAREWELL).unwrap_or(true);
            // SAFETY: an event of this device that no other code uses.
            let _ = unsafe { self.inner.event_destroy(event) };
        }
        // SAFETY: a stream of this device that no other code uses.
        let _ = unsafe { self.inner.stream_destroy(word.writer) };
        if over {
            // SAFETY: every wait for the word and its last write have completed.
            let _ = unsafe { self.inner.host_free(word.address as *mut u8) };
        }
    }
}
