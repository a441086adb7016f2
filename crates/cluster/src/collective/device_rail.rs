//! The rail between devices: a [`Relay`] and its stream, for the pieces of one collective.
//!
//! ```text
//! member's stream   before 0 | before 1 | ..      | after 0 | after 1 | ..
//! rail's stream                   rail 0 | rail 1 | ..
//! ```
//!
//! All memory is there, and all steps before are submitted, before the member arrives. Behind the one meeting all
//! pieces are submitted in one turn, in the order of commits, and then the steps after. From the commit on nothing here
//! looks at the gang. Events join the two streams, each recorded right behind its piece: one that is recorded later
//! would wait for the pieces behind it, too.
//!
//! Sums go over the transport's own all-reduce where all processes take part and their order is free; else the elements
//! go as messages, and this device's kernels add them up in the order of processes.
//!
//! **Bits.** A piece has the elements of all members at the same places, and inside and by this device's kernels they
//! are added up in one order wherever they lie: cuts change no bit. A sum of the transport's own has the order that it
//! has chosen for the size of a piece; between two processes there is only one order.
//!
//! **Why no kernel waits for ever.** Kernels of the steps inside wait for those of the other members of this process;
//! kernels of the rails for those of the same rail of other processes. On each device both are submitted in one order,
//! which is the same in all processes: all steps before, all rails, all steps after. So each kernel waits for earlier
//! ones only, or for its peers, which are always submitted: steps inside in the launch window of their own meeting,
//! rails in the turn of the commit (rules C1 and C3 of `docs/src/design/cluster.md`). Only room remains: a kernel that
//! waits must not keep the multiprocessors from one that it waits for. So:
//!
//! * The steps inside take few blocks (`GroupInternals::beside`), and the rails run beside them only where the
//!   device has room for these and for the most blocks of the transport's kernels together
//!   ([`DeviceTransport::overlaps`]). Else the same calls go to the member's own stream, one after the other.
//! * Where devices share a GPU, and so its hardware queues, a rail's second call may be in front of another rail's
//!   first one, here the one and elsewhere the other. So nothing is cut there, in all processes.
//!
//! [`DeviceTransport::overlaps`]: crate::traits::DeviceTransport::overlaps

use super::cut::{Cut, End, Share};
use super::hierarchical::{HierarchicalCall, copy_within};
use super::plan::{Job, Plan};
use super::rail::{Landed, Rail};
use super::relay::{Load, Relay, with_memory};
use crate::internals::*;
use crate::mutant::{self, Rule};
use crate::runtime::{Access, Address, Area, MOST, Part, Payload, Shape, record, wait_for};
use crate::traits::{DeviceTransport, Overlap, RailCall, RailMessage};
use gpu_pool::{DType, Error, Event, ReduceOp, Result};
use smallvec::{SmallVec, smallvec};
use std::{ops::Range, vec};

/// The most pieces: then all but a sixteenth of the first and the last step is hidden, at best.
pub const MOST_PIECES: usize = 16;

/// The pieces of a buffer, and whether rails run beside the steps inside: the same on all members of all processes.
pub(super) fn cuts<'c>(plan: &Plan<'c, '_, '_>, transport: &dyn DeviceTransport) -> (Vec<Cut<'c>>, bool) {
    let (hier, whole) = (plan.hier, plan.whole());
    let several = hier.across.hosts.iter().any(|host| host.ranks.len() > 1);
    let Some(Overlap { piece, blocks }) = transport.overlaps().filter(|_| several && hier.rail_map.direct) else {
        return (vec![whole], false);
    };
    let size = plan.dtype.size();
    let slice = whole.len.div_ceil(hier.rail_map.all.len()) * size;
    let cuts = whole.pieces(piece.max(slice.div_ceil(MOST_PIECES)) / size);
    let overlapped = cuts.len() > 1 && hier.here.count() > 1 && has_room(plan, &cuts[0], blocks);
    (cuts, overlapped)
}

/// Whether the kernels of a step inside that wait for each other, and so many blocks, fit on each device together.
fn has_room(plan: &Plan<'_, '_, '_>, cut: &Cut<'_>, blocks: u32) -> bool {
    let most = |shape: Shape, reduce: Option<ReduceOp>| {
        plan.hier.here.waiting_blocks((plan.dtype, reduce.unwrap_or(ReduceOp::Sum)), &shape)
    };
    let inside = most(plan.before(cut), plan.inner).max(most(plan.after(cut), None));
    inside.saturating_add(blocks) <= plan.hier.group.device().multiprocessors()
}

pub(super) struct DeviceRail<'t, 'g, 'd> {
    relay: &'t Relay<'t, 'g, 'd>,
    pieces: Vec<RailPiece<'t, 'g, 'd>>,
    carried: vec::IntoIter<DevicePiece>,
}

/// The output of a rail, for the step behind it.
pub(super) struct DevicePiece {
    left: Area,
    /// Behind the piece, if that runs beside other work.
    carried: Option<Event>,
}

