//! The kernels between the matrix products and the sums: their Rust halves, and functions that launch them. The other
//! halves are in `../decode.cu`, which `kernels/build.py` compiles. The model alone calls them.

use gpu_pool::{
    AsViewMut, Device, DeviceBuffer, DeviceViewMut, Element, Error, Kernel, LaunchDims, Module, Result, kernel,
    kernel::Float,
};
use half::bf16;

pub static MODULE: Module = Module::ptx(include_str!("../ptx/decode.ptx"));

/// Sizes that `decode.cu` has, too: the numbers of a head, heads that share keys, words of a sequence.
pub const HEAD: usize = 128;
pub const MOST_SHARED: usize = 4;
pub const LONGEST: usize = 1024;
/// Parts of a row in which the most likely word is looked for.
pub const PARTS: usize = 32;
/// Threads of a block of `attend`.
const THREADS: u32 = 512;

/// `(w, seed, len, cols, row0, col0, all_cols, largest)`
type Weights<T> = Kernel<(&'static mut [T], u32, u32, u32, u32, u32, u32, f32)>;
/// `(best, table, words, place, x, given, width)`
type NextWord<T> =
    Kernel<(&'static [u64], &'static [T], &'static mut [u32], &'static [u32], &'static mut [T], u32, u32)>;
/// `(qkv, angles, place, keys, values, mixed, shared_by, longest)`
type Attend<T> = Kernel<(
    &'static [T],
    &'static [f32],
    &'static [u32],
    &'static mut [T],
    &'static mut [T],
    &'static mut [T],
    u32,
    u32,
)>;
/// `(gate_up, y, inner)`
type Swiglu<T> = Kernel<(&'static [T], &'static mut [T], u32)>;
/// `(logits, best, place, words, first)`
type BestWord<T> = Kernel<(&'static [T], &'static mut [u64], &'static mut [u32], u32, u32)>;

/// The types that a model's numbers have, with their kernels.
pub trait Number: Float<Acc = f32> + Element {
    fn value(self) -> f32;
    /// Rounded to nearest.
    fn rounded(x: f32) -> Self;
    fn weights() -> &'static Weights<Self>;
    fn next_word() -> &'static NextWord<Self>;
    fn attend() -> &'static Attend<Self>;
    fn swiglu() -> &'static Swiglu<Self>;
    fn best_word() -> &'static BestWord<Self>;
}

macro_rules! number {
    ($T:ty, $wide:expr, $narrow:expr, $weights:literal $next:literal $attend:literal $swiglu:literal $best:literal) => {
        impl Number for $T {
            fn value(self) -> f32 {
                $wide(self)
            }
            fn rounded(x: f32) -> Self {
                $narrow(x)
            }
            fn weights() -> &'static Weights<Self> {
                kernel! {
                    static IT: $weights in MODULE,
                    fn(w: &mut [$T], seed: u32, len: u32, cols: u32, row0: u32, col0: u32, all: u32, most: f32) |_| {
                        for (i, w) in w.iter_mut().enumerate().take(len as usize) {
                            let (row, col) = (row0 as usize + i / cols as usize, col0 as usize + i % cols as usize);
                            *w = <$T>::rounded(weight(seed, row * all as usize + col, most));
                        }
                    }
                }
                &IT
            }
            fn next_word() -> &'static NextWord<Self> {
                kernel! {
                    static IT: $next in MODULE,
                    fn(best: &[u64], table: &[$T], words: &mut [u32], place: &[u32], x: &mut [$T], given: u32,
                       width: u32) |_| {
                        let (width, batch) = (width as usize, best.len() / PARTS);
                        let words = &mut words[place[0] as usize * batch..][..batch];
                        for ((word, best), x) in words.iter_mut().zip(best.chunks(PARTS)).zip(x.chunks_mut(width)) {
                            if place[0] >= given {
                                *word = !best.iter().fold(0, |most, &best| best.max(most)) as u32;
                            }
                            x.copy_from_slice(&table[*word as usize * width..][..width]);
                        }
                    }
                }
                &IT
            }
            fn attend() -> &'static Attend<Self> {
                kernel! {
                    static IT: $attend in MODULE,
                    fn(qkv: &[$T], angles: &[f32], place: &[u32], keys: &mut [$T], values: &mut [$T],
                       mixed: &mut [$T], shared_by: u32, longest: u32) |dims| {
                        let (groups, shared, at) = (dims.grid.0 as usize, shared_by as usize, place[0] as usize);
                        let room = longest as usize * HEAD;
                        let caches = keys.chunks_mut(room).zip(values.chunks_mut(room));
                        let caches = caches.zip(mixed.chunks_mut(shared * HEAD));
                        for (i, ((keys, values), mixed)) in caches.enumerate() {
                            let (row, own) = (&qkv[i / groups * groups * (shared + 2) * HEAD..], i % groups);
                            let head = |h: usize| &row[h * HEAD..][..HEAD];
                            let angles = &angles[at * HEAD..][..HEAD];
                            let new = |x: &mut [$T], from: Vec<f32>| {
                                let to = x[at * HEAD..][..HEAD].iter_mut();
                                to.zip(from).for_each(|(to, from)| *to = <$T>::rounded(from));
                            };
                            new(keys, turned(head(groups * shared + own), angles));
                            new(values, head(groups * (shared + 1) + own).iter().map(|x| x.value()).collect());
                            for (h, mixed) in mixed.chunks_mut(HEAD).enumerate() {
                                let query = turned(head(own * shared + h), angles);
                                let rows = (at + 1) * HEAD;
                                let result = attention(&query, &keys[..rows], &values[..rows]);
                                mixed.iter_mut().zip(result).for_each(|(to, x)| *to = <$T>::rounded(x));
                            }
                        }
                    }
                }
                &IT
            }
            fn swiglu() -> &'static Swiglu<Self> {
                kernel! {
                    static IT: $swiglu in MODULE, fn(gate_up: &[$T], y: &mut [$T], inner: u32) |_| {
                        let inner = inner as usize;
                        for (row, y) in gate_up.chunks(2 * inner).zip(y.chunks_mut(inner)) {
                            for (y, (gate, up)) in y.iter_mut().zip(row.iter().zip(&row[inner..])) {
                                let (gate, up) = (gate.value(), up.value());
                                *y = <$T>::rounded(gate / (1.0 + (-gate).exp()) * up);
                            }
                        }
                    }
                }
                &IT
            }
            fn best_word() -> &'static BestWord<Self> {
                kernel! {
                    static IT: $best in MODULE,
                    fn(logits: &[$T], best: &mut [u64], place: &mut [u32], words: u32, first: u32) |_| {
                        let each = (words as usize).div_ceil(PARTS);
                        for (row, best) in logits.chunks(words as usize).zip(best.chunks_mut(PARTS)) {
                            best.fill(0);
                            for (i, x) in row.iter().enumerate() {
                                best[i / each] = best[i / each].max(ranked(x.value(), first + i as u32));
                            }
                        }
                        place[0] += 1;
                    }
                }
                &IT
            }
        }
    };
}
number! { f32, |x| x, |x| x, "weights_f32" "next_word_f32" "attend_f32" "swiglu_f32" "best_word_f32" }
number! { bf16, bf16::to_f32, bf16::from_f32,
"weights_bf16" "next_word_bf16" "attend_bf16" "swiglu_bf16" "best_word_bf16" }

