//! A bounded queue of bytes from one process to another. `README.md` has the proof.
//!
//! First in, first out. Neither side ever waits. The writer's work before a [`write`](Writer::write) is visible to the
//! reader of those bytes; the reader's work before it frees room is visible to the writer that uses the room.
//!
//! As [`ring`](super::ring), but the memory is not this process's own ([`Memory`]), so an index that the other side has
//! written may be any number. It is checked before use: a wrong one is [`Corrupt`], and never an access out of bounds.
//!
//! Bytes are published in pieces, so both sides copy in parallel and what one writes is cached when the other reads it.

use super::{
    shim::atomic::{AtomicU64, Ordering::*},
    site::{flag, ord},
};

/// Bytes that are published at once, at most: as many as a core's first cache holds.
const PIECE: usize = 32 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Corrupt;

/// Two counters and a power of two of bytes.
///
/// # Safety
/// The calls of one object always give the same memory, which lives as long as the object. `copy_in` and `copy_out`
/// touch only the bytes that they are told.
pub unsafe trait Memory {
    /// Bytes written so far.
    fn tail(&self) -> &AtomicU64;
    /// Bytes read so far.
    fn head(&self) -> &AtomicU64;
    /// The number of bytes, a power of two.
    fn capacity(&self) -> usize;

    /// Copies `bytes` to the ring's bytes from `at`.
    ///
    /// # Safety
    /// They are within the capacity, and belong to the writer, which the caller is.
    unsafe fn copy_in(&self, at: usize, bytes: &[u8]);

    /// Copies the ring's bytes from `at` to `into`.
    ///
    /// # Safety
    /// They are within the capacity, and belong to the reader, which the caller is.
    unsafe fn copy_out(&self, at: usize, into: &mut [u8]);
}

/// The side that writes. There is one for each ring.
pub struct Writer<M> {
    memory: M,
    tail: u64,
    /// At or behind the true head.
    known_head: u64,
}

/// The side that reads. There is one for each ring.
pub struct Reader<M> {
    memory: M,
    head: u64,
    /// At or behind the true tail.
    known_tail: u64,
}

impl<M: Memory> Writer<M> {
    pub fn new(memory: M) -> Self {
        Writer { memory, tail: 0, known_head: 0 }
    }

    /// Returns the number of bytes: as many as there is room for.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, Corrupt> {
        let capacity = self.memory.capacity();
        let mut done = 0;
        while done < bytes.len() {
            let mut free = self.free()?;
            if free == 0 {
                self.known_head = self.memory.head().load(ord("byte_ring.head.load", Acquire));
                free = self.free()?;
            }
            let at = (self.tail & (capacity as u64 - 1)) as usize;
            let len = free.min(bytes.len() - done).min(capacity - at).min(PIECE);
            if len == 0 {
                break;
            }
            let tail = self.tail + len as u64;
            if flag("byte_ring.publishes_before_writing") {
                self.memory.tail().store(tail, ord("byte_ring.tail.store", Release));
            }
            // SAFETY: `len` bytes from the tail are free, so they belong to the writer; they end at the capacity.
            unsafe { self.memory.copy_in(at, &bytes[done..done + len]) };
            self.memory.tail().store(tail, ord("byte_ring.tail.store", Release));
            self.tail = tail;
            done += len;
        }
        Ok(done)
    }

    fn free(&self) -> Result<usize, Corrupt> {
        self.memory.capacity().checked_sub(between(self.known_head, self.tail)?).ok_or(Corrupt)
    }
}

impl<M: Memory> Reader<M> {
    pub fn new(memory: M) -> Self {
        Reader { memory, head: 0, known_tail: 0 }
    }

    /// Returns the number of bytes: as many as there are, up to the length of `into`.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize, Corrupt> {
        let capacity = self.memory.capacity();
        let mut done = 0;
        while done < into.len() {
            if self.known_tail == self.head {
                self.known_tail = self.memory.tail().load(ord("byte_ring.tail.load", Acquire));
            }
            let full = between(self.head, self.known_tail)?;
            fail_if!(full > capacity, Corrupt);
            let at = (self.head & (capacity as u64 - 1)) as usize;
            let len = full.min(into.len() - done).min(capacity - at).min(PIECE);
            if len == 0 {
                break;
            }
            let head = self.head + len as u64;
            if flag("byte_ring.frees_before_reading") {
                self.memory.head().store(head, ord("byte_ring.head.store", Release));
            }
            // SAFETY: `len` bytes from the head are full, so they belong to the reader; they end at the capacity.
            unsafe { self.memory.copy_out(at, &mut into[done..done + len]) };
            self.memory.head().store(head, ord("byte_ring.head.store", Release));
            self.head = head;
            done += len;
        }
        Ok(done)
    }
}

fn between(first: u64, second: u64) -> Result<usize, Corrupt> {
    second.checked_sub(first).and_then(|n| usize::try_from(n).ok()).ok_or(Corrupt)
}

/// A ring in memory that was mapped: two counters with a cache line pair each, then the bytes.
#[cfg(not(loom))]
#[derive(Clone, Copy, Debug)]
pub struct Mapped {
    base: *mut u8,
    capacity: usize,
}

#[cfg(not(loom))]
impl Mapped {
    const TAIL: usize = 0;
    const HEAD: usize = 128;
    const BYTES: usize = 256;

    /// The bytes that a ring of this capacity takes.
    pub const fn size(capacity: usize) -> usize {
        Self::BYTES + capacity
    }

    /// # Safety
    /// `base` is aligned to 128, and [`size`](Self::size) bytes from there live as long as the result. Before the first
    /// use they are zeros. They are used by one [`Writer`] and one [`Reader`], of this process or another one, and by
    /// nothing else. Panics: when the capacity is not a power of two.
    pub unsafe fn new(base: *mut u8, capacity: usize) -> Self {
        assert!(capacity.is_power_of_two(), "a ring of {capacity} bytes");
        Mapped { base, capacity }
    }

    fn counter(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the promise of `new`: aligned, alive, and only used as an atomic.
        unsafe { AtomicU64::from_ptr(self.base.add(at).cast()) }
    }
}

// SAFETY: which side touches which byte is what the counters say.
#[cfg(not(loom))]
unsafe impl Send for Mapped {}

// SAFETY: always the same memory, and only the named bytes.
#[cfg(not(loom))]
unsafe impl Memory for Mapped {
    fn tail(&self) -> &AtomicU64 {
        self.counter(Self::TAIL)
    }

    fn head(&self) -> &AtomicU64 {
        self.counter(Self::HEAD)
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    unsafe fn copy_in(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the caller's promise: within the capacity, and no other code touches them.
        unsafe { self.base.add(Self::BYTES + at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    unsafe fn copy_out(&self, at: usize, into: &mut [u8]) {
        // SAFETY: as above.
        unsafe { into.as_mut_ptr().copy_from_nonoverlapping(self.base.add(Self::BYTES + at), into.len()) };
    }
}
