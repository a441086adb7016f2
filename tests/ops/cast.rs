//! Conversions from and to integers.

use crate::on_both;
use gpu_pool::{Device, DeviceCopy, Result, kernel::CastTo};
use half::{bf16, f16};

fn same<A: CastTo<B>, B: DeviceCopy + PartialEq + std::fmt::Debug>(
    dev: &Device,
    x: &[A],
    as_rust: impl Fn(A) -> B,
) -> Result<()> {
    let y = dev.download(&dev.cast::<B, _>(&dev.upload(x)?)?)?;
    assert_eq!(y, x.iter().map(|&x| as_rust(x)).collect::<Vec<_>>());
    Ok(())
}

const FLOATS: [f64; 24] = [
    0.0,
    -0.0,
    0.5,
    -0.5,
    0.999,
    1.5,
    -1.5,
    2.5,
    126.9,
    127.0,
    128.0,
    -128.0,
    -128.9,
    -129.0,
    255.0,
    256.0,
    65504.0,
    2147483647.0,
    4294967296.0,
    -2147483648.0,
    1e18,
    1e30,
    f64::INFINITY,
    f64::NAN,
];
const INTEGERS: [i128; 26] = [
    0,
    1,
    -1,
    127,
    128,
    -128,
    -129,
    255,
    256,
    2049,
    2051,
    -2049,
    65519,
    65520,
    16777217,
    16777219,
    i32::MAX as i128,
    i32::MIN as i128,
    u32::MAX as i128,
    (1 << 53) + 1,
    i64::MAX as i128,
    i64::MIN as i128,
    u64::MAX as i128,
    // Ties in bf16, and just above one: rounding twice would take the second for the first.
    (257 << 30) as i128,
    ((257_i128) << 30) + 1,
    (257_i128 << 54) + 1,
];

/// The nearest number of a half type: of the 20 highest bits, and whether there are others, which `f32` has exactly.
/// (`bf16::from_f64` looks at the upper half of its argument alone.)
fn nearest<H>(x: i128, of: fn(f32) -> H) -> H {
    let m = x.unsigned_abs();
    let cut = (128 - m.leading_zeros()).saturating_sub(20);
    let m = (m >> cut << cut) | if m & ((1 << cut) - 1) != 0 { 1 << cut } else { 0 };
    of(if x < 0 { -(m as f32) } else { m as f32 })
}

macro_rules! integers {
    ($dev:ident; $($I:ty),+) => {$(
        same::<f32, $I>($dev, &FLOATS.map(|x| x as f32), |x| x as $I)?;
        same::<f64, $I>($dev, &FLOATS, |x| x as $I)?;
        same::<f16, $I>($dev, &FLOATS.map(f16::from_f64), |x| x.to_f64() as $I)?;
        same::<bf16, $I>($dev, &FLOATS.map(bf16::from_f64), |x| x.to_f64() as $I)?;
        let all = INTEGERS.map(|x| x as $I);
        same::<$I, f32>($dev, &all, |x| x as f32)?;
        same::<$I, f64>($dev, &all, |x| x as f64)?;
        same::<$I, f16>($dev, &all, |x| nearest(i128::from(x), f16::from_f32))?;
        same::<$I, bf16>($dev, &all, |x| nearest(i128::from(x), bf16::from_f32))?;
    )+};
}
macro_rules! pairs {
    ($dev:ident; $($A:ty => $($B:ty),+;)+) => {$($(
        same::<$A, $B>($dev, &INTEGERS.map(|x| x as $A), |x| x as $B)?;
    )+)+};
}

on_both! {
    1: fn as_rust_converts(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            integers!(dev; i8, u8, i32, u32, i64, u64);
            pairs! { dev;
                i8 => u8, i32, u32, i64, u64;
                u8 => i8, i32, u32, i64, u64;
                i32 => i8, u8, u32, i64, u64;
                u32 => i8, u8, i32, i64, u64;
                i64 => i8, u8, i32, u32, u64;
                u64 => i8, u8, i32, u32, i64;
            }
            Ok(())
        })
        .unwrap();
    }
}
