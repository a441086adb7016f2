//! A collective through the members' stages in the host's memory, as [`stage`](super::stage) plans it.
//!
//! Where kernels can meet there, it is one launch on each member ([`launch`]; `kernels/staged.cu` has the protocol). Elsewhere the
//! same parts are done piece by piece by ordinary kernels and ordered by events ([`run`]): on software GPUs, under the
//! checker, or when asked for on GPUs that have peer access:
//!
//! ```text
//! puts | wait for all | fold, pulls | wait for all |     next piece
//!                      fold | wait for all | pulls | wait for all |    where results are pulled
//! ```

use super::{
    DType, Group, ReduceOp,
    board::{Area, Lent, Notice, Payload},
    direct::{self, Combination},
    kernels::{self, MOST, Meet, Moves, Pairs, Part, Role, STAGED_BLOCKS, Stage, Staged},
    plan::{Shape, Side},
    run::{GRAIN, Request, Spot, lent},
    signals::{SLOT, Signals},
    spin,
    stage::{Cutting, Staging, cutting},
    tuner::Limits,
};
use crate::{
    Device, Event,
    driver::Address,
    error::{Error, Result},
    memory::{block::BlockRef, hazard::Access, pinned::Near},
    op::Op,
    stream::StreamCore,
};
use smallvec::SmallVec;
use std::{cell::RefCell, collections::VecDeque, sync::Arc};

/// Bytes of a stage that is ordered by events.
const ROOM: usize = 1 << 20;

/// One kernel, which meets its peers'. The meeting on the host is over and committed: whatever comes of this, the meeting of the
/// kernels is counted.
pub(super) fn launch(
    group: &Group<'_>,
    request: &Request,
    shape: &Shape,
    factors: &[f64],
    meet: Meet,
    signals: &Signals,
) -> Result<()> {
    let (dev, n, name) = (group.dev, group.count(), request.call.op());
    let plan = shape.staging(n, group.rank, request.grain());
    let size = request.dtype.size();
    if plan.most == 0 {
        return spin::count(&dev.worker, &dev.stream, name, meet);
    }
    let cut = cutting(plan.most * size, plan.lanes, most_blocks(group.limits()), SLOT);
    let own = Own { request, size };
    let (mut puts, mut pulls) = (Moves::default(), Moves::default());
    for (lane, range) in &plan.puts {
        puts.set(*lane, own.at(Side::Source, range.start, range.len()), range.len() * size);
    }
    for &(member, _, start, len) in &plan.pulls {
        pulls.set(member, own.at(Side::Destination, start, len), len * size);
    }
    let mut role = Role::default();
    if let Some(fold) = &plan.fold {
        role.from = own.at(Side::Source, fold.source, fold.len);
        role.to = fold.destination.map_or(0, |start| own.at(Side::Destination, start, fold.len));
        role.bytes = (fold.len * size) as u64;
        role.result = u64::from(fold.result);
    }
    if let Some((from, to, len)) = plan.stays {
        role.local_from = own.at(Side::Source, from, len);
        role.local_to = own.at(Side::Destination, to, len);
        role.local_bytes = (len * size) as u64;
    }
    let (counts, offset) = signals.stage_offsets();
    let stage = Stage {
        offset,
        chunk: cut.chunk as u64,
        slot: SLOT as u64,
        steps: u32::try_from(cut.steps).expect("a piece has at least 4 KiB, so this is more memory than there is"),
        lanes: plan.lanes as u32,
        two: u32::from(plan.two),
        counts,
        spare: 0,
        spares: 0,
    };
    let staged = Staged { meet, stage, role, op: request.reduce, factors, puts, pulls };
    direct::launch_meeting(dev, &meet, name, kernels::staged(request.dtype), cut.blocks as u32, &staged.args())
}

/// How many blocks that kernel has, for who asks.
pub(crate) fn blocks(shape: &Shape, n: usize, dtype: DType, limits: &Limits) -> u32 {
    let plan = shape.staging(n, 0, GRAIN / dtype.size());
    cutting(plan.most * dtype.size(), plan.lanes, most_blocks(limits), SLOT).blocks as u32
}

/// All at work at once, or those that are would wait for peers' that are not.
fn most_blocks(limits: &Limits) -> usize {
    STAGED_BLOCKS.min(limits.push_blocks as usize)
}

/// This member's buffers.
struct Own<'r> {
    request: &'r Request,
    size: usize,
}

