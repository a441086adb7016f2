//! What members of a group say to each other: who tells whom, who waits for what, and who is woken.
//!
//! It goes through the rings of [`board`](super::board), or to all at once by [headline](super::headlines). A wake-up
//! costs a fence even when nobody sleeps, so who tells all, or hears all, makes one for all
//! ([`EventCount::notify_all`]).

use super::{
    Group,
    board::{Body, Message, NewerGang},
    brief::Brief,
    call::Call,
};
use crate::{
    Event,
    error::{Error, Result},
    mutation::Bug,
    sync::{EventCount, ring},
    thread::wait,
};
use smallvec::SmallVec;
use std::hint;

/// Keeps the error for a member that has left for later: the first one.
fn unless_absent<R>(result: Result<R>, absent: &mut Option<Error>) -> Result<Option<R>> {
    match result {
        Err(error @ Error::Mismatch { .. }) => {
            absent.get_or_insert(error);
            Ok(None)
        }
        other => other.map(Some),
    }
}

impl Group<'_> {
    /// Tells a peer that a step is done on the current stream.
    pub(crate) fn send_step(&self, call: &Call, member: usize, done: Event) -> Result<()> {
        self.tell(call, member, Body::Step(done))
    }

    /// Waits (on the host) until a peer has submitted a step, then makes the current stream wait for it.
    pub(crate) fn await_step(&self, call: &Call, member: usize) -> Result<()> {
        let done = self.take_step(call, member)?;
        let dev = self.dev;
        if dev.worker.handle.injected(Bug::StepSkipped) {
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

    /// Tells all others by a headline: of the whole gang, in which nobody is to learn what this thread knows, when
    /// nothing is on its way to them. Else the rings are for it. Members that have left do not hear of it; that they
    /// have, who waits for them finds out.
    pub(super) fn announce(&self, brief: &Brief) -> bool {
        let dev = self.dev;
        let gang = &dev.session.gang;
        if !self.is_everyone() || dev.worker.handle.hands_over() {
            return false;
        }
        let Some(words) = brief.words() else { return false };
        let own = (&**gang, self.rank);
        let posted = dev.worker.endpoint.borrow_mut().announce(own, &dev.session.headlines, words);
        if posted {
            self.wake(self.others());
        }
        posted
    }

    /// Tells all others; who has left is noted.
    pub(super) fn tell_all(&self, call: &Call, body: impl Fn() -> Body, absent: &mut Option<Error>) -> Result<()> {
        let put = |member| unless_absent(self.put(call, member, body()), absent).map(drop);
        let told = self.others().try_for_each(put);
        self.wake(self.others());
        told
    }

    pub(super) fn tell(&self, call: &Call, member: usize, body: Body) -> Result<()> {
        let put = self.put(call, member, body);
        self.wake([member]);
        put
    }

    /// Members may have something to do, or room for what they have to say. One fence for all of them, when nothing
    /// else is to be done: it waits until what was written is on its way, and holds up what is to be read.
    fn wake(&self, members: impl IntoIterator<Item = usize>) {
        let gang = &self.dev.session.gang;
        EventCount::notify_all(members.into_iter().map(|member| gang.waker(self.ranks()[member])));
    }

    /// Writes a message to a peer, who is to be woken.
    fn put(&self, call: &Call, member: usize, body: Body) -> Result<()> {
        let (dev, rank) = (self.dev, self.ranks()[member]);
        let gang = &dev.session.gang;
        let handover = dev.worker.handle.hand_over();
        let mut message = Some(Message::new(gang, &dev.session.headlines, body, handover));
        let to = gang.device(rank);
        let mut push = || {
            let mut endpoint = dev.worker.endpoint.borrow_mut();
            match endpoint.push(to, message.take().expect("given back when the ring is full")) {
                Ok(()) => Some(Ok(())),
                Err(ring::Full(back)) => {
                    message = Some(back);
                    // Nobody will make room any more.
                    gang.has_left(rank).then(|| Err(self.absent(call, rank)))
                }
            }
        };
        // Mostly there is room, and no need to look at a clock.
        push().unwrap_or_else(|| {
            // Those who have been told already: this one may be waiting for them.
            self.wake(self.others());
            wait::for_peer(dev.waiter(), call.op, rank, push)
        })
    }

    /// A message of each of the others to `each`, in the order in which they come; who has left is noted.
    pub(super) fn receive_all(
        &self,
        call: &Call,
        absent: &mut Option<Error>,
        mut each: impl FnMut(usize, Body) -> Result<()>,
    ) -> Result<()> {
        let mut lacking: SmallVec<[usize; 8]> = self.others().collect();
        // Members that run at one pace are here within microseconds.
        let looked = self.look_round(&mut lacking, &mut each);
        // Senders may wait for a free slot; not for headlines to be read.
        if self.dev.worker.endpoint.borrow_mut().took() {
            self.wake(self.others());
        }
        looked?;
        for member in lacking {
            if let Some(body) = unless_absent(self.await_message(call, member), absent)? {
                each(member, body)?;
            }
        }
        Ok(())
    }

    /// Polls the rings of those who are `lacking`, all of them at each look, and takes off the list whose message has
    /// come.
    fn look_round(
        &self,
        lacking: &mut SmallVec<[usize; 8]>,
        each: &mut impl FnMut(usize, Body) -> Result<()>,
    ) -> Result<()> {
        for _ in 0..self.dev.worker.shared.polls {
            let mut at = 0;
            while let Some(&member) = lacking.get(at) {
                match self.poll(member) {
                    Ok(Some(message)) => {
                        lacking.remove(at);
                        each(member, self.open(message))?;
                    }
                    // Of members that have gone on, more is said below.
                    Ok(None) | Err(NewerGang) => at += 1,
                }
            }
            if lacking.is_empty() {
                break;
            }
            hint::spin_loop();
        }
        Ok(())
    }

    pub(super) fn receive(&self, call: &Call, member: usize) -> Result<Body> {
        for _ in 0..self.dev.worker.shared.polls {
            if let Ok(Some(message)) = self.poll(member) {
                self.wake([member]);
                return Ok(self.open(message));
            }
            hint::spin_loop();
        }
        self.await_message(call, member)
    }

    /// A member's next message, which may take its time.
    fn await_message(&self, call: &Call, member: usize) -> Result<Body> {
        let (dev, rank) = (self.dev, self.ranks()[member]);
        let message = wait::for_peer(dev.waiter(), call.op, rank, || {
            // Asked before the ring: a member sends before it leaves.
            let left = dev.session.gang.has_left(rank);
            match self.poll(member) {
                Ok(Some(message)) => Some(Ok(message)),
                Ok(None) if !left => None,
                Ok(None) | Err(NewerGang) => Some(Err(self.absent(call, rank))),
            }
        })?;
        self.wake([member]);
        Ok(self.open(message))
    }

    fn poll(&self, member: usize) -> Result<Option<Message>, NewerGang> {
        let session = &self.dev.session;
        let whom = (&*session.gang, self.ranks()[member]);
        self.dev.worker.endpoint.borrow_mut().poll(self.ordinal(member), whom, &session.headlines)
    }

    /// What a message says; from now on this thread knows what its sender knew.
    fn open(&self, message: Message) -> Body {
        self.dev.worker.handle.take_over(message.from.as_deref());
        match message.body {
            Body::Headline(words) => {
                let members = self.dev.everyone().known.in_short.expect("the sender has it, too");
                Body::Brief(Brief::of_words(words, members))
            }
            body => body,
        }
    }

    /// The error for a member whose closure has ended.
    pub(super) fn absent(&self, call: &Call, rank: usize) -> Error {
        let gang = &self.dev.session.gang;
        let (last, b_site) = gang.last_words(rank);
        let b_call = match last {
            Some(op) => format!("nothing more (its closure had ended) after {op}"),
            None => "nothing (its closure had ended) in the scope that was started".to_owned(),
        };
        Error::Mismatch {
            what: "participation",
            a: self.dev.index(),
            a_call: call.to_string(),
            a_site: call.site,
            b: gang.device(rank),
            b_call,
            b_site,
        }
    }

    /// Notes a call, for reports on a member that has left.
    pub(super) fn calls(&self, call: &Call) {
        self.dev.session.last_call.set(Some((call.op, call.site)));
    }
}
