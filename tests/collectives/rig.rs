//! What these tests share: pools of every kind, and the reports of calls that must fail.

use crate::{
    cases::{Case, Prepared, kinds},
    numbers::{OPS, Rng},
    support::{Gpus, failure, slow_add, succeeds, until},
};
use gpu_pool::{Builder, Device, DeviceBuffer, Error, GpuPool, ReduceOp, collective::Algorithm, error::Site};
use gpu_pool_lab::{Check, FaultPlan, count_meetings_from, prelude::*};
use std::{
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
    thread,
    time::Duration,
};

/// A pool in the making. `GPU_POOL_TEST_PEERS=off` takes away all access to peers' memory. GPUs are not watched unless
/// `GPU_POOL_CHECK` says so: the checker knows no flags, so where it looks on, kernels do not meet by themselves.
pub fn builder(gpus: Gpus, count: usize) -> Builder {
    let builder = gpus.unwatched(count);
    match std::env::var("GPU_POOL_TEST_PEERS").as_deref() {
        Ok("off") => builder.without_peer_access(),
        _ => builder,
    }
}

pub fn pool(gpus: Gpus, count: usize) -> GpuPool {
    builder(gpus, count).build().unwrap()
}

/// Runs `f` on each device of a [`pool`], which must succeed. Returns the pool.
#[track_caller]
pub fn run(gpus: Gpus, count: usize, f: impl Fn(&Device) -> Result<(), Error> + Sync) -> GpuPool {
    succeeds(pool(gpus, count), f)
}

/// How collectives are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// As by default, or as `GPU_POOL_ALGORITHM` says.
    Default,
    /// The same with the checker on, for which kernels are ordered by events.
    Watched,
    Forced(Algorithm),
    /// Without access to peers' memory.
    Staged,
}

pub const WAYS: [Way; 9] = [
    Way::Default,
    Way::Watched,
    Way::Forced(Algorithm::Inbox),
    Way::Forced(Algorithm::Exchange),
    Way::Forced(Algorithm::Copies),
    Way::Forced(Algorithm::Ring),
    Way::Forced(Algorithm::Staged),
    Way::Forced(Algorithm::Host),
    Way::Staged,
];

impl Way {
    pub fn builder(self, gpus: Gpus, count: usize) -> Builder {
        match self {
            Way::Default => builder(gpus, count),
            Way::Watched => builder(gpus, count).algorithm(Algorithm::Direct).check(Check::Races),
            Way::Forced(algorithm) => builder(gpus, count).algorithm(algorithm),
            Way::Staged => builder(gpus, count).without_peer_access(),
        }
    }

    pub fn pool(self, gpus: Gpus, count: usize) -> GpuPool {
        self.builder(gpus, count).build().unwrap()
    }
}

/// Each way, with a pool of `count` devices.
pub fn ways(gpus: Gpus, count: usize) -> impl Iterator<Item = (Way, GpuPool)> {
    WAYS.into_iter().map(move |way| (way, way.pool(gpus, count)))
}

/// Ones, summed up over the gang: `count` everywhere.
#[track_caller]
pub fn sum_works(dev: &Device) -> Result<(), Error> {
    let mut x = dev.upload(&[1.0f32; 33])?;
    dev.all_reduce(&mut x, ReduceOp::Sum)?;
    assert_eq!(dev.download(&x)?, [dev.count() as f32; 33]);
    Ok(())
}

/// A failure has left nothing behind.
#[track_caller]
pub fn assert_works(pool: &GpuPool) {
    for _ in 0..2 {
        if let Err(error) = pool.run(|dev, _| sum_works(dev)) {
            panic!("the pool does not go on: {error}");
        }
    }
}

/// All memory has come home. Asked in a scope: what a device frees for another one is with that one when it next looks.
#[track_caller]
pub fn assert_nothing_kept(pool: &GpuPool) {
    let kept = pool.run(|dev, _| {
        dev.barrier()?;
        Ok(dev.stats().in_use)
    });
    assert_eq!(kept.unwrap(), vec![0; pool.device_count()]);
}

/// After `before`, one member fails when the others wait for it, on the host and in their kernels. They are told, and
/// the pool goes on.
#[track_caller]
pub fn assert_failure_is_told(
    pool: &GpuPool,
    (fails, len): (usize, usize),
    before: impl Fn(&Device, &mut DeviceBuffer<f32>) -> Result<(), Error> + Sync,
) {
    let waiting = AtomicUsize::new(0);
    let error = failure(pool.run(|dev, _| {
        let mut x = dev.upload(&vec![1.0f32; len])?;
        before(dev, &mut x)?;
        if dev.rank() == fails {
            until("the others wait", || waiting.load(SeqCst) == dev.count() - 1)?;
            return Err(Error::custom("in the middle"));
        }
        waiting.fetch_add(1, SeqCst);
        dev.all_reduce(&mut x, ReduceOp::Avg)?;
        dev.synchronize()
    }));
    assert_eq!(error.to_string(), "in the middle");
    assert_works(pool);
}

