//! What jobs give, on software GPUs and on others.

use crate::support::*;
use gpu_pool::{
    Error, GpuPool, ReduceOp, Result,
    jobs::{JobHandle, Jobs, TrySubmitError},
};
use std::{
    collections::BTreeSet,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc::channel,
    },
    thread,
    time::{Duration, Instant},
};

crate::on_both! {
    2: fn results_of_many_threads_come_to_their_handles(gpus) {
        let pool = gpus.pool(2);
        let jobs = pool.jobs().queue(8).build().unwrap();
        thread::scope(|s| {
            for thread in 0..4u32 {
                let jobs = jobs.clone();
                s.spawn(move || {
                    let submit = |i: u32| jobs.submit(move |dev| dev.download(&dev.upload(&[thread * 1000 + i])?));
                    let handles: Vec<JobHandle<Vec<u32>>> = (0..50).map(|i| submit(i).unwrap()).collect();
                    for (i, handle) in handles.into_iter().enumerate() {
                        assert_eq!(handle.wait().unwrap(), [thread * 1000 + i as u32]);
                    }
                });
            }
        });
        let stats = jobs.stats();
        assert_eq!((stats.done, stats.failed, stats.queued, stats.running), (200, 0, 0, 0), "{stats}");
        assert!(stats.devices.iter().all(|device| device.booked == 0));
    }

    3: fn a_gang_runs_collectives_beside_single_jobs(gpus) {
        let pool = gpus.pool(3);
        let jobs = pool.jobs().build().unwrap();
        let mut gangs = Vec::new();
        let mut singles = Vec::new();
        for i in 0..12u32 {
            singles.push(jobs.submit(move |dev| dev.download(&dev.upload(&[i])?)).unwrap());
            let gang = jobs.job().gpus(2).submit(move |dev, group| {
                let mut x = dev.upload(&[(i + group.rank() as u32) as f32])?;
                group.all_reduce(&mut x, ReduceOp::Sum)?;
                dev.download(&x)
            });
            gangs.push(gang.unwrap());
        }
        for (i, (single, gang)) in singles.into_iter().zip(gangs).enumerate() {
            assert_eq!(single.wait().unwrap(), [i as u32]);
            let sum = (2 * i + 1) as f32;
            assert_eq!(gang.wait().unwrap(), [[sum], [sum]]);
        }
    }

    2: fn maps_are_in_order_and_lazy(gpus) {
        let pool = gpus.pool(2);
        let jobs = pool.jobs().build().unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let counting = asked.clone();
        let items = (0..1000u32).inspect(move |_| {
            counting.fetch_add(1, SeqCst);
        });
        let mut results = jobs.map(items, |dev, i| dev.download(&dev.upload(&[i])?));
        for i in 0..20 {
            assert_eq!(results.next().unwrap().unwrap(), [i]);
        }
        // 2 devices with 1 + 1 jobs each, twice.
        assert!(asked.load(SeqCst) <= 20 + 8, "{}", asked.load(SeqCst));
        drop(results);
        jobs.close().unwrap();
        assert_eq!(jobs.stats().failed, 0);
    }

    2: fn scopes_borrow_and_join(gpus) {
        let pool = gpus.pool(2);
        let jobs = pool.jobs().build().unwrap();
        let x: Vec<f32> = (0..64).map(|i| i as f32).collect();
        let mut sums = [0.0f32; 8];
        let of_first = jobs.scope(|s| {
            let first = s.submit(|dev| dev.download(&dev.sum(&dev.upload(&x)?)?));
            for (part, sum) in x.chunks(8).zip(&mut sums) {
                s.submit(move |dev| {
                    *sum = dev.download(&dev.sum(&dev.upload(part)?)?)?[0];
                    Ok(())
                });
            }
            first.wait()
        });
        assert_eq!(of_first.unwrap().unwrap(), [2016.0]);
        assert_eq!(sums.iter().sum::<f32>(), 2016.0);
        assert_eq!(sums[1], (8..16).sum::<i32>() as f32);
    }

    2: fn state_is_made_once_per_device_and_anew_after_a_failure(gpus) {
        let pool = gpus.pool(2);
        let made = Arc::new(Mutex::new(Vec::new()));
        let making = made.clone();
        let jobs = pool.jobs_with(move |dev| {
            making.lock().unwrap().push(dev.index());
            dev.upload(&[0.0f32])
        });
        let jobs = jobs.build().unwrap();
        let add = |jobs: &gpu_pool::jobs::JobsWith<_>, device| {
            let f = jobs.with(|dev, x: &mut gpu_pool::DeviceBuffer<f32>| {
                let one = dev.upload(&[1.0f32])?;
                dev.axpy(1.0, &one, x)?;
                dev.download(&*x)
            });
            jobs.job().on(device).submit(f).unwrap().wait()
        };
        let found = [0, 0, 1].map(|device| add(&jobs, device).unwrap());
        assert_eq!(found, [[1.0], [2.0], [1.0]]);
        let failing = jobs.with(|_, _| Err::<(), _>(Error::custom("half way")));
        jobs.job().on(0).submit(failing).unwrap().wait().unwrap_err();
        assert_eq!((add(&jobs, 0).unwrap(), add(&jobs, 1).unwrap()), (vec![1.0], vec![2.0]));
        let mut made = made.lock().unwrap().clone();
        made.sort_unstable();
        assert_eq!(made, [0, 0, 1]);
        let doubled: Result<Vec<_>> = jobs.map(0..4, |dev, x, i| Ok(dev.download(&*x)?[0] * i as f32)).collect();
        assert!(doubled.unwrap()[3] >= 3.0);
    }

    /// A model above half of the memory: the spoiled one goes before its successor comes. One that cannot be made now
    /// is made by the next job.
    2: fn a_spoiled_state_is_dropped_before_the_next_is_made(gpus) {
        let pool = gpus.builder(1).memory_limit(64 << 20).build().unwrap();
        let made = AtomicUsize::new(0);
        let jobs = pool.jobs_with(move |dev| match made.fetch_add(1, SeqCst) {
            2 => Err(Error::custom("not now")),
            _ => dev.zeros::<u8>(40 << 20),
        });
        let jobs = jobs.build().unwrap();
        let answers = [false, true, false, true, false, false].map(|fails| {
            let job = jobs.submit(move |_, x| if fails { Err(Error::custom("a request")) } else { Ok(x.len()) });
            job.unwrap().wait().map_err(|e| e.to_string())
        });
        let (fine, failed) = (Ok(40 << 20), Err("a request".to_owned()));
        let not_now = Err("not now".to_owned());
        assert_eq!(answers, [fine.clone(), failed.clone(), fine.clone(), failed, not_now, fine]);
    }

    2: fn an_error_and_a_panic_end_their_own_job(gpus) {
        let pool = gpus.pool(2);
        let jobs = pool.jobs().build().unwrap();
        let handles: Vec<JobHandle<Vec<u32>>> = (0..30u32)
            .map(|i| {
                jobs.submit(move |dev| match i % 3 {
                    0 => Err(Error::custom(format!("no {i}"))),
                    1 => panic!("alas {i}"),
                    _ => dev.download(&dev.upload(&[i])?),
                })
                .unwrap()
            })
            .collect();
        for (i, handle) in handles.into_iter().enumerate() {
            match handle.wait() {
                Ok(x) => assert!(i % 3 == 2 && x == [i as u32]),
                Err(Error::Panicked { message, .. }) => assert!(i % 3 == 1 && message == format!("alas {i}")),
                Err(error) => assert!(i % 3 == 0 && error.to_string() == format!("no {i}")),
            }
        }
        assert_eq!((jobs.stats().done, jobs.stats().failed), (10, 20));
        pool.run(|dev, _| dev.barrier()).unwrap();
    }
}

