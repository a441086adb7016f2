//! Sends messages between the members of a group, receives them, and wakes the threads that wait for them: through the
//! rings of [`mailbox`](crate::fabric::mailbox), or to all members by [`broadcast`](crate::fabric::broadcast). A
//! wake-up costs a fence even when no thread sleeps, so a member that sends to all makes one for all
//! ([`EventCount::notify_all`]).

use super::{Meeting, everyone};
use crate::error::{Error, Result};
use crate::fabric::{
    Body, Call, CompactDescriptor, DType,
    mailbox::{Message, NewerGang},
};
use crate::sync::{EventCount, ring};
use crate::{Device, Event, memory::calls::Entry, thread::wait};
use smallvec::SmallVec;
use std::hint;

fn unless_absent<R>(result: Result<R>, absent: &mut Option<Error>) -> Result<Option<R>> {
    match result {
        Err(error @ Error::Mismatch { .. }) => {
            absent.get_or_insert(error);
            Ok(None)
        }
        other => other.map(Some),
    }
}

impl Meeting<'_> {
    /// Tells a peer that a step is done once this event has passed.
    pub(in super::super) fn post_step(&self, call: &Call, member: usize, done: Event) -> Result<()> {
        let posted = self.enqueue(call, member, Body::Step(done));
        self.wake([member]);
        posted
    }

    pub(in super::super) fn receive_step(&self, call: &Call, member: usize) -> Result<Event> {
        let Body::Step(done) = self.receive(call, member)? else {
            unreachable!("a committed collective is carried through before the next call")
        };
        Ok(done)
    }

    /// Returns false when that is not possible: the group is not the whole gang, the checker wants to know who told
    /// whom, or an earlier message is on its way. Then the rings carry it. A member that has left does not read it.
    pub(super) fn post_broadcast(&self, descriptor: &CompactDescriptor) -> bool {
        let dev = self.dev;
        let gang = &dev.session.gang;
        if !self.is_everyone() || dev.worker.handle.hands_over() {
            return false;
        }
        let Some(words) = descriptor.words() else { return false };
        let own = (&**gang, self.rank);
        let posted = dev.worker.endpoint.borrow_mut().broadcast(own, &dev.session.broadcasts, words);
        if posted {
            self.wake(self.others());
        }
        posted
    }

    /// Posts a message to each of the others. Notes in `absent` that a member has left.
    pub(super) fn post_to_all(&self, call: &Call, body: impl Fn() -> Body, absent: &mut Option<Error>) -> Result<()> {
        let post = |member| unless_absent(self.enqueue(call, member, body()), absent).map(drop);
        let posted = self.others().try_for_each(post);
        self.wake(self.others());
        posted
    }

    /// One fence for all of them, when nothing else is left to do: a fence delays later reads.
    fn wake(&self, members: impl IntoIterator<Item = usize>) {
        let gang = &self.dev.session.gang;
        EventCount::notify_all(members.into_iter().map(|member| gang.waker(self.ranks()[member])));
    }

    fn enqueue(&self, call: &Call, member: usize, body: Body) -> Result<()> {
        let (dev, rank) = (self.dev, self.ranks()[member]);
        let gang = &dev.session.gang;
        let handover = dev.worker.handle.hand_over();
        let mut message = Some(Message::new(gang, &dev.session.broadcasts, body, handover));
        let to = gang.device(rank);
        let mut push = || {
            let mut endpoint = dev.worker.endpoint.borrow_mut();
            match endpoint.push(to, message.take().expect("given back when the ring is full")) {
                Ok(()) => Some(Ok(())),
                Err(ring::Full(back)) => {
                    message = Some(back);
                    // A member that has left makes no room any more.
                    gang.has_left(rank).then(|| Err(absent(dev, call, rank)))
                }
            }
        };
        push().unwrap_or_else(|| {
            self.wake(self.others());
            wait::for_peer(dev.waiter(), call.op, rank, push)
        })
    }

    /// Calls `each` with a message of each of the others, as they come. Notes in `absent` that a member has left.
    pub(super) fn receive_all(
        &self,
        call: &Call,
        absent: &mut Option<Error>,
        mut each: impl FnMut(usize, Body) -> Result<()>,
    ) -> Result<()> {
        let mut lacking: SmallVec<[usize; 8]> = self.others().collect();
        // Members that run at one pace are here within microseconds.
        let looked = self.look_round(&mut lacking, &mut each);
        // Senders may wait for a free slot of a ring. No sender waits for a broadcast to be read.
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

    /// Polls the rings of all `lacking` members, again and again. Removes a member when its message has come.
    fn look_round(
        &self,
        lacking: &mut SmallVec<[usize; 8]>,
        each: &mut impl FnMut(usize, Body) -> Result<()>,
    ) -> Result<()> {
        for _ in 0..self.dev.worker.shared.polls {
            let mut at = 0;
            while let Some(&member) = lacking.get(at) {
                match self.poll(member) {
                    Ok(Some(body)) => {
                        lacking.remove(at);
                        each(member, body)?;
                    }
                    // `await_message` reports a member that is in a newer gang.
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

    fn receive(&self, call: &Call, member: usize) -> Result<Body> {
        for _ in 0..self.dev.worker.shared.polls {
            if let Ok(Some(body)) = self.poll(member) {
                self.wake([member]);
                return Ok(body);
            }
            hint::spin_loop();
        }
        self.await_message(call, member)
    }

    fn await_message(&self, call: &Call, member: usize) -> Result<Body> {
        let (dev, rank) = (self.dev, self.ranks()[member]);
        let body = wait::for_peer(dev.waiter(), call.op, rank, || {
            // This is read before the ring: a member sends before it leaves.
            let left = dev.session.gang.has_left(rank);
            match self.poll(member) {
                Ok(Some(body)) => Some(Ok(body)),
                Ok(None) if !left => None,
                Ok(None) | Err(NewerGang) => Some(Err(absent(dev, call, rank))),
            }
        })?;
        self.wake([member]);
        Ok(body)
    }

    /// The next message of a member, if it has arrived. This thread then knows all that the sender knew.
    fn poll(&self, member: usize) -> Result<Option<Body>, NewerGang> {
        let (worker, session) = (&self.dev.worker, &self.dev.session);
        let sender = (&*session.gang, self.ranks()[member]);
        let message = worker.endpoint.borrow_mut().poll(self.ordinals()[member], sender, &session.broadcasts)?;
        let Some(Message { body, from, .. }) = message else { return Ok(None) };
        worker.handle.take_over(from.as_deref());
        Ok(Some(match body {
            Body::Broadcast(words) => {
                // Only the group of all members broadcasts. This member may be calling another group.
                let members = if self.is_everyone() { self.membership.packed } else { everyone(self.dev).packed };
                Body::Compact(CompactDescriptor::of_words(words, members.expect("it has been broadcast")))
            }
            body => body,
        }))
    }
}

/// The error for a member whose closure has ended; `rank` is its rank in the gang.
pub(in super::super) fn absent(dev: &Device, call: &Call, rank: usize) -> Error {
    let gang = &dev.session.gang;
    let (last, b_site) = gang.last_words(rank);
    let b_call = match last {
        Some(op) => format!("nothing more (its closure had ended) after {op}"),
        None => "nothing (its closure had ended) in the scope that was started".to_owned(),
    };
    let (a, a_call, a_site, b) = (dev.index(), call.to_string(), call.site, gang.device(rank));
    Error::Mismatch { what: "participation", a, a_call, a_site, b, b_call, b_site }
}

/// Notes a call of these members, for reports. Its record ends with the result, unless the call's operation has one.
pub(crate) fn note_call<'d>(dev: &'d Device, call: &Call, members: &[usize]) -> Option<Entry<'d>> {
    let bytes = call.count.saturating_mul(call.dtype.map_or(1, DType::size));
    dev.session.last_call.set(Some((call.op, call.site)));
    dev.worker.calls.collective(call.op, call.site, bytes, members.iter().copied())
}
