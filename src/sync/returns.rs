//! Boxes that come home: from any thread to the one that owns the place they came from.
//!
//! # Contract
//!
//! [`Returns::push`] hands a box over and never waits, allocates nothing (the box is the list's node, see [`Linked`]), and is
//! over in one step: *as soon as it returns the owner can take the box*, whatever the pusher does next. What was done to the
//! box before is visible to who takes it. [`Returns::close`] ends it: each push is then either in the last take or gets its
//! box back, never both, never neither.
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
//! compare-and-swap, a take unhooks the whole list by one compare-and-swap and turns it round. Only heads are ever compared,
//! and nobody follows a pointer that is not his own, so a box may come round again at any time, even while another push is
//! about to link itself before it (no ABA). It is Treiber's stack used the way of
//! [mimalloc's `xthread_free`](https://github.com/microsoft/mimalloc/blob/master/src/free.c). A closed lane's head is an
//! address that no box has.
//!
//! # Why lanes, and no batches at the sender
//!
//! What makes frees to another thread slow is the cache line that all senders fight for.
//! [snmalloc](https://github.com/microsoft/snmalloc/blob/main/src/snmalloc/mem/remotecache.h) therefore collects them at the
//! sender and hands over many at a time. But then memory that everybody has let go of lies with a sender, and comes home only
//! when that one does something: a sender that has parked, waits in a collective or hangs in a driver call keeps it. Under a
//! fixed budget of GPU memory that is an out-of-memory error with free memory around, so the owner would need a way to ask
//! ("flush, please"), an answer to wait for, and a limit to the wait, for the sender may never answer.
//!
//! Here each device thread has a lane to itself instead. Its line stays in the sender's cache, since nobody else writes to
//! it but the owner when it takes, and a compare-and-swap on such a line costs a few nanoseconds: about what filling a batch
//! and checking its size cost. On 2 busy cores of an AMD EPYC a push took 3 to 5 ns by a lane of one's own, and 36 by the
//! shared one while another thread pushed there too. The senders' threads are known and few, one per device; everyone else
//! shares lane 0. The owner pays by looking at as many lines as there are lanes, when its own lists are empty: nine loads for
//! eight devices, 5 to 10 ns as long as nothing was pushed. An owner that takes in a tight loop takes the line away from the
//! sender each time (66 ns a push), so it takes when it needs something, not to pass the time.
//!
//! A lane is a hint about who comes often. Any thread may push to any lane; it is only slower where two do.

use super::{
    linked::{Linked, Taken, set_next},
    shim::atomic::{AtomicPtr, Ordering::*},
    site::{fence_at, flag, ord},
};
use crossbeam::utils::CachePadded;
use std::{fmt, marker::PhantomData, mem, ptr};

