//! What [`Group::explain`](crate::Group::explain) tells of a group of several processes: by the same cut and the same
//! steps as [`sums::all_reduce`](super::sums::all_reduce).

use super::{
    super::{Group, transport::Transport},
    cut::Cut,
    device_rail::DeviceRail,
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
        let (whole, (inner, outer), size) = (trip.cut(len, dtype), levels(op), dtype.size());
        let (transport, sums, pieces) = match trip.transport()? {
            Transport::None(error) => return Err(error.clone()),
            Transport::Host(transport) => {
                let sums = "in the memory of the hosts, in the order of processes";
                (transport.name(), sums, whole.pieces(PIECE / size))
            }
            Transport::Device(transport) => {
                let owned = whole.equal(across.here, across.hosts.len());
                let rail = DeviceRail::new(trip.way(transport.clone())?, whole.slice(across.here), &owned, size);
                let sums = match rail.native(dtype, outer) {
                    Some(_) => "by the transport",
                    None => "by kernels, in the order of processes",
                };
                (transport.name(), sums, vec![whole])
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
            inner,
            scatter: scatter(largest, n),
            gather: gather(largest, n),
        }))
    }
}
