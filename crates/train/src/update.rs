//! Launches of `kernels/optimizer.cu`: sums of squares, and the update of parameters; with their host kernels.
//!
//! [`data_parallel`](crate::data_parallel) calls them for whole buckets, [`sharded`](crate::sharded) for one buffer.
//! The formulas' numbers come from [`optim`](crate::optim), as a [`Rule`]. Invariant: each element is computed by
//! itself, in `f32`, by the same operations in the same order as in the device code.

#[cfg(test)]
#[path = "../tests/unit/update/tests.rs"]
mod tests;

use crate::kernels::OPTIMIZER;
use crate::runtime::{
    Access, CHUNK, HostArg, HostKernel, KernelArg, in_type,
    segments::{
        Arguments, SEGMENTS, Segment, THREADS, Touch, launch, pointer, push_table, read, slice, table, touch, value,
    },
    unpack,
};
use gpu_pool::{
    AsView, DType, Device, DeviceBuffer, DeviceCopy, DeviceView, Element, LaunchDims, Result, gradients::Gradient,
    kernel::Float,
};
use half::{bf16, f16};
use smallvec::{SmallVec, smallvec};

/// A warp sums a chunk up, and a block has 16 of them. With fewer chunks than warps, more multiprocessors have work.
const CHUNKS_PER_BLOCK: usize = 4;
/// Elements that a thread handles at once.
const PACK: usize = 4;
/// Most thread blocks of an update: more than any GPU runs at once.
const MOST_BLOCKS: usize = 2048;

/// The types of a model's parameters: `f32`, `half::f16` and `half::bf16`. Sealed, since the kernels are part of the
/// crate. Optimizers compute in `f32`, and keep a copy of parameters of half types in `f32`.
#[diagnostic::on_unimplemented(
    message = "parameters of type `{Self}` are not trained",
    note = "those of f32, half::f16 and half::bf16 are"
)]
pub trait Parameter: Gradient<Norm = f32> + Float<Acc = f32> + private::Trained {}

mod private {
    use super::HostKernel;

    /// A kernel's name and its host kernel.
    pub type Named = (&'static str, HostKernel);

    pub trait Trained {
        const SQUARES: Named;
        const UPDATE: Named;
        const SHARDED: &'static str;
        const SHARDED_BUCKETS: &'static str;
    }
}

use private::Named;

macro_rules! parameters {
    ($($T:ty: $squares:literal, $update:literal, $sharded:literal, $buckets:literal;)+) => {$(
        impl Parameter for $T {}
        impl private::Trained for $T {
            const SQUARES: Named = ($squares, squares_host::<$T>);
            const UPDATE: Named = ($update, update_host::<$T>);
            const SHARDED: &'static str = $sharded;
            const SHARDED_BUCKETS: &'static str = $buckets;
        }
    )+};
}
parameters! {
    f32: "squares_f32", "update_f32", "sharded_f32", "sharded_buckets_f32";
    f16: "squares_f16", "update_f16", "sharded_f16", "sharded_buckets_f16";
    bf16: "squares_bf16", "update_bf16", "sharded_bf16", "sharded_buckets_bf16";
}

/// [`Rule::kind`]: `w -= rate * g`.
const SGD: u32 = 0;
/// [`Rule::kind`]: with one moment.
pub(crate) const MOMENTUM: u32 = 1;
/// [`Rule::kind`]: with two moments.
pub(crate) const ADAM: u32 = 2;
/// [`Rule::kind`]: everything stays as it is.
const NOTHING: u32 = 3;

/// How a parameter follows from its gradient, in one step: `Rule` of the device code.
#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Rule {
    pub kind: u32,
    pub nesterov: u32,
    /// Whether new parameters are also written to the bucket.
    pub gather: u32,
    /// The factor of gradients, before they are clipped. The norm is of gradients without it.
    pub factor: f32,
    /// The largest norm; 0: not clipped.
    pub most: f32,
    /// Added to the gradient, times the parameter.
    pub decay: f32,
    /// The first factor of the parameter.
    pub shrink: f32,
    pub beta1: f32,
    pub rest1: f32,
    pub beta2: f32,
    pub rest2: f32,
    /// The learning rate; of Adam over `1 - beta1^t`.
    pub rate: f32,
    /// The root of `1 - beta2^t`.
    pub root: f32,
    pub eps: f32,
}

