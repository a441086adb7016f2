//! What [`Group::explain`](crate::Group::explain) tells of a group of several processes: by the same cut and the same
//! steps as [`sums::all_reduce`](super::sums::all_reduce).

use super::{
    super::{Group, transport::Transport},
    cut::Cut,
    device_pieces::{Inside, cuts},
    pieces::PIECE,
    sums::{gather, levels, scatter},
    trip::Trip,
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
    /// Whether rails run beside the steps inside.
    pub beside: bool,
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
        let trip = Trip::new(self, across, &call, false)?;
        let (whole, (inner, outer), size) = (trip.cut(len, dtype), levels(op, dtype, trip.members()), dtype.size());
        let (transport, sums, pieces, beside) = match trip.transport()? {
            Transport::None(error) => return Err(error.clone()),
            Transport::Host(transport) => {
                let sums = "in the memory of the hosts, in the order of processes";
                let pieces = whole.pieces(PIECE / size);
                let beside = pieces.len() > 1;
                (transport.name(), sums, pieces, beside)
            }
            Transport::Device(transport) => {
                let n = trip.here.count();
                let (before, after) = (|cut: &Cut<'_>| scatter(cut, n), |cut: &Cut<'_>| gather(cut, n));
                let inside = Inside { dtype, reduce: Some(inner), before: &before, after: &after };
                let (cuts, beside) = cuts(&trip, &**transport, &whole, &inside);
                let way = trip.way(transport.clone(), beside)?;
                let sums = match way.native(dtype, outer) {
                    Some(_) if way.in_place(dtype, op).is_some() => "by the transport, in the members' own memory",
                    Some(_) => "by the transport",
                    None => "by kernels, in the order of processes",
                };
                (transport.name(), sums, cuts, beside)
            }
        };
        // All pieces but the last one are equal.
        let (largest, n): (&Cut<'_>, _) = (&pieces[0], trip.here.count());
        let slice = (0..n).map(|here| largest.slice(here).len()).max().unwrap_or(0);
        Ok(Some(Hierarchy {
            processes: across.hosts.len(),
            rails: trip.lanes.all.len(),
            transport,
            sums,
            pieces: pieces.len(),
            piece: slice * size,
            beside,
            inner,
            scatter: scatter(largest, n),
            gather: gather(largest, n),
        }))
    }
}
