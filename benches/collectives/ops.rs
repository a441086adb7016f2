//! The operations: lengths of operands, bus bandwidth, expected results, and our call.

use std::ffi::c_int;

use gpu_pool::{Device, DeviceBuffer, Element, ReduceOp, Result};
use half::bf16;

/// An operation of the whole gang. Reductions are sums.
#[derive(Clone, Copy, PartialEq)]
pub enum Op {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
}

impl Op {
    pub const ALL: [Op; 5] = [Op::AllReduce, Op::ReduceScatter, Op::AllGather, Op::Broadcast, Op::AllToAll];

    pub fn name(self) -> &'static str {
        match self {
            Op::AllReduce => "all_reduce",
            Op::ReduceScatter => "reduce_scatter",
            Op::AllGather => "all_gather",
            Op::Broadcast => "broadcast",
            Op::AllToAll => "all_to_all",
        }
    }

    /// Whether the output is the input's memory.
    pub fn in_place(self) -> bool {
        matches!(self, Op::AllReduce | Op::Broadcast)
    }

    /// Elements of the input and of the output. The larger of the two has `total`, a multiple of `world`.
    pub fn lengths(self, total: usize, world: usize) -> (usize, usize) {
        match self {
            Op::AllReduce | Op::Broadcast | Op::AllToAll => (total, total),
            Op::ReduceScatter => (total, total / world),
            Op::AllGather => (total / world, total),
        }
    }

    /// Bus bandwidth in GB/s, as nccl-tests define it: what a link must carry at least.
    pub fn bus(self, world: usize, bytes: usize, micros: f64) -> f64 {
        let others = (world - 1) as f64 / world as f64;
        let factor = match self {
            Op::AllReduce => 2.0 * others,
            Op::ReduceScatter | Op::AllGather | Op::AllToAll => others,
            Op::Broadcast => 1.0,
        };
        factor * bytes as f64 / micros / 1e3
    }

    /// How many in-place operations the noise survives before it overflows.
    pub fn most_calls(self, world: usize) -> usize {
        match self {
            // It starts near 2^-104 and each sum multiplies it by up to `world`.
            Op::AllReduce => (220.0 / (world as f64).log2()) as usize,
            _ => usize::MAX,
        }
    }

    /// Element `i` of the output of `rank`, when the inputs are [`pattern`]s and the output has `len` elements.
    pub fn expected(self, rank: usize, world: usize, len: usize, i: usize) -> u32 {
        let sum = |i| (0..world).map(|from| pattern(from, i)).sum();
        match self {
            Op::AllReduce => sum(i),
            Op::ReduceScatter => sum(rank * len + i),
            Op::AllGather => pattern(i / (len / world), i % (len / world)),
            Op::Broadcast => pattern(0, i),
            Op::AllToAll => pattern(i / (len / world), rank * (len / world) + i % (len / world)),
        }
    }

    /// Our call. In-place operations ignore the input.
    pub fn ours<T: Number>(self, dev: &Device, input: &DeviceBuffer<T>, output: &mut DeviceBuffer<T>) -> Result<()> {
        match self {
            Op::AllReduce => dev.all_reduce(output, ReduceOp::Sum),
            Op::ReduceScatter => dev.reduce_scatter(input, output, ReduceOp::Sum),
            Op::AllGather => dev.all_gather(input, output),
            Op::Broadcast => dev.broadcast(output, 0),
            Op::AllToAll => dev.all_to_all(input, output),
        }
    }
}

/// Small integers that differ between ranks and positions. Sums over 8 ranks are exact in every type, also in bf16.
pub fn pattern(rank: usize, i: usize) -> u32 {
    (i % PERIOD + rank) as u32
}

/// The period of the pattern. No piece size is a multiple of it.
pub const PERIOD: usize = 23;

/// An element type.
pub trait Number: Element {
    const NAME: &'static str;
    /// NCCL's `ncclDataType_t`.
    const NCCL: c_int;

    fn narrow(x: f32) -> Self;
    fn wide(self) -> f32;

    /// A number of random sign near 2^-104, from random bits.
    fn tiny(bits: u32) -> Self {
        Self::narrow(f32::from_bits(bits & 0x807f_ffff | (127 - 105) << 23))
    }
}

impl Number for f32 {
    const NAME: &'static str = "f32";
    const NCCL: c_int = 7;

    fn narrow(x: f32) -> Self {
        x
    }

    fn wide(self) -> f32 {
        self
    }
}

impl Number for bf16 {
    const NAME: &'static str = "bf16";
    const NCCL: c_int = 9;

    fn narrow(x: f32) -> Self {
        bf16::from_f32(x)
    }

    fn wide(self) -> f32 {
        self.to_f32()
    }
}
