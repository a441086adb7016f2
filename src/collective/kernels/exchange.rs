//! The arguments of `kernels/exchange.cu`, which [`exchange`](super::super::algorithm::exchange) launches.

use super::{Arguments, DType, ReduceOp, code, eight_of, eights, value};
use crate::{
    driver::Address,
    fabric::layout::{DeviceBarrier, MOST},
};

/// Slots of a block in its member's scratch, for each sender. For a single piece one slot is enough.
pub(crate) const EXCHANGE_SLOTS: usize = 2;

/// The addresses that a member reads and writes, by rank.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Exchange {
    /// Own elements of the member's slice.
    pub from: [Address; MOST],
    /// Bytes of the slice.
    pub bytes: [u64; MOST],
    /// Where the member wants the sums of the own slice; 0 if it does not want them.
    pub to: [Address; MOST],
    /// Every member's scratch, to which its peers write: slots by parity of the piece ([`EXCHANGE_SLOTS`]), then by
    /// block, then by sender.
    pub recv_scratch: [Address; MOST],
}

/// How slices are cut: alike by all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Pieces {
    /// Bytes of a piece and of a slot: a multiple of 128.
    pub piece: u64,
    /// Pieces of a block's part of the largest slice; not 0.
    pub count: u32,
    /// 1 if sums go to other members than the owners that make them; else 0.
    pub returns: u32,
}

/// One member's part of sums that are exchanged; on GPUs only. Every member launches the same grid.
pub(crate) struct Trade<'a> {
    pub op: ReduceOp,
    /// One for each member when `op` is `Scaled`, else empty.
    pub factors: &'a [f64],
    pub exchange: Exchange,
    pub pieces: Pieces,
    pub meet: DeviceBarrier,
}

impl Trade<'_> {
    pub(crate) fn args(&self) -> Arguments {
        debug_assert!(self.meet.signals != 0 && self.pieces.count > 0);
        let mut args = Arguments::new();
        args.push(value(self.meet));
        args.push(value(code(self.op)));
        args.push(eight_of(self.factors, 0));
        args.push(eight_of(self.factors, 1));
        args.push(value(self.pieces));
        let Exchange { from, bytes, to, recv_scratch } = &self.exchange;
        for all in [from, bytes, to, recv_scratch] {
            args.extend(eights(all));
        }
        args
    }
}

/// The name of the entry for a type.
pub(super) fn name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "exchange_f32",
        DType::F64 => "exchange_f64",
        DType::F16 => "exchange_f16",
        DType::BF16 => "exchange_bf16",
        DType::I8 => "exchange_i8",
        DType::U8 => "exchange_u8",
        DType::I32 => "exchange_i32",
        DType::U32 => "exchange_u32",
        DType::I64 => "exchange_i64",
        DType::U64 => "exchange_u64",
    }
}
