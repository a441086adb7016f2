//! The reference: which addresses of a device are taken.

use gpu_pool::memory::{BlockInfo, MemoryStats};
use std::collections::BTreeMap;

/// What lives on one device. A block is in it from right after its allocation until right before its free, so an
/// overlap is an error whenever it is seen.
#[derive(Default)]
pub struct Model {
    /// By first address: bytes asked for, and the number of the block.
    live: BTreeMap<u64, (usize, u32)>,
    requested: u64,
}

impl Model {
    /// A block has been handed out.
    pub fn allocated(&mut self, address: u64, bytes: usize, number: u32) {
        // A block of nothing has an address, too.
        let end = address + bytes.max(1) as u64;
        if let Some((at, (taken, by))) = self.live.range(..end).next_back() {
            let until = at + (*taken).max(1) as u64;
            assert!(
                until <= address,
                "block {number} at {address:#x}..{end:#x} lies in block {by} at {at:#x}..{until:#x}"
            );
        }
        self.live.insert(address, (bytes, number));
        self.requested += bytes as u64;
    }

    /// A block is about to be freed.
    pub fn freed(&mut self, address: u64) {
        let (bytes, _) = self.live.remove(&address).expect("it lives");
        self.requested -= bytes as u64;
    }

    /// The pool says that just these live. Nobody allocates or frees meanwhile.
    #[track_caller]
    pub fn assert_is<'a>(&self, blocks: impl Iterator<Item = &'a BlockInfo>, stats: &MemoryStats) {
        let mut count = 0;
        for block in blocks {
            let (bytes, number) =
                self.live.get(&block.address).unwrap_or_else(|| panic!("nobody holds {block:?}: it was lost"));
            assert!(block.bytes >= *bytes as u64, "block {number} of {bytes} bytes is {block:?}");
            count += 1;
        }
        assert_eq!(count, self.live.len(), "blocks that live are not in the books");
        assert_eq!(stats.requested, self.requested, "{stats}");
    }
}
