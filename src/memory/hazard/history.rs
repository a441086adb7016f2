//! What is known of a block's past, when it is handed from one user to the next, cut, and joined.

use super::{Access, MERGE_ABOVE, OPEN, Use, Uses};
use crate::{
    driver::check::Token,
    error::Result,
    memory::{heap::Payload, stream::StreamCore},
};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc, time::Duration};

/// What is known of a block's past. Mostly there is nothing to know, and free memory is cut and joined at every turn:
/// so it is small, and what there is lies in a box.
#[derive(Default)]
pub(crate) struct History(pub(super) Option<Box<Past>>);

#[derive(Default)]
pub(super) struct Past {
    pub(super) uses: Uses,
    /// With a checker: what is known of uses that were taken off the list because they were over.
    pub(super) known: Option<Box<Token>>,
    /// In steps: who has used it since it was handed out, one bit for each device.
    pub(super) devices: u64,
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

    pub(super) fn uses(&self) -> &[Use] {
        self.0.as_ref().map_or(&[], |past| &past.uses)
    }

    pub(super) fn past(&mut self) -> &mut Past {
        self.0.get_or_insert_default()
    }

    /// What there is to know, for memory that goes on without its header. An empty box stays for the header's next
    /// user.
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
            let over = !last.stream.handle.stepped && last.stream.is_over(last.sequence);
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

    /// The first position in `room` from which on `bytes` bytes are used by no device that is lost, other than `own`:
    /// waiting for it can only fail.
    pub(crate) fn usable_place(&self, own: usize, room: Range<usize>, bytes: usize) -> Option<usize> {
        if !self.names_lost_peer(own) {
            return Some(room.start);
        }
        self.first_gap(room, bytes, |last| last.stream.handle.device != own && last.stream.handle.is_lost())
    }

    /// The first position in `room` from which on `stream` can use `bytes` bytes without waiting for anyone.
    pub(crate) fn free_place(&self, stream: Option<&StreamCore>, room: Range<usize>, bytes: usize) -> Option<usize> {
        if self.0.is_none() {
            return Some(room.start);
        }
        self.first_gap(room, bytes, |last| !last.is_over_for(stream))
    }

    /// The first position from which on `bytes` bytes have no such use.
    fn first_gap(&self, room: Range<usize>, bytes: usize, is_busy: impl Fn(&Use) -> bool) -> Option<usize> {
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
        self.uses().iter().any(|last| last.stream.handle.device != own && last.stream.handle.is_lost())
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

/// One use per stream and kind, covering the hull and the latest of what it replaces: more waiting, never less.
pub(super) fn merge(uses: &mut Uses) {
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
