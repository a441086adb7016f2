//! Waits for jobs end: with an answer, or with an error after the pool's deadline. Nothing is woken too late.

use crate::{
    attacks::{Counted, poll},
    basics::blocker,
    failures::losing,
    support::*,
};
use gpu_pool::{
    Error,
    jobs::{Jobs, TrySubmitError, Waits},
};
use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    task::{Poll, Waker},
    thread,
    time::Duration,
};

const LATE: Duration = Duration::from_secs(1);

/// The scope waits for the jobs of its jobs, too, and holds nothing while it waits.
#[test]
fn a_job_gives_out_jobs_of_its_own_scope() {
    guarded(|| {
        let pool = builder().host(2).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let count = AtomicUsize::new(0);
        jobs.scope(|scope| {
            for _ in 0..2 {
                drop(scope.submit(|_| {
                    thread::sleep(Duration::from_millis(50));
                    for _ in 0..3 {
                        drop(scope.submit(|_| {
                            thread::sleep(Duration::from_millis(5));
                            count.fetch_add(1, SeqCst);
                            Ok(())
                        }));
                    }
                    Ok(())
                }));
            }
        })
        .unwrap();
        assert_eq!(count.load(SeqCst), 6);
    });
}

/// Tasks have all devices, so no job begins before they are over. Waits for one end with the pool's deadline.
#[cfg(feature = "tasks")]
#[test]
fn waits_in_front_of_devices_that_are_taken_time_out() {
    guarded(|| {
        let pool = builder().host(2).timeout(Duration::from_secs(1)).build().unwrap();
        let jobs = pool.jobs().queue(4).build().unwrap();
        pool.tasks(|_| {
            let gang = jobs.job().gpus(2).submit(|_, _| Ok(()))?;
            let told = gang.wait();
            assert!(matches!(told, Err(Error::Timeout { .. })), "{told:?}");
            let gang = jobs.job().gpus(2).submit(|_, _| Ok(()))?;
            assert!(gang.place().is_none() && gang.cancel(), "it has not begun");
            let told = gang.wait();
            assert!(matches!(told, Err(Error::Cancelled { .. })), "{told:?}");
            let full = (0..100).find_map(|_| jobs.submit(|_| Ok(())).err());
            assert!(matches!(full, Some(Error::Timeout { .. })), "{full:?}");
            Ok(())
        })
        .unwrap();
        assert_eq!(jobs.job().gpus(2).submit(|dev, _| Ok(dev.rank())).unwrap().wait().unwrap(), [0, 1]);
        let other = pool.jobs().build().unwrap();
        pool.tasks(|_| {
            let job = other.submit(|_| Ok(()))?;
            let told = other.close();
            assert!(matches!(told, Err(Error::Timeout { .. })), "{told:?}");
            assert!(job.wait().is_err());
            Ok(())
        })
        .unwrap();
        assert!(pool.run(|_, _| Ok(())).is_ok());
    });
}

/// Jobs that no device can run any more leave room.
#[test]
fn a_loss_that_empties_the_queue_wakes_waits_for_room() {
    guarded(|| {
        let (pool, plan) = losing(2, 1);
        let jobs = pool.jobs().queue(1).build().unwrap();
        let (go, gone) = mpsc::channel::<()>();
        let first = jobs.job().on(1).submit(move |dev| {
            let _ = gone.recv();
            dev.download(&dev.sum(&dev.upload(&[1.0f32])?)?)
        });
        let first = first.unwrap();
        until("it runs", || first.place().is_some()).unwrap();
        let second = jobs.job().on(1).submit(|_| Ok(())).unwrap();
        let woken = Arc::new(Counted(Arc::default()));
        let waker = Waker::from(woken.clone());
        let mut third = pin!(jobs.job().on(0).submit_async(|_| Ok(3)));
        assert!(poll(third.as_mut(), &waker).is_pending());
        plan.resume();
        drop(go);
        assert!(first.wait().is_err() && second.wait().is_err());
        until("it is woken", || woken.0.load(SeqCst) > 0).unwrap();
        let Poll::Ready(third) = poll(third, &waker) else { panic!("there is room") };
        assert_eq!(third.unwrap().wait().unwrap(), 3);
    });
}

