//! Bytes between processes of one host through shared memory: for software GPUs, where MPI is not there.
//!
//! ```text
//!   thread: exchange()                                              thread: exchange()
//!     Send ---> [outbox of the peer] ---> ring of bytes ---> [inbox of the peer] ---> Receive
//!                 process a              in b's memory               process b
//! ```
//!
//! Each ordered pair of processes has one ring. A message is a header and its bytes. A thread that waits in
//! [`exchange`](HostTransport::exchange) carries bytes for all: it fills rings from the outboxes, and empties rings
//! into memory. There is no thread of the transport's own. A message that comes before its `Receive` is kept in memory
//! of the heap, so messages may come in any order and no two calls wait for each other's turn. Called by `cluster`,
//! which brings the processes together by a pair of closures. Linux only: `memfd` and its seals.
//!
//! Invariants: a ring has one writer and one reader, which a lock gives to one thread at a time. A message's memory is
//! kept for ever when its call ends early, so a thread that carries bytes may finish.

mod inbox;
mod memory;
mod outbox;

pub(crate) use self::memory::{Shared, pass_on};
use self::{inbox::Inbox, outbox::Outbox};
use super::host::{Backoff, Part, exchange};
use crate::runtime::sync::{
    Sequence,
    byte_ring::{Mapped, Reader, Writer},
};
use crate::traits::{CommonMemory, HostTransport, Message, Tag};
use gpu_pool::{Error, Result, event};
use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// Bytes of a ring: some pieces that are published at once, and few enough for a core's cache.
pub const RING: usize = 256 << 10;

/// After so many bytes a thread looks whether its own messages are done: others' may never end.
const BUDGET: usize = 4 * RING;

/// Bytes of a process's part of the [common memory](CommonMemory). Those that were never taken are addresses only.
const PART: usize = 64 << 30;

/// The processes of one host, connected by shared memory.
pub struct Shm {
    rank: usize,
    peers: Vec<Peer>,
    /// Rings to this process, and its part of the common memory.
    own: Arc<Shared>,
    /// Where that part begins.
    part: usize,
    free: Mutex<Free>,
}

/// Bytes of the own part: those from `next` were never taken; others by the power of two that they have.
#[derive(Default)]
struct Free {
    next: usize,
    given: BTreeMap<usize, Vec<u64>>,
    /// Given, but other processes may be at them.
    resting: Vec<(usize, u64, Done)>,
}

type Done = Box<dyn Fn() -> bool + Send>;

/// The outbox and the inbox of a process. For this process itself both are without a ring.
struct Peer {
    outbox: Mutex<Outbox>,
    inbox: Mutex<Inbox>,
    theirs: Option<Shared>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Header {
    tag: Tag,
    len: u64,
}

impl Header {
    const BYTES: usize = size_of::<Header>();

    fn new(tag: Tag, len: usize) -> Header {
        Header { tag, len: len as u64 }
    }

    fn len(&self) -> usize {
        self.len as usize
    }
}

/// How many messages of a call are done, with the first failure.
#[derive(Default)]
struct Call {
    done: Sequence,
    failed: Mutex<Option<Error>>,
}

impl Call {
    fn finish(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.failed.lock().get_or_insert(error);
        }
        self.done.fetch_advance();
    }
}

fn failure(op: &'static str, why: impl Into<String>) -> Error {
    Error::Transport { library: "shm", op, code: 0, why: why.into() }
}

impl Shm {
    /// Connects `size` processes of one host, of one user. All call it at about the same time. `set` and `get` are the
    /// cluster's table: `get` waits until a process has set the key. `lost` says why others will not come. `name` is
    /// one of this call in that table. `ring`: the bytes of a ring. Errors: [`Error::HostTimeout`] when a process has
    /// not come by the deadline; [`Error::Transport`] if it is another user's; `set`'s, `get`'s and `lost`'s.
    pub fn connect(
        ring: usize,
        name: &str,
        (rank, size): (usize, usize),
        set: impl Fn(&str, &[u8]) -> Result<()>,
        get: impl Fn(&str) -> Result<Vec<u8>>,
        lost: &dyn Fn() -> Option<Error>,
        deadline: Duration,
    ) -> Result<Shm> {
        let stride = Mapped::size(ring);
        let part = (stride * size).next_multiple_of(PAGE);
        let own = Arc::new(Shared::new(part + PART)?);
        let (entry, hosts) = (|rank: usize| format!("shm/{name}/{rank}"), (0..size).collect::<Vec<_>>());
        let (tell, ask) = (|own: &[u8]| set(&entry(rank), own), |peer| get(&entry(peer)));
        let theirs = own.map_theirs(pass_on(own.descriptor(), (rank, &hosts), &tell, &ask, lost, deadline)?)?;
        let mut peers = Vec::with_capacity(size);
        for (peer, theirs) in theirs.into_iter().enumerate() {
            // SAFETY: each ring has its place in the memory of its reader, by the number of its writer. `map_theirs`
            // has checked the size. Mappings begin with a page, and live as long as this object's peers. There is one
            // writer and one reader: these.
            let (to, from) = unsafe {
                let to = theirs.as_ref().map(|theirs| Mapped::new(theirs.at().add(stride * rank), ring));
                (to, (peer != rank).then(|| Mapped::new(own.at().add(stride * peer), ring)))
            };
            peers.push(Peer {
                outbox: Mutex::new(Outbox::new(to.map(Writer::new))),
                inbox: Mutex::new(Inbox::new(peer, from.map(Reader::new))),
                theirs,
            });
        }
        event!(debug, "shm_opened", rank, size, "shared memory between processes");
        Ok(Shm { rank, peers, own, part, free: Mutex::default() })
    }

