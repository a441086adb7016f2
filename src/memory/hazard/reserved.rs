//! Reservations: uses of memory that a graph names, by operations which cannot take a [turn](crate::memory::turn).
//!
//! A turn makes the steps order, submit and note one. Nothing that holds it may wait for another host thread, so
//! collectives and launches whose kernels meet cannot have it; nor can uploads and downloads. They reserve their uses
//! before the first step, and release them after the last. Until then a conflicting operation of another device is
//! [`Error::Borrowed`](crate::Error::Borrowed). It cannot wait: the call may wait for that other device.
//!
//! Invariant: while a reservation lasts, no other device orders a conflicting use of the block.

use super::{Access, Hazards, History, Reservation};
use crate::{
    error::{Result, op_site::OpSite},
    memory::{BlockRef, StreamCore, Turns},
};
use std::{marker::PhantomData, mem, ops::Range};

pub(crate) trait UsesOf<'b>: Iterator<Item = (&'b BlockRef, &'b Range<usize>, Access)> + Clone {}

impl<'b, I: Iterator<Item = (&'b BlockRef, &'b Range<usize>, Access)> + Clone> UsesOf<'b> for I {}

/// Reserved uses of one operation, released by the drop. The caller notes the uses before that.
pub(crate) struct Reserved<'b, I: UsesOf<'b>> {
    by: usize,
    uses: I,
    of: PhantomData<&'b ()>,
}

type Order = fn(&History, &'static str, &StreamCore, &Range<usize>, Access) -> Result<()>;

impl<'b, I: UsesOf<'b>> Reserved<'b, I> {
    /// Reserves uses of blocks that a graph names, on behalf of `call`, and orders them behind earlier conflicts.
    pub(crate) fn take(call: OpSite, stream: &StreamCore, uses: I) -> Result<Self> {
        Self::take_by(History::order, call, stream, uses)
    }

    pub(crate) fn take_by(order: Order, call: OpSite, stream: &StreamCore, uses: I) -> Result<Self> {
        let _turns = Turns::take(uses.clone().map(|(block, ..)| &**block));
        let by = stream.handle.device;
        for (at, (block, bytes, access)) in uses.clone().enumerate() {
            let reserved = block.hazards.reserve(order, call, stream, bytes, access);
            reserved.inspect_err(|_| drop(Reserved::taken(by, uses.clone().take(at))))?;
        }
        Ok(Self::taken(by, uses))
    }

    /// Leaves the uses reserved. [`taken`](Self::taken) takes them up again.
    pub(crate) fn leave(self) {
        mem::forget(self);
    }

    pub(crate) fn taken(by: usize, uses: I) -> Self {
        Reserved { by, uses, of: PhantomData }
    }
}

impl<'b, I: UsesOf<'b>> Drop for Reserved<'b, I> {
    fn drop(&mut self) {
        self.uses.clone().for_each(|(block, bytes, access)| block.hazards.release(self.by, bytes, access));
    }
}

impl Hazards {
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
