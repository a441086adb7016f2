//! The matrix product, through the `gemm` crate.

use super::fault;
use crate::driver::{DriverResult, Gemm};

/// Refuses sizes that overflow and misaligned matrices.
pub(super) fn check(g: &Gemm) -> DriverResult {
    let fits = |rows: usize, columns: usize| {
        rows.checked_mul(columns).and_then(|n| n.checked_mul(4)).is_some_and(|bytes| bytes <= isize::MAX as usize)
    };
    if !(fits(g.m, g.k) && fits(g.k, g.n) && fits(g.m, g.n)) {
        return Err(fault::invalid(format!("gemm {} x {} x {} is too large", g.m, g.n, g.k)));
    }
    if !(g.a | g.b | g.c).is_multiple_of(4) {
        return Err(fault::invalid("a matrix of gemm is not 4-byte aligned"));
    }
    Ok(())
}

/// # Safety
/// `a`, `b` and `c` are aligned, live and have the sizes that `g` says. No other code uses `c` or writes `a` or `b`.
pub(super) unsafe fn run(g: &Gemm, a: *const u8, b: *const u8, c: *mut u8) {
    // (column stride, row stride) of a row-major matrix with `columns` columns, or of a transposed one.
    let strides = |transposed: bool, columns: usize, columns_transposed: usize| {
        if transposed { (columns_transposed as isize, 1) } else { (1, columns as isize) }
    };
    let (a_column, a_row) = strides(g.transpose_a, g.k, g.m);
    let (b_column, b_row) = strides(g.transpose_b, g.n, g.k);
    // With beta == 0 the old C is not read: it may hold anything, NaN, too.
    let read_c = g.beta != 0.0;
    // SAFETY: the caller's promise; strides and sizes agree. Note: the `gemm` crate calls the factor of the old matrix
    // `alpha` and the factor of the product `beta`.
    unsafe {
        gemm::gemm::<f32>(
            g.m,
            g.n,
            g.k,
            c.cast(),
            1,
            g.n as isize,
            read_c,
            a.cast(),
            a_column,
            a_row,
            b.cast(),
            b_column,
            b_row,
            g.beta,
            g.alpha,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
