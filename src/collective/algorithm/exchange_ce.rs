//! Sums by an exchange: every member sends its elements of a slice to the slice's owner, which adds them up and sends
//! the result back. Copy engines write all data that cross devices, which is the fastest way: 373 GB/s between two
//! H200s, where kernels that load and store at once reach 330, and copy engines that read 260.
//!
//! A slice is sent piece by piece into slots of the owner's scratch, which the pieces use in turn. The current stream
//! adds up, another one sends, so that the links work while sums are made:
//!
//! ```text
//! send      parts 0 | parts 1 | .. | parts S-1 | result 0 | parts S | result 1 | parts S+1 | ..
//! current       all parts 0 here -> sum 0           all parts 1 here -> sum 1   ..
//! ```
//!
//! The waits on the devices: `sum j` waits for the `parts j` of all members. `result j` waits for the own `sum j`.
//! `parts j + S` to a member waits for that member's `sum j`, which empties the slot (for `result j`, where a result
//! begins in the slot itself). Each waits only for earlier work. The events travel through the rings between the
//! threads, at most `2 S` at a time, in one order for all: `parts 0` to `parts S - 1`, then, for each `j`, `sum j` and
//! `parts j + S`.
//!
//! Sums are in rank order, like those of [`fused`](super::fused), so the bits are the same. In every round a member
//! sends to the one after it, then to the next: copy engines lose much when several send to one device.

use super::{
    super::{
        choose::Case,
        launch::{self, Combination},
        request::RemotePtr,
    },
    Algorithm, Matched, Meeting, Member, Needs, Scratch, Sizes,
};
use crate::fabric::{
    plan::{GRAIN, Place, Shape, Work},
    types,
};
use crate::{Event, error::Result, memory::stream::StreamCore, mutation::Bug};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};

pub(crate) struct ExchangeCe;

impl Algorithm for ExchangeCe {
    fn name(&self) -> &'static str {
        "exchange_ce"
    }

    fn group(&self, _: &Case<'_>) -> types::Algorithm {
        types::Algorithm::Copies
    }

    fn waits_by(&self) -> &'static str {
        "events"
    }

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
        Needs { meeting: Meeting::Events, scratch: Scratch::device(sizes.into_iter()) }
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        launch::blocks(case.largest())
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let (request, shape) = (member.request, matched.shape);
        let (n, size) = (member.count(), request.dtype.size());
        let software = member.is_software();
        let bytes = shape.largest(n, request.grain()) * size;
        let least = matched.least_scratch(n);
        let fits = |cut: &Cut| cut.scratch() <= least;
        let cut = cuts_of(bytes, n, software).find(fits).expect("every member has taken room for one of them");
        // There is nothing to add.
        if cut.pieces == 0 {
            return Ok(());
        }
        member.ordered_by_events(matched, || {
            let slices = (0..n).map(|owner| Slice::of(shape, n, owner, size)).collect();
            let [send, _] = member.executor.engines()?;
            send.wait_for(member.name(), member.stream, member.stream.submit())?;
            let done = Exchange { member, matched, cut, slices, send: &send }.run();
            // Also after a failure: the work on the other stream belongs to the caller's operation.
            let joined = member.join(&send);
            done.and(joined)
        })
    }
}

/// Bytes of a slot, for all senders together, at most; of software GPUs, which gain nothing by more.
const ROOM: usize = 64 << 20;
const ROOM_OF_SOFTWARE: usize = 1 << 20;
/// With less memory than for this, there is too little.
const LEAST_ROOM: usize = 16 << 10;
/// Bytes of a piece, at least, where there are several.
const LEAST: usize = 512 << 10;
/// A slice is cut into so many pieces, unless that makes them too small or too large. What is sent first gives the sums
/// the time they take, so that the links never wait; and between two copies an engine rests for 5 us, so few are best
/// (of 2, 3, 4 and 6 between two H200s, at every size).
const PIECES: usize = 2;
/// Pieces that are in scratch at once.
const SLOTS: usize = 2;

/// How slices are cut: the same for all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Bytes of a piece: whole lines.
    piece: usize,
    /// Pieces of the largest slice.
    pieces: usize,
    slots: usize,
    /// Senders to an owner.
    rooms: usize,
}

