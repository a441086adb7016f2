//! The meeting: every member tells every other what it is about to do, before anyone does it.
//!
//! Between each ordered pair of devices there is a lock-free single-producer ring ([`crate::sync::ring`]); a slot holds a
//! descriptor, never data. A member sends its [`Call`] to all others, then reads theirs; when it has read all and they
//! match, it commits the sequence number on the gang's word. If a peer fails first, the abort wins for everyone; so a
//! collective runs on all members or on none.
//!
//! Messages are marked with their gang. Both ends see gangs in the same order (dispatch order), so a message of an older
//! gang is a leftover of a failed one and is dropped, and a message of a newer gang means that its sender has left this
//! one.

use super::{
    Group,
    brief::Brief,
    call::{Call, Origin},
    plan::Counts,
    point::Post,
};
use crate::{
    Event,
    driver::Address,
    error::{Error, Result},
    memory::{block::BlockRef, link::Handover},
    plant::Bug,
    runtime::{panics, wait, worker::Worker},
    sync::ring::{self, Consumer, Producer},
};
use smallvec::SmallVec;
use std::{any::Any, ops::Range, sync::Arc};

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
    Value(Box<dyn Any + Send + Sync>),
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
    /// Own memory that others fill, and its bytes: its predecessor in a ring, all in an exchange. Nobody keeps it for this member,
    /// which waits for that.
    pub(crate) inbox: Option<(Address, usize)>,
}

/// Memory of one device.
#[derive(Clone)]
pub(crate) struct Area {
    pub(crate) block: BlockRef,
    pub(crate) address: Address,
    /// Where it lies in the block.
    pub(crate) bytes: Range<usize>,
}

/// One descriptor in a ring.
struct Message {
    gang: u64,
    body: Body,
    from: Option<Box<Handover>>,
}

pub(super) enum Body {
    Call(Arc<Notice>),
    /// All of that in short.
    Brief(Brief),
    /// A step of a collective is done on the sender's stream once the event has passed.
    Step(Event),
}

/// One device's ends of all rings, by ordinal in the pool. Its own place is empty.
pub(crate) struct Endpoint {
    to: Vec<Option<Producer<Message>>>,
    from: Vec<Option<Consumer<Message>>>,
    /// A message of a newer gang, kept for it.
    kept: Vec<Option<Message>>,
    pub(super) post: Post,
}

