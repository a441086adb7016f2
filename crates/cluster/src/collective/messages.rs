//! Messages from a member of one process to one of another: what `send` and `recv`, `give` and `take` become there.
//!
//! A message is a header, which is bytes of the host, and parts, which are memory of the sender's device. The sender
//! starts to stage the parts and goes on: a thread of its own meets the receiver and sends. So no order of sends can
//! deadlock. The receiver learns the lengths in the meeting, and takes memory then.
//!
//! For the meeting a message has a place of its own besides the sender's device ([`OUTBOX`]): the device may be in
//! another meeting meanwhile, and later messages may come first. The scope's end waits for the senders' threads.
//!
//! Invariant: messages of one label between two members of a group are received in the order in which they were sent.

use super::{
    super::{
        Group,
        meeting::note_call,
        transport::{Arrival, MOST_NOTE, OUTBOX, Place},
    },
    hierarchical::{HierarchicalCall, part as part_of, shortened},
    message_route::{Again, CancelOn, Held, MessageRoute},
    values::hash,
};
use crate::{
    error::{Error, Result, Site},
    fabric::{call::Call, descriptor::Area, membership::Across, parcels::Label},
};
use std::sync::Arc;

/// The first byte of a note: the head is in it, or its length is, and the head is the first message.
const HERE: u8 = 1;
const LATER: u8 = 0;

/// A message to another process.
pub(in super::super) struct Outgoing {
    pub header: Vec<u8>,
    pub parts: Vec<Area>,
}

/// A message that has come. Its parts are not on this device yet.
pub(in super::super) struct Incoming<'g, 'd> {
    hier: HierarchicalCall<'g, 'd>,
    from: usize,
    /// The place of the sender's call.
    site: String,
    pub header: Vec<u8>,
    /// The bytes of each part.
    pub lens: Vec<usize>,
    arrived: Vec<Held>,
}

/// The meeting of a sender and a receiver: what both know of it.
struct Pair {
    members: [Place; 2],
    number: u64,
    text: String,
}

impl Pair {
    fn new(group: &Group<'_>, across: &Across, call: &Call, label: Label, from: usize, to: usize) -> Pair {
        // Messages of two members in two groups do not see each other.
        let queue = hash(&format!("{:?} {from} {to} {label:?}", across.places));
        let number = queue ^ group.dev.session.groups.next_message(queue);
        let mut sender = across.places[from];
        sender.device += OUTBOX;
        let members = [sender, across.places[to]];
        let text = match (call.dtype, call.of) {
            (Some(dtype), _) => format!("{label} of {dtype:?}"),
            (None, Some((_, of))) => format!("{label} of {of}"),
            (None, None) => label.to_string(),
        };
        Pair { members, number, text: shortened(text) }
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
            beside: false,
            note,
        }
    }
}

/// What the receiver must know before it can take the parts.
fn head(outgoing: &Outgoing, site: Site) -> Vec<u8> {
    let lens = outgoing.parts.iter().flat_map(|part| (part.bytes.len() as u64).to_le_bytes());
    let site = shortened(site.to_string());
    let (count, site_len) = (outgoing.parts.len() as u32, site.len() as u16);
    let lens = count.to_le_bytes().into_iter().chain(lens).chain(site_len.to_le_bytes());
    lens.chain(site.into_bytes()).chain(outgoing.header.iter().copied()).collect()
}

/// The lengths of the parts, the place of the sender's call, and the header; none if these bytes are no head.
fn read_head(head: &[u8]) -> Option<(Vec<usize>, String, Vec<u8>)> {
    let (count, rest) = head.split_first_chunk()?;
    let (lens, rest) = rest.split_at_checked((u32::from_le_bytes(*count) as usize).checked_mul(8)?)?;
    let len = |eight: &[u8]| usize::try_from(u64::from_le_bytes(eight.try_into().ok()?)).ok();
    let (site_len, rest) = rest.split_first_chunk()?;
    let (site, header) = rest.split_at_checked(u16::from_le_bytes(*site_len) as usize)?;
    let site = String::from_utf8(site.to_vec()).ok()?;
    Some((lens.chunks_exact(8).map(len).collect::<Option<_>>()?, site, header.to_vec()))
}