/// A gang that begins when the pool is closed makes room in the queue, and never runs.
#[test]
fn a_close_wakes_waits_for_room() {
    guarded(|| {
        let pool = builder().host(2).build().unwrap();
        let jobs = pool.jobs().queue(1).build().unwrap();
        let (blocked, go) = blocker(&jobs, 0);
        let gang = jobs.job().gpus(2).submit(|_, _| Ok(())).unwrap();
        let woken = Arc::new(Counted(Arc::default()));
        let waker = Waker::from(woken.clone());
        let mut third = pin!(jobs.submit_async(|_| Ok(3)));
        assert!(poll(third.as_mut(), &waker).is_pending());
        let closing = thread::spawn(move || pool.close());
        // The queue is full, and a submission looks at the pool first.
        let is_closed = || matches!(jobs.try_submit(|_| Ok(())), Err(TrySubmitError::Refused(Error::Closed)));
        until("the pool is closed", is_closed).unwrap();
        drop(go);
        blocked.wait().unwrap();
        until("it is woken", || woken.0.load(SeqCst) > 0).unwrap();
        assert!(matches!(gang.wait(), Err(Error::Closed)));
        assert!(matches!(poll(third, &waker), Poll::Ready(Err(Error::Closed))));
        closing.join().unwrap().unwrap();
    });
}

/// Jobs that run keep their deadlines while the pool is being closed.
#[test]
fn a_closing_pool_keeps_the_deadlines() {
    guarded(|| {
        let pool = builder().host(2).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let (blocked, go) = blocker(&jobs, 0);
        let late = jobs.job().on(1).deadline(LATE).submit(|dev| {
            while !dev.cancelled() {
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
        let late = late.unwrap();
        until("it runs", || late.place().is_some()).unwrap();
        let closing = thread::spawn(move || pool.close());
        thread::sleep(Duration::from_millis(50));
        drop(go);
        blocked.wait().unwrap();
        let told = late.wait();
        assert!(matches!(told, Err(Error::Timeout { .. })), "{told:?}");
        closing.join().unwrap().unwrap();
    });
}

/// Jobs cannot book the memory of buffers.
#[test]
fn memory_that_buffers_hold_is_not_booked() {
    guarded(|| {
        let pool = builder().host(1).module(&MODULE).memory_limit(16 << 20).build().unwrap();
        let kept = pool.run(|dev, _| dev.zeros::<u8>(10 << 20)).unwrap();
        let jobs = pool.jobs().build().unwrap();
        // Its closure is over, and its work on the device goes on.
        let first = jobs.job().memory(2 << 20).submit(|dev| {
            let mut x = dev.zeros::<u32>(1)?;
            slow_add(dev, &mut x, 1, 2_000_000)
        });
        let first = first.unwrap();
        let second = jobs.job().memory(6 << 20).submit(|_| Ok(())).unwrap();
        until("the first closure is over", || jobs.stats().waits == Some(Waits::Memory)).unwrap();
        assert!(!first.is_finished());
        first.wait().unwrap();
        second.wait().unwrap();
        drop(kept);
    });
}

/// When `close` returns, all handles have their answers, and closures are dropped.
#[test]
fn a_close_is_after_the_last_answer() {
    struct Slow(Arc<AtomicBool>);
    impl Drop for Slow {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
            thread::sleep(Duration::from_millis(100));
        }
    }
    guarded(|| {
        let pool = builder().host(1).build().unwrap();
        for fails in [false, true] {
            let jobs = pool.jobs().build().unwrap();
            let drops = Arc::new(AtomicBool::new(false));
            let slow = Slow(drops.clone());
            let job = jobs.job().retry(0).submit(move |_| {
                let _here = &slow;
                if fails { Err(Error::custom("as it should")) } else { Ok(()) }
            });
            let job = job.unwrap();
            until("the closure is being dropped", || drops.load(SeqCst)).unwrap();
            jobs.close().unwrap();
            assert!(job.is_finished());
            assert_eq!(jobs.stats().devices[0].ended, 1, "a failed job is over, too");
        }
    });
}

/// The drop of a cancelled job's closure ends the queue, on the thread that cancels: it does not wait for itself.
#[test]
fn a_close_in_the_drop_of_a_cancelled_closure() {
    struct Closes(Jobs);
    impl Drop for Closes {
        fn drop(&mut self) {
            self.0.close().unwrap();
        }
    }
    guarded(|| {
        let pool = builder().host(1).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let (blocked, go) = blocker(&jobs, 0);
        let other = pool.jobs().build().unwrap();
        let closes = Closes(other.clone());
        let queued = other.submit(move |_| Ok(closes.0.stats().running)).unwrap();
        assert!(queued.cancel());
        assert!(matches!(queued.wait(), Err(Error::Cancelled { .. })));
        assert!(matches!(other.submit(|_| Ok(())), Err(Error::Closed)));
        drop(go);
        blocked.wait().unwrap();
    });
}
