//! Random numbers by counter, and dropout: `kernels/random.cu`. The generator is Philox4x32-10 (Salmon, Moraes, Dror
//! and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011), as in Random123, cuRAND and PyTorch.
//!
//! Invariant: element `i` of a call with `offset` is element `offset + i` of the seed's sequence, on every device.

use super::family::{Input, Maybe, Out, each, kernels};
use crate::kernels::RANDOM;
use crate::runtime::{ErrorInternals, Operations, Real, fours_of_packs};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, DeviceViewMut, Error, Kernel, Result, kernel, kernel::Float};
use std::{f64::consts::PI, ops::Range};

fn philox([mut x, mut y, mut z, mut w]: [u32; 4], [mut a, mut b]: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let (p, q) = (0xd251_1f53 * u64::from(x), 0xcd9e_8d57 * u64::from(z));
        (x, y, z, w) = ((q >> 32) as u32 ^ y ^ a, q as u32, (p >> 32) as u32 ^ w ^ b, p as u32);
        (a, b) = (a.wrapping_add(0x9e37_79b9), b.wrapping_add(0xbb67_ae85));
    }
    [x, y, z, w]
}

fn words(block: u64, seed: u64) -> [u32; 4] {
    philox([block as u32, (block >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32])
}

fn word(element: u64, seed: u64) -> u32 {
    words(element / 4, seed)[(element % 4) as usize]
}

fn elements(n: u64, offset: u64) -> impl Iterator<Item = u64> {
    (0..n).map(move |i| offset + i)
}

/// A uniform number in [0, 1) of a block: as many bits as type `kind` has, so exact and less than 1.
fn unit(kind: usize, words: [u32; 4], k: usize) -> f64 {
    match kind {
        0 => f64::from(words[k] >> 8) / 2f64.powi(24),
        1 => ((u64::from(words[2 * k]) | u64::from(words[2 * k + 1]) << 32) >> 11) as f64 / 2f64.powi(53),
        2 => f64::from(words[k] >> 21) / 2f64.powi(11),
        _ => f64::from(words[k] >> 24) / 2f64.powi(8),
    }
}

fn per_block<T>() -> u64 {
    if size_of::<T>() == 8 { 2 } else { 4 }
}

/// sin(pi t) for t in [0, 2]: the series of `kernels/random.cu`, which gives the same bits.
fn sin_pi(t: f64, quadrants: u32) -> f64 {
    let k = (2.0 * t).round_ties_even();
    let y = (t - 0.5 * k) * PI;
    let z = -(y * y);
    let (mut sine, mut cosine) = (1.0, 1.0);
    for i in (2..=18).rev().step_by(2) {
        sine = 1.0 + sine * z / f64::from(i * (i + 1));
        cosine = 1.0 + cosine * z / f64::from(i * (i - 1));
    }
    let quadrant = (k as u32 + quadrants) % 4;
    let x = if quadrant % 2 == 1 { cosine } else { y * sine };
    if quadrant < 2 { x } else { -x }
}

kernel! {
    static BITS: "random_u32" in RANDOM, fn(x: &mut [u32], n: u64, seed: u64, offset: u64) |_dims| {
        elements(n, offset).zip(x).for_each(|(element, x)| *x = word(element, seed));
    }
}
kernels! { RANDOM;
    fn uniform(_, x: Out<T>, n: u64, seed: u64, offset: u64, low: T::Acc, span: T::Acc) = "uniform" {
        let per = per_block::<T>();
        for (element, x) in elements(n, offset).zip(x) {
            let u = unit(T::KIND, words(element / per, seed), (element % per) as usize);
            *x = T::narrow(low + T::Acc::of(u) * span);
        }
    }
    fn normal(_, x: Out<T>, n: u64, seed: u64, offset: u64, mean: T::Acc, deviation: T::Acc) = "normal" {
        let per = per_block::<T>();
        // Half types are rounded from f32.
        let (kind, least) = if size_of::<T>() == 8 { (1, 2f64.powi(-53)) } else { (0, 2f64.powi(-24)) };
        for (element, x) in elements(n, offset).zip(x) {
            let (words, k) = (words(element / per, seed), (element % per) as usize);
            let (u, v) = (unit(kind, words, k & !1), unit(kind, words, k | 1));
            let radius = (T::Acc::of(-2.0) * T::Acc::of(u + least).ln()).sqrt();
            let height = T::Acc::of(sin_pi(2.0 * v, u32::from(k % 2 == 0)));
            *x = T::narrow(mean + radius * height * deviation);
        }
    }
    fn dropout(
        _, x: Maybe<T>, y: Out<T>, n: u64, seed: u64, offset: u64, threshold: u64, scale: T::Acc,
    ) = "dropout" {
        each(n, x, y, elements(n, offset), |x, element| {
            let drops = u64::from(word(element, seed)) < threshold;
            T::narrow(if drops { T::Acc::of(0.0) } else { T::wide(x) * scale })
        });
    }
}

type Draw<T> = Kernel<(Out<T>, u64, u64, u64, <T as Float>::Acc, <T as Float>::Acc)>;

/// Random numbers without a state: each is a function of `seed` and its number in the seed's sequence (Philox4x32-10,
/// Salmon and others, 2011). A call gives the elements `offset .. offset + n`. So a sequence cut into calls, also over
/// devices (`offset` is where the shard begins), has the numbers that one call would give; and the next call begins at
/// `offset + n`. A sequence has 2^64 elements; a call beyond its end is an error. The words are the same on GPUs and
/// software GPUs; so are uniform numbers and which elements dropout drops. Normal numbers may differ in the last bits.
///
/// A graph gives the same numbers at each launch: seed and offset are captured. Streams and errors: see [`ops`](super).
pub trait Random: Operations {
    /// Fills `x` with random words.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let (mut whole, mut part) = (dev.zeros::<u32>(10)?, dev.zeros::<u32>(3)?);
    /// dev.random_bits(&mut whole, 42, 0)?;
    /// dev.random_bits(&mut part, 42, 5)?;
    /// assert_eq!(dev.download(&whole)?[5..8], dev.download(&part)?);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn random_bits(&self, x: &mut impl AsViewMut<Elem = u32>, seed: u64, offset: u64) -> Result<()> {
        let x = x.view_mut();
        let _here = self.enter("random_bits");
        let n = sequence("random_bits", x.len(), offset)?;
        // SAFETY: `x` has `n` elements.
        unsafe { self.launch(&BITS, fours_of_packs::<u32>(x.len()), (x, n, seed, offset)) }
    }

    /// Fills `x` with numbers that are uniform in `range`: `start + u * (end - start)`, with `u` in [0, 1) of as many
    /// bits as the type has (24, 53, 11, 8). Rounding can give `end` itself, unless the range is `0.0..1.0`.
    ///
    /// ```
    /// # use gpu_pool_train::prelude::*;
    /// # let pool = gpu_pool::GpuPool::builder().host(2).build()?;
    /// // The weights of a layer, the same on all devices.
    /// let weights = pool.run(|dev, _| {
    ///     let mut w = dev.zeros::<f32>(1000)?;
    ///     dev.uniform(&mut w, -0.1..0.1, 7, 0)?;
    ///     dev.download(&w)
    /// })?;
    /// assert_eq!(weights[0], weights[1]);
    /// assert!(weights[0].iter().all(|w| (-0.1..=0.1).contains(w)));
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    #[track_caller]
    fn uniform<X: AsViewMut<Elem: Float>>(
        &self,
        x: &mut X,
        range: Range<<X::Elem as Float>::Acc>,
        seed: u64,
        offset: u64,
    ) -> Result<()> {
        let range = (range.start, range.end - range.start);
        draw(self.device(), "uniform", &uniform::<X::Elem>(), x.view_mut(), range, (seed, offset))
    }

    /// Fills `x` with normal numbers of this mean and standard deviation, by the method of Box and Muller (1958). `f32`
    /// and half types go no further than 5.8 standard deviations, `f64` than 8.6.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let mut x = dev.zeros::<f64>(1000)?;
    /// dev.normal(&mut x, 5.0, 0.1, 1, 0)?;
    /// let mean = dev.download(&x)?.iter().sum::<f64>() / 1000.0;
    /// assert!((mean - 5.0).abs() < 0.02);
    /// # Ok(()) });
    /// ```
    #[track_caller]
    fn normal<X: AsViewMut<Elem: Float>>(
        &self,
        x: &mut X,
        mean: <X::Elem as Float>::Acc,
        deviation: <X::Elem as Float>::Acc,
        seed: u64,
        offset: u64,
    ) -> Result<()> {
        draw(self.device(), "normal", &normal::<X::Elem>(), x.view_mut(), (mean, deviation), (seed, offset))
    }

    /// Dropout, in a new buffer: each element becomes 0 with `probability`, and is divided by `1 - probability`
    /// otherwise. The step back is [`dropout_in_place`](Self::dropout_in_place) of the gradient with the same seed and
    /// offset: no mask is kept. An element is dropped if its word is less than `probability * 2^32`.
    ///
    /// ```
    /// # gpu_pool_train::example!(|dev| {
    /// let x = dev.upload(&[1.0f32; 1000])?;
    /// let y = dev.download(&dev.dropout(&x, 0.5, 3, 0)?)?;
    /// assert!(y.iter().all(|&y| y == 0.0 || y == 2.0));
    /// # Ok(()) });
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a probability outside of [0, 1]; else see above.
    #[track_caller]
    fn dropout<X: AsView<Elem: Float>>(
        &self,
        x: &X,
        probability: f64,
        seed: u64,
        offset: u64,
    ) -> Result<DeviceBuffer<X::Elem>> {
        let x = x.view();
        let _here = self.enter("dropout");
        let n = sequence("dropout", x.len(), offset)?;
        let (threshold, scale) = chance::<<X::Elem as Float>::Acc>("dropout", probability)?;
        let mut y = self.allocate("dropout", x.len())?;
        let args = (Input::View(x), &mut y, n, seed, offset, threshold, scale);
        // SAFETY: both have `n` elements.
        unsafe { self.launch(&dropout::<X::Elem>(), fours_of_packs::<X::Elem>(x.len()), args)? };
        Ok(y)
    }

    /// [`dropout`](Self::dropout) in place. Errors: as [`dropout`](Self::dropout).
    #[track_caller]
    fn dropout_in_place<X: AsViewMut<Elem: Float>>(
        &self,
        x: &mut X,
        probability: f64,
        seed: u64,
        offset: u64,
    ) -> Result<()> {
        let x = x.view_mut();
        let _here = self.enter("dropout_in_place");
        let n = sequence("dropout_in_place", x.len(), offset)?;
        let (threshold, scale) = chance::<<X::Elem as Float>::Acc>("dropout_in_place", probability)?;
        let dims = fours_of_packs::<X::Elem>(x.len());
        let args = (Input::Output(x.address()), x, n, seed, offset, threshold, scale);
        // SAFETY: `x` has `n` elements.
        unsafe { self.launch(&dropout::<X::Elem>(), dims, args) }
    }
}