impl<'t, 'g, 'd> DeviceRail<'t, 'g, 'd> {
    pub fn new(relay: &'t Relay<'t, 'g, 'd>) -> Self {
        DeviceRail { relay, pieces: Vec::new(), carried: Vec::new().into_iter() }
    }
}

impl Rail for DeviceRail<'_, '_, '_> {
    type Piece = DevicePiece;

    fn add(&mut self, plan: &Plan<'_, '_, '_>, cut: &Cut<'_>) -> Result<Area> {
        let piece = RailPiece::new(self.relay, plan, plan.share(cut))?;
        let own = piece.uses[0].0.clone();
        self.pieces.push(piece);
        Ok(own)
    }

    fn stage(&mut self, plan: &Plan<'_, '_, '_>) -> Result<()> {
        if self.relay.has_side_stream() {
            let staged = record(plan.hier.group.device().core(), plan.hier.call.op)?;
            self.pieces.last_mut().expect("one was added").staged = Some(staged);
        }
        Ok(())
    }

    fn meet(&mut self, plan: &Plan<'_, '_, '_>) -> Result<()> {
        let _here = plan.hier.op()?;
        let (_, commit) = plan.hier.meet(Payload::Nothing, |_| Vec::new())?;
        let carried = self.pieces.iter().map(RailPiece::submit).collect::<Result<Vec<_>>>();
        drop(commit.window);
        self.carried = plan.hier.done(self.relay.report(carried))?.into_iter();
        Ok(())
    }

    fn carry_next(&mut self) -> Result<Option<DevicePiece>> {
        Ok(self.carried.next())
    }
}

impl Landed for DevicePiece {
    fn land(self, plan: &Plan<'_, '_, '_>) -> Result<Area> {
        if let Some(carried) = &self.carried {
            wait_for(plan.hier.group.device().core(), plan.hier.call.op, carried)?;
        }
        Ok(self.left)
    }
}

struct RailPiece<'t, 'g, 'd> {
    hier: &'t HierarchicalCall<'g, 'd>,
    relay: &'t Relay<'t, 'g, 'd>,
    share: Share,
    work: Work,
    /// The memory. The step inside the process writes the first one.
    uses: SmallVec<[(Area, Access); 4]>,
    /// Behind that step, if it runs on another stream.
    staged: Option<Event>,
    left: Area,
}

enum Work {
    /// Each process's slice is summed into all of them, by the transport,
    Native(DType, ReduceOp),
    /// or by their owners. `to_all`: the sums go from their places in the slice to all.
    Sum { of: (DType, ReduceOp), parts: Parts, to_all: Option<Load> },
    /// Every process sends what it owns to all others.
    Fill(Load),
}

/// The input of a sum: a part from each other process, for each of the own ranges.
struct Parts {
    area: Area,
    load: Load,
    /// Zeros in the place of members that other members have spoken for, where a mean needs them.
    zeros: Option<Area>,
}

impl<'t, 'g, 'd> RailPiece<'t, 'g, 'd> {
    fn new(relay: &'t Relay<'t, 'g, 'd>, plan: &Plan<'_, '_, '_>, share: Share) -> Result<Self> {
        let (hier, dtype, fill) = (relay.hier, plan.dtype, plan.job.sum().is_none());
        let own = hier.scratch(if fill { share.own_bytes() } else { share.bytes() })?;
        let left = match plan.job {
            Job::SumAndFill(_) => own.clone(),
            Job::Sum(_) => hier.scratch(share.own_bytes())?,
            Job::Fill => hier.scratch(share.bytes())?,
        };
        let mut uses = match plan.job {
            Job::SumAndFill(_) => smallvec![(own.clone(), Access::Write)],
            _ => smallvec![(own.clone(), Access::Read), (left.clone(), Access::Write)],
        };
        let work = match plan.job {
            Job::Fill => Work::Fill(relay.load(messages(hier, share.to_all(true), &own, &left))?),
            Job::Sum(op) => {
                Work::Sum { of: (dtype, op), parts: room(relay, &share, &mut uses, (dtype, op))?, to_all: None }
            }
            Job::SumAndFill(op) => match relay.native(dtype, op) {
                Some(reduce) => Work::Native(dtype, reduce),
                None => {
                    let parts = room(relay, &share, &mut uses, (dtype, op))?;
                    let to_all = Some(relay.load(messages(hier, share.to_all(false), &own, &own))?);
                    Work::Sum { of: (dtype, op), parts, to_all }
                }
            },
        };
        Ok(RailPiece { hier, relay, share, work, uses, staged: None, left })
    }

    fn submit(&self) -> Result<DevicePiece> {
        let (op, stream) = (self.hier.call.op, self.relay.stream());
        // The step inside has ordered the first memory behind all that came before.
        let mut rest = &self.uses[..];
        if let Some(staged) = &self.staged {
            rest = &rest[1..];
            if !mutant::is(Rule::RailWaits) {
                wait_for(stream, op, staged)?;
            }
        }
        with_memory(stream, op, &self.uses, rest, || self.work())?;
        let carried = if self.relay.has_side_stream() { Some(record(stream, op)?) } else { None };
        Ok(DevicePiece { left: self.left.clone(), carried })
    }

