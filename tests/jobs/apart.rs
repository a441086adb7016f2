//! Jobs have nothing to do with each other: what one fails with, or drops, or waits for, is not the affair of others.

use crate::{basics::blocker, support::*};
use gpu_pool::{Error, LaunchDims, extend::train::DeviceInternals, jobs::Jobs, kernel};
use std::{
    sync::{
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::Duration,
};

/// A job that ends with the id of its gang.
fn gang_id(jobs: &Jobs) -> gpu_pool::jobs::JobHandle<u64> {
    jobs.submit(|dev| Ok(dev.gang())).unwrap()
}

/// Whether the gang of this id has failed.
fn has_failed(jobs: &Jobs, id: u64) -> bool {
    jobs.submit(move |dev| Ok(dev.has_failed(id))).unwrap().wait().unwrap()
}

/// Jobs of one visit have gangs of their own.
#[test]
fn a_failure_is_that_of_its_own_gang() {
    guarded(|| {
        let pool = builder().host(1).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        // Both are in the queue when the visit comes to them, so both are of it.
        let (blocked, go) = blocker(&jobs, 0);
        let good = gang_id(&jobs);
        let bad = jobs.submit(|_| Err::<(), _>(Error::custom("as it should"))).unwrap();
        drop(go);
        blocked.wait().unwrap();
        let good = good.wait().unwrap();
        bad.wait().unwrap_err();
        assert!(!has_failed(&jobs, good));
    });
}

static GO: AtomicBool = AtomicBool::new(false);

kernel! {
    static HELD: "slow_add" in MODULE, fn(x: &mut [u32], _n: u64, _add: u32, _micros: u32) |_dims| {
        while !GO.load(SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        x[0] += 1;
    }
}

/// Its closure has ended well, and its work is cancelled: its gang has failed.
#[test]
fn a_failure_in_flight_is_that_of_the_gang() {
    guarded(|| {
        let pool = builder().host(1).module(&MODULE).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let (tell, told) = mpsc::channel();
        let flies = jobs.submit(move |dev| {
            tell.send(dev.gang()).unwrap();
            let mut x = dev.zeros::<u32>(1)?;
            // SAFETY: the kernel fits its signature and touches one element.
            unsafe { dev.launch(&HELD, LaunchDims::cover(1), (&mut x, 1u64, 0u32, 0u32)) }
        });
        let flies = flies.unwrap();
        // It begins when the closure is over.
        gang_id(&jobs).wait().unwrap();
        assert!(!flies.cancel());
        GO.store(true, SeqCst);
        let error = flies.wait().unwrap_err();
        assert!(matches!(error, Error::Cancelled { .. }), "{error}");
        assert!(has_failed(&jobs, told.recv().unwrap()));
    });
}
