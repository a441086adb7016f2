//! Boxes that come home: from any thread to the one that owns the place they came from.
//!
//! # Contract
//!
//! [`Returns::push`] hands a box over and never waits, allocates nothing (the box is the list's node, see [`Linked`]),
//! and is over in one step: *as soon as it returns the owner can take the box*, whatever the pusher does next. What was
//! done to the box before is visible to who takes it. [`Returns::close`] ends it: each push is then either in the last
//! take or gets its box back, never both, never neither.
//!
//! # Mechanism
//!
//! ```text
//!            lane 0 (everyone)        lane 1 (device thread 0)    lane 2 (device thread 1)  ...
//!   head ->  box -> box -> null       null                        box -> null                      cache line each
//!            youngest
//! ```
//!
//! Each lane is an [`Inbox`](super::Inbox) with the node inside the element: a push links the box in front by
//! compare-and-swap, a take unhooks the whole list by one compare-and-swap and turns it round. Only heads are ever
//! compared, and nobody follows a pointer that is not his own, so a box may come round again at any time, even while
//! another push is about to link itself before it (no ABA). It is Treiber's stack used the way of [mimalloc's
//! `xthread_free`](https://github.com/microsoft/mimalloc/blob/master/src/free.c). A closed lane's head is an address
//! that no box has.
//!
//! # Why lanes, and no batches at the sender
//!
//! What makes frees to another thread slow is the cache line that all senders fight for.
//! [snmalloc](https://github.com/microsoft/snmalloc/blob/main/src/snmalloc/mem/remotecache.h) therefore collects them
//! at the sender and hands over many at a time. But then memory that everybody has let go of lies with a sender, and
//! comes home only when that one does something: a sender that has parked, waits in a collective or hangs in a driver
//! call keeps it. Under a fixed budget of GPU memory that is an out-of-memory error with free memory around, so the
//! owner would need a way to ask ("flush, please"), an answer to wait for, and a limit to the wait, for the sender may
//! never answer.
//!
//! Here each device thread has a lane to itself instead. Its line stays in the sender's cache, since nobody else writes
//! to it but the owner when it takes, and a compare-and-swap on such a line costs a few nanoseconds: about what filling
//! a batch and checking its size cost. On 2 busy cores of an AMD EPYC a push took 3 to 5 ns by a lane of one's own, and
//! 36 by the shared one while another thread pushed there too. The senders' threads are known and few, one per device;
//! everyone else shares lane 0. The owner pays by looking at as many lines as there are lanes, when its own lists are
//! empty: nine loads for eight devices, 5 to 10 ns as long as nothing was pushed. An owner that takes in a tight loop
//! takes the line away from the sender each time (66 ns a push), so it takes when it needs something, not to pass the
//! time.
//!
//! A lane is a hint about who comes often. Any thread may push to any lane; it is only slower where two do.

use super::{
    linked::{Linked, Taken, set_next},
    shim::atomic::{AtomicPtr, Ordering::*},
    site::{fence_at, flag, ord},
};
use crossbeam::utils::CachePadded;
use std::{fmt, marker::PhantomData, ptr};

/// `src/sync/README.md` has the protocol.
pub struct Returns<T: Linked> {
    /// The youngest box of each lane; null when empty, [`closed`] when closed.
    lanes: Box<[CachePadded<AtomicPtr<T>>]>,
    _owns: PhantomData<Box<T>>,
}

// SAFETY: boxes move from one thread to another, hence `T: Send` (which `Linked` demands); none is shared.
unsafe impl<T: Linked> Send for Returns<T> {}
// SAFETY: as above; `push` and `take` touch only nodes that they own.
unsafe impl<T: Linked> Sync for Returns<T> {}

/// The head of a closed lane. No box is there: it would not be aligned.
fn closed<T>() -> *mut T {
    ptr::without_provenance_mut(1)
}

impl<T: Linked> Returns<T> {
    /// Open, and empty. Lane 0 is for everyone; the others are for one thread each.
    ///
    /// # Panics
    ///
    /// Without a lane.
    pub fn new(lanes: usize) -> Self {
        const { assert!(align_of::<T>() > 1 && size_of::<T>() > 0, "a node contains its link") };
        assert!(lanes > 0, "nothing can come home without a lane");
        let lanes = (0..lanes).map(|_| CachePadded::new(AtomicPtr::new(ptr::null_mut()))).collect();
        Returns { lanes, _owns: PhantomData }
    }

