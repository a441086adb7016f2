//! What a hostile program may try: wakers and drops that panic, ends that race with beginnings, floods of polls.

use crate::{Bomb, support::*};
use gpu_pool::{Device, Error, ReduceOp, Result, jobs::TrySubmitError};
use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::Duration,
};

/// Panics when it wakes.
struct BadWaker;

impl Wake for BadWaker {
    fn wake(self: Arc<Self>) {
        panic!("in a waker");
    }
}

/// Counts its clones that live.
pub struct Counted(pub Arc<AtomicUsize>);

impl Wake for Counted {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

pub fn poll<F: Future>(future: Pin<&mut F>, waker: &Waker) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(waker))
}

#[test]
fn a_waker_that_panics_harms_no_other_job() {
    guarded(|| {
        let pool = builder().host(1).build().unwrap();
        let jobs = pool.jobs().queue(1).build().unwrap();
        let (go, gone) = mpsc::channel::<()>();
        let mut first = jobs.submit(move |_| Ok(gone.recv().is_err())).unwrap();
        until("it runs", || first.place().is_some()).unwrap();
        let bomb = Waker::from(Arc::new(BadWaker));
        assert!(poll(Pin::new(&mut first), &bomb).is_pending());
        let second = jobs.submit(|_| Ok(2)).unwrap();
        let mut third = pin!(jobs.submit_async(|_| Ok(3)));
        assert!(poll(third.as_mut(), &bomb).is_pending());
        let mut fourth = pin!(jobs.submit_async(|_| Ok(4)));
        let woken = Arc::new(Counted(Arc::default()));
        assert!(poll(fourth.as_mut(), &Waker::from(woken.clone())).is_pending());
        drop(go);
        assert!(first.wait().unwrap());
        assert_eq!(second.wait().unwrap(), 2);
        until("the other future is woken", || woken.0.load(SeqCst) > 0).unwrap();
        let Poll::Ready(fourth) = poll(fourth, Waker::noop()) else { panic!("there is room") };
        assert_eq!(fourth.unwrap().wait().unwrap(), 4);
        jobs.close().unwrap();
    });
}

/// A future that is polled again and again, as by `select!`, leaves one waker in the queue.
#[test]
fn polls_of_a_full_queue_do_not_pile_up() {
    guarded(|| {
        let pool = builder().host(1).build().unwrap();
        let jobs = pool.jobs().queue(1).build().unwrap();
        let (go, gone) = mpsc::channel::<()>();
        let first = jobs.submit(move |_| Ok(gone.recv().is_err())).unwrap();
        until("it runs", || first.place().is_some()).unwrap();
        let second = jobs.submit(|_| Ok(())).unwrap();
        let counted = Arc::new(Counted(Arc::default()));
        let waker = Waker::from(counted.clone());
        let mut third = pin!(jobs.submit_async(|_| Ok(3)));
        for _ in 0..1000 {
            assert!(poll(third.as_mut(), &waker).is_pending());
        }
        assert!(Arc::strong_count(&counted) <= 3, "{} wakers", Arc::strong_count(&counted));
        // A close wakes it, too, though no job begins.
        jobs.clone().abort();
        until("it is woken", || counted.0.load(SeqCst) > 0).unwrap();
        assert!(matches!(poll(third, &waker), Poll::Ready(Err(Error::Closed))));
        drop(go);
        assert!(first.wait().is_err() && second.wait().is_err());
    });
}

/// Each rank of a gang has one result, also if another rank has failed before.
#[test]
fn a_gang_that_begins_again_has_one_result_a_rank() {
    guarded(|| {
        let pool = builder().host(2).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let left = AtomicUsize::new(2);
        let gang = jobs.job().retry(2).gpus(2).submit(move |dev, group| {
            // Rank 0 has ended well by then.
            if dev.rank() == 1 && left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
                thread::sleep(Duration::from_millis(5));
                return Err(Error::custom("not yet"));
            }
            Ok((dev.rank(), group.count()))
        });
        assert_eq!(gang.unwrap().wait().unwrap(), [(0, 2), (1, 2)]);
        assert_eq!(jobs.stats().retried, 2);
    });
}

