//! The matrix product, through the `gemm` crate. Half types are widened to `f32` and rounded once, at the end: the
//! crate has no `bf16`, and its `f16` rounds between blocks of `k`.

use std::ptr;

use half::{bf16, f16};

use super::fault;
use crate::driver::{DriverResult, Gemm, GemmMatrix, GemmType};

pub(super) fn check(g: &Gemm) -> DriverResult {
    let spans = g.spans();
    if spans.iter().any(|span| span.bytes() > isize::MAX as usize) {
        return Err(fault::invalid(format!("gemm {} x {} x {} is too large", g.m, g.n, g.k)));
    }
    let size = g.of.size() as u64;
    if spans.iter().any(|span| !span.address.is_multiple_of(size)) {
        return Err(fault::invalid(format!("a matrix of gemm is not {size}-byte aligned")));
    }
    Ok(())
}

/// # Safety
/// `a`, `b` and `c` are aligned, live and as long as [`Gemm::spans`] says. No other code uses `c` or writes `a` or `b`.
pub(super) unsafe fn run(g: &Gemm, a: *const u8, b: *const u8, c: *mut u8) {
    if g.m == 0 || g.n == 0 {
        return;
    }
    let size = g.of.size();
    for i in 0..g.count {
        let at = |x: GemmMatrix| i * x.stride * size;
        let (a, b, c) = (a.wrapping_add(at(g.a)), b.wrapping_add(at(g.b)), c.wrapping_add(at(g.c)));
        // SAFETY: the caller's promise, for one matrix of each batch.
        unsafe {
            match g.of {
                GemmType::F32 | GemmType::Tf32 => full(g, a, b, c, g.alpha as f32, g.beta as f32),
                GemmType::F64 => full(g, a, b, c, g.alpha, g.beta),
                GemmType::F16 => half(g, a.cast(), b.cast(), c.cast(), f16::to_f32, f16::from_f32),
                GemmType::Bf16 => half(g, a.cast(), b.cast(), c.cast(), bf16::to_f32, bf16::from_f32),
            }
        }
    }
}

/// (column stride, row stride) of `op(x)`.
fn strides(x: GemmMatrix) -> (isize, isize) {
    if x.transposed { (x.lead as isize, 1) } else { (1, x.lead as isize) }
}

/// # Safety
/// As for [`run`]; `T` is the type of `g`.
unsafe fn full<T: 'static>(g: &Gemm, a: *const u8, b: *const u8, c: *mut u8, alpha: T, beta: T) {
    // With beta == 0 the old C is not read: it may hold anything, NaN, too.
    let (read_c, (a_column, a_row), (b_column, b_row)) = (g.beta != 0.0, strides(g.a), strides(g.b));
    let (a, b, c, c_row) = (a.cast::<T>(), b.cast::<T>(), c.cast::<T>(), g.c.lead as isize);
    let one = gemm::Parallelism::None;
    // SAFETY: the caller's promise; strides and sizes agree. Note: the `gemm` crate calls the factor of the old matrix
    // `alpha` and the factor of the product `beta`.
    unsafe {
        gemm::gemm::<T>(
            g.m, g.n, g.k, c, 1, c_row, read_c, a, a_column, a_row, b, b_column, b_row, beta, alpha, false, false,
            false, one,
        );
    }
}

/// Computed in `f32`.
///
/// # Safety
/// As for [`run`]; `T` is the type of `g`.
unsafe fn half<T: Copy>(
    g: &Gemm,
    a: *const T,
    b: *const T,
    c: *mut T,
    widen: impl Fn(T) -> f32,
    narrow: impl Fn(f32) -> T,
) {
    let dense = |from: *const T, x: GemmMatrix, rows: usize, cols: usize| -> Vec<f32> {
        let (column, row) = strides(x);
        let at = |i: usize| from.wrapping_offset((i / cols) as isize * row + (i % cols) as isize * column);
        // SAFETY: element (i / cols, i % cols) of the matrix.
        (0..rows * cols).map(|i| widen(unsafe { ptr::read(at(i)) })).collect()
    };
    let (wide_a, wide_b) = (dense(a, g.a, g.m, g.k), dense(b, g.b, g.k, g.n));
    let mut wide_c = vec![0.0f32; g.m * g.n];
    let rows = |x: GemmMatrix, lead: usize| GemmMatrix { transposed: false, lead, ..x };
    let (a, b, c_rows) = (rows(g.a, g.k), rows(g.b, g.n), rows(g.c, g.n));
    let wide = Gemm { a, b, beta: 0.0, c: c_rows, ..*g };
    // SAFETY: three matrices of these sizes, densely packed.
    unsafe {
        let to = wide_c.as_mut_ptr().cast();
        full::<f32>(&wide, wide_a.as_ptr().cast(), wide_b.as_ptr().cast(), to, g.alpha as f32, 0.0);
    }
    for (i, product) in wide_c.iter().enumerate() {
        let at = c.wrapping_add(i / g.n * g.c.lead + i % g.n);
        // SAFETY: element (i / n, i % n) of C.
        unsafe {
            let old = if g.beta == 0.0 { 0.0 } else { g.beta as f32 * widen(ptr::read(at)) };
            ptr::write(at, narrow(product + old));
        }
    }
}
