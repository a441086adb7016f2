//! The crate's own kernels, with their host kernels. `ops`, collectives, gradients and the probe launch them.
//!
//! Device code (`kernels/*.cu`) is compiled ahead of time and embedded: a program needs a driver but no toolkit.
//!
//! Invariant: two runs on one kind of device give the same bits. Between a GPU, which fuses multiply and add and adds
//! sums in another order, and a software GPU, the last bits may differ.

use crate::{
    Kernel, Module, kernel,
    kernel::real::{Cast, Real, Sealed},
    memory::DeviceCopy,
};
use half::{bf16, f16};
use std::ops::Range;

macro_rules! module {
    ($name:ident, $file:literal) => {
        #[doc = concat!("`kernels/", $file, ".cu`")]
        pub(crate) static $name: $crate::Module = $crate::Module::own(
            include_bytes!(concat!("../../kernels/ptx/", $file, ".ptx.zst")),
            &[
                (80, include_bytes!(concat!("../../kernels/ptx/", $file, ".sm_80.cubin.lz4"))),
                (90, include_bytes!(concat!("../../kernels/ptx/", $file, ".sm_90.cubin.lz4"))),
            ],
        );
    };
}
pub(crate) use module;
module! { ELEMENTWISE, "elementwise" }
module! { REDUCE, "reduce" }
module! { PROBE, "probe" }
module! { COMBINE, "combine" }
module! { PUSH, "push" }
module! { EAGER, "eager" }
module! { INBOX, "inbox" }
module! { STAGED, "staged" }
module! { RING, "ring" }
module! { EXCHANGE, "exchange" }
module! { GRADIENTS, "gradients" }
module! { NORM_INBOX, "norm_inbox" }
module! { NORM_PULL, "norm_pull" }

/// Others are loaded at their first launch.
pub(crate) static MODULES: [&Module; 11] =
    [&ELEMENTWISE, &REDUCE, &PROBE, &COMBINE, &PUSH, &EAGER, &INBOX, &STAGED, &RING, &EXCHANGE, &GRADIENTS];

/// Number of blocks in the first pass of a sum. It is fixed, so that the same call gives the same bits in every run.
pub(crate) const SUM_BLOCKS: u32 = 256;
/// Threads per block of a sum, as the kernels require.
pub(crate) const SUM_THREADS: u32 = 256;

/// `(x, n, a)`
type Scale<T, A> = Kernel<(&'static mut [T], u64, A)>;
/// `(x, y, n, a)`
type Axpy<T, A> = Kernel<(&'static [T], &'static mut [T], u64, A)>;
/// `(x, y, n)`, from one type to another
pub(crate) type Map<A, B> = Kernel<(&'static [A], &'static mut [B], u64)>;
/// `(partial, out, count)`
type SumFinal<T, A> = Kernel<(&'static [A], &'static mut [T], u32)>;
/// `(x, y, partial, n)`
type DotPartial<T, A> = Kernel<(&'static [T], &'static [T], &'static mut [A], u64)>;

/// The element types of the crate's own operations: `f32`, `f64`, `f16`, `bf16`. Sealed, since the kernels are in the
/// crate. Operations on half types compute in `f32`.
#[diagnostic::on_unimplemented(
    message = "the built-in operations do not know the type `{Self}`",
    note = "they know f32, f64, half::f16 and half::bf16; for other types write a kernel (`gpu_pool::kernel!`)"
)]
pub trait Float: DeviceCopy + Sealed {
    /// The type of factors and of partial sums: `f64` for `f64`, else `f32`.
    type Acc: DeviceCopy + crate::kernel::Scalar + Real + From<f32> + Into<f64>;
    /// The place of the type in a kernel's list of names: f32, f64, f16, bf16.
    #[doc(hidden)]
    const KIND: usize;
    /// The exact value, in the type that arithmetic uses.
    #[doc(hidden)]
    fn wide(x: Self) -> Self::Acc;
    /// Rounded once, to nearest even.
    #[doc(hidden)]
    fn narrow(x: Self::Acc) -> Self;
    #[doc(hidden)]
    const SCALE: &'static Scale<Self, Self::Acc>;
    #[doc(hidden)]
    const AXPY: &'static Axpy<Self, Self::Acc>;
    #[doc(hidden)]
    const SUM_PARTIAL: &'static Map<Self, Self::Acc>;
    #[doc(hidden)]
    const DOT_PARTIAL: &'static DotPartial<Self, Self::Acc>;
    #[doc(hidden)]
    const SUM_FINAL: &'static SumFinal<Self, Self::Acc>;
}

