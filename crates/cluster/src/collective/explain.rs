//! The answer of [`Group::explain`](gpu_pool::Group::explain) for a group of several processes: by the same cut and the
//! same steps as [`sums::sum`](super::sums::sum).

use super::{
    cut::Cut,
    device_pieces::{Inside, cuts},
    hierarchical::HierarchicalCall,
    pieces::PIECE,
    relay::Relay,
    sums::{gather, levels, scatter},
};
use crate::{
    runtime::{Call, collective::Hierarchy},
    traits::Transport,
};
use gpu_pool::{DType, Group, ReduceOp, Result};

/// How an `all_reduce` of so many elements is carried out.
#[track_caller]
pub(super) fn hierarchy(group: &Group<'_>, (dtype, op): (DType, ReduceOp), len: usize) -> Result<Hierarchy> {
    let call = Call::new("explain").elements(dtype, len).reducing(op);
    let hier = HierarchicalCall::new(group, &call, false)?;
    let (whole, (inner, outer), size) = (hier.cut(len, dtype), levels(op, dtype, hier.members()), dtype.size());
    let (transport, sums, pieces, overlapped) = match hier.transport()? {
        Transport::None(error) => return Err(error.clone()),
        Transport::Host(transport) => {
            let sums = "in the memory of the hosts, in the order of processes";
            let pieces = whole.pieces(PIECE / size);
            let overlapped = pieces.len() > 1;
            (transport.name(), sums, pieces, overlapped)
        }
        Transport::Device(transport) => {
            let n = hier.here.count();
            let (before, after) = (|cut: &Cut<'_>| scatter(cut, n), |cut: &Cut<'_>| gather(cut, n));
            let inside = Inside { dtype, reduce: Some(inner), before: &before, after: &after };
            let (cuts, overlapped) = cuts(&hier, &**transport, &whole, &inside);
            let relay = Relay::new(&hier, transport.clone(), overlapped)?;
            let sums = match relay.native(dtype, outer) {
                Some(_) if relay.in_place(dtype, op).is_some() => "by the transport, in the members' own memory",
                Some(_) => "by the transport",
                None => "by kernels, in the order of processes",
            };
            (transport.name(), sums, cuts, overlapped)
        }
    };
    // All pieces but the last one are equal.
    let (largest, n): (&Cut<'_>, _) = (&pieces[0], hier.here.count());
    let slice = (0..n).map(|here| largest.slice(here).len()).max().unwrap_or(0);
    Ok(Hierarchy {
        processes: hier.across.hosts.len(),
        rails: hier.rail_map.all.len(),
        transport,
        sums,
        pieces: pieces.len(),
        piece: slice * size,
        overlapped,
        inner,
        scatter: scatter(largest, n),
        gather: gather(largest, n),
    })
}
