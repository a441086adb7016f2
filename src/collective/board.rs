//! The meeting: every member tells every other what it is about to do, before anyone does it.
//!
//! Between each ordered pair of devices there is a lock-free single-producer ring ([`crate::sync::ring`]); a slot holds
//! a descriptor, never data. A member sends its [`Call`] to all others, then reads theirs; when it has read all and
//! they match, it commits the sequence number on the gang's word. If a peer fails first, the abort wins for everyone;
//! so a collective runs on all members or on none.
//!
//! What all members of the gang are told, and is short, goes by [headline](super::headlines) instead, one line for all
//! of them.
//!
//! Messages are marked with their gang. Both ends see gangs in the same order (dispatch order), so a message of an
//! older gang is a leftover of a failed one and is dropped, and a message of a newer gang means that its sender has
//! left this one.

use super::{
    Group,
    brief::Brief,
    call::{Call, Origin},
    headlines::{Headlines, Words},
    plan::{Counts, Side},
    point::Post,
};
use crate::{
    Event,
    contain::Contained,
    driver::Address,
    error::{Error, Result},
    gang::Gang,
    memory::{block::BlockRef, handle::Handover},
    sync::ring::{self, Consumer, Producer},
    thread::worker::Worker,
};
use smallvec::{SmallVec, smallvec};
use std::{any::Any, mem, ops::Range, sync::Arc};

/// Messages in flight per ordered pair. A ring step is two; a member runs ahead of its neighbour by at most a few.
const SLOTS: usize = 16;

/// What a member tells the others: the same to each, so it is made once and shared.
pub(crate) struct Notice {
    pub(crate) call: Call,
    /// Ranks in the gang of those who are to meet.
    group: Arc<[usize]>,
    pub(crate) payload: Payload,
}

/// What goes with a call.
pub(crate) enum Payload {
    Nothing,
    /// Memory that peers will touch.
    Memory(Lent),
    /// A host value.
    Value(Contained<Box<dyn Any + Send + Sync>>),
}

/// What a member lends to its peers for a collective.
pub(crate) struct Lent {
    pub(crate) source: Option<Area>,
    pub(crate) destination: Option<Area>,
    /// From when on it may be touched.
    pub(crate) ready: Option<Event>,
    /// What this member's elements are multiplied by.
    pub(crate) factor: f64,
    /// What this member sends to each, and receives from each.
    pub(crate) counts: Option<(Counts, Counts)>,
    /// Memory of the host through which the others get what it has.
    pub(crate) stage: Option<Area>,
    /// Own memory that others fill, and its bytes: its predecessor in a ring, all in an exchange. Nobody keeps it for
    /// this member, which waits for that.
    pub(crate) inbox: Option<(Address, usize)>,
}

impl Lent {
    /// The buffer that the member's part on this side is done on; in place the two are one.
    ///
    /// # Panics
    /// When it has lent none.
    pub(super) fn area(&self, side: Side) -> &Area {
        let area = match side {
            Side::Source => self.source.as_ref().or(self.destination.as_ref()),
            Side::Destination => self.destination.as_ref(),
        };
        area.expect("every member lends what its part is done on")
    }
}

/// Memory of one device.
#[derive(Clone)]
pub(crate) struct Area {
    pub(crate) block: BlockRef,
    pub(crate) address: Address,
    /// Where it lies in the block.
    pub(crate) bytes: Range<usize>,
}

/// One descriptor in a ring: two cache lines side by side, which hardware fetches together, and none that slots share.
#[repr(align(128))]
pub(super) struct Message {
    gang: u64,
    /// Headlines that the sender had posted in this gang before.
    after: u64,
    pub(super) body: Body,
    pub(super) from: Option<Box<Handover>>,
}

impl Message {
    /// For the ring, from a member that has said this much to all.
    pub(super) fn new(gang: &Gang, headlines: &Headlines, body: Body, from: Option<Box<Handover>>) -> Self {
        Message { gang: gang.place(), after: headlines.posted(), body, from }
    }
}