fn pool(devices: usize) -> GpuPool {
    Gpus::software().pool(devices)
}

/// A job that keeps its device's thread until the sender is dropped.
pub fn blocker(jobs: &Jobs, device: usize) -> (JobHandle<()>, std::sync::mpsc::Sender<()>) {
    let (go, gone) = channel::<()>();
    let (begin, begun) = channel();
    let job = jobs.job().on(device).submit(move |_| {
        begin.send(()).unwrap();
        let _ = gone.recv();
        Ok(())
    });
    begun.recv().unwrap();
    (job.unwrap(), go)
}

#[test]
fn a_full_queue_gives_the_closure_back_and_submit_waits() {
    let pool = pool(1);
    let jobs = pool.jobs().queue(1).overlap(0).build().unwrap();
    let (blocked, go) = blocker(&jobs, 0);
    let queued = jobs.submit(|_| Ok(1)).unwrap();
    let Err(TrySubmitError::Full(f)) = jobs.try_submit(|_| Ok(2)) else { panic!("it has no room") };
    let waits = jobs.clone();
    let waiting = thread::spawn(move || waits.submit(f).unwrap().wait());
    let mut future = Box::pin(jobs.submit_async(|_| Ok(3)));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    assert!(future.as_mut().poll(&mut cx).is_pending());
    thread::sleep(Duration::from_millis(20));
    assert!(!waiting.is_finished() && !queued.is_finished());
    drop(go);
    assert_eq!((queued.wait().unwrap(), waiting.join().unwrap().unwrap()), (1, 2));
    assert_eq!(pollster::block_on(async { future.await?.await }).unwrap(), 3);
    blocked.wait().unwrap();
}

