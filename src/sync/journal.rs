//! Records of several processes, in one order in which all of them read. `README.md` has the proof.
//!
//! Each process reads each record once, as a whole, and all read in one order. A record is in the order or it is not:
//! a process that is killed while it writes leaves no gap. [`append`](Writer::append) and [`read`](Reader::read) never
//! wait. A writer's work before an append is visible to the readers of the record.
//!
//! Each process has slots, which it alone writes. It fills slots and then takes the next places in the order, by one
//! compare-and-swap each; a place is a word that tells position, process and length.
//!
//! A reader without news sleeps at its [`Bell`]. The memory is shared ([`Memory`]), so its numbers are checked before
//! use: a wrong one is [`Corrupt`], and never an access out of bounds.

use super::byte_ring::Corrupt;
use super::shim::{
    Mutex,
    atomic::{AtomicU32, AtomicU64, Ordering::*},
};
use super::site::{fence_at, flag, ord};
use std::collections::VecDeque;

/// Memory of some processes, of zeros at first.
///
/// # Safety
/// The calls of one object always give the same memory, which lives as long as the object. `copy_in` and `copy_out`
/// touch only the bytes that they are told.
pub unsafe trait Memory {
    /// At most 4096.
    fn processes(&self) -> usize;
    /// The slots of each process, and the bytes of a slot: at most 32767.
    fn slots(&self) -> (usize, usize);
    /// A word of the ring of places, which has [`places`] words.
    fn place(&self, at: usize) -> &AtomicU64;
    /// The places that a process has read.
    fn read(&self, process: usize) -> &AtomicU64;
    /// The word at which a process sleeps.
    fn bell(&self, process: usize) -> &AtomicU32;
    /// Sleeps at this process's bell, until it is woken, if the word still has this value. May return early.
    fn sleep(&self, bell: &AtomicU32, value: u32);
    /// Wakes the process that sleeps at this bell.
    fn wake(&self, bell: &AtomicU32);

    /// # Safety
    /// The caller is the process, and no other one reads the slot now. The bytes are no more than a slot's.
    unsafe fn copy_in(&self, process: usize, slot: usize, bytes: &[u8]);

    /// Appends so many bytes of a slot of a process.
    ///
    /// # Safety
    /// The process does not write the slot now. The bytes are no more than a slot's.
    unsafe fn copy_out(&self, process: usize, slot: usize, len: usize, into: &mut Vec<u8>);
}

pub fn places(processes: usize, slots: usize) -> usize {
    (processes * slots).next_power_of_two()
}

/// The word of a place: a part of its number, from 1 on, the process, whether the record goes on, and the length.
const NUMBER: u32 = 28;
const PROCESS: u32 = 16;
const MORE: u64 = 1 << 15;

fn number_of(place: u64) -> u64 {
    (place + 1) & (u64::MAX >> NUMBER)
}

pub struct Writer<M> {
    memory: M,
    own: usize,
    next: u64,
    slots_used: u64,
    /// The places of own slots that not all have read.
    unread: VecDeque<u64>,
}

impl<M: Memory> Writer<M> {
    pub fn new(memory: M, own: usize) -> Self {
        Writer { memory, own, next: 0, slots_used: 0, unread: VecDeque::new() }
    }

    /// Appends a record. `false`: there is no room for it, until all have read some.
    pub fn append(&mut self, record: &[u8]) -> bool {
        let (slots, bytes) = self.memory.slots();
        let parts = record.len().div_ceil(bytes).max(1);
        if self.unread.len() + parts > slots {
            let read = |process| self.memory.read(process).load(ord("journal.read.load", Acquire));
            let read = (0..self.memory.processes()).map(read).min().unwrap_or(0);
            while self.unread.front().is_some_and(|place| *place < read) {
                self.unread.pop_front();
            }
        }
        if self.unread.len() + parts > slots {
            return false;
        }
        for part in 0..parts {
            let from = part * bytes;
            self.append_part(&record[from..record.len().min(from + bytes)], part + 1 < parts);
        }
        true
    }

    fn append_part(&mut self, part: &[u8], more: bool) {
        let (slots, _) = self.memory.slots();
        let ring = places(self.memory.processes(), slots);
        let slot = (self.slots_used % slots as u64) as usize;
        let what = (self.own as u64) << PROCESS | if more { MORE } else { 0 } | part.len() as u64;
        // SAFETY: all have read what was in this slot.
        let fill = || unsafe { self.memory.copy_in(self.own, slot, part) };
        if !flag("journal.takes_its_place_first") {
            fill();
        }
        // What was read was taken, and the words below say so. (A process that has left counts no more.)
        let read = self.memory.read(self.own).load(ord("journal.own_read.load", Acquire));
        self.next = self.next.max(read.wrapping_add(1).saturating_sub(1));
        loop {
            let word = self.memory.place(self.next as usize % ring);
            let (now, set) = (word.load(Relaxed), ord("journal.place.set", Release));
            let before = self.next.checked_sub(ring as u64).map_or(0, number_of);
            if now >> NUMBER != before {
                self.next += 1;
            } else if word.compare_exchange(now, number_of(self.next) << NUMBER | what, set, Relaxed).is_ok() {
                break;
            }
        }
        if flag("journal.takes_its_place_first") {
            fill();
        }
        self.unread.push_back(self.next);
        self.next += 1;
        self.slots_used += 1;
    }
}

