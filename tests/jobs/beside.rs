//! Jobs and scopes beside each other: bounds, interleavings, and hours of both.

use crate::support::*;
use gpu_pool::{
    Device, Error, GpuPool, ReduceOp, Result,
    jobs::{JobHandle, Jobs},
};
use gpu_pool_lab::{Explorer, FaultPlan, FaultRule, Injected, prelude::*};
use std::{
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

/// Lets the other threads of a test end, also when an assertion fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// The test's thread may be off its core between its first look and its entry, so one number may be larger.
fn mostly_within(mut overtaken: Vec<usize>, most: usize) {
    overtaken.sort_unstable();
    assert!(overtaken[overtaken.len() / 2] <= most, "{overtaken:?}");
}

/// The bound in the docs of [`Jobs`]: a scope waits for the job that has begun; here one more may begin before the
/// scope's entry is there.
#[test]
fn a_scope_comes_between_jobs() {
    guarded(|| {
        let pool = builder().host(2).build().unwrap();
        let jobs = pool.jobs().queue(16).build().unwrap();
        let begun: Arc<[AtomicUsize; 2]> = Arc::default();
        let over = AtomicBool::new(false);
        thread::scope(|s| {
            s.spawn(|| {
                while !over.load(SeqCst) {
                    let begun = begun.clone();
                    let job = jobs.submit(move |dev| {
                        begun[dev.index()].fetch_add(1, SeqCst);
                        thread::sleep(Duration::from_micros(200));
                        Ok(())
                    });
                    drop(job.unwrap());
                }
            });
            let _over = Over(&over);
            until("jobs run", || begun.iter().all(|begun| begun.load(SeqCst) > 5)).unwrap();
            let mut overtaken = Vec::new();
            for _ in 0..cases(30, 300) {
                let before = [0, 1].map(|device| begun[device].load(SeqCst));
                let seen = pool.run(|dev, _| Ok(begun[dev.index()].load(SeqCst))).unwrap();
                overtaken.extend(before.into_iter().zip(seen).map(|(before, seen)| seen - before));
            }
            mostly_within(overtaken, 2);
        });
        jobs.close().unwrap();
    });
}

/// And a job does not wait for scopes that come later, but for those that two other threads may already have entered.
#[test]
fn a_job_comes_between_scopes() {
    guarded(|| {
        let pool = builder().host(2).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let (scopes, over) = (Arc::new(AtomicUsize::new(0)), AtomicBool::new(false));
        thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    while !over.load(SeqCst) {
                        pool.run(|dev, _| {
                            if dev.index() == 0 {
                                scopes.fetch_add(1, SeqCst);
                            }
                            thread::sleep(Duration::from_micros(200));
                            Ok(())
                        })
                        .unwrap();
                    }
                });
            }
            let _over = Over(&over);
            let mut overtaken = Vec::new();
            for _ in 0..cases(30, 300) {
                let (before, counted) = (scopes.load(SeqCst), scopes.clone());
                let job = jobs.job().on(0).submit(move |_| Ok(counted.load(SeqCst)));
                let seen = job.unwrap().wait().unwrap();
                overtaken.push(seen - before);
            }
            mostly_within(overtaken, 4);
        });
    });
}

fn sum(dev: &Device, i: u32) -> Result<f32> {
    let x = dev.upload(&[i as f32, 1.0])?;
    Ok(dev.download(&dev.sum(&x)?)?[0])
}

/// Any interleaving of the devices' operations, with the race checker.
#[test]
fn interleavings() {
    guarded(|| {
        let explorer = Explorer::new().devices(3).seeds(cases(20, 100));
        let explored = explorer.run(|pool| {
            let jobs = pool.jobs().overlap(2).build()?;
            let x = pool.run(|dev, _| dev.upload(&[dev.index() as f32]))?;
            let x = Arc::new(x);
            let singles: Vec<_> = (0..6).map(|i| jobs.submit(move |dev| sum(dev, i))).collect::<Result<_>>()?;
            let shared = x.clone();
            let gang = jobs.job().gpus(2).submit(move |dev, group| {
                let mut own = shared[dev.index()].copy_to(dev)?;
                group.all_reduce(&mut own, ReduceOp::Max)?;
                Ok(dev.download(&own)?[0])
            });
            let gang = gang?;
            let total = pool.run(|dev, _| {
                let mut own = x[dev.index()].copy_to(dev)?;
                dev.all_reduce(&mut own, ReduceOp::Sum)?;
                dev.download(&own)
            })?;
            assert_eq!(total, [[3.0]; 3]);
            for (i, single) in singles.into_iter().enumerate() {
                assert_eq!(single.wait()?, i as f32 + 1.0);
            }
            let largest = gang.wait()?;
            assert!(largest[0] == largest[1] && largest[0] >= 1.0);
            jobs.close()
        });
        explored.unwrap();
    });
}

/// A number below `n`, from a small generator: tests need no better one.
fn random(state: &mut u64, n: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % n
}

/// The process's resident memory in bytes, where the system tells.
fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(text.split(' ').nth(1)?.parse::<u64>().ok()? * 4096)
}

