//! Element types and reductions, as NCCL names them. A reduction that NCCL makes by other rules than this crate's
//! documentation is none of its own: then the caller sends messages and adds up by itself.

use gpu_pool::{DType, ReduceOp};
use std::ffi::c_int;

/// `ncclDataType_t`.
pub(super) fn dtype(dtype: DType) -> c_int {
    match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        other => unreachable!("the crates of one version belong together: {other:?}"),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Reduction {
    /// `ncclRedOp_t`.
    Known(c_int),
    /// `ncclRedOpCreatePreMulSum` with this factor, which has the elements' type and stands in the first bytes.
    Scaled([u8; 8]),
}

/// `None` where NCCL's result would be another one:
///
/// * `Min`, `Max` of floating-point numbers: NCCL's `fminf` passes NaNs over, here a NaN wins;
/// * `Avg`, `Scaled` of 16-bit floats: NCCL rounds the factor to 16 bits before it multiplies.
pub(super) fn reduction(dtype: DType, reduce: ReduceOp) -> Option<Reduction> {
    let half = matches!(dtype, DType::F16 | DType::BF16);
    let float = half || matches!(dtype, DType::F32 | DType::F64);
    Some(match reduce {
        ReduceOp::Sum => Reduction::Known(0),
        ReduceOp::Prod => Reduction::Known(1),
        ReduceOp::Max if !float => Reduction::Known(2),
        ReduceOp::Min if !float => Reduction::Known(3),
        ReduceOp::Avg if !half => Reduction::Known(4),
        ReduceOp::Scaled(factor) if !half => Reduction::Scaled(scalar(dtype, factor)),
        _ => return None,
    })
}

/// The factor in the elements' type: for integers cut towards zero.
fn scalar(dtype: DType, factor: f64) -> [u8; 8] {
    let mut bytes = [0; 8];
    let mut put = |value: &[u8]| bytes[..value.len()].copy_from_slice(value);
    match dtype {
        DType::F32 => put(&(factor as f32).to_ne_bytes()),
        DType::F64 => put(&factor.to_ne_bytes()),
        DType::I8 => put(&(factor as i8).to_ne_bytes()),
        DType::U8 => put(&(factor as u8).to_ne_bytes()),
        DType::I32 => put(&(factor as i32).to_ne_bytes()),
        DType::U32 => put(&(factor as u32).to_ne_bytes()),
        DType::I64 => put(&(factor as i64).to_ne_bytes()),
        DType::U64 => put(&(factor as u64).to_ne_bytes()),
        DType::F16 => put(&half::f16::from_f64(factor).to_ne_bytes()),
        DType::BF16 => put(&half::bf16::from_f64(factor).to_ne_bytes()),
        other => unreachable!("the crates of one version belong together: {other:?}"),
    }
    bytes
}

#[cfg(test)]
#[path = "../../../tests/unit/transport/nccl/operation_tests.rs"]
pub(super) mod tests;
