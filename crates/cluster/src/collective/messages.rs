//! Messages from a member of one process to one of another, for `send` and `recv`, `give` and `take`.
//!
//! A message is a header, which is bytes of the host, and parts, which are memory of the sender's device. The sender
//! starts to stage the parts and goes on: a thread of its own meets the receiver and sends. So no order of sends can
//! deadlock. The receiver learns the lengths in the meeting, and takes memory then. For the meeting a message has a
//! place of its own besides the sender's device ([`OUTBOX`]): the device may be in another meeting meanwhile, and later
//! messages may come first. The scope's end waits for the senders' threads.
//!
//! Invariant: messages of one label between two members of a group are received in the order in which they were sent.

use super::hierarchical::{HierarchicalCall, MOST_TEXT, Noted, part as part_of};
use super::message_route::{Again, CancelOn, Held, MessageRoute};
use crate::internals::*;
use crate::runtime::{Area, Call, Incoming, Label, Outgoing, Place};
use crate::traits::{Arrival, OUTBOX};
use crate::wire::{decode, hash, shortened};
use gpu_pool::{Error, Group, Result, error::Site};
use std::sync::Arc;

/// A message that has come. Its parts are not on this device yet.
pub(super) struct Arrived<'g, 'd> {
    hier: HierarchicalCall<'g, 'd>,
    from: usize,
    site: String,
    header: Vec<u8>,
    lens: Vec<usize>,
    arrived: Vec<Held>,
}

struct Pair {
    members: [Place; 2],
    number: u64,
    text: String,
}

impl Pair {
    fn new(hier: &HierarchicalCall<'_, '_>, label: Label, from: usize, to: usize) -> Pair {
        let (across, call) = (hier.across, hier.call);
        // Messages of two members in two groups do not see each other.
        let queue = hash(&format!("{:?} {from} {to} {label:?}", across.places));
        let number = queue ^ hier.link.next_message(queue);
        let mut sender = across.places[from];
        sender.device += OUTBOX;
        let members = [sender, across.places[to]];
        let text = match (call.dtype, call.of) {
            (Some(dtype), _) => format!("{label} of {dtype:?}"),
            (None, Some((_, of))) => format!("{label} of {of}"),
            (None, None) => label.to_string(),
        };
        Pair { members, number, text: shortened(&text, MOST_TEXT) }
    }

    /// Batch 0 is the head, batch 1 are the parts.
    fn again<'a>(&'a self, place: Place, call: &Call, batch: usize) -> Arrival<'a> {
        Arrival { number: self.number ^ (batch as u64 + 1) << 62, ..self.arrival(place, call, Vec::new()) }
    }

    fn arrival<'a>(&'a self, place: Place, call: &Call, note: Vec<u8>) -> Arrival<'a> {
        Arrival {
            members: &self.members,
            number: self.number,
            place,
            call: &self.text,
            site: call.site,
            leads: true,
            proxied: false,
            note,
        }
    }
}

fn head(outgoing: &Outgoing, site: Site) -> Vec<u8> {
    let lens: Vec<usize> = outgoing.parts.iter().map(|part| part.bytes.len()).collect();
    let site = shortened(&site.to_string(), MOST_TEXT);
    postcard::to_stdvec(&(lens, site, &outgoing.header)).expect("numbers and bytes can be written")
}

/// The parts of a [`head`]; none if these bytes are no head.
fn read_head(head: &[u8]) -> Option<(Vec<usize>, String, Vec<u8>)> {
    decode(head).ok()
}

