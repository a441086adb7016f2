//! Sums by an exchange: every member sends its elements of a slice to the slice's owner, who adds them up and sends the result
//! back. All that crosses devices is written by copy engines, which is the fastest there is: between two H200s 373 GB/s, where
//! kernels that load and store at once reach 330 and engines that read 260.
//!
//! A slice is sent piece by piece into slots of the owner's scratch, which the pieces use in turn. The current stream adds up,
//! another one sends, so that the links work while sums are made:
//!
//! ```text
//! send      parts 0 | parts 1 | .. | parts S-1 | result 0 | parts S | result 1 | parts S+1 | ..
//! current       all parts 0 here -> sum 0           all parts 1 here -> sum 1   ..
//! ```
//!
//! Who waits for whom, on the devices: `sum j` for everybody's `parts j`, `result j` for the own `sum j`, and `parts j + S` to a member
//! for that member's `sum j`, which empties the slot (where a result begins in the slot itself, for `result j`). Each is behind
//! earlier ones only. Events travel through the rings between the threads, at most 2 S of them on the way, in one order for
//! all: parts 0 to S-1, then, for each j, `sum j` and parts j + S.
//!
//! Sums are in rank order, like those of [`direct`]: the bits are the same. In every round a member sends to the one after it, then to
//! the next: engines lose much when several send to one.

pub(crate) mod kernel;

use super::{
    DType, Group, direct,
    kernels::Meet,
    plan::{Place, Shape, Work},
    run::{GRAIN, Request, Spot, lent},
};
use crate::{
    Device, DeviceBuffer, Event,
    collective::board::Notice,
    copy::peer,
    error::{Error, Result},
    plant::Bug,
    stream::StreamCore,
};
use smallvec::SmallVec;
use std::{ops::Range, sync::Arc};

/// Bytes of a slot, for all senders together, at most; of software GPUs, which gain nothing by more.
const ROOM: usize = 64 << 20;
const ROOM_OF_SOFTWARE: usize = 1 << 20;
/// With less memory than for this, there is too little.
const LEAST_ROOM: usize = 16 << 10;
/// Bytes of a piece, at least, where there are several.
const LEAST: usize = 512 << 10;
/// A slice is cut into so many pieces, unless that makes them too small or too large. What is sent first gives the sums the time
/// they take, so that the links never wait; and between two copies an engine rests for 5 us, so few are best (of 2, 3, 4 and 6
/// between two H200s, at every size).
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

/// Whether it goes this way.
pub(super) fn sums(shape: &Shape, members: usize) -> bool {
    members > 1 && matches!(shape, Shape::AllReduce { .. } | Shape::Reduce { .. } | Shape::ReduceScatter { .. })
}

/// Cuts that take less and less scratch.
fn cuts(group: &Group<'_>, shape: &Shape, dtype: DType) -> impl Iterator<Item = Cut> {
    let (n, size) = (group.count(), dtype.size());
    let bytes = shape.largest(n, GRAIN / size) * size;
    let room = if group.dev.worker.is_software() { ROOM_OF_SOFTWARE } else { ROOM };
    let rooms = std::iter::successors(Some(room), |room| Some(room / 4)).take_while(move |room| *room >= LEAST_ROOM);
    rooms.map(move |room| Cut::of(bytes, n, room.max(n * GRAIN)))
}

