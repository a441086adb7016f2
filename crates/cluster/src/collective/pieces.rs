//! A collective through the memory of the hosts, in pieces: while bytes of one piece are on their way, the device works
//! on another.
//!
//! ```text
//! device    before 0, 1, 2, ..        |                    after 0    after 1    ..
//! host               all staged, meet | exchange 0 | fold 0, exchange 1, 0 | fold 1, exchange 2, 1 | ..
//! ```
//!
//! `before` and `after` are the steps inside the process, which [`sums`](super::sums) and [`moves`](super::moves) do.
//! Everything is staged when the member arrives, and there is one meeting for all pieces. An all-reduce needs two
//! exchanges for each piece: the second one of a piece goes with the first one of the next. The exchanges need neither
//! the gang nor a device: the member's thread does them, or another one ([`pending`](super::pending)).
//!
//! Invariants: all members do the steps of all pieces in one order, so waits for members of this process and waits for
//! other processes form no circle. A step inside that fails makes the gang fail at once, so that no member of this
//! process waits for one that has given up. Then the messages go on without steps inside, since the other processes
//! count on them.

use super::{
    cut::{Cut, Ranges, total},
    hierarchical::{HierarchicalCall, bytes, part},
    host_rail::{HostRail, Room, Staged},
};
use crate::{
    internals::*,
    runtime::{
        collective::{Area, Payload},
        driver::Address,
    },
    traits::{Commit, HostTransport},
};
use gpu_pool::{DType, PinnedBuffer, ReduceOp, Result};
use std::{collections::VecDeque, mem, ops::Range, sync::Arc};

/// The most bytes of a piece on one rail. On two cores 1 to 4 MiB take the same time, and on a busy machine each piece
/// costs the time until its threads run.
pub const PIECE: usize = 2 << 20;

#[derive(Clone, Copy, Debug)]
pub(super) enum Job {
    /// Sums for their owners.
    Sum(ReduceOp),
    /// Each process's own elements for all.
    Fill,
    SumAndFill(ReduceOp),
}

impl Job {
    fn sum(self) -> Option<ReduceOp> {
        match self {
            Job::Sum(op) | Job::SumAndFill(op) => Some(op),
            Job::Fill => None,
        }
    }

    fn fills(self) -> bool {
        !matches!(self, Job::Sum(_))
    }
}

/// One piece, on this member's rail.
pub(super) struct Piece {
    slice: Range<usize>,
    /// Each process's share of the slice.
    owned: Vec<Ranges>,
    size: usize,
    /// This member's elements: the slice, or if nothing is summed the own ranges, one behind the other.
    staged: Arc<PinnedBuffer<u8>>,
    parts: Room,
    /// The own ranges, one behind the other: the sum, or what is staged.
    own: Arc<PinnedBuffer<u8>>,
    all: Room,
    /// Where `own` and `all` lie in the order of the slice, if they lie there without a gap.
    whole: Option<Area>,
}

/// The pieces of a member's collective that are not through.
pub(super) struct Pieces {
    rail: HostRail,
    pieces: VecDeque<Piece>,
    dtype: DType,
    job: Job,
    /// The commit's.
    number: u64,
    /// The first piece has had the first of its two exchanges.
    begun: bool,
}

impl Pieces {
    pub fn new(hier: &HierarchicalCall<'_, '_>, transport: &Arc<dyn HostTransport>, dtype: DType, job: Job) -> Self {
        let rail = HostRail::new(hier, transport.clone());
        Pieces { rail, pieces: VecDeque::new(), dtype, job, number: 0, begun: false }
    }

    /// Adds a piece: takes memory for it. Returns where the step inside puts this member's elements: into `own`, memory
    /// of this device; or where they are staged, on software GPUs, which work on the host's memory as fast.
    #[track_caller]
    pub fn add(
        &mut self,
        hier: &HierarchicalCall<'_, '_>,
        cut: &Cut<'_>,
        owned: Vec<Ranges>,
        own: &Area,
    ) -> Result<Area> {
        let (rail, size, me) = (&self.rail, self.dtype.size(), hier.across.me);
        let lens: Vec<usize> = owned.iter().map(|ranges| total(ranges) * size).collect();
        let parts = if self.job.sum().is_some() { rail.room_for_sum(hier, &owned[me], size)? } else { Room::new() };
        let (sum, all, whole) = match self.job {
            Job::Sum(_) => (Some(hier.pinned(lens[me])?), Room::new(), None),
            Job::Fill => (None, rail.room_for(hier, &lens)?, None),
            // Each process owns one range at most, in their order.
            Job::SumAndFill(_) => {
                let mut rest = hier.pinned(lens.iter().sum())?;
                let whole = area(&rest);
                let (mut sum, mut all) = (None, Room::new());
                for (host, &len) in lens.iter().enumerate() {
                    let tail = rest.split_off(len);
                    let part = mem::replace(&mut rest, tail);
                    match host == me {
                        true => sum = Some(part),
                        false if len > 0 => all.push((host, part)),
                        false => {}
                    }
                }
                (sum, all, Some(whole))
            }
        };
        let staged = Arc::new(hier.pinned(own.bytes.len())?);
        let to = match hier.group.device().is_software() {
            true => area(&staged),
            false => own.clone(),
        };
        let own = sum.map_or_else(|| staged.clone(), Arc::new);
        let slice = cut.slice(hier.across.here);
        self.pieces.push_back(Piece { slice, owned, size, staged, parts, own, all, whole });
        Ok(to)
    }

