//! Streams that get stuck: a deadline, an error that names the device, and what becomes of the pool. On software GPUs:
//! with CUDA a free may wait for the whole device, and nothing could end that.

use super::{assert_works, collectives, plan};
use crate::support::{Gpus, failure, on_host, slow_add};
use gpu_pool::{Device, Error, GpuPool, collective::Algorithm};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use std::time::Duration;

fn stuck(gpus: Gpus, count: usize, op: FaultOp) -> (FaultPlan, GpuPool) {
    let plan = plan(FaultRule::new(Injected::Stuck).device(1).op(op).nth(1));
    // Around a ring, so that collectives have copies, too.
    let builder = gpus.builder(count).algorithm(Algorithm::Ring).timeout(Duration::from_millis(250));
    let pool = builder.faults(plan.clone()).build().unwrap();
    plan.resume();
    (plan, pool)
}

/// Something of each operation, on the current stream.
fn work(dev: &Device) -> Result<(), Error> {
    let mut x = dev.upload(&[dev.index() as u32; 100])?;
    slow_add(dev, &mut x, 1, 1)?;
    dev.fill(&mut x, 9)?;
    let y = x.copy_to(dev)?;
    dev.wait(&dev.record()?)?;
    assert_eq!(dev.download(&y)?, [9; 100]);
    Ok(())
}

/// nccl#2353, jax#38503: a stream that is stuck hangs all of the job without a word.
#[test]
fn a_stuck_stream_is_a_timeout_that_names_its_device() {
    on_host(2, |gpus| {
        for op in
            [FaultOp::CopyUp, FaultOp::Launch, FaultOp::Fill, FaultOp::CopyWithin, FaultOp::Record, FaultOp::CopyDown]
        {
            let (plan, pool) = stuck(gpus, 2, op);
            let error = failure(pool.run(|dev, _| work(dev)));
            assert!(matches!(&error, Error::Timeout { device: 1, op, .. } if !op.is_empty()), "{op:?}: {error}");
            assert_eq!(plan.fired().iter().map(|fired| fired.op).collect::<Vec<_>>(), [op]);
            // The others are well, and work on by themselves;
            pool.on(&[0]).run(|dev, _| work(dev)).unwrap();
            assert_eq!(pool.report().lost, [false, false]);
            // the stuck one stays stuck until it is let go,
            let error = failure(pool.run(|dev, _| work(dev)));
            assert!(matches!(&error, Error::Timeout { device: 1, .. }), "{op:?}: {error}");
            plan.release();
            // and then nothing was lost.
            assert_works(&pool);
            pool.run(|dev, _| work(dev)).unwrap();
            pool.close().unwrap();
        }
    });
}

/// The peers of a collective, whose streams wait for the stuck one, end with it.
#[test]
fn a_collective_with_a_stuck_stream_ends() {
    on_host(2, |gpus| {
        for op in [FaultOp::Record, FaultOp::Launch, FaultOp::CopyFromPeer, FaultOp::Wait] {
            let (plan, pool) = stuck(gpus, gpus.up_to(3), op);
            let done = pool.run(|dev, _| collectives(dev));
            assert_eq!(plan.fired().len(), 1, "{op:?}");
            let error = failure(done);
            assert!(matches!(&error, Error::Timeout { .. }), "{op:?}: {error}");
            plan.release();
            assert_works(&pool);
            pool.close().unwrap();
        }
    });
}

/// A pool with a stuck stream can be closed, and dropped; and the next one works.
#[test]
fn a_pool_with_a_stuck_stream_comes_to_its_end() {
    on_host(2, |gpus| {
        for close in [true, false] {
            let (_plan, pool) = stuck(gpus, 2, FaultOp::Launch);
            let error = failure(pool.run(|dev, _| work(dev)));
            assert!(matches!(&error, Error::Timeout { device: 1, .. }), "{error}");
            if close {
                pool.close().unwrap();
            } else {
                drop(pool);
            }
            assert_works(&gpus.pool(2));
        }
    });
}

/// Whoever is lost while others wait for its stream does not keep them.
#[test]
fn a_stuck_device_that_is_lost_then() {
    on_host(2, |gpus| {
        let stuck = FaultRule::new(Injected::Stuck).device(1).op(FaultOp::Launch).nth(1);
        let lost = FaultRule::new(Injected::DeviceLost).device(1).op(FaultOp::StreamWait).nth(1);
        let plan = FaultPlan::new().on(stuck).on(lost).paused();
        let pool = gpus.builder(2).timeout(Duration::from_millis(250)).faults(plan.clone()).build().unwrap();
        plan.resume();
        let error = failure(pool.run(|dev, _| {
            work(dev)?;
            dev.synchronize()
        }));
        assert!(matches!(&error, Error::Timeout { device: 1, .. } | Error::DeviceLost { device: 1, .. }), "{error}");
        assert_works(&pool.survivors().unwrap());
        pool.on(&[0]).run(|dev, _| work(dev)).unwrap();
        plan.release();
        pool.close().unwrap();
    });
}
