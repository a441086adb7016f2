//! Page-locked pieces through which pageable host memory travels to a device and back.
//!
//! A device thread owns a [`Staging`]; `copy/host.rs` fills and empties its pieces. Invariant: the host touches a part
//! of a piece only while no DMA uses that part. Memory that a stuck stream may still use never gets another owner.

use super::{BlockRef, Event, Locality, PinnedPool, StreamCore};
use crate::error::Result;
use smallvec::SmallVec;
use std::{
    cell::{RefCell, RefMut},
    sync::Arc,
    time::Duration,
};

/// Bytes of a piece. A DMA of a piece outlasts the driver calls around it, and a piece still fits into the cache.
pub(crate) const PIECE: usize = 2 << 20;
/// How long the drop of a piece waits for the work of a lost device.
const LOST: Duration = Duration::from_secs(1);

pub(crate) struct Piece {
    pub(crate) block: BlockRef,
    pub(crate) filled: usize,
    /// Streams that got DMAs of this piece since the last event. A stream is noted before its DMA is submitted, so a
    /// stream is not forgotten when the event fails.
    pub(crate) streams: SmallVec<[Arc<StreamCore>; 2]>,
    pub(crate) busy: SmallVec<[Event; 2]>,
}

impl Piece {
    fn new(pool: &PinnedPool, device: usize) -> Result<Self> {
        let block = pool.block("staging", PIECE, Locality::Device(device))?;
        Ok(Piece { block, filled: 0, streams: SmallVec::new(), busy: SmallVec::new() })
    }

    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        (self.block.address as *mut u8).wrapping_add(offset)
    }

    /// Ends the packing: records where the last DMA of each stream ends, before later work gets in between.
    pub(crate) fn seal(&mut self) -> Result<()> {
        while let Some(stream) = self.streams.last() {
            self.busy.push(Event::record(stream, "staging", false)?);
            self.streams.pop();
        }
        Ok(())
    }

    pub(crate) fn free(&mut self, wait: impl FnMut(&Event) -> Result<()>) -> Result<()> {
        self.seal()?;
        self.busy.iter().try_for_each(wait)?;
        self.busy.clear();
        self.filled = 0;
        Ok(())
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // The work of a lost device ends, too. Only a wait reports the loss.
        let lost = |event: &Event| event.0.stream.handle.driver.event_wait(event.0.raw, LOST).is_err();
        let over = |event: &Event| event.is_complete().unwrap_or_else(|_| lost(event));
        if !(self.streams.iter().all(|s| s.has_completed(s.submitted())) && self.busy.iter().all(over)) {
            self.block.abandon();
        }
    }
}

pub(crate) struct DoubleBuffer {
    pub(crate) pieces: [Piece; 2],
    pub(crate) next: usize,
}

impl DoubleBuffer {
    fn new(pool: &PinnedPool, device: usize) -> Result<Self> {
        Ok(DoubleBuffer { pieces: [Piece::new(pool, device)?, Piece::new(pool, device)?], next: 0 })
    }

    pub(crate) fn switch(&mut self) -> &mut Piece {
        self.next ^= 1;
        &mut self.pieces[self.next]
    }
}

/// The staging memory of one direction, made when first needed.
#[derive(Default)]
pub(crate) struct DoubleBuffers(RefCell<Vec<DoubleBuffer>>);

impl DoubleBuffers {
    pub(crate) fn take(&self, count: usize, pool: &PinnedPool, device: usize) -> Result<RefMut<'_, [DoubleBuffer]>> {
        let mut buffers = self.0.borrow_mut();
        while buffers.len() < count {
            buffers.push(DoubleBuffer::new(pool, device)?);
        }
        Ok(RefMut::map(buffers, |buffers| &mut buffers[..count]))
    }
}

#[derive(Default)]
pub(crate) struct Staging {
    pub(crate) up: DoubleBuffers,
    pub(crate) down: DoubleBuffers,
}
