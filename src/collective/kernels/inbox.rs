//! The entries of `kernels/inbox.cu`, which [`inbox`](super::super::algorithm::inbox) and
//! [`slots`](super::super::algorithm::slots) launch, and the arguments of the second.

use super::{Arguments, DType, Entry, Pieces, ReduceOp, builtin, code, eight_of, eights, value};
use crate::{
    driver::Address,
    fabric::layout::{DeviceBarrier, MOST},
};

/// The kernel of one trip, if there is one for the type. Launched with [`Push::args`](super::Push::args); it has no
/// host kernel: software GPUs gain nothing by it.
pub(crate) fn inbox(dtype: DType) -> Option<Entry> {
    entry(dtype, ["inbox_f32", "inbox_f64", "inbox_f16", "inbox_bf16"])
}

/// The kernel of any size, if there is one for the type. Launched with [`Parcels::args`]; no host kernel, either.
pub(crate) fn slots(dtype: DType) -> Option<Entry> {
    entry(dtype, ["slots_f32", "slots_f64", "slots_f16", "slots_bf16"])
}

fn entry(dtype: DType, names: [&'static str; 4]) -> Option<Entry> {
    let name = match dtype {
        DType::F32 => names[0],
        DType::F64 => names[1],
        DType::F16 => names[2],
        DType::BF16 => names[3],
        _ => return None,
    };
    Some(Entry { module: &builtin::INBOX, name, host: None })
}

/// One member's part of sums whose pieces go through slots; on GPUs only. Every member launches the same grid. By rank:
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
