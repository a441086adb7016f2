//! The host kernels: what the kernels compute, for software GPUs.
//!
//! They work on raw pointers in blocks that stay in the cache, since a debug build has to get through them too.

use super::lane::Lane;
use crate::{
    driver::{HostArg, LaunchDims},
    fabric::layout::MOST,
};
use smallvec::SmallVec;

pub(super) const SUM: u32 = 0;
pub(super) const PROD: u32 = 1;
pub(super) const MIN: u32 = 2;
pub(super) const MAX: u32 = 3;
pub(super) const AVG: u32 = 4;
pub(super) const SCALED: u32 = 5;

/// Elements that are folded together.
const BLOCK: usize = 1024;

type Pointers = SmallVec<[*mut u8; MOST]>;

/// The host kernel of `combine_*`.
///
/// # Safety
/// `args` are those of [`Combine::args`](super::Combine::args) for this type, with the memory behind them.
pub(super) unsafe fn combine<T: Lane>(_dims: LaunchDims, args: &[HostArg]) {
    let n: u64 = value(&args[1]);
    let op: u32 = value(&args[2]);
    let (sources, destinations) = parts(&args[5..], value::<u32>(&args[3]) as usize, value::<u32>(&args[4]) as usize);
    if n == 0 || sources.is_empty() {
        return;
    }
    let factor = |k: usize| {
        // The first two eights come before the parts.
        let eight = if k < MOST { 5 + k / 8 } else { 7 + sources.len() + destinations.len().max(MOST) + k / 8 - 2 };
        T::factor(value::<[f64; 8]>(&args[eight])[k % 8])
    };
    // SAFETY: the promise of the caller: the parts have `n` elements, which nobody else writes.
    unsafe { fold::<T>(n as usize, op, &sources, &destinations, factor, sources.len()) }
}

/// `n` elements of every source, by rank, into every destination. A source may be a destination. An average is over so
/// many members.
///
/// # Safety
/// All are of so many elements and aligned for them; nobody writes a source meanwhile, nor touches a destination.
unsafe fn fold<T: Lane>(
    n: usize,
    op: u32,
    sources: &[*mut u8],
    destinations: &[*mut u8],
    factor: impl Fn(usize) -> T::Acc,
    members: usize,
) {
    let mut acc = [T::Acc::default(); BLOCK];
    let mut out = [T::zeroed(); BLOCK];
    let mut start = 0;
    while start < n {
        let len = BLOCK.min(n - start);
        let (acc, out) = (&mut acc[..len], &mut out[..len]);
        // SAFETY: every part has `n` elements that nobody else writes (the promise of the caller), aligned as the
        // device buffers they are from; what is read here is written to below only, when this slice is gone.
        let block =
            |k: usize| unsafe { std::slice::from_raw_parts(sources[k].cast::<T>().add(start).cast_const(), len) };
        if sources.len() == 1 && op != SCALED {
            out.copy_from_slice(block(0));
        } else {
            first(acc, block(0), (op == SCALED).then(|| factor(0)));
            (1..sources.len()).for_each(|k| next(op, acc, block(k), || factor(k)));
            let average = (op == AVG).then_some(members);
            last(out, acc, average);
        }
        for destination in destinations {
            // SAFETY: as above, and this kernel's alone to write; `out` is its own.
            unsafe { destination.cast::<T>().add(start).copy_from_nonoverlapping(out.as_ptr(), len) };
        }
        start += len;
    }
}

/// The same in the host's memory, by the calling thread: with a factor for each source, or none, into one destination.
///
/// # Safety
/// As of [`fold`].
pub(super) unsafe fn on_host<T: Lane>(
    n: usize,
    op: u32,
    sources: &[*mut u8],
    destination: *mut u8,
    factors: &[f64],
    members: usize,
) {
    // SAFETY: the promise of the caller.
    unsafe { fold::<T>(n, op, sources, &[destination], |k| T::factor(factors[k]), members) }
}

/// The host kernel of `pairs`.
///
/// # Safety
/// `args` are those of [`Pairs::args`](super::Pairs::args), with the memory behind them.
pub(super) unsafe fn pairs(_dims: LaunchDims, args: &[HostArg]) {
    let count = value::<u32>(&args[1]) as usize;
    let places = count.max(MOST);
    for k in 0..count {
        // A source that is a destination is its own pair's: there is nothing to do.
        let (HostArg::Slice { ptr: from, bytes, .. }, HostArg::Slice { ptr: to, .. }) =
            (&args[5 + k], &args[5 + places + k])
        else {
            continue;
        };
        // SAFETY: both are `bytes` long, and the second is this kernel's alone (the promise of the caller).
        unsafe { to.copy_from_nonoverlapping(from.cast_const(), *bytes) };
    }
}

/// The first rank's elements.
fn first<T: Lane>(acc: &mut [T::Acc], x: &[T], factor: Option<T::Acc>) {
    match factor {
        Some(f) => acc.iter_mut().zip(x).for_each(|(acc, x)| *acc = T::mul(x.wide(), f)),
        None => acc.iter_mut().zip(x).for_each(|(acc, x)| *acc = x.wide()),
    }
}

/// Another rank's elements.
fn next<T: Lane>(op: u32, acc: &mut [T::Acc], x: &[T], factor: impl FnOnce() -> T::Acc) {
    let both = acc.iter_mut().zip(x);
    match op {
        PROD => both.for_each(|(acc, x)| *acc = T::mul(*acc, x.wide())),
        MIN => both.for_each(|(acc, x)| *acc = T::min(*acc, x.wide())),
        MAX => both.for_each(|(acc, x)| *acc = T::max(*acc, x.wide())),
        SCALED => {
            let f = factor();
            both.for_each(|(acc, x)| *acc = T::add(*acc, T::mul(x.wide(), f)));
        }
        _ => both.for_each(|(acc, x)| *acc = T::add(*acc, x.wide())),
    }
}

fn last<T: Lane>(out: &mut [T], acc: &[T::Acc], average: Option<usize>) {
    match average {
        Some(count) => out.iter_mut().zip(acc).for_each(|(out, acc)| *out = T::narrow(T::average(*acc, count))),
        None => out.iter_mut().zip(acc).for_each(|(out, acc)| *out = T::narrow(*acc)),
    }
}

fn value<T: bytemuck::AnyBitPattern>(arg: &HostArg) -> T {
    let HostArg::Value(bytes) = arg else { unreachable!("a value is at this place") };
    bytemuck::pod_read_unaligned(bytes.as_bytes())
}

/// The parts after the two sets of eight; a source that is a value is the number of a destination.
fn parts(args: &[HostArg], sources: usize, destinations: usize) -> (Pointers, Pointers) {
    let at = &args[2..];
    let to = &at[sources.max(MOST)..];
    let pointer = |arg: &HostArg| match arg {
        HostArg::Slice { ptr, .. } => Some(*ptr),
        HostArg::Value(_) => None,
    };
    let destination = |j: usize| pointer(&to[j]).expect("a destination is a slice");
    let source = |arg: &HostArg| pointer(arg).unwrap_or_else(|| destination(value::<u64>(arg) as usize));
    (at[..sources].iter().map(source).collect(), (0..destinations).map(destination).collect())
}