/// An optimizer's memory, by [kind](crate::optim::KINDS).
pub(crate) type Kept = [Option<DeviceBuffer<f32>>; 3];

/// Memory of the kinds that an optimizer [keeps](crate::Optimizer::keeps).
pub(crate) fn kept(dev: &Device, keeps: [bool; 3], len: usize) -> Result<Kept> {
    let [first, second, master] = keeps.map(|kept| kept.then(|| dev.zeros::<f32>(len)).transpose());
    Ok([first?, second?, master?])
}

/// An optimizer's memory for the elements of a bucket from `begin` on; each as long as the member's part.
#[derive(Clone, Copy, Default)]
pub(crate) struct Moments<'a> {
    pub begin: usize,
    pub kept: [Option<DeviceView<'a, f32>>; 3],
}

impl<'a> Moments<'a> {
    pub fn of(begin: usize, kept: &'a Kept) -> Self {
        Moments { begin, kept: kept.each_ref().map(|memory| memory.as_ref().map(DeviceBuffer::view)) }
    }

    pub fn args(&self) -> [KernelArg; 3] {
        self.kept.each_ref().map(|of| memory(of.as_ref(), true))
    }
}

pub(crate) fn squares_args<T: Parameter>(g: &DeviceView<'_, T>, partial: &DeviceView<'_, f64>) -> Arguments {
    [memory(Some(g), false), memory(Some(partial), true), value(g.len() as u64)].into_iter().collect()
}

/// Writes the sum of the squares of each chunk of `g`.
pub(crate) fn squares<T: Parameter>(dev: &Device, g: &DeviceView<'_, T>, partial: &DeviceView<'_, f64>) -> Result<()> {
    debug_assert_eq!(partial.len(), g.len().div_ceil(CHUNK));
    let args = squares_args(g, partial);
    let touched = [touch(g, Access::Read), touch(partial, Access::Write)];
    let blocks = partial.len().div_ceil(CHUNKS_PER_BLOCK).clamp(1, MOST_BLOCKS);
    launch(dev, &OPTIMIZER, T::SQUARES, blocks, &args, &touched)
}

/// Memory as an argument: null if there is none.
pub(crate) fn memory<T: DeviceCopy>(of: Option<&DeviceView<'_, T>>, written: bool) -> KernelArg {
    of.map_or(value(0u64), |of| slice(of.address(), size_of::<T>() * of.len(), written))
}

