//! The end of a pool, while others use it.

use crate::{
    on_both,
    rig::{assert_works, host},
    support::{failure, guarded},
};
use gpu_pool::Error;
use parking_lot::Mutex;
use std::{sync::mpsc, thread, time::Duration};

on_both! {
    1: fn a_closed_pool_says_so(gpus) {
        let pool = gpus.pool(1);
        let mut state = pool.per_device(|dev, _| dev.zeros::<f32>(4)).unwrap();
        let buffer = pool.run(|dev, _| dev.zeros::<f32>(4)).unwrap();
        pool.close().unwrap();
        assert!(matches!(failure(state.run(|_, _, _| Ok(()))), Error::Closed));
        assert!(matches!(failure(state.clear_poison()), Error::Closed));
        drop((buffer, state));
    }

    1: fn close_waits_for_scopes_under_way(gpus) {
        let pool = gpus.pool(1);
        let mut state = pool.per_device(|_, _| Ok(0u32)).unwrap();
        let (inside, started) = mpsc::channel();
        let inside = Mutex::new(inside);
        thread::scope(|s| {
            let running = s.spawn(|| {
                state.run(|dev, _, count| {
                    inside.lock().send(()).unwrap();
                    thread::sleep(Duration::from_millis(50));
                    let x = dev.upload(&[1.0f32, 2.0])?;
                    *count += 1;
                    Ok((*count, dev.download(&dev.sum(&x)?)?))
                })
            });
            started.recv().unwrap();
            pool.close().unwrap();
            assert_eq!(running.join().unwrap().unwrap(), [(1, vec![3.0])]);
        });
        assert!(matches!(failure(state.run(|_, _, _| Ok(()))), Error::Closed));
    }
}

/// A pool may be dropped anywhere, also by a value on another pool's device thread; those who use it still get answers.
#[test]
fn a_pool_dropped_on_a_device_thread() {
    guarded(|| {
        let holder = host(1);
        for _ in 0..20 {
            let inner = host(2);
            let mut state = inner.per_device(|_, _| Ok(0)).unwrap();
            let pools = holder.per_device(|_, _| Ok(std::cell::RefCell::new(None))).unwrap();
            let inner = Mutex::new(Some(inner));
            holder
                .run(|dev, _| {
                    *pools.borrow(dev)?.borrow_mut() = inner.lock().take();
                    Ok(())
                })
                .unwrap();
            thread::scope(|s| {
                let user = s.spawn(|| {
                    loop {
                        match state.run(|dev, _, _| dev.barrier()) {
                            Ok(_) => {}
                            Err(error) => break error,
                        }
                    }
                });
                drop(pools);
                let error = user.join().unwrap();
                assert!(matches!(error, Error::Closed), "{error}");
            });
        }
        assert_works(&holder);
    });
}