/// After `before` all agree on a sum, and then the victim's kernel cannot be launched, as `plan` has it: the others'
/// wait for it already. They are told, and the pool goes on.
#[track_caller]
pub fn assert_launch_failure_is_told(
    pool: &GpuPool,
    (plan, victim): (&FaultPlan, usize),
    len: usize,
    before: impl Fn(&Device, &mut DeviceBuffer<f32>) -> Result<(), Error> + Sync,
) {
    let fired = plan.fired().len();
    let error = failure(pool.run(|dev, _| {
        let mut x = dev.upload(&vec![1.0f32; len])?;
        before(dev, &mut x)?;
        dev.barrier()?;
        if dev.rank() == victim {
            plan.resume();
            let failed = dev.all_reduce(&mut x, ReduceOp::Sum);
            plan.pause();
            return failed;
        }
        // Its own launch is a success, most likely; that it is in vain, it learns next.
        let called = dev.all_reduce(&mut x, ReduceOp::Sum).and_then(|()| dev.synchronize());
        until("the others know", || dev.check().is_err())?;
        let told = called.and(dev.check()).unwrap_err();
        let cause = |cause: &Error| matches!(cause, Error::Driver { code: 999, .. });
        assert!(matches!(&told, Error::Aborted { by, cause: why } if *by == victim && cause(why)), "{told}");
        Err(told)
    }));
    assert!(matches!(error, Error::Driver { device, code: 999, .. } if device == victim), "{len} elements: {error}");
    assert_eq!(plan.fired().len(), fired + 1, "{len} elements");
    assert_works(pool);
}

/// Each case behind one late member at a time: so late on the host, and a little on the device.
#[track_caller]
pub fn check_with_late_members(pool: &GpuPool, cases: &[Prepared<f32>], late: Duration) {
    let checked = pool.run(|dev, _| {
        let mut busy = dev.zeros::<u32>(1)?;
        for (k, case) in cases.iter().enumerate() {
            if dev.rank() == k % dev.count() {
                thread::sleep(late);
                slow_add(dev, &mut busy, 1, 2_000)?;
            }
            case.check(dev)?;
        }
        Ok(())
    });
    checked.unwrap();
}

/// Whether kernels meet here; from now on, as if they had met so many times.
pub fn meet_from(pool: &GpuPool, epoch: u32) -> bool {
    let meet = count_meetings_from(pool, epoch).unwrap();
    if !meet {
        println!("skipped: kernels do not meet here");
    }
    meet
}

/// Runs `f` so many meetings before the counters begin again, if kernels meet here: 2^32 meetings of a pair take a day,
/// and nobody may notice.
#[track_caller]
pub fn run_as_counters_wrap(pool: &GpuPool, left: &[u32], f: impl Fn(&Device) -> Result<(), Error> + Sync) {
    for &left in left {
        if !meet_from(pool, u32::MAX - left) {
            return;
        }
        pool.run(|dev, _| f(dev)).unwrap();
    }
}

/// A mismatch in parts: what differs, and both members with their calls and places.
#[derive(Clone, Debug, PartialEq)]
pub struct Differs {
    pub what: &'static str,
    pub a: (usize, String, Site),
    pub b: (usize, String, Site),
    pub text: String,
}

/// A call that must be refused as one that does not match.
#[track_caller]
pub fn mismatch<R: std::fmt::Debug>(result: Result<R, Error>) -> Differs {
    let error = failure(result);
    let text = error.to_string();
    match error {
        Error::Mismatch { what, a, a_call, a_site, b, b_call, b_site } => {
            Differs { what, a: (a, a_call, a_site), b: (b, b_call, b_site), text }
        }
        other => panic!("no mismatch: {other}"),
    }
}

/// A call that must be refused before it meets anybody.
#[track_caller]
pub fn invalid<R: std::fmt::Debug>(result: Result<R, Error>) -> String {
    match failure(result) {
        Error::InvalidArgument { why, .. } => why,
        other => panic!("not an invalid argument: {other}"),
    }
}

/// Each kind once, with any operation, as prepared numbers.
pub fn one_of_each(seed: u64, n: usize) -> Vec<Prepared<f32>> {
    let mut rng = Rng(seed);
    let mut any = |kind| {
        let op = rng.pick(&OPS);
        Prepared::new(Case::any(&mut rng, kind, op, n), n)
    };
    kinds().map(&mut any).collect()
}
