//! The last uses of a block, and what a new use has to wait for.
//!
//! This is what makes safe code unable to write a race. Rust's borrows order the *calls*; the work runs later, on
//! streams of several devices. `Arc<DeviceBuffer>` read on device 1, dropped there, unwrapped and written on device 0 is
//! safe Rust, and only the block itself can know that device 1 may still be reading. So each use is noted with its
//! stream, number and byte range, and a use that conflicts (ranges overlap, one writes, streams differ) first makes its
//! stream wait. Memory that is freed keeps its uses: reuse is one more conflicting use, so stream order across devices
//! needs no further mechanism (cf. pytorch#196257).

use super::{heap::Payload, link::Link};
use crate::{driver::check::Token, error::Result, plant::Bug, stream::StreamCore};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc, time::Duration};

/// How an operation touches memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It only reads.
    Read,
    /// It writes, and may read.
    Write,
}

/// One use that may still be in flight.
struct Use {
    stream: Arc<StreamCore>,
    sequence: u64,
    bytes: Range<usize>,
    access: Access,
}

/// Uses that may still be in flight, in no order.
type Uses = SmallVec<[Use; 2]>;

/// Above this many uses, uses of one stream and kind are merged to one that covers their hull.
const MERGE_ABOVE: usize = 24;

/// The number of a use that is not over: no stream ever completes it.
const OPEN: u64 = u64::MAX;

/// The uses of one block.
#[derive(Default)]
pub(crate) struct Hazards(Mutex<History>);

/// What is known of a block's past. Mostly there is nothing to know, and free memory is cut and joined at every turn: so it
/// is small, and what there is lies in a box.
#[derive(Default)]
pub(crate) struct History(Option<Box<Past>>);

#[derive(Default)]
struct Past {
    uses: Uses,
    /// With a checker: what is known of uses that were taken off the list because they were over.
    known: Option<Box<Token>>,
    /// In steps: who has used it since it was handed out, one bit for each device.
    devices: u64,
}

impl Hazards {
    pub(crate) fn with(history: History) -> Self {
        Hazards(Mutex::new(history))
    }

    /// Makes `stream` wait, on the device, for every use that conflicts with touching `bytes`.
    pub(crate) fn order(
        &self,
        op: &'static str,
        stream: &StreamCore,
        bytes: &Range<usize>,
        access: Access,
    ) -> Result<()> {
        let history = self.0.lock();
        stream.link.acquire(history.known());
        for last in history.uses() {
            if last.conflicts(bytes, access) && !stream.link.planted(Bug::OrderDropped) {
                stream.wait_for(op, &last.stream, last.sequence)?;
            }
        }
        Ok(())
    }

    /// Notes a use that was submitted to `stream` under `sequence`, after [`order`](Self::order).
    pub(crate) fn note(&self, stream: &Arc<StreamCore>, sequence: u64, bytes: Range<usize>, access: Access) {
        let mut history = self.0.lock();
        let Past { uses, known, devices } = history.past();
        if stream.link.stepped {
            *devices |= bit(stream.link.device);
        }
        uses.retain(|old| {
            let covered = bytes.start <= old.bytes.start && old.bytes.end <= bytes.end;
            // A write stands for everything in its range that it comes after, which is all that it waited for; what came in
            // between (a graph writes memory that somebody else may have borrowed) stays. A read stands for older reads of its
            // own stream.
            let implied = covered
                && old.sequence != OPEN
                && match access {
                    Access::Write => stream.comes_after(&old.stream, old.sequence),
                    Access::Read => old.access == Access::Read && old.stream.id == stream.id,
                };
            // In steps nothing may depend on what happens to be over.
            let completed = !implied && !old.stream.link.stepped && old.stream.is_over(old.sequence);
            if completed {
                Token::add(known, old.stream.known_over());
            }
            !implied && !completed
        });
        if uses.len() >= MERGE_ABOVE {
            merge(uses);
        }
        uses.push(Use { stream: stream.clone(), sequence, bytes, access });
    }

    /// Notes a use that goes on until [`close`](Self::close): work that others submit to `stream` themselves. Until then
    /// every conflicting use waits for all that the stream has by then.
    #[cfg(feature = "cuda")]
    pub(crate) fn open(&self, stream: &Arc<StreamCore>, bytes: Range<usize>, access: Access) {
        self.0.lock().past().uses.push(Use { stream: stream.clone(), sequence: OPEN, bytes, access });
    }