/// A future that waits for room leaves one waker, however often it is polled, and is woken when the queue is closed.
#[test]
fn closing_wakes_futures_that_wait_for_room() {
    struct Count(AtomicUsize);
    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let pool = pool(1);
    let jobs = pool.jobs().queue(1).overlap(0).build().unwrap();
    let (blocked, go) = blocker(&jobs, 0);
    let queued = jobs.submit(|_| Ok(1)).unwrap();
    let mut future = Box::pin(jobs.submit_async(|_| Ok(2)));
    let count = Arc::new(Count(AtomicUsize::new(0)));
    let waker = std::task::Waker::from(count.clone());
    let mut cx = std::task::Context::from_waker(&waker);
    for _ in 0..100 {
        assert!(future.as_mut().poll(&mut cx).is_pending());
    }
    let closing = jobs.clone();
    let closing = thread::spawn(move || closing.close());
    while count.0.load(SeqCst) == 0 {
        thread::yield_now();
    }
    assert!(matches!(future.as_mut().poll(&mut cx), std::task::Poll::Ready(Err(Error::Closed))));
    assert_eq!(count.0.load(SeqCst), 1);
    drop(go);
    closing.join().unwrap().unwrap();
    assert_eq!((blocked.wait().unwrap(), queued.wait().unwrap()), ((), 1));
}

#[test]
fn futures_are_woken_without_a_runtime() {
    let pool = pool(2);
    let jobs = pool.jobs().build().unwrap();
    let found = pollster::block_on(async {
        let first = jobs.submit_async(|dev| dev.download(&dev.upload(&[1u8])?)).await?;
        let second = jobs.submit(|_| {
            thread::sleep(Duration::from_millis(5));
            Ok(2u8)
        })?;
        let mut sum = 0;
        let mut stream = jobs.stream(0..100u32, |_, i| Ok(i));
        let mut next = 0;
        while let Some(i) = stream.next().await {
            assert_eq!(i?, next);
            next += 1;
            sum += next;
        }
        assert_eq!((next, sum), (100, 5050));
        Ok::<_, Error>((first.await?, second.await?))
    });
    assert_eq!(found.unwrap(), (vec![1], 2));
}

#[test]
fn cancelled_jobs_end_with_that_and_nothing_else() {
    let pool = pool(2);
    let jobs = pool.jobs().build().unwrap();
    // One that has not begun.
    let (blocked, go) = blocker(&jobs, 0);
    let ran = Arc::new(AtomicBool::new(false));
    let running = ran.clone();
    let queued = jobs.job().on(0).submit(move |_| {
        running.store(true, SeqCst);
        Ok(())
    });
    let queued = queued.unwrap();
    assert!(queued.cancel());
    assert!(matches!(queued.wait(), Err(Error::Cancelled { op: "cancel", .. })));
    drop(go);
    blocked.wait().unwrap();
    assert!(!ran.load(SeqCst));
    // One that looks, and one that waits for a peer which never comes.
    let looks = jobs.submit(|dev| {
        while !dev.cancelled() {
            thread::yield_now();
        }
        Ok(())
    });
    let looks = looks.unwrap();
    while looks.place().is_none() {
        thread::yield_now();
    }
    assert!(!looks.cancel());
    assert!(matches!(looks.wait(), Err(Error::Cancelled { .. })));
    let together = Arc::new(Barrier::new(2));
    let came = together.clone();
    let waits = jobs.job().gpus(2).submit(move |dev, group| {
        came.wait();
        if group.rank() == 0 {
            return dev.barrier();
        }
        while !dev.cancelled() {
            thread::yield_now();
        }
        dev.check()
    });
    let waits = waits.unwrap();
    while waits.place().is_none() {
        thread::yield_now();
    }
    waits.cancel();
    assert!(matches!(waits.wait(), Err(Error::Cancelled { .. })));
    assert_eq!(jobs.stats().cancelled, 3);
    assert_eq!(jobs.submit(|_| Ok(7)).unwrap().wait().unwrap(), 7);
}

