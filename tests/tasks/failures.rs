//! What fails, and what that ends.

use crate::{
    on_both,
    support::{Gpus, failure, guarded, slow_add, until},
};
use gpu_pool::{
    DeviceBuffer, Error, GpuPool, ReduceOp, Result,
    tasks::{TaskPanicked, Tasks},
};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{Explorer, FaultPlan};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

fn works(pool: &GpuPool) {
    let found = pool.run(|dev, _| {
        let mut x = dev.upload(&[1.0f32; 4])?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.download(&x)
    });
    assert_eq!(found.unwrap()[0], [pool.device_count() as f32; 4]);
    pool.tasks(|t| {
        let x = t.gpu(0).run((), |_, ()| Ok(1));
        assert_eq!(t.get(&x)?, 1);
        Ok(())
    })
    .unwrap();
}

/// Runs `f`, whose error is `text`, with a pool that works afterwards.
#[track_caller]
fn fails<'env>(gpus: Gpus, text: &str, f: impl FnOnce(&Tasks<'_, 'env>) -> Result<()>) -> Error {
    let pool = gpus.pool(2);
    let error = failure(pool.tasks(f));
    assert!(error.to_string().contains(text), "{error}");
    works(&pool);
    error
}

on_both! {
    /// MXNet's test_exc_imperative and test_exc_symbolic: what depends on a failed task fails with its error.
    2: fn a_failure_reaches_what_depends_on_it(gpus) {
        let pool = gpus.pool(2);
        let ran = AtomicUsize::new(0);
        pool.tasks(|t| {
            let bad = t.gpu(1).run((), |_, ()| Err::<i32, _>(Error::custom("no")));
            let next = t.cpu().run((&bad,), |(x,)| { ran.fetch_add(1, SeqCst); Ok(*x) });
            let last = t.gpu(0).run((&next,), |_, (x,)| { ran.fetch_add(1, SeqCst); Ok(*x) });
            // MXNet's test_exc_multiple_waits: each wait says why.
            for _ in 0..2 {
                assert_eq!(t.get(&last).unwrap_err().to_string(), "no");
            }
            // MXNet's test_exc_post_fail: others are not affected, before and after.
            let other = t.gpu(1).run((), |_, ()| Ok(5));
            assert_eq!(t.get(&other)?, 5);
            Ok(())
        }).unwrap();
        assert_eq!(ran.load(SeqCst), 0);
        works(&pool);
    }

    /// MXNet's test_exc_mutable_var_fail: a task that fails while it writes a value spoils it, also for writers.
    2: fn what_a_failed_task_has_written_is_spoilt(gpus) {
        let pool = gpus.pool(2);
        pool.tasks(|t| {
            let (mut x, y) = (t.cpu().run((), |()| Ok(1)), t.cpu().run((), |()| Ok(2)));
            let _ = t.gpu(0).run((&mut x, &y), |_, (x, _)| { *x = 7; Err::<(), _>(Error::custom("half way")) });
            let _ = t.gpu(1).run((&mut x,), |_, (x,)| { *x = 8; Ok(()) });
            assert_eq!(t.get(&x).unwrap_err().to_string(), "half way");
            assert_eq!(t.get(&y)?, 2);
            Ok(())
        }).unwrap();
    }

    /// A failure that nobody has asked for is not lost.
    2: fn a_failure_that_was_not_seen_is_the_result(gpus) {
        fails(gpus, "nobody asks", |t| {
            let _ = t.gpu(1).run((), |_, ()| Err::<(), _>(Error::custom("nobody asks")));
            Ok(())
        });
    }

    /// MXNet's test_multiple_waitalls, test_exc_gluon: `wait` reports a failure once.
    2: fn wait_reports_a_failure(gpus) {
        let pool = gpus.pool(2);
        pool.tasks(|t| {
            let _ = t.gpu(0).run((), |_, ()| Err::<(), _>(Error::custom("first")));
            assert_eq!(failure(t.wait()).to_string(), "first");
            t.wait()
        }).unwrap();
    }

    2: fn a_task_of_a_device_panics(gpus) {
        let error = fails(gpus, "tasks/failures.rs", |t| {
            let bad = t.gpu(1).run((), |_, ()| -> Result<i32> { panic!("on purpose") });
            t.get(&bad).map(drop)
        });
        let Error::Panicked { device, message, .. } = error else { panic!("{error:?}") };
        assert_eq!((device, &*message), (1, "on purpose"));
    }

    2: fn a_task_of_the_cpu_panics(gpus) {
        let error = fails(gpus, "tasks/failures.rs", |t| {
            let bad = t.cpu().run((), |()| -> Result<i32> { panic!("on {}", "purpose") });
            t.get(&bad).map(drop)
        });
        let Error::Custom(error) = error else { panic!("{error:?}") };
        assert_eq!(error.downcast_ref::<TaskPanicked>().unwrap().message, "on purpose");
    }

    /// The caller's panic passes through, after the tasks that run have ended.
    2: fn the_caller_panics(gpus) {
        let pool = gpus.pool(2);
        let ended = AtomicBool::new(false);
        let (inside, unwinds) = (AtomicBool::new(false), AtomicBool::new(false));
        struct Tell<'a>(&'a AtomicBool);
        impl Drop for Tell<'_> {
            fn drop(&mut self) {
                self.0.store(true, SeqCst);
            }
        }
        let panicked = catch_unwind(AssertUnwindSafe(|| pool.tasks(|t| -> Result<()> {
            let _ = t.gpu(0).run((), |_, ()| {
                inside.store(true, SeqCst);
                until("the caller unwinds", || unwinds.load(SeqCst))?;
                // A call that does not wait would return meanwhile.
                std::thread::sleep(Duration::from_millis(30));
                ended.store(true, SeqCst);
                Ok(())
            });
            until("the task runs", || inside.load(SeqCst))?;
            let _tell = Tell(&unwinds);
            panic!("the caller's own")
        })));
        assert_eq!(*panicked.unwrap_err().downcast::<&str>().unwrap(), "the caller's own");
        assert!(ended.load(SeqCst));
        works(&pool);
    }

    2: fn an_early_return_ends_what_has_not_started(gpus) {
        // Seconds of work, which the return cuts short.
        let ran = AtomicUsize::new(0);
        fails(gpus, "enough", |t| {
            let mut x = t.cpu().run((), |()| Ok(()));
            for _ in 0..2000 {
                let _ = t.cpu().run((&mut x,), |(_,)| {
                    std::thread::sleep(Duration::from_millis(5));
                    ran.fetch_add(1, SeqCst);
                    Ok(())
                });
            }
            Err(Error::custom("enough"))
        });
        assert!(ran.load(SeqCst) < 2000);
    }

    /// A device waits in a collective for a device whose task does not run, since it depends on a failed one.
    2: fn a_failure_ends_the_wait_of_another_device(gpus) {
        fails(gpus, "no input", |t| {
            let mut parts: Vec<_> = (0..2).map(|i| t.gpu(i).run((), move |dev, ()| match i {
                0 => dev.zeros::<f32>(8),
                _ => Err(Error::custom("no input")),
            })).collect();
            for (i, part) in parts.iter_mut().enumerate() {
                let _ = t.gpu(i).run((part,), |dev, (x,)| dev.all_reduce(x, ReduceOp::Sum));
            }
            t.get(&t.gpu(0).run((&parts[0],), |dev, (x,)| dev.download(x))).map(drop)
        });
    }

    /// A failure of the gang: everything ends, and the cause is the result.
    2: fn collectives_that_do_not_match_end_all(gpus) {
        let pool = gpus.pool(2);
        let error = failure(pool.tasks(|t| {
            let mut parts: Vec<_> = (0..2).map(|i| t.gpu(i).run((), move |dev, ()| dev.zeros::<f32>(8 + i))).collect();
            for (i, part) in parts.iter_mut().enumerate() {
                let _ = t.gpu(i).run((part,), |dev, (x,)| dev.all_reduce(x, ReduceOp::Sum));
            }
            Ok(())
        }));
        assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
        works(&pool);
    }
}

