//! Returns boxes from any thread to their owner's thread. `README.md` has the proof.
//!
//! [`Returns::push`] hands a box over. It never waits, and it allocates nothing (the box is the list's node, see
//! [`Linked`]). *As soon as it returns, the owner can take the box*, regardless of what the pusher does next.
//! Everything done to the box before is visible to the taker. [`Returns::close`] ends this: each push is then either in
//! the last take or gets its box back, never both, never neither.
//!
//! Each lane is an [`Inbox`](super::Inbox) with the node inside the element, and with a cache line of its own.
//!
//! Each device thread has a lane; all other threads share lane 0. A lane is only a hint. Any thread may push to any
//! lane; it is slower if two threads share one.

use super::{
    linked::{Linked, Taken, set_next},
    shim::atomic::{AtomicPtr, Ordering::*},
    site::{fence_at, flag, ord},
};
use crossbeam::utils::CachePadded;
use std::{marker::PhantomData, ptr};

/// `src/sync/README.md` has the protocol.
pub struct Returns<T: Linked> {
    /// The youngest box of each lane; null when empty, [`closed`] when closed.
    lanes: Box<[CachePadded<AtomicPtr<T>>]>,
    _owns: PhantomData<Box<T>>,
}

// SAFETY: boxes move from one thread to another, so `T: Send` (`Linked` demands it); none is shared.
unsafe impl<T: Linked> Send for Returns<T> {}
// SAFETY: as above; `push` and `take` use only nodes that they own.
unsafe impl<T: Linked> Sync for Returns<T> {}

/// The head of a closed lane. No box can have this address, since it is not aligned.
fn closed<T>() -> *mut T {
    ptr::without_provenance_mut(1)
}

impl<T: Linked> Returns<T> {
    /// Open and empty lanes. Lane 0 is for all threads; the others are for one thread each. Panics: if `lanes` is 0.
    pub fn new(lanes: usize) -> Self {
        const { assert!(align_of::<T>() > 1 && size_of::<T>() > 0, "a node contains its link") };
        assert!(lanes > 0, "nothing can come home without a lane");
        let lanes = (0..lanes).map(|_| CachePadded::new(AtomicPtr::new(ptr::null_mut()))).collect();
        Returns { lanes, _owns: PhantomData }
    }

    /// Hands `value` over through the thread's lane, or lane 0 for threads without one (and for a lane that does not
    /// exist). Errors: the box, if the lanes are closed; then everything done before [`close`](Self::close) is visible.
    #[inline]
    pub fn push(&self, lane: usize, value: Box<T>) -> Result<(), Box<T>> {
        let node = Box::into_raw(value);
        node.expose_provenance();
        // This runs in drops of handles, so a wrong lane number must not panic.
        let head = self.lanes.get(lane).unwrap_or(&self.lanes[0]);
        let mut seen = head.load(Relaxed);
        loop {
            if seen == closed() {
                fence_at("returns.push.closed", Acquire);
                // SAFETY: the node came from a box above and was not published.
                return Err(unsafe { Box::from_raw(node) });
            }
            // SAFETY: the node is this thread's until the exchange below succeeds. `seen` is only stored, not followed.
            unsafe { set_next(node, seen) };
            if flag("returns.push.load_then_store") {
                head.store(node, ord("returns.push", Release));
                return Ok(());
            }
            // Release passes the box on. Each exchange continues the release sequence of the earlier ones, so the
            // releases of older boxes stay in force: one acquiring exchange sees all boxes.
            match head.compare_exchange_weak(seen, node, ord("returns.push", Release), Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => seen = now,
            }
        }
    }

    /// The answer may be outdated on return. But a push before something that the caller knows of is not missed.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(|head| !is_list(head.load(Relaxed)))
    }

    /// Takes all boxes, oldest first in each lane. Any thread may call it; each box goes to one taker. It loads before
    /// it swaps, so an empty lane costs a load.
    #[inline]
    pub fn take(&self) -> Taken<T> {
        let lanes = if flag("returns.take.first_lane_only") { &self.lanes[..1] } else { &*self.lanes };
        let mut taken = Taken::none();
        // From the last lane to the first, since each list is put in front.
        for head in lanes.iter().rev() {
            let mut seen = head.load(Relaxed);
            // No swap: it would reopen a lane that was closed after the load.
            while is_list(seen) {
                let swapped = if flag("returns.take.reopens") {
                    Ok(head.swap(ptr::null_mut(), ord("returns.take", Acquire)))
                } else {
                    head.compare_exchange_weak(seen, ptr::null_mut(), ord("returns.take", Acquire), Relaxed)
                };
                match swapped {
                    Ok(list) => {
                        // SAFETY: the exchange made this thread the list's owner and acquired the senders' writes.
                        unsafe { add_turned(&mut taken, list) };
                        break;
                    }
                    Err(now) => seen = now,
                }
            }
        }
        taken
    }

    /// Takes all boxes for the last time: a push is in the last take, or gets its box back.
    pub fn close(&self) -> Taken<T> {
        let mut taken = Taken::none();
        for head in self.lanes.iter().rev() {
            let list = if flag("returns.close.load_then_store") {
                let list = head.load(ord("returns.take", Acquire));
                head.store(closed(), ord("returns.close", AcqRel));
                list
            } else {
                // Acquires the boxes, and releases earlier writes to the threads that will find the lane closed.
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

debug_as!(Returns<T> [T: Linked], |self| lanes = self.lanes.len(), empty = self.is_empty());

fn is_list<T>(head: *mut T) -> bool {
    !head.is_null() && head != closed()
}

/// Puts a lane's list in front, oldest first.
///
/// # Safety
/// The caller has swapped `head` out, and passes on the list (if it is one).
unsafe fn add_turned<T: Linked>(taken: &mut Taken<T>, head: *mut T) {
    if is_list(head) {
        // SAFETY: the caller's promise.
        unsafe { taken.prepend_turned(head) };
    }
}
