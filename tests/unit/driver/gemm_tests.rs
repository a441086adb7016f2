use super::*;

#[test]
fn spans_cover_what_the_products_use() {
    let a = GemmMatrix { address: 1000, transposed: true, lead: 5, stride: 2 };
    let b = GemmMatrix::dense(2000, 4);
    let c = GemmMatrix { address: 3000, transposed: false, lead: 4, stride: 8 };
    let gemm = Gemm { of: GemmType::F16, count: 3, m: 2, n: 4, k: 3, alpha: 1.0, a, b, beta: 0.0, c };
    let [a, b, c] = gemm.spans();
    // A is stored as 3 rows of 2 at a lead of 5; the last matrix begins at 4.
    assert_eq!((a.bytes(), b.bytes(), c.bytes()), (2 * (4 + 10 + 2), 2 * 12, 2 * 24));
    assert_eq!(a.pieces().count(), 9);
    assert_eq!(a.pieces().nth(4), Some((1000 + 2 * (2 + 5), 4)));
    assert_eq!(b.pieces().collect::<Vec<_>>(), [(2000, 24)]);
    assert_eq!(c.pieces().collect::<Vec<_>>(), [(3000, 48)]);
    let [a, ..] = Gemm { k: 0, ..gemm }.spans();
    assert_eq!(a.bytes(), 0);
    let [_, b, _] = Gemm { n: usize::MAX, ..gemm }.spans();
    assert_eq!(b.bytes(), usize::MAX);
}