/// All options of a job are there for gangs, and so are the other two ways into the queue.
#[test]
fn gangs_have_all_options() {
    guarded(|| {
        let pool = builder().host(3).memory_limit(64 << 20).build().unwrap();
        let jobs = pool.jobs().queue(1).build().unwrap();
        let sum = |dev: &Device, group: &gpu_pool::Group<'_>| {
            let mut x = dev.upload(&[1.0f32])?;
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok((dev.index(), dev.download(&x)?[0]))
        };
        let preferring = jobs.job().gpus(1).prefer(2).submit(sum).unwrap();
        assert_eq!(preferring.wait().unwrap(), [(2, 1.0)]);
        let preferring = jobs.job().gpus(2).prefer(2).memory(1 << 20).priority(1).submit(sum).unwrap();
        assert_eq!(preferring.wait().unwrap(), [(0, 2.0), (2, 2.0)]);
        let among = jobs.job().gpus(2).among(&[1, 2]).name("pair").submit(sum).unwrap();
        assert_eq!(among.wait().unwrap(), [(1, 2.0), (2, 2.0)]);
        // Of two devices there are not two on one device: refused with the numbers.
        let error = jobs.job().on(0).gpus(2).submit(sum).unwrap_err();
        assert!(error.to_string().contains("2 of 1 devices"), "{error}");
        let stuck = jobs.job().gpus(3).deadline(Duration::from_millis(20)).submit(|dev, group| {
            if dev.rank() == 0 {
                while !dev.cancelled() {
                    thread::yield_now();
                }
                return dev.check();
            }
            // It waits for rank 0, which never comes.
            group.all_reduce(&mut dev.upload(&[1.0f32])?, ReduceOp::Sum)
        });
        assert!(matches!(stuck.unwrap().wait(), Err(Error::Timeout { op: "job", .. })));

        let (go, gone) = mpsc::channel::<()>();
        let gone = std::sync::Mutex::new(gone);
        let blocker =
            jobs.job().gpus(3).submit(move |dev, _| Ok(dev.rank() > 0 || gone.lock().unwrap().recv().is_err()));
        let blocker = blocker.unwrap();
        until("it runs", || blocker.place().is_some()).unwrap();
        let queued = jobs.job().gpus(2).try_submit(sum).unwrap();
        let Err(TrySubmitError::Full(sum)) = jobs.job().gpus(2).try_submit(sum) else { panic!("it is full") };
        let mut later = pin!(jobs.job().gpus(2).submit_async(sum));
        assert!(poll(later.as_mut(), Waker::noop()).is_pending());
        drop(go);
        assert_eq!(blocker.wait().unwrap(), [true; 3]);
        assert_eq!(queued.wait().unwrap().len(), 2);
        let Poll::Ready(later) = poll(later, Waker::noop()) else { panic!("there is room") };
        assert_eq!(later.unwrap().wait().unwrap().len(), 2);
    });
}

/// A gang that is cancelled while it comes together runs on all of its devices or on none.
#[test]
fn an_abort_while_a_gang_comes_together() {
    guarded(|| {
        for _ in 0..cases(20, 200) {
            let pool = builder().host(2).build().unwrap();
            let jobs = pool.jobs().build().unwrap();
            let (ran, held) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(true)));
            thread::scope(|s| {
                let (hold, pool, (begin, begun)) = (held.clone(), &pool, mpsc::channel());
                let scope = s.spawn(move || {
                    pool.on(&[1]).run(|_, _| {
                        begin.send(()).unwrap();
                        while hold.load(SeqCst) {
                            thread::yield_now();
                        }
                        Ok(())
                    })
                });
                begun.recv().unwrap();
                let counted = ran.clone();
                let gang = jobs.job().gpus(2).submit(move |dev, group| {
                    counted.fetch_add(1 << (8 * dev.rank()), SeqCst);
                    group.all_reduce(&mut dev.upload(&[1.0f32])?, ReduceOp::Sum)
                });
                let gang = gang.unwrap();
                jobs.abort();
                held.store(false, SeqCst);
                assert!(matches!(gang.wait(), Err(Error::Cancelled { .. })));
                scope.join().unwrap().unwrap();
            });
            // All members or none: a closure may wait for its peers by means that no abort ends.
            assert!(matches!(ran.load(SeqCst), 0 | 0x101), "{:#x}", ran.load(SeqCst));
            jobs.close().unwrap();
            pool.run(|dev, _| dev.barrier()).unwrap();
        }
    });
}

/// Submissions that race with the close, and with cancellations of what they submit: each handle has an answer, and a
/// closure runs if and only if the answer is its value.
#[test]
fn a_close_and_cancellations_race_with_submissions() {
    guarded(|| {
        for round in 0..cases(30u64, 500) {
            let pool = builder().host(2).build().unwrap();
            let jobs = pool.jobs().queue(4).build().unwrap();
            thread::scope(|s| {
                let submitters: Vec<_> = (0..3)
                    .map(|_| {
                        let jobs = jobs.clone();
                        s.spawn(move || {
                            for i in 0..50u64 {
                                let ran = Arc::new(AtomicBool::new(false));
                                let runs = ran.clone();
                                let job = jobs.submit(move |_| {
                                    runs.store(true, SeqCst);
                                    Ok(i)
                                });
                                let Ok(job) = job else { return };
                                let never = i % 3 == 0 && job.cancel();
                                match job.wait() {
                                    Ok(x) => assert!(x == i && !never && ran.load(SeqCst)),
                                    Err(Error::Cancelled { .. } | Error::Closed) => {
                                        assert!(!never || !ran.load(SeqCst))
                                    }
                                    Err(error) => panic!("{error}"),
                                }
                            }
                        })
                    })
                    .collect();
                thread::sleep(Duration::from_micros(50 * (round % 8)));
                match round % 3 {
                    0 => jobs.close().unwrap(),
                    1 => jobs.abort(),
                    _ => drop(pool.close()),
                }
                submitters.into_iter().for_each(|submitter| submitter.join().unwrap());
            });
            let stats = jobs.stats();
            assert_eq!((stats.queued, stats.running), (0, 0), "{stats}");
        }
    });
}

