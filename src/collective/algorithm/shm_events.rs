//! The steps of [`shm`] as ordinary kernels, ordered by events. `choose` picks it only if a user asks for it.
//!
//! ```text
//! puts | wait for all | fold, pulls | wait for all |                     next piece
//! puts | wait for all | fold | wait for all | pulls | wait for all |     the same, where results are pulled
//! ```

use super::{
    super::{kernels, launch},
    Algorithm, Case, Matched, MeetBy, Member, Needs, Scratch, Staging, cutting, shm,
};
use crate::{
    collective::{Combination, Pairs, Part, RemotePtr},
    driver::Address,
    error::Result,
    fabric::{GRAIN, MOST, Side, Tiling},
};
use smallvec::SmallVec;

pub(crate) struct ShmEvents;

const ROOM: usize = 1 << 20;

impl Algorithm for ShmEvents {
    about!("shm_events", Staged, "events");

    /// Never: copies are better.
    fn fits(&self, _: &Case<'_>) -> Option<&'static str> {
        None
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        shm::wanted(case).then_some("asked for")
    }

    fn needs(&self, case: &Case<'_>) -> Needs {
        let bytes = case.shape.map_or(ROOM, |shape| {
            let plan = shape.staging(case.members, 0, GRAIN / case.dtype.size());
            plan.most.saturating_mul(plan.lanes * case.dtype.size()).clamp(1, ROOM)
        });
        // Each lane has whole cache lines.
        let lines = case.members * GRAIN;
        Needs { meeting: MeetBy::Host, scratch: Scratch::Host((bytes + lines).min(ROOM.max(lines))) }
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        Steps::new(member, matched).run()
    }
}

struct Steps<'g> {
    member: &'g Member<'g>,
    plan: Staging,
    cut: Tiling,
    stages: SmallVec<[Address; 8]>,
    factors: SmallVec<[f64; 8]>,
}

/// `(from, to, bytes)`
type Move = (Address, Address, usize);

impl<'g> Steps<'g> {
    fn new(member: &'g Member<'g>, matched: &Matched<'_>) -> Self {
        let (n, request) = (member.count(), member.request);
        let plan = matched.shape.staging(n, member.rank, request.grain());
        let (stages, room) = matched.stages(n);
        let cut = cutting(plan.most * request.dtype.size(), plan.lanes, 1, room);
        Steps { member, plan, cut, stages, factors: member.factors(matched) }
    }

    fn run(&self) -> Result<()> {
        for j in 0..self.cut.rounds {
            self.put(j)?;
            self.member.barrier_by_events()?;
            self.fold(j)?;
            if self.plan.two {
                self.member.barrier_by_events()?;
            }
            self.pull(j)?;
            self.member.barrier_by_events()?;
        }
        Ok(())
    }

    fn lane(&self, member: usize, lane: usize) -> Address {
        self.stages[member] + (lane * self.cut.tile) as u64
    }

    fn own(&self, side: Side, start: usize, len: usize, j: usize) -> (Address, usize) {
        self.member.tile(&self.cut, side, start, len, j)
    }

    fn put(&self, j: usize) -> Result<()> {
        let puts = self.plan.puts.iter().map(|(lane, range)| {
            let (from, bytes) = self.own(Side::Source, range.start, range.len(), j);
            (from, self.lane(self.member.rank, *lane), bytes)
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
        let part = |address, bytes| Part { address, bytes };
        let moves = moves.filter(|(_, _, bytes)| *bytes > 0);
        let pairs: SmallVec<[_; MOST]> = moves.map(|(from, to, bytes)| (part(from, bytes), part(to, bytes))).collect();
        if pairs.is_empty() {
            return Ok(());
        }
        let each = launch::blocks(self.cut.tile);
        let args = Pairs { pairs: &pairs, blocks_per_pair: each, meet: self.member.barrier };
        let args = args.args(self.member.is_software());
        self.member.launch(&kernels::pairs(), each * pairs.len() as u32, &args)
    }

    fn fold(&self, j: usize) -> Result<()> {
        let Some(fold) = &self.plan.fold else { return Ok(()) };
        let (own, bytes) = self.own(Side::Source, fold.source, fold.len, j);
        if bytes == 0 {
            return Ok(());
        }
        let (me, request) = (self.member.rank, self.member.request);
        let lane = if self.plan.lanes == 1 { 0 } else { me };
        let remote = |address| self.member.local(address);
        let source = |rank| remote(if rank == me { own } else { self.lane(rank, lane) });
        let sources: SmallVec<[RemotePtr; 8]> = (0..self.member.count()).map(source).collect();
        let to = fold.destination.map(|start| self.own(Side::Destination, start, fold.len, j).0);
        let result = fold.result.then(|| self.lane(me, me));
        let destinations: SmallVec<[RemotePtr; 2]> = to.into_iter().chain(result).map(remote).collect();
        let (len, sources, destinations) = (bytes / request.dtype.size(), &sources[..], &destinations[..]);
        let combination = Combination { len, sources, destinations, factors: &self.factors };
        combination.submit(self.member, (request.dtype, request.reduce), launch::blocks(bytes))
    }
}