    /// Posts all, then carries bytes until all are done.
    ///
    /// # Safety
    /// The bytes live, and nothing else touches them, until the call returns. After an error they live for ever.
    unsafe fn exchange_parts(&self, parts: &[Part], lost: &dyn Fn() -> Option<Error>) -> Result<()> {
        let call = Arc::new(Call::default());
        for part in parts {
            match *part {
                Part::Receive { from, tag, at, len } => {
                    // SAFETY: the caller's promise.
                    unsafe { self.peers[from].inbox.lock().post(tag, at, len, &call) };
                }
                Part::Send { to, tag, at, len } if to == self.rank => {
                    // SAFETY: the caller's promise.
                    let outcome = unsafe { self.peers[to].inbox.lock().deliver(Header::new(tag, len), at) };
                    call.finish(outcome);
                }
                // SAFETY: the caller's promise.
                Part::Send { to, tag, at, len } => unsafe {
                    self.peers[to].outbox.lock().post(Header::new(tag, len), at, &call);
                },
            }
        }
        let mut backoff = Backoff::new();
        while call.done.get() < parts.len() as u64 {
            if self.carry() {
                backoff.reset();
            } else {
                backoff.pause(lost)?;
            }
        }
        let failed = call.failed.lock().take();
        failed.map_or(Ok(()), Err)
    }

    fn carry(&self) -> bool {
        let mut progress = false;
        for peer in &self.peers {
            // Who holds a lock does the work.
            if let Some(mut outbox) = peer.outbox.try_lock() {
                progress |= outbox.carry();
            }
            if let Some(mut inbox) = peer.inbox.try_lock() {
                progress |= inbox.carry();
            }
        }
        progress
    }
}

impl HostTransport for Shm {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn exchange(&self, messages: Vec<Message>, lost: &dyn Fn() -> Option<Error>) -> Result<Vec<Message>> {
        // SAFETY: the messages own their bytes, and are kept for ever after an error.
        exchange(("shm", self.peers.len()), messages, |parts| unsafe { self.exchange_parts(&parts, lost) })
    }

    fn common_memory(self: Arc<Self>) -> Option<Arc<dyn CommonMemory>> {
        Some(self)
    }
}

/// The least bytes that are taken.
const PAGE: usize = 4096;

impl CommonMemory for Shm {
    fn take(&self, bytes: usize) -> Result<u64> {
        let none =
            || Error::Transport { library: "shm", op: "take", code: 12, why: format!("{bytes} bytes are too many") };
        let size = bytes.max(PAGE).checked_next_power_of_two().ok_or_else(none)?;
        let mut free = self.free.lock();
        let Free { given, resting, .. } = &mut *free;
        let done = resting.extract_if(.., |(_, _, done)| done());
        done.for_each(|(size, at, _)| given.entry(size).or_default().push(at));
        if let Some(at) = free.given.get_mut(&size).and_then(Vec::pop) {
            return Ok(at);
        }
        let at = free.next;
        free.next = at.checked_add(size).filter(|end| *end <= PART).ok_or_else(none)?;
        Ok(at as u64)
    }

    fn give(&self, at: u64, bytes: usize, done: Done) {
        self.free.lock().resting.push((bytes.max(PAGE).next_power_of_two(), at, done));
    }

    fn address(&self, host: usize, at: u64, bytes: usize) -> Result<*mut u8> {
        let of = self.peers.get(host).map(|peer| peer.theirs.as_ref().unwrap_or(&self.own));
        let at = usize::try_from(at).ok().filter(|at| at.checked_add(bytes).is_some_and(|end| end <= PART));
        let (of, at) = of.zip(at).ok_or_else(|| failure("map", format!("host {host} has told of no memory")))?;
        Ok(of.at().wrapping_add(self.part + at))
    }

    fn wait(&self, done: &dyn Fn() -> bool, lost: &dyn Fn() -> Option<Error>) -> Result<()> {
        let mut backoff = Backoff::new();
        while !done() {
            backoff.pause(lost)?;
        }
        Ok(())
    }
}

debug_as!(Shm, |self| rank = self.rank, size = self.peers.len(), ..);
