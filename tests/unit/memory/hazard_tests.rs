use super::*;
use crate::GpuPool;
use std::panic::Location;

/// An open use ends, and only then counts as an operation of the stream.
#[test]
fn what_is_lent_comes_back() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    pool.run(|dev, _| {
        let hazards = Hazards::default();
        hazards.open(&dev.stream, 0..8, Access::Write, Location::caller());
        assert!(hazards.in_flight());
        hazards.close(&dev.stream, dev.stream.submit(), 0..8, Access::Write);
        dev.synchronize()?;
        assert!(!hazards.in_flight());
        Ok(())
    })
    .unwrap();
}

/// An open use that is never closed (`mem::forget`) lasts to the end of its scope, and not longer.
#[test]
fn what_is_forgotten_comes_back_with_the_scopes_end() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let hazards = Hazards::default();
    for _ in 0..2 {
        pool.run(|dev, _| {
            assert!(!hazards.in_flight(), "left by the scope before");
            dev.stream.lend();
            hazards.open(&dev.stream, 0..8, Access::Write, Location::caller());
            dev.synchronize()?;
            assert!(hazards.in_flight(), "the program still has it");
            Ok(())
        })
        .unwrap();
    }
    assert!(!hazards.in_flight());
}
