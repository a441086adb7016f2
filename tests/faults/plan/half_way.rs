//! Copies that fail half way leave staging memory under way. What comes next, on other streams, must not be spoilt by
//! it.

use super::{assert_works, plan};
use crate::{
    on_both,
    support::{builder, bytes, guarded, slow_add},
};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected};
use std::time::Duration;

/// One failing call.
fn fails(device: usize, op: FaultOp, n: u64) -> FaultPlan {
    plan(FaultRule::new(Injected::Error).device(device).op(op).nth(n))
}

on_both! {
    1: fn a_download_after_one_that_failed(gpus) {
        let (old, new) = (bytes((2 << 20) + 100, 1), bytes(7 << 20, 2));
        for (op, n) in [(FaultOp::Record, 1), (FaultOp::Record, 2), (FaultOp::CopyDown, 2), (FaultOp::EventWait, 1)] {
            for round in 0..6 {
                let plan = fails(0, op, n);
                let pool = gpus.builder(1).faults(plan.clone()).build().unwrap();
                pool.run(|dev, _| {
                    let (a, b) = (dev.upload(&old)?, dev.upload(&new)?);
                    let mut hold = dev.zeros::<u32>(1)?;
                    let second = dev.stream()?;
                    dev.synchronize()?;
                    // What is left of the download comes some time in the next one, which uses the same pieces.
                    slow_add(dev, &mut hold, 1, 1500 * (round + 1))?;
                    plan.resume();
                    let first = dev.download(&a);
                    plan.pause();
                    assert!(first.is_err() && plan.fired().len() == 1, "{op:?} {n}: {:?}", plan.fired());
                    for _ in 0..2 {
                        assert!(dev.on(&second).download(&b)? == new, "{op:?} {n}");
                    }
                    Ok(())
                })
                .unwrap();
                pool.close().unwrap();
            }
        }
    }

    1: fn an_upload_after_one_that_failed(gpus) {
        let (old, new) = (bytes((2 << 20) + 100, 1), bytes(5 << 20, 2));
        for (op, n) in [(FaultOp::Record, 1), (FaultOp::Record, 2), (FaultOp::CopyUp, 2)] {
            let plan = fails(0, op, n);
            let pool = gpus.builder(1).faults(plan.clone()).build().unwrap();
            pool.run(|dev, _| {
                let mut target = dev.zeros::<u8>(old.len())?;
                let mut hold = dev.zeros::<u32>(1)?;
                let second = dev.stream()?;
                slow_add(dev, &mut hold, 1, 20_000)?;
                plan.resume();
                let first = dev.upload_into(&old, &mut target);
                plan.pause();
                assert!(first.is_err() && plan.fired().len() == 1, "{op:?} {n}: {:?}", plan.fired());
                // The memory that the rest of it goes to has another owner now.
                drop(target);
                let b = dev.on(&second).upload(&new)?;
                let again = dev.on(&second).upload(&new[..old.len()])?;
                dev.synchronize()?;
                assert!(dev.download(&b)? == new && dev.download(&again)? == new[..old.len()], "{op:?} {n}");
                Ok(())
            })
            .unwrap();
            pool.close().unwrap();
        }
    }

    // Device 0 pushes, on a stream of its own that is busy for a while; then others use the same staging buffers.
    2: fn a_staged_copy_after_one_that_failed(gpus) {
        let (old, new) = (bytes(600_000, 1), bytes(600_000, 2));
        for (victim, op) in [
            (0, FaultOp::Record), (0, FaultOp::CopyDown), (0, FaultOp::Wait),
            (1, FaultOp::Record), (1, FaultOp::CopyUp), (1, FaultOp::Wait),
        ] {
            for n in 1..=4 {
                let plan = fails(victim, op, n);
                let pool = gpus.builder(2).without_peer_access().faults(plan.clone()).build().unwrap();
                let mut targets = pool.on(&[1]).run(|dev, _| (0..3).map(|_| dev.zeros::<u8>(600_000)).collect());
                let mut targets: Vec<_> = targets.as_mut().unwrap().remove(0);
                let (warm, third) = (targets.remove(0), targets.remove(1));
                let targets = parking_lot::Mutex::new((warm, targets.remove(0), third));
                pool.on(&[0]).run(|dev, _| {
                    let (warm, first, third) = &mut *targets.lock();
                    let (a, b) = (dev.upload(&old)?, dev.upload(&new)?);
                    dev.copy(&a, warm)?;
                    let (mut hold, second) = (dev.zeros::<u32>(1)?, dev.stream()?);
                    dev.synchronize()?;
                    slow_add(dev, &mut hold, 1, 20_000)?;
                    plan.resume();
                    let failed = dev.copy(&a, first);
                    plan.pause();
                    assert!(failed.is_err() != plan.fired().is_empty(), "{victim} {op:?} {n}: {:?}", plan.fired());
                    let other = dev.on(&second);
                    other.copy(&b, third)?;
                    assert!(other.download(&third.copy_to(&other)?)? == new, "{victim} {op:?} {n}");
                    Ok(())
                })
                .unwrap();
                assert_works(&pool);
                pool.close().unwrap();
            }
        }
    }

    // The part of a staged copy that runs on the peer's stream is late; the memory that it goes to has a new owner by
    // then.
    2: fn a_staged_copy_that_failed_does_not_come_late(gpus) {
        let (old, new) = (bytes(600_000, 1), bytes(600_000, 2));
        let slow = Injected::Slow { per_copy: Duration::from_millis(15), per_megabyte: Duration::ZERO };
        for (victim, op, n) in
            [(1, FaultOp::Record, 4), (0, FaultOp::Wait, 4), (1, FaultOp::Record, 3), (0, FaultOp::Record, 3)]
        {
            let plan = fails(victim, op, n).on(FaultRule::new(slow).device(1).op(FaultOp::CopyUp));
            let pool = gpus.builder(2).without_peer_access().faults(plan.clone()).build().unwrap();
            let mut targets = pool.on(&[1]).run(|dev, _| Ok([dev.zeros::<u8>(600_000)?, dev.zeros(600_000)?])).unwrap();
            let [warm, target] = targets.remove(0);
            let targets = parking_lot::Mutex::new((warm, Some(target)));
            pool.run(|dev, _| {
                if dev.index() == 1 {
                    dev.barrier()?;
                    let mine = (0..4).map(|_| dev.upload(&new)).collect::<Result<Vec<_>, _>>()?;
                    dev.barrier()?;
                    for mine in &mine {
                        assert!(dev.download(mine)? == new, "{victim} {op:?} {n}");
                    }
                    return Ok(());
                }
                let (warm, target) = &mut *targets.lock();
                let a = dev.upload(&old)?;
                dev.copy(&a, warm)?;
                dev.synchronize()?;
                plan.resume();
                let failed = dev.copy(&a, target.as_mut().expect("it is there"));
                plan.pause();
                assert!(failed.is_err() && !plan.fired().is_empty(), "{victim} {op:?} {n}: {:?}", plan.fired());
                *target = None;
                dev.barrier()?;
                std::thread::sleep(Duration::from_millis(80));
                dev.barrier()
            })
            .unwrap();
            assert_works(&pool);
            pool.close().unwrap();
        }
    }
}

/// A capture holds no function of the host: a copy in it is not delayed, and not held up.
#[test]
fn captures_are_not_delayed() {
    guarded(|| {
        for rule in ["*:copy-within:*:slow=1ms", "*:copy-within:*:stuck"] {
            let plan: FaultPlan = rule.parse().unwrap();
            let pool = builder().host(1).faults(plan).build().unwrap();
            let copied = pool.run(|dev, _| {
                let (a, mut b) = (dev.upload(&[7u32; 8])?, dev.zeros(8)?);
                let (graph, ()) = dev.capture(|dev| dev.copy(&a, &mut b))?;
                dev.launch_graph(&graph)?;
                dev.download(&b)
            });
            assert_eq!(copied.unwrap(), [[7; 8]], "{rule}");
        }
    });
}
