//! Which thread knows of what that it is over: programs in which that goes ways which the checker cannot see. Where the
//! library orders, it says nothing; where nobody does, luck does not silence it.

use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, ReduceOp};
use gpu_pool_lab::{Check, FaultPlan, check::Kind, prelude::*};
use parking_lot::Mutex;
use std::{
    sync::{Arc, Barrier, mpsc},
    thread,
};

/// A pool of software GPUs with the checker, and its faults, which are still paused.
fn faulty(count: usize, faults: &str) -> (GpuPool, FaultPlan) {
    let plan = faults.parse::<FaultPlan>().unwrap().paused();
    let pool = GpuPool::builder().host(count).check(Check::Races).faults(plan.clone()).build().unwrap();
    (pool, plan)
}

/// Two other devices have read the buffer, the first long ago; then its owner gives the memory back to the driver. All
/// that the owner waits for itself is the second reader.
#[test]
fn memory_that_others_have_read_goes_back_to_the_driver() {
    let pool = GpuPool::builder().host(3).check(Check::Races).memory_limit(8 << 20).build().unwrap();
    let turn = Barrier::new(3);
    let lent: Mutex<Option<Arc<DeviceBuffer<u8>>>> = Mutex::default();
    pool.run(|dev, _| {
        let mut x = None;
        if dev.index() == 0 {
            *lent.lock() = Some(Arc::new(dev.zeros(6 << 20)?));
        }
        turn.wait();
        for reader in [1, 2] {
            if dev.index() == reader {
                let x = lent.lock().clone().unwrap();
                let mut mine = dev.zeros::<u8>(100)?;
                dev.copy(&x.slice(..100).peer(), &mut mine)?;
                if reader == 1 {
                    dev.synchronize()?;
                }
            }
            turn.wait();
        }
        if dev.index() == 0 {
            drop(lent.lock().take());
            // There is no room for both.
            x = Some(dev.zeros::<u8>(4 << 20)?);
        }
        drop(x);
        Ok(())
    })
    .unwrap();
    pool.close().unwrap();
}

/// One thread waits for a copy from page-locked memory and drops it; another one gives it back to the driver.
#[test]
fn pinned_memory_that_another_thread_has_waited_for_goes_back_to_the_driver() {
    let (pool, plan) = faulty(1, "*:host-alloc:*:oom");
    let mut p = pool.pinned::<u8>(4 << 20).unwrap();
    thread::scope(|s| {
        s.spawn(|| {
            pool.run(|dev, _| dev.upload_pinned(&p).map(drop)).unwrap();
            p.as_mut_slice().unwrap().fill(1);
            drop(p);
        })
        .join()
        .unwrap();
    });
    plan.resume();
    // A larger one: what is free is given back first.
    assert!(matches!(pool.pinned::<u8>(32 << 20), Err(Error::OutOfMemory { .. })));
    plan.pause();
    pool.close().unwrap();
}

/// A device is lost with a staged copy under way; a thread that has seen nothing of it closes the pool.
#[test]
fn a_pool_with_a_lost_device_is_closed_by_another_thread() {
    for lost in 0..2 {
        for nth in 1..6 {
            for op in ["copy-up", "copy-down", "record", "wait"] {
                let plan: FaultPlan = format!("{lost}:{op}:{nth}:lost").parse().unwrap();
                let plan = plan.paused();
                let builder = GpuPool::builder().host(2).without_peer_access().check(Check::Races);
                let pool = builder.faults(plan.clone()).build().unwrap();
                let (send, closed) = mpsc::channel::<GpuPool>();
                let closer = thread::spawn(move || closed.recv().unwrap().close());
                let run = |pool: &GpuPool| {
                    pool.run(|dev, _| {
                        let x = Arc::new(dev.zeros::<u8>(3 << 20)?);
                        let all = dev.exchange(x)?;
                        all[1 - dev.rank()].copy_to(dev).map(drop)
                    })
                };
                plan.resume();
                let first = run(&pool);
                let second = run(&pool);
                plan.pause();
                for result in [first, second] {
                    assert!(!matches!(result, Err(Error::Misuse { .. })), "{result:?}");
                }
                send.send(pool).unwrap();
                closer.join().unwrap().unwrap();
            }
        }
    }
}

