//! The rail of software GPUs of processes with memory in common ([`CommonMemory`]). The step before leaves a member's
//! slice there. After the commit others add up or copy straight out of it, and a sum goes straight into all slices.
//!
//! ```text
//! a member's memory:  a counter of each process | piece 0: its slice (and own ranges that lie apart) | piece 1 | ..
//! ```
//!
//! The commit says that all slices are there. A process that has done its part of a piece counts it in the memory of
//! each other one. Notes of the meeting tell where the memory is. [`rail`](super::rail) and
//! [`pending`](super::pending) use this where a transport has such memory, [`host_rail`](super::host_rail) elsewhere.
//!
//! Invariants: a range of a slice is touched only by the process that owns it, until that one has counted the piece;
//! what others only read is never written again. Memory is used again when all have counted all pieces: never after a
//! loss, since a process that was stopped may go on later.

use super::cut::{Cut, Ranges, Share};
use super::hierarchical::part;
use super::message_route::CancelOn;
use super::plan::{Job, Plan};
use super::rail::{HostSide, Landed, Rail};
use crate::internals::*;
use crate::runtime::{
    Access, Area, fold_on_host,
    sync::{load_word, store_word},
};
use crate::traits::{Commit, CommonMemory};
use gpu_pool::{DType, Error, Result};
use std::{
    ops::Range,
    sync::{Arc, OnceLock},
    time::Duration,
};

/// Bytes of a counter: no two of them are in one line of a cache.
const LINE: usize = 128;

/// Pieces begin at multiples of so many bytes.
const ALIGN: usize = 256;

/// Memory of this process's part.
struct Taken {
    memory: Arc<dyn CommonMemory>,
    at: u64,
    bytes: usize,
    /// From the commit on.
    counts: OnceLock<Counts>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let counts = self.counts.take();
        let done = move || counts.as_ref().is_none_or(|counts| counts.have(counts.1));
        self.memory.give(self.at, self.bytes, Box::new(done));
    }
}

/// The words in which the other processes count, and the number of pieces.
struct Counts(Vec<*const u64>, usize);

// SAFETY: words that all only load and store whole; they live as long as the memory.
unsafe impl Send for Counts {}
// SAFETY: as above.
unsafe impl Sync for Counts {}

impl Counts {
    /// Whether all others have done so many pieces.
    fn have(&self, pieces: usize) -> bool {
        // SAFETY: words of this process's memory, which lives while it is asked.
        self.0.iter().all(|word| unsafe { load_word(*word) } >= pieces as u64)
    }
}

struct Piece {
    share: Share,
    /// Where its slice begins, behind the counters.
    at: usize,
    /// Where own ranges lie, one behind the other: behind the slice, if a process has several.
    apart: Option<usize>,
}

impl Piece {
    fn new(share: Share, at: usize, job: Job) -> Piece {
        let several = !matches!(job, Job::SumAndFill(_)) && share.owned.iter().any(|ranges| ranges.len() > 1);
        let apart = several.then(|| at + share.bytes().next_multiple_of(ALIGN));
        Piece { share, at, apart }
    }

    /// Where it ends; of every process alike.
    fn end(&self) -> usize {
        self.apart.unwrap_or(self.at) + self.share.bytes().next_multiple_of(ALIGN)
    }

    fn slice(&self) -> Range<usize> {
        self.at..self.at + self.share.bytes()
    }

    fn at(&self, range: &Range<usize>) -> usize {
        self.at + self.share.at(range).start
    }

    /// Where a process has a range of its own, for the step before or behind.
    fn own_at(&self, host: usize, range: &Range<usize>) -> usize {
        self.apart.map_or_else(|| self.at(range), |apart| apart + self.share.packed(host, range).start)
    }

    fn own(&self) -> Range<usize> {
        let first = self.share.own().first().map_or(self.at, |range| self.own_at(self.share.me, range));
        first..first + self.share.own_bytes()
    }
}

pub(super) struct SharedRail {
    cancel_on: CancelOn,
    hosts: Box<[usize]>,
    me: usize,
    /// None: this member has none.
    rail: Option<usize>,
    /// Members of all processes.
    members: usize,
    dtype: DType,
    job: Job,
    deadline: Duration,
    pieces: Vec<Piece>,
    own: Arc<Taken>,
    /// The bytes behind the counters.
    area: Area,
    /// Where the memory of each process begins; after the commit.
    begins: Vec<u64>,
    done: usize,
    landed: usize,
}

impl Landed for Area {
    fn land(self, _: &Plan<'_, '_, '_>) -> Result<Area> {
        Ok(self)
    }
}

impl Rail for SharedRail {
    type Piece = Area;

    fn add(&mut self, plan: &Plan<'_, '_, '_>, cut: &Cut<'_>) -> Result<Area> {
        let piece = Piece::new(plan.share(cut), self.pieces.last().map_or(0, Piece::end), self.job);
        let to = if self.job.sum().is_some() { piece.slice() } else { piece.own() };
        self.pieces.push(piece);
        Ok(part(&self.area, to))
    }

    fn stage(&mut self, _: &Plan<'_, '_, '_>) -> Result<()> {
        Ok(())
    }

    fn meet(&mut self, plan: &Plan<'_, '_, '_>) -> Result<()> {
        self.meet_here(plan)
    }

    fn carry_next(&mut self) -> Result<Option<Area>> {
        // While others are at the piece, this process does the next one.
        while self.done < self.pieces.len().min(self.landed + 2) {
            self.work()?;
        }
        let Some(piece) = self.pieces.get(self.landed) else { return Ok(None) };
        self.landed += 1;
        if let (Job::SumAndFill(_), Some(counts)) = (self.job, self.own.counts.get()) {
            self.own.memory.wait(&|| counts.have(self.landed), &self.cancel_on.check())?;
        }
        let to = if self.job.fills() { piece.slice() } else { piece.own() };
        Ok(Some(part(&self.area, to)))
    }
}