/// Drops of a result that panics, wherever it comes: with the handle, or on the device's thread.
#[test]
fn drops_of_results_may_panic() {
    guarded(|| {
        let pool = builder().host(2).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        for i in 0..40 {
            let captured = Bomb;
            let job = jobs.submit(move |_| {
                let _kept = catch_unwind(AssertUnwindSafe(|| drop(captured)));
                Ok(Bomb)
            });
            if i % 2 == 0 {
                until("it is over", || job.as_ref().unwrap().is_finished()).unwrap();
            }
            drop(job);
        }
        // A closure that never runs is dropped by its cancellation.
        let (go, gone) = mpsc::channel::<()>();
        let gone = std::sync::Mutex::new(gone);
        let blocker =
            jobs.job().gpus(2).submit(move |dev, _| Ok(dev.rank() > 0 || gone.lock().unwrap().recv().is_err()));
        let captured = Bomb;
        let queued = jobs.submit(move |_| {
            drop(captured);
            Ok(())
        });
        let queued = queued.unwrap();
        assert!(queued.cancel());
        assert!(matches!(queued.wait(), Err(Error::Cancelled { .. })));
        drop(go);
        blocker.unwrap().wait().unwrap();
        jobs.close().unwrap();
    });
}

/// A queue is freed with its last clone, also if closures and results hold clones of it.
#[test]
fn a_queue_that_its_jobs_hold_is_freed() {
    guarded(|| {
        let pool = builder().host(1).build().unwrap();
        let token = Arc::new(());
        let kept = token.clone();
        let jobs = pool.jobs().on_progress(move |_| drop(kept.clone())).build().unwrap();
        let inner = jobs.clone();
        let job = jobs.submit(move |_| {
            let again = inner.clone();
            Ok((inner.submit(move |_| Ok(again.stats().queued))?, inner.clone()))
        });
        let (job, _jobs) = job.unwrap().wait().unwrap();
        assert_eq!(job.wait().unwrap(), 0);
        drop(jobs.submit(|_| Ok(())).unwrap());
        jobs.close().unwrap();
        drop((jobs, _jobs));
        pool.run(|_, _| Ok(())).unwrap();
        until("the queue is freed", || Arc::strong_count(&token) == 1).unwrap();
    });
}

/// The out-of-memory error of a job names the jobs beside it.
#[test]
fn a_job_that_runs_out_of_memory_says_who_has_booked() {
    guarded(|| {
        let pool = builder().host(1).memory_limit(32 << 20).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let job = jobs.job().name("fold 7").memory(20 << 20).submit(|dev| dev.zeros::<u8>(64 << 20).map(drop));
        let error = job.unwrap().wait().unwrap_err();
        let Error::OutOfMemory { report, .. } = &error else { panic!("{error}") };
        let [booked] = &report.jobs[..] else { panic!("{:?}", report.jobs) };
        assert_eq!((&booked.name[..], booked.bytes), ("fold 7", 20 << 20));
        assert!(error.to_string().contains("by fold 7 of tests/jobs/attacks.rs"), "{error}");
    });
}

/// A process that was forked has no device threads: its calls are refused, and its waits end.
#[cfg(target_os = "linux")]
#[test]
fn a_forked_process_is_told() {
    // In a process of its own: this one has threads whose locks the child would find held.
    if std::env::var("JOBS_FORK").is_err() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["attacks::a_forked_process_is_told", "--exact", "--test-threads=1"])
            .env("JOBS_FORK", "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    let pool = builder().host(1).build().unwrap();
    let jobs = pool.jobs().build().unwrap();
    let (go, gone) = mpsc::channel::<()>();
    let running = jobs.submit(move |_| Ok(gone.recv().is_err())).unwrap();
    until("it runs", || running.place().is_some()).unwrap();
    let ends = |result: &dyn Fn() -> bool| i32::from(!result());
    match fork() {
        0 => {
            let refused = matches!(jobs.submit(|_| Ok(())), Err(Error::Forked { .. }));
            let told = matches!(running.wait(), Err(Error::Forked { .. }));
            // SAFETY: ends the child without the parent's destructors.
            unsafe { libc::_exit(ends(&|| refused && told)) }
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for the child that was just made.
            unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!(status, 0);
        }
    }
    drop(go);
    assert!(running.wait().unwrap());
}

#[cfg(target_os = "linux")]
fn fork() -> i32 {
    // SAFETY: the child calls the library and `_exit` alone.
    unsafe { libc::fork() }
}

#[allow(dead_code, reason = "it must compile")]
fn handles_are_sent_and_shared(jobs: &gpu_pool::jobs::Jobs) -> Result<()> {
    fn sent<T: Send + 'static>(_: T) {}
    sent(jobs.submit(|_| Ok(()))?);
    sent(jobs.submit_async(|_| Ok(())));
    sent(jobs.job().gpus(2).submit_async(|_, _| Ok(())));
    Ok(())
}
