//! The ring of bytes on memory of this process: all bytes arrive in order, and wrong counters do no harm.

use gpu_pool::extend::sync::byte_ring::*;
use proptest::prelude::*;
use std::{collections::VecDeque, sync::atomic::Ordering::Relaxed, thread};

/// Memory for a ring, aligned as a mapping.
#[repr(align(128))]
struct Space<const N: usize>([u8; N]);

fn mapped<const N: usize>(space: &mut Space<N>, capacity: usize) -> Mapped {
    assert!(Mapped::size(capacity) <= N);
    // SAFETY: aligned, large enough, zeros; the tests keep it alive and have one side each.
    unsafe { Mapped::new((&raw mut space.0).cast(), capacity) }
}

#[test]
fn bytes_go_from_thread_to_thread_in_order() {
    const TOTAL: usize = crate::rounds(100_000);
    let mut space = Box::new(Space([0; 256 + 64]));
    let ring = mapped(&mut space, 64);
    let byte = |i: usize| (i * 7 + i / 251) as u8;
    thread::scope(|s| {
        s.spawn(move || {
            let (mut writer, mut at) = (Writer::new(ring), 0);
            while at < TOTAL {
                let some: Vec<u8> = (at..TOTAL.min(at + 1 + at % 90)).map(byte).collect();
                at += writer.write(&some).unwrap();
                thread::yield_now();
            }
        });
        let (mut reader, mut at) = (Reader::new(ring), 0);
        while at < TOTAL {
            let mut some = vec![0; 1 + at % 77];
            let n = reader.read(&mut some).unwrap();
            for (i, &got) in some[..n].iter().enumerate() {
                assert_eq!(got, byte(at + i), "byte {}", at + i);
            }
            at += n;
            thread::yield_now();
        }
    });
}

proptest! {
    #[test]
    fn it_is_a_bounded_queue(steps in prop::collection::vec((any::<bool>(), 0usize..40), 0..60)) {
        let mut space = Box::new(Space([0; 256 + 16]));
        let ring = mapped(&mut space, 16);
        let (mut writer, mut reader, mut model) = (Writer::new(ring), Reader::new(ring), VecDeque::<u8>::new());
        let mut next = 0u8;
        for (write, len) in steps {
            if write {
                let bytes: Vec<u8> = (0..len).map(|i| next.wrapping_add(i as u8)).collect();
                let n = writer.write(&bytes).unwrap();
                prop_assert_eq!(n, len.min(16 - model.len()));
                model.extend(&bytes[..n]);
                next = next.wrapping_add(n as u8);
            } else {
                let mut into = vec![0; len];
                let n = reader.read(&mut into).unwrap();
                prop_assert_eq!(n, len.min(model.len()));
                prop_assert_eq!(&into[..n], model.drain(..n).collect::<Vec<_>>());
            }
        }
    }

    /// Whatever the other process stores, nothing is read or written out of bounds.
    #[test]
    fn a_wrong_counter_is_an_error_or_less_room(head: u64, tail: u64) {
        let mut space = Box::new(Space([0; 256 + 16]));
        let ring = mapped(&mut space, 16);
        let (mut writer, mut reader) = (Writer::new(ring), Reader::new(ring));
        prop_assert_eq!(writer.write(&[1; 16]), Ok(16));
        ring.head().store(head, Relaxed);
        prop_assert_eq!(writer.write(&[2; 32]), if head <= 16 { Ok(head as usize) } else { Err(Corrupt) });
        ring.tail().store(tail, Relaxed);
        let read = reader.read(&mut [0; 32]);
        prop_assert_eq!(read, if tail <= 16 { Ok(tail as usize) } else { Err(Corrupt) });
    }
}
