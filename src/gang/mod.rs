//! A gang: the devices that run one scope together, and fail together.
//!
//! The first member that fails *poisons* the gang: it stores the cause, then raises the abort bit, then wakes everyone
//! who might wait. Peers see the bit in every wait and in every device call and return
//! [`Error::Aborted`] with that cause. A collective *commits* its sequence number before it touches data; commit and
//! abort race on one word ([`CommitWord`]), so either every member sees the operation committed or every member sees it
//! aborted. The gang is *recovered* when each member has drained its streams ([`Gang::recover`]); only then is memory
//! that was freed meanwhile used again. A gang is never reused, so there is nothing to reset: the pool's next scope has
//! a new one with a number never used before.

#![cfg_attr(loom, deny(clippy::disallowed_types, clippy::disallowed_methods))]

pub(crate) mod dispatch;
#[cfg_attr(loom, allow(clippy::disallowed_types, clippy::disallowed_methods))]
pub(crate) mod gpu_order;
pub(crate) mod job;
#[cfg_attr(loom, allow(clippy::disallowed_types, clippy::disallowed_methods))]
pub(crate) mod quiescence;

use crate::{
    error::{Error, Result, Site},
    sync::{BroadcastSlot, CommitWord, CountLatch, EventCount, Flag, Sequence, shim::Arc, shim::Mutex, unique_id},
};

use std::panic::Location;

/// Words of a broadcast.
pub(crate) const BROADCAST_WORDS: usize = 6;

