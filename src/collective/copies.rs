//! The same parts by copies, with the arithmetic in local memory ("exchange": slices go to their owners, are added up there, and
//! come back): what crosses devices goes by copy engines, or through the host where there is no peer access. Copy engines are
//! faster than kernels that load and store at once (390 against 326 GB/s between two H200s), and leave the processors to others.
//!
//! A part is done piece by piece, on three streams, so that links work in both directions while sums are made:
//!
//! ```text
//! fetch     peers' piece 0 | piece 1 | piece 2 | ..        into slots of scratch, which the pieces use in turn
//! current                  `- combine 0 | combine 1 | ..   with the own, in rank order
//! send                                  `- 0 to peers | 1 to peers | ..
//! ```
//!
//! The other two streams begin behind the current one, which ends behind them: to the rest of the crate this is one operation of
//! one stream. Who fetches begins with the member after itself, and so does who sends, so that in every round each link carries one
//! piece: engines lose much when several go to one device at once.

use super::{
    DType, Group, ReduceOp, direct,
    kernels::Meet,
    plan::{Side, Work},
    run::{Job, Request, Spot},
};
use crate::{Device, DeviceBuffer, Event, copy::peer, device::OnStream, error::Result, plant::Bug, stream::StreamCore};
use smallvec::SmallVec;
use std::sync::Arc;

/// Bytes of all sources together that are fetched at once, at most.
const ROOM: usize = 16 << 20;
/// Bytes of one source in a piece, at most; and at least, where there are several pieces.
const MOST: usize = 8 << 20;
const LEAST: usize = 1 << 20;
/// A part is cut into so many pieces where that makes them neither too small nor too large: the first fetch and the last send
/// overlap with nothing.
const PIECES: usize = 8;
/// Pieces that are in scratch at once.
const SLOTS: usize = 3;

/// How a sum is cut, and what scratch it takes.
struct Cut {
    /// Bytes of a piece of each source: whole lines.
    piece: usize,
    slots: usize,
    /// In a slot.
    rooms: usize,
}

impl Cut {
    /// For a part of so many bytes. What is only moved needs no scratch.
    fn of(bytes: usize, sources: usize, ends_here: bool) -> Cut {
        let most = (ROOM / sources.max(1)).min(MOST);
        let piece = bytes.div_ceil(PIECES).clamp(LEAST.min(most), most).next_multiple_of(256);
        let slots = bytes.div_ceil(piece).min(SLOTS);
        Cut { piece, slots, rooms: if sources > 1 { sources - 1 + usize::from(!ends_here) } else { 0 } }
    }

    fn bytes(&self) -> usize {
        self.slots * self.rooms * self.piece
    }
}

/// Scratch that a part needs, if it needs any.
pub(super) fn scratch(group: &Group<'_>, work: &Work, dtype: DType) -> Result<Option<DeviceBuffer<u8>>> {
    let Work::Combine { len, sources, destinations } = work else { return Ok(None) };
    let ends_here = destinations.iter().any(|place| place.member == group.rank && place.side == Side::Destination);
    let cut = Cut::of(len * dtype.size(), sources.len(), ends_here);
    let wanted = !work.is_empty() && cut.bytes() > 0;
    wanted.then(|| group.dev.allocate::<u8>("collective", cut.bytes())).transpose()
}

/// Submits a member's part to the current stream.
pub(super) fn submit(
    group: &Group<'_>,
    request: &Request,
    job: &Job,
    scratch: Option<&DeviceBuffer<u8>>,
) -> Result<()> {
    let (dev, name) = (group.dev, request.call.op());
    let bytes = match job {
        Job::Combine { len, .. } => len * request.dtype.size(),
        Job::Pairs(pairs) => pairs.iter().map(|(.., bytes)| *bytes).max().unwrap_or(0),
    };
    // A little is not worth other streams.
    let streams = if bytes > LEAST { dev.worker.engines()? } else { [dev.stream.clone(), dev.stream.clone()] };
    let [fetch, send] = &streams;
    for stream in &streams {
        stream.wait_for(name, &dev.stream, dev.stream.submit())?;
    }
    let exchange = Exchange { dev, request, fetch: dev.at(fetch.clone()), send: dev.at(send.clone()) };
    let done = match job {
        Job::Combine { len, sources, destinations, factors } => match &sources[..] {
            &[source] if factors.is_empty() => exchange.hand_on(bytes, source, destinations),
            _ => exchange.reduce(*len, sources, destinations, factors, scratch),
        },
        Job::Pairs(pairs) => pairs.iter().try_for_each(|&(from, to, bytes)| exchange.send(from, to, bytes)),
    };
    // Also after a failure: what was submitted to the other streams belongs to the caller's operation.
    let joined = streams.iter().map(|stream| join(dev, name, stream)).fold(Ok(()), Result::and);
    done.and(joined)
}

/// What comes next on the current stream comes after what is on `stream`.
fn join(dev: &Device, name: &'static str, stream: &Arc<StreamCore>) -> Result<()> {
    dev.stream.wait_for(name, stream, stream.submit()).or_else(|error| {
        // Then it must be over now.
        stream.wait_idle(name, dev.worker.shared.deadline, |_| false)?;
        Err(error)
    })
}

struct Exchange<'g> {
    /// On the current stream.
    dev: &'g Device,
    request: &'g Request,
    fetch: OnStream<'g>,
    send: OnStream<'g>,
}