    /// Stages the elements of the last piece, which are at `from`. Asynchronous.
    #[track_caller]
    pub fn stage(&self, hier: &HierarchicalCall<'_, '_>, from: &Area) -> Result<()> {
        let staged = &self.pieces.back().expect("one was added").staged;
        if from.address == staged.address() { Ok(()) } else { hier.copy_down(from, staged) }
    }

    /// Waits until all pieces are staged.
    pub fn staged(&self) -> Result<()> {
        self.pieces.iter().try_for_each(|piece| piece.staged.as_slice().map(drop))
    }

    /// Meets the other processes, when all pieces are staged.
    pub fn meet(&mut self, hier: &HierarchicalCall<'_, '_>) -> Result<()> {
        self.staged()?;
        let (_, commit) = hier.meet(Payload::Nothing, |_| Vec::new())?;
        self.committed(commit);
        Ok(())
    }

    pub fn committed(&mut self, commit: Commit) {
        // Nothing waits on a device: the next collective may go on.
        drop(commit.window);
        self.number = commit.number;
    }

    /// Carries the next piece between the processes. None: all are there. After an error the other processes wait.
    pub fn carry_next(&mut self) -> Result<Option<Piece>> {
        let two = matches!(self.job, Job::SumAndFill(_));
        while !self.pieces.is_empty() {
            self.exchange(two)?;
            if self.begun == two {
                return Ok(self.pieces.pop_front());
            }
            self.begun = true;
        }
        Ok(None)
    }

    /// The second messages of the first piece, with the first ones of the next. `two`: each piece has both.
    fn exchange(&mut self, two: bool) -> Result<()> {
        let (sum, next) = (self.job.sum(), usize::from(self.begun));
        let first = Some(next).filter(|&next| sum.is_some() && next < self.pieces.len());
        let second = Some(0).filter(|_| self.job.fills() && self.begun == two);
        let mut legs = Vec::with_capacity(2);
        if let Some(k) = first {
            let room = mem::take(&mut self.pieces[k].parts);
            legs.push(self.rail.parts(self.number, self.pieces[k].staged(), room));
        }
        if let Some(k) = second {
            let room = mem::take(&mut self.pieces[k].all);
            legs.push(self.rail.own(self.number, &self.pieces[k].own, room));
        }
        let mut come = self.rail.exchange(legs)?.into_iter();
        if let Some((k, op)) = first.zip(sum) {
            let (parts, piece) = (come.next().unwrap_or_default(), &mut self.pieces[k]);
            let Piece { staged: bytes, slice, owned, size, own, .. } = piece;
            let staged = Staged { bytes, slice, owned, size: *size };
            let sum = Arc::get_mut(own).expect("nobody sends the sum yet");
            self.rail.fold(staged, parts, (self.dtype, op), sum)?;
        }
        if let Some(k) = second {
            self.pieces[k].all = come.next().unwrap_or_default();
        }
        Ok(())
    }
}

impl Piece {
    fn staged(&self) -> Staged<'_> {
        Staged { bytes: &self.staged, slice: &self.slice, owned: &self.owned, size: self.size }
    }

    /// Copies what this process owns to the device. Returns where it is: software GPUs take it from the host's memory
    /// as fast.
    #[track_caller]
    pub fn upload_own(&self, hier: &HierarchicalCall<'_, '_>, to: &Area) -> Result<Area> {
        if hier.group.device().is_software() {
            return Ok(area(&self.own));
        }
        hier.upload(&self.own, 0..self.own.len(), to)?;
        Ok(to.clone())
    }

    /// The same for the slice, which has come from all processes.
    #[track_caller]
    pub fn upload_all(&self, hier: &HierarchicalCall<'_, '_>, to: &Area) -> Result<Area> {
        if let Some(whole) = self.whole.as_ref().filter(|_| hier.group.device().is_software()) {
            return Ok(whole.clone());
        }
        let all = self.all.iter().map(|(host, bytes)| (*host, bytes)).chain([(hier.across.me, &*self.own)]);
        for (host, from) in all {
            let mut start = 0;
            for range in &self.owned[host] {
                let at = range.start - self.slice.start..range.end - self.slice.start;
                let to = part(to, bytes(&at, self.size));
                hier.upload(from, start..start + to.bytes.len(), &to)?;
                start += to.bytes.len();
            }
        }
        Ok(to.clone())
    }
}

/// Page-locked memory, as a device has it.
fn area(of: &PinnedBuffer<u8>) -> Area {
    Area { block: of.block().clone(), address: of.ptr() as Address, bytes: of.start()..of.start() + of.len() }
}
