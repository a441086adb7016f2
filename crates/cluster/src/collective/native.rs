//! Sums by a transport between devices itself, such as NCCL's; and by own kernels between GPUs of one host.

use super::{hierarchical::copy_within, relay::Relay};
use crate::{
    internals::*,
    runtime::{
        collective::{Area, LonePad, MOST, Payload, Trip},
        driver::Address,
        memory::Access,
    },
    traits::RailCall,
};
use gpu_pool::{DType, ReduceOp, Result};
use smallvec::SmallVec;

impl Relay<'_, '_, '_> {
    /// The operation by which the transport itself may sum slices up, if it may.
    pub fn native(&self, dtype: DType, op: ReduceOp) -> Option<ReduceOp> {
        let hier = self.hier;
        let whole = hier.across.hosts.len() == hier.link.world.devices().len();
        let free = !hier.group.device().rank_order();
        let float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
        let op = match op {
            // The mean of all members, not of the processes.
            ReduceOp::Avg => float.then(|| ReduceOp::Scaled(1.0 / hier.members() as f64))?,
            op => op,
        };
        (whole && hier.rail_map.direct && free && self.transport.can(dtype, op)).then_some(op)
    }

    /// How sums are made in the members' own memory: nothing is to be done inside the processes, since each has one
    /// member.
    pub fn in_place(&self, dtype: DType, op: ReduceOp, len: usize) -> Option<InPlace> {
        if self.hier.members() != self.hier.across.hosts.len() {
            return None;
        }
        if self.pad(dtype, op, len).is_ok() {
            return Some(InPlace::Own(op));
        }
        // A member's own factor is rounded to the elements' type.
        let kept = !matches!(op, ReduceOp::Scaled(_)) || matches!(dtype, DType::F32 | DType::F64);
        if kept { self.native(dtype, op).map(InPlace::Library) } else { None }
    }

    /// The pad by which own kernels sum up so many elements; or why not.
    pub fn pad(&self, dtype: DType, op: ReduceOp, len: usize) -> std::result::Result<&LonePad, String> {
        let (pad, members) = (self.transport.pad()?, self.hier.members());
        let most = pad.most(members);
        match () {
            () if members < 2 || members != self.hier.across.hosts.len() => {
                Err("not one member in each process".into())
            }
            () if !LonePad::sums(dtype, op) => Err("they add up floats, without factors".into()),
            () if len * dtype.size() > most => Err(format!("they take up to {most} bytes")),
            () => Ok(pad),
        }
    }

    /// The members' buffers are summed into all of them, without scratch. Until the commit nothing is touched.
    #[track_caller]
    pub fn sum_in_place(&self, [source, destination]: [&Area; 2], dtype: DType, way: InPlace) -> Result<()> {
        let (hier, bytes) = (self.hier, destination.bytes.len());
        let apart = source.address != destination.address && bytes > 0;
        let mut access = hier.op()?;
        if apart {
            access.touch(&source.block, source.bytes.clone(), Access::Read, false)?;
        }
        access.touch(&destination.block, destination.bytes.clone(), Access::Write, false)?;
        access.reserve()?;
        hier.registered.set(hier.registered_at(destination));
        let (_, commit) = hier.meet(Payload::Nothing, |_| Vec::new())?;
        let at = destination.address;
        let submitted = match way {
            _ if bytes == 0 => Ok(()),
            InPlace::Own(op) => self.sum_by_kernels([source.address, at], bytes, (dtype, op)),
            InPlace::Library(reduce) => {
                let call = RailCall::AllReduce { at, len: bytes / dtype.size(), dtype, reduce };
                let copied = match apart {
                    true => copy_within(hier, self.stream(), at, source.address, bytes),
                    false => Ok(()),
                };
                copied.and_then(|()| self.submit(&call))
            }
        };
        drop(commit.window);
        hier.finish(access, submitted)
    }

    /// Launches this member's kernel, in the turn of the commit.
    fn sum_by_kernels(&self, at: [Address; 2], bytes: usize, of: (DType, ReduceOp)) -> Result<()> {
        let (hier, dev, n) = (self.hier, self.hier.group.device(), bytes / of.0.size());
        let pad = self.pad(of.0, of.1, n).expect("chosen for it");
        let members: SmallVec<[usize; MOST]> = hier.across.places.iter().map(|place| place.host).collect();
        let (me, place, deadline) = (hier.group.rank(), dev.own_gang().place(), dev.deadline());
        let trip = Trip { members: &members, me, of, n, at, place, deadline };
        let (stream, handle) = (self.stream(), dev.handle());
        let launched = pad.in_turn(stream, || {
            // SAFETY: the caller has an `Op` for the memory, which orders and records this use of it. All members have
            // committed the same call, and the window gives the launches the order of the commits.
            handle.check(hier.call.op, unsafe { pad.sum(stream.raw, &trip) })
        });
        launched.map_err(|error| self.transport.broken(error))
    }
}

/// How members' own memory is summed up.
#[derive(Clone, Copy)]
pub(super) enum InPlace {
    /// By kernels of the members' GPUs, which write into each other's [pads](LonePad).
    Own(ReduceOp),
    /// By the transport.
    Library(ReduceOp),
}
