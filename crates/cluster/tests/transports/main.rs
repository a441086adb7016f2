//! What every `HostTransport` must do. Each transport that is there runs all cases.
//!
//! A case is a function that all processes call. Shared memory runs them between threads, one for each process, and
//! between processes; MPI between processes under `mpirun`. Processes are this test binary, started again with
//! `GPU_POOL_TEST_TRANSPORT`.
//!
//! Ported: mpi4py's `test_msgzero`, `test_cco_vec` and `test_threads`, MPI.jl's `test_alltoallv`, `test_largecount` and
//! `test_threads`, and the data check of nccl-tests (each byte of each message is compared).

#![cfg(target_os = "linux")]

mod cases;
#[cfg(feature = "mpi")]
mod devices;
mod processes;
mod random;
mod speed;
#[path = "../../../lab/tests/unit/texts.rs"]
#[allow(dead_code, reason = "no text is parsed here")]
mod texts;

use gpu_pool::{Error, GpuPool, PinnedBuffer};
use gpu_pool_cluster::extend::{HostTransport, Message, Tag};
use std::{sync::Arc, time::Instant};

/// A process of a case.
struct Place<'a> {
    transport: &'a dyn HostTransport,
    pool: &'a GpuPool,
    rank: usize,
    size: usize,
    /// The limit of a piece or a ring: messages are shorter, equal and longer.
    edge: usize,
}

/// What a message has beyond its bytes.
const CANARY: u8 = 0xc5;

fn tag(number: u64, phase: u32, rail: u32) -> Tag {
    Tag { number, phase, rail }
}

/// A byte that tells its message and its place.
fn byte(from: usize, to: usize, tag: Tag, i: usize) -> u8 {
    let message = from * 31 + to * 17 + tag.number as usize * 7 + tag.phase as usize * 5 + tag.rail as usize * 3;
    (message + i + i / 255 * 13) as u8
}

impl Place<'_> {
    fn buffer(&self, len: usize) -> PinnedBuffer<u8> {
        self.pool.pinned::<u8>(len).unwrap()
    }

    /// A message of `len` bytes from this process; they lie between others.
    fn send(&self, to: usize, tag: Tag, len: usize) -> Message {
        let mut bytes = self.buffer(len + 9);
        let all = bytes.as_mut_slice().unwrap();
        all.fill(CANARY);
        all[4..4 + len].iter_mut().enumerate().for_each(|(i, b)| *b = byte(self.rank, to, tag, i));
        Message::Send { to, tag, bytes: Arc::new(bytes), range: 4..4 + len }
    }

    fn receive(&self, from: usize, tag: Tag, len: usize) -> Message {
        let mut into = self.buffer(len + 5);
        into.as_mut_slice().unwrap().fill(CANARY);
        Message::Receive { from, tag, into, len }
    }

    /// Carries the messages out and compares all that came.
    fn exchange(&self, messages: Vec<Message>) {
        let start = Instant::now();
        let late = || {
            let why = format!("host {}: a minute without an end", self.rank);
            (start.elapsed().as_secs() > 60).then(|| Error::Cluster { op: "test", why })
        };
        let asked: Vec<_> = messages.iter().map(summary).collect();
        let done = self.transport.exchange(messages, &late).unwrap();
        assert_eq!(done.iter().map(summary).collect::<Vec<_>>(), asked, "the messages come back in their order");
        done.iter().for_each(|message| self.check(message));
    }

    fn check(&self, message: &Message) {
        let Message::Receive { from, tag, into, len } = message else { return };
        let got = into.as_slice().unwrap();
        let wrong = (0..*len).find(|&i| got[i] != byte(*from, self.rank, *tag, i));
        assert_eq!(wrong, None, "{len} bytes from {from} to {}, {tag:?}: the first wrong one", self.rank);
        assert!(got[*len..].iter().all(|&b| b == CANARY), "bytes behind a message of {len} were written");
    }

    /// All send one byte to all: none is behind by more than one of these.
    fn meet(&self, number: u64) {
        let hosts = || 0..self.size;
        let tag = tag(number, 15, 63);
        let sends = hosts().map(|to| self.send(to, tag, 1));
        self.exchange(sends.chain(hosts().map(|from| self.receive(from, tag, 1))).collect());
    }
}

fn summary(message: &Message) -> (bool, usize, Tag, usize) {
    match message {
        Message::Send { to, tag, range, .. } => (true, *to, *tag, range.len()),
        Message::Receive { from, tag, len, .. } => (false, *from, *tag, *len),
    }
}
