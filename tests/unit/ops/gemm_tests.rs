use super::*;
use crate::GpuPool;

#[test]
fn matrices_that_can_be_counted_in_one_are_one_call() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let cut = |dev: &Device| {
        let (x, y) = (dev.zeros::<f32>(24)?, dev.zeros::<f32>(4)?);
        let blocks = Matrix::new(&x, 12, 2)?.split_rows(2)?.split_rows(3)?;
        let heads = Matrix::new(&x, 4, 6)?.split_rows(2)?.split_columns(3)?;
        let one = Matrix::new(&y, 2, 2)?;
        let cut = |x: Matrix<'_>| {
            let to = x.layout.product(&one.layout).unwrap();
            let (outer, inner) = dims([&x.layout, &one.layout, &to]);
            (firsts(&outer).collect::<Vec<_>>(), inner)
        };
        Ok((cut(blocks), cut(heads), cut(one)))
    };
    let (blocks, heads, one) = pool.on_device(0).run(cut).unwrap();
    assert_eq!(blocks, (vec![[0; 3]], (6, [4, 0, 4])));
    assert_eq!(heads, (vec![[0; 3], [12, 0, 12]], (3, [2, 0, 4])));
    assert_eq!(one, (vec![[0; 3]], (1, [0; 3])));
}
