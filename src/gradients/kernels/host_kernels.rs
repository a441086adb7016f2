//! Host kernels of the gradient kernels, for software GPUs. [`super`] packs their arguments.

use super::segments::{pointer, read, table};
use crate::gradients::{element::OnWire, layout::Unit};
use crate::{Element, LaunchDims, driver::HostArg, memory::DeviceCopy};

/// # Safety
/// `args` are those of [`pack`](super::pack) for these types, with the memory behind them.
pub(in super::super) unsafe fn pack_host<G: OnWire<W>, W: Element>(_dims: LaunchDims, args: &[HostArg]) {
    let (wire, len) = pointer::<W>(&args[0]).expect("packed above");
    // SAFETY: only this kernel has the wire (the caller's promise), and it is aligned as device memory is.
    let wire = unsafe { std::slice::from_raw_parts_mut(wire, len) };
    let factor: G::Norm = read(&args[2]);
    for (start, len, memory) in table::<G>(args, 3, read::<u32>(&args[1]) as usize) {
        let (out, zeros) = wire[start..start + Unit::of::<G>().padded(len)].split_at_mut(len);
        zeros.fill(W::zeroed());
        match memory {
            // SAFETY: a segment has `len` elements that nobody writes meanwhile, and that are not part of the wire.
            Some(memory) => out
                .iter_mut()
                .zip(unsafe { std::slice::from_raw_parts(memory.cast_const(), len) })
                .for_each(|(out, x)| *out = x.narrow(factor)),
            None => out.fill(W::zeroed()),
        }
    }
}

/// # Safety
/// `args` are those of [`unpack`](super::unpack) for these types, with the memory behind them.
pub(in super::super) unsafe fn unpack_host<G: OnWire<W>, W: Element + Into<f64>>(dims: LaunchDims, args: &[HostArg]) {
    let (wire, len) = pointer::<W>(&args[0]).expect("packed above");
    // SAFETY: no other code writes the wire meanwhile (the caller's promise), and it is aligned as device memory is.
    let wire = unsafe { std::slice::from_raw_parts(wire.cast_const(), len) };
    for (start, len, memory) in table::<G>(args, 5, read::<u32>(&args[4]) as usize) {
        if let Some(memory) = memory {
            // SAFETY: a segment has `len` elements that only this kernel has, and that are not part of the wire.
            let out = unsafe { std::slice::from_raw_parts_mut(memory, len) };
            out.iter_mut().zip(&wire[start..]).for_each(|(out, x)| *out = G::wide(*x));
        }
    }
    let Some((partial, count)) = pointer::<f64>(&args[1]) else { return };
    // SAFETY: as above.
    let partial = unsafe { std::slice::from_raw_parts_mut(partial, count) };
    let (first, n) = (read::<u64>(&args[2]) as usize, read::<u64>(&args[3]) as usize);
    let blocks = dims.grid.0 as usize;
    for (block, sum) in partial[..blocks].iter_mut().enumerate() {
        let part = &wire[first..first + n][crate::shard::balanced(block, blocks, n)];
        // `sum` begins at -0.0.
        *sum = part.iter().map(|x| (*x).into()).fold(0.0, |sum, x| sum + x * x);
    }
}

pub(in super::super) trait Norm: DeviceCopy {
    fn of(sum: f64) -> Self;
}
impl Norm for f32 {
    fn of(sum: f64) -> Self {
        sum.sqrt() as f32
    }
}
impl Norm for f64 {
    fn of(sum: f64) -> Self {
        sum.sqrt()
    }
}

/// # Safety
/// `args` are those of [`norm`](super::norm), with the memory behind them.
pub(in super::super) unsafe fn norm_host<A: Norm>(_dims: LaunchDims, args: &[HostArg]) {
    let (Some((partial, len)), Some((out, _))) = (pointer::<f64>(&args[0]), pointer::<A>(&args[1])) else { return };
    // SAFETY: memory of `len` elements that no other code writes meanwhile (the caller's promise).
    let partial = unsafe { std::slice::from_raw_parts(partial.cast_const(), len) };
    // SAFETY: one element, which only this kernel has.
    unsafe { *out = A::of(partial.iter().fold(0.0, |sum, part| sum + part)) };
}
