//! The last uses of a block, and what a new use has to wait for.
//!
//! Rust's borrows order the *calls*; the work runs later, on streams of several devices: an `Arc<DeviceBuffer>` may be
//! read on device 1, dropped there, unwrapped and written on device 0. So each use is noted with its stream, number and
//! byte range. A new use conflicts with an old one if the ranges overlap, one writes, and the streams differ; then its
//! stream waits first. Freed memory keeps its uses: reuse is one more conflicting use (cf. pytorch#196257).

mod history;
mod lending;
mod reserved;

pub(crate) use history::{History, Tenants};
pub use lending::Lending;
pub(crate) use reserved::{Reserved, UsesOf};

use super::{DeviceHandle, StreamCore};
use crate::{
    driver::{FailPoint, observe::Token},
    error::{Error, Result, Site, op_site::OpSite},
};
use history::{Past, merge};
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc, time::Duration};

/// How an operation touches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The operation only reads.
    Read,
    /// The operation writes, and may read.
    Write,
}

struct Use {
    stream: Arc<StreamCore>,
    sequence: u64,
    bytes: Range<usize>,
    access: Access,
    /// The call that has opened it, if foreign code has the memory.
    opened: Option<Site>,
}

/// A use that its device is about to submit: see [`Reserved`].
struct Reservation {
    by: usize,
    call: OpSite,
    bytes: Range<usize>,
    access: Access,
}

type Uses = SmallVec<[Use; 2]>;

/// Above this many uses, the uses of one stream and access are merged into one that covers them all.
const MERGE_ABOVE: usize = 24;

/// Open uses have this number, or larger ones: no stream ever completes them. The scope's end ends those that were
/// not closed ([`StreamCore::open_number`]).
pub(crate) const OPEN: u64 = 1 << 63;

#[derive(Default)]
pub(crate) struct Hazards(Mutex<History>);