#[test]
fn waits_on_a_device_thread_are_refused_and_submissions_are_not() {
    let pool = pool(1);
    let jobs = pool.jobs().queue(1).build().unwrap();
    let inner = jobs.clone();
    let found = jobs.submit(move |_| {
        let children: Vec<_> = (0..10).map(|i| inner.submit(move |_| Ok(i))).collect::<Result<_>>()?;
        let refused = inner.submit(|_| Ok(0))?.wait();
        assert!(matches!(refused, Err(Error::NestedScope { op: "JobHandle::wait", .. })), "{refused:?}");
        assert!(matches!(inner.close(), Err(Error::NestedScope { op: "close", .. })));
        assert!(matches!(inner.scope(|_| ()), Err(Error::NestedScope { op: "scope", .. })));
        Ok(children)
    });
    let children = found.unwrap().wait().unwrap();
    let results: Vec<i32> = children.into_iter().map(|child| child.wait().unwrap()).collect();
    assert_eq!(results, (0..10).collect::<Vec<_>>());
}

#[test]
fn what_no_device_can_run_is_refused_with_numbers() {
    let pool = GpuPool::builder().host(2).memory_limit(32 << 20).build().unwrap();
    let jobs = pool.jobs().build().unwrap();
    let why = |error: Error| {
        let Error::InvalidArgument { op: "submit", why, site, .. } = error else { panic!("{error:?}") };
        assert_eq!(site.file(), file!());
        why
    };
    let large = why(jobs.job().memory(64 << 20).submit(|_| Ok(())).unwrap_err());
    assert!(large.contains("67108864") && large.contains("33554432"), "{large}");
    assert!(why(jobs.job().gpus(3).submit(|_, _| Ok(())).unwrap_err()).contains("3 of 2"));
    assert!(why(jobs.job().on(2).submit(|_| Ok(())).unwrap_err()).contains("1 of 0"));
    why(jobs.job().gpus(0).submit(|_, _| Ok(())).unwrap_err());
    let whole = jobs.job().memory(32 << 20).submit(|_| Ok(1)).unwrap();
    assert_eq!(whole.wait().unwrap(), 1);
    assert!(matches!(pool.jobs().queue(0).build(), Err(Error::InvalidArgument { .. })));
    assert!(matches!(pool.jobs().overlap(4).build(), Err(Error::InvalidArgument { .. })));
}

/// SP1 #2801: with a budget below the sum of the jobs, they wait for memory and none is out of it.
#[test]
fn memory_is_booked_before_a_job_begins() {
    let pool = GpuPool::builder().host(1).memory_limit(16 << 20).build().unwrap();
    let jobs = pool.jobs().overlap(3).build().unwrap();
    let handles: Vec<_> = (0..20)
        .map(|i| {
            let bytes = [6 << 20, 10 << 20, 15 << 20][i % 3];
            let job = jobs.job().memory(bytes as u64);
            job.submit(move |dev| dev.download(&dev.sum(&dev.zeros::<f32>(bytes / 4 - 4096)?)?)).unwrap()
        })
        .collect();
    for handle in handles {
        assert_eq!(handle.wait().unwrap(), [0.0]);
    }
}

