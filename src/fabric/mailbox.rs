//! The mailboxes of a device: lock-free single-producer rings ([`crate::sync::ring`]), one for each ordered pair of
//! devices. `collective/meeting/exchange.rs` sends and receives through them.
//!
//! A slot holds a descriptor or a step's event, never data. Invariant: a message carries the place of its gang, and
//! both ends see gangs in one order. So a message of an older gang was left by a gang that failed, and is dropped; one
//! of a newer gang shows that its sender has left.

use super::{Broadcasts, CompactDescriptor, Descriptor, Parcel, broadcast::Words, parcels::ParcelBox};
use crate::sync::ring::{self, Consumer, Producer};
use crate::{Event, gang::Gang, memory::Handover};
use std::{mem, sync::Arc};

/// Messages in flight per ordered pair. A step of a ring takes two; a member is at most a few steps ahead.
const SLOTS: usize = 16;

/// One message in a ring. It has two adjacent cache lines to itself, which the hardware fetches together.
#[repr(align(128))]
pub(crate) struct Message {
    gang: u64,
    /// The number of broadcasts that the sender had posted in this gang before this message.
    after: u64,
    pub(crate) body: Body,
    pub(crate) from: Option<Box<Handover>>,
}

impl Message {
    pub(crate) fn new(gang: &Gang, broadcasts: &Broadcasts, body: Body, from: Option<Box<Handover>>) -> Self {
        Message { gang: gang.place(), after: broadcasts.posted(), body, from }
    }
}

const _: () = assert!(size_of::<Message>() == 128);

pub(crate) enum Body {
    Full(Arc<Descriptor>),
    Compact(CompactDescriptor),
    /// A compact descriptor as it was posted to all members.
    Broadcast(Words),
    /// The step is done once the event has passed.
    Step(Event),
}

/// One device's ends of all rings, by ordinal in the pool. The place of the device itself is empty.
pub(crate) struct Endpoint {
    to: Vec<Option<Producer<Message>>>,
    from: Vec<Option<Consumer<Message>>>,
    /// A message that was taken too early: of a newer gang, or behind a broadcast that was not read yet.
    kept: Vec<Option<Message>>,
    /// Bits by ordinal, of small ones: something was sent to the device since its ring was last seen empty.
    sent: u64,
    took: bool,
    pub(crate) parcels: ParcelBox,
}

pub(crate) struct Leftovers {
    _messages: Vec<Message>,
    _parcels: Vec<Parcel>,
}

impl Endpoint {
    pub(crate) fn all(count: usize) -> Vec<Endpoint> {
        let mut ends: Vec<Endpoint> = ParcelBox::all(count)
            .map(|parcels| Endpoint {
                parcels,
                sent: 0,
                took: false,
                to: Vec::with_capacity(count),
                from: (0..count).map(|_| None).collect(),
                kept: (0..count).map(|_| None).collect(),
            })
            .collect();
        for from in 0..count {
            for to in 0..count {
                let pair = (from != to).then(|| ring::channel(SLOTS));
                let (producer, consumer) = pair.unzip();
                ends[from].to.push(producer);
                ends[to].from[from] = consumer;
            }
        }
        ends
    }

    #[expect(
        clippy::result_large_err,
        reason = "it goes into a slot of a ring: a box would be an allocation for each message"
    )]
    pub(crate) fn push(&mut self, to: usize, message: Message) -> Result<(), ring::Full<Message>> {
        self.sent |= bit(to);
        self.to[to].as_mut().expect("a device does not send to itself").push(message)
    }

    /// Posts a broadcast to all members of a gang, as the member of this rank. Returns false, and posts nothing, when
    /// the gang has no broadcasts, or when a member has messages in its ring: it would read this one first.
    pub(crate) fn broadcast(&mut self, (gang, rank): (&Gang, usize), broadcasts: &Broadcasts, words: Words) -> bool {
        for &device in gang.members() {
            if self.sent & bit(device) != 0 {
                if self.to[device].as_ref().is_some_and(|ring| ring.slots() < ring.capacity()) {
                    return false;
                }
                self.sent &= !bit(device);
            }
        }
        broadcasts.post(gang, rank, words)
    }

    pub(crate) fn took(&mut self) -> bool {
        mem::take(&mut self.took)
    }

    /// The next message of a gang from a device, if it has arrived. `rank` is the rank of that device in the gang.
    /// `Err` when the sender is in a newer gang already.
    pub(crate) fn poll(
        &mut self,
        from: usize,
        (gang, rank): (&Gang, usize),
        broadcasts: &Broadcasts,
    ) -> Result<Option<Message>, NewerGang> {
        let (place, kept) = (gang.place(), &mut self.kept[from]);
        loop {
            // Mostly the ring is empty and no message is moved. The ring is read before the broadcast slot: a thread
            // that sees a message also sees the broadcasts that were posted before the message.
            if kept.is_none()
                && let Some(message) = self.from[from].as_mut().and_then(Consumer::pop)
            {
                self.took = true;
                *kept = Some(message);
            }
            let most = match kept {
                Some(message) if message.gang < place => {
                    *kept = None;
                    continue;
                }
                Some(message) if message.gang == place => message.after,
                // Its broadcasts in this gang come before its messages in a newer gang.
                _ => u64::MAX,
            };
            if let Some(words) = broadcasts.read(gang, rank, most) {
                let body = Body::Broadcast(words);
                return Ok(Some(Message { gang: place, after: 0, body, from: None }));
            }
            return match kept {
                Some(message) if message.gang > place => Err(NewerGang),
                _ => {
                    debug_assert!(
                        kept.is_none() || broadcasts.received(rank) == most,
                        "posted before the message, and not read"
                    );
                    Ok(kept.take())
                }
            };
        }
    }

    /// Takes out the messages that gangs up to place `upto` have left unread. They hold buffers and values. Else rings
    /// would fill, and two members that each wait for room in the other's ring never come to read.
    ///
    /// The caller drops the result when it no longer borrows the endpoint: a value's `Drop` may use the rings.
    #[must_use]
    pub(crate) fn leftovers(&mut self, upto: u64) -> Leftovers {
        let mut found = Vec::new();
        for (kept, from) in self.kept.iter_mut().zip(&mut self.from) {
            while let Some(message) = kept.take().or_else(|| from.as_mut()?.pop()) {
                if message.gang > upto {
                    *kept = Some(message);
                    break;
                }
                found.push(message);
            }
        }
        Leftovers { _messages: found, _parcels: self.parcels.leftovers(upto) }
    }
}

fn bit(device: usize) -> u64 {
    if device < 64 { 1 << device } else { 0 }
}

pub(crate) struct NewerGang;

#[cfg(test)]
#[path = "../../tests/unit/fabric/mailbox_tests.rs"]
mod tests;