impl Exchange<'_> {
    /// The own part by a kernel: an engine would be the slower, and has others' to move.
    fn send(&self, from: Spot, to: Spot, bytes: usize) -> Result<()> {
        if from.device == to.device {
            return self.combine(&[from], &[to], &[], (DType::U8, ReduceOp::Sum), bytes);
        }
        copy(&self.send, to, from, bytes)
    }

    /// What one member has, to all destinations.
    fn hand_on(&self, bytes: usize, source: Spot, destinations: &[Spot]) -> Result<()> {
        let own = self.dev.index();
        let here = destinations.iter().find(|to| to.device == own).copied();
        let Some(here) = here.filter(|_| source.device != own) else {
            return destinations.iter().try_for_each(|&to| self.send(source, to, bytes));
        };
        // Another's: it comes here, and goes on from here.
        let cut = Cut::of(bytes, 1, true);
        for start in (0..bytes).step_by(cut.piece) {
            let at = |spot: Spot| Spot { address: spot.address + start as u64, ..spot };
            let len = cut.piece.min(bytes - start);
            copy(&self.fetch, at(here), at(source), len)?;
            self.follow(&self.send, &self.fetch)?;
            let others = destinations.iter().filter(|to| to.device != own);
            others.copied().try_for_each(|to| copy(&self.send, at(to), at(here), len))?;
        }
        Ok(())
    }

    fn reduce(
        &self,
        len: usize,
        sources: &[Spot],
        destinations: &[Spot],
        factors: &[f64],
        scratch: Option<&DeviceBuffer<u8>>,
    ) -> Result<()> {
        let (own, size) = (self.dev.index(), self.request.dtype.size());
        let here = destinations.iter().find(|to| to.device == own);
        let cut = Cut::of(len * size, sources.len(), here.is_some());
        let planted = |bug| self.dev.worker.link.planted(bug);
        // By piece: when its fetched parts have been used, and when its result has been sent.
        let mut used: SmallVec<[Event; 8]> = SmallVec::new();
        let mut sent: SmallVec<[Event; 8]> = SmallVec::new();
        for (j, start) in (0..len).step_by(cut.piece / size).enumerate() {
            let part = (cut.piece / size).min(len - start);
            let at = |spot: &Spot| Spot { address: spot.address + (start * size) as u64, ..*spot };
            let room = |k: usize| {
                let scratch = scratch.expect("taken for sums of several");
                let address = scratch.address() + ((j % cut.slots * cut.rooms + k) * cut.piece) as u64;
                Spot { device: own, address }
            };
            if j >= cut.slots && !planted(Bug::SlotFilledEarly) {
                self.wait(&self.fetch, &used[j - cut.slots])?;
            }
            let mut parts: SmallVec<[Spot; 8]> = sources.iter().map(at).collect();
            // From the one after the own on.
            let first = sources.iter().position(|source| source.device == own).map_or(0, |me| me + 1);
            let order = (0..sources.len()).map(|k| (first + k) % sources.len());
            for (k, from) in order.filter(|&from| sources[from].device != own).enumerate() {
                let to = room(k);
                copy(&self.fetch, to, parts[from], part * size)?;
                parts[from] = to;
            }
            self.follow(self.dev, &self.fetch)?;
            let result = here.map_or_else(|| room(cut.rooms - 1), at);
            if here.is_none() && j >= cut.slots && !planted(Bug::ResultMadeEarly) {
                self.wait(self.dev, &sent[j - cut.slots])?;
            }
            self.combine(&parts, &[result], factors, (self.request.dtype, self.request.reduce), part)?;
            self.dev.stream.submit();
            used.push(Event::record(&self.dev.stream, self.name(), false)?);
            self.follow(&self.send, self.dev)?;
            let others = destinations.iter().filter(|to| to.device != own);
            others.map(at).try_for_each(|to| copy(&self.send, to, result, part * size))?;
            if here.is_none() {
                self.send.stream.submit();
                sent.push(Event::record(&self.send.stream, self.name(), false)?);
            }
        }
        Ok(())
    }

    /// On the current stream.
    fn combine(
        &self,
        sources: &[Spot],
        destinations: &[Spot],
        factors: &[f64],
        what: (DType, ReduceOp),
        len: usize,
    ) -> Result<()> {
        let blocks = direct::blocks(len * what.0.size());
        let combination = direct::Combination { name: self.name(), what, len, sources, destinations, factors };
        combination.submit(self.dev, Meet::NONE, blocks)
    }

    /// What comes next on `later`'s stream comes after what is on `earlier`'s.
    fn follow(&self, later: &Device, earlier: &Device) -> Result<()> {
        later.stream.wait_for(self.name(), &earlier.stream, earlier.stream.submit())
    }

    fn wait(&self, later: &Device, event: &Event) -> Result<()> {
        later.stream.wait_event(self.name(), event.0.raw, &event.0.stream, event.0.covered)
    }

    fn name(&self) -> &'static str {
        self.request.call.op()
    }
}

/// On the device's current stream.
fn copy(dev: &Device, to: Spot, from: Spot, bytes: usize) -> Result<()> {
    if to.address == from.address {
        return Ok(());
    }
    peer::copy(dev, to.address, to.device, from.address, from.device, bytes)
}
