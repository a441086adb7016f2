//! Models of data that are their own flags, as `kernels/inbox.cuh` sends them: its words and credits between two
//! members. (The kernels themselves run on the CPU by `kernels/on_cpu`; here loom tries the orders that the memory
//! model allows.)
//!
//! Words are written and polled with relaxed accesses. What must be ordered is a receiver's removal of what it has
//! taken before the sender's next data: a cell that loom watches is written with the one, and read with the other.

use super::support::{Watched, bite, check};
use crate::sync::{
    shim::{
        Arc,
        atomic::{AtomicU32, Ordering, fence},
        thread,
    },
    site::flag,
};

const EMPTY: u32 = u32::MAX;
/// No execution of a correct model polls so often.
const MOST_POLLS: usize = 40;

/// A unit of two words, in an inbox.
struct Unit([AtomicU32; 2]);

impl Unit {
    fn new() -> Unit {
        Unit([AtomicU32::new(EMPTY), AtomicU32::new(EMPTY)])
    }

    fn put(&self, value: u32) {
        self.0.iter().for_each(|word| word.store(value, Ordering::Relaxed));
    }

    /// The words, when both have come. None: the gang has failed.
    fn take(&self, failed: impl Fn() -> bool) -> Option<[u32; 2]> {
        for _ in 0..MOST_POLLS {
            let words = [0, 1].map(|k: usize| self.0[k].load(Ordering::Relaxed));
            let come = |k: usize| words[k] != EMPTY;
            if come(0) && (come(1) || flag("model.inbox_words.looks_at_one_word")) {
                if !flag("model.inbox_words.leaves_what_it_has_taken") {
                    self.put(EMPTY);
                }
                return Some(words);
            }
            if failed() {
                return None;
            }
            thread::yield_now();
        }
        panic!("what was sent never comes");
    }
}

/// A slot with its credit. Each call has one step, so that the second call needs the slot of the first.
struct Slot {
    unit: Unit,
    taken: AtomicU32,
    removed: [Watched<bool>; 2],
}

/// Pieces through one slot: of one kernel if `steps` is 2, of two kernels if it is 1.
fn through_a_slot(steps: u32) {
    let slot = Arc::new(Slot { unit: Unit::new(), taken: AtomicU32::new(0), removed: Default::default() });
    let relaxed = flag("model.inbox_words.credit_is_relaxed");
    let sending = thread::spawn({
        let slot = slot.clone();
        move || {
            let wait = |count| {
                while slot.taken.load(Ordering::Relaxed) < count {
                    thread::yield_now();
                }
                if !flag("model.inbox_words.credit_is_not_acquired") {
                    fence(Ordering::Acquire);
                }
            };
            for step in 0..2 {
                let first = step % steps == 0;
                // A kernel begins with empty slots, and ends when all that it has sent is taken.
                if !first && !flag("model.inbox_words.sends_without_credit") {
                    wait(step);
                }
                if step == 1 {
                    assert!(slot.removed[0].get(), "sent before the last piece was taken");
                }
                slot.unit.put(10 + step);
                let last = (step + 1) % steps == 0;
                if last && !flag("model.inbox_words.ends_before_all_is_taken") {
                    wait(step + 1);
                }
            }
        }
    });
    for step in 0..2 {
        assert_eq!(slot.unit.take(|| false), Some([10 + step; 2]));
        slot.removed[step as usize].set(true);
        slot.taken.store(step + 1, if relaxed { Ordering::Relaxed } else { Ordering::Release });
    }
    sending.join().unwrap();
    assert!(slot.unit.0.iter().all(|word| word.load(Ordering::Relaxed) == EMPTY));
}

#[test]
fn a_slot_is_used_again_in_one_kernel() {
    check(|| through_a_slot(2));
}

#[test]
fn a_slot_is_used_again_in_the_next_kernel() {
    check(|| through_a_slot(1));
}

/// What one member receives, by parity; and when it has removed it, by meeting.
struct Rooms {
    rooms: [Unit; 2],
    removed: [Watched<bool>; 3],
}

impl Rooms {
    fn of(&self, meeting: usize) -> &Unit {
        &self.rooms[if flag("model.inbox_words.one_parity") { 0 } else { meeting % 2 }]
    }
}

/// Three meetings of two members in one trip each; their kernels' ends are fences.
fn three_meetings(members: &[Rooms; 2], me: usize) {
    for meeting in 0..3 {
        let (own, others) = (&members[me], &members[1 - me]);
        if meeting == 2 {
            assert!(others.removed[0].get(), "sent before it was taken");
        }
        others.of(meeting).put(meeting as u32);
        assert_eq!(own.of(meeting).take(|| false), Some([meeting as u32; 2]));
        own.removed[meeting].set(true);
        if !flag("model.inbox_words.kernels_run_into_each_other") {
            fence(Ordering::AcqRel);
        }
    }
}

#[test]
fn two_parities_are_enough() {
    check(|| {
        let rooms = || Rooms { rooms: [Unit::new(), Unit::new()], removed: Default::default() };
        let members = Arc::new([rooms(), rooms()]);
        let other = thread::spawn({
            let members = members.clone();
            move || three_meetings(&members, 1)
        });
        three_meetings(&members, 0);
        other.join().unwrap();
        for member in members.iter() {
            for word in member.rooms.iter().flat_map(|unit| &unit.0) {
                assert_eq!(word.load(Ordering::Relaxed), EMPTY);
            }
        }
    });
}

/// A sender gives up in the middle of a unit. All drain; the receiver's inbox is emptied; they meet again.
#[test]
fn a_failed_call_leaves_nothing() {
    check(|| {
        let state = Arc::new((Unit::new(), AtomicU32::new(0)));
        let failing = thread::spawn({
            let state = state.clone();
            move || {
                state.0.0[0].store(1, Ordering::Relaxed);
                state.1.store(1, Ordering::Relaxed);
            }
        });
        let taken = state.0.take(|| state.1.load(Ordering::Relaxed) == 1);
        assert_eq!(taken, None, "half a unit");
        failing.join().unwrap();
        if !flag("model.inbox_words.is_not_emptied") {
            state.0.put(EMPTY);
        }
        let sending = thread::spawn({
            let state = state.clone();
            move || {
                // The other word first, since words come in any order.
                state.0.0[1].store(2, Ordering::Relaxed);
                state.0.0[0].store(2, Ordering::Relaxed);
            }
        });
        assert_eq!(state.0.take(|| false), Some([2, 2]));
        sending.join().unwrap();
    });
}

#[test]
fn teeth() {
    bite("inbox_words");
}
