//! Each operation that can fail, with each fault that a driver reports.

use super::{assert_works, is_typed, plan};
use crate::{
    on_both,
    support::{failure, slow_add},
};
use gpu_pool::{Device, DeviceBuffer, Error, ReduceOp};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{FaultOp, FaultRule, Injected};
use parking_lot::Mutex;

/// What the operations work on: a buffer of each device, and one that device 1 may write on another.
struct Kept {
    own: Vec<DeviceBuffer<f32>>,
    theirs: Mutex<DeviceBuffer<f32>>,
}

type Try = fn(&Device, &Kept) -> Result<(), Error>;

/// An operation of the driver, and what leads to it on device 1.
const TRIES: [(FaultOp, Try); 15] = [
    (FaultOp::Alloc, |dev, _| dev.zeros::<u8>(30 << 20).map(drop)),
    (FaultOp::StreamCreate, |dev, _| dev.stream().map(drop)),
    (FaultOp::EventCreate, |dev, _| (0..100).map(|_| dev.record()).collect::<Result<Vec<_>, _>>().map(drop)),
    (FaultOp::EventCreate, |dev, _| (0..100).map(|_| dev.record_timed()).collect::<Result<Vec<_>, _>>().map(drop)),
    (FaultOp::Record, |dev, _| dev.record().map(drop)),
    (FaultOp::Wait, |dev, _| dev.wait(&dev.record()?)),
    (FaultOp::EventWait, |dev, kept| dev.download(&kept.own[1]).map(drop)),
    (FaultOp::StreamWait, |dev, _| {
        dev.zeros::<u8>(1)?;
        dev.synchronize()
    }),
    (FaultOp::CopyUp, |dev, _| dev.upload(&[1u8; 10]).map(drop)),
    (FaultOp::CopyDown, |dev, kept| dev.download(&kept.own[1]).map(drop)),
    (FaultOp::CopyWithin, |dev, kept| dev.copy(&kept.own[1], &mut dev.zeros::<f32>(100)?)),
    (FaultOp::CopyFromPeer, |dev, kept| kept.own[0].copy_to(dev).map(drop)),
    (FaultOp::CopyToPeer, |dev, kept| dev.copy(&kept.own[1], &mut *kept.theirs.lock())),
    (FaultOp::Fill, |dev, _| dev.zeros::<u8>(10).map(drop)),
    (FaultOp::Launch, |dev, _| {
        let mut x = dev.zeros::<u32>(10)?;
        slow_add(dev, &mut x, 1, 1)?;
        // What a launch fails of is for the next call to say.
        dev.synchronize()
    }),
];

