//! N parties meet, again and again; an abort ends all meetings.
//!
//! ```text
//!   word = aborted:1 | generation:31 | arrived:16 | parties:16
//! ```
//!
//! The whole state is one word, and every change of it is one read-modify-write, so the changes have one order:
//!
//! * an arrival that is not the last adds one to `arrived` and waits for the generation to change;
//! * the last one sets `arrived` to zero *and* the generation to the next in the same step, so nobody can arrive in a
//!   generation that is already over, or find a count that is not reset;
//! * [`abort`](Rendezvous::abort) sets a bit that nothing clears. A generation that was completed before it counts: all
//!   its parties return `Ok`. One that was not can never complete: all its parties return [`Broken::Aborted`];
//! * [`withdraw`](Rendezvous::withdraw) takes one off `parties`, and completes the generation if the others are there;
//! * a party whose time runs out takes its arrival back, unless the generation completed meanwhile.
//!
//! Each change releases and forms a release sequence with the earlier ones, so who returns `Ok` sees what every party did
//! before it arrived.

use super::{
    EventCount,
    shim::atomic::{
        AtomicU64,
        Ordering::{self, *},
    },
    site::{fence_at, flag, ord},
};
use std::{error::Error, fmt, time::Duration};

/// Why a meeting did not take place.
///
/// ```
/// use gpu_pool::sync::{Broken, Rendezvous};
/// let rendezvous = Rendezvous::new(2);
/// rendezvous.abort();
/// assert_eq!(rendezvous.arrive(None), Err(Broken::Aborted));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// Somebody called [`Rendezvous::abort`].
    Aborted,
    /// The others did not come in time.
    TimedOut,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Broken::Aborted => "the rendezvous was aborted",
            Broken::TimedOut => "the other parties did not arrive in time",
        })
    }
}

impl Error for Broken {}

/// `src/sync/README.md` has the protocol.
///
/// ```
/// use gpu_pool::sync::Rendezvous;
/// let rendezvous = Rendezvous::new(3);
/// let leaders = std::thread::scope(|s| {
///     let parties: Vec<_> = (0..3).map(|_| s.spawn(|| rendezvous.arrive(None).unwrap())).collect();
///     parties.into_iter().filter(|_| true).map(|p| p.join().unwrap()).filter(|&leader| leader).count()
/// });
/// assert_eq!(leaders, 1);
/// ```
#[derive(Debug)]
pub struct Rendezvous {
    word: AtomicU64,
    changed: EventCount,
}

/// The word, taken apart.
#[derive(Clone, Copy, PartialEq, Eq)]
struct State {
    aborted: bool,
    generation: u32,
    arrived: u16,
    parties: u16,
}

const ABORTED: u64 = 1 << 63;
const GENERATIONS: u32 = u32::MAX >> 1;

impl State {
    fn unpack(word: u64) -> Self {
        State {
            aborted: word & ABORTED != 0,
            generation: (word >> 32) as u32 & GENERATIONS,
            arrived: (word >> 16) as u16,
            parties: word as u16,
        }
    }

    fn pack(self) -> u64 {
        let aborted = if self.aborted { ABORTED } else { 0 };
        aborted | u64::from(self.generation) << 32 | u64::from(self.arrived) << 16 | u64::from(self.parties)
    }

    /// With the meeting held, if everyone who is left is there.
    fn met(self) -> Self {
        if self.arrived == self.parties && self.arrived > 0 {
            State { generation: self.generation.wrapping_add(1) & GENERATIONS, arrived: 0, ..self }
        } else {
            self
        }
    }
}

impl Rendezvous {
    /// For `parties` parties.
    ///
    /// # Panics
    ///
    /// For more than 65535 parties.
    ///
    /// ```
    /// let alone = gpu_pool::sync::Rendezvous::new(1);
    /// assert_eq!(alone.arrive(None), Ok(true));
    /// ```
    pub fn new(parties: usize) -> Self {
        let parties = u16::try_from(parties).expect("at most 65535 parties");
        let state = State { aborted: false, generation: 0, arrived: 0, parties };
        Rendezvous { word: AtomicU64::new(state.pack()), changed: EventCount::new() }
    }

