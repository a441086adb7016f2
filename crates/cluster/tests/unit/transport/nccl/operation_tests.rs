use super::*;
use DType::*;

pub const ALL: [DType; 10] = [F32, F64, F16, BF16, I8, U8, I32, U32, I64, U64];

/// `ncclDataType_t` of nccl.h.
#[test]
fn all_types_have_nccls_numbers() {
    let numbers = [(I8, 0), (U8, 1), (I32, 2), (U32, 3), (I64, 4), (U64, 5), (F16, 6), (F32, 7), (F64, 8), (BF16, 9)];
    assert_eq!(numbers.len(), ALL.len());
    for of in ALL {
        assert_eq!(numbers.iter().find(|(name, _)| *name == of).map(|n| n.1), Some(dtype(of)), "{of:?}");
    }
}

/// `ncclRedOp_t` of nccl.h; and what is left to the caller.
#[test]
fn all_reductions_of_all_types() {
    for of in ALL {
        let (half, float) = (matches!(of, F16 | BF16), matches!(of, F16 | BF16 | F32 | F64));
        let known = |number: c_int, can: bool| can.then_some(Reduction::Known(number));
        assert_eq!(reduction(of, ReduceOp::Sum), known(0, true), "{of:?}");
        assert_eq!(reduction(of, ReduceOp::Prod), known(1, true), "{of:?}");
        assert_eq!(reduction(of, ReduceOp::Max), known(2, !float), "{of:?}");
        assert_eq!(reduction(of, ReduceOp::Min), known(3, !float), "{of:?}");
        assert_eq!(reduction(of, ReduceOp::Avg), known(4, !half), "{of:?}");
        assert_eq!(reduction(of, ReduceOp::Scaled(2.5)).is_some(), !half, "{of:?}");
    }
}

#[test]
fn a_factor_has_the_elements_type() {
    fn bytes<const N: usize>(value: [u8; N]) -> Option<Reduction> {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(&value);
        Some(Reduction::Scaled(bytes))
    }
    let of = |dtype, factor| reduction(dtype, ReduceOp::Scaled(factor));
    assert_eq!(of(F32, 0.1), bytes(0.1f32.to_ne_bytes()));
    assert_eq!(of(F64, 0.1), bytes(0.1f64.to_ne_bytes()));
    assert_eq!(of(I8, -2.9), bytes((-2i8).to_ne_bytes()));
    assert_eq!(of(U8, 2.9), bytes(2u8.to_ne_bytes()));
    assert_eq!(of(I32, -2.9), bytes((-2i32).to_ne_bytes()));
    assert_eq!(of(U32, 7.0), bytes(7u32.to_ne_bytes()));
    assert_eq!(of(I64, 1e18), bytes(1_000_000_000_000_000_000i64.to_ne_bytes()));
    assert_eq!(of(U64, 3.0), bytes(3u64.to_ne_bytes()));
}