on_both! {
    // The scope fails with an error that names device and operation; the peer, which waits, is told; all is well again.
    2: fn each_operation_that_fails_is_named(gpus) {
        let direct = gpus.pool(2).report().peer(1, 0).verified;
        for (op, attempt) in TRIES {
            if !direct && op.is_peer_copy() {
                println!("skipped {op:?}: the devices are no peers");
                continue;
            }
            for fault in [Injected::OutOfMemory, Injected::Error, Injected::LaunchFailed, Injected::DeviceLost] {
                let plan = plan(FaultRule::new(fault).device(1).op(op).from(1));
                let pool = gpus.builder(2).faults(plan.clone()).build().unwrap();
                let own = pool.run(|dev, _| dev.upload(&[1.0f32; 100])).unwrap();
                let theirs = pool.on(&[0]).run(|dev, _| dev.zeros::<f32>(100)).unwrap().remove(0);
                let kept = Kept { own, theirs: Mutex::new(theirs) };
                let told = Mutex::new(None);
                plan.resume();
                let failed = pool.run(|dev, _| {
                    if dev.index() == 1 {
                        return attempt(dev, &kept);
                    }
                    *told.lock() = Some(failure(dev.barrier()));
                    Ok(())
                });
                let error = failure(failed);
                assert!(is_typed(&error, 1, fault), "{op:?}: {error}");
                let told = told.into_inner().expect("the peer was in the barrier");
                match &told {
                    Error::Aborted { by: 1, cause } => assert_eq!(cause.to_string(), error.to_string()),
                    // The victim's work failed behind its closure's back, which had ended well.
                    Error::Mismatch { what: "participation", .. } => {}
                    other => panic!("{op:?}: {other}"),
                }
                plan.pause();
                assert!(plan.fired().iter().all(|fired| (fired.device, fired.op, fired.fault) == (1, op, fault)));
                if matches!(fault, Injected::OutOfMemory | Injected::Error) {
                    pool.on(&[1]).run(|dev, _| attempt(dev, &kept)).unwrap();
                    assert_works(&pool);
                    assert_eq!(pool.report().lost, [false, false]);
                } else {
                    let again = failure(pool.on(&[1]).run(|dev, _| attempt(dev, &kept)));
                    assert!(is_typed(&again, 1, fault), "{op:?}: {again}");
                    assert_eq!(pool.report().lost, [false, true]);
                    assert_works(&pool.survivors().unwrap());
                }
                drop(kept);
                pool.close().unwrap();
            }
        }
    }

    // Page-locked memory belongs to all devices, and comes from the first.
    2: fn no_page_locked_memory(gpus) {
        for fault in [Injected::OutOfMemory, Injected::Error] {
            let plan = plan(FaultRule::new(fault).op(FaultOp::HostAlloc));
            let pool = gpus.builder(2).faults(plan.clone()).build().unwrap();
            plan.resume();
            assert!(is_typed(&failure(pool.pinned::<u8>(30 << 20)), 0, fault));
            let error = failure(pool.on(&[1]).run(|dev, _| dev.upload(&[1u8]).map(drop)));
            assert!(is_typed(&error, 0, fault), "{error}");
            plan.pause();
            assert_works(&pool);
            assert_eq!(pool.pinned::<u8>(30 << 20).unwrap().len(), 30 << 20);
        }
        let plan = plan(FaultRule::new(Injected::DeviceLost).device(0).op(FaultOp::HostAlloc));
        let pool = gpus.builder(2).faults(plan.clone()).build().unwrap();
        plan.resume();
        assert_eq!(pool.on(&[1]).run(|dev, _| dev.download(&dev.upload(&[1u8])?)).unwrap(), [[1]]);
        assert_eq!(pool.pinned::<u8>(30 << 20).unwrap().len(), 30 << 20);
        assert_eq!(pool.report().lost, [true, false]);
    }

    // Memory that is not a device's.
    1: fn no_unified_memory(gpus) {
        let plan = plan(FaultRule::new(Injected::OutOfMemory).op(FaultOp::ManagedAlloc));
        let pool = gpus.builder(1).faults(plan.clone()).build().unwrap();
        plan.resume();
        match pool.unified::<u8>(100) {
            // Where the device has none at all, nothing is asked for.
            Err(Error::InvalidArgument { .. }) => return,
            other => assert!(matches!(other, Err(Error::OutOfMemory { device: 0, .. })), "{other:?}"),
        }
        plan.pause();
        assert_eq!(pool.unified::<u8>(100).unwrap().len(), 100);
    }

    // The streams of others that wait for work of the lost one go on, and find what it had done by then.
    2: fn a_device_is_lost_while_others_wait_for_its_events(gpus) {
        for fault in [Injected::LaunchFailed, Injected::DeviceLost] {
            let plan = plan(FaultRule::new(fault).device(1).op(FaultOp::Fill));
            let pool = gpus.builder(2).faults(plan.clone()).build().unwrap();
            plan.resume();
            let error = failure(pool.run(|dev, _| {
                if dev.index() == 1 {
                    let mut x = dev.upload(&[1u32; 64])?;
                    slow_add(dev, &mut x, 1, 50_000)?;
                    dev.exchange(Some(dev.record()?))?;
                    return dev.zeros::<u8>(1).map(drop);
                }
                let event = dev.exchange(None)?.remove(1).expect("device 1 has recorded it");
                // It may be lost by now, or not.
                let waited = dev.wait(&event);
                assert!(matches!(waited, Ok(()) | Err(Error::Aborted { .. } | Error::DeviceLost { device: 1, .. })));
                waited?;
                dev.synchronize()
            }));
            assert!(is_typed(&error, 1, fault), "{error}");
            assert_eq!(pool.report().lost, [false, true]);
            pool.on(&[0]).run(|dev, _| dev.all_reduce(&mut dev.zeros::<f32>(9)?, ReduceOp::Sum)).unwrap();
            pool.close().unwrap();
        }
    }
}
