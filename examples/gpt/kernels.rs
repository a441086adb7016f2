//! The kernels of this example's own, each with its Rust half for software GPUs, and safe functions that launch them.
//! `gpt.cu` has the device code, which `kernels/build.py` compiles. `attention.rs` calls the functions.

use gpu_pool::{
    AsView, Device, DeviceBuffer, DeviceView, Error, Kernel, LaunchDims, Module, Result, half::bf16, kernel,
    kernel::Float,
};

pub static MODULE: Module = Module::ptx(include_str!("ptx/gpt.ptx"));

/// The shape of heads: rows of all sequences, places of a sequence, heads, and the width of one.
#[derive(Clone, Copy)]
pub struct Heads {
    pub rows: usize,
    pub context: usize,
    pub heads: usize,
    pub head: usize,
}

impl Heads {
    /// Matrices of a batch: one for each head of each sequence.
    pub fn count(&self) -> usize {
        self.rows / self.context * self.heads
    }

    pub fn width(&self) -> usize {
        self.heads * self.head
    }

    /// A kernel's numbers. It has packs of 16 bytes and counts places in 32 bits.
    #[track_caller]
    fn numbers(&self) -> Result<(u64, u32, u32, u32)> {
        let whole = self.context > 0 && self.context.is_multiple_of(8) && self.head > 0 && self.head.is_multiple_of(8);
        if !whole || !self.rows.is_multiple_of(self.context) || self.rows * self.width() > u32::MAX as usize {
            return Err(Error::custom("contexts and heads are multiples of 8, and rows those of whole sequences"));
        }
        Ok((self.rows as u64, self.context as u32, self.heads as u32, self.head as u32))
    }

    fn dims(&self, parts: usize, size: usize) -> LaunchDims {
        let packs = self.context * self.head * size / 16;
        let sequences = (self.rows / self.context * parts).clamp(1, 65_535);
        LaunchDims {
            grid: (packs.div_ceil(256).max(1) as u32, self.heads as u32, sequences as u32),
            block: (256, 1, 1),
            shared_bytes: 0,
        }
    }
}