macro_rules! float {
    ($T:ty, $Acc:ty, $kind:literal, $to:expr, $from:expr;
     $scale:ident $scale_sym:literal, $axpy:ident $axpy_sym:literal, $sum:ident $sum_sym:literal,
     $dot:ident $dot_sym:literal, $fin:ident $fin_sym:literal) => {
        kernel! {
            static $scale: $scale_sym in ELEMENTWISE, fn(x: &mut [$T], n: u64, a: $Acc) |_dims| {
                x[..n as usize].iter_mut().for_each(|x| *x = $from(a * $to(*x)));
            }
            static $axpy: $axpy_sym in ELEMENTWISE, fn(x: &[$T], y: &mut [$T], n: u64, a: $Acc) |_dims| {
                let n = n as usize;
                y[..n].iter_mut().zip(&x[..n]).for_each(|(y, x)| *y = $from(a * $to(*x) + $to(*y)));
            }
            static $sum: $sum_sym in REDUCE, fn(x: &[$T], partial: &mut [$Acc], n: u64) |dims| {
                partials(n, partial, dims.grid.0, |i| $to(x[i]));
            }
            static $dot: $dot_sym in REDUCE, fn(x: &[$T], y: &[$T], partial: &mut [$Acc], n: u64) |dims| {
                partials(n, partial, dims.grid.0, |i| $to(x[i]) * $to(y[i]));
            }
            static $fin: $fin_sym in REDUCE, fn(partial: &[$Acc], out: &mut [$T], count: u32) |_dims| {
                out[0] = $from(pairwise(0..count as usize, &|i| partial[i]));
            }
        }

        impl Sealed for $T {}
        impl Float for $T {
            type Acc = $Acc;
            const KIND: usize = $kind;
            fn wide(x: Self) -> $Acc {
                $to(x)
            }
            fn narrow(x: $Acc) -> Self {
                $from(x)
            }
            const SCALE: &'static Scale<Self, $Acc> = &$scale;
            const AXPY: &'static Axpy<Self, $Acc> = &$axpy;
            const SUM_PARTIAL: &'static Map<Self, $Acc> = &$sum;
            const DOT_PARTIAL: &'static DotPartial<Self, $Acc> = &$dot;
            const SUM_FINAL: &'static SumFinal<Self, $Acc> = &$fin;
        }
    };
}

fn same<T>(x: T) -> T {
    x
}

float! { f32, f32, 0, same, same;
SCALE_F32 "scale_f32", AXPY_F32 "axpy_f32", SUM_F32 "sum_partial_f32",
DOT_F32 "dot_partial_f32", FINAL_F32 "sum_final_f32" }
float! { f64, f64, 1, same, same;
SCALE_F64 "scale_f64", AXPY_F64 "axpy_f64", SUM_F64 "sum_partial_f64",
DOT_F64 "dot_partial_f64", FINAL_F64 "sum_final_f64" }
float! { f16, f32, 2, f16::to_f32, f16::from_f32;
SCALE_F16 "scale_f16", AXPY_F16 "axpy_f16", SUM_F16 "sum_partial_f16",
DOT_F16 "dot_partial_f16", FINAL_F16 "sum_final_f16" }
float! { bf16, f32, 3, bf16::to_f32, bf16::from_f32;
SCALE_BF16 "scale_bf16", AXPY_BF16 "axpy_bf16", SUM_BF16 "sum_partial_bf16",
DOT_BF16 "dot_partial_bf16", FINAL_BF16 "sum_final_bf16" }

/// Adds `term(i)` up in halves, recursively: the error grows with log n instead of n, as in the tree that the GPU
/// builds. Every host kernel that adds many numbers up does it by this.
pub fn pairwise<A: Real>(terms: Range<usize>, term: &impl Fn(usize) -> A) -> A {
    if terms.len() <= 32 {
        return terms.fold(A::default(), |sum, i| sum + term(i));
    }
    let middle = terms.start + terms.len() / 2;
    pairwise(terms.start..middle, term) + pairwise(middle..terms.end, term)
}

fn partials<A: Real>(n: u64, partial: &mut [A], blocks: u32, term: impl Fn(usize) -> A) {
    let blocks = blocks as usize;
    for (block, out) in partial[..blocks].iter_mut().enumerate() {
        *out = pairwise(crate::shard::balanced(block, blocks, n as usize), &term);
    }
}

