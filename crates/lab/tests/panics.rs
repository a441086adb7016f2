//! Panics of device threads at each point of a scope.

use gpu_pool::{Error, GpuPool, Result};
use gpu_pool_lab::{Check, FailPoint, FaultPlan, prelude::*};
use std::{panic::catch_unwind, sync::mpsc, thread, time::Duration};

/// Fails if `f` does not come to an end.
fn guarded(f: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel();
    let thread = thread::spawn(move || {
        f();
        let _ = done.send(());
    });
    assert_ne!(ended.recv_timeout(Duration::from_secs(100)), Err(mpsc::RecvTimeoutError::Timeout), "hung");
    thread.join().unwrap();
}

/// Two devices, and the plan by which their threads panic.
fn two() -> (GpuPool, FaultPlan) {
    let plan = FaultPlan::new();
    (GpuPool::builder().host(2).check(Check::Races).faults(plan.clone()).build().unwrap(), plan)
}

fn works(pool: &GpuPool) -> Result<()> {
    pool.run(|dev, _| dev.exchange(dev.rank())).map(|all| assert_eq!(all, [[0, 1], [0, 1]]))
}

#[track_caller]
fn assert_injected(result: Result<()>, device: usize) {
    match result {
        Err(Error::Panicked { device: at, message, place }) => {
            assert_eq!(at, device);
            assert!(message.starts_with("injected") && place.contains("handle.rs"), "{message} at {place}");
        }
        other => panic!("{other:?}"),
    }
}

/// Any panic on a device thread fails this scope or the next one. No thread waits for ever, and the GPU's other
/// pools get their turns.
#[test]
fn a_device_thread_outlives_every_panic() {
    guarded(|| {
        let (pool, plan) = two();
        let other = pool.survivors().unwrap();
        for place in [FailPoint::BeforeTurn, FailPoint::BeforeMember, FailPoint::InDrain, FailPoint::InRecovery] {
            for (device, fails) in [(0, false), (1, false), (0, true), (1, true)] {
                plan.strike(device, place);
                let result = pool.run(|dev, _| {
                    // The other member waits for this device in its closure, or at the end of the scope.
                    if fails && dev.rank() != device {
                        return Err(Error::custom("on purpose"));
                    }
                    if fails { Ok(()) } else { dev.barrier() }
                });
                let late = place == FailPoint::InRecovery;
                match result {
                    Err(Error::Custom(_)) => assert!(fails),
                    Ok(_) => assert!(late && !fails, "{place:?}"),
                    Err(error) => assert_injected(Err(error), device),
                }
                works(&other).unwrap();
                if late {
                    assert_injected(works(&pool), device);
                }
                works(&pool).unwrap();
            }
        }
        other.close().unwrap();
        pool.close().unwrap();
    });
}

/// The error has the place of the thread's own panic, not of a panic which the caller has caught.
#[test]
fn close_tells_how_a_device_thread_ended() {
    guarded(|| {
        let (pool, plan) = two();
        plan.strike(1, FailPoint::AtEnd);
        assert!(catch_unwind(|| panic!("the caller's own")).is_err());
        assert_injected(pool.close(), 1);
        // `close` returns an error that could be reported to no scope.
        let (pool, plan) = two();
        plan.strike(0, FailPoint::InRecovery);
        works(&pool).unwrap();
        assert_injected(pool.close(), 0);
    });
}
