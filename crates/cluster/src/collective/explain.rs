//! The answer of [`Group::explain`](gpu_pool::Group::explain) for a group of several processes: by the same cut and the
//! same steps as [`sums::sum`](super::sums::sum).

use super::{
    cut::Cut,
    device_pieces::{Inside, cuts},
    hierarchical::HierarchicalCall,
    native::InPlace,
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
            (transport.name(), sums.to_owned(), pieces, overlapped)
        }
        Transport::Device(transport) => {
            let n = hier.here.count();
            let (before, after) = (|cut: &Cut<'_>| scatter(cut, n), |cut: &Cut<'_>| gather(cut, n));
            let inside = Inside { dtype, reduce: Some(inner), before: &before, after: &after };
            let (cuts, overlapped) = cuts(&hier, &**transport, &whole, &inside);
            let relay = Relay::new(&hier, transport.clone(), overlapped)?;
            let way = relay.in_place(dtype, op, len);
            let sums = match (&way, relay.native(dtype, outer)) {
                (Some(InPlace::Own(_)), _) => "by own kernels between the GPUs, in the order of ranks",
                (Some(InPlace::Library(_)), _) => "by the transport, in the members' own memory",
                (None, Some(_)) => "by the transport",
                (None, None) => "by kernels, in the order of processes",
            };
            match (way, relay.pad(dtype, len)) {
                (Some(InPlace::Own(_)), _) => ("inbox", sums.to_owned(), vec![whole.clone()], false),
                (_, pad) => {
                    let why = pad.err().filter(|why| !why.is_empty());
                    let why = why.map(|why| format!("; not by own kernels: {why}")).unwrap_or_default();
                    (transport.name(), format!("{sums}{why}"), cuts, overlapped)
                }
            }
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
