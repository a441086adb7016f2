//! A gang: the devices that run one scope together, and fail together.
//!
//! The first member that fails *poisons* the gang: it stores the cause, then raises the abort bit, then wakes all
//! threads that may wait. Each wait and each device call of a peer sees the bit and returns [`Error::Aborted`]. A
//! collective *commits* its sequence number before it touches data, on the same word ([`CommitWord`]). Invariant:
//! either every member sees a collective committed, or every member sees it aborted.
//!
//! The gang has *recovered* when each member has drained its streams ([`Gang::recover`]). Memory that was freed
//! meanwhile is used again only then. A gang is never reused.

#![cfg_attr(loom, deny(clippy::disallowed_types, clippy::disallowed_methods))]

#[cfg_attr(loom, allow(clippy::disallowed_types, clippy::disallowed_methods))]
pub(crate) mod cancel;
pub(crate) mod dispatch;
#[cfg_attr(loom, allow(clippy::disallowed_types, clippy::disallowed_methods))]
pub(crate) mod gpu_order;
pub(crate) mod job;
#[cfg_attr(loom, allow(clippy::disallowed_types, clippy::disallowed_methods))]
pub(crate) mod quiescence;

pub(crate) use self::{
    cancel::CancelToken,
    dispatch::{Queue, Visit},
    gpu_order::GpuOrder,
    quiescence::{EnteringScopes, Quiescence},
};

use crate::{
    contain::Contained,
    error::{DeviceCall, Error, Result, Site},
    sync::{BroadcastSlot, CommitWord, CountLatch, EventCount, Flag, Sequence, shim::Arc, shim::Mutex, unique_id},
};

use std::{panic::Location, time::Duration};

pub(crate) const BROADCAST_WORDS: usize = 6;

