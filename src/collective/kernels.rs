//! Device kernels of collectives, as host code names them: an [`Entry`], and the values of its arguments. Kernels of
//! one algorithm are in its file; `combine` and `pairs` are here. Kernels that wait for others have no
//! [`host_kernels`].
//!
//! Invariant: a device kernel and its host kernel give the same bits for any launch dimensions and alignment. Elements
//! are folded in rank order, half types in `f32` and rounded once at the end; integers wrap. Only NaN bits may differ.

mod host_kernels;
mod summand;
#[cfg(test)]
#[path = "../../tests/unit/collective/kernels/tests.rs"]
mod tests;

use crate::{
    Module,
    driver::{Address, HostKernel, KernelArg, ValueBytes},
    fabric::{DType, DeviceBarrier, MOST, ReduceOp, Tiling},
    kernel::builtin,
};
use smallvec::SmallVec;

#[derive(Clone, Copy)]
pub(crate) struct Entry {
    pub module: &'static Module,
    pub name: &'static str,
    pub host: Option<HostKernel>,
}

/// As `typed_name`, for kernels that there are of floats only.
macro_rules! typed_float {
    ($dtype:expr, $name:literal) => {{
        use $crate::fabric::types::DType;
        let dtype = $dtype;
        matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16).then(|| typed_name!(dtype, $name))
    }};
}
pub(super) use typed_float;

/// The kernel that adds up or moves. Launched with [`Combine::args`].
pub(crate) fn combine(dtype: DType) -> Entry {
    macro_rules! host {
        ($($D:ident $T:ty),+) => { match dtype { $(DType::$D => host_kernels::combine::<$T>,)+ } };
    }
    let host: HostKernel = host!(F32 f32, F64 f64, F16 half::f16, BF16 half::bf16, I8 i8, U8 u8, I32 i32, U32 u32,
        I64 i64, U64 u64);
    Entry { module: &builtin::COMBINE, name: typed_name!(dtype, "combine"), host: Some(host) }
}

/// A kernel that takes part in a barrier and touches no memory, with its arguments.
pub(crate) fn counting(meet: DeviceBarrier) -> (Entry, Arguments) {
    let none = Combine { n: 0, op: ReduceOp::Sum, factors: &[], sources: &[], destinations: &[], meet };
    (combine(DType::U8), none.args(false))
}

/// `n` elements in the host's memory, folded by the calling thread: the bits are the kernels'. `factors` are those of
/// all sources where `op` is `Scaled`, else none. `Avg` divides by `members`: each source may be the sum of several.
///
/// # Safety
/// All parts have so many elements and are aligned for them; no other work writes the sources meanwhile, nor touches
/// the destinations, which may be sources.
pub unsafe fn fold_on_host(
    dtype: DType,
    op: ReduceOp,
    n: usize,
    sources: &[*mut u8],
    destinations: &[*mut u8],
    factors: &[f64],
    members: usize,
) {
    macro_rules! fold {
        ($($D:ident $T:ty),+) => {
            // SAFETY: the promise of the caller.
            unsafe { match dtype {
                $(DType::$D => {
                    let factor = |k: usize| <$T as summand::Summand>::factor(factors[k]);
                    host_kernels::fold::<$T>(n, code(op), sources, destinations, factor, members)
                })+
            } }
        };
    }
    fold!(F32 f32, F64 f64, F16 half::f16, BF16 half::bf16, I8 i8, U8 u8, I32 i32, U32 u32, I64 i64, U64 u64)
}

/// The kernel that copies several pairs of parts. Launched with [`Pairs::args`].
pub(crate) fn pairs() -> Entry {
    Entry { module: &builtin::COMBINE, name: "pairs", host: Some(host_kernels::pairs) }
}

/// A range of some device's memory.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// The first byte.
    pub address: Address,
    /// How many there are.
    pub bytes: usize,
}

impl Part {
    /// Nothing.
    pub const NONE: Part = Part { address: 0, bytes: 0 };

    pub(super) fn slice(self, write: bool) -> KernelArg {
        KernelArg::Slice { address: self.address, bytes: self.bytes, write }
    }
}

/// The arguments of a launch.
pub type Arguments = SmallVec<[KernelArg; 40]>;

/// `destinations[j][i]` = fold over `k` of `sources[k][i]`, for `i < n`.
///
/// A source may be the same memory as a destination, element for element; any other overlap of the two is wrong. GPUs
/// take up to [`MOST`] of each, software GPUs any number. One source is copied, unless `Scaled`.
pub(crate) struct Combine<'a> {
    pub n: usize,
    pub op: ReduceOp,
    /// One for each source when `op` is `Scaled` (whose own factor is not looked at), else empty.
    pub factors: &'a [f64],
    pub sources: &'a [Part],
    pub destinations: &'a [Part],
    pub meet: DeviceBarrier,
}