    fn work(&self) -> Result<()> {
        let (own, share) = (&self.uses[0].0, &self.share);
        match &self.work {
            _ if share.slice.is_empty() => Ok(()),
            Work::Native(dtype, reduce) => {
                let (at, len) = (own.address, share.slice.len());
                self.relay.submit(&RailCall::AllReduce {
                    source: at,
                    destination: at,
                    len,
                    dtype: *dtype,
                    reduce: *reduce,
                })
            }
            Work::Sum { of, parts, to_all: Some(sums) } => {
                self.sum_parts(own, parts, *of, |range| own.address + share.at(range).start as u64)?;
                self.relay.send(sums)
            }
            Work::Sum { of, parts, to_all: None } => {
                self.sum_parts(own, parts, *of, |range| self.left.address + share.packed(share.me, range).start as u64)
            }
            Work::Fill(load) => {
                self.relay.send(load)?;
                // The own ranges are on this device already.
                share.own().iter().try_for_each(|range| {
                    let (from, to) = (share.packed(share.me, range), self.left.address + share.at(range).start as u64);
                    let source = own.address + from.start as u64;
                    copy_within(self.hier, self.relay.stream(), to, source, from.len())
                })
            }
        }
    }

    /// Sends and receives the parts, and combines them in the order of processes. `to`: where an own range goes.
    fn sum_parts(
        &self,
        own: &Area,
        parts: &Parts,
        (dtype, op): (DType, ReduceOp),
        to: impl Fn(&Range<usize>) -> Address,
    ) -> Result<()> {
        let (share, hosts, members) = (&self.share, self.share.owned.len(), self.hier.members());
        self.relay.send(&parts.load)?;
        for range in share.own() {
            let from = |host: usize| match host == share.me {
                true => own.address + share.at(range).start as u64,
                false => parts.area.address + share.arrived(host, range).start as u64,
            };
            let mut sources: SmallVec<[Address; MOST]> = (0..hosts).map(from).collect();
            let mut factors = SmallVec::<[f64; MOST]>::new();
            let mut op = op;
            match (&parts.zeros, op) {
                (Some(zeros), _) => sources.resize(members, zeros.address),
                (None, ReduceOp::Avg) => {
                    op = ReduceOp::Scaled(1.0);
                    factors.resize(hosts, 1.0 / members as f64);
                }
                _ => {}
            }
            self.combine(range.len(), (dtype, op), &sources, &factors, to(range))?;
        }
        Ok(())
    }

    /// `to` = the combination of the sources: as many in each step as a kernel can name.
    fn combine(
        &self,
        n: usize,
        (dtype, op): (DType, ReduceOp),
        sources: &[Address],
        factors: &[f64],
        to: Address,
    ) -> Result<()> {
        let (dev, bytes) = (self.hier.group.device(), n * dtype.size());
        let part = |&address: &Address| Part { address, bytes };
        let on = (&**self.relay.stream(), self.hier.call.op);
        let mut begin = 0;
        while begin < sources.len() {
            let first = begin == 0;
            let end = sources.len().min(begin + if first { MOST } else { MOST - 1 });
            let mut some: SmallVec<[Part; MOST]> = (!first).then_some(part(&to)).into_iter().collect();
            some.extend(sources[begin..end].iter().map(part));
            let mut by: SmallVec<[f64; MOST]> = (!first && !factors.is_empty()).then_some(1.0).into_iter().collect();
            by.extend(factors.get(begin..end).unwrap_or_default().iter().copied());
            dev.combine(on, (dtype, op), n, &by, &some, part(&to))?;
            begin = end;
        }
        Ok(())
    }
}

fn room(
    relay: &Relay<'_, '_, '_>,
    share: &Share,
    uses: &mut SmallVec<[(Area, Access); 4]>,
    (dtype, op): (DType, ReduceOp),
) -> Result<Parts> {
    let (hier, own) = (relay.hier, share.own_bytes());
    let area = hier.scratch(own * (share.owned.len() - 1))?;
    let mean = op == ReduceOp::Avg;
    let float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
    if mean && hier.members() > MOST && !float {
        let why = format_args!("an average of {dtype:?} over more than {MOST} members of several processes");
        return Err(Error::invalid_at(hier.call.site, hier.call.op, why));
    }
    let pads = mean && hier.members() <= MOST;
    let load = relay.load(messages(hier, share.to_owners(), &uses[0].0, &area))?;
    let zeros = pads.then(|| hier.zeros(own)).transpose()?;
    uses.push((area.clone(), Access::Write));
    uses.extend(zeros.iter().map(|zeros| (zeros.clone(), Access::Read)));
    Ok(Parts { area, load, zeros })
}

fn messages(hier: &HierarchicalCall<'_, '_>, ends: Vec<End>, from: &Area, into: &Area) -> Vec<RailMessage> {
    let number = |host: usize| hier.across.hosts[host].host;
    let message = |end| match end {
        End::Send(host, range) => RailMessage::send(number(host), from.address + range.start as u64, range.len()),
        End::Receive(host, range) => RailMessage::receive(number(host), into.address + range.start as u64, range.len()),
    };
    ends.into_iter().map(message).collect()
}
