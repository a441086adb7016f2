//! A bounded queue for one producer and one consumer. `README.md` has the proof.
//!
//! First in, first out. Neither side ever waits. The producer's work before a push is visible after the pop of the
//! element; the consumer's work before a pop is visible to the producer when it reuses the slot.
//!
//! * The capacity is a power of two, and the indices never wrap at the capacity: `tail - head` (wrapping) is the number
//!   of elements, from 0 to the capacity. No slot is wasted, and the end of the array is no special case.
//! * `head` and `tail` have separate cache lines. Each side also keeps a private copy of *both*: of its own index, so
//!   that it never reads back a line that it has just written (on AMD that gains 10 %,
//!   [rtrb#132](https://github.com/mgeier/rtrb/pull/132)); and of the other index, so that it reads the shared one only
//!   if the copy says full or empty ([MCRingBuffer](https://ieeexplore.ieee.org/document/5470368)).
//! * A batch writes many slots and publishes once: about four times the throughput at 32 elements.

use super::shim::{
    Arc, UnsafeCell,
    atomic::{AtomicUsize, Ordering::*},
    prefetch_for_write,
};
use super::site::{flag, ord};
use crate::contain::contain;
use crossbeam::utils::CachePadded;
use std::mem::MaybeUninit;

/// A ring of at least `capacity` slots, rounded up to a power of two. Elements not popped are dropped with the second
/// side. A panic in such a drop is caught. Panics for a capacity of 0, or above half the address space.
pub fn channel<T: Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    channel_from(capacity, 0)
}

/// [`channel`] with indices that start at `start`, so that tests can let them wrap.
#[doc(hidden)]
pub fn channel_from<T: Send>(capacity: usize, start: usize) -> (Producer<T>, Consumer<T>) {
    assert!(capacity > 0, "a ring needs a slot");
    assert!(capacity <= usize::MAX / 2, "a ring has at most half the address space's slots");
    let slots: Box<[_]> = (0..capacity.next_power_of_two()).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect();
    let shared = Arc::new(Shared {
        head: CachePadded::new(AtomicUsize::new(start)),
        tail: CachePadded::new(AtomicUsize::new(start)),
        mask: slots.len() - 1,
        ahead: if size_of_val(&*slots) >= 4 * PREFETCH_BYTES { PREFETCH_BYTES / size_of::<T>() } else { 0 },
        slots,
    });
    (
        Producer { shared: shared.clone(), tail: start, known_head: start },
        Consumer { shared, head: start, known_tail: start },
    )
}

struct Shared<T> {
    head: CachePadded<AtomicUsize>,
    tail: CachePadded<AtomicUsize>,
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
    mask: usize,
    /// How many slots ahead the producer prefetches; 0 for small rings, where the consumer uses these lines.
    ahead: usize,
}

// SAFETY: only the slots are not `Sync` by themselves. Slots from head up to tail belong to the one consumer, the
// others to the one producer. Elements move from one thread to the other, so `T: Send` is needed.
unsafe impl<T: Send> Sync for Shared<T> {}

/// How far ahead of its tail the producer prefetches slots: eight cache lines, found by experiment. With two lines the
/// throughput was 0.2-1.2 of rtrb's at 1024 slots, with eight 0.95-1.7 (three short, noisy runs each).
const PREFETCH_BYTES: usize = 512;

impl<T> Shared<T> {
    /// Once per cache line. A consumer close behind the producer has shared copies of the lines ahead, and each would
    /// cost the store buffer a round trip: 32 million elements per second without the prefetch, 116 million with it, at
    /// 1024 slots of 8 bytes on two cores of a shared Xeon.
    #[inline(always)]
    fn prefetch(&self, tail: usize) {
        if self.ahead == 0 {
            return;
        }
        let slot = self.slots.as_ptr().wrapping_add(tail.wrapping_add(self.ahead) & self.mask);
        if slot.addr() % 64 < size_of::<T>() {
            prefetch_for_write(slot);
        }
        for line in 1..size_of::<T>().div_ceil(64) {
            prefetch_for_write(slot.wrapping_byte_add(64 * line));
        }
    }

