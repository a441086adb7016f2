//! Messages on their way: requests that were posted together.

use super::super::host::Part;
use super::library::{Handle, Library};
use crate::traits::Tag;
use gpu_pool::{Error, Result};
use std::ffi::c_int;

pub(super) struct Channel {
    pub library: Library,
    /// A communicator of this crate's own: the user's messages and its own never match.
    pub comm: Handle,
    pub tags: Tags,
    /// Bytes of a request, at most. Counts are `int`s.
    pub piece: usize,
}

/// How tags become MPI's tags, which are numbers up to a bound.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tags {
    /// Bits for a collective's number. It wraps: see [`Tag::rail`].
    bits: u32,
}

impl Tags {
    const PHASE: u32 = 4;
    const RAIL: u32 = 6;
    /// Of the number. MPI's standard demands a bound of 15 bits, and libraries have 19 to 31.
    const LEAST: u32 = 8;

    /// `Err` if the library has too few tags.
    pub(super) fn new(upper_bound: c_int) -> Result<Tags> {
        // All numbers of `usable` bits are at most the bound. One bit tells `START` from the others.
        let usable = (i64::from(upper_bound) + 1).checked_ilog2().unwrap_or(0);
        match usable.checked_sub(Self::PHASE + Self::RAIL + 1) {
            Some(bits) if bits >= Self::LEAST => Ok(Tags { bits }),
            _ => Err(cluster_error!("transport", "the MPI library has tags up to {upper_bound}, which are too few")),
        }
    }

    /// The messages before the first collective.
    pub(super) const START: Tag = Tag { number: u64::MAX, phase: 0, rail: 0 };

    pub(super) fn of(self, tag: Tag) -> c_int {
        debug_assert!(tag.phase < 1 << Self::PHASE && tag.rail < 1 << Self::RAIL);
        if tag == Self::START {
            return 1 << (self.bits + Self::PHASE + Self::RAIL);
        }
        let number = tag.number & ((1 << self.bits) - 1);
        ((((number << Self::PHASE) | u64::from(tag.phase)) << Self::RAIL) | u64::from(tag.rail)) as c_int
    }
}

/// Requests that are under way. Dropped before its end it leaves them to MPI: then the bytes must live for ever.
pub(super) struct Batch {
    /// Requests with the number of bytes that are to be received, in reverse order.
    requests: Vec<(Handle, Option<usize>)>,
}

impl Batch {
    /// Posts all. After an error some may be under way.
    ///
    /// # Safety
    /// The bytes live, and nothing else touches them, until [`poll`](Self::poll) has returned `Ok(true)`.
    pub(super) unsafe fn post(channel: &Channel, parts: &[Part]) -> Result<Batch> {
        let Channel { library: Library { f, constants, .. }, comm, tags, piece } = channel;
        let mut requests = Vec::with_capacity(parts.len());
        for part in parts {
            let len = match part {
                Part::Send { len, .. } | Part::Receive { len, .. } => *len,
            };
            // An empty message is one piece, too.
            for at in (0..len.max(1)).step_by(*piece) {
                let n = (len - at).min(*piece);
                let (mut request, count, byte) = (0, n as c_int, constants.byte);
                // SAFETY: the bytes are those of the caller's promise, and `n` fits an `int`, since `piece` does.
                let (op, code) = unsafe {
                    match *part {
                        Part::Send { to, tag, at: from, .. } => {
                            let (bytes, to, tag) = (from.add(at).cast(), to as c_int, tags.of(tag));
                            ("MPI_Isend", (f.isend)(bytes, count, byte, to, tag, *comm, &mut request))
                        }
                        Part::Receive { from, tag, at: into, .. } => {
                            let (bytes, from, tag) = (into.add(at).cast(), from as c_int, tags.of(tag));
                            ("MPI_Irecv", (f.irecv)(bytes, count, byte, from, tag, *comm, &mut request))
                        }
                    }
                };
                channel.library.check(op, code)?;
                requests.push((request, matches!(part, Part::Receive { .. }).then_some(n)));
            }
        }
        requests.reverse();
        Ok(Batch { requests })
    }

    pub(super) fn poll(&mut self, channel: &Channel, progress: &mut bool) -> Result<bool> {
        let Channel { library: Library { f, constants, .. }, .. } = channel;
        while let Some((request, expected)) = self.requests.last_mut() {
            let (mut done, mut status) = (0, [0u64; 16] as super::library::Status);
            // SAFETY: the request was posted and is not done; there is room for a status.
            let code = unsafe { (f.test)(request, &mut done, status.as_mut_ptr().cast()) };
            channel.library.check("MPI_Test", code)?;
            if done == 0 {
                return Ok(false);
            }
            *progress = true;
            if let Some(expected) = *expected {
                let mut got = 0;
                // SAFETY: the status of a receive that is done.
                let code = unsafe { (f.get_count)(status.as_ptr().cast(), constants.byte, &mut got) };
                channel.library.check("MPI_Get_count", code)?;
                if usize::try_from(got) != Ok(expected) {
                    let why = format!("a message has {got} bytes where {expected} are expected");
                    return Err(Error::Transport { library: "mpi", op: "receive", code: 0, why });
                }
            }
            self.requests.pop();
        }
        Ok(true)
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/transport/mpi/batch_tests.rs"]
mod tests;