impl Endpoint {
    /// The endpoints of `count` devices.
    pub(crate) fn all(count: usize) -> Vec<Endpoint> {
        let mut ends: Vec<Endpoint> = Post::all(count)
            .map(|post| Endpoint {
                post,
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

    /// The next message of `gang` from a device, if it has arrived. `Err` when the sender is in a newer gang already.
    fn poll(&mut self, from: usize, gang: u64) -> Result<Option<Message>, NewerGang> {
        loop {
            let next = self.kept[from].take().or_else(|| self.from[from].as_mut()?.pop());
            match next {
                None => return Ok(None),
                Some(message) if message.gang < gang => drop(message),
                Some(message) if message.gang == gang => return Ok(Some(message)),
                Some(message) => {
                    self.kept[from] = Some(message);
                    return Err(NewerGang);
                }
            }
        }
    }
}

impl Endpoint {
    /// Takes out what gangs up to place `upto` have left unread: it holds buffers and values, and a ring that only failed
    /// gangs have written to would be full one day (two members that each wait for room in the other's ring never get to
    /// reading).
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
    let (found, parcels) = {
        let mut endpoint = worker.endpoint.borrow_mut();
        (endpoint.leftovers(upto), endpoint.post.leftovers(upto))
    };
    for message in found {
        // It may hold a user's value, and this is outside of the user's closure.
        panics::contain(|| drop(message));
    }
    drop(parcels);
}

struct NewerGang;

/// Keeps the error for a member that has left for later: the first one.
pub(super) fn unless_absent<R>(result: Result<R>, absent: &mut Option<Error>) -> Result<Option<R>> {
    match result {
        Err(error @ Error::Mismatch { .. }) => {
            absent.get_or_insert(error);
            Ok(None)
        }
        other => other.map(Some),
    }
}

impl Group<'_> {
    /// Meets all members of the group: their notices by rank, this member's own among them. When this returns `Ok`, the call is
    /// committed: every member carries it through; with `spins`, by a kernel that waits for the others'.
    pub(crate) fn meet(&self, call: Call, payload: Payload, spins: bool) -> Result<SmallVec<[Arc<Notice>; 8]>> {
        let dev = self.dev;
        if call.origin != Origin::CAPTURE {
            dev.not_in_graph(call.op)?;
        }
        let gang = &dev.session.gang;
        gang.check()?;
        dev.worker.progress();
        let own = Arc::new(Notice { call, group: self.ranks().clone(), payload });
        // A member that has left spoils this meeting, but not the next one of those who stay: they hear of this call all the same,
        // and what they tell is taken out of the rings.
        let mut absent = None;
        for member in self.others() {
            unless_absent(self.tell(&own.call, member, Body::Call(own.clone())), &mut absent)?;
        }
        let mut all: SmallVec<[Arc<Notice>; 8]> = SmallVec::with_capacity(self.count());
        let mut in_short: SmallVec<[(usize, Call); 2]> = SmallVec::new();
        for member in 0..self.count() {
            if member == self.rank {
                all.push(own.clone());
                continue;
            }
            match unless_absent(self.receive(&own.call, member), &mut absent)? {
                None => {}
                Some(Body::Call(notice)) if self.is(&notice) => all.push(notice),
                Some(Body::Call(notice)) => return Err(self.other_group(&own.call, member, &notice.call)),
                Some(Body::Brief(brief)) => {
                    if !brief.is_of(self) {
                        return Err(self.other_group(&own.call, member, &brief.call()));
                    }
                    // Another operation, then.
                    in_short.push((member, brief.call()));
                    all.push(own.clone());
                }
                Some(Body::Step(_)) => unreachable!("steps end with their collective"),
            }
        }
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

    /// The error for a member that calls another group. The members of this one do not hear of it from those of the other, so it
    /// fails the gang.
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

    /// Tells a peer that a step is done on the current stream.
    pub(crate) fn send_step(&self, call: &Call, member: usize, done: Event) -> Result<()> {
        self.tell(call, member, Body::Step(done))
    }

    /// Waits (on the host) until a peer has submitted a step, then makes the current stream wait for it.
    pub(crate) fn await_step(&self, call: &Call, member: usize) -> Result<()> {
        let done = self.take_step(call, member)?;
        let dev = self.dev;
        if dev.worker.link.planted(Bug::StepSkipped) {
            return Ok(());
        }
        dev.stream.wait_event(call.op, done.0.raw, &done.0.stream, done.0.covered)
    }

    /// Waits (on the host) until a peer has submitted a step: what there is to wait for on a stream.
    pub(super) fn take_step(&self, call: &Call, member: usize) -> Result<Event> {
        let Body::Step(done) = self.receive(call, member)? else {
            unreachable!("a committed collective is carried through before the next call")
        };
        Ok(done)
    }

    pub(super) fn tell(&self, call: &Call, member: usize, body: Body) -> Result<()> {
        let (dev, rank) = (self.dev, self.ranks()[member]);
        let gang = &dev.session.gang;
        let mut message = Some(Message { gang: gang.place(), body, from: dev.worker.link.hand_over() });
        let to = gang.device(rank);
        let mut push = || {
            let mut endpoint = dev.worker.endpoint.borrow_mut();
            let producer = endpoint.to[to].as_mut().expect("a device does not send to itself");
            match producer.push(message.take().expect("given back when the ring is full")) {
                Ok(()) => Some(Ok(())),
                Err(ring::Full(back)) => {
                    message = Some(back);
                    // Nobody will make room any more.
                    gang.has_left(rank).then(|| Err(self.absent(call, rank)))
                }
            }
        };
        // Mostly there is room, and no need to look at a clock.
        push().unwrap_or_else(|| wait::for_peer(dev, call.op, rank, push))?;
        gang.waker(rank).notify();
        Ok(())
    }

    pub(super) fn receive(&self, call: &Call, member: usize) -> Result<Body> {
        let (dev, rank) = (self.dev, self.ranks()[member]);
        let gang = &dev.session.gang;
        let from = gang.device(rank);
        let poll = || dev.worker.endpoint.borrow_mut().poll(from, gang.place());
        let mut message = None;
        // Members that run at one pace are here within microseconds.
        for _ in 0..dev.worker.shared.polls {
            message = poll().unwrap_or_default();
            if message.is_some() {
                break;
            }
            std::hint::spin_loop();
        }
        let message = match message {
            Some(message) => message,
            None => wait::for_peer(dev, call.op, rank, || {
                // Asked before the ring: a member sends before it leaves.
                let left = gang.has_left(rank);
                match poll() {
                    Ok(Some(message)) => Some(Ok(message)),
                    Ok(None) if !left => None,
                    Ok(None) | Err(NewerGang) => Some(Err(self.absent(call, rank))),
                }
            })?,
        };
        // The sender may wait for a free slot.
        gang.waker(rank).notify();
        dev.worker.link.take_over(message.from.as_deref());
        Ok(message.body)
    }

    /// The error for a member whose closure has ended.
    pub(super) fn absent(&self, call: &Call, rank: usize) -> Error {
        Error::Mismatch {
            what: "participation",
            a: self.dev.index(),
            a_call: call.to_string(),
            a_site: call.site,
            b: self.dev.session.gang.device(rank),
            b_call: "nothing more (its closure had ended); asked for".to_owned(),
            b_site: call.site,
        }
    }
}