/// Each is a typed error that names the place of its use.
#[test]
fn bad_input() {
    #[track_caller]
    fn invalid<R: std::fmt::Debug>(result: Result<R>, why: &str, line: u32) {
        match failure(result) {
            Error::InvalidArgument { op: "get" | "take" | "run" | "gpu", why: found, site, .. } => {
                assert!(found.contains(why), "{found}");
                assert_eq!((site.line(), site.file().ends_with("failures.rs")), (line, true));
            }
            other => panic!("{other:?}"),
        }
    }
    guarded(|| {
        let pool = Gpus::software().pool(2);
        let mut foreign = pool.tasks(|t| Ok(t.cpu().run((), |()| Ok(1)))).unwrap();
        pool.tasks(|t| {
            invalid(t.get(&foreign), "another call", line!());
            invalid(t.take(&mut foreign), "another call", line!());
            let (used, line) = (t.gpu(1).run((&foreign,), |_, (x,)| Ok(*x)), line!());
            invalid(t.get(&used), "another call", line);

            let mut x = t.cpu().run((), |()| Ok(String::from("once")));
            let (taken, at) = (t.take(&mut x)?, line!());
            assert_eq!(taken, "once");
            invalid(t.get(&x), &format!("failures.rs:{at}"), line!());
            let (used, line) = (t.cpu().run((&x,), |(x,)| Ok(x.len())), line!());
            invalid(t.get(&used), &format!("failures.rs:{at}"), line);

            let (nowhere, line) = (t.gpu(2).run((), |_, ()| Ok(())), line!());
            invalid(t.get(&nowhere), "device 2 of 2", line);
            Ok(())
        })
        .unwrap();
        let nested = pool.run(|_, _| pool.tasks(|_| Ok(())));
        assert!(matches!(failure(nested), Error::NestedScope { .. }));
    });
}

