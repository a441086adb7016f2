//! From a call to the devices' queues: meet, wait for the peers' memory, do one's part, and say so.
//!
//! ```text
//! own stream    earlier work | ready | wait for peers' ready | own part | done | wait for peers' done | later work
//! host                        `-- meet: notices with buffers, `ready`--'         `-- steps: `done` ----'
//! ```
//!
//! **The exit rule**: when a member's stream has passed the collective, no peer touches the member's memory any more. So what
//! comes next on that stream may write it, and its memory pool may reuse it, with no look at other devices.

use super::{
    DType, Group, ReduceOp,
    board::{Area, Lent, Notice, Payload},
    call::Call,
    choose::Way,
    copies, direct, exchange, hosted,
    kernels::Meet,
    plan::{Counts, Pair, Place, Shape, Side, Work},
    ring, spin, staged,
    tuner::Limits,
};
use crate::{
    DeviceBuffer, Event,
    driver::Address,
    error::{Error, Result},
    memory::{AsView, block::BlockRef, hazard::Access},
    op::Op,
    plant::Bug,
};
use smallvec::SmallVec;
use std::sync::Arc;

/// What a member asks for.
pub(super) struct Request {
    pub call: Call,
    pub dtype: DType,
    pub reduce: ReduceOp,
    /// None for `all_to_all`, which depends on what the others say.
    pub shape: Option<Shape>,
    /// None when it is in place, or this member has none.
    pub source: Option<Area>,
    pub destination: Option<Area>,
    /// What this member sends to each, and receives from each.
    pub counts: Option<(Counts, Counts)>,
}

/// Slices of what is divided begin at multiples of so many bytes: a line of the cache, so that no two devices write into one.
pub(crate) const GRAIN: usize = 128;

/// Memory of a member: where it is, and whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    /// The device's ordinal in the pool; this device's own for memory that is at home everywhere.
    pub device: usize,
    pub address: Address,
}

/// One member's part, with addresses.
pub(super) enum Job {
    /// `factors` is empty unless there are any.
    Combine { len: usize, sources: SmallVec<[Spot; 8]>, destinations: SmallVec<[Spot; 8]>, factors: SmallVec<[f64; 8]> },
    /// `(from, to, bytes)`
    Pairs(SmallVec<[(Spot, Spot, usize); 8]>),
}

