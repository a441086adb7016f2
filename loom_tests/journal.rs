//! Models of the journal: all read the same records in one order, no slot is filled before all have read it, and no
//! process sleeps while there are records for it.

use super::support::{bite, check, check_within, spawn};
use crate::sync::{
    journal::{Bell, Memory, Reader, Writer, places},
    shim::{
        Arc, Condvar, Mutex, UnsafeCell,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

/// The memory of two processes. loom watches each slot.
struct Watched {
    places: Vec<AtomicU64>,
    read: [AtomicU64; 2],
    bells: [AtomicU32; 2],
    /// The system's part: it compares the word and sleeps in one step. How many calls to wake do not come to it.
    system: (Mutex<usize>, Condvar),
    slots: [Vec<UnsafeCell<u8>>; 2],
}

// SAFETY: loom runs one thread at a time, and ends the model at the first unordered access.
unsafe impl Send for Watched {}
// SAFETY: as above.
unsafe impl Sync for Watched {}

fn memory(slots: usize) -> Arc<Watched> {
    Arc::new(Watched {
        places: (0..places(2, slots)).map(|_| AtomicU64::new(0)).collect(),
        read: [(); 2].map(|()| AtomicU64::new(0)),
        bells: [(); 2].map(|()| AtomicU32::new(0)),
        system: Default::default(),
        slots: [(); 2].map(|()| (0..slots).map(|_| UnsafeCell::new(0)).collect()),
    })
}

// SAFETY: always the same memory, and only the named bytes.
unsafe impl Memory for Arc<Watched> {
    fn processes(&self) -> usize {
        2
    }

    fn slots(&self) -> (usize, usize) {
        (self.slots[0].len(), 1)
    }

    fn place(&self, at: usize) -> &AtomicU64 {
        &self.places[at]
    }

    fn read(&self, process: usize) -> &AtomicU64 {
        &self.read[process]
    }

    fn bell(&self, process: usize) -> &AtomicU32 {
        &self.bells[process]
    }

    fn sleep(&self, bell: &AtomicU32, value: u32) {
        let mut system = self.system.0.lock();
        if bell.load(Ordering::Relaxed) == value {
            self.system.1.wait(&mut system);
        }
    }

    fn wake(&self, _: &AtomicU32) {
        let mut lost = self.system.0.lock();
        match lost.checked_sub(1) {
            Some(fewer) => *lost = fewer,
            None => self.system.1.notify_all(),
        }
    }

    unsafe fn copy_in(&self, process: usize, slot: usize, bytes: &[u8]) {
        // SAFETY: loom has checked that no access is concurrent.
        self.slots[process][slot].with_mut(|cell| unsafe { *cell = bytes[0] });
    }

    unsafe fn copy_out(&self, process: usize, slot: usize, _: usize, into: &mut Vec<u8>) {
        // SAFETY: loom has checked that no write is concurrent.
        into.push(self.slots[process][slot].with(|cell| unsafe { *cell }));
    }
}

fn all(reader: &mut Reader<Arc<Watched>>) -> Vec<(usize, Vec<u8>)> {
    std::iter::from_fn(|| reader.read().unwrap().map(|(process, record)| (process, record.to_vec()))).collect()
}

/// Each process appends a record, and reads all records. One order: the records of one reader begin the other's.
#[test]
fn all_read_in_one_order() {
    check(|| {
        let memory = memory(1);
        let process = |own: usize| {
            move |memory: &Arc<Watched>| {
                assert!(Writer::new(memory.clone(), own).append(&[own as u8]));
                let mut reader = Reader::new(memory.clone(), own);
                (all(&mut reader), reader)
            }
        };
        let shared = Arc::new(memory.clone());
        let other = spawn(&shared, process(1));
        let (mut here, mut reader) = process(0)(&memory);
        let (mut there, mut theirs) = other.join().unwrap();
        assert!(here.contains(&(0, vec![0])) && there.contains(&(1, vec![1])), "own records are read");
        here.extend(all(&mut reader));
        there.extend(all(&mut theirs));
        assert_eq!(here.len(), 2);
        assert_eq!(here, there);
    });
}

/// A process with one slot appends as often as there is room, and another one reads meanwhile.
#[test]
fn a_slot_is_used_again_when_all_have_read_it() {
    check(|| {
        let memory = memory(1);
        let shared = Arc::new(memory.clone());
        let writing = spawn(&shared, |memory| {
            let (mut writer, mut reader) = (Writer::new(memory.clone(), 0), Reader::new(memory.clone(), 0));
            (1..=2).filter(|n| writer.append(&[*n]) && all(&mut reader).len() == 1).count()
        });
        let mut reader = Reader::new(memory.clone(), 1);
        let mut read = all(&mut reader);
        let written = writing.join().unwrap();
        read.extend(all(&mut reader));
        assert_eq!(read, (1..=written as u8).map(|n| (0, vec![n])).collect::<Vec<_>>());
    });
}

/// The ring has two places, and three records come. The writer of a process runs beside its reader. A writer that skips
/// a free place would leave a gap, at which all readers stop.
#[test]
fn a_place_is_used_again_when_all_have_read_it() {
    check(|| {
        let memory = memory(1);
        let shared = Arc::new(memory.clone());
        let writing = spawn(&shared, |memory| {
            let mut writer = Writer::new(memory.clone(), 0);
            (1..=2).filter(|n| writer.append(&[*n])).count()
        });
        let other = spawn(&shared, |memory| {
            let (mut writer, mut reader) = (Writer::new(memory.clone(), 1), Reader::new(memory.clone(), 1));
            let mut read = all(&mut reader);
            let written = (3..=4).filter(|n| writer.append(&[*n])).count();
            read.extend(all(&mut reader));
            (written, read, reader)
        });
        let mut reader = Reader::new(memory.clone(), 0);
        let mut here = all(&mut reader);
        let (own, (theirs, mut there, mut their_reader)) = (writing.join().unwrap(), other.join().unwrap());
        here.extend(all(&mut reader));
        there.extend(all(&mut their_reader));
        assert_eq!(here.len(), own + theirs, "no record is behind a gap");
        assert_eq!(here, there);
    });
}

/// A process appends its first record after all others have read a whole ring of another one's. By its reader's count
/// it knows that the places were taken, and must see so in the words: else it skips a free one.
#[test]
fn a_late_writer_leaves_no_gap() {
    check(|| {
        let memory = memory(1);
        let shared = Arc::new(memory.clone());
        let writing = spawn(&shared, |memory| Writer::new(memory.clone(), 0).append(&[1]));
        let other = spawn(&shared, |memory| {
            let (mut writer, mut reader) = (Writer::new(memory.clone(), 1), Reader::new(memory.clone(), 1));
            let written = (2..=3).filter(|n| writer.append(&[*n]) && reader.read().unwrap().is_some()).count();
            (written, reader)
        });
        let mut reader = Reader::new(memory.clone(), 0);
        let mut read = all(&mut reader).len() + all(&mut reader).len();
        let (own, (theirs, _)) = (writing.join().unwrap(), other.join().unwrap());
        read += all(&mut reader).len();
        assert_eq!(read, usize::from(own) + theirs, "no record is behind a gap");
    });
}

/// What one process has found.
struct Host {
    reader: Mutex<Reader<Arc<Watched>>>,
    bell: Bell<Arc<Watched>>,
    found: (Mutex<usize>, Condvar),
}

impl Host {
    fn look(&self) {
        let count = all(&mut self.reader.lock()).len();
        *self.found.0.lock() += count;
        self.found.1.notify_all();
    }

    fn await_records(&self, count: usize) {
        let mut found = self.found.0.lock();
        while *found < count {
            self.found.1.wait(&mut found);
        }
    }
}

fn host(memory: &Arc<Watched>) -> Arc<Host> {
    let (reader, bell) = (Reader::new(memory.clone(), 1), Bell::new(memory.clone(), 1));
    Arc::new(Host { reader: Mutex::new(reader), bell, found: Default::default() })
}

/// A thread waits for the one that sleeps, while another process tells something. `looks`: first it looks by itself.
fn is_woken(looks: bool) {
    let memory = memory(2);
    let host = host(&memory);
    let sleeping = spawn(&host, |host| while host.bell.sleep(|| host.look()) {});
    let telling = spawn(&Arc::new(memory), |memory| {
        assert!(Writer::new(memory.clone(), 0).append(&[7]));
        Bell::new(memory.clone(), 0).ring(false);
    });
    if looks {
        host.bell.change(1, 0);
        host.look();
    }
    host.bell.change(-isize::from(looks), 1);
    host.look();
    host.await_records(1);
    host.bell.change(0, -1);
    host.bell.close();
    telling.join().unwrap();
    sleeping.join().unwrap();
    assert_eq!(*host.found.0.lock(), 1);
}

#[test]
fn who_waits_is_woken() {
    check_within(2, || is_woken(false));
}

#[test]
fn who_looks_no_more_is_woken() {
    check_within(2, || is_woken(true));
}

/// A process is killed after it has changed the word of a sleeping one, and before it wakes it. Then the loss is told.
#[test]
fn an_urgent_record_wakes_whom_a_killed_process_has_not_woken() {
    check(|| {
        let memory = memory(2);
        let host = host(&memory);
        host.bell.change(0, 1);
        let sleeping = spawn(&host, |host| while host.bell.sleep(|| host.look()) {});
        let (mut writer, bell) = (Writer::new(memory.clone(), 0), Bell::new(memory.clone(), 0));
        for killed in [true, false] {
            *memory.system.0.lock() = usize::from(killed);
            assert!(writer.append(&[7]));
            bell.ring(!killed);
        }
        *memory.system.0.lock() = 0;
        host.await_records(2);
        host.bell.close();
        sleeping.join().unwrap();
    });
}

#[test]
fn teeth() {
    bite("journal");
}