impl Combine<'_> {
    pub fn args(&self, software: bool) -> Arguments {
        let [sources, destinations] = [self.sources, self.destinations].map(|parts| value(parts.len() as u32));
        let [low, high] = factors(self.factors);
        let (meet, n, op) = (value(self.meet), value(self.n as u64), value(code(self.op)));
        let mut args = Arguments::from_iter([meet, n, op, sources, destinations, low, high]);
        push_parts(&mut args, self.sources, self.destinations, software);
        (2..self.factors.len().div_ceil(8)).for_each(|eight| args.push(eight_of(self.factors, eight)));
        args
    }
}

/// `pairs[k].1` = `pairs[k].0`, byte for byte; each pair's parts are equally long and do not overlap unless they are
/// the same. The grid has `pairs.len() * blocks_per_pair` blocks.
pub(crate) struct Pairs<'a> {
    pub pairs: &'a [(Part, Part)],
    pub blocks_per_pair: u32,
    pub meet: DeviceBarrier,
}

impl Pairs<'_> {
    pub fn args(&self, software: bool) -> Arguments {
        let pairs = value(self.pairs.len() as u32);
        let mut args = Arguments::from_iter([value(self.meet), pairs, value(self.blocks_per_pair)]);
        args.extend(eights(&std::array::from_fn(|k| self.pairs.get(k).map_or(0, |pair| pair.0.bytes as u64))));
        let (sources, destinations): (SmallVec<[Part; MOST]>, SmallVec<[Part; MOST]>) =
            self.pairs.iter().copied().unzip();
        push_parts(&mut args, &sources, &destinations, software);
        args
    }
}

/// How `exchange` and `slots` cut slices: alike by all members.
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

impl Pieces {
    pub fn of(cut: &Tiling, returns: bool) -> Self {
        let count = u32::try_from(cut.rounds).expect("they are counted in 32 bits; a terabyte has some millions");
        Pieces { piece: cut.tile as u64, count, returns: returns.into() }
    }
}

/// As `kernels/fold.cuh` counts them.
pub fn code(op: ReduceOp) -> u32 {
    match op {
        ReduceOp::Sum => host_kernels::SUM,
        ReduceOp::Prod => host_kernels::PROD,
        ReduceOp::Min => host_kernels::MIN,
        ReduceOp::Max => host_kernels::MAX,
        ReduceOp::Avg => host_kernels::AVG,
        ReduceOp::Scaled(_) => host_kernels::SCALED,
    }
}

/// The argument that is this value.
pub fn value<T: bytemuck::Pod>(x: T) -> KernelArg {
    KernelArg::Value(ValueBytes::new(bytemuck::bytes_of(&x)))
}

/// The `eight`-th eight of the factors.
fn eight_of(factors: &[f64], eight: usize) -> KernelArg {
    value::<[f64; 8]>(std::array::from_fn(|k| factors.get(8 * eight + k).copied().unwrap_or(0.0)))
}

/// The first sixteen.
pub(super) fn factors(factors: &[f64]) -> [KernelArg; 2] {
    [0, 1].map(|eight| eight_of(factors, eight))
}

/// The lower and the upper half of values by rank.
pub fn eights(all: &[u64; MOST]) -> [KernelArg; 2] {
    let (low, high) = all.split_at(8);
    [low, high].map(|eight| value(<[u64; 8]>::try_from(eight).expect("half of them")))
}

/// Sources, then destinations, each in [`MOST`] places or as many as it takes. A host kernel holds a range exclusively,
/// so there a source that is a destination is named by its number.
fn push_parts(args: &mut Arguments, sources: &[Part], destinations: &[Part], software: bool) {
    debug_assert!(software || sources.len().max(destinations.len()) <= MOST, "a GPU's kernel has {MOST} places");
    let same = |source: &Part| destinations.iter().position(|d| software && d.address == source.address && d.bytes > 0);
    let unused = |used: usize| (used..MOST).map(|_| value(0_u64));
    args.extend(sources.iter().map(|source| same(source).map_or(source.slice(false), |j| value(j as u64))));
    args.extend(unused(sources.len()));
    args.extend(destinations.iter().map(|destination| destination.slice(true)));
    args.extend(unused(destinations.len()));
}