macro_rules! fill {
    ($($name:ident $sym:literal $T:ty),+) => {
        kernel! {$(
            pub(crate) static $name: $sym in ELEMENTWISE, fn(x: &mut [$T], n: u64, value: $T) |_dims| {
                x[..n as usize].fill(value);
            }
        )+}
    };
}
fill! { FILL_U16 "fill_u16" u16, FILL_U64 "fill_u64" u64 }

/// Types that [`Device::cast`](crate::Device::cast) converts to `B`. Sealed, since safe code launches the kernel:
///
/// ```compile_fail,E0277
/// # use gpu_pool::*;
/// # static MODULE: Module = Module::ptx("");
/// kernel! { static MINE: "mine" in MODULE, fn(x: &[f32], y: &mut [u32], n: u64); }
/// impl CastTo<u32> for f32 { const CAST: &'static Kernel<(&'static [f32], &'static mut [u32], u64)> = &MINE; }
/// ```
pub trait CastTo<B: DeviceCopy>: DeviceCopy + Cast<B> {
    #[doc(hidden)]
    const CAST: &'static Map<Self, B>;
}

macro_rules! cast {
    ($module:ident; $($A:ident $B:ident $f:expr;)+) => {$(
        const _: () = {
            use $crate::kernel::{builtin::{CastTo, Map}, real::Cast};
            fn host(_: $crate::LaunchDims, x: &[$A], y: &mut [$B], n: u64) {
                let n = n as usize;
                y[..n].iter_mut().zip(&x[..n]).for_each(|(y, x)| *y = $f(*x));
            }
            static KERNEL: Map<$A, $B> =
                $crate::Kernel::new(&$module, concat!("cast_", stringify!($A), "_", stringify!($B)), host);
            impl Cast<$B> for $A {}
            impl CastTo<$B> for $A {
                const CAST: &'static Map<Self, $B> = &KERNEL;
            }
        };
    )+};
}
pub(crate) use cast;
cast! { ELEMENTWISE;
    f32 f64 f64::from;
    f32 f16 f16::from_f32;
    f32 bf16 bf16::from_f32;
    f64 f32 |x| x as f32;
    f64 f16 |x: f64| f16::from_f32(odd(x));
    f64 bf16 |x: f64| bf16::from_f32(odd(x));
    f16 f32 f16::to_f32;
    f16 f64 f16::to_f64;
    f16 bf16 |x: f16| bf16::from_f32(x.to_f32());
    bf16 f32 bf16::to_f32;
    bf16 f64 bf16::to_f64;
    bf16 f16 |x: bf16| f16::from_f32(x.to_f32());
}

kernel! {
    pub(crate) static PROBE_WRITE: "probe_write" in PROBE, fn(dst: &mut [u32], n: u64, seed: u32) |_dims| {
        (0..).zip(&mut dst[..n as usize]).for_each(|(i, d)| *d = pattern(i, seed));
    }
    pub(crate) static PROBE_CHECK: "probe_check" in PROBE,
    fn(src: &[u32], n: u64, seed: u32, mismatches: &mut [u32]) |_dims| {
        mismatches[0] += (0..).zip(&src[..n as usize]).filter(|&(i, &s)| s != pattern(i, seed)).count() as u32;
    }
}

/// `x` in `f32`, rounded to odd: rounding that once more to a half type gives what rounding `x` to it would (Boldo and
/// Melquiond, 2005). Rounding to nearest twice does not: 1 + 2^-11 + 2^-40 would become 1.
pub(crate) fn odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || !near.is_finite() {
        return near;
    }
    let towards_zero = if f64::from(near).abs() > x.abs() { near.to_bits() - 1 } else { near.to_bits() };
    f32::from_bits(towards_zero | 1)
}

/// The finaliser of MurmurHash3 over index and seed, as in `kernels/probe.cu`.
pub(crate) fn pattern(i: u64, seed: u32) -> u32 {
    let mut h = (i as u32).wrapping_mul(0x9e37_79b9).wrapping_add((i >> 32) as u32).wrapping_add(seed);
    h ^= h >> 16;
    h = h.wrapping_mul(0x85eb_ca6b);
    h ^= h >> 13;
    h = h.wrapping_mul(0xc2b2_ae35);
    h ^ (h >> 16)
}

#[cfg(test)]
#[path = "../../tests/unit/kernel/builtin_tests.rs"]
mod tests;
