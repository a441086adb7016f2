//! Models of the ring of bytes: bytes arrive in order, and no byte is overwritten before it is read.

use super::support::{bite, check};
use crate::sync::{
    byte_ring::{Memory, Reader, Writer},
    shim::{
        Arc, UnsafeCell,
        atomic::{AtomicU64, Ordering},
        thread,
    },
};

/// A ring's memory that loom watches byte by byte.
struct Watched {
    tail: AtomicU64,
    head: AtomicU64,
    bytes: Vec<UnsafeCell<u8>>,
}

// SAFETY: loom runs one thread at a time, and ends the model at the first unordered access.
unsafe impl Send for Watched {}
// SAFETY: as above.
unsafe impl Sync for Watched {}

fn ring(capacity: usize) -> Arc<Watched> {
    let bytes = (0..capacity).map(|_| UnsafeCell::new(0)).collect();
    Arc::new(Watched { tail: AtomicU64::new(0), head: AtomicU64::new(0), bytes })
}

// SAFETY: always the same memory, and only the named bytes.
unsafe impl Memory for Arc<Watched> {
    fn tail(&self) -> &AtomicU64 {
        &self.tail
    }

    fn head(&self) -> &AtomicU64 {
        &self.head
    }

    fn capacity(&self) -> usize {
        self.bytes.len()
    }

    unsafe fn copy_in(&self, at: usize, bytes: &[u8]) {
        for (cell, byte) in self.bytes[at..].iter().zip(bytes) {
            // SAFETY: loom has checked that no access is concurrent.
            cell.with_mut(|cell| unsafe { *cell = *byte });
        }
    }

    unsafe fn copy_out(&self, at: usize, into: &mut [u8]) {
        for (cell, byte) in self.bytes[at..].iter().zip(into) {
            // SAFETY: loom has checked that no write is concurrent.
            *byte = cell.with(|cell| unsafe { *cell });
        }
    }
}

/// Neither side waits for the other, so all orders of full, empty and partly full occur. What was read is what was
/// written first.
fn in_order(capacity: usize, chunks: &'static [usize]) {
    let memory = ring(capacity);
    let writing = thread::spawn({
        let mut writer = Writer::new(memory.clone());
        move || {
            let mut next = 1u8;
            for &len in chunks {
                let bytes: Vec<u8> = (0..len as u8).map(|i| next + i).collect();
                next += writer.write(&bytes).unwrap() as u8;
            }
            next - 1
        }
    });
    let mut reader = Reader::new(memory.clone());
    let mut read = Vec::new();
    for &len in chunks {
        let mut into = vec![0; len];
        let n = reader.read(&mut into).unwrap();
        read.extend_from_slice(&into[..n]);
    }
    let written = writing.join().unwrap();
    assert_eq!(read, (1..=read.len() as u8).collect::<Vec<_>>());
    assert!(read.len() <= written as usize && written as usize - read.len() <= capacity);
    assert_eq!(memory.tail.load(Ordering::Relaxed), u64::from(written));
}

#[test]
fn one_byte() {
    check(|| in_order(1, &[1, 1, 1]));
}

#[test]
fn parts_that_wrap() {
    check(|| in_order(2, &[1, 2, 1]));
}

#[test]
fn teeth() {
    bite("byte_ring");
}