    /// Waits until all parties have arrived; `Ok(true)` for the last of them, the leader. Everything that any party did
    /// before it arrived is visible afterwards. A party that gets [`Broken::TimedOut`] has not arrived, and may again.
    ///
    /// # Panics
    ///
    /// When more parties arrive than there are.
    ///
    /// ```
    /// use gpu_pool::sync::{Broken, Rendezvous};
    /// use std::time::Duration;
    /// let rendezvous = Rendezvous::new(2);
    /// assert_eq!(rendezvous.arrive(Some(Duration::from_millis(1))), Err(Broken::TimedOut));
    /// ```
    pub fn arrive(&self, limit: Option<Duration>) -> Result<bool, Broken> {
        let before = self.change(ord("rendezvous.arrive", Release), |state| {
            assert!(state.aborted || state.arrived < state.parties, "more arrivals than parties");
            (!state.aborted).then(|| State { arrived: state.arrived + 1, ..state }.met())
        });
        let Some(before) = before else { return Err(Broken::Aborted) };
        if before.arrived + 1 == before.parties {
            self.tell("rendezvous.leader.silent");
            return Ok(true);
        }
        let over = || self.outcome(before.generation);
        match self.changed.wait_until(limit, over) {
            Some(outcome) => outcome.map(|()| false),
            None => self.take_back(before.generation),
        }
    }

    /// One party will not come, now or ever: it counts as arrived, and later meetings do without it. What it did before is
    /// visible to the others after their meeting.
    ///
    /// ```
    /// let rendezvous = gpu_pool::sync::Rendezvous::new(2);
    /// rendezvous.withdraw();
    /// assert!(rendezvous.arrive(None).is_ok(), "alone now");
    /// ```
    pub fn withdraw(&self) {
        self.change(ord("rendezvous.withdraw", Release), |state| {
            debug_assert!(state.arrived < state.parties, "a party that has arrived, or none, is withdrawn");
            Some(State { parties: state.parties - 1, ..state }.met())
        });
        self.tell("rendezvous.withdraw.silent");
    }

    /// Ends all meetings that have not taken place. Who returns [`Broken::Aborted`] sees what was done before this call.
    ///
    /// ```
    /// let rendezvous = gpu_pool::sync::Rendezvous::new(2);
    /// rendezvous.abort();
    /// assert!(rendezvous.is_aborted());
    /// ```
    pub fn abort(&self) {
        self.word.fetch_or(ABORTED, ord("rendezvous.abort", Release));
        self.tell("rendezvous.abort.silent");
    }

    /// Whether [`abort`](Self::abort) was called.
    ///
    /// ```
    /// assert!(!gpu_pool::sync::Rendezvous::new(2).is_aborted());
    /// ```
    pub fn is_aborted(&self) -> bool {
        State::unpack(self.word.load(ord("rendezvous.is_aborted", Acquire))).aborted
    }

    /// How the meeting of `generation` ended, if it did. The generation is looked at first: a meeting that took place
    /// is not undone by a later abort, or its parties would disagree.
    fn outcome(&self, generation: u32) -> Option<Result<(), Broken>> {
        let state = State::unpack(self.word.load(ord("rendezvous.wait", Acquire)));
        if flag("rendezvous.abort_first") && state.aborted {
            return Some(Err(Broken::Aborted));
        }
        if state.generation != generation { Some(Ok(())) } else { state.aborted.then_some(Err(Broken::Aborted)) }
    }

    /// The time ran out: not arrived after all, unless it is over meanwhile.
    #[cold]
    fn take_back(&self, generation: u32) -> Result<bool, Broken> {
        loop {
            if let Some(outcome) = self.outcome(generation) {
                return outcome.map(|()| false);
            }
            let taken = self.change(Relaxed, |state| {
                let open = state.generation == generation && !state.aborted;
                open.then(|| State { arrived: state.arrived - 1, ..state })
            });
            if taken.is_some() {
                return Err(Broken::TimedOut);
            }
        }
    }

