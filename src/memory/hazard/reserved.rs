//! Reservations: uses of memory that a graph names, by operations which cannot take a [turn](crate::memory::turn).
//!
//! A turn makes the steps order, submit and note one. Nothing that holds it may wait for another host thread, so
//! collectives and launches whose kernels meet cannot have it; nor can uploads and downloads, which wait for copies.
//! They reserve their uses instead, before the first step, and release them after the last. Until then a conflicting
//! operation of another device is [`Error::Borrowed`](crate::Error::Borrowed), with the place of the call that has the
//! reservation. It cannot wait: the call may wait for that other device. Operations of one device need no reservation
//! against each other, since one thread submits them.
//!
//! Invariant: while a reservation lasts, no other device orders a conflicting use of the block.

use super::{Access, Hazards, History, Reservation};
use crate::{
    error::{Result, op_site::OpSite},
    memory::{block::BlockRef, stream::StreamCore, turn::Turns},
};
use smallvec::SmallVec;
use std::ops::Range;

/// Reserved uses of one operation, released by the drop. The caller notes the uses before that.
#[derive(Default)]
pub(crate) struct Reserved(SmallVec<[Held; 1]>);

type Order = fn(&History, &'static str, &StreamCore, &Range<usize>, Access) -> Result<()>;

struct Held {
    block: BlockRef,
    bytes: Range<usize>,
    access: Access,
    by: usize,
}

impl Reserved {
    /// Orders uses behind earlier ones that conflict with them, and reserves them on behalf of `call`. The blocks are
    /// those that a graph names.
    #[track_caller]
    pub(crate) fn take<'b>(
        call: OpSite,
        stream: &StreamCore,
        uses: impl Iterator<Item = (&'b BlockRef, &'b Range<usize>, Access)> + Clone,
    ) -> Result<Self> {
        Self::take_by(History::order, call, stream, uses)
    }

    /// [`take`](Self::take) for a launch of a graph.
    #[track_caller]
    pub(crate) fn for_launch<'b>(
        call: OpSite,
        stream: &StreamCore,
        uses: impl Iterator<Item = (&'b BlockRef, &'b Range<usize>, Access)> + Clone,
    ) -> Result<Self> {
        Self::take_by(History::order_launch, call, stream, uses)
    }

    #[track_caller]
    fn take_by<'b>(
        order: Order,
        call: OpSite,
        stream: &StreamCore,
        uses: impl Iterator<Item = (&'b BlockRef, &'b Range<usize>, Access)> + Clone,
    ) -> Result<Self> {
        // After a refusal its drop releases the first ones.
        let mut reserved = Reserved::default();
        let _turns = Turns::take(uses.clone().map(|(block, ..)| &**block));
        for (block, bytes, access) in uses {
            block.hazards.reserve(order, call, stream, bytes, access)?;
            let by = stream.handle.device;
            reserved.0.push(Held { block: block.clone(), bytes: bytes.clone(), access, by });
        }
        Ok(reserved)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|Held { block, bytes, access, by }| block.hazards.release(by, &bytes, access));
    }
}

impl Hazards {
    #[track_caller]
    fn reserve(
        &self,
        order: Order,
        call: OpSite,
        stream: &StreamCore,
        bytes: &Range<usize>,
        access: Access,
    ) -> Result<()> {
        let mut history = self.0.lock();
        order(&history, call.op, stream, bytes, access)?;
        let by = stream.handle.device;
        history.past().reserved.push(Reservation { by, call, bytes: bytes.clone(), access });
        Ok(())
    }

    fn release(&self, by: usize, bytes: &Range<usize>, access: Access) {
        let mut history = self.0.lock();
        let reserved = &mut history.past().reserved;
        let own = |other: &Reservation| other.by == by && other.bytes == *bytes && other.access == access;
        if let Some(at) = reserved.iter().position(own) {
            reserved.swap_remove(at);
        }
    }
}
