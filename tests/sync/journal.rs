//! The journal on memory of this process: all read the same in one order, in parts and again in the same slots, and a
//! wrong word does no harm.

use gpu_pool::extend::sync::{byte_ring::Corrupt, journal::*};
use std::{sync::atomic::Ordering::Relaxed, thread};

const SLOTS: (usize, usize) = (8, 16);

/// A process's memory, aligned as a mapping.
#[repr(align(128))]
struct Region([u8; 1024]);

fn mapped(regions: &mut [Region]) -> Mapped {
    assert!(Mapped::size(regions.len(), SLOTS) <= 1024);
    let regions: Vec<_> = regions.iter_mut().map(|region| (&raw mut region.0).cast()).collect();
    // SAFETY: aligned, large enough, zeros; the tests keep it alive, with one writer and one reader each.
    unsafe { Mapped::new(&regions, SLOTS) }
}

fn regions(count: usize) -> Vec<Region> {
    (0..count).map(|_| Region([0; 1024])).collect()
}

fn records(reader: &mut Reader<Mapped>) -> impl Iterator<Item = (usize, Vec<u8>)> {
    std::iter::from_fn(|| reader.read().unwrap().map(|(process, record)| (process, record.to_vec())))
}

#[test]
fn all_read_all_records_in_one_order() {
    const EACH: usize = crate::rounds(3000);
    let mut regions = regions(3);
    let memory = mapped(&mut regions);
    let record = |process: usize, n: usize| vec![(process * 91 + n) as u8; (n * 7 + process) % 60];
    let process = |own: usize| {
        let (mut writer, mut reader) = (Writer::new(memory.clone(), own), Reader::new(memory.clone(), own));
        let (mut written, mut read) = (0, Vec::new());
        while read.len() < 3 * EACH {
            written += usize::from(written < EACH && writer.append(&record(own, written)));
            read.extend(records(&mut reader).take(2));
            thread::yield_now();
        }
        read
    };
    let orders: Vec<_> = thread::scope(|s| {
        let threads = [0, 1, 2].map(|own| s.spawn(move || process(own)));
        threads.map(|thread| thread.join().unwrap()).into()
    });
    assert!(orders.iter().all(|order| *order == orders[0]));
    for own in 0..3 {
        let of = orders[0].iter().filter(|(process, _)| *process == own);
        assert!(of.map(|(_, bytes)| bytes.clone()).eq((0..EACH).map(|n| record(own, n))));
    }
}

#[test]
fn there_is_no_room_until_all_have_read_or_left() {
    let mut regions = regions(2);
    let memory = mapped(&mut regions);
    let mut writer = Writer::new(memory.clone(), 0);
    let mut readers = [0, 1].map(|own| Reader::new(memory.clone(), own));
    assert!(!writer.append(&[0; 9 * 16]), "more than all slots");
    assert!((0..4).all(|n| writer.append(&[n; 17])) && !writer.append(&[4]));
    assert_eq!(readers[0].read(), Ok(Some((0, &[0; 17][..]))));
    assert!(!writer.append(&[4]), "the other one has not read it");
    assert_eq!(readers[1].read(), Ok(Some((0, &[0; 17][..]))));
    assert!(writer.append(&[4; 32]) && !writer.append(&[5]));
    readers[1].leave();
    assert_eq!(readers[0].read(), Ok(Some((0, &[1; 17][..]))));
    assert!(writer.append(&[5]) && Writer::new(memory, 1).append(&[6]));
    assert_eq!(records(&mut readers[0]).last(), Some((1, vec![6])));
    // Another thread may still look.
    assert_eq!(readers[1].read(), Ok(None));
    assert!((0..8).all(|n| writer.append(&[n]) && readers[0].read().unwrap().is_some()));
}

#[test]
fn a_wrong_place_is_found() {
    for word in [1 << 28 | 7 << 16 | 1, 1 << 28 | 17] {
        let mut regions = regions(2);
        let memory = mapped(&mut regions);
        memory.place(0).store(word, Relaxed);
        assert_eq!(Reader::new(memory, 0).read(), Err(Corrupt));
    }
}
