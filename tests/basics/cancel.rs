//! Scopes that are cancelled from outside.

use crate::{
    on_both,
    support::{failure, until},
};
use gpu_pool::{CancelToken, DeviceBuffer, Error, ReduceOp, Result};
use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::*},
    thread,
};

/// The error of a scope that was cancelled in this file.
#[track_caller]
fn cancelled<T: std::fmt::Debug>(result: Result<T>) {
    let error = failure(result);
    assert!(matches!(&error, Error::Cancelled { op: "cancel", site } if site.file() == file!()), "{error}");
}

on_both! {
    // One waits for a peer that never comes, one looks by itself.
    2: fn a_cancelled_scope_ends_its_waits(gpus) {
        let pool = gpus.pool(2);
        let mut state = pool.per_device(|dev, _| dev.zeros::<f32>(1000)).unwrap();
        let (token, started) = (CancelToken::new(), AtomicUsize::new(0));
        let ended = thread::scope(|s| {
            s.spawn(|| {
                until("both run", || started.load(SeqCst) == 2).unwrap();
                token.cancel();
            });
            state.on(&[0, 1]).until(&token).run(|dev, _, x: &mut DeviceBuffer<f32>| {
                started.fetch_add(1, SeqCst);
                if dev.index() == 0 {
                    let error = failure(dev.all_reduce(x, ReduceOp::Sum));
                    let Error::Aborted { cause, .. } = &error else { panic!("{error}") };
                    assert!(matches!(**cause, Error::Cancelled { .. }), "{cause}");
                    return Err(error);
                }
                until("it is cancelled", || dev.cancelled())?;
                dev.synchronize()
            })
        });
        cancelled(ended);
        assert!(token.is_cancelled());
        // What the scope had borrowed is not trusted, and the pool works on.
        assert!(matches!(failure(state.run(|_, _, _| Ok(()))), Error::Poisoned { .. }));
        state.clear_poison().unwrap();
        let sums = state.run(|dev, _, x| {
            dev.fill(x, 1.0)?;
            dev.all_reduce(x, ReduceOp::Sum)?;
            dev.download(x)
        });
        assert!(sums.unwrap().iter().flatten().all(|x| *x == 2.0));
    }

    1: fn a_scope_that_waits_for_its_turn_is_withdrawn(gpus) {
        let pool = gpus.pool(1);
        let token = CancelToken::new();
        let [free, began, waits] = [const { AtomicBool::new(false) }; 3];
        thread::scope(|s| {
            let busy = s.spawn(|| {
                pool.run(|_, _| {
                    began.store(true, SeqCst);
                    until("the other scope has ended", || free.load(SeqCst))
                })
            });
            until("the first scope runs", || began.load(SeqCst)).unwrap();
            s.spawn(|| {
                until("the second one waits", || waits.load(SeqCst)).unwrap();
                thread::sleep(std::time::Duration::from_millis(20));
                token.cancel();
            });
            waits.store(true, SeqCst);
            cancelled(pool.run_until(&token, |_, _| -> Result<()> { unreachable!("the device is busy") }));
            free.store(true, SeqCst);
            busy.join().unwrap().unwrap();
        });
        // Later ones do not begin.
        cancelled(pool.run_until(&token, |_, _| -> Result<()> { unreachable!("cancelled before") }));
        assert_eq!(pool.run(|dev, _| Ok(dev.index())).unwrap(), [0]);
    }

    // A token is for any number of scopes; those that have ended have ended.
    1: fn a_scope_that_has_ended_is_not_cancelled(gpus) {
        let pool = gpus.pool(gpus.up_to(3));
        let token = CancelToken::new();
        for _ in 0..10 {
            let found = pool.run_until(&token.clone(), |dev, _| dev.download(&dev.upload(&[dev.index()])?));
            assert_eq!(found.unwrap().concat(), (0..pool.device_count()).collect::<Vec<_>>());
        }
        token.cancel();
        token.cancel();
        assert_eq!(pool.run(|_, _| Ok(1)).unwrap().len(), pool.device_count());
        // A closure may cancel its own scope.
        let own = CancelToken::new();
        cancelled(pool.run_until(&own, |dev, _| {
            own.cancel();
            dev.synchronize()
        }));
    }

    // From many threads, at any time: a scope has all of its results, or is cancelled.
    1: fn cancellations_at_any_time(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        for round in 0..60u64 {
            let token = CancelToken::new();
            let result = thread::scope(|s| {
                s.spawn(|| {
                    (0..round * 50).for_each(|_| std::hint::spin_loop());
                    token.cancel();
                });
                pool.run_until(&token, |dev, _| {
                    let mut x = dev.upload(&[1.0f32; 64])?;
                    for _ in 0..5 {
                        dev.all_reduce(&mut x, ReduceOp::Max)?;
                    }
                    dev.download(&x)
                })
            });
            match result {
                Ok(all) => assert!(all.len() == pool.device_count() && all.iter().flatten().all(|x| *x == 1.0)),
                failed => cancelled(failed),
            }
        }
    }
}