const _: () = assert!(size_of::<Message>() == 128);

pub(super) enum Body {
    Call(Arc<Notice>),
    /// All of that in short.
    Brief(Brief),
    /// The same, as it was posted.
    Headline(Words),
    /// A step of a collective is done on the sender's stream once the event has passed.
    Step(Event),
}

/// One device's ends of all rings, by ordinal in the pool. Its own place is empty.
pub(crate) struct Endpoint {
    pub(super) to: Vec<Option<Producer<Message>>>,
    from: Vec<Option<Consumer<Message>>>,
    /// A message that it is not the time for: of a newer gang, or one that comes after a headline.
    kept: Vec<Option<Message>>,
    /// By ordinal, of those that can be in a gang with headlines: to whom something was sent since the ring was seen
    /// empty.
    sent: u64,
    /// Whether something was taken from a ring since somebody asked.
    took: bool,
    pub(super) post: Post,
}

impl Endpoint {
    /// The endpoints of `count` devices.
    pub(crate) fn all(count: usize) -> Vec<Endpoint> {
        let mut ends: Vec<Endpoint> = Post::all(count)
            .map(|post| Endpoint {
                post,
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

    /// Puts a message into the ring to a device; gives it back when that is full.
    #[expect(
        clippy::result_large_err,
        reason = "it goes into a slot of a ring: a box would be an allocation for each message"
    )]
    pub(super) fn push(&mut self, to: usize, message: Message) -> Result<(), ring::Full<Message>> {
        self.sent |= bit(to);
        self.to[to].as_mut().expect("a device does not send to itself").push(message)
    }

    /// Says it to all members of a gang, as the one of this rank; unless they have no headlines, or something that was
    /// sent to one of them has not been taken, which it would be heard before.
    pub(super) fn announce(&mut self, (gang, rank): (&Gang, usize), headlines: &Headlines, words: Words) -> bool {
        self.is_drained(gang.members()) && headlines.post(gang, rank, words)
    }

    /// Whether all that was sent to any of these devices has been taken.
    fn is_drained(&mut self, devices: &[usize]) -> bool {
        for &device in devices {
            if self.sent & bit(device) != 0 {
                if self.to[device].as_ref().is_some_and(|ring| ring.slots() < ring.capacity()) {
                    return false;
                }
                self.sent &= !bit(device);
            }
        }
        true
    }

    /// Whether there is room in some ring that was not there when this was asked last.
    pub(super) fn took(&mut self) -> bool {
        mem::take(&mut self.took)
    }

    /// The next message of a gang from a device, which has this rank in it, if it has arrived. `Err` when the sender is
    /// in a newer gang already.
    pub(super) fn poll(
        &mut self,
        from: usize,
        (gang, rank): (&Gang, usize),
        headlines: &Headlines,
    ) -> Result<Option<Message>, NewerGang> {
        let (place, kept) = (gang.place(), &mut self.kept[from]);
        loop {
            // Mostly nothing is there, and nothing is to be moved. Before the headlines: whoever sees a message sees
            // those before it.
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
                // What it has said here comes before what it says in a newer gang.
                _ => u64::MAX,
            };
            if let Some(words) = headlines.hear(gang, rank, most) {
                let body = Body::Headline(words);
                return Ok(Some(Message { gang: place, after: 0, body, from: None }));
            }
            return match kept {
                Some(message) if message.gang > place => Err(NewerGang),
                _ => {
                    debug_assert!(
                        kept.is_none() || headlines.heard(rank) == most,
                        "said before the message, and not heard"
                    );
                    Ok(kept.take())
                }
            };
        }
    }
}

/// Of a device with this ordinal, if it can be in a gang with headlines.
fn bit(device: usize) -> u64 {
    if device < 64 { 1 << device } else { 0 }
}

