//! Turns: operations on memory that a graph names are ordered, submitted and noted one after the other.
//!
//! An operation [orders](super::hazard::History::order) itself after earlier uses, is submitted, and is noted. Usually
//! the caller's borrow of the memory keeps other host threads away. A launch of a graph holds none. So each operation
//! that touches a block of a graph, and each launch, takes the turn of the block's device for these three steps.
//!
//! Nothing that holds a turn may wait for another host thread, but for the launch gate: nothing between a collective's
//! commit and its launches takes a turn. So collectives, uploads and downloads hold one only while they
//! [reserve](super::hazard::Reserved) their uses.
//!
//! Invariant: turns of several devices are taken in the order of the devices.

use super::{Block, DeviceHandle};
use parking_lot::MutexGuard;
use smallvec::SmallVec;

pub(crate) struct Turns<'h>(#[allow(dead_code, reason = "held, not read")] SmallVec<[MutexGuard<'h, ()>; 1]>);

impl<'h> Turns<'h> {
    /// Those that own one of the blocks. Waits while another thread has one of the turns.
    pub(crate) fn take(blocks: impl Iterator<Item = &'h Block>) -> Self {
        let mut homes: SmallVec<[&DeviceHandle; 4]> = SmallVec::new();
        for block in blocks {
            // A graph names many blocks of few devices.
            if !homes.iter().any(|home| home.device == block.handle.device) {
                homes.push(&block.handle);
            }
        }
        homes.sort_unstable_by_key(|home| home.device);
        Turns(homes.into_iter().map(|home| home.turn.lock()).collect())
    }
}
