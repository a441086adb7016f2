//! What fails, fails alone: panics, errors, lost devices, faults of the driver.

use crate::{Bomb, support::*};
use gpu_pool::{
    Device, Error, GpuPool, LaunchDims, Module, Result,
    jobs::{JobHandle, Jobs},
    kernel,
};
use gpu_pool_lab::{FaultPlan, FaultRule, Injected, prelude::*};
use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Barrier, Mutex},
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

/// Sums on the device, so that a job has some calls of each kind.
fn sum(dev: &Device, i: u32) -> Result<Vec<f32>> {
    let x = dev.upload(&[i as f32, 1.0])?;
    dev.download(&dev.sum(&x)?)
}

/// All handles answer. Returns the answers.
#[track_caller]
fn all_answer<T: Send>(handles: Vec<JobHandle<T>>) -> Vec<Result<T>> {
    let until = Instant::now() + TIMEOUT / 4;
    let wait = |mut handle: JobHandle<T>| {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        handle.wait_timeout(left).unwrap_or_else(|| panic!("{handle:?} does not answer"))
    };
    handles.into_iter().map(wait).collect()
}

fn works(jobs: &Jobs) {
    assert_eq!(jobs.submit(|dev| sum(dev, 4)).unwrap().wait().unwrap(), [5.0]);
}

crate::on_both! {
    /// lambda_vm #928: a panic while memory is short left the others waiting for ever, in some fifteen ways.
    4: fn a_panic_under_memory_pressure_ends_nobody_else(gpus) {
        let pool = gpus.builder(4).memory_limit(32 << 20).build().unwrap();
        let jobs = pool.jobs().overlap(2).build().unwrap();
        let handles: Vec<_> = (0..40u32)
            .map(|i| {
                let job = jobs.job().memory(20 << 20);
                let f = move |dev: &Device| {
                    let kept = dev.zeros::<u8>(15 << 20)?;
                    match i % 5 {
                        1 => panic!("under pressure"),
                        2 => drop(dev.zeros::<u8>(64 << 20)?),
                        _ => {}
                    }
                    drop(kept);
                    sum(dev, i)
                };
                job.submit(f).unwrap()
            })
            .collect();
        for (i, answer) in all_answer(handles).into_iter().enumerate() {
            match (i % 5, answer) {
                (1, Err(Error::Panicked { .. })) => {}
                (2, Err(Error::OutOfMemory { requested, report, .. })) => {
                    assert_eq!(requested, 64 << 20);
                    // It names who holds what.
                    assert!(report.to_string().contains("failures.rs"), "{report}");
                }
                (0 | 3 | 4, Ok(x)) => assert_eq!(x, [i as f32 + 1.0]),
                (_, answer) => panic!("job {i}: {answer:?}"),
            }
        }
        works(&jobs);
        assert!(jobs.stats().devices.iter().all(|device| device.booked == 0 && device.running == 0));
    }

    /// rust-fil-proofs #1478: after a panic every later proof failed with a poisoned lock. Also panics of drops.
    2: fn no_lock_of_the_queue_is_poisoned(gpus) {
        let pool = gpus.builder(2).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let handles: Vec<JobHandle<Option<Bomb>>> = (0..30)
            .map(|i| {
                let captured = (i % 3 == 1).then(|| Bomb);
                let f = move |_: &Device| match i % 3 {
                    0 => panic!("in a closure"),
                    1 => Err(Error::custom("the captured value is dropped")).inspect(|_: &Option<Bomb>| drop(captured)),
                    _ => Ok(Some(Bomb)),
                };
                jobs.submit(f).unwrap()
            })
            .collect();
        for (i, handle) in handles.into_iter().enumerate() {
            if i % 3 == 2 {
                // The result is dropped here, or on the device's thread if it comes later.
                let _ = catch_unwind(AssertUnwindSafe(|| drop(handle)));
            } else {
                handle.wait().unwrap_err();
            }
        }
        works(&jobs);
        jobs.close().unwrap();
        pool.run(|dev, _| dev.barrier()).unwrap();
    }

    /// A cancellation, and a deadline, that come while the closure fails are not lost: it does not begin again. A
    /// closed queue lets it begin again, since `close` waits for all.
    1: fn what_fails_after_a_cancellation_does_not_begin_again(gpus) {
        let pool = gpus.builder(1).build().unwrap();
        for by_deadline in [false, true] {
            let jobs = pool.jobs().build().unwrap();
            let (go, gone) = std::sync::mpsc::channel::<()>();
            let gone = Mutex::new(gone);
            let job = jobs.job().deadline(Duration::from_secs(if by_deadline { 1 } else { 600 })).retry(1000);
            let fails = job.submit(move |dev| -> Result<()> {
                let _ = gone.lock().unwrap().recv();
                until("the deadline has passed", || !by_deadline || dev.cancelled())?;
                Err(Error::custom("its own error"))
            });
            let fails = fails.unwrap();
            until("it runs", || fails.place().is_some()).unwrap();
            if !by_deadline {
                assert!(!fails.cancel());
            }
            drop(go);
            fails.wait().unwrap_err();
            assert_eq!(jobs.stats().retried, 0);
        }
        let jobs = pool.jobs().build().unwrap();
        let mut left = 3;
        let again = jobs.job().retry(3).submit(move |_| {
            thread::sleep(Duration::from_millis(20));
            left -= 1;
            if left > 0 { Err(Error::custom("not yet")) } else { Ok(()) }
        });
        jobs.close().unwrap();
        again.unwrap().wait().unwrap();
    }

    /// ceno #1403: what a device has made stays with it; results come back in order though jobs end out of order; the
    /// first failure is seen, and the jobs behind it nevertheless end.
    2: fn state_stays_on_its_device_and_results_are_in_order(gpus) {
        let pool = gpus.builder(2).build().unwrap();
        let threads: Arc<Mutex<HashMap<usize, ThreadId>>> = Arc::default();
        let made = threads.clone();
        let jobs = pool.jobs_with(move |dev| {
            let before = made.lock().unwrap().insert(dev.index(), thread::current().id());
            assert!(before.is_none(), "made once");
            Ok((dev.index(), thread::current().id(), dev.upload(&[0u32])?))
        });
        let jobs = jobs.build().unwrap();
        let proofs = jobs.map(0..40u32, |dev, (owner, thread, kept), i| {
            assert_eq!((*owner, *thread), (dev.index(), thread::current().id()));
            thread::sleep(Duration::from_millis(u64::from((i * 7) % 5)));
            *kept = dev.upload(&[i])?;
            Ok((i, dev.download(&*kept)?))
        });
        let found: Result<Vec<_>> = proofs.collect();
        assert_eq!(found.unwrap(), (0..40).map(|i| (i, vec![i])).collect::<Vec<_>>());
        assert_eq!(threads.lock().unwrap().len(), 2);
        let fails = |i| if i % 4 == 3 { Err(Error::custom(format!("shard {i}"))) } else { Ok(i) };
        let results: Vec<Result<u32>> = Jobs::map(&jobs, 0..12u32, move |_, i| fails(i)).collect();
        let first = results.iter().position(Result::is_err);
        assert_eq!((first, results.iter().filter(|result| result.is_ok()).count()), (Some(3), 9));
    }
}