impl Random for Device {}

#[track_caller]
fn draw<T: Float>(
    dev: &Device,
    op: &'static str,
    kernel: &Draw<T>,
    x: DeviceViewMut<'_, T>,
    (a, b): (T::Acc, T::Acc),
    (seed, offset): (u64, u64),
) -> Result<()> {
    let _here = dev.enter(op);
    let finite = [a, b].iter().all(|x| x.to_f64().is_finite());
    invalid_if!(!finite, op, "numbers from {a:?} on, times {b:?}: both must be finite");
    let n = sequence(op, x.len(), offset)?;
    // SAFETY: `x` has `n` elements.
    unsafe { dev.launch(kernel, fours_of_packs::<T>(x.len()), (x, n, seed, offset, a, b)) }
}

#[track_caller]
fn sequence(op: &'static str, n: usize, offset: u64) -> Result<u64> {
    // The last element, not the one behind it, is a number of 64 bits.
    let last = offset.checked_add((n as u64).saturating_sub(1));
    invalid_if!(last.is_none(), op, "{n} elements from {offset} on: a sequence has 2^64");
    Ok(n as u64)
}

/// Keep threshold and scale, `1 / (1 - p)`.
fn chance<A: Real>(op: &'static str, probability: f64) -> Result<(u64, A)> {
    invalid_if!(!(0.0..=1.0).contains(&probability), op, "a probability of {probability}");
    let scale = if probability < 1.0 { 1.0 / (1.0 - probability) } else { 0.0 };
    Ok(((probability * 2f64.powi(32)) as u64, A::of(scale)))
}

#[cfg(test)]
#[path = "../../tests/unit/ops/random_tests.rs"]
mod tests;