/// The weight of a place of a matrix: the same on all devices, in all runs. Chris Wellons' `lowbias32` makes it of the
/// place.
pub fn weight(seed: u32, place: usize, largest: f32) -> f32 {
    let mut x = (place as u32).wrapping_add(seed.wrapping_mul(0x9e37_79b9));
    x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
    x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
    (x ^ x >> 16) as i32 as f32 * (0.5f32).powi(31) * largest
}

/// A head's numbers, turned by the angles of a place: their cosines, then their sines.
fn turned<T: Number>(x: &[T], angles: &[f32]) -> Vec<f32> {
    let ((x, y), (cos, sin)) = (x.split_at(HEAD / 2), angles.split_at(HEAD / 2));
    let each = |i: usize| (x[i].value(), y[i].value(), cos[i], sin[i]);
    let first = (0..HEAD / 2).map(each).map(|(x, y, cos, sin)| x.mul_add(cos, -(y * sin)));
    first.chain((0..HEAD / 2).map(each).map(|(x, y, cos, sin)| y.mul_add(cos, x * sin))).collect()
}

/// Attention of one query.
fn attention<T: Number>(query: &[f32], keys: &[T], values: &[T]) -> Vec<f32> {
    let dot = |key: &[T]| key.iter().zip(query).fold(0.0f32, |sum, (k, q)| q.mul_add(k.value(), sum));
    let scores: Vec<f32> = keys.chunks(HEAD).map(|key| dot(key) * (HEAD as f32).powf(-0.5)).collect();
    let most = scores.iter().fold(f32::NEG_INFINITY, |most, score| most.max(*score));
    let shares: Vec<f32> = scores.iter().map(|score| (score - most).exp()).collect();
    let mut sums = vec![0.0f32; HEAD];
    for (share, value) in shares.iter().zip(values.chunks(HEAD)) {
        sums.iter_mut().zip(value).for_each(|(sum, value)| *sum = share.mul_add(value.value(), *sum));
    }
    let divisor: f32 = shares.iter().sum();
    sums.into_iter().map(|sum| sum / divisor).collect()
}