/// A collective fails half way, with reads of the peer's buffer under way that no event of the failing member covers.
/// All members drain; then another thread, which has seen nothing of it, uses the memory anew.
#[test]
fn memory_of_a_collective_that_failed_is_used_again() {
    for (device, staged) in [(0, false), (1, false), (0, true), (1, true)] {
        for (op, nth) in
            ["launch", "copy-peer", "copy-up", "record", "wait"].into_iter().flat_map(|op| (1..6).map(move |n| (op, n)))
        {
            let plan: FaultPlan = format!("{device}:{op}:{nth}:error").parse().unwrap();
            let plan = plan.paused();
            let mut builder = GpuPool::builder().host(2).check(Check::Races).faults(plan.clone());
            if staged {
                builder = builder.without_peer_access();
            }
            let pool = builder.build().unwrap();
            let reduce = || pool.run(|dev, _| dev.all_reduce(&mut dev.zeros::<f32>(400_000)?, ReduceOp::Sum));
            plan.resume();
            let failed = thread::scope(|s| s.spawn(reduce).join().unwrap());
            plan.pause();
            assert!(!matches!(failed, Err(Error::Misuse { .. })), "{device}:{op}:{nth}, {failed:?}");
            let again = pool.run(|dev, _| {
                let x = [dev.zeros::<f32>(400_000)?, dev.zeros(400_000)?];
                dev.download(&x[0]).map(drop)
            });
            again.unwrap_or_else(|error| panic!("{device}:{op}:{nth}, staged: {staged}, after {failed:?}: {error}"));
            pool.close().unwrap();
        }
    }
}

/// What the library finds out while it tidies up is luck: it orders nothing for code that wants to order itself.
#[test]
fn a_use_that_happened_to_be_over_is_still_a_race() {
    let pool = GpuPool::builder().host(2).check(Check::Races).build().unwrap();
    for ordered in [true, false] {
        // Not seen by the checker.
        let turn = Barrier::new(2);
        let lent: Mutex<Option<Arc<DeviceBuffer<f32>>>> = Mutex::default();
        let result = pool.run(|dev, _| {
            // SAFETY: no two operations run at the same time, thanks to the barrier.
            let raw = unsafe { dev.unordered() };
            let dev: &Device = if ordered { dev } else { &raw };
            if dev.index() == 0 {
                *lent.lock() = Some(Arc::new(dev.zeros(100)?));
                dev.synchronize()?;
            }
            dev.barrier()?;
            let mut mine = dev.zeros::<f32>(100)?;
            if dev.index() == 1 {
                let x = lent.lock().clone().unwrap();
                let read = dev.copy(&x.peer(), &mut mine).and_then(|()| dev.synchronize());
                drop(x);
                turn.wait();
                return read;
            }
            turn.wait();
            let mut x = Arc::try_unwrap(lent.lock().take().unwrap()).unwrap();
            // The use by device 1 is over, and is forgotten here.
            dev.copy(&x, &mut mine)?;
            dev.fill(&mut x, 1.0)
        });
        match result {
            Ok(_) if ordered => {}
            Err(Error::Misuse { report, .. }) if !ordered => {
                let before = report.before.as_ref().unwrap();
                assert_eq!((report.kind, before.device, report.now.op), (Kind::Race, Some(1), "fill"), "{report}");
            }
            other => panic!("ordered: {ordered}, {other:?}"),
        }
    }
    pool.close().unwrap();
}

/// Reports speak of the ordinals of the pool that was asked, also where it is what another one has left.
#[test]
fn survivors_are_reported_under_their_own_numbers() {
    let (pool, plan) = faulty(2, "0:launch:1:lost");
    plan.resume();
    pool.run(|dev, _| dev.scale(&mut dev.zeros::<f32>(1)?, 1.0)).unwrap_err();
    let rest = pool.survivors().unwrap();
    let race = rest.run(|dev, _| {
        let mut x = dev.zeros::<f32>(100)?;
        let side = dev.stream()?;
        // SAFETY: what this promises is not so, which is what is tested.
        let raw = unsafe { dev.unordered() };
        raw.on(&side).scale(&mut x, 2.0)
    });
    let Err(Error::Misuse { device: 0, report, .. }) = race else { panic!("{race:?}") };
    let before = report.before.as_ref().unwrap();
    assert_eq!(
        (before.device, before.stream, report.now.device, report.now.stream),
        (Some(0), Some(0), Some(0), Some(1))
    );
    rest.close().unwrap();
}
