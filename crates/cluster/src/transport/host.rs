//! The common part of the transports of the hosts' memory: messages as bytes at addresses, and waiting.
//!
//! Invariant: the memory of a message is at rest when a call returns `Ok`. After an error it is never freed, since a
//! library, or a thread of another call, may still use it.

use crate::traits::{Message, Tag};
use gpu_pool::{Error, Result, event};
use std::{
    hint, thread,
    time::{Duration, Instant},
};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    Send { to: usize, tag: Tag, at: *const u8, len: usize },
    Receive { from: usize, tag: Tag, at: *mut u8, len: usize },
}

// SAFETY: an address. Whoever uses it keeps the promise of `Part`'s maker that the bytes live and are the call's own.
unsafe impl Send for Part {}
// SAFETY: as above.
unsafe impl Sync for Part {}

/// The messages as bytes, after devices have finished with them. The bytes live as long as the messages do, which stay
/// where they are: a `PinnedBuffer` has its memory elsewhere.
fn parts(library: &'static str, hosts: usize, messages: &mut [Message]) -> Result<Vec<Part>> {
    let wrong = |why: String| Error::Transport { library, op: "exchange", code: 0, why };
    let known = |host: usize| match host < hosts {
        true => Ok(host),
        false => Err(wrong(format!("there is no host {host}; there are {hosts}"))),
    };
    let part = |message: &mut Message| match message {
        Message::Send { to, tag, bytes, range } => {
            let bytes = bytes.as_slice()?;
            let all = bytes.len();
            let part = bytes.get(range.clone()).ok_or_else(|| wrong(format!("{range:?} of {all} bytes are sent")))?;
            Ok(Part::Send { to: known(*to)?, tag: *tag, at: part.as_ptr(), len: part.len() })
        }
        Message::Receive { from, tag, into, len } => {
            let bytes = into.as_mut_slice()?;
            let all = bytes.len();
            let part = bytes.get_mut(..*len).ok_or_else(|| wrong(format!("{len} bytes are received in {all}")))?;
            Ok(Part::Receive { from: known(*from)?, tag: *tag, at: part.as_mut_ptr(), len: part.len() })
        }
    };
    messages.iter_mut().map(part).collect()
}

/// [`exchange`](crate::traits::HostTransport::exchange), by `carry`, which takes the messages as bytes.
pub(super) fn exchange(
    (library, hosts): (&'static str, usize),
    mut messages: Vec<Message>,
    carry: impl FnOnce(Vec<Part>) -> Result<()>,
) -> Result<Vec<Message>> {
    match carry(parts(library, hosts, &mut messages)?) {
        Ok(()) => Ok(messages),
        Err(error) => Err(leak(messages, error)),
    }
}

/// Keeps the messages' memory for ever, and passes the error on.
pub(super) fn leak<T>(messages: T, error: Error) -> Error {
    std::mem::forget(messages);
    event!(warn, "messages_kept", "the memory of unfinished messages is kept: {error}");
    error
}

/// How long a wait that makes no progress pauses. First it spins, then it yields, then it sleeps.
pub(super) struct Backoff {
    rounds: u32,
    since: Option<Instant>,
    asked: Instant,
}

impl Backoff {
    /// Some microseconds: with more processes than cores, a spinning one keeps the core from the one that it waits for.
    /// A yield costs as much on a busy machine.
    const SPINS: u32 = 128;
    /// Time of yielding. A committed collective's messages come sooner, unless a process has no core, or is dead.
    const YIELDS: Duration = Duration::from_millis(10);
    const SLEEP: Duration = Duration::from_micros(50);
    /// How often a wait asks whether a process is lost.
    const ASK: Duration = Duration::from_millis(1);

    pub(super) fn new() -> Self {
        Backoff { rounds: 0, since: None, asked: Instant::now() }
    }

    pub(super) fn reset(&mut self) {
        (self.rounds, self.since) = (0, None);
    }

    /// Pauses. Returns an error of `lost`, which it asks every millisecond.
    pub(super) fn pause(&mut self, lost: &dyn Fn() -> Option<Error>) -> Result<()> {
        self.rounds = self.rounds.saturating_add(1);
        if self.rounds < Self::SPINS {
            hint::spin_loop();
            return Ok(());
        }
        let now = Instant::now();
        if now - *self.since.get_or_insert(now) < Self::YIELDS {
            thread::yield_now();
        } else {
            thread::sleep(Self::SLEEP);
        }
        if now - self.asked < Self::ASK {
            return Ok(());
        }
        self.asked = now;
        lost().map_or(Ok(()), Err)
    }
}