/// Sends a message to a member of another process. Waits neither for it nor for the device.
pub(super) fn send(group: &Group<'_>, (call, label): (&Call, Label), outgoing: &Outgoing, to: usize) -> Result<()> {
    let hier = HierarchicalCall::new(group, call, false)?;
    let (dev, across, rank) = (group.device(), hier.across, group.rank());
    let route = MessageRoute::new(&hier, across.places[rank], across.places[to])?;
    dev.handle().advance();
    drop(dev.note_call(call));
    let head = head(outgoing, call.site);
    let mut first = Vec::new();
    let note = Noted::of(&head);
    if let Noted::Later(len) = note {
        let mut bytes = hier.pinned(len)?;
        bytes.as_mut_slice()?.copy_from_slice(&head);
        first.push(Held::Host(Arc::new(bytes)));
    }
    let note = note.write();
    let parts = outgoing.parts.iter().map(|part| route.stage(&hier, part)).collect::<Result<_>>()?;
    // Who uses the memory next waits for these copies, and not for what this device does next.
    dev.core().record_early(call.op)?;
    let batches = vec![first, parts];
    let pair = Pair::new(&hier, label, rank, to);
    let (cancel_on, scope, gang) = (CancelOn::of(&hier), hier.scope.clone(), dev.own_gang().clone());
    let (call, device) = (call.clone(), dev.index());
    let send = move || {
        let send = || {
            route.ready(&batches)?;
            let place = pair.members[0];
            let commit = scope.meet(pair.arrival(place, &call, note))?;
            drop(commit.window);
            let number = commit.numbers[usize::from(place.host > pair.members[1].host)];
            route.send(number, batches, &|batch| scope.meet(pair.again(place, &call, batch)), &cancel_on)
        };
        if let Err(error) = send() {
            gang.poison(device, error);
        }
    };
    hier.link.run_apart(send)
}

pub(super) fn receive<'g>(
    group: &'g Group<'g>,
    (call, label): (&'g Call, Label),
    from: usize,
) -> Result<Arrived<'g, 'g>> {
    let hier = HierarchicalCall::new(group, call, false)?;
    let (dev, across, rank) = (group.device(), hier.across, group.rank());
    let route = MessageRoute::new(&hier, across.places[from], across.places[rank])?;
    dev.handle().advance();
    let _waits = dev.note_call(call);
    let pair = Pair::new(&hier, label, from, rank);
    let commit = hier.done(hier.scope.meet(pair.arrival(pair.members[1], call, Vec::new())))?;
    let sender = usize::from(across.places[from].host > across.places[rank].host);
    drop(commit.window);
    let (number, note) = (commit.numbers[sender], commit.notes.get(sender));
    let again: Again<'_> = &|batch| hier.scope.meet(pair.again(pair.members[1], call, batch));
    let arrive = || {
        let head = match note.and_then(|note| Noted::read(note)) {
            Some(Noted::Here(head)) => read_head(head),
            Some(Noted::Later(len)) => read_head(route.receive_head(&hier, number, len, again)?.as_slice()?),
            None => None,
        };
        let (lens, site, header) = head.ok_or_else(|| nonsense(call))?;
        Ok((route.receive(&hier, number, &lens, again)?, lens, site, header))
    };
    let (arrived, lens, site, header) = hier.done(arrive())?;
    Ok(Arrived { hier, from, site, header, lens, arrived })
}

fn nonsense(call: &Call) -> Error {
    Error::invalid_at(call.site, call.op, "another process has sent what cannot be read")
}

impl Incoming for Arrived<'_, '_> {
    fn header(&self) -> &[u8] {
        &self.header
    }

    fn lens(&self) -> &[usize] {
        &self.lens
    }

    fn store(&self, into: &[Area]) -> Result<()> {
        let mut parts = self.arrived.iter().zip(into);
        let store = |(part, to): (&Held, &Area)| match part {
            Held::Host(buffer) => self.hier.upload(buffer, 0..to.bytes.len(), to),
            Held::Device(area) => self.hier.copy(&part_of(area, 0..to.bytes.len()), to),
        };
        self.hier.done(parts.try_for_each(store))
    }

    fn only(&self, size: usize) -> Result<usize> {
        match self.lens[..] {
            [len] if len % size == 0 => Ok(len),
            _ => self.hier.done(Err(nonsense(self.hier.call))),
        }
    }

    fn expect(&self, len: usize) -> Result<()> {
        let sent = self.only(1)?;
        if sent == len {
            return Ok(());
        }
        let (places, call) = (&self.hier.across.places, self.hier.call);
        let a = places[self.from].call(format!("send of {sent} bytes"), self.site.clone());
        let own = places[self.hier.group.rank()].call(format!("{} of {len} bytes", call.op), call.site.to_string());
        let error = Error::WorldMismatch { what: "count", a, b: own };
        // Only this member has found it.
        self.hier.scope.fail(Some(self.hier.group.device().index()), &error);
        self.hier.done(Err(error))
    }

    fn failed(&self, error: Error) -> Error {
        self.hier.fail(&error);
        error
    }
}

#[cfg(test)]
#[path = "../../tests/unit/collective/messages_tests.rs"]
mod tests;
