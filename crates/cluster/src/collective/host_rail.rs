//! The rail through the memory of the hosts. The step before it leaves a member's elements in page-locked memory:
//! directly on software GPUs, which work on the host's memory as fast.
//!
//! An all_reduce needs two exchanges for each piece: the second one of a piece goes with the first one of the next. The
//! exchanges need neither the gang nor a device: the member's thread does them, or another one
//! ([`pending`](super::pending)).

use super::cut::{Cut, End, Share};
use super::hierarchical::part;
use super::message_route::CancelOn;
use super::plan::{Job, Plan};
use super::rail::{HostSide, Landed, Rail};
use crate::internals::*;
use crate::runtime::{Address, Area, HostMembers, fold_on_host};
use crate::traits::{Commit, HostTransport, Message, Tag};
use gpu_pool::{DType, Error, PinnedBuffer, ReduceOp, Result};
use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    ops::Range,
    sync::Arc,
};

/// The most bytes of a piece on one rail. On two cores 1 to 4 MiB take the same time, and on a busy machine each piece
/// costs the time until its threads run.
pub const PIECE: usize = 2 << 20;

/// Memory for messages, by where they begin; after the exchange, the received messages.
type Room = BTreeMap<usize, PinnedBuffer<u8>>;

pub(super) struct HostPiece {
    share: Share,
    /// The input of this member: the slice, or if nothing is summed the own ranges, one behind the other.
    staged: Arc<PinnedBuffer<u8>>,
    parts: Room,
    /// The own ranges, one behind the other: the sum, or what is staged.
    own: Arc<PinnedBuffer<u8>>,
    all: Room,
    /// The device's memory for the step before, unless that works on `staged` itself.
    aside: Option<Area>,
    /// Where the step behind finds what has come.
    to: Area,
    /// It has come there without a copy.
    direct: bool,
}

pub(super) struct HostRail {
    transport: Arc<dyn HostTransport>,
    cancel_on: CancelOn,
    hosts: Box<[usize]>,
    /// By process: the device of the member on this rail.
    devices: Box<[u32]>,
    me: usize,
    members: usize,
    phase: u32,
    pieces: VecDeque<HostPiece>,
    dtype: DType,
    job: Job,
    numbers: Vec<u64>,
    /// The first piece has had the first of its two exchanges.
    begun: bool,
}

pub(super) fn cuts<'t>(plan: &Plan<'t, '_, '_>) -> Vec<Cut<'t>> {
    plan.whole().pieces(PIECE / plan.dtype.size())
}

impl Rail for HostRail {
    type Piece = HostPiece;

    fn add(&mut self, plan: &Plan<'_, '_, '_>, cut: &Cut<'_>) -> Result<Area> {
        let (hier, share, software) = (plan.hier, plan.share(cut), plan.hier.group.device().is_software());
        let (mut parts, mut all, mut own) = (Room::new(), Room::new(), None);
        let mut whole = None;
        if self.job.sum().is_some() {
            let received = share.to_owners().into_iter().filter_map(|end| match end {
                End::Receive(_, range) => Some(range),
                End::Send(..) => None,
            });
            parts = split(hier.pinned(share.own_bytes() * (share.owned.len() - 1))?, received);
        }
        if self.job.fills() {
            let memory = hier.pinned(share.bytes())?;
            // One own range lies there as it goes to the others.
            whole = Some(area(&memory)).filter(|_| share.own().len() <= 1);
            let mut ranges: Vec<_> = share.owned.iter().flatten().map(|range| share.at(range)).collect();
            ranges.sort_by_key(|range| range.start);
            all = split(memory, ranges.into_iter());
            for range in share.own() {
                own = all.remove(&share.at(range).start).filter(|_| whole.is_some());
            }
        }
        let own = match own {
            Some(own) => Arc::new(own),
            None => Arc::new(hier.pinned(share.own_bytes())?),
        };
        let (staged, left) = match self.job {
            Job::Fill => (own.clone(), share.bytes()),
            Job::Sum(_) => (Arc::new(hier.pinned(share.bytes())?), share.own_bytes()),
            Job::SumAndFill(_) => (Arc::new(hier.pinned(share.bytes())?), share.bytes()),
        };
        let there = if self.job.fills() { whole } else { Some(area(&own)) }.filter(|_| software);
        let aside = if software { None } else { Some(hier.scratch(staged.len())?) };
        let direct = there.is_some();
        let to = match (there, &aside) {
            (Some(there), _) => there,
            (None, Some(aside)) if left == aside.bytes.len() => aside.clone(),
            (None, _) => hier.scratch(left)?,
        };
        let from = aside.clone().unwrap_or_else(|| area(&staged));
        self.pieces.push_back(HostPiece { share, staged, parts, own, all, aside, to, direct });
        Ok(from)
    }

    fn stage(&mut self, plan: &Plan<'_, '_, '_>) -> Result<()> {
        let HostPiece { staged, aside, .. } = self.pieces.back().expect("one was added");
        aside.as_ref().map_or(Ok(()), |from| plan.hier.copy_down(from, staged))
    }

    fn meet(&mut self, plan: &Plan<'_, '_, '_>) -> Result<()> {
        self.meet_here(plan)
    }

    fn carry_next(&mut self) -> Result<Option<HostPiece>> {
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
}

impl HostSide for HostRail {
    fn staged(&self) -> Result<()> {
        self.pieces.iter().try_for_each(|piece| piece.staged.as_slice().map(drop))
    }

    fn note(&self) -> Vec<u8> {
        Vec::new()
    }

