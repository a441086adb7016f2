//! Conversions from and to integers for `Device::cast`: `kernels/cast.cu`. Those between floats: `kernel::builtin`.
//!
//! Invariant: the rules of Rust's `as`. A floating-point number is cut towards zero and saturates, a NaN becomes 0; an
//! integer keeps the low bits of another; an integer becomes the nearest floating-point number, rounded once.

use crate::kernel::builtin::{cast, module, odd};
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

/// From floating-point types to an integer, and from it to these and to the other integers.
macro_rules! integers {
    ($($I:ident: $($J:ident)+;)+) => {$(
        cast! { CAST;
            f32 $I |x| x as $I;
            f64 $I |x| x as $I;
            f16 $I |x: f16| x.to_f32() as $I;
            bf16 $I |x: bf16| x.to_f32() as $I;
            $I f32 |x| x as f32;
            $I f64 |x| x as f64;
            $I f16 |x: $I| f16::from_f32(for_half(x.into()));
            $I bf16 |x: $I| bf16::from_f32(for_half(x.into()));
            $($I $J |x| x as $J;)+
        }
    )+};
}
integers! {
    i8: u8 i32 u32 i64 u64;
    u8: i8 i32 u32 i64 u64;
    i32: i8 u8 u32 i64 u64;
    u32: i8 u8 i32 i64 u64;
    i64: i8 u8 i32 u32 u64;
    u64: i8 u8 i32 u32 i64;
}