    /// Hands `value` over, by the thread's own lane, or lane 0 for threads without (and for lanes that do not exist).
    ///
    /// # Errors
    ///
    /// The box, once closed; then what was done before [`close`](Self::close) is visible.
    #[inline]
    pub fn push(&self, lane: usize, value: Box<T>) -> Result<(), Box<T>> {
        let node = Box::into_raw(value);
        // Handles are dropped with whatever lane they have found: a wrong number must not panic there.
        let head = self.lanes.get(lane).unwrap_or(&self.lanes[0]);
        let mut seen = head.load(Relaxed);
        loop {
            if seen == closed() {
                fence_at("returns.push.closed", Acquire);
                // SAFETY: it came from a box above, and was not published.
                return Err(unsafe { Box::from_raw(node) });
            }
            // SAFETY: this thread's, until the exchange below succeeds. `seen` is not followed, only stored.
            unsafe { set_next(node, seen) };
            if flag("returns.push.load_then_store") {
                head.store(node, ord("returns.push", Release));
                return Ok(());
            }
            // Release gives the box away. Older boxes' releases stay in force: each exchange continues the release
            // sequence of the ones before it, so one acquiring exchange sees them all.
            match head.compare_exchange_weak(seen, node, ord("returns.push", Release), Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => seen = now,
            }
        }
    }

    /// Whether there is nothing to take. A hint, outdated when it returns: but what was pushed before something that
    /// the caller has been told of is not missed.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(|head| !is_list(head.load(Relaxed)))
    }

    /// Takes everything that is there, oldest first in each lane. Any thread may; a box goes to one taker. Looks before
    /// it swaps: of an empty lane it costs a load.
    #[inline]
    pub fn take(&self) -> Taken<T> {
        let lanes = if flag("returns.take.first_lane_only") { &self.lanes[..1] } else { &*self.lanes };
        let mut taken = Taken::none();
        // From the last lane to the first, since lists are put in front.
        for head in lanes.iter().rev() {
            let mut seen = head.load(Relaxed);
            // Not a swap: that would open a lane that was closed since the look.
            while is_list(seen) {
                let swapped = if flag("returns.take.reopens") {
                    Ok(head.swap(ptr::null_mut(), ord("returns.take", Acquire)))
                } else {
                    head.compare_exchange_weak(seen, ptr::null_mut(), ord("returns.take", Acquire), Relaxed)
                };
                match swapped {
                    Ok(list) => {
                        // SAFETY: the exchange made this thread the owner of the list, and acquired what its senders
                        // wrote.
                        unsafe { add_turned(&mut taken, list) };
                        break;
                    }
                    Err(now) => seen = now,
                }
            }
        }
        taken
    }

    /// Takes everything for the last time: from now on pushes get their boxes back. For each push one of the two is
    /// true.
    pub fn close(&self) -> Taken<T> {
        let mut taken = Taken::none();
        for head in self.lanes.iter().rev() {
            let list = if flag("returns.close.load_then_store") {
                let list = head.load(ord("returns.take", Acquire));
                head.store(closed(), ord("returns.close", AcqRel));
                list
            } else {
                // Acquires the boxes, and releases what was done before to those who will find the lane closed.
                head.swap(closed(), ord("returns.close", AcqRel))
            };
            // SAFETY: as in `take`.
            unsafe { add_turned(&mut taken, list) };
        }
        taken
    }
}

impl<T: Linked> Drop for Returns<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

impl<T: Linked> fmt::Debug for Returns<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Returns").field("lanes", &self.lanes.len()).field("empty", &self.is_empty()).finish()
    }
}

fn is_list<T>(head: *mut T) -> bool {
    !head.is_null() && head != closed()
}

/// Puts a lane's list in front, the oldest first.
///
/// # Safety
///
/// `head` was swapped out by the caller, who gives away the list, if it is one.
unsafe fn add_turned<T: Linked>(taken: &mut Taken<T>, head: *mut T) {
    if is_list(head) {
        // SAFETY: the caller's promise.
        unsafe { taken.prepend_turned(head) };
    }
}

#[cfg(all(test, not(loom)))]
#[path = "returns_tests.rs"]
mod tests;