#[test]
fn a_closed_pool_and_a_closed_queue_end_every_handle() {
    let first = pool(1);
    let jobs = first.jobs().build().unwrap();
    let (blocked, go) = blocker(&jobs, 0);
    let queued: Vec<_> = (0..5).map(|_| jobs.submit(|_| Ok(())).unwrap()).collect();
    let closing = thread::spawn(move || first.close());
    thread::sleep(Duration::from_millis(20));
    drop(go);
    blocked.wait().unwrap();
    closing.join().unwrap().unwrap();
    for handle in queued {
        assert!(matches!(handle.wait(), Err(Error::Closed)));
    }
    assert!(matches!(jobs.submit(|_| Ok(())), Err(Error::Closed)));
    // `close` lets what is queued run; `abort` does not.
    let second = pool(1);
    let jobs = second.jobs().build().unwrap();
    let handles: Vec<_> = (0..20).map(|i| jobs.submit(move |_| Ok(i)).unwrap()).collect();
    jobs.close().unwrap();
    assert!(handles.iter().all(JobHandle::is_finished));
    assert!(matches!(jobs.try_submit(|_| Ok(())), Err(TrySubmitError::Refused(Error::Closed))));
    let jobs = second.jobs().build().unwrap();
    let (blocked, go) = blocker(&jobs, 0);
    let queued = jobs.submit(|_| Ok(())).unwrap();
    jobs.abort();
    drop(go);
    for handle in [blocked, queued] {
        assert!(matches!(handle.wait(), Err(Error::Cancelled { op: "abort", .. })));
    }
    // Dropped, it lets what is queued run.
    let jobs = second.jobs().build().unwrap();
    let handles: Vec<_> = (0..20).map(|i| jobs.submit(move |_| Ok(i)).unwrap()).collect();
    drop(jobs);
    assert_eq!(handles.into_iter().map(|handle| handle.wait().unwrap()).sum::<i32>(), 190);
}

#[test]
fn deadlines_are_kept() {
    let pool = pool(1);
    let jobs = pool.jobs().build().unwrap();
    let (blocked, go) = blocker(&jobs, 0);
    let limit = Duration::from_millis(30);
    let began = Instant::now();
    let late = jobs.job().deadline(limit).submit(|_| Ok(())).unwrap();
    assert!(matches!(pollster::block_on(late), Err(Error::Timeout { waited, .. }) if waited == limit));
    assert!(began.elapsed() >= limit);
    drop(go);
    blocked.wait().unwrap();
    let long = jobs.job().deadline(limit).submit(|dev| {
        while !dev.cancelled() {
            thread::yield_now();
        }
        Ok(())
    });
    assert!(matches!(long.unwrap().wait(), Err(Error::Timeout { .. })));
    let in_time = jobs.job().deadline(TIMEOUT).submit(|_| Ok(1)).unwrap();
    assert_eq!(in_time.wait().unwrap(), 1);
}

#[test]
fn a_wait_has_a_limit_and_the_answer_comes_later() {
    let pool = pool(1);
    let jobs = pool.jobs().build().unwrap();
    let (mut blocked, go) = blocker(&jobs, 0);
    assert!(blocked.wait_timeout(Duration::from_millis(10)).is_none());
    assert_eq!(blocked.place(), Some(0));
    drop(go);
    assert!(blocked.wait_timeout(TIMEOUT).is_some_and(|answer| answer.is_ok()));
}

#[test]
fn sets_of_devices_run_side_by_side() {
    // sirius #1471: query A on 0-1, B on 2-3.
    let pool = pool(4);
    let jobs = pool.jobs().build().unwrap();
    let together = Arc::new(Barrier::new(4));
    let query = |devices: &[usize]| {
        let together = together.clone();
        let job = jobs.job().gpus(2).among(devices);
        job.submit(move |dev, _| {
            together.wait();
            Ok(dev.index())
        })
        .unwrap()
    };
    let (a, b) = (query(&[0, 1]), query(&[2, 3]));
    assert_eq!((a.wait().unwrap(), b.wait().unwrap()), (vec![0, 1], vec![2, 3]));
}

#[test]
fn idle_devices_take_what_prefers_another() {
    let pool = pool(2);
    let jobs = pool.jobs().overlap(0).build().unwrap();
    let (blocked, go) = blocker(&jobs, 1);
    let elsewhere = jobs.job().prefer(1).submit(|dev| Ok(dev.index())).unwrap();
    assert_eq!(elsewhere.wait().unwrap(), 0);
    drop(go);
    blocked.wait().unwrap();
    let there: BTreeSet<_> =
        (0..10).map(|_| jobs.job().prefer(1).submit(|dev| Ok(dev.index())).unwrap().wait().unwrap()).collect();
    assert_eq!(there, BTreeSet::from([1]));
}
