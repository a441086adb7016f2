use crate::GpuPool;
use crate::lab::Check;
use crate::lab::prelude::*;

#[test]
fn parts_share_a_block_and_nothing_else() {
    let pool = GpuPool::builder().host(1).check(Check::Races).build().unwrap();
    let in_use = || pool.shared.pinned.in_use()[0];
    let before = in_use();
    let mut first = pool.pinned::<u32>(1000).unwrap();
    let with_block = in_use();
    let mut second = first.split_off(400);
    assert_eq!((first.len(), second.len(), in_use()), (400, 600, with_block));
    let (x, y) = (first.as_mut_slice().unwrap(), second.as_mut_slice().unwrap());
    x.fill(1);
    y.fill(2);
    x.fill(3);
    let parts = pool.run(|dev, _| {
        let (x, y) = (dev.upload_pinned(&first)?, dev.upload_pinned(&second)?);
        Ok([dev.download(&x)?, dev.download(&y)?])
    });
    let [parts] = <[_; 1]>::try_from(parts.unwrap()).unwrap();
    assert_eq!(parts, [vec![3; 400], vec![2; 600]]);
    let held = in_use();
    drop(first);
    assert_eq!(in_use(), held, "the second has the block, too");
    drop(second);
    assert_eq!(held - in_use(), with_block - before);
}

/// A stream of a failed scope may go on for ever, and write it.
#[test]
fn what_was_abandoned_is_not_given_out() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let mut x = pool.pinned::<u32>(8).unwrap();
    x.as_mut_slice().unwrap().fill(1);
    x.block.abandon();
    assert!(matches!(x.as_slice(), Err(crate::Error::Borrowed { op: "PinnedBuffer::as_slice", .. })));
    assert!(matches!(x.as_mut_slice(), Err(crate::Error::Borrowed { .. })));
}
