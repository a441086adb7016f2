//! A batch of matrix products, as drivers take it: plain data. `ops` fills it in; both drivers and the checker read it.

use super::Address;

/// The elements of a product, and what it is computed in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmType {
    /// `f32`; no TF32.
    F32,
    /// `f32` whose factors the device may round to TF32 (10 bits of mantissa); sums are `f32`.
    Tf32,
    /// `f64`.
    F64,
    /// `f16` with sums of `f32`.
    F16,
    /// `bf16` with sums of `f32`.
    Bf16,
}

impl GemmType {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            GemmType::F64 => 8,
            GemmType::F32 | GemmType::Tf32 => 4,
            GemmType::F16 | GemmType::Bf16 => 2,
        }
    }
}

/// Where the matrices of one operand lie. Rows are contiguous. Numbers are of elements.
#[derive(Clone, Copy, Debug)]
pub struct GemmMatrix {
    /// The first element.
    pub address: Address,
    /// Whether the matrix is used transposed. Not for C.
    pub transposed: bool,
    /// From a stored row to the next one.
    pub lead: usize,
    /// From a matrix of the batch to the next one; 0 when all products use one matrix.
    pub stride: usize,
}

impl GemmMatrix {
    /// A matrix of densely packed rows of `cols` elements, for a batch of one.
    pub const fn dense(address: Address, cols: usize) -> Self {
        GemmMatrix { address, transposed: false, lead: cols, stride: 0 }
    }
}

/// `C = alpha * op(A) * op(B) + beta * C`, row-major, for each matrix of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// The type of the elements and of the arithmetic.
    pub of: GemmType,
    /// Number of products.
    pub count: usize,
    /// Rows of `op(A)` and of C.
    pub m: usize,
    /// Columns of `op(B)` and of C.
    pub n: usize,
    /// Columns of `op(A)`, rows of `op(B)`.
    pub k: usize,
    /// Factor of the product: an `f64` for `f64`, else a number that `f32` has.
    pub alpha: f64,
    /// A: `m x k`, or `k x m` when transposed.
    pub a: GemmMatrix,
    /// B: `k x n`, or `n x k` when transposed.
    pub b: GemmMatrix,
    /// Factor of the old C, like `alpha`; 0 means that C is not read.
    pub beta: f64,
    /// C: `m x n`.
    pub c: GemmMatrix,
}

/// The memory of an operand: `rows` runs of `bytes` in each of `count` matrices.
#[derive(Clone, Copy, Debug)]
pub struct GemmSpan {
    /// The first byte.
    pub address: Address,
    count: usize,
    rows: usize,
    bytes: usize,
    lead: usize,
    stride: usize,
}

impl Gemm {
    /// The memory of A, B and C.
    pub fn spans(&self) -> [GemmSpan; 3] {
        let size = self.of.size();
        let span = |x: GemmMatrix, rows: usize, cols: usize| {
            let (rows, cols) = if x.transposed { (cols, rows) } else { (rows, cols) };
            let count = if x.stride == 0 { self.count.min(1) } else { self.count };
            let (bytes, lead, stride) = (times(cols, size), times(x.lead, size), times(x.stride, size));
            GemmSpan { address: x.address, count, rows, bytes, lead, stride }
        };
        [span(self.a, self.m, self.k), span(self.b, self.k, self.n), span(self.c, self.m, self.n)]
    }
}

impl GemmSpan {
    /// `usize::MAX` when that is too many.
    pub(crate) fn bytes(&self) -> usize {
        if self.count == 0 || self.rows == 0 || self.bytes == 0 {
            return 0;
        }
        times(self.count - 1, self.stride).saturating_add(times(self.rows - 1, self.lead)).saturating_add(self.bytes)
    }

    /// The contiguous pieces, each with its length: one if nothing lies between the rows.
    pub fn pieces(&self) -> impl Iterator<Item = (Address, usize)> + use<> {
        let GemmSpan { address, count, rows, bytes, lead, stride } = *self;
        let one_matrix = lead == bytes || rows <= 1;
        let one_piece = one_matrix && (count <= 1 || stride == times(rows, bytes));
        let (count, rows, bytes) = match (one_piece, one_matrix) {
            (true, _) => (1, 1, self.bytes()),
            (_, true) => (count, 1, times(rows, bytes)),
            _ => (count, rows, bytes),
        };
        let at = move |i: usize, r: usize| address + times(i, stride) as u64 + times(r, lead) as u64;
        (0..count).flat_map(move |i| (0..rows).map(move |r| (at(i, r), bytes)))
    }
}

fn times(a: usize, b: usize) -> usize {
    a.saturating_mul(b)
}

#[cfg(test)]
#[path = "../../tests/unit/driver/gemm_tests.rs"]
mod tests;