impl Own<'_> {
    /// Where an element is; nothing is anywhere, also where there is no buffer.
    fn at(&self, side: Side, start: usize, len: usize) -> Address {
        if len == 0 {
            return 0;
        }
        let area = self.request.area(side).expect("a member has the buffers that its part is done on");
        area.address + (start * self.size) as u64
    }
}

/// Piece by piece, ordered by events. Asynchronous on the current stream, but for a stage that is still in use by an earlier collective:
/// that is waited for on the host.
#[track_caller]
pub(super) fn run(group: &Group<'_>, request: &Request, mut access: Op<'_>) -> Result<()> {
    let dev = group.dev;
    let name = request.call.op();
    let bytes = request.shape.as_ref().map_or(ROOM, |shape| {
        let plan = shape.staging(group.count(), group.rank, request.grain());
        plan.most.saturating_mul(plan.lanes * request.dtype.size()).clamp(1, ROOM)
    });
    InFlight::room(dev, name)?;
    // Whole lines for each lane.
    let bytes = (bytes + group.count() * 128).min(ROOM.max(group.count() * 128));
    // Before the meeting: who is short of memory says so before anybody has begun.
    let block = dev.worker.shared.pinned.block(name, bytes, Near::Device(dev.index()))?;
    access.touch(&block, 0..bytes, Access::Write, false)?;
    let stage = Area { address: block.address, block: block.clone(), bytes: 0..bytes };
    let notices =
        group.meet(request.call.clone(), Payload::Memory(Lent { stage: Some(stage), ..request.lend(None) }), false)?;
    let shape = group.shape(request, &notices)?;
    let done = Stepped::new(group, request, &shape, &notices).and_then(|stepped| stepped.run());
    access.submitted();
    InFlight::note(dev);
    done.inspect_err(|cause| {
        group.fail(request, cause);
        keep(group, block);
    })
}

/// Stages of calls that a device may not be through with, at most: they are page-locked memory, of which there must not be as many
/// as somebody may call ahead of his device.
const AHEAD: usize = 4;

/// Calls with a stage whose work may not be over: their streams, and how many operations these had then.
#[derive(Default)]
pub(crate) struct InFlight(RefCell<VecDeque<(Arc<StreamCore>, u64)>>);

impl InFlight {
    /// Waits on the host until there is room for a further stage: until the gang fails, or nothing completes for as long as the
    /// pool waits for anything.
    pub(super) fn room(dev: &Device, name: &'static str) -> Result<()> {
        let calls = &dev.worker.staging_calls.0;
        while calls.borrow().len() >= AHEAD {
            let (stream, last) = calls.borrow_mut().pop_front().expect("there are some");
            let gang = &dev.session.gang;
            let waited = stream.wait_host_unless(name, last, dev.worker.shared.deadline, &|| gang.is_aborted());
            // A peer's failure is the reason, not the deadline.
            waited.map_err(|e| if matches!(e, Error::Timeout { .. }) { gang.aborted().unwrap_or(e) } else { e })?;
        }
        Ok(())
    }

    /// A call's work is on the current stream.
    pub(super) fn note(dev: &Device) {
        dev.worker.staging_calls.0.borrow_mut().push_back((dev.stream.clone(), dev.stream.submitted()));
    }
}

/// Peers may have accesses to the stage under way that no event of this member covers.
fn keep(group: &Group<'_>, stage: BlockRef) {
    group.dev.worker.suspects.borrow_mut().push(stage);
}

struct Stepped<'g> {
    group: &'g Group<'g>,
    request: &'g Request,
    plan: Staging,
    cut: Cutting,
    /// By rank.
    stages: SmallVec<[Address; 8]>,
    factors: SmallVec<[f64; 8]>,
}

/// `(from, to, bytes)`
type Move = (Address, Address, usize);

impl<'g> Stepped<'g> {
    fn new(group: &'g Group<'g>, request: &'g Request, shape: &Shape, notices: &[Arc<Notice>]) -> Result<Self> {
        let plan = shape.staging(group.count(), group.rank, request.grain());
        let stages = notices.iter().map(|notice| lent(notice).stage.as_ref().expect("every member has one"));
        // All members' are of one size, but for those of `all_to_all`, where the shape was not known: the smallest counts.
        let room = stages.clone().map(|area| area.bytes.len()).min().unwrap_or(0);
        let stages = stages.map(|area| area.address).collect();
        let cut = cutting(plan.most * request.dtype.size(), plan.lanes, 1, room);
        let scaled = matches!(request.reduce, ReduceOp::Scaled(_));
        let factors = notices.iter().filter(|_| scaled).map(|notice| lent(notice).factor).collect();
        Ok(Stepped { group, request, plan, cut, stages, factors })
    }

