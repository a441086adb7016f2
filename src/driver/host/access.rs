//! The byte ranges that running operations use. The scheduler claims and releases them.
//!
//! Host kernels get `&mut [T]` and copies run without a lock. So operations that touch the same bytes, one of them
//! writing, must never run at the same time, even if the user forgot to order them: each claims its ranges before it
//! runs. Ranges are host addresses, so device, page-locked and managed memory are treated alike.

use super::Key;

pub(super) struct Active {
    ranges: Vec<Range>,
}

struct Range {
    stream: Key,
    start: usize,
    end: usize,
    write: bool,
}

impl Active {
    pub fn new() -> Self {
        Active { ranges: Vec::new() }
    }

    pub fn conflicts(&self, start: usize, bytes: usize, write: bool) -> bool {
        self.user(start, bytes, write).is_some()
    }

    /// The stream whose running operation excludes this access.
    pub fn user(&self, start: usize, bytes: usize, write: bool) -> Option<Key> {
        let end = start + bytes;
        let excludes = |r: &&Range| (write || r.write) && start < r.end && r.start < end;
        self.ranges.iter().find(excludes).map(|r| r.stream)
    }

    pub fn claim(&mut self, stream: Key, start: usize, bytes: usize, write: bool) {
        self.ranges.push(Range { stream, start, end: start + bytes, write });
    }

    pub fn release(&mut self, stream: Key) {
        self.ranges.retain(|r| r.stream != stream);
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/driver/host/access_tests.rs"]
mod tests;