/// Room for what the others send, if there is anything: as much as there is memory for.
pub(super) fn scratch(group: &Group<'_>, shape: &Shape, dtype: DType) -> Result<Option<DeviceBuffer<u8>>> {
    let mut short = None;
    for cut in cuts(group, shape, dtype) {
        if cut.scratch() == 0 {
            return Ok(None);
        }
        match group.dev.allocate::<u8>("collective", cut.scratch()) {
            Ok(scratch) => return Ok(Some(scratch)),
            Err(error @ Error::OutOfMemory { .. }) => short = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(short.expect("there is a least"))
}

/// The cut for which every member has room.
fn agreed(group: &Group<'_>, request: &Request, shape: &Shape, notices: &[Arc<Notice>]) -> Cut {
    let least = notices.iter().map(|notice| lent(notice).inbox.map_or(0, |(_, bytes)| bytes)).min().unwrap_or(0);
    let fits = |cut: &Cut| cut.scratch() <= least;
    cuts(group, shape, request.dtype).find(fits).expect("every member has taken room for one of them")
}

/// Submits a member's part to the current stream, piece by piece with all others.
pub(super) fn submit(group: &Group<'_>, request: &Request, shape: &Shape, notices: &[Arc<Notice>]) -> Result<()> {
    let (dev, call, size) = (group.dev, &request.call, request.dtype.size());
    let cut = agreed(group, request, shape, notices);
    // Nothing to add.
    if cut.pieces == 0 {
        return Ok(());
    }
    for peer in group.others() {
        let ready = lent(&notices[peer]).ready.as_ref().expect("there are several members");
        if !dev.worker.link.planted(Bug::StartSkipped) {
            dev.stream.wait_event(call.op(), ready.0.raw, &ready.0.stream, ready.0.covered)?;
        }
    }
    let slices = (0..group.count()).map(|owner| Slice::of(shape, group.count(), owner, size)).collect();
    let [send, _] = dev.worker.engines()?;
    send.wait_for(call.op(), &dev.stream, dev.stream.submit())?;
    let exchange = Exchange { group, request, notices, cut, slices, send: &send };
    let done = exchange.run();
    // Also after a failure: what was submitted to the other stream belongs to the caller's operation.
    let joined = join(dev, call.op(), &send);
    done.and(joined)?;
    let done = Event::record(&dev.stream, call.op(), false)?;
    group.others().try_for_each(|peer| group.send_step(call, peer, done.clone()))?;
    group.others().try_for_each(|peer| group.await_step(call, peer))
}

/// What comes next on the current stream comes after what is on `stream`.
pub(super) fn join(dev: &Device, name: &'static str, stream: &Arc<StreamCore>) -> Result<()> {
    dev.stream.wait_for(name, stream, stream.submit()).or_else(|error| {
        // Then it must be over now.
        stream.wait_idle(name, dev.worker.shared.deadline, || false)?;
        Err(error)
    })
}

/// What an owner adds up.
struct Slice {
    bytes: usize,
    /// By rank.
    sources: SmallVec<[Place; 8]>,
    destinations: SmallVec<[Place; 8]>,
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
    group: &'g Group<'g>,
    request: &'g Request,
    notices: &'g [Arc<Notice>],
    cut: Cut,
    /// By owner.
    slices: SmallVec<[Slice; 8]>,
    send: &'g Arc<StreamCore>,
}

impl Exchange<'_> {
    fn run(&self) -> Result<()> {
        let (group, call, me) = (self.group, &self.request.call, self.group.rank);
        // By piece, then by sender: when its part is here. By piece, then by owner: when its slot is empty again.
        let mut here: Vec<SmallVec<[Event; 8]>> = Vec::with_capacity(self.cut.pieces);
        let mut empty: Vec<SmallVec<[Option<Event>; 8]>> = Vec::with_capacity(self.cut.pieces);
        for j in 0..self.cut.slots {
            self.send_parts(j, None)?;
            here.push(self.arrivals(j)?);
        }
        for j in 0..self.cut.pieces {
            if self.has(me, j) {
                let emptied = self.add_up(j, &here[j])?;
                group.others().try_for_each(|peer| group.send_step(call, peer, emptied.clone()))?;
            }
            let emptied = |owner| {
                if owner != me && self.has(owner, j) { group.take_step(call, owner).map(Some) } else { Ok(None) }
            };
            empty.push((0..group.count()).map(emptied).collect::<Result<_>>()?);
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

    /// The others, from the next one on.
    fn round(&self) -> impl Iterator<Item = usize> {
        let (me, n) = (self.group.rank, self.group.count());
        (1..n).map(move |k| (me + k) % n)
    }

    /// Sends the own elements of everybody's piece `j`, to slots that are empty when `empty` has passed.
    fn send_parts(&self, j: usize, empty: Option<&SmallVec<[Option<Event>; 8]>>) -> Result<()> {
        let (me, call) = (self.group.rank, &self.request.call);
        for owner in self.round().filter(|&owner| self.has(owner, j)) {
            if let Some(empty) = empty
                && !self.group.dev.worker.link.planted(Bug::SlotFilledEarly)
            {
                let empty = empty[owner].as_ref().expect("a slice that has this piece has all before it");
                self.send.wait_event(call.op(), empty.0.raw, &empty.0.stream, empty.0.covered)?;
            }
            let slice = &self.slices[owner];
            let range = self.cut.range(j, slice.bytes);
            let (inbox, _) = lent(&self.notices[owner]).inbox.expect("who owns a slice has room for it");
            let address = inbox + self.cut.slot(j, room(owner, me));
            let to = Spot { device: self.device(owner), address };
            self.copy(to, self.spot(&slice.sources[me], range.start), range.len())?;
            self.send.submit();
            self.group.send_step(call, owner, Event::record(self.send, call.op(), false)?)?;
        }
        Ok(())
    }

    /// When the others' elements of the own piece `j` are here, from the first of them on.
    fn arrivals(&self, j: usize) -> Result<SmallVec<[Event; 8]>> {
        let call = &self.request.call;
        let senders = self.group.others().filter(|_| self.has(self.group.rank, j));
        senders.map(|sender| self.group.take_step(call, sender)).collect()
    }

    /// Adds up the own piece `j` and sends the result. The event says that its slot is empty.
    fn add_up(&self, j: usize, here: &[Event]) -> Result<Event> {
        let (group, request) = (self.group, self.request);
        let (dev, me, name) = (group.dev, group.rank, request.call.op());
        for event in here {
            dev.stream.wait_event(name, event.0.raw, &event.0.stream, event.0.covered)?;
        }
        let slice = &self.slices[me];
        let range = self.cut.range(j, slice.bytes);
        let inbox = lent(&self.notices[me]).inbox.expect("as for others").0;
        let slot = |room| Spot { device: dev.index(), address: inbox + self.cut.slot(j, room) };
        let source = |(rank, place): (usize, &Place)| match rank == me {
            true => self.spot(place, range.start),
            false => slot(room(me, rank)),
        };
        let sources: SmallVec<[Spot; 8]> = slice.sources.iter().enumerate().map(source).collect();
        let own = slice.destinations.iter().find(|to| to.member == me).map(|to| self.spot(to, range.start));
        // What is not wanted here takes the place of what somebody has sent.
        let result = own.unwrap_or_else(|| slot(0));
        let factors: SmallVec<[f64; 8]> = match request.reduce {
            super::ReduceOp::Scaled(_) => self.notices.iter().map(|notice| lent(notice).factor).collect(),
            _ => SmallVec::new(),
        };
        let combination = direct::Combination {
            name,
            what: (request.dtype, request.reduce),
            len: range.len() / request.dtype.size(),
            sources: &sources,
            destinations: &[result],
            factors: &factors,
        };
        combination.submit(dev, Meet::NONE, direct::blocks(range.len()))?;
        dev.stream.submit();
        let summed = Event::record(&dev.stream, name, false)?;
        let others = self.round().filter_map(|k| slice.destinations.iter().find(|to| to.member == k));
        let mut others = others.peekable();
        if others.peek().is_none() {
            return Ok(summed);
        }
        self.send.wait_event(name, summed.0.raw, &summed.0.stream, summed.0.covered)?;
        for to in others {
            self.copy(self.spot(to, range.start), result, range.len())?;
        }
        self.send.submit();
        if own.is_some() || dev.worker.link.planted(Bug::ResultMadeEarly) {
            return Ok(summed);
        }
        Event::record(self.send, name, false)
    }

    /// Bytes from a place of a member's buffer on.
    fn spot(&self, place: &Place, bytes: usize) -> Spot {
        let area = lent(&self.notices[place.member]).area(place.side);
        let at = place.start * self.request.dtype.size() + bytes;
        // Managed memory is at home everywhere.
        let device = area.block.device().unwrap_or(self.group.dev.index());
        Spot { device, address: area.address + at as u64 }
    }

    fn device(&self, member: usize) -> usize {
        self.group.ordinal(member)
    }

    fn copy(&self, to: Spot, from: Spot, bytes: usize) -> Result<()> {
        peer::copy(&self.group.dev.at(self.send.clone()), to.address, to.device, from.address, from.device, bytes)
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
