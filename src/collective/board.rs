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

use super::{DType, ReduceOp};
use crate::{
    Device, Event,
    driver::Address,
    error::{Error, Result, Site},
    memory::{block::BlockRef, link::Handover},
    plant::Bug,
    runtime::{panics, wait, worker::Worker},
    sync::ring::{self, Consumer, Producer},
};
use std::{
    any::{Any, TypeId},
    panic::Location,
    sync::Arc,
};

/// Messages in flight per ordered pair. A ring step is two; a member runs ahead of its neighbour by at most a few.
const SLOTS: usize = 16;

/// What a member calls.
#[derive(Clone)]
pub(crate) struct Call {
    op: &'static str,
    dtype: Option<DType>,
    count: usize,
    reduce: Option<ReduceOp>,
    of: Option<(TypeId, &'static str)>,
    site: Site,
}

impl Call {
    #[track_caller]
    pub(crate) fn new(op: &'static str, dtype: Option<DType>, count: usize, reduce: Option<ReduceOp>) -> Self {
        Call { op, dtype, count, reduce, of: None, site: Location::caller() }
    }

    pub(crate) fn of_type<T: 'static>(self) -> Self {
        Call { of: Some((TypeId::of::<T>(), std::any::type_name::<T>())), ..self }
    }

    /// What differs, if anything does.
    fn differs(&self, other: &Call) -> Option<&'static str> {
        [
            (self.op != other.op, "operation"),
            (self.dtype != other.dtype || self.of.map(|t| t.0) != other.of.map(|t| t.0), "dtype"),
            (self.count != other.count, "count"),
            (self.reduce != other.reduce, "reduce op"),
        ]
        .into_iter()
        .find_map(|(differs, what)| differs.then_some(what))
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}(", self.op)?;
        match (self.dtype, self.of, self.reduce) {
            (Some(dtype), _, Some(reduce)) => write!(f, "{} x {dtype:?}, {reduce:?}", self.count)?,
            (_, Some((_, of)), _) => write!(f, "{of}")?,
            _ => {}
        }
        f.write_str(")")
    }
}

/// What goes with a call to one peer.
#[derive(Clone)]
pub(crate) enum Payload {
    Nothing,
    /// A buffer that the peer reads, from when `ready` has passed.
    Buffer {
        block: BlockRef,
        address: Address,
        ready: Event,
    },
    /// A host value.
    Value(Arc<dyn Any + Send + Sync>),
}

/// One descriptor in a ring.
struct Message {
    gang: u64,
    body: Body,
    from: Option<Box<Handover>>,
}

enum Body {
    Call(Call, Payload),
    /// A step of a collective is done on the sender's stream once the event has passed.
    Step(Event),
}

/// One device's ends of all rings, by ordinal in the pool. Its own place is empty.
pub(crate) struct Endpoint {
    to: Vec<Option<Producer<Message>>>,
    from: Vec<Option<Consumer<Message>>>,
    /// A message of a newer gang, kept for it.
    kept: Vec<Option<Message>>,
}

