//! Conversions from and to integers for `Device::cast`: `kernels/cast.cu`. Those between floating-point types are in
//! `kernel::builtin`.
//!
//! Invariant: the rules of Rust's `as`. A floating-point number is cut towards zero and saturates, a NaN becomes 0; an
//! integer keeps the low bits of another; an integer becomes the nearest floating-point number, rounded once.

use crate::{
    kernel,
    kernel::{
        builtin::{CastTo, Map, module, odd},
        real::Cast,
    },
};
use half::{bf16, f16};

module! { CAST, "cast" }

/// The `f32` that rounds to a half type as the integer does. `f64` has no room for the low 11 bits of 64: they leave a
/// trace in the next bit. `odd` does the same from `f64` to `f32`.
fn for_half(x: i128) -> f32 {
    let magnitude = x.unsigned_abs() as u64;
    let m = match magnitude >> 53 {
        0 => magnitude,
        _ => (magnitude & !0x7ff) | u64::from(magnitude & 0x7ff != 0) << 11,
    };
    odd(if x < 0 { -(m as f64) } else { m as f64 })
}

macro_rules! cast {
    ($($A:ident $B:ident $sym:literal $f:expr;)+) => {$(
        const _: () = {
            kernel! {
                static KERNEL: $sym in CAST, fn(x: &[$A], y: &mut [$B], n: u64) |_dims| {
                    y[..n as usize].iter_mut().zip(x).for_each(|(y, x)| *y = $f(*x));
                }
            }
            impl Cast<$B> for $A {}
            impl CastTo<$B> for $A {
                const CAST: &'static Map<Self, $B> = &KERNEL;
            }
        };
    )+};
}

/// Between the floating-point types and an integer, both ways.
macro_rules! integers {
    ($($I:ident: $from32:literal $from64:literal $from16:literal $from_b:literal
       $to32:literal $to64:literal $to16:literal $to_b:literal;)+) => {$(
        cast! {
            f32 $I $from32 |x| x as $I;
            f64 $I $from64 |x| x as $I;
            f16 $I $from16 |x: f16| x.to_f32() as $I;
            bf16 $I $from_b |x: bf16| x.to_f32() as $I;
            $I f32 $to32 |x| x as f32;
            $I f64 $to64 |x| x as f64;
            $I f16 $to16 |x: $I| f16::from_f32(for_half(x.into()));
            $I bf16 $to_b |x: $I| bf16::from_f32(for_half(x.into()));
        }
    )+};
}
integers! {
    i8: "cast_f32_i8" "cast_f64_i8" "cast_f16_i8" "cast_bf16_i8"
        "cast_i8_f32" "cast_i8_f64" "cast_i8_f16" "cast_i8_bf16";
    u8: "cast_f32_u8" "cast_f64_u8" "cast_f16_u8" "cast_bf16_u8"
        "cast_u8_f32" "cast_u8_f64" "cast_u8_f16" "cast_u8_bf16";
    i32: "cast_f32_i32" "cast_f64_i32" "cast_f16_i32" "cast_bf16_i32"
        "cast_i32_f32" "cast_i32_f64" "cast_i32_f16" "cast_i32_bf16";
    u32: "cast_f32_u32" "cast_f64_u32" "cast_f16_u32" "cast_bf16_u32"
        "cast_u32_f32" "cast_u32_f64" "cast_u32_f16" "cast_u32_bf16";
    i64: "cast_f32_i64" "cast_f64_i64" "cast_f16_i64" "cast_bf16_i64"
        "cast_i64_f32" "cast_i64_f64" "cast_i64_f16" "cast_i64_bf16";
    u64: "cast_f32_u64" "cast_f64_u64" "cast_f16_u64" "cast_bf16_u64"
        "cast_u64_f32" "cast_u64_f64" "cast_u64_f16" "cast_u64_bf16";
}

cast! {
    i8 u8 "cast_i8_u8" |x| x as u8;
    i8 i32 "cast_i8_i32" |x| x as i32;
    i8 u32 "cast_i8_u32" |x| x as u32;
    i8 i64 "cast_i8_i64" |x| x as i64;
    i8 u64 "cast_i8_u64" |x| x as u64;
    u8 i8 "cast_u8_i8" |x| x as i8;
    u8 i32 "cast_u8_i32" |x| x as i32;
    u8 u32 "cast_u8_u32" |x| x as u32;
    u8 i64 "cast_u8_i64" |x| x as i64;
    u8 u64 "cast_u8_u64" |x| x as u64;
    i32 i8 "cast_i32_i8" |x| x as i8;
    i32 u8 "cast_i32_u8" |x| x as u8;
    i32 u32 "cast_i32_u32" |x| x as u32;
    i32 i64 "cast_i32_i64" |x| x as i64;
    i32 u64 "cast_i32_u64" |x| x as u64;
    u32 i8 "cast_u32_i8" |x| x as i8;
    u32 u8 "cast_u32_u8" |x| x as u8;
    u32 i32 "cast_u32_i32" |x| x as i32;
    u32 i64 "cast_u32_i64" |x| x as i64;
    u32 u64 "cast_u32_u64" |x| x as u64;
    i64 i8 "cast_i64_i8" |x| x as i8;
    i64 u8 "cast_i64_u8" |x| x as u8;
    i64 i32 "cast_i64_i32" |x| x as i32;
    i64 u32 "cast_i64_u32" |x| x as u32;
    i64 u64 "cast_i64_u64" |x| x as u64;
    u64 i8 "cast_u64_i8" |x| x as i8;
    u64 u8 "cast_u64_u8" |x| x as u8;
    u64 i32 "cast_u64_i32" |x| x as i32;
    u64 u32 "cast_u64_u32" |x| x as u32;
    u64 i64 "cast_u64_i64" |x| x as i64;
}