/// The devices wait for the caller, not the caller for the devices: no deadline passes.
#[test]
fn a_slow_caller_and_a_slow_cpu() {
    guarded(|| {
        let limit = Duration::from_secs(1);
        let pool = Gpus::software().builder(2).timeout(limit).build().unwrap();
        let found = pool.tasks(|t| {
            std::thread::sleep(3 * limit);
            let x = t.gpu(0).run((), |dev, ()| dev.upload(&[1.0f32]));
            let y = t.cpu().run((), |()| {
                std::thread::sleep(3 * limit);
                Ok(2.0f32)
            });
            let sum = t.gpu(0).run((x, &y), |dev, (mut x, y)| {
                dev.scale(&mut x, *y)?;
                dev.download(&x)
            });
            t.get(&sum)
        });
        assert_eq!(found.unwrap(), [2.0]);
    });
}

/// A scope on the devices that wait for the caller would wait for ever.
#[test]
fn a_scope_of_the_same_pool() {
    guarded(|| {
        let pool = Gpus::software().pool(2);
        let refused = |result: Result<Vec<()>>| {
            let error = failure(result);
            assert!(matches!(error, Error::InvalidArgument { op: "run", .. }), "{error}");
        };
        pool.tasks(|t| {
            refused(pool.run(|_, _| Ok(())));
            let inner = t.cpu().run((), |()| {
                refused(pool.run(|_, _| Ok(())));
                Ok(())
            });
            t.get(&inner)?;
            // Another pool may be used.
            Gpus::software().pool(1).run(|_, _| Ok(())).map(drop)
        })
        .unwrap();
        works(&pool);
    });
}

/// A pool on the same GPUs would wait for them, too.
#[test]
fn a_scope_of_another_pool_on_these_gpus() {
    guarded(|| {
        let pool = Gpus::software().pool(2);
        let other = pool.survivors().unwrap();
        let refused = || {
            let error = failure(other.on(&[1]).run(|_, _| Ok(())));
            assert!(matches!(error, Error::InvalidArgument { op: "run", .. }), "{error}");
        };
        pool.tasks(|t| {
            refused();
            let inner = t.cpu().run((), |()| {
                refused();
                Ok(())
            });
            t.get(&inner)
        })
        .unwrap();
        works(&other);
    });
}

/// Errors of the call itself name its place.
#[test]
fn the_place_of_the_call() {
    guarded(|| {
        let (pool, threads) =
            (Gpus::software().pool(1), rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap());
        let at = |result: Result<()>, line: u32| match failure(result) {
            Error::InvalidArgument { site, .. } => {
                assert_eq!((site.line(), site.file().ends_with("failures.rs")), (line, true), "{site}");
            }
            other => panic!("{other:?}"),
        };
        pool.tasks(|_| {
            at(pool.tasks(|_| Ok(())), line!());
            at(pool.tasks_in(&threads, |_| Ok(())), line!());
            at(pool.run(|_, _| Ok(())).map(drop), line!());
            Ok(())
        })
        .unwrap();
    });
}