    /// # Safety
    /// The caller is the producer, and the slot belongs to it.
    #[inline(always)]
    unsafe fn write(&self, index: usize, value: T) {
        // SAFETY: masked by length - 1, so in bounds; the caller owns the slot.
        unsafe { self.slots.get_unchecked(index & self.mask).with_mut(|slot| (*slot).write(value)) };
    }

    /// # Safety
    /// The caller is the consumer, and the slot belongs to it and holds a value, which is not read again.
    #[inline(always)]
    unsafe fn read(&self, index: usize) -> T {
        // SAFETY: masked by length - 1, so in bounds; the caller owns the slot, which is initialised.
        unsafe { self.slots.get_unchecked(index & self.mask).with(|slot| (*slot).assume_init_read()) }
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        if std::mem::needs_drop::<T>() {
            // Both sides are dropped, and the `Arc` orders their work before this.
            let (mut head, tail) = (self.head.load(Relaxed), self.tail.load(Relaxed));
            while head != tail {
                // SAFETY: slots from head to tail hold values, and neither side exists any more.
                let value = unsafe { self.read(head) };
                // An element whose drop panics does not prevent the drop of the others.
                contain(|| drop(value));
                head = head.wrapping_add(1);
            }
        }
    }
}

/// The side that pushes. There is one, so it cannot be cloned:
///
/// ```compile_fail,E0599
/// let (producer, _consumer) = gpu_pool::extend::sync::ring::channel::<u8>(1);
/// let second = producer.clone();
/// ```
// On its own cache line: the handles hold the private indices. Two handles in one stack frame would share a line
// (slower by a factor of 3 to 10, also with rtrb).
#[repr(align(128))]
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
    tail: usize,
    /// At or behind the true head.
    known_head: usize,
}

impl<T: Send> Producer<T> {
    /// Adds an element. Errors: [`Full`] with the element.
    #[inline]
    pub fn push(&mut self, value: T) -> Result<(), Full<T>> {
        fail_if!(self.free(1) == 0, Full(value));
        if flag("ring.publishes_before_writing") {
            self.shared.tail.store(self.tail.wrapping_add(1), ord("ring.tail.store", Release));
        }
        // SAFETY: known_head is at most capacity - 1 behind, so the slot at tail is free and the producer's.
        unsafe { self.shared.write(self.tail, value) };
        self.shared.prefetch(self.tail);
        self.tail = self.tail.wrapping_add(1);
        self.shared.tail.store(self.tail, ord("ring.tail.store", Release));
        Ok(())
    }

    /// Adds elements until the ring is full or `items` ends, and publishes them at once. Returns their number. Takes
    /// only as many elements from `items` as fit.
    pub fn push_batch(&mut self, items: &mut impl Iterator<Item = T>) -> usize {
        let start = self.tail;
        // The other side's index is read once per batch: a second read would be a cache miss, mostly without gain.
        let want = items.size_hint().1.unwrap_or(usize::MAX).min(self.capacity());
        let free = self.free(want);
        if free == 0 {
            // Without a store, so that a producer that spins on a full ring does not take the line from the consumer.
            return 0;
        }
        let end = self.tail.wrapping_add(free);
        // Publishes on drop, so that elements are not lost when the iterator panics.
        let batch = PushBatch(self);
        while batch.0.tail != end
            && let Some(value) = items.next()
        {
            // SAFETY: as in `push`.
            unsafe { batch.0.shared.write(batch.0.tail, value) };
            batch.0.tail = batch.0.tail.wrapping_add(1);
        }
        batch.0.tail.wrapping_sub(start)
    }