/// A pool whose device `lost` is lost as soon as the plan is resumed and it is used.
pub fn losing(devices: usize, lost: usize) -> (GpuPool, FaultPlan) {
    let plan = FaultPlan::new().on(FaultRule::new(Injected::LaunchFailed).device(lost).from(1)).paused();
    (builder().host(devices).faults(plan.clone()).build().unwrap(), plan)
}

/// xmr-stak #2054: one of eleven devices dies. It is named, and what had not begun goes to the others within a second.
#[test]
fn one_of_eleven_devices_dies() {
    guarded(|| {
        let (pool, plan) = losing(11, 7);
        let jobs = pool.jobs().queue(200).build().unwrap();
        let die = plan.clone();
        let killer = jobs.job().on(7).submit(move |dev| {
            die.resume();
            sum(dev, 0)
        });
        let handles: Vec<_> = (0..100u32)
            .map(|i| {
                let f = move |dev: &Device| {
                    thread::sleep(Duration::from_millis(1));
                    sum(dev, i)
                };
                jobs.submit(f).unwrap()
            })
            .collect();
        let pinned: Vec<_> = (0..3).map(|i| jobs.job().on(7).submit(move |dev| sum(dev, i))).collect();
        let error = killer.unwrap().wait().unwrap_err();
        assert!(matches!(error, Error::DeviceLost { device: 7, .. }), "{error}");
        let answers = all_answer(handles);
        // What was in flight on it when it died.
        let lost = answers.iter().filter(|answer| matches!(answer, Err(Error::DeviceLost { device: 7, .. }))).count();
        let done = answers.iter().filter(|answer| answer.is_ok()).count();
        assert!(lost <= 1 && lost + done == 100, "{lost} of {answers:?}");
        for pinned in pinned {
            // Either it was in the queue, or it came too late.
            let error = pinned.and_then(JobHandle::wait).unwrap_err();
            assert!(matches!(error, Error::DeviceLost { device: 7, .. } | Error::InvalidArgument { .. }), "{error}");
        }
        let stats = jobs.stats();
        assert_eq!(stats.devices.iter().filter(|device| device.lost).count(), 1);
        assert!(stats.devices[7].lost && stats.to_string().contains("LOST"), "{stats}");
        works(&jobs);
        // Gangs of all devices are refused now, smaller ones are not.
        assert!(jobs.job().gpus(11).submit(|_, _| Ok(())).is_err());
        assert_eq!(jobs.job().gpus(10).submit(|dev, _| Ok(dev.index())).unwrap().wait().unwrap().len(), 10);
    });
}

