//! Sums by an exchange of slices: every member sends its elements of a slice to the slice's owner. The owner adds them
//! up and sends the result back.
//!
//! `choose` picks it for large sums. Copy engines write all that crosses devices: between two H200s 373 GB/s, where
//! kernels reach 330 and engines that read 260. Sums are in rank order, so the bits are those of
//! [`fused`](super::fused).
//!
//! Senders write a slice piece by piece into slots of the owner's scratch, which the pieces use in turn. The current
//! stream adds up and another stream sends, so that the links work while sums are made:
//!
//! ```text
//! send      parts 0 | parts 1 | .. | parts S-1 | result 0 | parts S | result 1 | parts S+1 | ..
//! current       all parts 0 here -> sum 0           all parts 1 here -> sum 1   ..
//! ```
//!
//! The waits on the devices: `sum j` waits for `parts j` of all members; `result j` for the own `sum j`; `parts j + S`
//! to a member for that member's `sum j`, which empties the slot (if a result begins in the slot itself, for
//! `result j`). So each wait is for earlier work only. Events travel through the rings between the threads, at most
//! `2 S` on the way, in one order for all members: parts 0 to S-1, then, for each j, `sum j` and parts `j + S`. In
//! every round a member sends to the next rank first: engines lose much when several send to one device.

use super::{super::launch, Algorithm, Case, Matched, MeetBy, Member, Needs, Scratch, Sizes};
use crate::collective::{Combination, RemotePtr};
use crate::fabric::{GRAIN, Shape, Tiling, Work, plan::Place, tiling, types};
use crate::{Event, driver::FailPoint, error::Result, memory::StreamCore};
use smallvec::SmallVec;
use std::{slice, sync::Arc};

pub(crate) struct ExchangeCe;

impl Algorithm for ExchangeCe {
    about!("exchange_ce", Copies, "events");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        if case.sums() { super::ce::copies(case) } else { None }
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        if !case.sums() || !case.nameable() {
            None
        } else if case.wants(types::Algorithm::Copies) {
            Some("asked for")
        } else {
            let by_kernels = case.meets_on_devices();
            (case.wants(types::Algorithm::Exchange) && !by_kernels)
                .then_some("asked for; kernels cannot meet here, so by copies: the bits are the same")
        }
    }

    fn needs(&self, case: &Case<'_>) -> Needs {
        let sizes: Sizes = case.shape.into_iter().flat_map(|_| cuts(case)).map(|cut| cut.scratch()).collect();
        Needs { meeting: MeetBy::Events, scratch: Scratch::device(sizes.into_iter()) }
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let (request, shape) = (member.request, matched.shape);
        let (n, size) = (member.count(), request.dtype.size());
        let software = member.is_software() && !member.handle.in_virtual_time();
        let bytes = shape.largest(n, request.grain()) * size;
        let least = matched.least_scratch(n);
        let fits = |cut: &Cut| cut.scratch() <= least;
        let cut = cuts_of(bytes, n, software).find(fits).expect("every member has taken room for one of them");
        if cut.pieces.rounds == 0 {
            return Ok(());
        }
        member.ordered_by_events(matched, || {
            let slices = (0..n).map(|owner| Slice::of(shape, n, owner, size)).collect();
            let [send, _] = member.engines()?;
            let exchange = Exchange { member, matched, cut, slices, send: &send };
            member.fork_join(slice::from_ref(&send), || exchange.run())
        })
    }
}

const ROOM: usize = 64 << 20;
/// The same on software GPUs, which gain nothing by more (but in virtual time, where each copy takes a latency).
const ROOM_OF_SOFTWARE: usize = 1 << 20;
/// The smallest limit on a slot that is tried when memory is short.
const LEAST_ROOM: usize = 16 << 10;
/// Least bytes of a piece, if a slice has several.
const LEAST: usize = 512 << 10;
/// Pieces of a slice, unless they would be too small or too large. An engine rests for 5 us between copies: of 2, 3, 4
/// and 6 pieces 2 were the best between two H200s, at every size.
const PIECES: usize = 2;
/// Else each piece is some calls of the driver, which wait in streams' queues.
const MANY_PIECES: usize = 1 << 12;
/// With less scratch than that the call is `OutOfMemory`.
const MOST_PIECES: usize = 1 << 16;
const SLOTS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    pieces: Tiling,
    /// Members that send to an owner. Each slot of its scratch has room for a piece of each.
    senders: usize,
}

