//! Which threads run the tasks of the CPU, and what the caller may wait for.

use crate::{
    on_both,
    support::{Gpus, failure, guarded, slow_add, until},
};
use gpu_pool::{DeviceBuffer, Error, ReduceOp, Result};
use rayon::prelude::*;
use std::sync::{
    atomic::{AtomicUsize, Ordering::SeqCst},
    mpsc,
};

fn threads(count: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(count).build().unwrap()
}

/// A waiting call does not run other items of the iterator: they would need the devices that the call has.
#[test]
fn calls_from_a_parallel_iterator() {
    guarded(|| {
        let pool = Gpus::software().pool(2);
        for count in [1, 2] {
            let one = |i: usize| match i % 3 {
                0 => pool.run(|dev, _| Ok(dev.rank())).map(|ranks| ranks.len()),
                1 => pool.tasks(|t| {
                    let x = t.gpu(0).run((), move |_, ()| Ok(i));
                    let y = t.cpu().run((&x,), |(x,)| Ok(x + 1));
                    t.get(&y)
                }),
                // The caller waits after its closure.
                _ => pool.tasks(|t| {
                    let x = t.gpu(1).run((), move |_, ()| Ok(i));
                    let _ = t.cpu().run((&x,), |(x,)| Ok(x + 1));
                    Ok(i)
                }),
            };
            let found: Result<Vec<usize>> =
                threads(count).install(|| (0..18).into_par_iter().with_max_len(1).map(one).collect());
            let expected: Vec<usize> = (0..18).map(|i| [2, i + 1, i][i % 3]).collect();
            assert_eq!(found.unwrap(), expected);
        }
    });
}

/// All threads of the pool of threads wait for the devices that this call has.
#[test]
fn the_threads_wait_for_the_devices() {
    guarded(|| {
        let (pool, threads, inside) = (&Gpus::software().pool(2), &threads(2), &AtomicUsize::new(0));
        std::thread::scope(|s| {
            let found = pool.tasks_in(threads, |t| {
                let others = move || {
                    inside.fetch_add(1, SeqCst);
                    pool.run(|_, _| Ok(())).map(drop)
                };
                s.spawn(move || threads.broadcast(|_| others().unwrap()));
                until("no thread is left", || inside.load(SeqCst) == 2)?;
                let mut x = t.cpu().run((), |()| Ok(0));
                for i in 0..20 {
                    let _ = match i % 2 {
                        0 => t.cpu().run((&mut x,), |(x,)| {
                            *x += 1;
                            Ok(())
                        }),
                        _ => t.gpu(1).run((&mut x,), |_, (x,)| {
                            *x += 1;
                            Ok(())
                        }),
                    };
                }
                // Also a task that fails, and one that panics.
                let bad = t.cpu().run((), |()| Err::<(), _>(Error::custom("no")));
                assert_eq!(failure(t.get(&bad)).to_string(), "no");
                let bad = t.cpu().run((), |()| -> Result<()> { panic!("on purpose") });
                assert!(failure(t.get(&bad)).to_string().contains("on purpose"));
                t.get(&x)
            });
            assert_eq!(found.unwrap(), 20);
        });
    });
}

/// The caller's own look at a value is nothing that it waits for.
#[test]
fn a_wait_within_a_look() {
    guarded(|| {
        let pool = Gpus::software().pool(2);
        let ran = AtomicUsize::new(0);
        let found = pool.tasks(|t| {
            let x = t.cpu().run((), |()| Ok(1));
            t.read(&x, |seen| {
                let _ = t.gpu(0).run((&x,), |_, (x,)| Ok(ran.fetch_add(*x, SeqCst)));
                t.wait()?;
                t.read(&x, |again| t.wait().map(|()| seen + again))?
            })?
        });
        assert_eq!((found.unwrap(), ran.load(SeqCst)), (2, 1));
        // Also after the call's end.
        let error = failure(pool.tasks(|t| {
            let x = t.cpu().run((), |()| Ok(1));
            t.read(&x, |_| {
                let parts: Vec<_> = (0..2)
                    .map(|i| {
                        t.gpu(i).run((), move |dev, ()| dev.all_reduce(&mut dev.zeros::<f32>(8 + i)?, ReduceOp::Sum))
                    })
                    .collect();
                let waited = t.wait();
                drop(parts);
                waited
            })?
        }));
        assert!(matches!(error, Error::Mismatch { .. }), "{error:?}");
    });
}

on_both! {
    /// As `mx.nd.waitall` and `torch.cuda.synchronize`; also for the work of a task that has panicked.
    2: fn a_wait_is_for_the_devices_too(gpus) {
        let pool = gpus.pool(2);
        for panics in [false, true] {
            let (tell, told) = mpsc::channel();
            pool.tasks(move |t| {
                for i in 0..2 {
                    let tell = tell.clone();
                    let x = t.gpu(i).run((), move |dev, ()| dev.zeros::<u32>(8));
                    let _ = t.gpu(i).run((x,), move |dev, (mut x,): (DeviceBuffer<u32>,)| {
                        slow_add(dev, &mut x, 1, 100_000)?;
                        let _ = tell.send((dev.record()?, x));
                        if panics { panic!("on purpose") }
                        Ok(())
                    });
                }
                drop(tell);
                assert_eq!(t.wait().is_err(), panics);
                let ends: Vec<_> = told.iter().collect();
                assert_eq!(ends.len(), 2);
                for (end, _) in &ends {
                    assert!(end.is_complete()?);
                }
                while t.wait().is_err() {}
                Ok(())
            }).unwrap();
        }
    }
}