    /// Ends one such use; what was submitted counts as operation `sequence`.
    #[cfg(feature = "cuda")]
    pub(crate) fn close(&self, stream: &Arc<StreamCore>, sequence: u64, bytes: Range<usize>, access: Access) {
        let mut history = self.0.lock();
        let uses = &mut history.past().uses;
        let open = |u: &Use| u.sequence == OPEN && u.stream.id == stream.id && u.bytes == bytes && u.access == access;
        if let Some(at) = uses.iter().position(open) {
            uses.swap_remove(at);
        }
        drop(history);
        self.note(stream, sequence, bytes, access);
    }

    /// The calling host thread waits for every use that conflicts with a host access. Others are not kept from the block
    /// meanwhile.
    pub(crate) fn wait_host(&self, link: &Link, op: &'static str, access: Access, limit: Duration) -> Result<()> {
        let history = self.0.lock();
        link.acquire(history.known());
        let conflicting = history.uses().iter().filter(|last| last.conflicts(&(0..usize::MAX), access));
        let waits: SmallVec<[_; 4]> = conflicting.map(|last| (last.stream.clone(), last.sequence)).collect();
        drop(history);
        for (stream, sequence) in &waits {
            stream.wait_host(op, *sequence, limit)?;
        }
        if !waits.is_empty() {
            let mut history = self.0.lock();
            let past = history.past();
            past.uses.retain(|last| match last.stream.link.stepped {
                true => {
                    !waits.iter().any(|(stream, sequence)| stream.id == last.stream.id && last.sequence <= *sequence)
                }
                false => !last.stream.has_completed(last.sequence),
            });
            Token::add(&mut past.known, link.release());
        }
        Ok(())
    }

    /// In steps: forgets who has used it.
    pub(crate) fn begin(&self) {
        if let Some(past) = &mut self.0.lock().0 {
            past.devices = 0;
        }
    }

    /// In steps: whether a device other than `own` has used it since [`begin`](Self::begin).
    pub(crate) fn was_lent(&self, own: usize) -> bool {
        self.0.lock().0.as_ref().is_some_and(|past| past.devices & !bit(own) != 0)
    }

    /// Whether a host access would have to wait, as far as is known without asking the driver.
    pub(crate) fn in_flight(&self) -> bool {
        self.0.lock().uses().iter().any(|last| !last.stream.has_completed(last.sequence))
    }

    /// What is known, to whoever has the block for himself.
    #[inline]
    pub(crate) fn history(&mut self) -> &mut History {
        self.0.get_mut()
    }

    pub(crate) fn take(&mut self) -> History {
        std::mem::take(self.0.get_mut())
    }

    /// With a checker: the calling thread lets go of the block and hands over what it knows.
    pub(crate) fn remember(&mut self, link: &Link) {
        let token = link.release();
        if token.is_some() {
            Token::add(&mut self.history().past().known, token);
        }
    }
}

/// Whose uses a block at rest carries; blocks of one kind lie together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tenants {
    /// None that may be in flight.
    Nobody,
    /// One stream, by its id: to that one the block is as good as new.
    Stream(u64),
    /// Several.
    Many,
}

impl History {
    /// What the threads knew that took uses off the list.
    pub(crate) fn known(&self) -> Option<&Token> {
        self.0.as_ref()?.known.as_deref()
    }

    fn uses(&self) -> &[Use] {
        self.0.as_ref().map_or(&[], |past| &past.uses)
    }

    fn past(&mut self) -> &mut Past {
        self.0.get_or_insert_default()
    }

    /// What there is to know, for memory that goes on without its header. An empty box stays for the header's next user.
    #[inline]
    pub(crate) fn hand_on(&mut self) -> Self {
        History(self.0.take_if(|past| !past.uses.is_empty() || past.known.is_some()))
    }

    /// The other way round.
    #[inline]
    pub(crate) fn receive(&mut self, past: Self) {
        if past.0.is_some() {
            *self = past;
        }
    }

    /// Forgets uses that are over; then, who is left. In steps nothing may depend on what happens to be over.
    #[inline]
    pub(crate) fn settle(&mut self) -> Tenants {
        let Some(past) = &mut self.0 else { return Tenants::Nobody };
        let Past { uses, known, .. } = &mut **past;
        uses.retain(|last| {
            let over = !last.stream.link.stepped && last.stream.is_over(last.sequence);
            if over {
                Token::add(known, last.stream.known_over());
            }
            !over
        });
        match uses.split_first() {
            None => Tenants::Nobody,
            Some((first, others)) if others.iter().all(|other| other.stream.id == first.stream.id) => {
                Tenants::Stream(first.stream.id)
            }
            Some(_) => Tenants::Many,
        }
    }

