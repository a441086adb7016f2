//! How a message gets from a member of one process to a member of another: through the hosts' memory, or over a rail
//! between devices. [`messages`](super::messages) meets; this file has the memory, and submits.
//!
//! A rail joins devices with one ordinal: the receiver's, if the sender's process has such a device, else the sender's.
//! A member whose own device that is sends from, or receives into, its memory. The other one hops through page-locked
//! memory; calls go to the rail device's proxy stream (`DeviceInternals::proxy_stream`).
//!
//! Between devices the receiver must have the memory before anything is submitted, and it knows the lengths from a
//! meeting. So a message has a further meeting for each batch, in whose turn both submit.

use super::hierarchical::{Carrier, HierarchicalCall};
use super::relay;
use crate::internals::*;
use crate::runtime::{Access, Area, Gang, Place, StallTimer, StreamCore};
use crate::traits::{Commit, DeviceTransport, HostTransport, Message, RailCall, RailMessage, Tag, World};
use gpu_pool::{Error, PinnedBuffer, Result};
use std::{cell::RefCell, sync::Arc, time::Duration};

pub(super) enum Held {
    Host(Arc<PinnedBuffer<u8>>),
    /// Of the member's own device.
    Device(Area),
}

impl Held {
    fn len(&self) -> usize {
        match self {
            Held::Host(buffer) => buffer.len(),
            Held::Device(area) => area.bytes.len(),
        }
    }

    fn area(&self) -> Area {
        match self {
            Held::Host(buffer) => {
                let block = buffer.block().clone();
                Area { address: block.address(), block, bytes: 0..buffer.len() }
            }
            Held::Device(area) => area.clone(),
        }
    }
}

pub(super) enum MessageRoute {
    Host { transport: Arc<dyn HostTransport>, peer: usize, receiver: u32 },
    Rail(Rail),
}

pub(super) struct Rail {
    transport: Arc<dyn DeviceTransport>,
    ordinal: usize,
    own: bool,
    proxy_stream: Arc<StreamCore>,
    peer: usize,
}

/// Ends the waits for messages.
pub(super) struct CancelOn {
    world: Arc<dyn World>,
    gang: Arc<Gang>,
    deadline: Duration,
}

impl CancelOn {
    pub fn of(hier: &HierarchicalCall<'_, '_>) -> Self {
        let dev = hier.group.device();
        CancelOn { world: hier.link.world.clone(), gang: dev.own_gang().clone(), deadline: dev.deadline() }
    }

    /// For one wait. It ends if the cluster is over, or if the gang has failed for longer than the deadline: then the
    /// scope has failed in all processes, and another one may have no memory for a message, or send none. (Also if
    /// bytes still flow. MPI is of no use after that.)
    pub fn check(&self) -> impl Fn() -> Option<Error> {
        let failed = RefCell::new(None);
        let given_up = move || {
            let (_, cause) = self.gang.cause()?;
            let mut failed = failed.borrow_mut();
            failed.get_or_insert_with(|| StallTimer::new(self.deadline)).is_over().then_some(cause)
        };
        move || self.world.check().err().or_else(&given_up)
    }
}

/// Meets again, for the batch with this number.
pub(super) type Again<'a> = &'a dyn Fn(usize) -> Result<Commit>;

/// The tag of messages to a device. The parts of a message stay in order.
fn tag(number: u64, receiver: u32) -> Tag {
    Tag { number, phase: Tag::MESSAGES, rail: receiver }
}

impl MessageRoute {
    /// This member is one of the two.
    pub fn new(hier: &HierarchicalCall<'_, '_>, from: Place, to: Place) -> Result<MessageRoute> {
        let peer = if hier.link.world.host() == from.host { to.host } else { from.host };
        let transport = match hier.carrier()? {
            Carrier::Device(transport) => transport,
            Carrier::Host(transport) => {
                return Ok(MessageRoute::Host { transport, peer, receiver: to.device as u32 });
            }
        };
        let devices = hier.link.world.devices();
        let ordinal = if to.device < devices[from.host] { to.device } else { from.device };
        transport.failed(ordinal).map_or(Ok(()), Err)?;
        let dev = hier.group.device();
        let (own, proxy_stream) = (dev.index() == ordinal, dev.proxy_stream(ordinal)?);
        Ok(MessageRoute::Rail(Rail { transport, ordinal, own, proxy_stream, peer }))
    }

    fn is_on_device(&self) -> bool {
        matches!(self, MessageRoute::Rail(rail) if rail.own)
    }

    pub fn room(&self, hier: &HierarchicalCall<'_, '_>, bytes: usize) -> Result<Held> {
        match self.is_on_device() {
            true => Ok(Held::Device(hier.scratch(bytes)?)),
            false => Ok(Held::Host(Arc::new(hier.pinned(bytes)?))),
        }
    }

    /// A copy of this device's memory. Asynchronous.
    pub fn stage(&self, hier: &HierarchicalCall<'_, '_>, from: &Area) -> Result<Held> {
        if !self.is_on_device() {
            return Ok(Held::Host(Arc::new(hier.start_to_stage(from)?)));
        }
        let to = hier.scratch(from.bytes.len())?;
        hier.copy(from, &to)?;
        Ok(Held::Device(to))
    }

    /// Waits for the copies that the host has to wait for: before the sender arrives.
    pub fn ready(&self, batches: &[Vec<Held>]) -> Result<()> {
        match self {
            MessageRoute::Rail(_) => Ok(()),
            MessageRoute::Host { .. } => batches.iter().flatten().try_for_each(|held| match held {
                Held::Host(buffer) => buffer.as_slice().map(drop),
                Held::Device(_) => Ok(()),
            }),
        }
    }