#[test]
fn without_a_device_every_handle_ends() {
    guarded(|| {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::DeviceLost).from(1)).paused();
        let pool = builder().host(2).faults(plan.clone()).build().unwrap();
        let jobs = pool.jobs().queue(100).build().unwrap();
        works(&jobs);
        plan.resume();
        let handles: Vec<_> = (0..50).map_while(|i| jobs.submit(move |dev| sum(dev, i)).ok()).collect();
        for answer in all_answer(handles) {
            assert!(matches!(answer, Err(Error::DeviceLost { .. })), "{answer:?}");
        }
        assert!(matches!(jobs.submit(|_| Ok(())), Err(Error::DeviceLost { .. })));
    });
}

#[test]
fn who_asks_for_it_begins_again_elsewhere() {
    guarded(|| {
        let (pool, plan) = losing(2, 1);
        let jobs = pool.jobs().build().unwrap();
        let again = jobs.job().prefer(1).retry(1).submit(move |dev| {
            plan.resume();
            Ok((dev.index(), sum(dev, 1)?))
        });
        assert_eq!(again.unwrap().wait().unwrap(), (0, vec![2.0]));
        assert_eq!(jobs.stats().retried, 1);
        // Cancellation is no failure to repeat.
        let cancelled = jobs.job().retry(100).submit(|dev| {
            while !dev.cancelled() {
                thread::yield_now();
            }
            dev.check()
        });
        let cancelled = cancelled.unwrap();
        until("it runs", || cancelled.place().is_some()).unwrap();
        cancelled.cancel();
        assert!(matches!(cancelled.wait(), Err(Error::Cancelled { .. })));
    });
}

/// A gang that has devices, but has not begun when one of them is lost, goes to others.
#[test]
fn a_gang_that_waits_goes_to_other_devices() {
    guarded(|| {
        let (pool, plan) = losing(3, 1);
        let jobs = pool.jobs().build().unwrap();
        let (begun, go) = (Barrier::new(2), Barrier::new(2));
        thread::scope(|s| {
            let scope = s.spawn(|| {
                pool.on(&[0, 1]).run(|dev, _| {
                    if dev.index() == 0 {
                        // Else the gang could begin here before the loss.
                        until("device 1 is lost", || dev.check().is_err())?;
                        return dev.check();
                    }
                    begun.wait();
                    go.wait();
                    plan.resume();
                    sum(dev, 1).map(drop)
                })
            });
            begun.wait();
            // To the queue of jobs all devices are idle: it takes the first two, behind the scope.
            let gang = jobs.job().gpus(2).submit(|dev, group| {
                group.barrier()?;
                Ok(dev.index())
            });
            let all = jobs.job().gpus(3).submit(|dev, _| Ok(dev.index())).unwrap();
            go.wait();
            assert!(matches!(scope.join().unwrap(), Err(Error::DeviceLost { device: 1, .. })));
            assert_eq!(gang.unwrap().wait().unwrap(), [0, 2]);
            let error = all.wait().unwrap_err();
            assert!(matches!(error, Error::DeviceLost { device: 1, .. }), "{error}");
        });
        let stats = jobs.stats();
        assert!(stats.moved == 1 && stats.devices[1].lost && stats.running == 0, "{stats}");
        works(&jobs);
    });
}

