//! Jobs have nothing to do with each other: what one fails with, or drops, or waits for, is not the affair of others.

use crate::{
    Bomb,
    attacks::{Counted, poll},
    basics::blocker,
    support::*,
};
use gpu_pool::{
    Builder, Error, GpuPool, LaunchDims,
    extend::driver::host::on_one_gpu,
    extend::train::DeviceInternals,
    jobs::{JobHandle, Jobs},
    kernel,
};
use std::{
    pin::{Pin, pin},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    task::{Poll, Wake, Waker},
    thread,
    time::Duration,
};

/// A job that ends with the id of its gang.
fn gang_id(jobs: &Jobs) -> JobHandle<u64> {
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

/// Runs its closure when it is dropped.
struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// A thread that ends a job of one queue waits nevertheless for all of another one.
#[test]
fn a_close_in_the_drop_of_another_queue() {
    guarded(|| {
        let pool = builder().host(1).build().unwrap();
        let (jobs, other) = (pool.jobs().build().unwrap(), pool.jobs().build().unwrap());
        let (drops, dropping) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        let slow = Mutex::new(OnDrop(move || {
            drops.send(()).unwrap();
            gone.recv().unwrap();
            thread::sleep(Duration::from_millis(50));
        }));
        let job = jobs.submit(move |_| Ok(slow.is_poisoned())).unwrap();
        dropping.recv().unwrap();
        let (tell, told) = mpsc::channel();
        let closes = Mutex::new(OnDrop(move || {
            go.send(()).unwrap();
            jobs.close().unwrap();
            tell.send(job.is_finished()).unwrap();
        }));
        assert!(other.submit(move |_| Ok(closes.is_poisoned())).unwrap().cancel());
        assert!(told.recv().unwrap(), "the answer comes before the close returns");
    });
}

/// The callback goes with the last reference to its queue, which a device's thread may have.
#[test]
fn a_callback_whose_drop_panics_fails_no_scope() {
    guarded(|| {
        let pool = builder().host(1).build().unwrap();
        let (captured, dropped) = (Bomb, Arc::new(()));
        let kept = dropped.clone();
        let jobs = pool.jobs().on_progress(move |_| assert!(size_of_val(&captured) + size_of_val(&kept) > 0));
        let jobs = jobs.build().unwrap();
        let (blocked, go) = blocker(&jobs, 0);
        drop((jobs, blocked));
        drop(go);
        until("the queue is freed", || Arc::strong_count(&dropped) == 1).unwrap();
        pool.run(|_, _| Ok(())).unwrap();
        pool.close().unwrap();
    });
}

/// A cancelled gang makes way for a job, and its closure's drop waits for that job.
#[test]
fn the_drop_of_a_cancelled_closure_waits_for_a_job() {
    guarded(|| {
        let pool = builder().host(2).timeout(Duration::from_secs(3)).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let (blocked, go) = blocker(&jobs, 0);
        let (give, given) = mpsc::channel::<JobHandle<u32>>();
        let (tell, told) = mpsc::channel();
        let waits = Mutex::new(OnDrop(move || tell.send(given.recv().unwrap().wait()).unwrap()));
        let gang = jobs.job().gpus(2).submit(move |_, _| Ok(waits.is_poisoned())).unwrap();
        give.send(jobs.job().on(1).submit(|_| Ok(7)).unwrap()).unwrap();
        assert_eq!(jobs.stats().queued, 2, "it waits behind the gang");
        assert!(gang.cancel());
        assert_eq!(told.recv().unwrap().unwrap(), 7);
        drop(go);
        blocked.wait().unwrap();
    });
}

/// The closure of a gang is dropped on one of its devices. The other one goes on.
#[test]
fn the_drop_of_a_closure_stops_its_own_device_alone() {
    guarded(|| {
        let pool = builder().host(2).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let (begin, begun) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        // It goes on when a job has begun on the other device.
        let waits = Mutex::new(OnDrop(move || tell.send(begun.recv_timeout(TIMEOUT / 20)).unwrap()));
        let (go, gone) = mpsc::channel::<()>();
        let gone = Mutex::new(gone);
        let gang =
            jobs.job().gpus(2).submit(move |_, _| Ok(gone.lock().unwrap().recv().is_err() && !waits.is_poisoned()));
        let gang = gang.unwrap();
        let next = [0, 1].map(|device| {
            let begin = begin.clone();
            jobs.job().on(device).submit(move |_| begin.send(()).map_err(Error::custom)).unwrap()
        });
        drop(go);
        assert_eq!(gang.wait().unwrap(), [true; 2]);
        assert_eq!(told.recv().unwrap(), Ok(()));
        drop(next);
    });
}

/// A drop that waits for a job with a later deadline keeps nobody from looking at that one.
#[test]
fn a_drop_at_a_deadline_does_not_stop_the_others() {
    guarded_for(TIMEOUT / 10, || {
        let pool = builder().host(1).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let runs = jobs.job().deadline(Duration::from_secs(3)).submit(|dev| {
            while !dev.cancelled() {
                thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
        let inner = jobs.clone();
        let closes = Mutex::new(OnDrop(move || drop(inner.close())));
        let queued = jobs.job().deadline(Duration::from_secs(1)).submit(move |_| Ok(closes.is_poisoned()));
        let error = runs.unwrap().wait().unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        // On a slow machine it may have run.
        drop(queued.unwrap().wait());
    });
}

/// Jobs that begin while their map is dropped run to their ends.
#[test]
fn a_dropped_map_aborts_nothing() {
    guarded(|| {
        let pool = builder().host(2).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let aborted = Arc::new(AtomicUsize::new(0));
        for _ in 0..cases(8000, 40_000) {
            let counted = aborted.clone();
            let mut results = jobs.map(0..100, move |dev, _| {
                for _ in 0..100 {
                    std::hint::spin_loop();
                }
                counted.fetch_add(usize::from(dev.cancelled()), SeqCst);
                Ok(())
            });
            results.next().unwrap().unwrap();
        }
        jobs.close().unwrap();
        assert_eq!(aborted.load(SeqCst), 0);
    });
}

/// Futures that wait for room, and are polled again with other wakers, or dropped, leave no waker in the queue.
#[test]
fn a_dropped_future_leaves_no_waker() {
    guarded(|| {
        let pool = builder().host(1).build().unwrap();
        let jobs = pool.jobs().queue(1).build().unwrap();
        let (blocked, go) = blocker(&jobs, 0);
        let queued = jobs.submit(|_| Ok(2)).unwrap();
        let wakers: Vec<_> = (0..1000).map(|_| Arc::new(Counted(Arc::default()))).collect();
        let alive = || wakers.iter().filter(|waker| Arc::strong_count(waker) > 1).count();
        let mut last = pin!(jobs.submit_async(|_| Ok(3)));
        let mut squares = jobs.stream(0..3u32, |_, i| Ok(i * i));
        for waker in &wakers {
            let waker = Waker::from(waker.clone());
            assert!(poll(pin!(jobs.submit_async(|_| Ok(()))), &waker).is_pending());
            assert!(poll(last.as_mut(), &waker).is_pending());
            assert!(poll(pin!(squares.next()), &waker).is_pending());
        }
        assert_eq!(alive(), 1, "the last one, which waits");
        drop(squares);
        drop(go);
        blocked.wait().unwrap();
        assert_eq!(queued.wait().unwrap(), 2);
        let woken = &wakers[wakers.len() - 1].0;
        until("the last one is woken", || woken.load(SeqCst) > 0).unwrap();
        let Poll::Ready(last) = poll(last, Waker::noop()) else { panic!("there is room") };
        assert_eq!(last.unwrap().wait().unwrap(), 3);
        until("no waker is left", || alive() == 0).unwrap();
    });
}

/// No job books more than its device can get: of a shared GPU, its part.
#[test]
fn no_job_books_more_than_its_device_has() {
    let most = |pool: GpuPool| pool.jobs().build().unwrap().stats().devices[0].limit;
    let pool = builder().host(1).build().unwrap();
    let whole = most(pool);
    let pool = builder().host(1).memory_limit(u64::MAX).build().unwrap();
    let refused = pool.jobs().build().unwrap().job().memory(1 << 60).submit(|_| Ok(()));
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    let shared = |limit: fn(Builder) -> Builder| on_one_gpu(|| limit(builder().host(4)).build()).unwrap();
    assert_eq!(most(shared(|builder| builder)), whole / 4);
    assert_eq!(most(shared(|builder| builder.memory_limit_percent(50.0))), whole / 8);
    assert_eq!(most(shared(|builder| builder.memory_limit(3 << 20))), 3 << 20);
    assert_eq!(most(shared(|builder| builder.memory_limit(u64::MAX))), whole);
}

/// A deadline is that of a submission, too, while the queue is full.
#[test]
fn a_submission_to_a_full_queue_keeps_its_deadline() {
    guarded_for(TIMEOUT / 10, || {
        let pool = builder().host(1).build().unwrap();
        let jobs = pool.jobs().queue(1).build().unwrap();
        let (blocked, go) = blocker(&jobs, 0);
        let queued = jobs.submit(|_| Ok(2)).unwrap();
        let limit = Duration::from_millis(10);
        let late = || jobs.job().deadline(limit);
        let waits = late().submit(|_| Ok(()));
        assert!(matches!(waits, Err(Error::Timeout { waited, .. }) if waited == limit), "{waits:?}");
        let mut waits = pin!(late().submit_async(|_| Ok(())));
        let waits = loop {
            match poll(waits.as_mut(), Waker::noop()) {
                Poll::Ready(answer) => break answer,
                Poll::Pending => thread::sleep(limit),
            }
        };
        assert!(matches!(waits, Err(Error::Timeout { waited, .. }) if waited == limit), "{waits:?}");
        drop(go);
        blocked.wait().unwrap();
        assert_eq!(queued.wait().unwrap(), 2);
    });
}

/// A closure that awaits a job would stop its device's thread.
#[test]
fn a_job_that_awaits_another_one_is_told() {
    guarded_for(TIMEOUT / 10, || {
        let pool = builder().host(1).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let inner = jobs.clone();
        let wrong = jobs.submit(move |_| pollster::block_on(inner.submit(|_| Ok(7))?));
        let error = wrong.unwrap().wait().unwrap_err();
        assert!(matches!(error, Error::NestedScope { op: "poll", .. }), "{error}");
        // What is over can be had.
        let over = jobs.submit(|_| Ok(7)).unwrap();
        until("it is over", || over.is_finished()).unwrap();
        assert_eq!(jobs.submit(move |_| pollster::block_on(over)).unwrap().wait().unwrap(), 7);
    });
}

/// An executor that polls when it is woken.
struct Inline(Mutex<JobHandle<u32>>, mpsc::Sender<bool>);

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        let Inline(handle, tell) = &*self;
        let mut handle = handle.lock().unwrap();
        tell.send(poll(Pin::new(&mut *handle), Waker::noop()).is_pending()).unwrap();
    }
}

/// A device's thread wakes after the closure's end, and there a poll is no wait.
#[test]
fn a_waker_may_poll_on_a_devices_thread() {
    guarded(|| {
        let pool = builder().host(1).build().unwrap();
        let jobs = pool.jobs().build().unwrap();
        let (blocked, go) = blocker(&jobs, 0);
        let mut first = jobs.submit(|_| Ok(1)).unwrap();
        let (next, last) = mpsc::channel::<()>();
        let second = jobs.submit(move |_| Ok(2 + u32::from(last.recv().is_ok()))).unwrap();
        let (tell, told) = mpsc::channel();
        let waker = Waker::from(Arc::new(Inline(Mutex::new(second), tell)));
        assert!(poll(Pin::new(&mut first), &waker).is_pending());
        drop(go);
        assert!(told.recv().unwrap(), "it is pending");
        assert_eq!(first.wait().unwrap(), 1);
        drop(next);
        blocked.wait().unwrap();
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
