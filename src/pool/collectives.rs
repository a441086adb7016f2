//! Which algorithm a pool's collectives use, for people.

use crate::{
    DType, GpuPool, Group, ReduceOp,
    collective::{Algorithm, Machine, case::Case, choose::choose, in_words},
    error::{Result, op_site::OpSite},
    fabric::{MOST_BYTES, Shape},
    thread::worker::Shared,
};

/// The answer of [`GpuPool::explain`] and of [`Group::explain`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// The algorithm. In a group of several processes: that of the first step, a reduce_scatter inside each process.
    pub algorithm: Algorithm,
    /// How the devices meet: in the kernels themselves, in their data, by stream events, or by their host threads.
    pub meets: &'static str,
    /// Why this algorithm.
    pub reason: &'static str,
    /// Number of blocks (of 512 threads) of the kernel, and so of the multiprocessors that it uses. Copy engines need
    /// none: for `Copies`, and for `Ring` by events, it is the number of blocks of the kernels that add up data that
    /// has arrived. `Host` has none.
    pub blocks: u32,
    /// The sizes from which on collectives go another way, on GPUs.
    pub limits: String,
    /// The steps after the first one, in a group of several processes.
    pub rails: Option<Rails>,
}

/// The steps after the first one of an `all_reduce` of several processes: part of an [`Explanation`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rails {
    /// Number of processes that have members of the group.
    pub processes: usize,
    /// Number of rails: a rail joins the members with one index in their processes, and carries a slice of the buffer.
    pub rails: usize,
    /// The transport between processes: `"shm"`, `"mpi"` or `"nccl"`; or `"inbox"`, the library's own kernels between
    /// processes of one host with one GPU each.
    pub transport: &'static str,
    /// How the sums of the processes are added up; and why not by own kernels, where that is a question.
    pub sums: String,
    /// Number of pieces.
    pub pieces: usize,
    /// Whether the devices work on another piece while bytes of one are on their way. False: one after the other, since
    /// there is one piece, nothing to be done inside this process, or no room for the kernels of both.
    pub overlap: bool,
    /// Bytes of the largest piece on one rail.
    pub piece: usize,
    /// The last step: an all_gather inside each process.
    pub gather: Box<Explanation>,
}

display_as!(Explanation, |self, f| {
    write!(f, "{:?}, meeting by {}: {}", self.algorithm, self.meets, self.reason)?;
    write!(f, " ({} blocks; {})", self.blocks, self.limits)?;
    let Some(rails) = &self.rails else { return Ok(()) };
    let Rails { processes, rails, transport, sums, pieces, overlap, piece, gather } = rails;
    write!(f, "; {processes} processes, {rails} rails over {transport}, {pieces} pieces of up to {piece} bytes")?;
    write!(f, "{}", if *overlap { ", beside the steps inside" } else { "" })?;
    write!(f, ", added up {sums}; {gather}")
});

impl GpuPool {
    /// Which algorithm an `all_reduce` of this many bytes on all devices uses, and why.
    ///
    /// On software GPUs `pool.explain(DType::F32, ReduceOp::Sum, 1 << 20)?.to_string()` begins with "Direct, meeting by
    /// events: all members have peer access: one kernel each", for example.
    ///
    /// # Errors
    /// None today: the result is that of [`Group::explain`].
    #[track_caller]
    pub fn explain(&self, dtype: DType, op: ReduceOp, bytes: usize) -> Result<Explanation> {
        let members: Vec<usize> = (0..self.device_count()).collect();
        Ok(explain(&self.shared, &members, (dtype, op), &Shape::AllReduce { len: len(dtype, bytes) }))
    }
}

fn len(dtype: DType, bytes: usize) -> usize {
    bytes.min(MOST_BYTES) / dtype.size()
}

impl Group<'_> {
    /// Which algorithm an `all_reduce` of this many bytes on this group uses, and why. In a group of several processes
    /// also the steps between them. It needs no meeting: a member may ask alone.
    ///
    /// # Errors
    /// In a group of several processes: those that the call would have before it begins, such as
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) in a capture, or where no transport fits.
    #[track_caller]
    pub fn explain(&self, dtype: DType, op: ReduceOp, bytes: usize) -> Result<Explanation> {
        let _here = OpSite::here("explain");
        let len = len(dtype, bytes);
        let inside = |op, shape: &Shape| explain(&self.device().worker.shared, self.ordinals(), (dtype, op), shape);
        let Some(found) = self.hierarchy(dtype, op, len)? else {
            return Ok(inside(op, &Shape::AllReduce { len }));
        };
        let rails = Rails {
            processes: found.processes,
            rails: found.rails,
            transport: found.transport,
            sums: found.sums,
            pieces: found.pieces,
            overlap: found.overlapped,
            piece: found.piece,
            gather: Box::new(inside(ReduceOp::Sum, &found.gather)),
        };
        Ok(Explanation { rails: Some(rails), ..inside(found.inner, &found.scatter) })
    }

    /// How an `all_reduce_norm` of `gpu-pool-train` of `rows` rows of `cols` elements is carried out on this
    /// group: by one kernel (then the reason begins with these words), or by three calls; then it is the answer of
    /// [`explain`](Self::explain) for the sum. It needs no meeting: a member may ask alone.
    ///
    /// # Errors
    /// Those of [`explain`](Self::explain).
    #[track_caller]
    pub fn explain_norm(&self, dtype: DType, rows: usize, cols: usize) -> Result<Explanation> {
        let _here = OpSite::here("explain_norm");
        let sum = self.explain(dtype, ReduceOp::Sum, rows.saturating_mul(cols).saturating_mul(dtype.size()))?;
        Ok(match self.norm_kernel(dtype, rows, cols) {
            None => sum,
            Some(kernel) => {
                let (about, reason, blocks) = (kernel.about(), kernel.reason(), kernel.blocks);
                let own = |rails| Rails { transport: "inbox", sums: reason.to_owned(), ..rails };
                let rails = sum.rails.clone().map(own);
                Explanation { algorithm: about.group, meets: about.waits_by, reason, blocks, rails, ..sum }
            }
        })
    }
}

fn explain(shared: &Shared, members: &[usize], (dtype, op): (DType, ReduceOp), shape: &Shape) -> Explanation {
    let n = members.len();
    let group = (n, shared.are_direct(members));
    let case = Case::new((Machine::of(shared), &shared.limits), group, (dtype, op), Some(shape), false);
    let (algorithm, reason) = choose(&case);
    let (meets, blocks, limits) = (algorithm.waits_by(), algorithm.blocks(&case), in_words::sizes(n));
    Explanation { algorithm: algorithm.group(&case), meets, reason, blocks, limits, rails: None }
}
