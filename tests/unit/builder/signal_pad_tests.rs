use super::*;
use crate::lab::prelude::*;
use crate::lab::{FaultOp, FaultPlan, FaultRule, Injected};
use crate::{
    Error,
    collective::barrier,
    gang::Gang,
    host::ExecutionOrder,
    sync::{EventCount, shim},
};

/// What kernels of a failed gang have left is gone before its members meet again; other members keep theirs, which
/// may be on its way.
#[test]
fn the_inboxes_of_a_failed_gang_are_emptied() {
    let pool = GpuPool::builder().host(3).build().unwrap();
    let pad = make(&pool).unwrap();
    assert!(pool.shared.signals.set(pad.clone()).is_ok());
    let bytes_of = |byte: u8| {
        let found = pool.run(|dev, _| {
            let (at, bytes) = pad.inbox(dev.index());
            let mut found = dev.pinned::<u8>(bytes)?;
            let to = found.as_mut_slice()?.as_mut_ptr();
            dev.op("test")?.submit(|driver, stream| {
                // SAFETY: the pad's inbox is of so many bytes, and no kernel uses it; the wait is below.
                unsafe {
                    driver.copy_to_host(to, at, bytes, stream)?;
                    driver.fill_u8(at, byte, bytes, stream)
                }
            })?;
            dev.synchronize()?;
            let found = found.as_slice()?;
            assert!(found.iter().all(|byte| *byte == found[0]));
            Ok(found[0])
        });
        found.unwrap()
    };
    assert_eq!(bytes_of(7), [EMPTY; 3], "new ones");
    let failed = pool.on(&[0, 2]).run(|dev, _| match dev.rank() {
        0 => Err(Error::custom("in the middle")),
        _ => dev.barrier(),
    });
    assert!(failed.is_err());
    assert_eq!(bytes_of(9), [EMPTY, 7, EMPTY]);
    restart(&pad, &pool, 5).unwrap();
    assert_eq!(bytes_of(1), [EMPTY; 3]);
}

/// A device may get through with the work of a failed gang when its peers have emptied their inboxes long ago, and
/// may have sent to them meanwhile. It does not meet them before it has removed that.
#[test]
fn who_is_late_removes_what_it_has_sent() {
    let pool = GpuPool::builder().host(3).build().unwrap();
    let pad = make(&pool).unwrap();
    assert!(pool.shared.signals.set(pad.clone()).is_ok());
    let fill = |dev: &Device| {
        let (at, bytes) = pad.inbox(dev.index());
        // SAFETY: the pad's inbox is of so many bytes, and no kernel uses it.
        dev.op("test")?.submit(|driver, stream| unsafe { driver.fill_u8(at, 7, bytes, stream) })?;
        dev.synchronize()
    };
    pool.run(|dev, _| fill(dev)).unwrap();
    pool.on(&[1])
        .run(|dev, _| {
            dev.worker.barrier_state.set_spoiled(true);
            barrier::resync_later(&dev.worker, &dev.session.gang)
        })
        .unwrap();
    let found = pool.run(|dev, _| {
        let mut found = Vec::new();
        for sender in (0..3).filter(|&sender| sender != dev.index()) {
            for (at, bytes) in pad.inbox_of_sender(sender, dev.index()) {
                let mut part = dev.pinned::<u8>(bytes)?;
                let to = part.as_mut_slice()?.as_mut_ptr();
                // SAFETY: a part of the inbox, of so many bytes; the wait is below.
                dev.op("test")?.submit(|driver, stream| unsafe { driver.copy_to_host(to, at, bytes, stream) })?;
                dev.synchronize()?;
                let part = part.as_slice()?;
                assert!(part.iter().all(|byte| *byte == part[0]), "from {sender} to {}", dev.index());
                found.push(part[0]);
            }
        }
        Ok(found)
    });
    assert_eq!(found.unwrap(), [[EMPTY, EMPTY, 7, 7], [EMPTY; 4], [7, 7, EMPTY, EMPTY]]);
}

/// A device that cannot remove what it has sent to a peer works with others, and meets that peer only when it can.
/// It never meets a lost one.
#[test]
fn a_peer_that_cannot_be_cleaned_stops_no_scope_without_it() {
    let fails = FaultRule::new(Injected::Error).device(1).peer(2).op(FaultOp::CopyPeer);
    let lost = FaultRule::new(Injected::DeviceLost).device(2).op(FaultOp::CopyUp);
    let plan = FaultPlan::new().on(fails).on(lost).paused();
    let pool = GpuPool::builder().host(3).faults(plan.clone()).build().unwrap();
    assert!(pool.shared.signals.set(make(&pool).unwrap()).is_ok());
    pool.on(&[1])
        .run(|dev, _| {
            dev.worker.barrier_state.set_spoiled(true);
            Ok(())
        })
        .unwrap();
    plan.resume();
    let is_spoiled = |members: &[usize]| pool.on(members).run(|dev, _| Ok(dev.worker.barrier_state.is_spoiled()));
    assert_eq!(is_spoiled(&[1]).unwrap(), [true]);
    assert_eq!(is_spoiled(&[0, 1]).unwrap(), [false, true]);
    assert!(matches!(is_spoiled(&[1, 2]), Err(Error::Driver { device: 1, .. })));
    let failed = pool.on(&[2]).run(|dev, _| dev.upload(&[1u8]).map(drop));
    assert!(matches!(failed, Err(Error::DeviceLost { device: 2, .. })), "{failed:?}");
    let fired = plan.fired().len();
    assert_eq!(is_spoiled(&[0, 1]).unwrap(), [false, false]);
    assert_eq!(plan.fired().len(), fired);
}