    /// Changes the word by `f`; what it was before, or `None` when `f` refused. A refusal has acquired what it saw. Who
    /// completes a meeting acquires by the fence that [`EventCount::notify`] begins with.
    fn change(&self, order: Ordering, mut f: impl FnMut(State) -> Option<State>) -> Option<State> {
        let before = self.word.fetch_update(order, Relaxed, |word| f(State::unpack(word)).map(State::pack));
        if before.is_err() {
            fence_at("rendezvous.refused", Acquire);
        }
        before.ok().map(State::unpack)
    }

    fn tell(&self, silent: &'static str) {
        if flag(silent) {
            // Forgets the wake-up only, not the fence that comes with it.
            fence_at("event.notify.fence", SeqCst);
        } else {
            self.changed.notify();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::{sync::atomic::AtomicUsize, thread, time::Instant};

    #[test]
    fn nobody_is_a_round_ahead_and_each_round_has_a_leader() {
        const ROUNDS: usize = crate::sync::rounds(2000);
        let rendezvous = Rendezvous::new(3);
        let (counter, leaders) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for round in 0..ROUNDS {
                        counter.fetch_add(1, Ordering::Relaxed);
                        leaders.fetch_add(usize::from(rendezvous.arrive(None).unwrap()), Ordering::Relaxed);
                        assert_eq!(counter.load(Ordering::Relaxed), 3 * (round + 1));
                        rendezvous.arrive(None).unwrap();
                    }
                });
            }
        });
        assert_eq!(leaders.into_inner(), ROUNDS);
    }

    #[test]
    fn an_abort_frees_everyone_for_good() {
        let rendezvous = Rendezvous::new(4);
        thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| assert_eq!(rendezvous.arrive(None), Err(Broken::Aborted)));
            }
            thread::sleep(Duration::from_millis(2));
            rendezvous.abort();
        });
        assert_eq!(rendezvous.arrive(None), Err(Broken::Aborted));
    }

    #[test]
    fn who_timed_out_has_not_arrived() {
        let rendezvous = Rendezvous::new(2);
        let start = Instant::now();
        assert_eq!(rendezvous.arrive(Some(Duration::from_millis(10))), Err(Broken::TimedOut));
        assert!(start.elapsed() >= Duration::from_millis(10));
        thread::scope(|s| {
            let other = s.spawn(|| rendezvous.arrive(None).unwrap());
            assert!(rendezvous.arrive(None).unwrap() ^ other.join().unwrap());
        });
    }

    #[test]
    fn a_withdrawal_completes_the_meeting_of_the_others() {
        let rendezvous = Rendezvous::new(3);
        thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| assert!(rendezvous.arrive(None).is_ok()));
            }
            thread::sleep(Duration::from_millis(2));
            rendezvous.withdraw();
        });
        thread::scope(|s| {
            let other = s.spawn(|| rendezvous.arrive(None));
            assert!(rendezvous.arrive(None).is_ok() && other.join().unwrap().is_ok());
        });
    }

    #[test]
    fn the_generation_wraps() {
        let rendezvous = Rendezvous::new(1);
        let last = State { aborted: false, generation: GENERATIONS, arrived: 0, parties: 1 };
        rendezvous.word.store(last.pack(), Ordering::Relaxed);
        assert_eq!(rendezvous.arrive(None), Ok(true));
        assert!(State::unpack(rendezvous.word.load(Ordering::Relaxed)) == State { generation: 0, ..last });
    }

    #[test]
    #[should_panic = "more arrivals than parties"]
    fn arriving_where_nobody_is_left_is_a_bug() {
        let rendezvous = Rendezvous::new(1);
        rendezvous.withdraw();
        let _ = rendezvous.arrive(None);
    }
}