impl Cut {
    /// For slices of at most so many bytes of so many members, with so much room.
    fn of(bytes: usize, members: usize, room: usize) -> Cut {
        let rooms = members - 1;
        let most = room / rooms.max(1) / GRAIN * GRAIN;
        let piece = bytes.div_ceil(PIECES).next_multiple_of(GRAIN).clamp(LEAST.min(most), most);
        let pieces = bytes.div_ceil(piece);
        Cut { piece, pieces, slots: pieces.min(SLOTS), rooms }
    }

    fn scratch(&self) -> usize {
        self.slots * self.rooms * self.piece
    }

    /// Where sender `room`'s part of piece `j` goes, in bytes from the scratch's begin.
    fn slot(&self, j: usize, room: usize) -> u64 {
        ((j % self.slots * self.rooms + room) * self.piece) as u64
    }

    /// Piece `j` of a slice of so many bytes.
    fn range(&self, j: usize, bytes: usize) -> Range<usize> {
        (j * self.piece).min(bytes)..((j + 1) * self.piece).min(bytes)
    }
}

/// Cuts that take less and less scratch.
fn cuts(case: &Case<'_>) -> impl Iterator<Item = Cut> + use<> {
    cuts_of(case.largest(), case.members, case.machine.software)
}

/// The same for slices of at most so many bytes.
fn cuts_of(bytes: usize, members: usize, software: bool) -> impl Iterator<Item = Cut> {
    let room = if software { ROOM_OF_SOFTWARE } else { ROOM };
    let rooms = std::iter::successors(Some(room), |room| Some(room / 4)).take_while(|room| *room >= LEAST_ROOM);
    rooms.map(move |room| Cut::of(bytes, members, room.max(members * GRAIN)))
}

/// The part of a sum that one member owns and adds up.
pub(super) struct Slice {
    pub bytes: usize,
    /// Where it lies on each member, by rank.
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
        let (member, executor) = (self.member, self.member.executor);
        let me = member.rank;
        // `here`, by piece and sender: the event of the sender's part. `empty`, by piece and owner: the event after
        // which the slot is empty again.
        let mut here: Vec<SmallVec<[Event; 8]>> = Vec::with_capacity(self.cut.pieces);
        let mut empty: Vec<SmallVec<[Option<Event>; 8]>> = Vec::with_capacity(self.cut.pieces);
        for j in 0..self.cut.slots {
            self.send_parts(j, None)?;
            here.push(self.arrivals(j)?);
        }
        for j in 0..self.cut.pieces {
            if self.has(me, j) {
                let emptied = self.add_up(j, &here[j])?;
                member.others().try_for_each(|peer| executor.send_step(peer, emptied.clone()))?;
            }
            let emptied = |owner| {
                if owner != me && self.has(owner, j) { executor.take_step(owner).map(Some) } else { Ok(None) }
            };
            empty.push((0..member.count()).map(emptied).collect::<Result<_>>()?);
            let next = j + self.cut.slots;
            if next < self.cut.pieces {
                self.send_parts(next, Some(&empty[j]))?;
                here.push(self.arrivals(next)?);
            }
        }
        Ok(())
    }

    fn has(&self, owner: usize, j: usize) -> bool {
        !self.cut.range(j, self.slices[owner].bytes).is_empty()
    }

    /// Sends this member's elements of piece `j` to all owners. Their slots are empty once `empty` has passed.
    fn send_parts(&self, j: usize, empty: Option<&SmallVec<[Option<Event>; 8]>>) -> Result<()> {
        let (member, me) = (self.member, self.member.rank);
        for owner in self.member.others().filter(|&owner| self.has(owner, j)) {
            if let Some(empty) = empty
                && !member.handle.injected(Bug::SlotFilledEarly)
            {
                let empty = empty[owner].as_ref().expect("a slice that has this piece has all before it");
                member.wait(self.send, empty)?;
            }
            let slice = &self.slices[owner];
            let range = self.cut.range(j, slice.bytes);
            let address = self.matched.recv_scratch(owner).address + self.cut.slot(j, room(owner, me));
            let to = RemotePtr { device: member.ordinals[owner], address };
            self.copy(to, self.spot(&slice.sources[me], range.start), range.len())?;
            self.send.submit();
            member.executor.send_step(owner, Event::record(self.send, member.name(), false)?)?;
        }
        Ok(())
    }

    /// The events of the others' parts of the own piece `j`, from the member after this one on.
    fn arrivals(&self, j: usize) -> Result<SmallVec<[Event; 8]>> {
        let member = self.member;
        let senders = member.others().filter(|_| self.has(member.rank, j));
        senders.map(|sender| member.executor.take_step(sender)).collect()
    }

    /// Adds up the own piece `j` and sends the result. The slot is empty once the returned event has passed.
    fn add_up(&self, j: usize, here: &[Event]) -> Result<Event> {
        let (member, request, me) = (self.member, self.member.request, self.member.rank);
        here.iter().try_for_each(|event| member.wait(member.stream, event))?;
        let slice = &self.slices[me];
        let range = self.cut.range(j, slice.bytes);
        let scratch = self.matched.recv_scratch(me).address;
        let slot = |room| member.local(scratch + self.cut.slot(j, room));
        let source = |(rank, place): (usize, &Place)| match rank == me {
            true => self.spot(place, range.start),
            false => slot(room(me, rank)),
        };
        let sources: SmallVec<[RemotePtr; 8]> = slice.sources.iter().enumerate().map(source).collect();
        let own = slice.destinations.iter().find(|to| to.member == me).map(|to| self.spot(to, range.start));
        // A member that does not need the result itself keeps it in a sender's slot.
        let result = own.unwrap_or_else(|| slot(0));
        let combination = Combination {
            len: range.len() / request.dtype.size(),
            sources: &sources,
            destinations: &[result],
            factors: &self.member.factors(self.matched),
        };
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
            self.copy(self.spot(to, range.start), result, range.len())?;
        }
        self.send.submit();
        if own.is_some() || member.handle.injected(Bug::ResultMadeEarly) {
            return Ok(summed);
        }
        Event::record(self.send, member.name(), false)
    }

    /// The address `bytes` after a place in a member's buffer.
    fn spot(&self, place: &Place, bytes: usize) -> RemotePtr {
        let buffer = self.member.remote(self.matched, place.member, place.side);
        buffer.offset(place.start * self.member.request.dtype.size() + bytes)
    }

    fn copy(&self, to: RemotePtr, from: RemotePtr, bytes: usize) -> Result<()> {
        self.member.executor.copy(self.send, to, from, bytes)
    }
}

