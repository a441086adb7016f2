//! The host kernels. They work on raw pointers in blocks that stay in the cache, since debug builds run them too.

use super::summand::Summand;
use crate::{
    driver::{HostArg, LaunchDims},
    fabric::MOST,
};
use smallvec::SmallVec;

pub(super) const SUM: u32 = 0;
pub(super) const PROD: u32 = 1;
pub(super) const MIN: u32 = 2;
pub(super) const MAX: u32 = 3;
pub(super) const AVG: u32 = 4;
pub(super) const SCALED: u32 = 5;

const BLOCK: usize = 1024;

type Pointers = SmallVec<[*mut u8; MOST]>;

/// # Safety
/// `args` are those of [`Combine::args`](super::Combine::args) for this type, with the memory behind them.
pub(super) unsafe fn combine<T: Summand>(_dims: LaunchDims, args: &[HostArg]) {
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
    // SAFETY: the promise of the caller: the parts have `n` elements, which no other code writes.
    unsafe { fold::<T>(n as usize, op, &sources, &destinations, factor, sources.len()) }
}

/// `n` elements of every source, by rank, into every destination. A source may be one. An average is over `members`.
///
/// # Safety
/// All are of so many elements and aligned for them; no other work writes a source or touches a destination meanwhile.
pub(super) unsafe fn fold<T: Summand>(
    n: usize,
    op: u32,
    sources: &[*mut u8],
    destinations: &[*mut u8],
    factor: impl Fn(usize) -> T::Acc,
    members: usize,
) {
    if sources.len() == 1 && op != SCALED {
        // SAFETY: the promise of the caller.
        return unsafe { copied(n * size_of::<T>(), sources[0], destinations) };
    }
    let mut acc = [T::Acc::default(); BLOCK];
    let mut out = [T::zeroed(); BLOCK];
    let average = (op == AVG).then_some(members);
    let mut start = 0;
    while start < n {
        let len = BLOCK.min(n - start);
        let acc = &mut acc[..len];
        // SAFETY: every part has `n` elements that no other code writes (the promise of the caller), aligned as the
        // device buffers they are from; what is read here is written to below only, when this slice is gone.
        let block =
            |k: usize| unsafe { std::slice::from_raw_parts(sources[k].cast::<T>().add(start).cast_const(), len) };
        let begun = if op == SCALED {
            first(acc, block(0), factor(0));
            1
        } else {
            two(op, acc, block(0), block(1));
            2
        };
        (begun..sources.len()).for_each(|k| next(op, acc, block(k), || factor(k)));
        let result: *const T = if T::IS_ACC && average.is_none() {
            acc.as_ptr().cast()
        } else {
            last(&mut out[..len], acc, average);
            out.as_ptr()
        };
        for destination in destinations {
            // SAFETY: as above, and this kernel's alone to write; the result is its own.
            unsafe { destination.cast::<T>().add(start).copy_from_nonoverlapping(result, len) };
        }
        start += len;
    }
}

/// One source to all destinations, of which it may be one. In pieces: the second copy finds them in the cache.
///
/// # Safety
/// As of [`fold`], in bytes.
unsafe fn copied(bytes: usize, source: *mut u8, destinations: &[*mut u8]) {
    const PIECE: usize = 64 << 10;
    let mut start = 0;
    while start < bytes {
        let len = PIECE.min(bytes - start);
        for &destination in destinations.iter().filter(|&&destination| destination != source) {
            // SAFETY: the promise of the caller.
            unsafe { destination.add(start).copy_from_nonoverlapping(source.add(start), len) };
        }
        start += len;
    }
}

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

/// `x[i] = f(x[i], y[i])` for all elements. Iterators take a dozen calls for each element of a debug build.
#[inline(always)]
fn each<A: Copy, B: Copy>(x: &mut [A], y: &[B], mut f: impl FnMut(A, B) -> A) {
    let (n, mut i) = (x.len(), 0);
    let y = &y[..n];
    while i < n {
        x[i] = f(x[i], y[i]);
        i += 1;
    }
}

#[inline(always)]
fn both<A, B: Copy>(to: &mut [A], x: &[B], y: &[B], mut f: impl FnMut(B, B) -> A) {
    let (n, mut i) = (to.len(), 0);
    let (x, y) = (&x[..n], &y[..n]);
    while i < n {
        to[i] = f(x[i], y[i]);
        i += 1;
    }
}

/// The first two ranks' elements, without factors.
pub(super) fn two<T: Summand>(op: u32, acc: &mut [T::Acc], x: &[T], y: &[T]) {
    match op {
        PROD => both(acc, x, y, |x, y| T::mul(x.wide(), y.wide())),
        MIN => both(acc, x, y, |x, y| T::min(x.wide(), y.wide())),
        MAX => both(acc, x, y, |x, y| T::max(x.wide(), y.wide())),
        _ => both(acc, x, y, |x, y| T::add(x.wide(), y.wide())),
    }
}

pub(super) fn first<T: Summand>(acc: &mut [T::Acc], x: &[T], factor: T::Acc) {
    each(acc, x, |_, x| T::mul(x.wide(), factor));
}

pub(super) fn next<T: Summand>(op: u32, acc: &mut [T::Acc], x: &[T], factor: impl FnOnce() -> T::Acc) {
    match op {
        PROD => each(acc, x, |acc, x| T::mul(acc, x.wide())),
        MIN => each(acc, x, |acc, x| T::min(acc, x.wide())),
        MAX => each(acc, x, |acc, x| T::max(acc, x.wide())),
        SCALED => {
            let f = factor();
            each(acc, x, |acc, x| T::add(acc, T::mul(x.wide(), f)));
        }
        _ => each(acc, x, |acc, x| T::add(acc, x.wide())),
    }
}

pub(super) fn last<T: Summand>(out: &mut [T], acc: &[T::Acc], average: Option<usize>) {
    match average {
        Some(count) => each(out, acc, |_, acc| T::narrow(T::average(acc, count))),
        None => each(out, acc, |_, acc| T::narrow(acc)),
    }
}

pub(super) fn value<T: bytemuck::AnyBitPattern>(arg: &HostArg) -> T {
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