impl Cut {
    /// For slices of up to `bytes` bytes, with slots of up to `room` bytes.
    fn of(bytes: usize, members: usize, room: usize) -> Cut {
        let senders = members - 1;
        let most = tiling::share(room, senders.max(1));
        Cut { pieces: Tiling::new(bytes, 1, PIECES, LEAST, most), senders }
    }

    fn slots(&self) -> usize {
        self.pieces.rounds.min(SLOTS)
    }

    fn scratch(&self) -> usize {
        self.slots() * self.senders * self.pieces.tile
    }

    /// Where in the scratch, in bytes, a sender's part of piece `j` goes.
    fn slot(&self, j: usize, sender: usize) -> u64 {
        ((j % self.slots() * self.senders + sender) * self.pieces.tile) as u64
    }
}

fn cuts(case: &Case<'_>) -> impl Iterator<Item = Cut> + use<> {
    cuts_of(case.largest(), case.members, case.machine.software && !case.machine.virtual_time)
}

fn cuts_of(bytes: usize, members: usize, software: bool) -> impl Iterator<Item = Cut> {
    let room = if software { ROOM_OF_SOFTWARE } else { ROOM };
    let room = room.max(bytes.div_ceil(MANY_PIECES).saturating_mul(members));
    let rooms = std::iter::successors(Some(room), |room| Some(room / 4)).take_while(|room| *room >= LEAST_ROOM);
    let cuts = rooms.map(move |room| Cut::of(bytes, members, room.max(members * GRAIN)));
    cuts.take_while(|cut| cut.pieces.rounds <= MOST_PIECES)
}

pub(super) struct Slice {
    pub bytes: usize,
    pub sources: SmallVec<[Place; 8]>,
    pub destinations: SmallVec<[Place; 8]>,
}

impl Slice {
    pub(super) fn of(shape: &Shape, members: usize, owner: usize, size: usize) -> Slice {
        let Work::Combine { len, sources, destinations } = shape.work(members, owner, GRAIN / size) else {
            unreachable!("sums combine")
        };
        Slice { bytes: len * size, sources, destinations }
    }
}

struct Exchange<'g> {
    member: &'g Member<'g>,
    matched: &'g Matched<'g>,
    cut: Cut,
    /// By owner.
    slices: SmallVec<[Slice; 8]>,
    send: &'g Arc<StreamCore>,
}