impl Group<'_> {
    /// Sends a message to a member of another process. Waits neither for it nor for the device.
    #[track_caller]
    pub(in super::super) fn send_across(
        &self,
        across: &Across,
        (call, label): (&Call, Label),
        outgoing: &Outgoing,
        to: usize,
    ) -> Result<()> {
        let hier = HierarchicalCall::new(self, across, call, false)?;
        let route = MessageRoute::new(&hier, across.places[self.rank], across.places[to])?;
        self.dev.worker.handle.progress.advance();
        note_call(self.dev, call);
        let head = head(outgoing, call.site);
        let mut first = Vec::new();
        let note = if head.len() < MOST_NOTE {
            [vec![HERE], head].concat()
        } else {
            let mut bytes = hier.pinned(head.len())?;
            bytes.as_mut_slice()?.copy_from_slice(&head);
            first.push(Held::Host(Arc::new(bytes)));
            [vec![LATER], (head.len() as u64).to_le_bytes().to_vec()].concat()
        };
        let parts = outgoing.parts.iter().map(|part| route.stage(&hier, part)).collect::<Result<_>>()?;
        // Who uses the memory next waits for these copies, and not for what this device does next.
        self.dev.stream.record_early(call.op)?;
        let batches = vec![first, parts];
        let pair = Pair::new(self, across, call, label, self.rank, to);
        let (link, scope, gang) = (hier.link.clone(), hier.scope.clone(), self.dev.session.gang.clone());
        let (call, device) = (call.clone(), self.dev.index());
        let send = move || {
            let send = || {
                route.ready(&batches)?;
                let place = pair.members[0];
                let commit = scope.meet(pair.arrival(place, &call, note))?;
                let cancel_on = CancelOn { lost: &|| link.world.check().err(), gang: &gang };
                route.send(commit, batches, &|batch| scope.meet(pair.again(place, &call, batch)), &cancel_on)
            };
            if let Err(error) = send() {
                gang.poison(device, error);
            }
        };
        hier.link.run_apart(send)
    }

    /// The next message of a label from a member of another process.
    #[track_caller]
    pub(in super::super) fn receive_across<'g>(
        &'g self,
        across: &'g Across,
        (call, label): (&'g Call, Label),
        from: usize,
    ) -> Result<Incoming<'g, 'g>> {
        let hier = HierarchicalCall::new(self, across, call, false)?;
        let route = MessageRoute::new(&hier, across.places[from], across.places[self.rank])?;
        self.dev.worker.handle.progress.advance();
        note_call(self.dev, call);
        let pair = Pair::new(self, across, call, label, from, self.rank);
        let commit = hier.done(hier.scope.meet(pair.arrival(pair.members[1], call, Vec::new())))?;
        let (number, sender) = (commit.number, across.places[from].host);
        drop(commit.window);
        let note = commit.notes.get(usize::from(sender > across.places[self.rank].host));
        let again: Again<'_> = &|batch| hier.scope.meet(pair.again(pair.members[1], call, batch));
        let arrive = || {
            let head = match note.and_then(|note| note.split_first()) {
                Some((&HERE, head)) => read_head(head),
                Some((&LATER, len)) => {
                    let len = u64::from_le_bytes(len.try_into().map_err(|_| nonsense(call))?) as usize;
                    let head = route.receive_head(&hier, number, len, again)?;
                    read_head(head.as_slice()?)
                }
                _ => None,
            };
            let (lens, site, header) = head.ok_or_else(|| nonsense(call))?;
            Ok((route.receive(&hier, number, &lens, again)?, lens, site, header))
        };
        let (arrived, lens, site, header) = hier.done(arrive())?;
        Ok(Incoming { hier, from, site, header, lens, arrived })
    }
}

pub(in super::super) fn nonsense(call: &Call) -> Error {
    Error::invalid_at(call.site, call.op, "another process has sent what cannot be read")
}

impl Incoming<'_, '_> {
    /// Puts the parts into memory of this device, each into as many bytes as it has. Asynchronous.
    #[track_caller]
    pub fn store(&self, into: &[Area]) -> Result<()> {
        let mut parts = self.arrived.iter().zip(into);
        let store = |(part, to): (&Held, &Area)| match part {
            Held::Host(buffer) => self.hier.upload(buffer, 0..to.bytes.len(), to),
            Held::Device(area) => self.hier.copy(&part_of(area, 0..to.bytes.len()), to),
        };
        self.done(parts.try_for_each(store))
    }

    /// The bytes of the only part, of elements of this size.
    pub fn only(&self, size: usize) -> Result<usize> {
        match self.lens[..] {
            [len] if len % size == 0 => Ok(len),
            _ => self.done(Err(nonsense(self.hier.call))),
        }
    }

    /// The only part must have so many bytes.
    pub fn expect(&self, len: usize) -> Result<()> {
        let sent = self.only(1)?;
        if sent == len {
            return Ok(());
        }
        let (places, call) = (&self.hier.across.places, self.hier.call);
        let a = places[self.from].call(format!("send of {sent} bytes"), self.site.clone());
        let own = places[self.hier.group.rank].call(format!("{} of {len} bytes", call.op), call.site.to_string());
        let error = Error::WorldMismatch { what: "count", a, b: own };
        // Only this member has found it.
        self.hier.scope.fail(Some(self.hier.group.dev.index()), &error);
        self.done(Err(error))
    }

    /// What the receiver makes of the message. The sender has gone on, so a failure fails the gang.
    pub fn done<R>(&self, done: Result<R>) -> Result<R> {
        self.hier.done(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Another process may send anything.
        #[test]
        fn any_bytes_can_be_read_as_a_head(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Some((lens, site, header)) = read_head(&bytes) {
                prop_assert_eq!(4 + 8 * lens.len() + 2 + site.len() + header.len(), bytes.len());
            }
        }
    }
}