impl HostSide for SharedRail {
    fn staged(&self) -> Result<()> {
        self.area.block.wait_host("staging", Access::Read, self.deadline)
    }

    fn note(&self) -> Vec<u8> {
        self.rail.map_or(Vec::new(), |rail| [rail as u64, self.own.at].map(u64::to_le_bytes).concat())
    }

    fn committed(&mut self, commit: Commit, _proxied: bool) -> Result<()> {
        drop(commit.window);
        let Some(rail) = self.rail else { return Ok(()) };
        let begins = |note: &Vec<u8>| {
            let words = |words: &[u8]| <[u8; 8]>::try_from(words).map(u64::from_le_bytes).ok();
            let mut all = note.chunks_exact(16).map(|entry| (words(&entry[..8]), words(&entry[8..])));
            all.find(|(of, _)| *of == Some(rail as u64))?.1
        };
        let told: Option<Vec<u64>> = commit.notes.iter().map(begins).collect();
        let Some(told) = told.filter(|told| told.len() == self.hosts.len()) else {
            // Others may use it.
            std::mem::forget(self.own.clone());
            let why = "a process has not told where its memory is".to_owned();
            return Err(Error::Transport { library: "shm", op: "meet", code: 0, why });
        };
        self.begins = told;
        let words = self.others().map(|host| Ok(self.counter(self.me, host)?.cast_const())).collect::<Result<_>>()?;
        let _ = self.own.counts.set(Counts(words, self.pieces.len()));
        Ok(())
    }
}

impl SharedRail {
    pub fn new(plan: &Plan<'_, '_, '_>, cuts: &[Cut<'_>], memory: Arc<dyn CommonMemory>) -> Result<Self> {
        let (hier, across) = (plan.hier, plan.hier.across);
        let hosts: Box<[usize]> = across.hosts.iter().map(|host| host.host).collect();
        let bytes = cuts.iter().fold(0, |at, cut| Piece::new(plan.share(cut), at, plan.job).end());
        let all = hosts.len() * LINE + bytes;
        let own = Arc::new(Taken { at: memory.take(all)?, memory, bytes: all, counts: OnceLock::new() });
        let first = own.memory.address(hier.link.world.host(), own.at, all)?;
        // SAFETY: this process's memory, which no other one uses until this one has told of it. It stays while `own`
        // does; the others touch it only between the commit and the last count.
        let area = unsafe {
            (0..hosts.len()).for_each(|host| store_word(first.add(host * LINE).cast(), 0));
            hier.adopt(first.add(hosts.len() * LINE), bytes, own.clone())?
        };
        Ok(SharedRail {
            cancel_on: CancelOn::of(hier),
            hosts,
            me: across.me,
            rail: hier.rail_map.of(across.me, across.here),
            members: hier.members(),
            dtype: plan.dtype,
            job: plan.job,
            deadline: hier.group.device().deadline(),
            pieces: Vec::with_capacity(cuts.len()),
            own,
            area,
            begins: Vec::new(),
            done: 0,
            landed: 0,
        })
    }

    /// The address of a process's bytes behind the counters.
    fn address(&self, host: usize, at: usize, bytes: usize) -> Result<*mut u8> {
        let begin = self.begins[host].saturating_add((self.hosts.len() * LINE) as u64);
        self.own.memory.address(self.hosts[host], begin.saturating_add(at as u64), bytes)
    }

    /// Where process `by` counts the pieces that it has done with, in the memory of `host`.
    fn counter(&self, host: usize, by: usize) -> Result<*mut u64> {
        let at = self.begins[host].saturating_add((by * LINE) as u64);
        Ok(self.own.memory.address(self.hosts[host], at, LINE)?.cast())
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.begins.len()).filter(|host| *host != self.me)
    }

    /// This process's part of the next piece.
    fn work(&mut self) -> Result<()> {
        let piece = &self.pieces[self.done];
        let (hosts, size) = (0..self.begins.len(), self.dtype.size());
        let ranges = |host: usize| -> &Ranges { &piece.share.owned[host] };
        if let Some(op) = self.job.sum() {
            for range in ranges(self.me) {
                let bytes = range.len() * size;
                let all = hosts.clone().map(|host| self.address(host, piece.at(range), bytes));
                let sources = all.collect::<Result<Vec<_>>>()?;
                let own = [self.address(self.me, piece.own_at(self.me, range), bytes)?];
                let to = if self.job.fills() { &sources[..] } else { &own };
                // SAFETY: memory of all processes, with the elements of this range, aligned for them. All have staged
                // them, and from the commit to its count only this process touches them.
                unsafe { fold_on_host(self.dtype, op, range.len(), &sources, to, &[], self.members) };
            }
        } else {
            for (host, range) in hosts.flat_map(|host| ranges(host).iter().map(move |range| (host, range))) {
                let bytes = range.len() * size;
                let from = self.address(host, piece.own_at(host, range), bytes)?;
                let to = self.address(self.me, piece.at(range), bytes)?;
                if from != to {
                    // SAFETY: the owner has staged them and does not write them again; this process's slice has no
                    // other writer.
                    unsafe { to.copy_from_nonoverlapping(from, bytes) };
                }
            }
        }
        self.done += 1;
        for host in self.others() {
            // SAFETY: the memory's counter of this process, which is alive until all have counted all.
            unsafe { store_word(self.counter(host, self.me)?, self.done as u64) };
        }
        Ok(())
    }
}