    /// The number of free slots. It may grow at any time; only the producer makes it smaller.
    pub fn slots(&self) -> usize {
        // Relaxed: a push loads head again with acquire, and coherence guarantees that it finds no older value.
        self.capacity() - self.tail.wrapping_sub(self.shared.head.load(Relaxed))
    }

    /// The number of slots.
    pub fn capacity(&self) -> usize {
        self.shared.mask + 1
    }

    /// Free slots: at least `want`, or as many as there are.
    #[inline(always)]
    fn free(&mut self, want: usize) -> usize {
        let free = |this: &Self| this.shared.mask + 1 - this.tail.wrapping_sub(this.known_head);
        // The copy of head may be old; look at the true one before believing that there is no more.
        if free(self) < want {
            self.known_head = self.shared.head.load(ord("ring.head.load", Acquire));
        }
        free(self)
    }
}

struct PushBatch<'a, T>(&'a mut Producer<T>);

impl<T> Drop for PushBatch<'_, T> {
    fn drop(&mut self) {
        self.0.shared.tail.store(self.0.tail, ord("ring.tail.store_batch", Release));
    }
}

/// The side that pops.
// On its own cache line, like the producer.
#[repr(align(128))]
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    head: usize,
    /// At or behind the true tail.
    known_tail: usize,
}

impl<T: Send> Consumer<T> {
    /// Removes and returns the oldest element, if there is one.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        if self.ready(1) == 0 {
            return None;
        }
        if flag("ring.frees_before_reading") {
            self.shared.head.store(self.head.wrapping_add(1), ord("ring.head.store", Release));
        }
        // SAFETY: known_tail is ahead of head, so the slot at head holds a value and belongs to the consumer.
        let value = unsafe { self.shared.read(self.head) };
        self.head = self.head.wrapping_add(1);
        self.shared.head.store(self.head, ord("ring.head.store", Release));
        Some(value)
    }

    /// Passes up to `max` elements to `each`, oldest first, and frees their slots at once. Returns their number.
    pub fn pop_batch(&mut self, max: usize, mut each: impl FnMut(T)) -> usize {
        let start = self.head;
        let ready = self.ready(max.min(self.shared.mask + 1));
        if ready == 0 {
            return 0;
        }
        let end = start.wrapping_add(max.min(ready));
        // Frees on drop, so that no element is dropped twice if `each` panics.
        let batch = PopBatch(self);
        while batch.0.head != end {
            // SAFETY: as in `pop`.
            let value = unsafe { batch.0.shared.read(batch.0.head) };
            batch.0.head = batch.0.head.wrapping_add(1);
            each(value);
        }
        batch.0.head.wrapping_sub(start)
    }

    /// The number of elements. It may grow at any time; only the consumer makes it smaller.
    #[allow(clippy::len_without_is_empty, reason = "for tests")]
    pub fn len(&self) -> usize {
        // Relaxed: a pop loads tail again with acquire, and coherence guarantees that it finds no older value.
        self.shared.tail.load(Relaxed).wrapping_sub(self.head)
    }

    /// Reads the shared index only if fewer than `want` are known.
    #[inline(always)]
    fn ready(&mut self, want: usize) -> usize {
        if self.known_tail.wrapping_sub(self.head) < want {
            self.known_tail = self.shared.tail.load(ord("ring.tail.load", Acquire));
        }
        self.known_tail.wrapping_sub(self.head)
    }
}

struct PopBatch<'a, T>(&'a mut Consumer<T>);

impl<T> Drop for PopBatch<'_, T> {
    fn drop(&mut self) {
        self.0.shared.head.store(self.0.head, ord("ring.head.store_batch", Release));
    }
}

/// The ring was full. Contains the element.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the ring is full")]
pub struct Full<T>(pub T);

debug_as!(Full<T> [T], |self| "Full(_)");
debug_as!(Producer<T> [T], |self| capacity = self.shared.mask + 1, ..);
debug_as!(Consumer<T> [T], |self| capacity = self.shared.mask + 1, ..);
