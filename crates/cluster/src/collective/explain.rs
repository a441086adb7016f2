//! What [`Group::explain`](crate::Group::explain) tells of a group of several processes: by the same cut and the same
//! steps as [`sums::all_reduce`](super::sums::all_reduce).

use super::{
    super::{Group, transport::Transport},
    cut::Cut,
    device_pieces::{Inside, cuts},
    hierarchical::HierarchicalCall,
    pieces::PIECE,
    sums::{gather, levels, scatter},
};
use crate::{
    error::Result,
    fabric::{
        call::Call,
        plan::Shape,
        types::{DType, ReduceOp},
    },
};

/// How an all_reduce of several processes is carried out.
pub(crate) struct Hierarchy {
    pub processes: usize,
    pub rails: usize,
    pub transport: &'static str,
    /// How the processes' sums are added up.
    pub sums: &'static str,
    pub pieces: usize,
    /// Bytes of the largest piece on one rail.
    pub piece: usize,
    /// Whether rails and the steps inside overlap.
    pub overlapped: bool,
    /// The operation inside each process.
    pub inner: ReduceOp,
    /// The first and the last step inside, of the largest piece.
    pub scatter: Shape,
    pub gather: Shape,
}

impl Group<'_> {
    /// How an `all_reduce` of so many elements is carried out; none in a group of one process.
    #[track_caller]
    pub(crate) fn hierarchy(&self, dtype: DType, op: ReduceOp, len: usize) -> Result<Option<Hierarchy>> {
        let Some(across) = &self.across else { return Ok(None) };
        let call = Call::new("explain").elements(dtype, len).reducing(op);
        let hier = HierarchicalCall::new(self, across, &call, false)?;
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
                let relay = hier.relay(transport.clone(), overlapped)?;
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
        Ok(Some(Hierarchy {
            processes: across.hosts.len(),
            rails: hier.rail_map.all.len(),
            transport,
            sums,
            pieces: pieces.len(),
            piece: slice * size,
            overlapped,
            inner,
            scatter: scatter(largest, n),
            gather: gather(largest, n),
        }))
    }
}