    /// Whether `stream` can use the memory without waiting for anyone.
    pub(crate) fn is_free_for(&self, stream: Option<&StreamCore>) -> bool {
        self.uses().iter().all(|last| last.is_over_for(stream))
    }

    /// Whether `stream` will have to wait for some of its users.
    pub(crate) fn waits_for(&self, stream: Option<&StreamCore>) -> bool {
        !self.is_free_for(stream)
    }

    /// The first position in `room` from which on `bytes` bytes are used by no device that is lost, other than `own`: waiting for
    /// it can only fail.
    pub(crate) fn usable_place(&self, own: usize, room: Range<usize>, bytes: usize) -> Option<usize> {
        if !self.names_lost_peer(own) {
            return Some(room.start);
        }
        self.place_beside(room, bytes, |last| last.stream.link.device != own && last.stream.link.is_lost())
    }

    /// The first position in `room` from which on `stream` can use `bytes` bytes without waiting for anyone.
    pub(crate) fn free_place(&self, stream: Option<&StreamCore>, room: Range<usize>, bytes: usize) -> Option<usize> {
        if self.0.is_none() {
            return Some(room.start);
        }
        self.place_beside(room, bytes, |last| !last.is_over_for(stream))
    }

    /// The first position from which on `bytes` bytes have no such use.
    fn place_beside(&self, room: Range<usize>, bytes: usize, is_busy: impl Fn(&Use) -> bool) -> Option<usize> {
        let busy = self.uses().iter().filter(|last| is_busy(last));
        let mut busy: SmallVec<[Range<usize>; 8]> = busy.map(|last| last.bytes.clone()).collect();
        busy.sort_unstable_by_key(|bytes| bytes.start);
        let mut at = room.start;
        for taken in busy {
            if taken.start >= at + bytes {
                break;
            }
            at = at.max(taken.end);
        }
        (at + bytes <= room.end).then_some(at)
    }

    /// Whether a device that is lost is among the users, other than `own`: waiting for it can only fail.
    pub(crate) fn names_lost_peer(&self, own: usize) -> bool {
        self.uses().iter().any(|last| last.stream.link.device != own && last.stream.link.is_lost())
    }

    /// Whether all uses are known to have completed; the calling thread may rely on it.
    pub(crate) fn all_completed(&self) -> bool {
        self.uses().iter().all(|last| last.stream.has_completed(last.sequence))
    }

    /// The calling host thread waits for all of them.
    /// Gives up when `stop` says so, as if time had run out.
    pub(crate) fn wait_all(&self, op: &'static str, limit: Duration, stop: &dyn Fn() -> bool) -> Result<()> {
        self.uses().iter().try_for_each(|last| last.stream.wait_host_unless(op, last.sequence, limit, stop))
    }

    /// Whether all uses are over, for reports: a checker takes it that the calling thread has learned nothing.
    pub(crate) fn is_over(&self) -> bool {
        self.in_flight().next().is_none()
    }

    /// The streams that may still use some of the first `len` bytes, with how many bytes, for reports.
    pub(crate) fn pending(&self, len: usize) -> SmallVec<[(Arc<StreamCore>, u64); 2]> {
        let mut ranges: SmallVec<[(&Arc<StreamCore>, Range<usize>); 4]> =
            self.in_flight().map(|last| (&last.stream, last.bytes.start.min(len)..last.bytes.end.min(len))).collect();
        ranges.sort_unstable_by_key(|(stream, bytes)| (stream.id, bytes.start));
        let mut all: SmallVec<[(Arc<StreamCore>, u64); 2]> = SmallVec::new();
        let mut end = 0;
        for (stream, bytes) in ranges {
            if all.last().is_none_or(|(last, _)| last.id != stream.id) {
                all.push((stream.clone(), 0));
                end = 0;
            }
            let fresh = bytes.end.saturating_sub(bytes.start.max(end));
            end = end.max(bytes.end);
            all.last_mut().expect("pushed above").1 += fresh as u64;
        }
        all
    }