fn random_job(jobs: &Jobs, state: &mut u64) -> Result<JobHandle<f32>> {
    let i = random(state, 1000) as u32;
    let kind = random(state, 20);
    let mut job = jobs.job().memory(random(state, 4) << 18).priority(random(state, 3) as i32);
    if kind == 1 {
        job = job.deadline(Duration::from_micros(random(state, 2000)));
    }
    if kind == 2 {
        job = job.prefer(random(state, 3) as usize);
    }
    job.submit(move |dev| match kind {
        3 => panic!("at random"),
        4 => Err(Error::custom("at random")),
        5 => {
            dev.zeros::<u8>(1 << 30)?;
            Ok(-1.0)
        }
        6 => {
            let until = Instant::now() + Duration::from_millis(2);
            while !dev.cancelled() && Instant::now() < until {
                thread::yield_now();
            }
            sum(dev, i)
        }
        _ => sum(dev, i),
    })
}

/// How long `soak` runs: `GPU_POOL_SOAK` has seconds.
fn soaking() -> Duration {
    match std::env::var("GPU_POOL_SOAK").map(|seconds| seconds.parse()) {
        Ok(seconds) => Duration::from_secs(seconds.expect("GPU_POOL_SOAK is a number of seconds")),
        Err(_) => cases(Duration::from_secs(2), Duration::from_secs(60)),
    }
}

/// Random jobs, gangs, cancellations, panics, lost devices, and scopes beside: no hang, nothing lost, memory flat. Four
/// hours of it: `GPU_POOL_SOAK=14400 cargo test --test jobs soak -- --nocapture`.
#[test]
fn soak() {
    // Alone in its process: other tests take memory, too.
    if task().is_none() {
        printed(again(&["beside::soak"], "soak").stderr(Stdio::inherit()), 1);
        return;
    }
    guarded_for(soaking() + TIMEOUT, || {
        let end = Instant::now() + soaking();
        let (mut round, mut first, mut told) = (0u64, None, Instant::now());
        while Instant::now() < end || round < 7 {
            round += 1;
            let loses = round.is_multiple_of(3);
            let plan = FaultPlan::new().on(FaultRule::new(Injected::DeviceLost).device(2).from(40)).paused();
            let pool = builder().host(3).memory_limit(32 << 20).faults(plan.clone()).build().unwrap();
            if loses {
                plan.resume();
            }
            let jobs = pool.jobs().queue(8).overlap(round as usize % 4).build().unwrap();
            let answered: usize = thread::scope(|s| {
                let submitters: Vec<_> = (0..3)
                    .map(|thread| {
                        let (jobs, mut state) = (jobs.clone(), round * 100 + thread);
                        s.spawn(move || {
                            let mut answered = 0;
                            for _ in 0..60 {
                                let Ok(job) = random_job(&jobs, &mut state) else { continue };
                                match random(&mut state, 6) {
                                    0 => drop(job),
                                    1 => {
                                        job.cancel();
                                        let _ = job.wait();
                                    }
                                    _ => answered += usize::from(job.wait().is_ok()),
                                }
                                if random(&mut state, 10) == 0 {
                                    let gang = jobs.job().gpus(2).submit(|dev, _| dev.barrier());
                                    let _ = gang.and_then(JobHandle::wait);
                                }
                            }
                            answered
                        })
                    })
                    .collect();
                for _ in 0..20 {
                    let scope = pool.run(|dev, _| dev.barrier());
                    assert!(loses || scope.is_ok(), "{scope:?}");
                }
                submitters.into_iter().map(|submitter| submitter.join().unwrap()).sum()
            });
            assert!(answered > 0);
            jobs.close().unwrap();
            let stats = jobs.stats();
            assert_eq!((stats.queued, stats.running), (0, 0), "{stats}");
            assert!(stats.devices.iter().all(|device| device.booked == 0 && device.running == 0), "{stats}");
            drop(jobs);
            if !loses {
                assert!(pool.memory_stats().iter().all(|stats| stats.in_use == 0), "{:?}", pool.memory_stats());
            }
            pool.close().unwrap();
            // After some rounds all that grows once has grown.
            if round == 6 {
                first = resident();
            }
            if told.elapsed() > Duration::from_secs(60) {
                eprintln!("round {round}, {} MiB; {stats}", resident().unwrap_or(0) >> 20);
                told = Instant::now();
            }
        }
        if let (Some(first), Some(last)) = (first, resident()) {
            assert!(last < first + (64 << 20), "resident memory has grown from {first} to {last} in {round} rounds");
        }
    });
}

#[test]
fn jobs_of_two_pools_share_a_gpu() {
    guarded(|| {
        let first = builder().host(1).build().unwrap();
        let second = GpuPool::builder().host(1).build().unwrap();
        let (a, b) = (first.jobs().build().unwrap(), second.jobs().build().unwrap());
        let handles: Vec<_> =
            (0..100).map(|i| [&a, &b].map(|jobs| jobs.submit(move |dev| sum(dev, i)).unwrap())).collect();
        for (i, handles) in handles.into_iter().enumerate() {
            assert_eq!(handles.map(|handle| handle.wait().unwrap()), [i as f32 + 1.0; 2]);
        }
    });
}
