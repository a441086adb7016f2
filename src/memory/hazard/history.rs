//! The past of a block: its uses and what is known of them, as memory is handed on, split and joined.
//!
//! Blocks carry it inside [`Hazards`](super::Hazards); the heap carries it as the [`Payload`] of free memory.
//! Invariant: splitting and joining never lose a use that may still be in flight.

use super::{Access, Lending, MERGE_ABOVE, OPEN, Reservation, Use, Uses};
use crate::{
    driver::observe::Token,
    error::Result,
    memory::{Payload, StreamCore},
};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc, time::Duration};

/// The past of a block: small and boxed, since it is usually empty, and free memory is split and joined all the time.
#[derive(Default)]
pub(crate) struct History(pub(super) Option<Box<Past>>);

#[derive(Default)]
pub(super) struct Past {
    pub(super) uses: Uses,
    /// With a checker: knowledge about uses that were removed because they were over.
    pub(super) known: Option<Box<Token>>,
    /// When stepped: since it was handed out, one bit each.
    pub(super) devices: u64,
    pub(super) lent: Option<Arc<Lending>>,
    /// Uses that are about to be submitted. Their devices hold the block, so free memory has none.
    pub(super) reserved: SmallVec<[Reservation; 1]>,
}

/// Which streams may still use a free block. Free lists keep blocks of one kind together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tenants {
    /// No use is in flight.
    Nobody,
    /// One stream, by its id: that stream need not wait.
    Stream(u64),
    /// Several streams.
    Many,
}

impl History {
    #[cfg(target_os = "linux")]
    pub(crate) fn lent_by(lending: &Arc<Lending>) -> Self {
        History(Some(Box::new(Past { lent: Some(lending.clone()), ..Past::default() })))
    }

    pub(super) fn lending(&self) -> Option<&Lending> {
        self.0.as_ref()?.lent.as_deref()
    }

    pub(crate) fn known(&self) -> Option<&Token> {
        self.0.as_ref()?.known.as_deref()
    }

    pub(super) fn uses(&self) -> &[Use] {
        self.0.as_ref().map_or(&[], |past| &past.uses)
    }

    pub(super) fn reservations(&self) -> &[Reservation] {
        self.0.as_ref().map_or(&[], |past| &past.reserved)
    }

    pub(super) fn past(&mut self) -> &mut Past {
        self.0.get_or_insert_default()
    }

    /// Moves the past out, for memory that leaves its header. An empty box stays for the header's next use.
    #[inline]
    pub(crate) fn hand_on(&mut self) -> Self {
        History(self.0.take_if(|past| !past.uses.is_empty() || past.known.is_some()))
    }

    #[inline]
    pub(crate) fn receive(&mut self, past: Self) {
        if past.0.is_some() {
            *self = past;
        }
    }

    /// Removes uses that are over (none when stepped: that depends on time), and says which streams are left.
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

    pub(crate) fn is_free_for(&self, stream: Option<&StreamCore>) -> bool {
        self.uses().iter().all(|last| last.is_over_for(stream))
    }

    /// The first position in `room` where `bytes` bytes are free of uses by a lost device other than `own`. Waiting for
    /// such a use can only fail.
    pub(crate) fn usable_place(&self, own: usize, room: Range<usize>, bytes: usize) -> Option<usize> {
        if !self.names_lost_peer(own) {
            return Some(room.start);
        }
        self.first_gap(room, bytes, |last| last.stream.handle.device != own && last.stream.handle.is_lost())
    }

    pub(crate) fn free_place(&self, stream: Option<&StreamCore>, room: Range<usize>, bytes: usize) -> Option<usize> {
        if self.0.is_none() {
            return Some(room.start);
        }
        self.first_gap(room, bytes, |last| !last.is_over_for(stream))
    }

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

    /// Whether a lost device other than `own` is among the users. Waiting for it can only fail.
    pub(crate) fn names_lost_peer(&self, own: usize) -> bool {
        self.uses().iter().any(|last| last.stream.handle.device != own && last.stream.handle.is_lost())
    }

    /// Whether all uses are known to have completed. The calling thread may rely on the answer.
    pub(crate) fn all_completed(&self) -> bool {
        self.uses().iter().all(|last| last.stream.has_completed(last.sequence))
    }

    /// The calling host thread waits for all uses. It gives up when `stop` returns true, as if time had run out.
    pub(crate) fn wait_all(&self, op: &'static str, limit: Duration, stop: &dyn Fn() -> bool) -> Result<()> {
        self.uses().iter().try_for_each(|last| last.stream.wait_host_unless(op, last.sequence, limit, stop))
    }

    /// To a checker the calling thread has learned nothing.
    pub(crate) fn is_over(&self) -> bool {
        self.in_flight().next().is_none()
    }

    /// For reports: the streams that may still use some of the first `len` bytes, and how many bytes each.
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

    /// For reports: the ranges of the first `len` bytes that may still be in use.
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

/// Each use has its byte range: the next owner waits for those that overlap its bytes.
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
        History((!blank).then(|| Box::new(Past { uses: later, known, ..Past::default() })))
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

fn join_neighbours(uses: &mut Uses) {
    uses.sort_unstable_by_key(|last| (last.stream.id, last.sequence, last.access == Access::Write, last.bytes.start));
    uses.dedup_by(|later, last| {
        let same = later.stream.id == last.stream.id && later.sequence == last.sequence && later.access == last.access;
        let touch = same && later.sequence < OPEN && later.bytes.start <= last.bytes.end;
        if touch {
            last.bytes.end = last.bytes.end.max(later.bytes.end);
        }
        touch
    });
}

/// The result covers the whole range and the latest operation: it may wait for more, never for less.
pub(super) fn merge(uses: &mut Uses) {
    let mut merged = Uses::new();
    for old in uses.drain(..) {
        let same = |new: &&mut Use| new.stream.id == old.stream.id && new.access == old.access && new.sequence < OPEN;
        match merged.iter_mut().find(same).filter(|_| old.sequence < OPEN) {
            Some(new) => {
                new.sequence = new.sequence.max(old.sequence);
                new.bytes = new.bytes.start.min(old.bytes.start)..new.bytes.end.max(old.bytes.end);
            }
            None => merged.push(old),
        }
    }
    *uses = merged;
}