/// An operation, and the place of its call in the program.
pub type LastCall = (&'static str, Site);

type GroupWord = (Box<[usize]>, std::sync::Arc<CommitWord>);

/// The link between a gang and its devices' kernels: kernels learn of a failure, and report a timeout of their own.
/// Members are ordinals in the pool.
pub trait Alarm: Send + Sync {
    /// Tells the members' kernels that the gang at this place has failed.
    fn raise(&self, members: &[usize], place: u64);

    /// A member whose kernel has given up waiting for a peer in the gang at this place, and that peer.
    fn given_up(&self, members: &[usize], place: u64) -> Option<(usize, usize)>;
}

/// Other processes that run the same scope: they learn of a failure here.
pub trait Outside: Send + Sync {
    /// The gang has failed: first the device with this ordinal.
    fn failed(&self, by: usize, cause: &Error);
}

/// Writes down what the devices do when a gang fails.
pub trait Witness: Send + Sync {
    /// The gang is about to fail, and its members still do what they did. The result is called when they have been
    /// told, if this failure is the first one.
    fn look(&self, cause: &Error) -> Option<Box<dyn FnOnce() + '_>>;
}

/// The members of one scope. Shared by all of them and by the caller.
pub struct Gang {
    alarm: Option<std::sync::Arc<dyn Alarm>>,
    /// The flight recorder of the pool.
    pub(crate) witness: Option<std::sync::Arc<dyn Witness>>,
    pub(crate) outside: Option<std::sync::Arc<dyn Outside>>,
    place: Sequence,
    /// Of this gang alone: jobs of one visit share their place.
    pub(crate) id: u64,
    members: Box<[usize]>,
    wakers: std::sync::Arc<[Arc<EventCount>]>,
    pub(crate) site: Site,
    left: Box<[Flag]>,
    last_calls: Mutex<Vec<(usize, LastCall)>>,
    /// Empty without broadcasts. Each gang has its own slots: a member in a later gang must not overwrite one.
    broadcast_slots: Box<[BroadcastSlot<BROADCAST_WORDS>]>,
    word: CommitWord,
    groups: Mutex<Vec<GroupWord>>,
    /// The user's error may end here.
    cause: Mutex<Option<(usize, Contained<Error>)>>,
    drained: CountLatch,
    stuck: Flag,
    /// No other process can fail it any more.
    ended: Flag,
    /// By a token: until it has ended.
    pub(crate) can_be_cancelled: bool,
}

pub(crate) fn next_place() -> u64 {
    unique_id()
}

impl Gang {
    /// A gang of `members` (ordinals in the pool), each with the waker of its device thread.
    #[track_caller]
    pub fn new(members: Box<[usize]>, wakers: impl Into<std::sync::Arc<[Arc<EventCount>]>>) -> Self {
        let wakers = wakers.into();
        assert_eq!(members.len(), wakers.len());
        let count = members.len();
        // Alone in its gang, a member waits for its own drain: on the waker that it has.
        let event = if let [own] = &wakers[..] { own.clone() } else { Arc::new(EventCount::new()) };
        Gang {
            alarm: None,
            witness: None,
            outside: None,
            place: Sequence::new(),
            id: unique_id(),
            site: Location::caller(),
            members,
            wakers,
            last_calls: Mutex::new(Vec::new()),
            left: (0..count).map(|_| Flag::new()).collect(),
            broadcast_slots: Box::default(),
            word: CommitWord::new(),
            groups: Mutex::new(Vec::new()),
            cause: Mutex::new(None),
            drained: CountLatch::new(count, event),
            stuck: Flag::new(),
            ended: Flag::new(),
            can_be_cancelled: false,
        }
    }

    /// Adds a link to the devices' kernels.
    pub fn with_alarm(self, alarm: Option<std::sync::Arc<dyn Alarm>>) -> Self {
        Gang { alarm, ..self }
    }

    pub(crate) fn with_broadcasts(self) -> Self {
        Gang { broadcast_slots: self.members.iter().map(|_| BroadcastSlot::new()).collect(), ..self }
    }

    pub(crate) fn broadcast_slot(&self, rank: usize) -> Option<&BroadcastSlot<BROADCAST_WORDS>> {
        self.broadcast_slots.get(rank)
    }

    /// Under the dispatch lock, so that every device sees places grow.
    pub fn enter(&self) {
        self.enter_at(next_place());
    }

    /// [`enter`](Self::enter) with a place that was drawn before. Gangs of one place must run on one device, one after
    /// the other, and none after one that has failed.
    pub(crate) fn enter_at(&self, place: u64) {
        self.place.raise_to(place);
    }

    /// The place that [`enter`](Self::enter) has given.
    pub fn place(&self) -> u64 {
        self.place.get()
    }

    /// The number of members.
    pub fn count(&self) -> usize {
        self.members.len()
    }

    /// A member's ordinal in the pool.
    pub fn device(&self, rank: usize) -> usize {
        self.members[rank]
    }

    /// The members' ordinals in the pool, by rank.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// The waker of a member's device thread.
    pub fn waker(&self, rank: usize) -> &EventCount {
        &self.wakers[rank]
    }

    /// Fails the gang, unless it has failed. `by` is the failed device's ordinal. Returns whether this call was first.
    pub fn poison(&self, by: usize, cause: Error) -> bool {
        let first = self.fail(by, cause);
        if first {
            self.tell_outside();
        }
        first
    }

    /// [`poison`](Self::poison), but other processes are not told: after the first failure the caller must call
    /// [`tell_outside`](Self::tell_outside), once the cause has its text.
    ///
    /// The cause is stored before the bit is raised: a thread that sees the bit finds the cause.
    pub(crate) fn fail(&self, by: usize, cause: Error) -> bool {
        let witness = self.witness.as_ref().filter(|_| !self.is_aborted());
        let tell = witness.and_then(|witness| witness.look(&cause));
        let mut slot = self.cause.lock();
        let first = slot.is_none();
        if first {
            *slot = Some((by, Contained::new(cause)));
            // Under the lock, so that a thread that finds a cause here finds the bit raised, too.
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
        if let Some(tell) = tell.filter(|_| first) {
            tell();
        }
        first
    }

    pub(crate) fn tell_outside(&self) {
        if let Some(outside) = &self.outside
            && let Some((by, cause)) = self.cause()
        {
            outside.failed(by, &cause);
        }
    }

    /// Fails the gang if a collective's kernel on any of its devices has waited for a peer until the deadline and has
    /// then gone on without that peer. Later work on that device, and data from it, may be incomplete.
    pub(crate) fn check_kernels(&self, deadline: Duration, last_calls: impl FnOnce() -> Vec<DeviceCall>) {
        let Some(alarm) = &self.alarm else { return };
        // Asked also after a failure: the alarm of several processes then ends their transport.
        if let Some((device, missing)) = alarm.given_up(&self.members, self.place())
            && !self.is_aborted()
        {
            let (op, missing) = ("collective", vec![missing]);
            self.poison(device, Error::Timeout { device, op, waited: deadline, missing, last_calls: last_calls() });
        }
    }

    /// Whether the gang has failed. An acquire load: cheap enough for every device call.
    #[inline]
    pub fn is_aborted(&self) -> bool {
        self.word.is_aborted()
    }

    /// The word behind [`is_aborted`](Self::is_aborted), for code that knows no gangs.
    pub(crate) fn word(&self) -> &CommitWord {
        &self.word
    }

    /// `Err(Aborted { by, cause })` when the gang has failed.
    #[inline]
    pub fn check(&self) -> Result<()> {
        fail_if!(self.word.is_aborted(), self.aborted().expect("the cause is stored before the bit is raised"));
        Ok(())
    }

    /// The error that peers return, once the gang has failed.
    pub fn aborted(&self) -> Option<Error> {
        let slot = self.cause.lock();
        slot.as_ref().map(|(by, cause)| Error::Aborted { by: *by, cause: std::sync::Arc::new((**cause).clone()) })
    }

    /// The cause itself, for the caller of the scope.
    pub fn cause(&self) -> Option<(usize, Error)> {
        self.cause.lock().as_ref().map(|(by, cause)| (*by, (**cause).clone()))
    }

    /// Commits the collective with this number (1, 2, ..): from now on every member completes it. If an abort came
    /// first, every member sees the abort.
    pub fn commit(&self, sequence: u64) -> Result<()> {
        if self.word.commit(sequence) { Ok(()) } else { self.check().and(Err(Error::Closed)) }
    }

    /// The word on which a group of members commits. All members of the group share it; it is aborted with the gang.
    pub fn group(&self, ranks: &[usize]) -> std::sync::Arc<CommitWord> {
        let mut groups = self.groups.lock();
        if let Some((_, word)) = groups.iter().find(|(known, _)| **known == *ranks) {
            return word.clone();
        }
        let word = std::sync::Arc::new(CommitWord::new());
        // A failure that came first has either aborted the gang's word by now, or will find the new word in the list.
        groups.push((ranks.into(), word.clone()));
        if self.word.is_aborted() {
            word.abort();
        }
        word
    }

    pub(crate) fn last_call(&self, rank: usize, call: Option<LastCall>) {
        if let Some(call) = call {
            self.last_calls.lock().push((rank, call));
        }
    }

    /// For a report on a member that [has left](Self::has_left): its last call and its place, or that of the scope.
    pub(crate) fn last_words(&self, rank: usize) -> (Option<&'static str>, Site) {
        let found = self.last_calls.lock().iter().find(|(of, _)| *of == rank).map(|(_, call)| *call);
        found.map_or((None, self.site), |(op, site)| (Some(op), site))
    }

    /// Ends its peers' waits for it. Only members whose closures still run can wait for it, so only these are woken.
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

    /// Notes that a member's streams could not be drained: memory that they touch may still be in use after
    /// [`recover`](Self::recover).
    pub fn stuck(&self) {
        self.stuck.raise();
    }

    /// Whether some member's streams could not be drained. The answer does not change after [`recover`](Self::recover).
    pub fn is_stuck(&self) -> bool {
        self.stuck.is_raised()
    }

    /// Each member calls this once, when its own streams have drained.
    pub fn drained(&self) {
        // SAFETY: the latch lives in `self`, which is borrowed for the whole call.
        unsafe { CountLatch::set(&self.drained) }
    }

    /// When it returns, no operation of the gang is in flight on any device. It cannot deadlock: gangs enter all queues
    /// in one order, so a member waits only for gangs at or before its own place.
    pub fn recover(&self) {
        self.drained.wait(None, Duration::ZERO);
    }

    /// Whether every member has drained, so that [`recover`](Self::recover) does not wait.
    pub fn is_recovered(&self) -> bool {
        self.drained.is_set()
    }

    pub(crate) fn end(&self) {
        self.ended.raise();
    }

    /// Whether it is known if the gang fails: from then on [`is_aborted`](Self::is_aborted) does not change.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_recovered() && (self.outside.is_none() && !self.can_be_cancelled || self.ended.is_raised())
    }

    /// Notes that a member will never start: it has left, and has nothing to drain.
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
