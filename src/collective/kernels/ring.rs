//! The arguments of `kernels/ring.cu`.

use super::{Arguments, DType, value};
use crate::{driver::Address, fabric::layout::DeviceBarrier};

/// Where a member reads and writes.
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Ring {
    /// Own source and destination; they may be one.
    pub from: Address,
    pub to: Address,
    /// The successor's destination.
    pub next_to: Address,
    /// Own memory that the predecessor fills: `slots` slots for each block,
    pub recv_scratch: Address,
    /// and the successor's.
    pub next_scratch: Address,
}

/// What all members agree on.
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Cut {
    /// Of a buffer.
    pub bytes: u64,
    /// Bytes from one chunk to the next, a multiple of 128.
    pub chunk: u64,
    /// Bytes of a slot, a multiple of 128.
    pub piece: u64,
    /// Not 0.
    pub rounds: u32,
    /// Pieces of a block that take a hop after one another; not 0.
    pub abreast: u32,
    /// More than `abreast`.
    pub slots: u32,
    pub spare: u32,
}

/// One member's part of an all-reduce of `f32` or `f64` around a ring; on GPUs only. Every member launches the same
/// grid.
pub(crate) struct Round {
    pub meet: DeviceBarrier,
    pub ring: Ring,
    pub cut: Cut,
    pub dtype: DType,
    /// What sums are multiplied by.
    pub factor: f64,
}

impl Round {
    pub(crate) fn args(&self) -> Arguments {
        debug_assert!(self.meet.signals != 0 && self.cut.rounds > 0 && self.cut.slots > self.cut.abreast);
        let factor = if self.dtype == DType::F64 { value(self.factor) } else { value(self.factor as f32) };
        [value(self.meet), value(self.ring), value(self.cut), factor].into_iter().collect()
    }
}