pub(crate) fn update_args<T: Parameter>(
    g: &DeviceView<'_, T>,
    moments: &Moments<'_>,
    norm: &DeviceView<'_, f32>,
    segments: &[Segment<'_, T>],
    (rule, later): (Rule, Option<&DeviceView<'_, u32>>),
) -> Arguments {
    let mut args = Arguments::new();
    args.push(memory(Some(g), true));
    args.extend(moments.args());
    args.extend([memory(Some(norm), false), value(moments.begin as u64), value(segments.len() as u32)]);
    args.extend([value(rule), memory(later, false)]);
    push_table(&mut args, segments, true);
    args
}

/// Updates the parameters that are the segments' memory, by the gradients `g`. No segment is empty, and each has
/// memory. `later` is the memory of a rule that counts in place of `rule`: for graphs.
pub(crate) fn update<T: Parameter>(
    dev: &Device,
    g: &DeviceView<'_, T>,
    moments: &Moments<'_>,
    norm: &DeviceView<'_, f32>,
    segments: &[Segment<'_, T>],
    (rule, later): (Rule, Option<&DeviceView<'_, u32>>),
) -> Result<()> {
    for some in segments.chunks(SEGMENTS) {
        let blocks = span(some).1.div_ceil(PACK).div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS);
        let mut touched: SmallVec<[Touch<'_>; 8]> = smallvec![touch(g, Access::Write), touch(norm, Access::Read)];
        touched.extend(later.map(|later| touch(later, Access::Read)));
        touched.extend(moments.kept.iter().flatten().map(|memory| touch(memory, Access::Write)));
        let places = some.iter().filter_map(|segment| segment.memory.as_ref());
        touched.extend(places.map(|memory| touch(memory, Access::Write)));
        launch(dev, &OPTIMIZER, T::UPDATE, blocks, &update_args(g, moments, norm, some, (rule, later)), &touched)?;
    }
    Ok(())
}

/// Copies the parameters that were gathered in `from` to the segments' memory.
pub(crate) fn bring_back<T: Parameter>(dev: &Device, from: &DeviceView<'_, T>, to: &[Segment<'_, T>]) -> Result<()> {
    for some in to.chunks(SEGMENTS) {
        unpack::<T, T>(dev, from, span(some), some, None)?;
    }
    Ok(())
}

/// Where the first of these segments begins, and the elements up to the end of the last one.
fn span<T: Parameter>(segments: &[Segment<'_, T>]) -> (usize, usize) {
    let (first, last) = (segments[0], segments[segments.len() - 1]);
    (first.start, last.start + last.len - first.start)
}

/// `sum += piece` in a half type, over many calls: `wide` has the sum in `f32`, with an element for each, rounded up to
/// a multiple of `PACK`. It is an update with a rate of -1, so `sum` counts where `wide` does not round to it: the
/// caller may have written it. `zero` is a number 0.
pub(crate) fn add_up<T: Element>(
    dev: &Device,
    piece: DeviceView<'_, T>,
    sum: DeviceView<'_, T>,
    [wide, zero]: [&DeviceBuffer<f32>; 2],
) -> Result<()> {
    debug_assert!(piece.len() == sum.len() && wide.len() == wide_len(sum.len()));
    match T::DTYPE {
        DType::F16 => add_up_in::<f16>(dev, in_type(piece), in_type(sum), [wide, zero]),
        DType::BF16 => add_up_in::<bf16>(dev, in_type(piece), in_type(sum), [wide, zero]),
        other => unreachable!("{other:?} is no half type"),
    }
}

pub(crate) fn wide_len(len: usize) -> usize {
    len.next_multiple_of(PACK)
}

fn add_up_in<T: Parameter>(
    dev: &Device,
    piece: DeviceView<'_, T>,
    sum: DeviceView<'_, T>,
    [wide, zero]: [&DeviceBuffer<f32>; 2],
) -> Result<()> {
    let rule = Rule { rate: -1.0, ..Rule::plain() };
    let moments = Moments { begin: 0, kept: [None, None, Some(wide.view())] };
    let all = Segment { start: 0, len: sum.len(), memory: Some(sum) };
    update(dev, &piece, &moments, &zero.view(), &[all], (rule, None))
}

/// # Safety
/// `args` are those of [`squares`] for this type, with the memory behind them.
unsafe fn squares_host<T: Parameter>(_dims: LaunchDims, args: &[HostArg]) {
    let (Some((g, len)), Some((partial, count))) = (pointer::<T>(&args[0]), pointer::<f64>(&args[1])) else { return };
    // SAFETY: memory of `len` elements that nobody writes meanwhile (the caller's promise).
    let g = unsafe { std::slice::from_raw_parts(g.cast_const(), len) };
    // SAFETY: only this kernel has the sums.
    let partial = unsafe { std::slice::from_raw_parts_mut(partial, count) };
    for (sum, chunk) in partial.iter_mut().zip(g.chunks(CHUNK)) {
        *sum = chunk.iter().map(|x| f64::from(T::wide(*x))).fold(0.0, |sum, x| sum + x * x);
    }
}

/// # Safety
/// `args` are those of [`update`] for this type, with the memory behind them.
unsafe fn update_host<T: Parameter>(_dims: LaunchDims, args: &[HostArg]) {
    let (Some((g, len)), Some((norm, _))) = (pointer::<T>(&args[0]), pointer::<f32>(&args[4])) else { return };
    // SAFETY: only this kernel has the bucket (the caller's promise), and it is aligned as device memory is.
    let g = unsafe { std::slice::from_raw_parts_mut(g, len) };
    // SAFETY: one number, which nobody writes meanwhile.
    let norm = unsafe { *norm };
    let mut state = [1, 2, 3].map(|at| {
        // SAFETY: only this kernel has the moments, which are none of the other arguments.
        pointer::<f32>(&args[at]).map(|(memory, len)| unsafe { std::slice::from_raw_parts_mut(memory, len) })
    });
    let begin = read::<u64>(&args[5]) as usize;
    let count = read::<u32>(&args[6]) as usize;
    let rule = match pointer::<Rule>(&args[8]) {
        // SAFETY: one rule, which nobody writes meanwhile. Memory of the library is aligned to 256 bytes.
        Some((later, _)) => unsafe { *later },
        None => read::<Rule>(&args[7]),
    };
    let scale = rule.scale(norm);
    for (start, len, memory) in table::<T>(args, 9, count) {
        let Some(memory) = memory else { continue };
        // SAFETY: a segment has `len` elements that only this kernel has, and that are not part of the bucket.
        let own = unsafe { std::slice::from_raw_parts_mut(memory, len) };
        for (own, at) in own.iter_mut().zip(start..) {
            let mut values = [0.0; 3];
            values.iter_mut().zip(&state).for_each(|(x, memory)| *x = memory.as_ref().map_or(0.0, |m| m[at - begin]));
            let [first, second, master] = &mut values;
            let current = T::narrow(*master);
            if state[2].is_none() || bytemuck::bytes_of(&current) != bytemuck::bytes_of(own) {
                *master = T::wide(*own);
            }
            if norm.is_finite() && rule.kind != NOTHING {
                *master = rule.next(scale, T::wide(g[at]), *master, first, second);
                *own = T::narrow(*master);
                let written = state.iter_mut().zip(values);
                written.for_each(|(memory, x)| memory.iter_mut().for_each(|memory| memory[at - begin] = x));
            }
            if rule.gather != 0 {
                g[at] = *own;
            }
        }
    }
}

impl Rule {
    /// [`SGD`] with a rate of 0.
    pub fn plain() -> Rule {
        Rule { kind: SGD, factor: 1.0, shrink: 1.0, ..bytemuck::Zeroable::zeroed() }
    }

    /// Everything stays as it is.
    pub fn nothing() -> Rule {
        Rule { kind: NOTHING, ..bytemuck::Zeroable::zeroed() }
    }

    fn scale(&self, norm: f32) -> f32 {
        let clip = self.most / (norm * self.factor + 1e-6);
        if self.most > 0.0 && clip < 1.0 { self.factor * clip } else { self.factor }
    }

    fn next(&self, scale: f32, g: f32, w: f32, first: &mut f32, second: &mut f32) -> f32 {
        let (mut g, w) = (g * scale, w * self.shrink);
        if self.decay != 0.0 {
            g += self.decay * w;
        }
        match self.kind {
            SGD => w - self.rate * g,
            MOMENTUM => {
                *first = self.beta1 * *first + self.rest1 * g;
                w - self.rate * if self.nesterov != 0 { g + self.beta1 * *first } else { *first }
            }
            _ => {
                *first += (g - *first) * self.rest1;
                *second = self.beta2 * *second + self.rest2 * (g * g);
                w - self.rate * (*first / (second.sqrt() / self.root + self.eps))
            }
        }
    }
}
