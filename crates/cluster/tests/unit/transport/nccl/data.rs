//! Elements and bytes that tell hosts apart, and their comparison.

use super::{DType, RailCall};

/// A host's element: 1, 2 or 3, so that sums and products of a few hosts are exact in each type.
pub(super) fn value(host: usize, i: usize) -> f64 {
    (1 + (i * 7 + i / 13 + host * 5) % 3) as f64
}

pub(super) fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251 + seed * 17) as u8).collect()
}

#[track_caller]
pub(super) fn close(found: &[f64], expected: impl Fn(usize) -> f64, call: &RailCall<'_>) {
    for (i, &x) in found.iter().enumerate() {
        let right = expected(i);
        assert!((x - right).abs() <= 1e-6 * right.abs(), "{call:?}: {x}, not {right}, at {i}");
    }
}

macro_rules! coded {
    ($dtype:expr, $($name:ident $T:ty, $of:expr, $to:expr;)*) => {
        match $dtype { $(DType::$name => (|x| <$T>::to_ne_bytes($of(x)).to_vec(), |bytes| {
            $to(<$T>::from_ne_bytes(bytes.try_into().unwrap()))
        }),)* other => panic!("no test has {other:?}") }
    };
}

type Codec = (fn(f64) -> Vec<u8>, fn(&[u8]) -> f64);

fn codec(dtype: DType) -> Codec {
    coded! { dtype,
        F32 f32, |x| x as f32, f64::from;
        F64 f64, |x| x, f64::from;
        F16 half::f16, half::f16::from_f64, half::f16::to_f64;
        BF16 half::bf16, half::bf16::from_f64, half::bf16::to_f64;
        I8 i8, |x| x as i8, f64::from;
        U8 u8, |x| x as u8, f64::from;
        I32 i32, |x| x as i32, f64::from;
        U32 u32, |x| x as u32, f64::from;
        I64 i64, |x| x as i64, |x| x as f64;
        U64 u64, |x| x as u64, |x| x as f64;
    }
}

pub(super) fn encode(dtype: DType, elements: &[f64]) -> Vec<u8> {
    elements.iter().flat_map(|&x| codec(dtype).0(x)).collect()
}

pub(super) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    bytes.chunks(dtype.size()).map(codec(dtype).1).collect()
}