/// The caller has got a failure and goes on. It does not explain a later wait that has nothing to do with it.
#[test]
fn a_failure_that_was_reported_explains_nothing_later() {
    guarded(|| {
        let pool = Gpus::software().pool(2);
        let error = failure(pool.tasks(|t| {
            let bad = t.gpu(1).run((), |_, ()| Err::<(), _>(Error::custom("old")));
            assert_eq!(failure(t.get(&bad)).to_string(), "old");
            // The other device does not come.
            let alone = t.gpu(0).run((), |dev, ()| dev.barrier());
            t.get(&alone)
        }));
        assert!(matches!(error, Error::Deadlock { device: 0, .. }), "{error:?}");
        works(&pool);
    });
}

/// A task's own error, although the end of its work cannot be recorded either.
#[test]
fn an_error_is_not_replaced_by_a_later_one() {
    guarded(|| {
        let plan = "0:record:*:error".parse::<FaultPlan>().unwrap().paused();
        let pool = Gpus::software().builder(2).faults(plan.clone()).build().unwrap();
        for panics in [false, true] {
            let found = Mutex::new(String::new());
            let _ = pool.tasks(|t| {
                let x = t.gpu(0).run((), |dev, ()| dev.zeros::<u32>(8));
                let bad = t.gpu(0).run((x,), |dev, (mut x,): (DeviceBuffer<u32>,)| -> Result<()> {
                    plan.resume();
                    slow_add(dev, &mut x, 1, 0)?;
                    if panics { panic!("its own") } else { Err(Error::custom("its own")) }
                });
                *found.lock().unwrap() = failure(t.get(&bad)).to_string();
                plan.pause();
                Ok(())
            });
            assert!(found.lock().unwrap().contains("its own"), "{found:?}");
        }
        assert!(!plan.fired().is_empty());
    });
}

/// Another scope has the devices, and makes no progress.
#[test]
fn devices_that_are_busy() {
    guarded(|| {
        let pool = Gpus::software().builder(2).timeout(Duration::from_millis(200)).build().unwrap();
        let (inside, over) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|s| {
            s.spawn(|| {
                pool.run(|_, _| {
                    inside.store(true, SeqCst);
                    until("the other scope has given up", || over.load(SeqCst))
                })
            });
            until("the scope runs", || inside.load(SeqCst)).unwrap();
            let error = failure(pool.tasks(|t| {
                let x = t.gpu(0).run((), |_, ()| Ok(1));
                t.get(&x)
            }));
            over.store(true, SeqCst);
            assert!(matches!(error, Error::Timeout { op: "waiting for its turn", .. }), "{error}");
        });
        works(&pool);
    });
}

/// A lost device fails its own tasks and the call; tasks of the other device that need nothing of it have run.
#[test]
fn a_lost_device() {
    guarded(|| {
        let plan = "1:launch:2:lost".parse::<FaultPlan>().unwrap().paused();
        let pool = Gpus::software().builder(2).faults(plan.clone()).build().unwrap();
        plan.resume();
        let other = AtomicBool::new(false);
        let error = failure(pool.tasks(|t| {
            let mut x = t.gpu(1).run((), |dev, ()| dev.upload(&[1.0f32; 8]));
            for _ in 0..3 {
                let _ = t.gpu(1).run((&mut x,), |dev, (x,)| dev.scale(x, 2.0));
            }
            let _ = t.gpu(0).run((), |_, ()| {
                other.store(true, SeqCst);
                Ok(())
            });
            Ok(())
        }));
        assert!(matches!(error, Error::DeviceLost { device: 1, .. }), "{error:?}");
        assert!(other.load(SeqCst));
    });
}

/// A failing task in every interleaving: the same error, and no device hangs.
#[test]
fn failures_in_many_interleavings() {
    guarded(|| {
        let run = Explorer::new().devices(2).seeds(crate::support::cases(5, 100)).run(|pool| {
            let result = pool.tasks(|t| {
                let x = t.gpu(0).run((), |dev, ()| dev.upload(&[1.0f32; 64]));
                let y = t.gpu(1).copy(&x);
                let bad = t.gpu(1).run((&y,), |_, (_,)| Err::<(), _>(Error::custom("no")));
                let host = t.gpu(0).download(&x);
                let sum = t.cpu().run((&host, &bad), |(host, ())| Ok(host.as_slice()?[0]));
                t.get(&sum)
            });
            assert_eq!(failure(result).to_string(), "no");
            pool.run(|dev, _| dev.zeros::<f32>(1)).map(drop)
        });
        run.unwrap_or_else(|failure| panic!("{failure}"));
    });
}
