//! Sums by a transport between devices itself, such as NCCL's.

use super::{hierarchical::copy_within, relay::Relay};
use crate::{
    internals::*,
    runtime::{
        collective::{Area, Payload},
        memory::Access,
    },
    traits::RailCall,
};
use gpu_pool::{DType, ReduceOp, Result};

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

    /// The same in the members' own memory: nothing is to be done inside the processes, since each has one member.
    pub fn in_place(&self, dtype: DType, op: ReduceOp) -> Option<ReduceOp> {
        let alone = self.hier.members() == self.hier.across.hosts.len();
        // A member's own factor is rounded to the elements' type.
        let kept = !matches!(op, ReduceOp::Scaled(_)) || matches!(dtype, DType::F32 | DType::F64);
        if alone && kept { self.native(dtype, op) } else { None }
    }

    /// The members' buffers are summed into all of them, without scratch. Until the commit nothing is touched.
    #[track_caller]
    pub fn sum_in_place(&self, [source, destination]: [&Area; 2], dtype: DType, reduce: ReduceOp) -> Result<()> {
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
        let call = RailCall::AllReduce { at: destination.address, len: bytes / dtype.size(), dtype, reduce };
        let copied = match apart {
            true => copy_within(hier, self.stream(), destination.address, source.address, bytes),
            false => Ok(()),
        };
        let submitted = copied.and_then(|()| if bytes > 0 { self.submit(&call) } else { Ok(()) });
        drop(commit.window);
        hier.finish(access, submitted)
    }
}
