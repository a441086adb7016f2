//! `send` and `recv` between processes.
//!
//! A sender stages its elements and goes on: a thread of its own meets the receiver and sends. So no order of sends can
//! deadlock. For the meeting the sender is a place besides its devices ([`OUTBOX`]): its device may be in another
//! meeting meanwhile. The end of the scope waits for these threads.

use super::{
    super::{
        Group,
        transport::{Arrival, Commit, Message, Place, Tag},
    },
    trip::Trip,
    values::hash,
};
use crate::{
    error::{Error, Result},
    fabric::{call::Call, descriptor::Area, membership::Across, types::DType},
    memory::PinnedBuffer,
};

/// What is added to a device's ordinal for its messages on their way.
const OUTBOX: usize = 1 << 16;

/// A message between two members: what both know of it.
struct Pair {
    members: [Place; 2],
    number: u64,
    text: String,
}

impl Pair {
    fn new(group: &Group<'_>, across: &Across, dtype: DType, from: usize, to: usize) -> Pair {
        let mut sender = across.places[from];
        sender.device += OUTBOX;
        let members = [sender, across.places[to]];
        // Messages of two members in two groups do not see each other.
        let queue = hash(&format!("{:?} {from} {to}", across.places));
        let number = queue ^ group.dev.session.groups.next_message(queue);
        Pair { members, number, text: format!("a message of {dtype:?}") }
    }

    fn arrival<'a>(&'a self, place: Place, call: &Call, note: Vec<u8>) -> Arrival<'a> {
        Arrival {
            members: &self.members,
            number: self.number,
            place,
            call: &self.text,
            site: call.site,
            leads: true,
            note,
        }
    }
}

/// All messages have one rail: their commits' numbers tell them apart.
fn tag(commit: &Commit) -> Tag {
    Tag { number: commit.number, phase: 0, rail: 0 }
}

impl Group<'_> {
    /// Sends what is in `from` to a member of another process.
    #[track_caller]
    pub(in super::super) fn send_across(&self, across: &Across, call: &Call, from: &Area, to: usize) -> Result<()> {
        let trip = Trip::new(self, across, call, false)?;
        let transport = trip.host_transport()?;
        let bytes = trip.stage(from)?;
        let pair = Pair::new(self, across, call.dtype.expect("messages are of elements"), self.rank, to);
        let (link, scope, gang) = (trip.link.clone(), trip.scope.clone(), self.dev.session.gang.clone());
        let (call, device, to) = (call.clone(), self.dev.index(), across.places[to].host);
        let carry = move || {
            let send = || {
                let note = (bytes.len() as u64).to_le_bytes().to_vec();
                let commit = scope.meet(pair.arrival(pair.members[0], &call, note))?;
                let tag = tag(&commit);
                drop(commit.window);
                let range = 0..bytes.len();
                let message = Message::Send { to, tag, bytes, range };
                transport.exchange(vec![message], &|| link.world.check().err()).map(drop)
            };
            if let Err(error) = send() {
                gang.poison(device, error);
            }
        };
        trip.link.carry(carry)
    }

    /// The next message of a member of another process. `len`: its bytes, if the caller knows them.
    #[track_caller]
    pub(in super::super) fn receive_across(
        &self,
        across: &Across,
        call: &Call,
        from: usize,
        len: Option<usize>,
    ) -> Result<PinnedBuffer<u8>> {
        let trip = Trip::new(self, across, call, false)?;
        let transport = trip.host_transport()?;
        let pair = Pair::new(self, across, call.dtype.expect("messages are of elements"), from, self.rank);
        let room = len.map(|len| trip.pinned(len)).transpose()?;
        let commit = trip.done(trip.scope.meet(pair.arrival(pair.members[1], call, Vec::new())))?;
        let sender = usize::from(across.places[from].host > across.places[self.rank].host);
        let sent = commit.notes.get(sender).and_then(|note| <[u8; 8]>::try_from(&note[..]).ok());
        let tag = tag(&commit);
        drop(commit.window);
        let receive = |sent: [u8; 8]| {
            let sent = u64::from_le_bytes(sent) as usize;
            let into = match room {
                Some(room) if room.len() == sent => room,
                _ => trip.pinned(sent)?,
            };
            let message = Message::Receive { from: across.places[from].host, tag, into, len: sent };
            match transport.exchange(vec![message], &|| trip.lost())?.pop() {
                Some(Message::Receive { into, .. }) => Ok(into),
                _ => Err(Error::invalid_at(call.site, call.op, "the transport has lost a message")),
            }
        };
        let unread = || Error::invalid_at(call.site, call.op, "another process has sent what cannot be read");
        let arrived = trip.done(sent.ok_or_else(unread).and_then(receive))?;
        match len.filter(|&len| len != arrived.len()) {
            None => Ok(arrived),
            Some(len) => {
                let sent = format!("send of {} bytes", arrived.len());
                let a = across.places[from].call(sent, "its call of send".to_owned());
                let b = across.places[self.rank].call(format!("{} of {len} bytes", call.op), call.site.to_string());
                trip.done(Err(Error::WorldMismatch { what: "count", a, b }))
            }
        }
    }

    /// Copies a message that has arrived to this device.
    #[track_caller]
    pub(in super::super) fn take_in(
        &self,
        across: &Across,
        call: &Call,
        from: &PinnedBuffer<u8>,
        to: &Area,
    ) -> Result<()> {
        Trip::new(self, across, call, false)?.upload(from, 0..from.len(), to)
    }
}