pub struct Reader<M> {
    memory: M,
    own: usize,
    next: u64,
    of: Vec<Cursor>,
    has_left: bool,
}

/// What was read of a process: slots, and its last record, or the beginning of one.
#[derive(Clone, Default)]
struct Cursor {
    slots: u64,
    record: Vec<u8>,
    goes_on: bool,
}

impl<M: Memory> Reader<M> {
    pub fn new(memory: M, own: usize) -> Self {
        let of = vec![Cursor::default(); memory.processes()];
        Reader { memory, own, next: 0, of, has_left: false }
    }

    /// The next record, and the process that has appended it.
    pub fn read(&mut self) -> Result<Option<(usize, &[u8])>, Corrupt> {
        let (slots, bytes) = self.memory.slots();
        let ring = places(self.of.len(), slots);
        while !self.has_left {
            let word = self.memory.place(self.next as usize % ring).load(ord("journal.place.load", Acquire));
            if word >> NUMBER != number_of(self.next) {
                return Ok(None);
            }
            let (process, len) = ((word >> PROCESS & 0xfff) as usize, (word & (MORE - 1)) as usize);
            let of = self.of.get_mut(process).filter(|_| len <= bytes).ok_or(Corrupt)?;
            if !of.goes_on {
                of.record.clear();
            }
            if flag("journal.counts_before_reading") {
                self.memory.read(self.own).store(self.next + 1, ord("journal.read.store", Release));
            }
            // SAFETY: its process does not write this slot again before it is counted below.
            unsafe { self.memory.copy_out(process, (of.slots % slots as u64) as usize, len, &mut of.record) };
            (of.slots, of.goes_on) = (of.slots + 1, word & MORE != 0);
            self.next += 1;
            self.memory.read(self.own).store(self.next, ord("journal.read.store", Release));
            if word & MORE == 0 {
                return Ok(Some((process, &self.of[process].record)));
            }
        }
        Ok(None)
    }

    /// This process reads no more: writers do not wait for it.
    pub fn leave(&mut self) {
        self.has_left = true;
        self.memory.read(self.own).store(u64::MAX, ord("journal.read.store", Release));
    }
}

/// How urgently a process wants to hear of records: low bits of its word. Above is a number that each change raises.
const LOOKS: u32 = 0;
const IDLE: u32 = 1;
const WAITS: u32 = 2;
/// A writer has changed the word and wakes the process, if it is not killed before that.
const RUNG: u32 = 3;
const LEVEL: u32 = 3;

fn changed(word: u32, level: u32) -> u32 {
    (word & !LEVEL).wrapping_add(LEVEL + 1) | level
}

/// Where one thread of a process sleeps until there are records. A process in which no thread waits needs a call for
/// urgent records only: a thread that is woken costs more than a record.
pub struct Bell<M> {
    memory: M,
    own: usize,
    /// Threads that look, threads that wait for the one that sleeps here, and whether the bell is closed.
    present: Mutex<(isize, isize, bool)>,
}

impl<M: Memory> Bell<M> {
    pub fn new(memory: M, own: usize) -> Self {
        Bell { memory, own, present: Mutex::new((0, 0, false)) }
    }

    /// So many threads more (or fewer) look for records, and wait for the thread that sleeps here. The caller looks for
    /// records after that: earlier ones did not wake it.
    pub fn change(&self, looking: isize, waiting: isize) {
        self.set(looking, waiting, false);
    }

    fn set(&self, looking: isize, waiting: isize, closes: bool) -> (u32, bool) {
        let mut present = self.present.lock();
        *present = (present.0 + looking, present.1 + waiting, present.2 || closes);
        let level = match *present {
            (1.., ..) => LOOKS,
            (_, 1.., _) => WAITS,
            _ => IDLE,
        };
        let bell = self.memory.bell(self.own);
        let before = bell.fetch_update(Relaxed, Relaxed, |word| Some(changed(word, level)));
        fence_at("journal.bell.fence", SeqCst);
        (changed(before.unwrap_or_else(|word| word), level), present.2)
    }