/// All members empty inboxes at the begin of a scope, one after the other, also where operations run one at a time.
#[test]
fn all_members_may_be_late() {
    for seed in 0..3 {
        let pool = GpuPool::builder().host(3).schedule(ExecutionOrder::Seeded(seed)).build().unwrap();
        assert!(pool.shared.signals.set(make(&pool).unwrap()).is_ok());
        for _ in 0..3 {
            let spoiled = pool.run(|dev, _| {
                dev.worker.barrier_state.set_spoiled(true);
                Ok(())
            });
            spoiled.unwrap();
            let is_spoiled = pool.run(|dev, _| Ok(dev.worker.barrier_state.is_spoiled()));
            assert_eq!(is_spoiled.unwrap(), [false; 3], "seed {seed}");
        }
        pool.close().unwrap();
    }
}

/// Whoever waits for the device that empties inboxes waits no longer than that one does, or the deadline.
#[test]
fn a_device_that_gets_stuck_while_it_empties_inboxes_keeps_no_other() {
    let plan = FaultPlan::new().on(FaultRule::new(Injected::Stuck).device(1).op(FaultOp::CopyPeer).nth(1)).paused();
    let timeout = std::time::Duration::from_millis(500);
    let pool = GpuPool::builder().host(3).timeout(timeout).faults(plan.clone()).build().unwrap();
    assert!(pool.shared.signals.set(make(&pool).unwrap()).is_ok());
    pool.run(|dev, _| {
        dev.worker.barrier_state.set_spoiled(true);
        Ok(())
    })
    .unwrap();
    plan.resume();
    assert!(matches!(pool.run(|_, _| Ok(())), Err(Error::Timeout { .. })));
    let is_spoiled = |members: &[usize]| pool.on(members).run(|dev, _| Ok(dev.worker.barrier_state.is_spoiled()));
    assert_eq!(is_spoiled(&[0, 2]).unwrap(), [false, false]);
    assert!(matches!(is_spoiled(&[1]), Err(Error::Timeout { device: 1, op: "scope begin", .. })));
    plan.release();
    assert_eq!(is_spoiled(&[0, 1, 2]).unwrap(), [false; 3]);
}

/// A gang may fail before all its devices are through with the gangs before it.
#[test]
fn a_failed_gang_ends_the_kernels_of_no_other() {
    let pool = GpuPool::builder().host(3).build().unwrap();
    let pad = make(&pool).unwrap();
    let gang = |members: [usize; 2]| {
        let wakers = members.map(|_| shim::Arc::new(EventCount::new())).to_vec();
        let gang = Gang::new(members.into(), wakers).with_alarm(Some(pad.clone()));
        gang.enter();
        gang
    };
    let (first, second) = (gang([0, 1]), gang([0, 2]));
    let (p, q) = (first.place(), second.place());
    let aborted = || [0, 1, 2].map(|device| pad.abort(device));
    for (device, gang) in [(0, &first), (1, &first), (2, &second)] {
        pad.enter(device, gang);
    }
    second.poison(2, Error::Closed);
    assert_eq!(aborted(), [0, 0, q], "device 0 is still in the first");
    pad.enter(0, &second);
    assert_eq!(aborted(), [q, 0, q], "it hears of it when it comes");
    // Device 0 has gone on when the first fails.
    first.poison(1, Error::Closed);
    assert_eq!(aborted(), [q, p, q]);
}

/// The pads of several processes are of no use once a kernel has given up, also in a gang that has failed before.
#[test]
fn a_failed_gang_asks_for_kernels_that_have_given_up() {
    struct Asked(parking_lot::Mutex<usize>);
    impl crate::gang::Alarm for Asked {
        fn raise(&self, _: &[usize], _: u64) {}

        fn given_up(&self, _: &[usize], _: u64) -> Option<(usize, usize)> {
            *self.0.lock() += 1;
            Some((0, 1))
        }
    }
    let asked = Arc::new(Asked(Default::default()));
    let wakers = vec![shim::Arc::new(EventCount::new())];
    let gang = Gang::new([0][..].into(), wakers).with_alarm(Some(asked.clone()));
    gang.enter();
    gang.poison(0, Error::Closed);
    gang.check_kernels(std::time::Duration::ZERO, Vec::new);
    assert_eq!(*asked.0.lock(), 1);
    assert!(matches!(gang.cause(), Some((0, Error::Closed))));
}
