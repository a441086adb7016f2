use super::*;
use crate::GpuPool;

/// cudarc gets a bare buffer until a graph names it.
#[test]
fn bare_buffers_of_graphs_are_refused() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let error = pool.run(|dev, _| {
        let (mut x, y) = (dev.zeros::<f32>(8)?, dev.zeros::<f32>(8)?);
        [&x, &y].into_iter().for_each(|free| refuse(&free.block, Access::Write));
        let (_graph, ()) = dev.capture(|dev| dev.fill(&mut x, 1.0))?;
        refuse(&y.block, Access::Write);
        refuse(&x.block, Access::Write);
        Ok(())
    });
    let Error::Panicked { message, .. } = error.unwrap_err() else { panic!("refused by a panic") };
    assert!(message.contains("a graph names this buffer"), "{message}");
}

/// Nor a buffer that another process has.
#[test]
#[cfg(target_os = "linux")]
fn bare_buffers_of_other_processes_are_refused() {
    use crate::memory::hazard::Lending;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let pool = GpuPool::builder().host(1).build().unwrap();
    pool.run(|dev, _| {
        let lending = Arc::new(Lending::default());
        let (x, _memory) = dev.apart("test", 4096, &lending)?;
        let refused = |access| catch_unwind(AssertUnwindSafe(|| refuse(&x.block, access))).is_err();
        for (lent, refuses) in [(Access::Read, [false, true]), (Access::Write, [true, true])] {
            assert!(![Access::Read, Access::Write].into_iter().any(refused));
            assert!(lending.lend(lent));
            assert_eq!([Access::Read, Access::Write].map(refused), refuses);
            lending.give_back();
        }
        Ok(())
    })
    .unwrap();
}
