//! Panics where nobody expects them: in drops, beside other panics, without the hook. A pool outlives them.

use crate::{
    rig::{assert_works, host},
    support::{failure, guarded, in_a_process, task, until},
};
use gpu_pool::{Error, GpuPool};
use std::{
    panic::{self, AssertUnwindSafe, catch_unwind, panic_any, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

/// A value whose drop panics, with a payload whose drop panics.
#[derive(Clone)]
struct Bomb(Arc<AtomicUsize>);

struct Payload;

impl Drop for Bomb {
    fn drop(&mut self) {
        self.0.fetch_add(1, Relaxed);
        if !thread::panicking() {
            panic_any(Payload);
        }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        if !thread::panicking() {
            panic!("the payload panics, too");
        }
    }
}

/// A pool with a bomb in one of its rings: what was sent to a member that had left.
fn with_a_bomb_in_a_ring(drops: &Arc<AtomicUsize>) -> GpuPool {
    let (pool, before) = (host(2), drops.load(Relaxed));
    pool.run(|dev, _| {
        if dev.rank() == 0 {
            assert!(matches!(failure(dev.exchange(Bomb(drops.clone())).map(drop)), Error::Mismatch { .. }));
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(drops.load(Relaxed), before);
    pool
}

#[test]
fn a_value_left_in_a_ring_may_panic_when_it_is_dropped() {
    guarded(|| {
        let drops = Arc::new(AtomicUsize::new(0));
        with_a_bomb_in_a_ring(&drops).close().unwrap();
        assert_eq!(drops.load(Relaxed), 1);
        drop(with_a_bomb_in_a_ring(&drops));
        assert_eq!(drops.load(Relaxed), 2);
        // Or the next scope finds it.
        let pool = with_a_bomb_in_a_ring(&drops);
        assert_works(&pool);
        assert_eq!(drops.load(Relaxed), 3);
        pool.close().unwrap();
    });
}

#[test]
fn what_a_failed_scope_leaves_may_panic_when_it_is_dropped() {
    guarded(|| {
        let pool = host(4);
        let drops = Arc::new(AtomicUsize::new(0));
        let error = failure(
            pool.run(|dev, _| match dev.rank() {
                3 => panic_any(Payload),
                _ => Ok(Bomb(drops.clone())),
            })
            .map(drop),
        );
        assert!(matches!(error, Error::Panicked { device: 3, .. }), "{error}");
        assert_eq!(drops.load(Relaxed), 3);
        assert_works(&pool);
        pool.close().unwrap();
    });
}

#[test]
fn what_a_callback_holds_may_panic_when_it_is_dropped() {
    guarded(|| {
        let drops = Arc::new(AtomicUsize::new(0));
        let held = Bomb(drops.clone());
        let pool = GpuPool::builder().host(2).on_out_of_memory(move |_| {
            let _ = &held;
            false
        });
        let pool = pool.build().unwrap();
        let buffers = pool.run(|dev, _| dev.zeros::<u8>(100)).unwrap();
        pool.close().unwrap();
        drop(buffers);
        assert_eq!(drops.load(Relaxed), 1);
    });
}

/// What a panic of the closure is told as.
#[track_caller]
fn place_of(pool: &GpuPool, f: impl Fn() + Sync) -> String {
    let error = failure(pool.run(|_, _| {
        f();
        Ok(())
    }));
    let Error::Panicked { place, .. } = error else { panic!("{error}") };
    place
}

/// `resume_unwind` calls no hook.
#[test]
fn a_place_is_of_the_panic_that_ended_the_closure() {
    guarded(|| {
        let pool = host(1);
        let unknown = "an unknown place";
        // Of the closure before, on the same thread.
        assert!(place_of(&pool, || panic!("first")).contains("unwinding.rs"));
        assert_eq!(place_of(&pool, || resume_unwind(Box::new("second"))), unknown);
        assert!(place_of(&pool, || panic!("third")).contains("unwinding.rs"));
        assert_eq!(place_of(&pool, || resume_unwind(Box::new("third".to_owned()))), unknown);
        // Of a panic that was caught within the closure.
        let caught = |f: fn()| drop(catch_unwind(f).unwrap_err());
        let place = place_of(&pool, || {
            caught(|| panic!("caught"));
            resume_unwind(Box::new("another"))
        });
        assert_eq!(place, unknown);
        let place = place_of(&pool, || {
            caught(|| panic!("caught {}", 1));
            resume_unwind(Box::new("caught 2".to_owned()))
        });
        assert_eq!(place, unknown);
        let place = place_of(&pool, || {
            caught(|| panic!("caught"));
            resume_unwind(Box::new(7u32))
        });
        assert_eq!(place, unknown);
        // A panic that is passed on has the place where it began, whatever was caught since.
        let literal: (u32, fn()) = (line!(), || panic!("passed on"));
        let formatted: (u32, fn()) = (line!(), || panic!("passed on {}", 1));
        for (line, panics) in [literal, formatted] {
            let place = place_of(&pool, || {
                let payload = catch_unwind(panics).unwrap_err();
                caught(|| panic!("caught"));
                resume_unwind(payload)
            });
            assert!(place.contains(&format!("unwinding.rs:{line}:")), "{place}, not {line}");
        }
        // While the closure unwinds, a drop catches a panic of its own.
        struct Catches;
        impl Drop for Catches {
            fn drop(&mut self) {
                drop(catch_unwind(|| panic!("within a drop")));
            }
        }
        let line = line!() + 3;
        let place = place_of(&pool, || {
            let _catches = Catches;
            panic!("the one");
        });
        assert!(place.contains(&format!("unwinding.rs:{line}:")), "{place}, not {line}");
        // Also of payloads that are not text.
        let line = line!() + 1;
        let place = place_of(&pool, || panic_any(7u32));
        assert!(place.contains(&format!("unwinding.rs:{line}:")), "{place}, not {line}");
    });
}

#[test]
fn child() {
    match task().as_deref() {
        Some("unwinds") => builds_a_pool_while_it_unwinds(),
        Some("hook") => builds_a_pool_in_a_hook(),
        _ => {}
    }
}

/// The hook may not be changed by a thread that panics.
#[test]
fn a_pool_may_be_built_while_its_thread_unwinds() {
    in_a_process("unwinding::child", "unwinds");
}

fn builds_a_pool_while_it_unwinds() {
    struct Builds;
    impl Drop for Builds {
        fn drop(&mut self) {
            let pool = GpuPool::builder().host(2).build().unwrap();
            assert_eq!(pool.run(|dev, _| dev.exchange(dev.rank())).unwrap(), [[0, 1], [0, 1]]);
            pool.close().unwrap();
        }
    }
    let unwound = catch_unwind(|| {
        let _builds = Builds;
        panic!("it unwinds");
    });
    assert!(unwound.is_err());
    // Places are known as ever, once the hook is there.
    let pool = GpuPool::builder().host(1).build().unwrap();
    until("the place is known", || place_of(&pool, || panic!("known")).contains("unwinding.rs")).unwrap();
}

/// There the hook cannot be changed by any thread until the panic goes on.
#[test]
fn a_pool_may_be_built_by_a_hook() {
    in_a_process("unwinding::child", "hook");
}

fn builds_a_pool_in_a_hook() {
    panic::set_hook(Box::new(|_| {
        let pool = GpuPool::builder().host(1).build().unwrap();
        assert_eq!(pool.run(|dev, _| Ok(dev.rank())).unwrap(), [0]);
    }));
    assert!(catch_unwind(AssertUnwindSafe(|| panic!("in a hook"))).is_err());
}
