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
//! exchanges for each piece: the second one of a piece goes with the first one of the next.
//!
//! Invariants: all members do the steps of all pieces in one order, so waits for members of this process and waits for
//! other processes form no circle. A step inside that fails makes the gang fail at once, so that no member of this
//! process waits for one that has given up. Then the messages go on without steps inside, since the other processes
//! count on them.

use super::{
    super::transport::HostTransport,
    cut::{Cut, Ranges, total},
    host_rail::{HostRail, Room, Staged},
    trip::{Trip, bytes, part},
};
use crate::{
    error::Result,
    fabric::{
        descriptor::{Area, Payload},
        types::{DType, ReduceOp},
    },
    memory::PinnedBuffer,
};
use std::{mem, ops::Range, sync::Arc};

/// The most bytes of a piece on one rail. On two cores 1 to 4 MiB take the same time, and on a busy machine each piece
/// costs the time until its threads run.
pub(super) const PIECE: usize = 2 << 20;

/// What the rails do.
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
    /// What of the slice belongs to each process.
    owned: Vec<Ranges>,
    size: usize,
    /// This member's elements: the slice, or if nothing is summed the own ranges, one behind the other.
    staged: Arc<PinnedBuffer<u8>>,
    parts: Room,
    /// The own ranges, one behind the other: the sum, or what is staged.
    own: Arc<PinnedBuffer<u8>>,
    all: Room,
}

/// All pieces of a member's collective.
pub(super) struct Pieces<'t, 'g, 'd> {
    trip: &'t Trip<'g, 'd>,
    rail: HostRail<'t, 'g, 'd>,
    pieces: Vec<Piece>,
    dtype: DType,
    job: Job,
    /// The commit's.
    number: u64,
    /// Exchanges so far.
    step: usize,
}

impl<'t, 'g, 'd> Pieces<'t, 'g, 'd> {
    pub fn new(trip: &'t Trip<'g, 'd>, transport: &Arc<dyn HostTransport>, dtype: DType, job: Job) -> Self {
        let rail = HostRail::new(trip, transport.clone());
        Pieces { trip, rail, pieces: Vec::new(), dtype, job, number: 0, step: 0 }
    }

    /// Adds a piece: takes memory for it. Returns where the step inside puts this member's elements: into `own`, memory
    /// of this device; or where they are staged, on software GPUs, which work on the host's memory as fast.
    #[track_caller]
    pub fn add(&mut self, cut: &Cut<'_>, owned: Vec<Ranges>, own: &Area) -> Result<Area> {
        let (trip, rail, size, me) = (self.trip, &self.rail, self.dtype.size(), self.trip.across.me);
        let lens: Vec<usize> = owned.iter().map(|ranges| total(ranges) * size).collect();
        let all = if self.job.fills() { rail.room_for(&lens)? } else { Room::new() };
        let (parts, sum) = match self.job.sum() {
            Some(_) => (rail.room_for_sum(&owned[me], size)?, Some(trip.pinned(lens[me])?)),
            None => (Room::new(), None),
        };
        let staged = Arc::new(trip.pinned(own.bytes.len())?);
        let to = match trip.group.dev.worker.is_software() {
            true => Area { block: staged.block.clone(), address: staged.block.address, bytes: 0..own.bytes.len() },
            false => own.clone(),
        };
        let own = sum.map_or_else(|| staged.clone(), Arc::new);
        let slice = cut.slice(trip.across.here);
        self.pieces.push(Piece { slice, owned, size, staged, parts, own, all });
        Ok(to)
    }

    /// Stages the elements of the last piece, which are at `from`. Asynchronous.
    #[track_caller]
    pub fn stage(&self, from: &Area) -> Result<()> {
        let staged = &self.pieces.last().expect("one was added").staged;
        if from.address == staged.block.address { Ok(()) } else { self.trip.copy_down(from, staged) }
    }

    /// Meets the other processes, when all pieces are staged.
    pub fn meet(&mut self) -> Result<()> {
        self.pieces.iter().try_for_each(|piece| piece.staged.as_slice().map(drop))?;
        let (_, commit) = self.trip.meet(Payload::Nothing, |_| Vec::new())?;
        // Nothing waits on a device: the next collective may go on.
        drop(commit.window);
        self.number = commit.number;
        Ok(())
    }

    /// Carries the next piece between the processes. None: all are there.
    pub fn carry_next(&mut self) -> Result<Option<&Piece>> {
        let lag = usize::from(matches!(self.job, Job::SumAndFill(_)));
        loop {
            if self.step == self.pieces.len() + lag {
                return Ok(None);
            }
            self.trip.done(self.exchange(self.step, lag))?;
            self.step += 1;
            if self.step > lag {
                return Ok(Some(&self.pieces[self.step - 1 - lag]));
            }
        }
    }

    /// The first messages of piece `step`, with the second ones of the piece `lag` before it.
    fn exchange(&mut self, step: usize, lag: usize) -> Result<()> {
        let (sum, second) = (self.job.sum(), step.checked_sub(lag).filter(|_| self.job.fills()));
        let first = Some(step).filter(|&step| sum.is_some() && step < self.pieces.len());
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

    /// Copies what this process owns to the device.
    #[track_caller]
    pub fn upload_own(&self, trip: &Trip<'_, '_>, to: &Area) -> Result<()> {
        trip.upload(&self.own, 0..self.own.len(), to)
    }

    /// Copies the slice, which has come from all processes, to the device.
    #[track_caller]
    pub fn upload_all(&self, trip: &Trip<'_, '_>, to: &Area) -> Result<()> {
        let all = self.all.iter().map(|(host, bytes)| (*host, bytes)).chain([(trip.across.me, &*self.own)]);
        for (host, from) in all {
            let mut start = 0;
            for range in &self.owned[host] {
                let at = range.start - self.slice.start..range.end - self.slice.start;
                let to = part(to, bytes(&at, self.size));
                trip.upload(from, start..start + to.bytes.len(), &to)?;
                start += to.bytes.len();
            }
        }
        Ok(())
    }
}