/// `src/sync/README.md` has the protocol.
///
/// ```
/// # use gpu_pool::sync::{Link, Linked};
/// # struct Block(u32, Link<Block>);
/// # // SAFETY: always the same field, and nobody else touches it.
/// # unsafe impl Linked for Block { fn link(&self) -> &Link<Block> { &self.1 } }
/// use gpu_pool::sync::Returns;
/// let home = Returns::new(2);
/// std::thread::scope(|s| {
///     s.spawn(|| home.push(1, Box::new(Block(7, Link::default()))).is_ok());
/// });
/// assert_eq!(home.take().map(|block| block.0).collect::<Vec<_>>(), [7]);
/// ```
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
    ///
    /// ```
    /// # use gpu_pool::sync::{Link, Linked, Returns};
    /// # struct Block(u32, Link<Block>);
    /// # // SAFETY: always the same field, and nobody else touches it.
    /// # unsafe impl Linked for Block { fn link(&self) -> &Link<Block> { &self.1 } }
    /// let devices = 8;
    /// assert!(Returns::<Block>::new(1 + devices).is_empty());
    /// ```
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
    ///
    /// ```
    /// # use gpu_pool::sync::{Link, Linked, Returns};
    /// # #[derive(Debug)] struct Block(u32, Link<Block>);
    /// # // SAFETY: always the same field, and nobody else touches it.
    /// # unsafe impl Linked for Block { fn link(&self) -> &Link<Block> { &self.1 } }
    /// let home = Returns::new(1);
    /// home.push(0, Box::new(Block(1, Link::default()))).unwrap();
    /// assert_eq!(home.close().count(), 1);
    /// assert_eq!(home.push(0, Box::new(Block(2, Link::default()))).unwrap_err().0, 2);
    /// ```
    #[inline]
    pub fn push(&self, lane: usize, value: Box<T>) -> Result<(), Box<T>> {
        let node = Box::into_raw(value);
        // SAFETY: a list of one, which is this thread's.
        if unsafe { self.publish(lane, node, node) } {
            Ok(())
        } else {
            // SAFETY: it came from a box above, and was not published.
            Err(unsafe { Box::from_raw(node) })
        }
    }

    /// Hands many over, linked to each other beforehand and published by one compare-and-swap: a take has all of them, next to
    /// each other, or none.
    ///
    /// # Errors
    ///
    /// The boxes in their order, once closed.
    ///
    /// ```
    /// # use gpu_pool::sync::{Link, Linked, Returns};
    /// # #[derive(Debug)] struct Block(u32, Link<Block>);
    /// # // SAFETY: always the same field, and nobody else touches it.
    /// # unsafe impl Linked for Block { fn link(&self) -> &Link<Block> { &self.1 } }
    /// let home = Returns::new(1);
    /// home.push_chain(0, (0..3).map(|i| Box::new(Block(i, Link::default())))).unwrap();
    /// assert!(home.take().map(|block| block.0).eq(0..3));
    /// ```
    pub fn push_chain(&self, lane: usize, values: impl IntoIterator<Item = Box<T>>) -> Result<(), Vec<Box<T>>> {
        // Youngest first; owns the boxes until they are published, should the iterator panic.
        let mut chain = Taken::none();
        let mut oldest: *mut T = ptr::null_mut();
        for value in values {
            if flag("returns.push_chain.one_by_one") {
                self.push(lane, value).map_err(|value| vec![value])?;
                continue;
            }
            let node = Box::into_raw(value);
            // SAFETY: it came from a box, and is this thread's.
            unsafe { chain.prepend(node) };
            if oldest.is_null() {
                oldest = node;
            }
        }
        if oldest.is_null() {
            return Ok(());
        }
        // SAFETY: a list from the youngest to the oldest node, which are this thread's.
        if unsafe { self.publish(lane, chain.first(), oldest) } {
            mem::forget(chain);
            return Ok(());
        }
        // SAFETY: not published, so still this thread's; the head it may have been linked to is not.
        unsafe { set_next(oldest, ptr::null_mut()) };
        let mut values: Vec<_> = chain.collect();
        values.reverse();
        Err(values)
    }

    /// Puts a list in front of a lane's; false if the lane is closed.
    ///
    /// # Safety
    ///
    /// `youngest` leads over links to `oldest`; the nodes came from boxes and are the caller's. After `true` they are not.
    #[inline(always)]
    unsafe fn publish(&self, lane: usize, youngest: *mut T, oldest: *mut T) -> bool {
        // Handles are dropped with whatever lane they have found: a wrong number must not panic there.
        let head = self.lanes.get(lane).unwrap_or(&self.lanes[0]);
        let mut seen = head.load(Relaxed);
        loop {
            if seen == closed() {
                fence_at("returns.push.closed", Acquire);
                return false;
            }
            // SAFETY: the caller's, until the exchange below succeeds. `seen` is not followed, only stored.
            unsafe { set_next(oldest, seen) };
            if flag("returns.push.load_then_store") {
                head.store(youngest, ord("returns.push", Release));
                return true;
            }
            // Release gives the list away. Older lists' releases stay in force: each exchange continues the release sequence
            // of the ones before it, so one acquiring exchange sees them all.
            match head.compare_exchange_weak(seen, youngest, ord("returns.push", Release), Relaxed) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
    }

    /// Whether there is nothing to take. A hint, outdated when it returns: but what was pushed before something that the
    /// caller has been told of is not missed.
    ///
    /// ```
    /// # use gpu_pool::sync::{Link, Linked, Returns};
    /// # #[derive(Debug)] struct Block(u32, Link<Block>);
    /// # // SAFETY: always the same field, and nobody else touches it.
    /// # unsafe impl Linked for Block { fn link(&self) -> &Link<Block> { &self.1 } }
    /// let home = Returns::new(2);
    /// home.push(1, Box::new(Block(1, Link::default()))).unwrap();
    /// assert!(!home.is_empty());
    /// ```
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(|head| !is_list(head.load(Relaxed)))
    }

    /// Takes everything that is there, oldest first in each lane. Any thread may; a box goes to one taker. Looks before it
    /// swaps: of an empty lane it costs a load.
    ///
    /// ```
    /// # use gpu_pool::sync::{Link, Linked, Returns};
    /// # #[derive(Debug)] struct Block(u32, Link<Block>);
    /// # // SAFETY: always the same field, and nobody else touches it.
    /// # unsafe impl Linked for Block { fn link(&self) -> &Link<Block> { &self.1 } }
    /// let home = Returns::new(1);
    /// (0..3).for_each(|i| home.push(0, Box::new(Block(i, Link::default()))).unwrap());
    /// assert!(home.take().map(|block| block.0).eq(0..3));
    /// ```
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
                        // SAFETY: the exchange made this thread the owner of the list, and acquired what its senders wrote.
                        unsafe { add_turned(&mut taken, list) };
                        break;
                    }
                    Err(now) => seen = now,
                }
            }
        }
        taken
    }

    /// Takes everything for the last time: from now on pushes get their boxes back. For each push one of the two is true.
    ///
    /// ```
    /// # use gpu_pool::sync::{Link, Linked, Returns};
    /// # #[derive(Debug)] struct Block(u32, Link<Block>);
    /// # // SAFETY: always the same field, and nobody else touches it.
    /// # unsafe impl Linked for Block { fn link(&self) -> &Link<Block> { &self.1 } }
    /// let home = Returns::<Block>::new(1);
    /// assert_eq!(home.close().count() + home.close().count(), 0); // again is fine
    /// assert!(home.is_empty());
    /// ```
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