impl Group<'_> {
    /// Carries a collective out, or captures it. Asynchronous on the current stream.
    #[track_caller]
    pub(super) fn run(&self, request: Request) -> Result<()> {
        match &self.dev.recording {
            Some(recording) => self.capture(recording, request),
            None => self.carry(&request),
        }
    }

    /// Announces what a collective touches of this member's memory.
    #[track_caller]
    pub(super) fn access(&self, request: &Request) -> Result<Op<'_>> {
        let mut access = self.dev.op_in_graph(request.call.op())?;
        if let Some(source) = &request.source {
            access.touch(&source.block, source.bytes.clone(), Access::Read, false)?;
        }
        if let Some(destination) = &request.destination {
            access.touch(&destination.block, destination.bytes.clone(), Access::Write, false)?;
        }
        Ok(access)
    }

    /// Carries a collective out.
    #[track_caller]
    pub(super) fn carry(&self, request: &Request) -> Result<()> {
        self.carry_by(request, self.way(request), self.limits())
    }

    /// [`carry`](Self::carry) in a given way. All members give the same, and one that they can go.
    #[track_caller]
    pub(super) fn carry_by(&self, request: &Request, way: Way, limits: &Limits) -> Result<()> {
        let (dev, name) = (self.dev, request.call.op());
        let mut access = self.access(request)?;
        if let Some(signals) = self.signals(way) {
            return spin::run(self, request, (way, limits), signals, access);
        }
        if way == Way::Staged {
            return staged::run(self, request, access);
        }
        if way == Way::Hosted {
            return hosted::run(self, request, access);
        }
        // Before the meeting: who is short of memory says so before anybody has begun.
        let scratch = match (way, &request.shape) {
            (Way::Ring, Some(Shape::AllReduce { len })) => ring::scratch(self, *len, request.dtype)?,
            (Way::Copies, Some(shape)) if exchange::sums(shape, self.count()) => {
                exchange::scratch(self, shape, request.dtype)?
            }
            _ => None,
        };
        if let Some(scratch) = &scratch {
            access.scratch(&scratch.block, scratch.view().bytes())?;
        }
        let ready = (self.count() > 1).then(|| Event::record(&dev.stream, name, false)).transpose()?;
        let inbox = scratch.as_ref().map(|scratch| (scratch.address(), scratch.len()));
        let lent = Lent { inbox, ..request.lend(ready) };
        let notices = self.meet(request.call.clone(), Payload::Memory(lent), false)?;
        let shape = self.shape(request, &notices)?;
        let done = self.carry_out(request, &shape, (way, limits), scratch.as_ref(), &notices);
        access.submitted();
        done.inspect_err(|cause| {
            self.fail(request, cause);
            // Peers may still fill it.
            self.fail_on(scratch.iter().map(|scratch| &scratch.block), cause);
        })
    }

    /// A committed collective has failed here.
    pub(super) fn fail(&self, request: &Request, cause: &Error) {
        // Peers may have accesses to these buffers under way that no event of ours covers.
        let areas = request.source.iter().chain(&request.destination);
        self.fail_on(areas.map(|area| &area.block), cause);
    }

    /// The same, with these blocks.
    pub(super) fn fail_on<'b>(&self, blocks: impl Iterator<Item = &'b BlockRef>, cause: &Error) {
        let dev = self.dev;
        dev.worker.suspects.borrow_mut().extend(blocks.cloned());
        // The peers count on this member; they must not wait for it.
        if !matches!(cause, Error::Aborted { .. }) {
            dev.session.gang.poison(dev.index(), cause.clone());
        }
    }

    /// What was asked for, or what all say together.
    pub(super) fn shape(&self, request: &Request, notices: &[Arc<Notice>]) -> Result<Shape> {
        if let Some(shape) = &request.shape {
            return Ok(shape.clone());
        }
        let counts = |notice: &Arc<Notice>| lent(notice).counts.clone().expect("all_to_all says how much");
        let (send, receive) = notices.iter().map(counts).unzip();
        let shape = Shape::AllToAll { send, receive };
        match shape.disagreement(self.count()) {
            None => Ok(shape),
            // Every member finds the same, and none has begun.
            Some((a, b)) => Err(self.not_what_is_expected((a, b), &shape, notices)),
        }
    }

    /// Member `a` sends member `b` another number of elements than `b` expects.
    fn not_what_is_expected(&self, (a, b): (usize, usize), shape: &Shape, notices: &[Arc<Notice>]) -> Error {
        let mut error = self.mismatch("counts", (a, &notices[a].call), (b, &notices[b].call));
        if let (Error::Mismatch { a_call, b_call, .. }, Shape::AllToAll { send, receive }) = (&mut error, shape) {
            let (out, into) = (send[a].part(b).len(), receive[b].part(a).len());
            *a_call = format!("all_to_all_v({out} elements for member {b})");
            *b_call = format!("all_to_all_v({into} elements from member {a})");
        }
        error
    }

    fn carry_out(
        &self,
        request: &Request,
        shape: &Shape,
        (way, limits): (Way, &Limits),
        scratch: Option<&DeviceBuffer<u8>>,
        notices: &[Arc<Notice>],
    ) -> Result<()> {
        let (dev, call) = (self.dev, &request.call);
        if let (Way::Ring, Shape::AllReduce { len }) = (way, shape) {
            return ring::submit(self, request, *len, scratch, notices);
        }
        if way == Way::Copies && exchange::sums(shape, self.count()) {
            return exchange::submit(self, request, shape, notices);
        }
        let others = || self.others();
        for peer in others().filter(|&peer| shape.touches(self.rank, peer)) {
            let ready = lent(&notices[peer]).ready.as_ref().expect("there are several members");
            if !dev.worker.link.planted(Bug::StartSkipped) {
                dev.stream.wait_event(call.op(), ready.0.raw, &ready.0.stream, ready.0.covered)?;
            }
        }
        let work = match way {
            Way::Copies => shape.copies(self.count(), self.rank, request.grain()),
            _ => shape.work(self.count(), self.rank, request.grain()),
        };
        if !work.is_empty() {
            let job = self.resolve(&work, request, notices);
            match way {
                Way::Copies | Way::Ring => copies::submit(self, request, &job)?,
                _ => {
                    let largest = shape.largest(self.count(), request.grain()) * request.dtype.size();
                    direct::submit(self, request, &job, Meet::NONE, largest, limits)?;
                }
            }
        }
        let touched = others().any(|peer| shape.touches(self.rank, peer));
        let done = touched.then(|| Event::record(&dev.stream, call.op(), false)).transpose()?;
        for peer in others().filter(|&peer| shape.touches(self.rank, peer)) {
            self.send_step(call, peer, done.clone().expect("recorded for them"))?;
        }
        others().filter(|&peer| shape.touches(peer, self.rank)).try_for_each(|peer| self.await_step(call, peer))
    }

    fn resolve(&self, work: &Work, request: &Request, notices: &[Arc<Notice>]) -> Job {
        let spot = |member: usize, side| {
            let area = lent(&notices[member]).area(side);
            Spot { device: area.block.device().unwrap_or(self.dev.index()), address: area.address }
        };
        request.job(work, spot, notices.iter().map(|notice| lent(notice).factor))
    }
}