impl Endpoint {
    /// The endpoints of `count` devices.
    pub(crate) fn all(count: usize) -> Vec<Endpoint> {
        let mut ends: Vec<Endpoint> = (0..count)
            .map(|_| Endpoint {
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
    let found = worker.endpoint.borrow_mut().leftovers(upto);
    for message in found {
        // It may hold a user's value, and this is outside of the user's closure.
        panics::contain(|| drop(message));
    }
}

struct NewerGang;

impl Device {
    /// Meets all members of the gang. `payload(rank)` goes to that peer; theirs come back by rank (none for this
    /// device's own rank). When this returns `Ok`, the call is committed: every member carries it through.
    pub(crate) fn meet(&self, call: Call, payload: impl Fn(usize) -> Payload) -> Result<Vec<Option<Payload>>> {
        self.not_in_graph(call.op)?;
        let (gang, me) = (&self.session.gang, self.rank());
        gang.check()?;
        self.worker.progress();
        for rank in (0..gang.count()).filter(|&rank| rank != me) {
            self.send(&call, rank, Body::Call(call.clone(), payload(rank)))?;
        }
        let mut calls = Vec::with_capacity(gang.count());
        let mut payloads = Vec::with_capacity(gang.count());
        for rank in 0..gang.count() {
            let (theirs, payload) = match rank {
                own if own == me => (call.clone(), None),
                rank => match self.receive(&call, rank)? {
                    Body::Call(theirs, payload) => (theirs, Some(payload)),
                    Body::Step(_) => unreachable!("steps end with their collective"),
                },
            };
            calls.push(theirs);
            payloads.push(payload);
        }
        // Every member compares the same calls in the same order, so every member reports the same pair.
        for (rank, theirs) in calls.iter().enumerate() {
            if let Some(what) = calls[0].differs(theirs) {
                return Err(Error::Mismatch {
                    what,
                    a: gang.device(0),
                    a_call: calls[0].to_string(),
                    a_site: calls[0].site,
                    b: gang.device(rank),
                    b_call: theirs.to_string(),
                    b_site: theirs.site,
                });
            }
        }
        // Only what was committed counts: calls that did not match leave no gap.
        let sequence = self.session.calls.get() + 1;
        gang.commit(sequence)?;
        self.session.calls.set(sequence);
        Ok(payloads)
    }

    /// Tells a peer that a step is done on the current stream.
    pub(crate) fn send_step(&self, call: &Call, rank: usize, done: Event) -> Result<()> {
        self.send(call, rank, Body::Step(done))
    }

    /// Waits (on the host) until a peer has submitted a step, then makes the current stream wait for it.
    pub(crate) fn await_step(&self, call: &Call, rank: usize) -> Result<()> {
        let Body::Step(done) = self.receive(call, rank)? else {
            unreachable!("a committed collective is carried through before the next call")
        };
        if self.worker.link.planted(Bug::StepSkipped) {
            return Ok(());
        }
        self.stream.wait_event(call.op, done.0.raw, &done.0.stream, done.0.covered)
    }

    fn send(&self, call: &Call, rank: usize, body: Body) -> Result<()> {
        let gang = &self.session.gang;
        let mut message = Some(Message { gang: gang.place(), body, from: self.worker.link.hand_over() });
        let to = gang.device(rank);
        wait::for_peer(self, call.op, rank, || {
            let mut endpoint = self.worker.endpoint.borrow_mut();
            let producer = endpoint.to[to].as_mut().expect("a device does not send to itself");
            match producer.push(message.take().expect("given back when the ring is full")) {
                Ok(()) => Some(Ok(())),
                Err(ring::Full(back)) => {
                    message = Some(back);
                    // Nobody will make room any more.
                    gang.has_left(rank).then(|| Err(self.absent(call, rank)))
                }
            }
        })?;
        gang.waker(rank).notify();
        Ok(())
    }

    fn receive(&self, call: &Call, rank: usize) -> Result<Body> {
        let gang = &self.session.gang;
        let from = gang.device(rank);
        let poll = || self.worker.endpoint.borrow_mut().poll(from, gang.place());
        let message = wait::for_peer(self, call.op, rank, || {
            // Asked before the ring: a member sends before it leaves.
            let left = gang.has_left(rank);
            match poll() {
                Ok(Some(message)) => Some(Ok(message)),
                Ok(None) if !left => None,
                Ok(None) | Err(NewerGang) => Some(Err(self.absent(call, rank))),
            }
        })?;
        // The sender may wait for a free slot.
        gang.waker(rank).notify();
        self.worker.link.take_over(message.from.as_deref());
        Ok(message.body)
    }

    /// The error for a member whose closure has ended.
    fn absent(&self, call: &Call, rank: usize) -> Error {
        Error::Mismatch {
            what: "participation",
            a: self.index(),
            a_call: call.to_string(),
            a_site: call.site,
            b: self.session.gang.device(rank),
            b_call: "nothing more (its closure had ended); asked for".to_owned(),
            b_site: call.site,
        }
    }
}
