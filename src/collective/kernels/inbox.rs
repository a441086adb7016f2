//! The entries of `kernels/inbox.cu`, which [`inbox`](super::super::algorithm::inbox) and
//! [`slots`](super::super::algorithm::slots) launch, and the arguments of the second.

use super::{Arguments, DType, Entry, Pieces, ReduceOp, builtin, code, eight_of, eights, stepped, value};
use crate::{
    driver::{Address, HostKernel},
    fabric::layout::{DeviceBarrier, MOST},
};
use half::{bf16, f16};

/// The kernel of one trip, if there is one for the type. Launched with [`Push::args`](super::Push::args), on software
/// GPUs with those that [`stepped::args`] makes of them.
pub(crate) fn inbox(dtype: DType) -> Option<Entry> {
    let (name, host): (_, HostKernel) = match dtype {
        DType::F32 => ("inbox_f32", stepped::inbox::<f32>),
        DType::F64 => ("inbox_f64", stepped::inbox::<f64>),
        DType::F16 => ("inbox_f16", stepped::inbox::<f16>),
        DType::BF16 => ("inbox_bf16", stepped::inbox::<bf16>),
        _ => return None,
    };
    Some(Entry { module: &builtin::INBOX, name, host: Some(host) })
}

/// The kernel of any size, if there is one for the type. Launched with [`Parcels::args`], or as above.
pub(crate) fn slots(dtype: DType) -> Option<Entry> {
    let (name, host): (_, HostKernel) = match dtype {
        DType::F32 => ("slots_f32", stepped::slots::<f32>),
        DType::F64 => ("slots_f64", stepped::slots::<f64>),
        DType::F16 => ("slots_f16", stepped::slots::<f16>),
        DType::BF16 => ("slots_bf16", stepped::slots::<bf16>),
        _ => return None,
    };
    Some(Entry { module: &builtin::INBOX, name, host: Some(host) })
}

/// One member's part of sums whose pieces go through slots. Every member launches the same grid. By rank:
pub(crate) struct Parcels<'a> {
    /// Own elements of the member's slice.
    pub from: [Address; MOST],
    /// Bytes of the slice.
    pub bytes: [u64; MOST],
    /// Where the sums of the slice go in the own memory; looked at for the own slice, and for all if sums return.
    pub to: [Address; MOST],
    pub op: ReduceOp,
    /// One for each member when `op` is `Scaled`, else empty.
    pub factors: &'a [f64],
    pub pieces: Pieces,
    pub meet: DeviceBarrier,
}

impl Parcels<'_> {
    pub(crate) fn args(&self) -> Arguments {
        // A kernel of no steps would wait for no peer.
        debug_assert!(self.meet.signals != 0 && self.pieces.count > 0);
        let mut args = Arguments::new();
        args.push(value(self.meet));
        args.push(value(code(self.op)));
        args.push(eight_of(self.factors, 0));
        args.push(eight_of(self.factors, 1));
        args.push(value(self.pieces));
        [&self.from, &self.bytes, &self.to].into_iter().for_each(|all| args.extend(eights(all)));
        args
    }
}