impl Request {
    /// What peers are told of this member's memory.
    pub(super) fn lend(&self, ready: Option<Event>) -> Lent {
        Lent {
            source: self.source.clone(),
            destination: self.destination.clone(),
            ready,
            factor: if let ReduceOp::Scaled(factor) = self.reduce { factor } else { 1.0 },
            counts: self.counts.clone(),
            stage: None,
            inbox: None,
        }
    }

    /// A part of the work with addresses: `spot` has where a member's buffer begins, `factors` what each member's elements are
    /// multiplied by.
    pub(super) fn job(
        &self,
        work: &Work,
        spot: impl Fn(usize, Side) -> Spot,
        factors: impl Iterator<Item = f64>,
    ) -> Job {
        let size = self.dtype.size();
        let at = |place: &Place| {
            let first = spot(place.member, place.side);
            Spot { address: first.address + (place.start * size) as u64, ..first }
        };
        match work {
            Work::Combine { len, sources, destinations } => Job::Combine {
                len: *len,
                sources: sources.iter().map(at).collect(),
                destinations: destinations.iter().map(at).collect(),
                factors: match self.reduce {
                    ReduceOp::Scaled(_) => factors.collect(),
                    _ => SmallVec::new(),
                },
            },
            Work::Pairs(pairs) => {
                let pair = |pair: &Pair| (at(&pair.from), at(&pair.to), pair.len * size);
                Job::Pairs(pairs.iter().map(pair).collect())
            }
        }
    }

    /// This member's buffer on a side.
    pub(super) fn area(&self, side: Side) -> Option<&Area> {
        match side {
            Side::Source => self.source.as_ref().or(self.destination.as_ref()),
            Side::Destination => self.destination.as_ref(),
        }
    }

    pub(super) fn grain(&self) -> usize {
        GRAIN / self.dtype.size()
    }
}

pub(super) fn lent(notice: &Notice) -> &Lent {
    match &notice.payload {
        Payload::Memory(lent) => lent,
        _ => unreachable!("the meeting compared the operations"),
    }
}