    /// Looks for records by `look`, then sleeps until some come. `false`: the bell was closed. For the sleeping thread.
    pub fn sleep(&self, look: impl FnOnce()) -> bool {
        let (word, closed) = self.set(0, 0, false);
        look();
        if !closed {
            self.memory.sleep(self.memory.bell(self.own), word);
        }
        !closed
    }

    pub fn close(&self) {
        self.set(0, 0, true);
        self.memory.wake(self.memory.bell(self.own));
    }

    /// Wakes processes that must hear of appended records; this one for urgent ones only: the caller may read others.
    /// An urgent ring also wakes those whose last ringer was killed.
    pub fn ring(&self, urgent: bool) {
        fence_at("journal.ring.fence", SeqCst);
        for process in (0..self.memory.processes()).filter(|process| urgent || *process != self.own) {
            let bell = self.memory.bell(process);
            let now = bell.load(Relaxed);
            let hears = now & LEVEL == WAITS || urgent && now & LEVEL != LOOKS;
            let level = if flag("journal.rings_once") { LOOKS } else { RUNG };
            if hears && bell.compare_exchange(now, changed(now, level), Relaxed, Relaxed).is_ok() {
                self.memory.wake(bell);
            }
        }
    }
}

#[cfg(all(target_os = "linux", not(loom)))]
#[derive(Clone, Debug)]
pub struct Mapped {
    regions: std::sync::Arc<[*mut u8]>,
    slots: (usize, usize),
}

#[cfg(all(target_os = "linux", not(loom)))]
impl Mapped {
    const BELL: usize = 128;
    const PLACES: usize = 256;

    pub fn size(processes: usize, slots: (usize, usize)) -> usize {
        Self::PLACES + 8 * places(processes, slots.0) + slots.0 * slots.1
    }

    /// Regions by process.
    ///
    /// # Safety
    /// Each is aligned to 128, and [`size`](Self::size) bytes from there live as long as the result and its clones.
    /// Before the first use they are zeros. They are used by journals of these processes, and by nothing else.
    pub unsafe fn new(regions: &[*mut u8], slots: (usize, usize)) -> Self {
        Mapped { regions: regions.into(), slots }
    }

    fn slot(&self, process: usize, slot: usize) -> *mut u8 {
        let at = Self::size(self.regions.len(), self.slots) - (self.slots.0 - slot) * self.slots.1;
        // SAFETY: within the region, by the promise of `new`.
        unsafe { self.regions[process].add(at) }
    }
}

// SAFETY: which side touches which byte is what the places and counters say.
#[cfg(all(target_os = "linux", not(loom)))]
unsafe impl Send for Mapped {}
// SAFETY: as above.
#[cfg(all(target_os = "linux", not(loom)))]
unsafe impl Sync for Mapped {}

// SAFETY: always the same memory, and only the named bytes. The atomics are aligned and alive by the promise of `new`,
// and only used as such.
#[cfg(all(target_os = "linux", not(loom)))]
unsafe impl Memory for Mapped {
    fn processes(&self) -> usize {
        self.regions.len()
    }

    fn slots(&self) -> (usize, usize) {
        self.slots
    }

    fn place(&self, at: usize) -> &AtomicU64 {
        // SAFETY: as said above.
        unsafe { AtomicU64::from_ptr(self.regions[0].add(Self::PLACES + 8 * at).cast()) }
    }

    fn read(&self, process: usize) -> &AtomicU64 {
        // SAFETY: as said above.
        unsafe { AtomicU64::from_ptr(self.regions[process].cast()) }
    }

    fn bell(&self, process: usize) -> &AtomicU32 {
        // SAFETY: as said above.
        unsafe { AtomicU32::from_ptr(self.regions[process].add(Self::BELL).cast()) }
    }

    fn sleep(&self, bell: &AtomicU32, value: u32) {
        use rustix::thread::futex::{Flags, wait};
        // An error: the word has changed, or a signal came. The caller looks again.
        let _ = wait(bell, Flags::empty(), value, None);
    }

    fn wake(&self, bell: &AtomicU32) {
        use rustix::thread::futex::{Flags, wake};
        let _ = wake(bell, Flags::empty(), 1);
    }

    unsafe fn copy_in(&self, process: usize, slot: usize, bytes: &[u8]) {
        // SAFETY: the caller's promise: a slot of this process, which no other code touches.
        unsafe { self.slot(process, slot).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    unsafe fn copy_out(&self, process: usize, slot: usize, len: usize, into: &mut Vec<u8>) {
        // SAFETY: the caller's promise: these bytes are in the slot, which no thread writes now.
        into.extend_from_slice(unsafe { std::slice::from_raw_parts(self.slot(process, slot), len) });
    }
}