impl Hazards {
    pub(crate) fn with(history: History) -> Self {
        Hazards(Mutex::new(history))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, History> {
        self.0.lock()
    }

    /// After [`order`](History::order).
    pub(crate) fn note(&self, stream: &Arc<StreamCore>, sequence: u64, bytes: Range<usize>, access: Access) {
        let mut history = self.0.lock();
        let Past { uses, known, devices, .. } = history.past();
        if stream.handle.stepped {
            *devices |= bit(stream.handle.device);
        }
        uses.retain(|old| {
            let covered = bytes.start <= old.bytes.start && old.bytes.end <= bytes.end;
            // A write replaces all uses in its range that it comes after: those it has waited for. A use in between
            // stays (a graph may write memory that cudarc has borrowed). A read replaces older reads of its stream.
            let implied = covered
                && old.sequence < OPEN
                && match access {
                    Access::Write => stream.comes_after(&old.stream, old.sequence),
                    Access::Read => old.access == Access::Read && old.stream.id == stream.id,
                };
            // When stepped, nothing may depend on which operations happen to be over.
            let completed = !implied && !old.stream.handle.stepped && old.stream.is_over(old.sequence);
            if completed {
                Token::add(known, old.stream.known_over());
            }
            !implied && !completed
        });
        if uses.len() >= MERGE_ABOVE {
            merge(uses);
        }
        uses.push(Use { stream: stream.clone(), sequence, bytes, access, opened: None });
    }

    /// A use that lasts until [`close`](Self::close), by foreign code. Until then every conflicting use waits for all
    /// that the stream has by then. If never closed, it is over when the scope has ended. `site`: the program's call.
    #[cfg(feature = "cuda")]
    pub(crate) fn open(&self, stream: &Arc<StreamCore>, bytes: Range<usize>, access: Access, site: Site) {
        let (stream, sequence, opened) = (stream.clone(), stream.open_number(), Some(site));
        self.0.lock().past().uses.push(Use { stream, sequence, bytes, access, opened });
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn close(&self, stream: &Arc<StreamCore>, sequence: u64, bytes: Range<usize>, access: Access) {
        // Noted before the open use is removed: at no time does another thread see neither.
        self.note(stream, sequence, bytes.clone(), access);
        let mut history = self.0.lock();
        let uses = &mut history.past().uses;
        let open = |u: &Use| u.sequence >= OPEN && u.stream.id == stream.id && u.bytes == bytes && u.access == access;
        if let Some(at) = uses.iter().position(open) {
            uses.swap_remove(at);
        }
    }

    /// Whether another process has the memory, so that this one may not access it so.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_lent(&self, access: Access) -> bool {
        self.0.lock().lending().is_some_and(|lending| lending.refuses(access))
    }

    /// The host thread waits for every use that conflicts with a host access. Others may use the block meanwhile.
    pub(crate) fn wait_host(
        &self,
        handle: &DeviceHandle,
        op: &'static str,
        access: Access,
        limit: Duration,
    ) -> Result<()> {
        let history = self.0.lock();
        handle.acquire(history.known());
        let conflicting = history.uses().iter().filter(|last| last.conflicts(&(0..usize::MAX), access));
        let waits: SmallVec<[_; 4]> = conflicting.map(|last| (last.stream.clone(), last.sequence)).collect();
        drop(history);
        for (stream, sequence) in &waits {
            stream.wait_host(op, *sequence, limit)?;
        }
        if !waits.is_empty() {
            let mut history = self.0.lock();
            let past = history.past();
            past.uses.retain(|last| match last.stream.handle.stepped {
                true => {
                    !waits.iter().any(|(stream, sequence)| stream.id == last.stream.id && last.sequence <= *sequence)
                }
                false => !last.stream.has_completed(last.sequence),
            });
            Token::add(&mut past.known, handle.release());
        }
        Ok(())
    }

    /// When stepped: forgets which devices have used the block.
    pub(crate) fn begin(&self) {
        if let Some(past) = &mut self.0.lock().0 {
            past.devices = 0;
        }
    }

    /// When stepped: whether a device other than `own` has used the block since [`begin`](Self::begin).
    pub(crate) fn was_used_by_peer(&self, own: usize) -> bool {
        self.0.lock().0.as_ref().is_some_and(|past| past.devices & !bit(own) != 0)
    }

    /// Whether a host access would have to wait, as far as it is known without a driver call.
    pub(crate) fn in_flight(&self) -> bool {
        self.0.lock().uses().iter().any(|last| !last.stream.has_completed(last.sequence))
    }

    #[inline]
    pub(crate) fn history(&mut self) -> &mut History {
        self.0.get_mut()
    }

    pub(crate) fn take(&mut self) -> History {
        std::mem::take(self.0.get_mut())
    }

    /// With a checker: adds the calling thread's knowledge to a block that the thread frees.
    pub(crate) fn remember(&mut self, handle: &DeviceHandle) {
        let token = handle.release();
        if token.is_some() {
            Token::add(&mut self.history().past().known, token);
        }
    }
}

impl History {
    /// For a launch of a graph, which no borrow keeps from memory that foreign code has on another stream.
    pub(crate) fn order_launch(
        &self,
        op: &'static str,
        stream: &StreamCore,
        bytes: &Range<usize>,
        access: Access,
    ) -> Result<()> {
        let lent = |last: &&Use| last.stream.id != stream.id && last.conflicts(bytes, access);
        for last in self.uses().iter().filter(lent) {
            if let Some(site) = last.opened.filter(|_| !last.stream.is_over(last.sequence)) {
                let op_of = if last.access == Access::Write { "write" } else { "read" };
                return Err(Error::borrowed_by(op, last.stream.handle.device, OpSite { op: op_of, site }));
            }
        }
        self.order(op, stream, bytes, access)
    }

    /// Makes `stream` wait, on the device, for every use that conflicts with touching `bytes`.
    #[track_caller]
    pub(crate) fn order(
        &self,
        op: &'static str,
        stream: &StreamCore,
        bytes: &Range<usize>,
        access: Access,
    ) -> Result<()> {
        if self.lending().is_some_and(|lending| lending.refuses(access)) {
            return Err(Error::borrowed(op, stream.handle.device));
        }
        let by = stream.handle.device;
        let reserved = |other: &&Reservation| other.by != by && conflict(other.access, &other.bytes, access, bytes);
        if let Some(other) = self.reservations().iter().find(reserved) {
            return Err(Error::borrowed_by(op, other.by, other.call));
        }
        stream.handle.acquire(self.known());
        for last in self.uses() {
            if last.conflicts(bytes, access) && !stream.handle.injected(FailPoint::OrderDropped) {
                stream.wait_for(op, &last.stream, last.sequence)?;
            }
        }
        Ok(())
    }
}

fn bit(device: usize) -> u64 {
    1 << (device % 64)
}

impl Use {
    fn is_over_for(&self, stream: Option<&StreamCore>) -> bool {
        stream.is_some_and(|stream| stream.comes_after(&self.stream, self.sequence))
            || !self.stream.handle.stepped && self.stream.is_over(self.sequence)
    }

    fn conflicts(&self, bytes: &Range<usize>, access: Access) -> bool {
        conflict(self.access, &self.bytes, access, bytes)
    }
}

fn conflict(one: Access, first: &Range<usize>, other: Access, second: &Range<usize>) -> bool {
    (one == Access::Write || other == Access::Write) && first.start < second.end && second.start < first.end
}

#[cfg(all(test, feature = "cuda"))]
#[path = "../../tests/unit/memory/hazard_tests.rs"]
mod tests;
