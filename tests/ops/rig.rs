//! What the tests share: the four types, values, and bounds of errors.

use gpu_pool::{Device, DeviceBuffer, Result, kernel::Float};
use half::{bf16, f16};

/// A type of the operations, with what a test needs of it.
pub trait Type: Float + std::fmt::Debug + PartialEq {
    /// The largest relative error of one rounding.
    const EPS: f64;
    fn of(x: f64) -> Self;
    fn to(self) -> f64;
    fn acc(x: f64) -> Self::Acc;
    fn acc_to(x: Self::Acc) -> f64;
}

macro_rules! types {
    ($($T:ty, $A:ty, $bits:literal, $of:expr, $to:expr;)+) => {$(
        impl Type for $T {
            const EPS: f64 = 1.0 / (1u64 << $bits) as f64;
            fn of(x: f64) -> Self { $of(x) }
            fn to(self) -> f64 { $to(self) }
            fn acc(x: f64) -> $A { x as $A }
            fn acc_to(x: $A) -> f64 { f64::from(x) }
        }
    )+};
}
types! {
    f32, f32, 24, |x| x as f32, f64::from;
    f64, f64, 53, |x| x, |x| x;
    f16, f32, 11, f16::from_f64, f16::to_f64;
    bf16, f32, 8, bf16::from_f64, bf16::to_f64;
}

/// The relative error of one rounding in the type that `T` computes in.
pub fn acc_eps<T: Type>() -> f64 {
    if size_of::<T>() == 8 { f64::EPS } else { f32::EPS }
}

/// Calls `$f::<T>` for each of the four types.
#[macro_export]
macro_rules! each_type {
    ($f:ident($($arg:expr),*)) => {{
        $f::<f32>($($arg),*);
        $f::<f64>($($arg),*);
        $f::<half::f16>($($arg),*);
        $f::<half::bf16>($($arg),*);
    }};
}

/// Numbers between -3 and 3 that `T` has, different for each seed.
pub fn values<T: Type>(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        T::of((state >> 11) as f64 / (1u64 << 53) as f64 * 6.0 - 3.0).to()
    };
    (0..n).map(|_| next()).collect()
}

pub fn upload<T: Type>(dev: &Device, x: &[f64]) -> Result<DeviceBuffer<T>> {
    dev.upload(&x.iter().map(|&x| T::of(x)).collect::<Vec<_>>())
}

pub fn download<T: Type>(dev: &Device, x: &DeviceBuffer<T>) -> Result<Vec<f64>> {
    Ok(dev.download(x)?.into_iter().map(T::to).collect())
}

/// One rounding to `T` of a result whose arithmetic is off by `slack` at most.
#[track_caller]
pub fn close<T: Type>(got: &[f64], want: &[f64], slack: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), want.len());
    // Half the smallest number of f16.
    let least = if size_of::<T>() == 2 { 3e-8 } else { 1e-38 };
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let bound = 1.01 * T::EPS * want.abs() + slack(i) + least;
        assert!(
            (got - want).abs() <= bound || (got.is_nan() && want.is_nan()) || got == want,
            "{}, element {i}: {got} instead of {want}, bound {bound:e}",
            std::any::type_name::<T>()
        );
    }
}

/// Widths of rows: less than a pack, odd, of a warp and of a block, more than is kept in registers.
pub fn widths(cuda: bool) -> Vec<usize> {
    let mut all = vec![1, 2, 3, 7, 8, 10, 31, 64, 100, 257, 513, 1024];
    if cuda {
        all.extend([1030, 4096, 8192, 8193, 16384, 20001, 32768, 65536]);
    }
    all
}

/// `dx` is the gradient of the sum of `w * forward(x)`: central differences are off by h^2 and by 1e-16 / h.
pub fn check(
    dev: &Device,
    x: &[f64],
    w: &[f64],
    dx: &DeviceBuffer<f64>,
    forward: impl Fn(&DeviceBuffer<f64>) -> Result<DeviceBuffer<f64>>,
) -> Result<()> {
    let h = 1e-5;
    let at = |i: usize, h: f64| {
        let mut x = x.to_vec();
        x[i] += h;
        let y = dev.download(&forward(&dev.upload(&x)?)?)?;
        Ok::<f64, gpu_pool::Error>(y.iter().zip(w).map(|(y, w)| y * w).sum())
    };
    for (i, dx) in dev.download(dx)?.iter().enumerate() {
        let difference = (at(i, h)? - at(i, -h)?) / (2.0 * h);
        assert!((difference - dx).abs() < 1e-7 * (1.0 + dx.abs()), "element {i}: {dx} instead of {difference}");
    }
    Ok(())
}