/// An operation, and where it was called.
pub(crate) type LastCall = (&'static str, Site);

/// Ranks, and where they commit.
type GroupWord = (Box<[usize]>, std::sync::Arc<CommitWord>);

/// Who must hear of a failure besides the members' threads: their devices.
pub trait Alarm: Send + Sync {
    /// The gang at this place has failed. Ordinals in the pool.
    fn raise(&self, members: &[usize], place: u64);
}

/// The members of one scope. Shared by all of them and by the caller.
pub struct Gang {
    alarm: Option<std::sync::Arc<dyn Alarm>>,
    /// The gang's place in the process's order of gangs; marks its messages.
    place: Sequence,
    /// Ordinals in the pool, by rank.
    members: Box<[usize]>,
    /// What wakes each member's device thread, by rank.
    wakers: std::sync::Arc<[Arc<EventCount>]>,
    /// Where the scope was started.
    site: Site,
    /// Ranks whose closure has ended.
    left: Box<[Flag]>,
    /// What members that have left had called last, by their ranks. For reports.
    last_calls: Mutex<Vec<(usize, LastCall)>>,
    /// The slot in which each member posts what it tells all others, by rank; empty in gangs without broadcasts. Each
    /// gang has its own: a member that has left, and is in a later gang, must not overwrite what its peers here have
    /// not read.
    broadcast_slots: Box<[BroadcastSlot<BROADCAST_WORDS>]>,
    word: CommitWord,
    /// Where groups of members commit what they do among themselves, by their ranks.
    groups: Mutex<Vec<GroupWord>>,
    cause: Mutex<Option<(usize, Error)>>,
    /// Members that have not drained their streams yet.
    drained: CountLatch,
    stuck: Flag,
}

impl Gang {
    /// A gang of `members` (ordinals in the pool), each with the waker of its device thread.
    #[track_caller]
    pub fn new(members: Box<[usize]>, wakers: impl Into<std::sync::Arc<[Arc<EventCount>]>>) -> Self {
        let wakers = wakers.into();
        assert_eq!(members.len(), wakers.len());
        let count = members.len();
        Gang {
            alarm: None,
            place: Sequence::new(),
            site: Location::caller(),
            members,
            wakers,
            last_calls: Mutex::new(Vec::new()),
            left: (0..count).map(|_| Flag::new()).collect(),
            broadcast_slots: Box::default(),
            word: CommitWord::new(),
            groups: Mutex::new(Vec::new()),
            cause: Mutex::new(None),
            drained: CountLatch::new(count, Arc::new(EventCount::new())),
            stuck: Flag::new(),
        }
    }

    /// One that tells of its failure.
    pub fn with_alarm(self, alarm: Option<std::sync::Arc<dyn Alarm>>) -> Self {
        Gang { alarm, ..self }
    }

    /// One of a scope that was started there.
    pub(crate) fn started_at(self, site: Site) -> Self {
        Gang { site, ..self }
    }

    /// A gang with broadcasts.
    pub(crate) fn with_broadcasts(self) -> Self {
        Gang { broadcast_slots: self.members.iter().map(|_| BroadcastSlot::new()).collect(), ..self }
    }

    /// The broadcast slot of a member, if the gang has broadcasts.
    pub(crate) fn broadcast_slot(&self, rank: usize) -> Option<&BroadcastSlot<BROADCAST_WORDS>> {
        self.broadcast_slots.get(rank)
    }

    /// Gives the gang its place in the process's order. Called under the dispatch lock, so that every device sees
    /// places grow.
    pub fn enter(&self) {
        self.place.raise_to(unique_id());
    }

    /// The place that [`enter`](Self::enter) gave.
    pub fn place(&self) -> u64 {
        self.place.get()
    }

    /// How many devices take part.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// The ordinal in the pool of a rank.
    pub fn device(&self, rank: usize) -> usize {
        self.members[rank]
    }

    /// All ordinals by rank.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// What wakes a member.
    pub fn waker(&self, rank: usize) -> &EventCount {
        &self.wakers[rank]
    }

    /// Fails the gang, unless it has failed already. `by` is the ordinal of the device that failed. Returns whether
    /// this call was the first.
    ///
    /// The cause is stored before the bit is raised: whoever sees the bit finds the cause.
    pub fn poison(&self, by: usize, cause: Error) -> bool {
        let mut slot = self.cause.lock();
        let first = slot.is_none();
        if first {
            *slot = Some((by, cause));
            // Under the lock, so that whoever finds a cause here finds the bit raised too.
            self.word.abort();
            for (_, word) in self.groups.lock().iter() {
                word.abort();
            }
            if let Some(alarm) = &self.alarm {
                alarm.raise(&self.members, self.place());
            }
        }
        drop(slot);
        self.wake_all();
        first
    }

    /// Whether the gang has failed. An acquire load: cheap enough for every device call.
    #[inline]
    pub fn is_aborted(&self) -> bool {
        self.word.is_aborted()
    }

    /// What [`is_aborted`](Self::is_aborted) looks at, for those who know nothing of gangs.
    pub(crate) fn word(&self) -> &CommitWord {
        &self.word
    }

    /// `Err(Aborted { by, cause })` when the gang has failed.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if !self.word.is_aborted() {
            return Ok(());
        }
        Err(self.aborted().expect("the cause is stored before the bit is raised"))
    }

    /// The error that peers return, once the gang has failed.
    pub fn aborted(&self) -> Option<Error> {
        let slot = self.cause.lock();
        slot.as_ref().map(|(by, cause)| Error::Aborted { by: *by, cause: std::sync::Arc::new(cause.clone()) })
    }

    /// The cause itself, for the caller of the scope.
    pub fn cause(&self) -> Option<(usize, Error)> {
        self.cause.lock().clone()
    }

    /// Commits collective number `sequence` (from 1, consecutive): from now on every member carries it through. An
    /// abort that came first wins, for every member alike.
    pub fn commit(&self, sequence: u64) -> Result<()> {
        if self.word.commit(sequence) { Ok(()) } else { self.check().and(Err(Error::Closed)) }
    }

    /// The word that a group of members commits on. The same for all of them; aborted with the gang.
    pub fn group(&self, ranks: &[usize]) -> std::sync::Arc<CommitWord> {
        let mut groups = self.groups.lock();
        if let Some((_, word)) = groups.iter().find(|(known, _)| **known == *ranks) {
            return word.clone();
        }
        let word = std::sync::Arc::new(CommitWord::new());
        // A failure that came first has aborted the gang's word by now, or will find this one in the list.
        groups.push((ranks.into(), word.clone()));
        if self.word.is_aborted() {
            word.abort();
        }
        word
    }

    /// Notes what a member has called last, before it [leaves](Self::leave).
    pub(crate) fn last_call(&self, rank: usize, call: Option<LastCall>) {
        if let Some(call) = call {
            self.last_calls.lock().push((rank, call));
        }
    }

    /// For a report on a member that [has left](Self::has_left): its last call, if it had any, and the place of that,
    /// or else of the scope.
    pub(crate) fn last_words(&self, rank: usize) -> (Option<&'static str>, Site) {
        let found = self.last_calls.lock().iter().find(|(of, _)| *of == rank).map(|(_, call)| *call);
        found.map_or((None, self.site), |(op, site)| (Some(op), site))
    }

    /// A member's closure has ended; peers that wait for it will not wait any longer. Only members whose own closure
    /// still runs can wait for it, so only these are woken.
    pub fn leave(&self, rank: usize) {
        self.left[rank].raise();
        for (waker, left) in self.wakers.iter().zip(&self.left) {
            if !left.is_raised() {
                waker.notify();
            }
        }
    }

    /// Whether a member's closure has ended.
    pub fn has_left(&self, rank: usize) -> bool {
        self.left[rank].is_raised()
    }

    /// A member's streams could not be drained: what they touch may still be in use after [`recover`](Self::recover).
    pub fn stuck(&self) {
        self.stuck.raise();
    }

    /// Whether some member's streams could not be drained. Final after [`recover`](Self::recover).
    pub fn is_stuck(&self) -> bool {
        self.stuck.is_raised()
    }

    /// Called by each member once, when its own streams have drained.
    pub fn drained(&self) {
        // SAFETY: the latch lives in `self`, which is borrowed for the whole call.
        unsafe { CountLatch::set(&self.drained) }
    }

    /// Called after [`drained`](Self::drained) by members of a failed gang; returns when every member has drained. From
    /// then on no operation of the gang is in flight anywhere, and memory freed during the abort may be used again.
    ///
    /// It cannot deadlock: gangs enter all queues in one order, so a member waits only for gangs that are before or at
    /// its own place.
    pub fn recover(&self) {
        self.drained.wait(None);
    }

    /// Whether every member has drained: [`recover`](Self::recover) would not wait.
    pub fn is_recovered(&self) -> bool {
        self.drained.is_set()
    }

    /// A member that will never start has left, and has nothing to drain.
    pub fn withdraw(&self, rank: usize) {
        self.leave(rank);
        self.drained();
    }

    fn wake_all(&self) {
        for waker in self.wakers.iter() {
            waker.notify();
        }
    }
}