    fn committed(&mut self, commit: Commit, proxied: bool) -> Result<()> {
        self.phase = if proxied { Tag::PROXIED } else { 0 };
        // Nothing waits on a device: the next collective may go on.
        drop(commit.window);
        self.numbers = commit.numbers;
        Ok(())
    }
}

impl HostRail {
    pub fn new(plan: &Plan<'_, '_, '_>, transport: Arc<dyn HostTransport>) -> Self {
        let across = plan.hier.across;
        // A member without a rail sends and receives nothing.
        let device =
            |host: &HostMembers| host.ranks.get(across.here).map_or(0, |&rank| across.places[rank].device as u32);
        HostRail {
            transport,
            cancel_on: CancelOn::of(plan.hier),
            hosts: across.hosts.iter().map(|host| host.host).collect(),
            devices: across.hosts.iter().map(device).collect(),
            me: across.me,
            members: plan.hier.members(),
            phase: 0,
            pieces: VecDeque::new(),
            dtype: plan.dtype,
            job: plan.job,
            numbers: Vec::new(),
            begun: false,
        }
    }

    /// The second messages of the first piece, with the first ones of the next. `two`: each piece has both.
    fn exchange(&mut self, two: bool) -> Result<()> {
        let (sum, next) = (self.job.sum(), usize::from(self.begun));
        let first = Some(next).filter(|&next| sum.is_some() && next < self.pieces.len());
        let second = Some(0).filter(|_| self.job.fills() && self.begun == two);
        let (mut messages, mut sends, mut places) = (Vec::new(), Vec::new(), Vec::new());
        for (phase, piece) in [first, second].into_iter().enumerate().filter_map(|(n, k)| Some((n, k?))) {
            let piece = &mut self.pieces[piece];
            let (ends, bytes, mut room) = match phase {
                0 => (piece.share.to_owners(), &piece.staged, mem::take(&mut piece.parts)),
                _ => (piece.share.to_all(true), &piece.own, mem::take(&mut piece.all)),
            };
            let tag = |from: usize, to: usize| {
                let phase = self.phase + phase as u32;
                Tag { number: self.numbers[from], phase, rail: self.devices[to] }
            };
            for end in ends {
                match end {
                    End::Send(to, range) => {
                        let (tag, to) = (tag(self.me, to), self.hosts[to]);
                        sends.push(Message::Send { to, tag, bytes: bytes.clone(), range });
                    }
                    End::Receive(from, range) => {
                        let into = room.remove(&range.start).expect("it was split for these messages");
                        let (tag, from) = (tag(from, self.me), self.hosts[from]);
                        messages.push(Message::Receive { from, tag, into, len: range.len() });
                        places.push((phase, range.start));
                    }
                }
            }
        }
        messages.extend(sends);
        let done = self.transport.exchange(messages, &self.cancel_on.check())?;
        let come = done.into_iter().filter_map(|done| match done {
            Message::Receive { into, .. } => Some(into),
            Message::Send { .. } => None,
        });
        let mut rooms = [Room::new(), Room::new()];
        places.into_iter().zip(come).for_each(|((phase, start), into)| drop(rooms[phase].insert(start, into)));
        let [parts, all] = rooms;
        if let Some((k, op)) = first.zip(sum) {
            self.pieces[k].fold(&parts, (self.dtype, op), self.members)?;
        }
        if let Some(k) = second {
            self.pieces[k].all = all;
        }
        Ok(())
    }
}

impl HostPiece {
    /// Combines this process's elements and the parts that have come, in the order of processes.
    fn fold(&mut self, parts: &Room, (dtype, op): (DType, ReduceOp), members: usize) -> Result<()> {
        let (share, staged) = (&self.share, &self.staged);
        let sum = Arc::get_mut(&mut self.own).expect("nobody sends the sum yet");
        let pointer = |buffer: &PinnedBuffer<u8>| Ok::<_, Error>(buffer.as_slice()?.as_ptr().cast_mut());
        for range in share.own() {
            let source = |host: usize| match host == share.me {
                true => Ok(pointer(staged)?.wrapping_add(share.at(range).start)),
                false => pointer(&parts[&share.arrived(host, range).start]),
            };
            let sources = (0..share.owned.len()).map(source).collect::<Result<Vec<_>>>()?;
            let to = sum.as_mut_slice()?[share.packed(share.me, range)].as_mut_ptr();
            // SAFETY: each source has the elements of this range, in page-locked memory that is aligned for them, at
            // multiples of their size. All copies to it are over, and `sum` is this call's alone.
            unsafe { fold_on_host(dtype, op, range.len(), &sources, &[to], &[], members) };
        }
        Ok(())
    }
}

impl Landed for HostPiece {
    fn land(self, plan: &Plan<'_, '_, '_>) -> Result<Area> {
        let HostPiece { share, own, all, to, direct, .. } = self;
        if direct {
            return Ok(to);
        }
        for range in share.own() {
            let (packed, place) = (share.packed(share.me, range), share.at(range));
            let place = if plan.job.fills() { place } else { packed.clone() };
            plan.hier.upload(&own, packed, &part(&to, place))?;
        }
        for (start, from) in &all {
            plan.hier.upload(from, 0..from.len(), &part(&to, *start..start + from.len()))?;
        }
        Ok(to)
    }
}

/// Cuts memory into these ranges, which lie one behind the other.
fn split(mut rest: PinnedBuffer<u8>, ranges: impl Iterator<Item = Range<usize>>) -> Room {
    let cut = |range: Range<usize>| {
        let tail = rest.split_off(range.len());
        (range.start, mem::replace(&mut rest, tail))
    };
    ranges.map(cut).collect()
}

fn area(of: &PinnedBuffer<u8>) -> Area {
    Area { block: of.block().clone(), address: of.ptr() as Address, bytes: of.start()..of.start() + of.len() }
}