impl Exchange<'_> {
    fn run(&self) -> Result<()> {
        let member = self.member;
        let me = member.rank;
        // By slot and sender: the part has arrived. Only of pieces in scratch: there may be millions of others.
        let mut here: SmallVec<[SmallVec<[Event; 8]>; SLOTS]> = SmallVec::new();
        for j in 0..self.cut.slots() {
            self.send_parts(j, None)?;
            here.push(self.arrivals(j)?);
        }
        for j in 0..self.cut.pieces.rounds {
            let slot = j % self.cut.slots();
            if self.has(me, j) {
                let emptied = self.add_up(j, &here[slot])?;
                member.others().try_for_each(|peer| member.send_step(peer, emptied.clone()))?;
            }
            let emptied = |owner| {
                if owner != me && self.has(owner, j) { member.take_step(owner).map(Some) } else { Ok(None) }
            };
            let empty: SmallVec<[Option<Event>; 8]> = (0..member.count()).map(emptied).collect::<Result<_>>()?;
            let next = j + self.cut.slots();
            if next < self.cut.pieces.rounds {
                self.send_parts(next, Some(&empty))?;
                here[slot] = self.arrivals(next)?;
            }
        }
        Ok(())
    }

    fn has(&self, owner: usize, j: usize) -> bool {
        !self.cut.pieces.range(j, self.slices[owner].bytes).is_empty()
    }

    /// Sends the own elements of piece `j` of all owners, to slots that are empty after the events in `empty`.
    fn send_parts(&self, j: usize, empty: Option<&SmallVec<[Option<Event>; 8]>>) -> Result<()> {
        let (member, me) = (self.member, self.member.rank);
        for owner in self.member.others().filter(|&owner| self.has(owner, j)) {
            if let Some(empty) = empty
                && !member.handle.injected(FailPoint::SlotFilledEarly)
            {
                let empty = empty[owner].as_ref().expect("a slice that has this piece has all before it");
                member.wait(self.send, empty)?;
            }
            let slice = &self.slices[owner];
            let range = self.cut.pieces.range(j, slice.bytes);
            let address = self.matched.recv_scratch(owner).address + self.cut.slot(j, room(owner, me));
            let to = RemotePtr { device: member.ordinals[owner], address };
            self.copy(to, self.remote(&slice.sources[me], range.start), range.len())?;
            self.send.submit();
            member.send_step(owner, Event::record(self.send, member.name(), false)?)?;
        }
        Ok(())
    }

    fn arrivals(&self, j: usize) -> Result<SmallVec<[Event; 8]>> {
        let member = self.member;
        let senders = member.others().filter(|_| self.has(member.rank, j));
        senders.map(|sender| member.take_step(sender)).collect()
    }

    /// Adds up the own piece `j` and sends the result. After the event that it returns, the slot is empty.
    fn add_up(&self, j: usize, here: &[Event]) -> Result<Event> {
        let (member, request, me) = (self.member, self.member.request, self.member.rank);
        here.iter().try_for_each(|event| member.wait(member.stream, event))?;
        let slice = &self.slices[me];
        let range = self.cut.pieces.range(j, slice.bytes);
        let scratch = self.matched.recv_scratch(me).address;
        let slot = |room| member.local(scratch + self.cut.slot(j, room));
        let source = |(rank, place): (usize, &Place)| match rank == me {
            true => self.remote(place, range.start),
            false => slot(room(me, rank)),
        };
        let sources: SmallVec<[RemotePtr; 8]> = slice.sources.iter().enumerate().map(source).collect();
        let own = slice.destinations.iter().find(|to| to.member == me).map(|to| self.remote(to, range.start));
        // If the owner itself does not want the result, the result replaces the first sender's part in the slot.
        let result = own.unwrap_or_else(|| slot(0));
        let (len, factors) = (range.len() / request.dtype.size(), &self.member.factors(self.matched));
        let combination = Combination { len, sources: &sources, destinations: &[result], factors };
        combination.submit(member, (request.dtype, request.reduce), launch::blocks(range.len()))?;
        member.stream.submit();
        let summed = member.record()?;
        let others = self.member.others().filter_map(|k| slice.destinations.iter().find(|to| to.member == k));
        let mut others = others.peekable();
        if others.peek().is_none() {
            return Ok(summed);
        }
        member.wait(self.send, &summed)?;
        for to in others {
            self.copy(self.remote(to, range.start), result, range.len())?;
        }
        self.send.submit();
        if own.is_some() || member.handle.injected(FailPoint::ResultMadeEarly) {
            return Ok(summed);
        }
        Event::record(self.send, member.name(), false)
    }

    fn remote(&self, place: &Place, bytes: usize) -> RemotePtr {
        let buffer = self.member.remote(self.matched, place.member, place.side);
        buffer.offset(place.start * self.member.request.dtype.size() + bytes)
    }

    fn copy(&self, to: RemotePtr, from: RemotePtr, bytes: usize) -> Result<()> {
        self.member.copy(self.send, to, from, bytes)
    }
}

fn room(owner: usize, sender: usize) -> usize {
    sender - usize::from(sender > owner)
}

#[cfg(test)]
#[path = "../../../tests/unit/collective/algorithm/exchange_ce_tests.rs"]
mod tests;
