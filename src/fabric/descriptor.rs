//! The message of a member of a collective to its peers before anything runs: its call, and the memory that they may
//! touch. [`CompactDescriptor`](super::compact::CompactDescriptor) is the short form. Invariant: a descriptor keeps the
//! memory that it names alive ([`Area::block`]), but for [`RecvScratch`].

use super::{Call, Counts, Side};
use crate::{Event, contain::Contained, driver::Address, memory::BlockRef};
use std::{any::Any, ops::Range, sync::Arc};

/// A member's message to all its peers.
pub struct Descriptor {
    pub(crate) call: Call,
    /// Ranks in the gang of the members that are to meet.
    pub(crate) group: Arc<[usize]>,
    /// Its payload.
    pub payload: Payload,
}

impl Descriptor {
    /// The member's memory. Panics: when the call is not about memory.
    pub fn exposed(&self) -> &Exposed {
        match &self.payload {
            Payload::Memory(exposed) => exposed,
            _ => unreachable!("the meeting compared the operations"),
        }
    }
}

#[allow(missing_docs, reason = "names say it")]
pub enum Payload {
    Nothing,
    Memory(Exposed),
    Value(Contained<Box<dyn Any + Send + Sync>>),
}

/// The memory that a member exposes to its peers for one collective.
#[allow(missing_docs, reason = "names say it")]
pub struct Exposed {
    pub(crate) source: Option<Area>,
    pub(crate) destination: Option<Area>,
    /// Peers may touch the memory once this event has passed.
    pub(crate) ready: Option<Event>,
    pub(crate) factor: f64,
    /// Elements that this member sends to each member, and receives from each.
    pub counts: Option<(Counts, Counts)>,
    /// Page-locked memory of the host from which the peers read this member's data.
    pub(crate) stage: Option<Area>,
    pub(crate) scratch: Option<RecvScratch>,
}

impl Exposed {
    /// The buffer of one side; in place both are one. Panics when the member exposes none.
    pub(crate) fn area(&self, side: Side) -> &Area {
        let area = match side {
            Side::Source => self.source.as_ref().or(self.destination.as_ref()),
            Side::Destination => self.destination.as_ref(),
        };
        area.expect("every member lends what its part is done on")
    }
}

#[allow(missing_docs, reason = "names say it")]
#[derive(Clone)]
pub struct Area {
    pub block: BlockRef,
    pub address: Address,
    pub bytes: Range<usize>,
}

/// A member's own memory into which peers write: the predecessor in a ring, all members in an exchange. The peers do
/// not keep this memory alive. Its owner does, because its stream waits for the peers' writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecvScratch {
    pub(crate) address: Address,
    pub(crate) bytes: usize,
}

impl RecvScratch {
    pub(crate) fn of(area: &Area) -> Self {
        RecvScratch { address: area.address, bytes: area.bytes.len() }
    }
}