    pub fn send(&self, first: u64, batches: Vec<Vec<Held>>, again: Again<'_>, cancel_on: &CancelOn) -> Result<()> {
        match self {
            MessageRoute::Host { transport, peer, receiver } => {
                let tag = tag(first, *receiver);
                let message = |held| match held {
                    Held::Host(bytes) => Some(Message::Send { to: *peer, tag, range: 0..bytes.len(), bytes }),
                    Held::Device(_) => None,
                };
                let messages = batches.into_iter().flatten().filter_map(message).collect();
                transport.exchange(messages, &cancel_on.check()).map(drop)
            }
            MessageRoute::Rail(rail) => {
                // Else the library would make the context of GPU 0 on this thread.
                let _ = rail.proxy_stream.handle.driver.bind();
                let filled = |batch: &&(usize, Vec<Held>)| batch.1.iter().any(|held| held.len() > 0);
                let batches: Vec<_> = batches.into_iter().enumerate().collect();
                batches.iter().filter(filled).try_for_each(|(number, batch)| {
                    let commit = again(*number)?;
                    let last = rail.submit(batch, Access::Read, commit)?;
                    rail.wait(last, cancel_on)
                })
            }
        }
    }

    pub fn receive_head(
        &self,
        hier: &HierarchicalCall<'_, '_>,
        first: u64,
        len: usize,
        again: Again<'_>,
    ) -> Result<Arc<PinnedBuffer<u8>>> {
        let into = Held::Host(Arc::new(hier.pinned(len)?));
        match self.receive_into(hier, (first, 0), vec![into], again)?.pop() {
            Some(Held::Host(head)) => Ok(head),
            _ => Err(Error::invalid_at(hier.call.site, hier.call.op, "the transport has lost a message")),
        }
    }

    /// Receives batch 1: parts of these lengths. They may still be on their way.
    pub fn receive(
        &self,
        hier: &HierarchicalCall<'_, '_>,
        first: u64,
        lens: &[usize],
        again: Again<'_>,
    ) -> Result<Vec<Held>> {
        let room = lens.iter().map(|&len| self.room(hier, len)).collect::<Result<Vec<_>>>()?;
        self.receive_into(hier, (first, 1), room, again)
    }

    fn receive_into(
        &self,
        hier: &HierarchicalCall<'_, '_>,
        (first, number): (u64, usize),
        room: Vec<Held>,
        again: Again<'_>,
    ) -> Result<Vec<Held>> {
        match self {
            MessageRoute::Host { transport, peer, receiver } => {
                let into = |held| match held {
                    Held::Host(into) => Arc::into_inner(into).map(|into| (into.len(), into)),
                    Held::Device(_) => None,
                };
                let room: Vec<_> = room.into_iter().filter_map(into).collect();
                let message = |(len, into)| Message::Receive { from: *peer, tag: tag(first, *receiver), into, len };
                let messages = room.into_iter().map(message).collect();
                let arrived = transport.exchange(messages, &CancelOn::of(hier).check())?;
                let held = arrived.into_iter().filter_map(|message| match message {
                    Message::Receive { into, .. } => Some(Held::Host(Arc::new(into))),
                    Message::Send { .. } => None,
                });
                Ok(held.collect())
            }
            MessageRoute::Rail(rail) => {
                if room.iter().any(|held| held.len() > 0) {
                    rail.submit(&room, Access::Write, again(number)?)?;
                }
                Ok(room)
            }
        }
    }
}

impl Rail {
    /// Submits the messages of a batch in the commit's turn. Returns their place in the proxy stream.
    fn submit(&self, batch: &[Held], access: Access, commit: Commit) -> Result<u64> {
        let areas = batch.iter().map(Held::area).filter(|area| !area.bytes.is_empty());
        let uses: Vec<(Area, Access)> = areas.map(|area| (area, access)).collect();
        let sends = access == Access::Read;
        let message = |(area, _): &(Area, Access)| RailMessage {
            sends,
            peer: self.peer,
            at: area.address,
            bytes: area.bytes.len(),
        };
        let (messages, stream): (Vec<_>, _) = (uses.iter().map(message).collect(), &self.proxy_stream);
        let submitted = relay::with_memory(stream, "message", &uses, &uses, || {
            // SAFETY: the memory is the rail's device's or page-locked, and its use is ordered and noted. The other
            // process submits the same messages: both have committed them.
            let done = unsafe { relay::submit(&*self.transport, stream, "message", &RailCall::Messages(&messages)) };
            drop(commit.window);
            done
        });
        submitted.map_err(|error| self.transport.broken(error))
    }

    /// Waits until the messages have gone: the scope's end waits for the sender's thread, and so for them. The receiver
    /// may have much to do before; once its gang has failed, it may never come.
    fn wait(&self, last: u64, cancel_on: &CancelOn) -> Result<()> {
        let over = || cancel_on.world.check().err().or_else(|| self.transport.failed(self.ordinal));
        loop {
            let failed = cancel_on.gang.is_aborted();
            match self.proxy_stream.wait_host_unless("message", last, cancel_on.deadline, &|| over().is_some()) {
                Err(error @ Error::Timeout { .. }) => match over() {
                    Some(cause) => return Err(cause),
                    None if failed => return Err(error),
                    None => {}
                },
                // Aborted calls end, too.
                waited => return over().map_or(waited, Err),
            }
        }
    }
}