/// Which of an owner's rooms a sender has.
fn room(owner: usize, sender: usize) -> usize {
    sender - usize::from(sender > owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_lines_and_cover_a_slice() {
        for members in 2..20 {
            for bytes in [0, 1, 127, 128, 1 << 19, (1 << 19) + 1, 5_000_000, 123_456_789, 1 << 30] {
                let cut = Cut::of(bytes, members, ROOM);
                let ranges: Vec<_> = (0..cut.pieces).map(|j| cut.range(j, bytes)).collect();
                assert!(
                    ranges.windows(2).all(|two| two[0].end == two[1].start && two[0].len() == cut.piece),
                    "{cut:?}"
                );
                assert_eq!(ranges.iter().map(Range::len).sum::<usize>(), bytes);
                assert!(ranges.iter().all(|range| !range.is_empty()) && cut.range(cut.pieces, bytes).is_empty());
                assert!(cut.piece.is_multiple_of(GRAIN) && cut.rooms * cut.piece <= ROOM, "{cut:?}");
                assert!(bytes == 0 || cut.slots >= 1);
            }
        }
    }

    #[test]
    fn rooms_are_each_senders_own() {
        for owner in 0..5 {
            let rooms: Vec<_> = (0..5).filter(|&sender| sender != owner).map(|sender| room(owner, sender)).collect();
            assert_eq!(rooms, [0, 1, 2, 3]);
        }
        let cut = Cut::of(100 << 20, 5, ROOM);
        let mut slots: Vec<_> = (0..cut.slots).flat_map(|j| (0..4).map(move |room| cut.slot(j, room))).collect();
        slots.dedup();
        assert_eq!(slots.len(), 4 * cut.slots);
        assert_eq!(slots.last().unwrap() + cut.piece as u64, cut.scratch() as u64);
    }
}
