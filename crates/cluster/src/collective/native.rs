//! Calls of a transport between devices itself, such as NCCL: sums of slices, and where each process has one member,
//! the whole collective in the members' own memory. There small sums go by own kernels, if the GPUs have
//! [pads](LonePad).

use super::hierarchical::copy_within;
use super::plan::{Job, Plan};
use super::relay::Relay;
use crate::internals::*;
use crate::runtime::{Access, Across, Address, Area, LonePad, MOST, Payload, Request, Trip};
use crate::traits::{DeviceTransport, RailCall};
use gpu_pool::{DType, ReduceOp, Result};
use smallvec::SmallVec;

/// A call in the members' own memory. Sums: by this operation, in parts of so many elements.
#[derive(Clone, Copy, Debug)]
pub(super) enum Direct {
    AllReduce(ReduceOp),
    Own(ReduceOp),
    ReduceScatter(ReduceOp, usize),
    AllGather,
    /// Of this host.
    Broadcast(usize),
}

impl Relay<'_, '_, '_> {
    /// The operation by which the transport itself may sum slices up, if it may.
    pub fn native(&self, dtype: DType, op: ReduceOp) -> Option<ReduceOp> {
        let hier = self.hier;
        let free = !hier.group.device().rank_order();
        let float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
        let op = match op {
            // The mean of all members, not of the processes.
            ReduceOp::Avg => float.then(|| ReduceOp::Scaled(1.0 / hier.members() as f64))?,
            op => op,
        };
        (self.is_whole() && free && self.transport.can(dtype, op)).then_some(op)
    }

    /// The call that does all of a plan in the members' own memory, if each process has one. All members find the same.
    /// `own`: the request's own kernel does it.
    pub fn direct(&self, plan: &Plan<'_, '_, '_>, op: ReduceOp, own: bool) -> Option<Direct> {
        let (hier, dtype) = (self.hier, plan.dtype);
        if own {
            return Some(Direct::Own(op));
        }
        if hier.members() != hier.across.hosts.len() {
            return None;
        }
        // A member's own factor is rounded to the elements' type.
        let kept = !matches!(op, ReduceOp::Scaled(_)) || matches!(dtype, DType::F32 | DType::F64);
        let sum = || if kept { self.native(dtype, op) } else { None };
        // The transport knows the parts by the numbers of hosts.
        let mut hosts = hier.across.hosts.iter().enumerate();
        let in_order = hosts.all(|(k, host)| host.host == k && host.ranks[..] == [k]);
        let copies = in_order && self.is_whole() && self.transport.copies();
        match plan.job {
            Job::SumAndFill(_) if self.pad(dtype, plan.whole().len).is_ok() => Some(Direct::Own(op)),
            Job::SumAndFill(_) => Some(Direct::AllReduce(sum()?)),
            Job::Sum(_) if in_order => plan.even().and_then(|len| Some(Direct::ReduceScatter(sum()?, len))),
            Job::Fill if copies && plan.even().is_some() => Some(Direct::AllGather),
            Job::Fill if copies => plan.root().map(Direct::Broadcast),
            Job::Sum(_) | Job::Fill => None,
        }
    }

    /// The pad by which own kernels sum up so many elements; or why not.
    pub fn pad(&self, dtype: DType, len: usize) -> std::result::Result<&LonePad, String> {
        let pad = pad_of(&*self.transport, self.hier.across)?;
        let most = pad.most(self.hier.members());
        match () {
            () if !LonePad::sums(dtype) => Err("they add up floats".into()),
            () if len * dtype.size() > most => Err(format!("they take up to {most} bytes")),
            () => Ok(pad),
        }
    }

    /// Submits that call, without scratch and without a copy. Until the commit nothing is touched.
    pub fn call_directly(&self, plan: &Plan<'_, '_, '_>, request: &Request, direct: Direct) -> Result<()> {
        let (hier, whole, dtype) = (self.hier, plan.whole(), plan.dtype);
        let (mut source, mut destination) = (plan.from(request, &whole), plan.to(request, &whole));
        let registered = hier.is_registered(&source) || hier.is_registered(&destination);
        let (mut back, mut copied) = (None, false);
        match direct {
            // In place, so the call's text has all that must be alike.
            Direct::AllReduce(_) | Direct::Own(_) => {
                hier.registered.set(hier.registered_at(&destination));
                copied = registered && matches!(direct, Direct::AllReduce(_));
            }
            // Other members' memory may not be registered, so this member's must not be.
            _ if registered => {
                let aside = [hier.scratch(source.bytes.len())?, hier.scratch(destination.bytes.len())?];
                hier.copy(&source, &aside[0])?;
                back = Some(destination);
                [source, destination] = aside;
            }
            _ => {}
        }
        copied |= matches!(direct, Direct::Broadcast(root) if root == hier.group.rank());
        let (from, to, bytes) = (source.address, destination.address, source.bytes.len());
        copied &= from != to && bytes > 0;
        let mut access = hier.op()?;
        let mut touch = |area: &Area, kind| access.touch(&area.block, area.bytes.clone(), kind, false);
        match (contains(&destination, &source), contains(&source, &destination)) {
            (true, _) => touch(&destination, Access::Write)?,
            (_, true) => touch(&source, Access::Write)?,
            _ => touch(&source, Access::Read).and_then(|()| touch(&destination, Access::Write))?,
        }
        for (area, kind) in &request.extra {
            access.touch(&area.block, area.bytes.clone(), *kind, false)?;
        }
        access.reserve()?;
        // Kernels need the members' factors, which may differ.
        let factor = match direct {
            Direct::Own(ReduceOp::Scaled(factor)) => factor.to_le_bytes().to_vec(),
            _ => Vec::new(),
        };
        let (_, commit) = hier.meet(Payload::Nothing, |_| factor)?;
        let (elements, parts) = (destination.bytes.len() / dtype.size(), hier.members());
        let submit = || {
            let call = match direct {
                Direct::Own(_) => return self.sum_by_kernels([from, to], elements, request, &commit.notes),
                Direct::AllReduce(reduce) => {
                    let source = if copied { to } else { from };
                    RailCall::AllReduce { source, destination: to, len: elements, dtype, reduce }
                }
                Direct::ReduceScatter(reduce, len) => {
                    RailCall::ReduceScatter { source: from, destination: to, len, parts, dtype, reduce }
                }
                Direct::AllGather => RailCall::AllGather { source: from, destination: to, bytes, parts },
                Direct::Broadcast(root) => RailCall::Broadcast { at: to, bytes: destination.bytes.len(), root },
            };
            self.submit(&call)
        };
        let copy = if copied { copy_within(hier, self.stream(), to, from, bytes) } else { Ok(()) };
        let submitted = self.report(copy.and_then(|()| if elements > 0 { submit() } else { Ok(()) }));
        drop(commit.window);
        hier.finish(access, submitted)?;
        back.map_or(Ok(()), |back| hier.copy(&destination, &back))
    }

    fn sum_by_kernels(&self, at: [Address; 2], n: usize, request: &Request, notes: &[Vec<u8>]) -> Result<()> {
        let (hier, dev) = (self.hier, self.hier.group.device());
        let pad = self.transport.pad().expect("chosen for it");
        let members: SmallVec<[usize; MOST]> = hier.across.places.iter().map(|place| place.host).collect();
        let mut factors: SmallVec<[f64; MOST]> = SmallVec::new();
        if let ReduceOp::Scaled(_) = request.reduce {
            factors.resize(members.len(), 0.0);
            for (host, note) in hier.across.hosts.iter().zip(notes) {
                factors[host.ranks[0]] = note.first_chunk().map_or(0.0, |bytes| f64::from_le_bytes(*bytes));
            }
        }
        let (me, place, deadline) = (hier.group.rank(), dev.own_gang().place(), dev.deadline());
        let (of, own) = ((request.dtype, request.reduce), request.own.as_deref());
        let trip = Trip { members: &members, me, of, factors: &factors, own, n, at, place, deadline };
        let (stream, handle) = (self.stream(), dev.handle());
        let launched = pad.in_turn(stream, || {
            // SAFETY: the caller has an `Op` for the memory, which orders and records this use of it. All members have
            // committed the same call, and the window gives the launches the order of the commits.
            handle.check(hier.call.op, unsafe { pad.launch(stream.raw, &trip) })
        });
        launched.map_err(|error| self.transport.broken(error))
    }

    fn is_whole(&self) -> bool {
        let hier = self.hier;
        hier.across.hosts.len() == hier.link.world.devices().len() && hier.rail_map.direct
    }
}

/// The pad of members of which each process has one; or why there is none.
pub(super) fn pad_of<'t>(
    transport: &'t dyn DeviceTransport,
    across: &Across,
) -> std::result::Result<&'t LonePad, String> {
    let (pad, members) = (transport.pad()?, across.places.len());
    let each_one = members > 1 && members == across.hosts.len();
    if each_one { Ok(pad) } else { Err("not one member in each process".into()) }
}

fn contains(outer: &Area, inner: &Area) -> bool {
    let end = |area: &Area| area.address + area.bytes.len() as u64;
    outer.address <= inner.address && end(inner) <= end(outer)
}