/// A number that is larger where the value is, or the value is the same and the word is lower.
fn ranked(value: f32, word: u32) -> u64 {
    let bits = value.to_bits();
    let order = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    u64::from(order) << 32 | u64::from(!word)
}

/// A part of a matrix of random weights: `rows` and `cols` of it begin at `at`, and all of it has `all_cols`.
#[derive(Clone, Copy)]
pub struct Part {
    pub seed: u32,
    pub at: (usize, usize),
    pub cols: usize,
    pub all_cols: usize,
    pub largest: f32,
}

/// Fills `w` with these weights.
#[track_caller]
pub fn weights<T: Number>(dev: &Device, mut w: DeviceViewMut<'_, T>, part: Part) -> Result<()> {
    let len = word_of(w.len())?;
    let [cols, row, col, all] = [part.cols, part.at.0, part.at.1, part.all_cols].map(|x| x as u32);
    let dims = LaunchDims::cover(w.len().min(1 << 22));
    let args = (w.view_mut(), part.seed, len, cols, row, col, all, part.largest);
    // SAFETY: both halves fit the signature, and write `len` elements.
    unsafe { dev.launch(T::weights(), dims, args) }
}

/// Writes each row's word of this place into `words`, unless it is given, and its row of the table into `x`.
#[track_caller]
pub fn next_word<T: Number>(
    dev: &Device,
    (best, table): (&DeviceBuffer<u64>, &DeviceBuffer<T>),
    (words, place): (&mut DeviceBuffer<u32>, &DeviceBuffer<u32>),
    x: &mut DeviceBuffer<T>,
    given: usize,
) -> Result<()> {
    let batch = best.len() / PARTS;
    let width = x.len() / batch;
    let dims = LaunchDims { grid: (batch as u32, 1, 1), block: (256, 1, 1), shared_bytes: 0 };
    // SAFETY: both halves fit the signature. The model keeps the place within `words`, whose given words are rows of
    // the table, as are those that `best_word` finds; and rows are whole 16 bytes.
    unsafe { dev.launch(T::next_word(), dims, (best, table, words, place, x, given as u32, width as u32)) }
}

/// Attention of one new word of each sequence: its query, key and value are a row of `qkv`. The caches have `groups`
/// heads for each sequence, with room for `longest` words.
#[track_caller]
pub fn attend<T: Number>(
    dev: &Device,
    (qkv, angles, place): (&DeviceBuffer<T>, &DeviceBuffer<f32>, &DeviceBuffer<u32>),
    [keys, values]: &mut [DeviceBuffer<T>; 2],
    mixed: &mut DeviceBuffer<T>,
    (batch, groups, shared): (usize, usize, usize),
) -> Result<()> {
    let longest = keys.len() / (batch * groups * HEAD);
    let dims = LaunchDims { grid: (groups as u32, batch as u32, 1), block: (THREADS, 1, 1), shared_bytes: 0 };
    // SAFETY: both halves fit the signature. The model has checked that the caches' length and `shared` are not more
    // than the kernel has room for, has made the buffers for these sizes, and keeps the place below `longest`.
    unsafe { dev.launch(T::attend(), dims, (qkv, angles, place, keys, values, mixed, shared as u32, longest as u32)) }
}

/// `y = silu(gate) * up`; a row of `gate_up` has `inner` gates and as many others.
#[track_caller]
pub fn swiglu<T: Number>(dev: &Device, gate_up: &DeviceBuffer<T>, y: &mut DeviceBuffer<T>, inner: usize) -> Result<()> {
    let rows = y.len() / inner;
    let dims = LaunchDims { grid: (inner.div_ceil(256) as u32, rows as u32, 1), block: (256, 1, 1), shared_bytes: 0 };
    // SAFETY: both halves fit the signature, and the model has made the buffers for rows of `inner`.
    unsafe { dev.launch(T::swiglu(), dims, (gate_up, y, inner as u32)) }
}

/// The most likely word of each row in [`PARTS`] parts, and the next place. The row's words begin with `first`.
#[track_caller]
pub fn best_word<T: Number>(
    dev: &Device,
    logits: &DeviceBuffer<T>,
    best: &mut DeviceBuffer<u64>,
    place: &mut DeviceBuffer<u32>,
    first: usize,
) -> Result<()> {
    let rows = best.len() / PARTS;
    let dims = LaunchDims { grid: (PARTS as u32, rows as u32, 1), block: (256, 1, 1), shared_bytes: 0 };
    let words = logits.len() / rows;
    // SAFETY: both halves fit the signature, and `best` has `PARTS` elements for each row of the logits.
    unsafe { dev.launch(T::best_word(), dims, (logits, best, place, words as u32, first as u32)) }
}

fn word_of(len: usize) -> Result<u32> {
    u32::try_from(len).map_err(|_| Error::custom(format!("a part of {len} weights")))
}