impl Endpoint {
    /// Takes out what gangs up to place `upto` have left unread: it holds buffers and values, and a ring that only
    /// failed gangs have written to would be full one day (two members that each wait for room in the other's ring
    /// never get to reading).
    fn leftovers(&mut self, upto: u64) -> Vec<Message> {
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
        found
    }
}

/// Drops what gangs up to place `upto` have left unread in a device's rings.
pub(crate) fn forget(worker: &Worker, upto: u64) {
    let mut endpoint = worker.endpoint.borrow_mut();
    let found = (endpoint.leftovers(upto), endpoint.post.leftovers(upto));
    // What it drops may use the rings.
    drop(endpoint);
    drop(found);
}

/// The sender has left the gang.
pub(super) struct NewerGang;

impl Group<'_> {
    /// Meets all members of the group: their notices by rank, this member's own among them. When this returns `Ok`, the
    /// call is committed: every member carries it through; with `spins`, by a kernel that waits for the others'.
    pub(crate) fn meet(&self, call: Call, payload: Payload, spins: bool) -> Result<SmallVec<[Arc<Notice>; 8]>> {
        let dev = self.dev;
        if call.origin != Origin::CAPTURE {
            dev.not_in_graph_at(call.site, call.op)?;
        }
        let gang = &dev.session.gang;
        gang.check()?;
        self.calls(&call);
        dev.worker.progress();
        let own = Arc::new(Notice { call, group: self.ranks().clone(), payload });
        // A member that has left spoils this meeting, but not the next one of those who stay: they hear of this call
        // all the same, and what they tell is taken out of the rings.
        let mut absent = None;
        self.tell_all(&own.call, || Body::Call(own.clone()), &mut absent)?;
        let mut all: SmallVec<[Arc<Notice>; 8]> = smallvec![own.clone(); self.count()];
        let mut in_short: SmallVec<[(usize, Call); 2]> = SmallVec::new();
        self.receive_all(&own.call, &mut absent, |member, body| {
            match body {
                Body::Call(notice) if self.is(&notice) => all[member] = notice,
                Body::Call(notice) => return Err(self.other_group(&own.call, member, &notice.call)),
                Body::Brief(brief) if !brief.is_of(self) => {
                    return Err(self.other_group(&own.call, member, &brief.call()));
                }
                // Another operation, then.
                Body::Brief(brief) => in_short.push((member, brief.call())),
                Body::Headline(_) | Body::Step(_) => unreachable!("opened; and steps end with their collective"),
            }
            Ok(())
        })?;
        if let Some(error) = absent {
            return Err(error);
        }
        if !in_short.is_empty() || all.iter().any(|notice| all[0].call.differs(&notice.call).is_some()) {
            let brief = |member| in_short.iter().find(|(at, _)| *at == member).map(|(_, call)| call.clone());
            return Err(self.differing(|member| brief(member).unwrap_or_else(|| all[member].call.clone())));
        }
        self.commit(spins)?;
        Ok(all)
    }

    /// Whether a notice is to this group.
    pub(super) fn is(&self, notice: &Notice) -> bool {
        notice.group == *self.ranks()
    }

    /// The error for a member that calls another group. The members of this one do not hear of it from those of the
    /// other, so it fails the gang.
    pub(super) fn other_group(&self, call: &Call, member: usize, theirs: &Call) -> Error {
        let error = self.mismatch("group", (self.rank, call), (member, theirs));
        self.dev.session.gang.poison(self.dev.index(), error.clone());
        error
    }

    pub(super) fn mismatch(
        &self,
        what: &'static str,
        (a, first): (usize, &Call),
        (b, second): (usize, &Call),
    ) -> Error {
        Error::Mismatch {
            what,
            a: self.ordinal(a),
            a_call: first.to_string(),
            a_site: first.site,
            b: self.ordinal(b),
            b_call: second.to_string(),
            b_site: second.site,
        }
    }
}

#[cfg(test)]
#[path = "board_tests.rs"]
mod tests;