    fn run(&self) -> Result<()> {
        for j in 0..self.cut.steps {
            self.put(j)?;
            self.meet()?;
            self.fold(j)?;
            if self.plan.two {
                self.meet()?;
            }
            self.pull(j)?;
            self.meet()?;
        }
        Ok(())
    }

    /// Later work of every member comes after earlier work of all of them.
    fn meet(&self) -> Result<()> {
        let (group, call) = (self.group, &self.request.call);
        let done = Event::record(&group.dev.stream, call.op(), false)?;
        group.others().try_for_each(|peer| group.send_step(call, peer, done.clone()))?;
        group.others().try_for_each(|peer| group.await_step(call, peer))
    }

    /// Bytes of `len` elements that are of piece `j`: where, and how many.
    fn piece(&self, j: usize, len: usize) -> (usize, usize) {
        let (start, all) = (j * self.cut.chunk, len * self.request.dtype.size());
        (start, all.saturating_sub(start).min(self.cut.chunk))
    }

    fn lane(&self, member: usize, lane: usize) -> Address {
        self.stages[member] + (lane * self.cut.chunk) as u64
    }

    /// Where piece `j` of what begins at an element of an own buffer lies, and its bytes.
    fn own(&self, side: Side, start: usize, len: usize, j: usize) -> (Address, usize) {
        let (at, bytes) = self.piece(j, len);
        let own = Own { request: self.request, size: self.request.dtype.size() };
        (own.at(side, start, len) + at as u64, bytes)
    }

    fn put(&self, j: usize) -> Result<()> {
        let puts = self.plan.puts.iter().map(|(lane, range)| {
            let (from, bytes) = self.own(Side::Source, range.start, range.len(), j);
            (from, self.lane(self.group.rank, *lane), bytes)
        });
        let stays = self.plan.stays.map(|(from, to, len)| {
            let (from, bytes) = self.own(Side::Source, from, len, j);
            (from, self.own(Side::Destination, to, len, j).0, bytes)
        });
        self.moves(puts.chain(stays))
    }

    fn pull(&self, j: usize) -> Result<()> {
        self.moves(self.plan.pulls.iter().map(|&(member, lane, start, len)| {
            let (to, bytes) = self.own(Side::Destination, start, len, j);
            (self.lane(member, lane), to, bytes)
        }))
    }

    fn moves(&self, moves: impl Iterator<Item = Move>) -> Result<()> {
        let dev = self.group.dev;
        let part = |address, bytes| Part { address, bytes };
        let moves = moves.filter(|(_, _, bytes)| *bytes > 0);
        let pairs: SmallVec<[_; MOST]> = moves.map(|(from, to, bytes)| (part(from, bytes), part(to, bytes))).collect();
        if pairs.is_empty() {
            return Ok(());
        }
        let each = direct::blocks(self.cut.chunk);
        let args = Pairs { pairs: &pairs, blocks_per_pair: each, meet: Meet::NONE }.args(dev.worker.is_software());
        direct::launch(dev, self.request.call.op(), kernels::pairs(), each * pairs.len() as u32, &args)
    }

    fn fold(&self, j: usize) -> Result<()> {
        let Some(fold) = &self.plan.fold else { return Ok(()) };
        let (own, bytes) = self.own(Side::Source, fold.source, fold.len, j);
        if bytes == 0 {
            return Ok(());
        }
        let (dev, me) = (self.group.dev, self.group.rank);
        let lane = if self.plan.lanes == 1 { 0 } else { me };
        // Whose memory it is does not matter to a kernel.
        let spot = |address| Spot { device: dev.index(), address };
        let source = |rank| spot(if rank == me { own } else { self.lane(rank, lane) });
        let sources: SmallVec<[Spot; 8]> = (0..self.group.count()).map(source).collect();
        let to = fold.destination.map(|start| self.own(Side::Destination, start, fold.len, j).0);
        let result = fold.result.then(|| self.lane(me, me));
        let destinations: SmallVec<[Spot; 2]> = to.into_iter().chain(result).map(spot).collect();
        let combination = Combination {
            name: self.request.call.op(),
            what: (self.request.dtype, self.request.reduce),
            len: bytes / self.request.dtype.size(),
            sources: &sources,
            destinations: &destinations,
            factors: &self.factors,
        };
        combination.submit(dev, Meet::NONE, direct::blocks(bytes))
    }
}