/// Each call of a job fails once, in a job alone, in overlapped ones and in a gang: every handle answers, and the queue
/// goes on.
#[test]
fn every_call_of_a_job_may_fail() {
    guarded(|| {
        let mut last = 0;
        for nth in 1..cases(40, 400) {
            let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).device(0).nth(nth)).paused();
            let pool = builder().host(2).faults(plan.clone()).build().unwrap();
            let jobs = pool.jobs().build().unwrap();
            plan.resume();
            let singles: Vec<_> = (0..4).map(|i| jobs.job().on(0).submit(move |dev| sum(dev, i)).unwrap()).collect();
            let gang = jobs.job().gpus(2).submit(|dev, group| {
                let mut x = dev.upload(&[1.0f32])?;
                group.all_reduce(&mut x, gpu_pool::ReduceOp::Sum)?;
                dev.download(&x)
            });
            let mut failed = 0;
            for (i, answer) in all_answer(singles).into_iter().enumerate() {
                match answer {
                    Ok(x) => assert_eq!(x, [i as f32 + 1.0]),
                    Err(error) => {
                        assert!(matches!(error, Error::Driver { device: 0, .. }), "{nth}: {error}");
                        failed += 1;
                    }
                }
            }
            match all_answer(vec![gang.unwrap()]).remove(0) {
                Ok(x) => assert_eq!(x, [[2.0], [2.0]]),
                Err(_) => failed += 1,
            }
            plan.pause();
            assert!(failed <= 1, "{nth}: {failed} jobs failed of one fault");
            works(&jobs);
            if plan.fired().is_empty() {
                break;
            }
            last = nth;
        }
        assert!(last > 20, "{last} calls");
    });
}

static TRAPS: Module = Module::ptx(
    ".version 7.5
.target sm_75
.address_size 64
.visible .entry trap(.param .u64 x) {
    trap;
    ret;
}",
);

kernel! {
    /// Ends the GPU's context.
    static TRAP: "trap" in TRAPS, fn(_x: &mut [u32]) |_dims| {}
}

/// A kernel faults, with 100 jobs queued: every handle answers within a second. CUDA ends all contexts of the process
/// then, those of other GPUs, too (a program of CuPy alone sees that on two H200s). Where another GPU lives on, it
/// takes what had not begun. In a process of its own, since no GPU can be used in that one any more.
#[test]
fn cuda_a_kernel_faults_under_a_hundred_jobs() {
    // Not `on_cuda`: devices that share a GPU die together everywhere.
    if cuda_devices() < 2 {
        return println!("skipped: no CUDA device to lose beside another one");
    }
    if task().is_none() {
        return in_a_process("failures::cuda_a_kernel_faults_under_a_hundred_jobs", "trap");
    }
    guarded(|| {
        let pool = builder().cuda().devices(&[0, 1]).module(&TRAPS).build().unwrap();
        let jobs = pool.jobs().queue(200).build().unwrap();
        for i in [0, 1] {
            jobs.job().on(i).submit(|dev| sum(dev, 0)).unwrap().wait().unwrap();
        }
        let killer = jobs.job().on(1).submit(|dev| {
            let mut x = dev.zeros::<u32>(1)?;
            // SAFETY: the kernel touches nothing.
            unsafe { dev.launch(&TRAP, LaunchDims::cover(1), (&mut x,)) }?;
            dev.download(&x)
        });
        let work = |i: u32| {
            move |dev: &Device| {
                thread::sleep(Duration::from_millis(1));
                sum(dev, i)
            }
        };
        // After the loss of all devices none is taken.
        let handles: Vec<_> = (0..100).map_while(|i| jobs.submit(work(i)).ok()).collect();
        let error = killer.unwrap().wait().unwrap_err();
        assert!(matches!(error, Error::DeviceLost { device: 1, .. }), "{error}");
        let answers = all_answer(handles);
        let is_lost = |answer: &&Result<Vec<f32>>| matches!(answer, Err(Error::DeviceLost { .. }));
        let (lost, done) = (answers.iter().filter(is_lost).count(), answers.iter().filter(|x| x.is_ok()).count());
        let stats = jobs.stats();
        println!("{done} done, {lost} lost\n{stats}");
        assert!(lost + done == answers.len() && stats.devices[1].lost, "{answers:?}");
        if stats.devices[0].lost {
            assert!(matches!(jobs.submit(|_| Ok(())), Err(Error::DeviceLost { .. })));
        } else {
            // With `overlap(1)` two had begun on it.
            assert!(lost <= 2 && answers.len() == 100, "{lost} of {answers:?}");
            works(&jobs);
        }
    });
}
