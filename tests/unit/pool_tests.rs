use super::*;
use crate::ReduceOp;

/// One of everything, small enough for Miri: `.ci/sanitize.sh` runs it there.
#[test]
fn a_whole_life() {
    let pool = GpuPool::builder().host(2).weights(&[3.0, 1.0]).build().unwrap();
    let batch = [1.0f32, 2.0, 3.0, 4.0];
    let found = pool.run(|dev, shard| {
        let mut x = dev.upload(shard.of(&batch))?;
        dev.scale(&mut x, 10.0)?;
        let mut sum = dev.sum(&x)?;
        dev.all_reduce(&mut sum, ReduceOp::Sum)?;
        Ok((dev.download(&x)?, dev.download(&sum)?))
    });
    assert_eq!(found.unwrap(), [(vec![10.0, 20.0, 30.0], vec![100.0]), (vec![40.0], vec![100.0])]);
    pool.close().unwrap();
}
