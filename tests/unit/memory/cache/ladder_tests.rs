use crate::GpuPool;

/// A kernel that has given up has ended, but its peers may still send to the memory that it used.
#[test]
fn nothing_goes_back_to_the_driver_when_the_gang_has_failed() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let given = pool.run(|dev, _| {
        drop(dev.zeros::<u8>(8 << 20)?);
        dev.synchronize()?;
        let mut cache = dev.worker.cache.borrow_mut();
        Ok([true, false].map(|failed| cache.trim(&|| failed)))
    });
    assert!(matches!(given.unwrap()[0], [0, given] if given >= 8 << 20));
}