    /// Which of the first `len` bytes may still be in use, for reports.
    pub(crate) fn busy(&self, len: usize) -> SmallVec<[Range<usize>; 4]> {
        let mut ranges: SmallVec<[Range<usize>; 4]> = self
            .in_flight()
            .map(|last| last.bytes.start..last.bytes.end.min(len))
            .filter(|r| r.start < r.end)
            .collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|later, range| {
            let touch = later.start <= range.end;
            if touch {
                range.end = range.end.max(later.end);
            }
            touch
        });
        ranges
    }

    fn in_flight(&self) -> impl Iterator<Item = &Use> {
        self.uses().iter().filter(|last| !last.stream.is_over(last.sequence))
    }
}

/// Free memory carries its uses, each with its bytes, so that it can be cut and joined whoever has used it: the next
/// owner waits for just those uses that overlap what it was given.
impl Payload for History {
    fn split_off(&mut self, at: usize) -> Self {
        let Some(past) = &mut self.0 else { return History(None) };
        let mut later = Uses::new();
        past.uses.retain(|last| {
            if last.bytes.end > at {
                let bytes = last.bytes.start.saturating_sub(at)..last.bytes.end - at;
                later.push(Use { stream: last.stream.clone(), bytes, ..*last });
            }
            last.bytes.end = last.bytes.end.min(at);
            last.bytes.start < last.bytes.end
        });
        let known = past.known.clone();
        let blank = later.is_empty() && known.is_none();
        History((!blank).then(|| Box::new(Past { uses: later, known, devices: 0 })))
    }

    fn join(&mut self, at: usize, later: Self) {
        let Some(later) = later.0 else { return };
        let Past { uses, known, .. } = self.past();
        Token::add(known, later.known);
        for mut last in later.uses {
            last.bytes = last.bytes.start + at..last.bytes.end + at;
            uses.push(last);
        }
        if uses.len() > MERGE_ABOVE {
            self.settle();
            let uses = &mut self.past().uses;
            join_neighbours(uses);
            if uses.len() > MERGE_ABOVE {
                merge(uses);
            }
        }
    }
}

/// Pieces of one use that touch become one again.
fn join_neighbours(uses: &mut Uses) {
    uses.sort_unstable_by_key(|last| (last.stream.id, last.sequence, last.access == Access::Write, last.bytes.start));
    uses.dedup_by(|later, last| {
        let same = later.stream.id == last.stream.id && later.sequence == last.sequence && later.access == last.access;
        let touch = same && later.sequence != OPEN && later.bytes.start <= last.bytes.end;
        if touch {
            last.bytes.end = last.bytes.end.max(later.bytes.end);
        }
        touch
    });
}

/// There are at most 64 software GPUs in a pool.
fn bit(device: usize) -> u64 {
    1 << (device % 64)
}

impl Use {
    /// Whether `stream` need not wait for it.
    fn is_over_for(&self, stream: Option<&StreamCore>) -> bool {
        stream.is_some_and(|stream| stream.comes_after(&self.stream, self.sequence))
            || !self.stream.link.stepped && self.stream.is_over(self.sequence)
    }

    fn conflicts(&self, bytes: &Range<usize>, access: Access) -> bool {
        (self.access == Access::Write || access == Access::Write)
            && self.bytes.start < bytes.end
            && bytes.start < self.bytes.end
    }
}

/// One use per stream and kind, covering the hull and the latest of what it replaces: more waiting, never less.
fn merge(uses: &mut Uses) {
    let mut merged = Uses::new();
    for old in uses.drain(..) {
        let same = |new: &&mut Use| new.stream.id == old.stream.id && new.access == old.access && new.sequence != OPEN;
        match merged.iter_mut().find(same).filter(|_| old.sequence != OPEN) {
            Some(new) => {
                new.sequence = new.sequence.max(old.sequence);
                new.bytes = new.bytes.start.min(old.bytes.start)..new.bytes.end.max(old.bytes.end);
            }
            None => merged.push(old),
        }
    }
    *uses = merged;
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use crate::GpuPool;

    /// A use by others ends, and only then counts as one of the stream's operations.
    #[test]
    fn what_is_lent_comes_back() {
        let pool = GpuPool::builder().host(1).build().unwrap();
        pool.run(|dev, _| {
            let hazards = Hazards::default();
            hazards.open(&dev.stream, 0..8, Access::Write);
            assert!(hazards.in_flight());
            hazards.close(&dev.stream, dev.stream.submit(), 0..8, Access::Write);
            dev.synchronize()?;
            assert!(!hazards.in_flight());
            Ok(())
        })
        .unwrap();
    }
}