type Split<T> = Kernel<(&'static [T], &'static [T], &'static mut [T], u64, u32, u32, u32, u32, u32)>;
type Merge<T> = Kernel<(&'static [T], &'static mut [T], u64, u32, u32, u32, u32)>;
type Softmax<T> = Kernel<(&'static mut [T], u64, u32, u32)>;
type SoftmaxBackward<T> = Kernel<(&'static [T], &'static mut [T], u64, u32, u32)>;

/// A type of numbers that the model computes in, with its kernels. `f64` has none for GPUs: it is for tests.
pub trait Number: Float<Acc: Into<f64>> + 'static {
    const SPLIT: &'static Split<Self>;
    const MERGE: &'static Merge<Self>;
    const SOFTMAX: &'static Softmax<Self>;
    const SOFTMAX_BACKWARD: &'static SoftmaxBackward<Self>;

    /// A factor of a matrix product, and the like.
    fn factor(x: f64) -> Self::Acc;
    fn of(x: f64) -> Self;
}

/// Calls `f(divided, whole, column)` for each element: its places in both orders, and its column.
fn each_element(rows: u64, context: u32, heads: u32, head: u32, parts: u32, mut f: impl FnMut(usize, usize, usize)) {
    let [rows, context, heads, head, parts] =
        [rows as usize, context as usize, heads as usize, head as usize, parts as usize];
    let (sequences, mut divided) = (rows / context, 0);
    for part in 0..parts {
        for sequence in 0..sequences {
            for h in 0..heads {
                for place in 0..context {
                    for at in 0..head {
                        let column = (part * heads + h) * head + at;
                        f(divided, (sequence * context + place) * parts * heads * head + column, column);
                        divided += 1;
                    }
                }
            }
        }
    }
}

/// The row's place in its sequence, and the end of the block with the place.
fn place_and_end(row: usize, context: u32, block: u32) -> (usize, usize) {
    let (place, block) = (row % context as usize, block as usize);
    (place, (place / block + 1) * block)
}

macro_rules! numbers {
    ($($module:ident $T:ty, $A:ty, $wide:expr, $narrow:expr,
       $split:literal $merge:literal $softmax:literal $softmax_backward:literal;)+) => {$(
        mod $module {
            use super::*;

            kernel! {
                pub static SPLIT: $split in MODULE, fn(
                    x: &[$T], bias: &[$T], y: &mut [$T], rows: u64, context: u32, heads: u32, head: u32, parts: u32,
                    biased: u32,
                ) |_| {
                    each_element(rows, context, heads, head, parts, |divided, whole, column| {
                        let value = x[whole];
                        y[divided] = if biased != 0 { $narrow($wide(value) + $wide(bias[column])) } else { value };
                    });
                }

                pub static MERGE: $merge in MODULE, fn(
                    x: &[$T], y: &mut [$T], rows: u64, context: u32, heads: u32, head: u32, parts: u32,
                ) |_| {
                    each_element(rows, context, heads, head, parts, |divided, whole, _| y[whole] = x[divided]);
                }

                pub static SOFTMAX: $softmax in MODULE, fn(x: &mut [$T], rows: u64, context: u32, block: u32) |_| {
                    for (row, x) in x.chunks_exact_mut(context as usize).take(rows as usize).enumerate() {
                        let (place, end) = place_and_end(row, context, block);
                        let top = x[..=place].iter().map(|&x| $wide(x)).fold(<$A>::NEG_INFINITY, <$A>::max);
                        let sum: $A = x[..=place].iter().map(|&x| ($wide(x) - top).exp()).sum();
                        for x in &mut x[..=place] {
                            *x = $narrow(($wide(*x) - top).exp() * (1.0 / sum));
                        }
                        x[place + 1..end].fill($narrow(0.0));
                    }
                }

                pub static SOFTMAX_BACKWARD: $softmax_backward in MODULE, fn(
                    y: &[$T], dy: &mut [$T], rows: u64, context: u32, block: u32,
                ) |_| {
                    let cols = context as usize;
                    let both = y.chunks_exact(cols).zip(dy.chunks_exact_mut(cols)).take(rows as usize);
                    for (row, (y, dy)) in both.enumerate() {
                        let (_, end) = place_and_end(row, context, block);
                        let (y, dy) = (&y[..end], &mut dy[..end]);
                        let sum: $A = y.iter().zip(&*dy).map(|(&y, &dy)| $wide(dy) * $wide(y)).sum();
                        for (y, dy) in y.iter().zip(dy) {
                            *dy = $narrow($wide(*y) * ($wide(*dy) - sum));
                        }
                    }
                }
            }
        }

        impl Number for $T {
            const SPLIT: &'static Split<$T> = &$module::SPLIT;
            const MERGE: &'static Merge<$T> = &$module::MERGE;
            const SOFTMAX: &'static Softmax<$T> = &$module::SOFTMAX;
            const SOFTMAX_BACKWARD: &'static SoftmaxBackward<$T> = &$module::SOFTMAX_BACKWARD;

            fn factor(x: f64) -> $A {
                x as $A
            }

            fn of(x: f64) -> $T {
                $narrow(x as $A)
            }
        }
    )+};
}
numbers! {
    of_f32 f32, f32, f32::from, f32::from,
        "split_heads_f32" "merge_heads_f32" "causal_softmax_f32" "causal_softmax_backward_f32";
    of_bf16 bf16, f32, bf16::to_f32, bf16::from_f32,
        "split_heads_bf16" "merge_heads_bf16" "causal_softmax_bf16" "causal_softmax_backward_bf16";
    of_f64 f64, f64, f64::from, f64::from,
        "split_heads_f64" "merge_heads_f64" "causal_softmax_f64" "causal_softmax_backward_f64";
}

/// Memory that the next operation writes before it is read.
pub fn room<T: Number>(dev: &Device, len: usize) -> Result<DeviceBuffer<T>> {
    // SAFETY: every bit pattern is a float. The callers pass it to operations that write all that is read later.
    unsafe { dev.uninit(len) }
}

/// The parts of rows, such as queries, keys and values, each as a matrix for each head of each sequence. The bias has
/// an element for each column of `x`.
#[track_caller]
pub fn split_heads<T: Number>(
    dev: &Device,
    of: Heads,
    parts: usize,
    x: &DeviceBuffer<T>,
    bias: Option<DeviceView<'_, T>>,
) -> Result<DeviceBuffer<T>> {
    let (rows, context, heads, head) = of.numbers()?;
    let fits = x.len() == of.rows * of.width() * parts && bias.is_none_or(|b| b.len() == of.width() * parts);
    if !fits {
        return Err(Error::custom("split_heads: the shapes do not fit"));
    }
    let mut y = room(dev, x.len())?;
    let biased = u32::from(bias.is_some());
    let args = (x, bias.unwrap_or(x.view()), &mut y, rows, context, heads, head, parts as u32, biased);
    // SAFETY: both halves fit the signature; `x` and `y` have `parts` times the elements of `of`, the bias a row of
    // them. It is not read without `biased`.
    unsafe { dev.launch(T::SPLIT, of.dims(parts, size_of::<T>()), args)? };
    Ok(y)
}

/// The way back, without a bias.
#[track_caller]
pub fn merge_heads<T: Number>(dev: &Device, of: Heads, parts: usize, x: &DeviceBuffer<T>) -> Result<DeviceBuffer<T>> {
    let (rows, context, heads, head) = of.numbers()?;
    if x.len() != of.rows * of.width() * parts {
        return Err(Error::custom("merge_heads: the shapes do not fit"));
    }
    let mut y = room(dev, x.len())?;
    let args = (x, &mut y, rows, context, heads, head, parts as u32);
    // SAFETY: both halves fit the signature; `x` and `y` have `parts` times the elements of `of`.
    unsafe { dev.launch(T::MERGE, of.dims(parts, size_of::<T>()), args)? };
    Ok(y)
}

/// Rows of softmax, a warp for each.
fn row_dims(rows: usize) -> LaunchDims {
    LaunchDims { grid: (rows.div_ceil(8).clamp(1, 1 << 30) as u32, 1, 1), block: (32, 8, 1), shared_bytes: 0 }
}

/// A kernel's numbers for rows of scores.
#[track_caller]
fn rows_of(len: usize, context: usize, block: usize) -> Result<(u64, u32, u32)> {
    let whole = block > 0 && block.is_multiple_of(8) && context.is_multiple_of(block);
    if !whole || !len.is_multiple_of(context) || len / context > u32::MAX as usize {
        return Err(Error::custom("a block is a multiple of 8, and the context one of blocks"));
    }
    Ok(((len / context) as u64, context as u32, block as u32))
}

/// The softmax of each row of scores up to the row's place, in place. The rest of the place's block becomes 0; elements
/// behind the block are left as they are.
#[track_caller]
pub fn causal_softmax<T: Number>(dev: &Device, x: &mut DeviceBuffer<T>, context: usize, block: usize) -> Result<()> {
    let (rows, cols, block) = rows_of(x.len(), context, block)?;
    // SAFETY: both halves fit the signature; `x` has `rows` rows of `context` elements.
    unsafe { dev.launch(T::SOFTMAX, row_dims(rows as usize), (x, rows, cols, block)) }
}

/// The step back: from the gradient of the shares `y` to that of the scores, in place, up to the end of each place's
/// block.
#[track_caller]
pub fn causal_softmax_backward<T: Number>(
    dev: &Device,
    y: &DeviceBuffer<T>,
    dy: &mut DeviceBuffer<T>,
    context: usize,
    block: usize,
) -> Result<()> {
    let (rows, cols, block) = rows_of(y.len(), context, block)?;
    if dy.len() != y.len() {
        return Err(Error::custom("causal_softmax_backward: the shapes do not fit"));
    }
    // SAFETY: both halves fit the signature; `y` and `dy` have `rows` rows of `context` elements.
    unsafe { dev.launch(T::SOFTMAX_BACKWARD, row_dims(rows as usize), (y, dy, rows, cols, block)) }
}
