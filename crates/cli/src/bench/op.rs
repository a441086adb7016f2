//! The operations: lengths of their buffers, expected results, and their calls.

use super::number::{Number, PERIOD, Reduction};
use gpu_pool::{Device, DeviceBuffer, Result};

/// An operation of all members, by nccl-tests' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    Broadcast,
    Reduce,
    #[value(alias = "alltoall")]
    AllToAll,
    Sendrecv,
}

/// The work of each member; all do the same.
#[derive(Clone, Copy)]
pub struct Case {
    pub op: Op,
    pub reduction: Reduction,
    pub root: usize,
    /// Elements of the larger buffer.
    pub total: usize,
    pub members: usize,
}

impl Op {
    pub fn reduces(self) -> bool {
        matches!(self, Op::AllReduce | Op::ReduceScatter | Op::Reduce)
    }

    pub fn has_root(self) -> bool {
        matches!(self, Op::Broadcast | Op::Reduce)
    }

    /// Whether the crate has it from one buffer to another, and within one.
    pub fn places(self) -> [bool; 2] {
        match self {
            Op::AllReduce | Op::AllGather | Op::ReduceScatter => [true, true],
            Op::Broadcast | Op::Reduce => [false, true],
            Op::AllToAll | Op::Sendrecv => [true, false],
        }
    }

    /// The least traffic of each link, as a multiple of the bytes: nccl-tests' `PERFORMANCE.md`.
    pub fn bus_factor(self, members: usize) -> f64 {
        let others = (members - 1) as f64 / members as f64;
        match self {
            Op::AllReduce => 2.0 * others,
            Op::AllGather | Op::ReduceScatter | Op::AllToAll => others,
            Op::Broadcast | Op::Reduce | Op::Sendrecv => 1.0,
        }
    }
}

impl Case {
    fn part(&self) -> usize {
        self.total / self.members
    }

    /// Elements that each member gives: nccl-tests' column `count`.
    pub fn count(&self) -> usize {
        match self.op {
            Op::AllGather | Op::ReduceScatter | Op::AllToAll => self.part(),
            _ => self.total,
        }
    }

    /// Elements of the buffer that is read, and of the one that is written. In place there is the larger one alone.
    pub fn lengths(&self) -> [usize; 2] {
        match self.op {
            Op::AllGather => [self.part(), self.total],
            Op::ReduceScatter => [self.total, self.part()],
            _ => [self.total, self.total],
        }
    }

    /// Element `at` of the input of a member. In place an all-gather's part stands in its place.
    pub fn input<T: Number>(&self, rank: usize, in_place: bool, at: usize) -> T {
        let from = if in_place && self.op == Op::AllGather { rank * self.part() } else { 0 };
        self.reduction.number(rank, at.wrapping_sub(from))
    }

    /// A period of what the reduction of all members gives.
    pub fn reduced<T: Number>(&self) -> Vec<T> {
        (0..PERIOD).map(|at| self.reduction.expected(self.members, at)).collect()
    }

    /// Element `at` of the output of a member, from [`reduced`](Self::reduced). None where it does not matter.
    pub fn expected<T: Number>(&self, reduced: &[T], rank: usize, in_place: bool, at: usize) -> Option<T> {
        let (part, reduction) = (self.part(), self.reduction);
        let sum = |at: usize| reduced[at % PERIOD];
        match self.op {
            Op::AllReduce => Some(sum(at)),
            Op::Reduce => (rank == self.root).then(|| sum(at)),
            Op::ReduceScatter if in_place => (at / part == rank).then(|| sum(at)),
            Op::ReduceScatter => Some(sum(rank * part + at)),
            Op::AllGather => Some(reduction.number(at / part, at % part)),
            Op::Broadcast => Some(reduction.number(self.root, at)),
            Op::AllToAll => Some(reduction.number(at / part, rank * part + at % part)),
            Op::Sendrecv => Some(reduction.number((rank + self.members - 1) % self.members, at)),
        }
    }

    /// From one buffer to the other.
    pub fn call<T: Number>(&self, dev: &Device, src: &DeviceBuffer<T>, dst: &mut DeviceBuffer<T>) -> Result<()> {
        let op = self.reduction.op();
        match self.op {
            Op::AllReduce => dev.all_reduce_into(src, dst, op),
            Op::ReduceScatter => dev.reduce_scatter(src, dst, op),
            Op::AllGather => dev.all_gather(src, dst),
            Op::AllToAll => dev.all_to_all(src, dst),
            Op::Sendrecv => {
                let (me, n) = (dev.rank(), self.members);
                dev.sendrecv(src, (me + 1) % n, dst, (me + n - 1) % n)
            }
            Op::Broadcast | Op::Reduce => self.call_in_place(dev, dst),
        }
    }

    /// Within one buffer.
    pub fn call_in_place<T: Number>(&self, dev: &Device, x: &mut DeviceBuffer<T>) -> Result<()> {
        let op = self.reduction.op();
        match self.op {
            Op::ReduceScatter => dev.reduce_scatter_in_place(x, op),
            Op::AllGather => dev.all_gather_in_place(x),
            Op::Broadcast => dev.broadcast(x, self.root),
            Op::Reduce => dev.reduce(x, op, self.root),
            Op::AllReduce | Op::AllToAll | Op::Sendrecv => dev.all_reduce(x, op),
        }
    }
}
