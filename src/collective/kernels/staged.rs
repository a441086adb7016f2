//! The arguments of `kernels/staged.cu`.

use super::{Arguments, ReduceOp, code, eight_of, value};
use crate::{
    driver::Address,
    fabric::layout::{DeviceBarrier, MOST},
};

/// What all members agree on.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Stage {
    /// Bytes from a member's signals to its stage.
    pub offset: u64,
    /// Bytes of a lane that a block stages at once, a multiple of 128.
    pub chunk: u64,
    /// Bytes of a slot.
    pub slot: u64,
    /// Pieces; not 0.
    pub steps: u32,
    /// One, or one for each member.
    pub lanes: u32,
    /// 1: results of folds are pulled.
    pub two: u32,
    pub spare: u32,
    /// Bytes from a member's signals to its counters ([`STAGED_COUNTS`](crate::fabric::layout::STAGED_COUNTS)).
    pub counts: u64,
    pub spares: u64,
}

/// The own part. Addresses are of this device's memory; 0 where there is none.
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Role {
    pub from: Address,
    pub to: Address,
    pub bytes: u64,
    pub local_from: Address,
    pub local_to: Address,
    pub local_bytes: u64,
    /// 1: the fold's result goes to the own lane.
    pub result: u64,
    pub spare: u64,
}

/// Addresses with bytes, by lane or by rank; 0 bytes where there is nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moves([(Address, u64); MOST]);

impl Moves {
    pub(crate) fn set(&mut self, at: usize, address: Address, bytes: usize) {
        self.0[at] = (address, bytes as u64);
    }

    fn push(&self, args: &mut Arguments) {
        let eight = |k: usize, of: fn(&(Address, u64)) -> u64| {
            value::<[u64; 8]>(std::array::from_fn(|i| of(&self.0[8 * k + i])))
        };
        args.extend([0, 1].map(|k| eight(k, |(address, _)| *address)));
        args.extend([0, 1].map(|k| eight(k, |(_, bytes)| *bytes)));
    }
}

/// One member's part of a collective that goes through the host's memory; on GPUs only. Every member launches the same
/// grid, of blocks whose threads are a multiple of 128.
pub(crate) struct Staged<'a> {
    pub meet: DeviceBarrier,
    pub stage: Stage,
    pub role: Role,
    pub op: ReduceOp,
    /// One for each member when `op` is `Scaled`, else empty.
    pub factors: &'a [f64],
    /// Own source, by lane.
    pub puts: Moves,
    /// Own destination, by rank of whose stage it comes from.
    pub pulls: Moves,
}

impl Staged<'_> {
    pub(crate) fn args(&self) -> Arguments {
        debug_assert!(self.meet.signals != 0 && self.stage.steps > 0);
        let mut args = Arguments::new();
        args.push(value(self.meet));
        args.push(value(self.stage));
        args.push(value(self.role));
        args.push(value(code(self.op)));
        args.push(eight_of(self.factors, 0));
        args.push(eight_of(self.factors, 1));
        self.puts.push(&mut args);
        self.pulls.push(&mut args);
        args
    }
}
