//! State that lives on its device: need not be `Send`, is borrowed by the rules, and is poisoned by failure.

use crate::{
    on_both,
    support::{failure, until},
};
use gpu_pool::{DeviceBuffer, Error, PerDevice, ReduceOp};
use parking_lot::Mutex;
use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::*},
    },
    thread::{self, ThreadId},
};

/// Notes on which thread it is dropped.
struct Witness(Arc<Mutex<Vec<ThreadId>>>);
impl Drop for Witness {
    fn drop(&mut self) {
        self.0.lock().push(thread::current().id());
    }
}

on_both! {
    1: fn state_need_not_be_send_and_never_leaves_its_thread(gpus) {
        static_assertions::assert_impl_all!(PerDevice<Rc<Cell<u32>>>: Send, Sync);
        let pool = gpus.pool(gpus.up_to(3));
        let threads = pool.run(|_, _| Ok(thread::current().id())).unwrap();
        let dropped = Arc::new(Mutex::new(Vec::new()));
        let mut state = pool
            .per_device(|dev, shard| {
                assert_eq!(dev.rank(), shard.index());
                Ok((Rc::new(Cell::new(dev.index())), thread::current().id(), Witness(dropped.clone())))
            })
            .unwrap();
        for _ in 0..3 {
            state
                .run(|_, _, (count, home, _)| {
                    assert_eq!(thread::current().id(), *home);
                    count.set(count.get() + 10);
                    Ok(())
                })
                .unwrap();
        }
        let counts = pool.run(|dev, _| Ok(state.borrow(dev)?.0.get())).unwrap();
        assert_eq!(counts, (0..pool.device_count()).map(|i| i + 30).collect::<Vec<_>>());
        // Dropped on any thread; each value goes on its own.
        thread::spawn(move || drop(state)).join().unwrap();
        pool.run(|_, _| Ok(())).unwrap();
        let mut dropped = std::mem::take(&mut *dropped.lock());
        assert_eq!(dropped.len(), threads.len());
        dropped.retain(|t| !threads.contains(t));
        assert!(dropped.is_empty());
    }

    1: fn borrows_follow_the_rules(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        let state = pool.per_device(|_, _| Ok(vec![1, 2, 3])).unwrap();
        pool.run(|dev, _| {
            {
                let (a, b) = (state.borrow(dev)?, state.borrow(dev)?);
                assert_eq!(*a, *b);
                let error = failure(state.borrow_mut(dev).map(drop));
                assert!(matches!(error, Error::Borrowed { device, .. } if device == dev.index()), "{error}");
                drop(a);
                assert!(matches!(failure(state.borrow_mut(dev).map(drop)), Error::Borrowed { .. }));
            }
            {
                let mut a = state.borrow_mut(dev)?;
                a.push(4);
                assert!(matches!(failure(state.borrow(dev).map(drop)), Error::Borrowed { .. }));
                assert!(matches!(failure(state.borrow_mut(dev).map(drop)), Error::Borrowed { .. }));
            }
            assert_eq!(*state.borrow(dev)?, [1, 2, 3, 4]);
            Ok(())
        })
        .unwrap();
    }

    2: fn weights_are_trained_in_place(gpus) {
        struct Model {
            w: DeviceBuffer<f32>,
            g: DeviceBuffer<f32>,
        }
        let n = gpus.up_to(3);
        let pool = gpus.pool(n);
        let mut model = pool.per_device(|dev, _| Ok(Model { w: dev.upload(&[1.0; 10])?, g: dev.zeros(10)? })).unwrap();
        for _ in 0..4 {
            model
                .run(|dev, _, m| {
                    dev.fill(&mut m.g, dev.rank() as f32)?;
                    dev.all_reduce(&mut m.g, ReduceOp::Sum)?;
                    dev.axpy(1.0, &m.g, &mut m.w)
                })
                .unwrap();
        }
        let w = pool.run(|dev, _| dev.download(&model.borrow(dev)?.w)).unwrap();
        assert_eq!(w, vec![vec![1.0 + 4.0 * (n * (n - 1) / 2) as f32; 10]; n]);
        // A gang of some devices may use its own.
        assert_eq!(pool.on(&[1]).run(|dev, _| dev.download(&model.borrow(dev)?.g)).unwrap()[0].len(), 10);
    }

    // Replicas that drift apart silently are worse than an error.
    2: fn what_a_failed_scope_has_written_is_poisoned(gpus) {
        let pool = gpus.pool(2);
        let mut state = pool.per_device(|_, _| Ok(0)).unwrap();
        let untouched = pool.per_device(|_, _| Ok(7)).unwrap();
        let fail = |state: &mut PerDevice<i32>, how: usize| {
            state.run(|dev, _, x| {
                *x += 1;
                assert_eq!(*untouched.borrow(dev)?, 7);
                match (dev.index(), how) {
                    (0, _) => Ok(()),
                    (_, 0) => Err(Error::custom("half done")),
                    _ => panic!("half done"),
                }
            })
        };
        for how in [0, 1] {
            failure(fail(&mut state, how));
            // On both devices, since the step was of both.
            for device in [0, 1] {
                for error in [
                    failure(pool.on(&[device]).run(|dev, _| state.borrow(dev).map(drop))),
                    failure(pool.on(&[device]).run(|dev, _| state.borrow_mut(dev).map(drop))),
                ] {
                    assert!(matches!(error, Error::Poisoned { device: d, .. } if d == device), "{error}");
                }
            }
            assert!(matches!(failure(state.run(|_, _, _| Ok(()))), Error::Poisoned { .. }));
            // What was only read is not.
            assert_eq!(pool.run(|dev, _| Ok(*untouched.borrow(dev)?)).unwrap(), [7, 7]);
            if how == 0 {
                state.clear_poison().unwrap();
                assert_eq!(state.run(|_, _, x| Ok(*x)).unwrap(), [1, 1]);
            } else {
                state.reset(|dev, _| Ok(dev.index() as i32 * 100)).unwrap();
                assert_eq!(state.run(|_, _, x| Ok(*x)).unwrap(), [0, 100]);
            }
        }
        // Within the failing scope the state is the closure's own still.
        failure(pool.run(|dev, _| {
            drop(state.borrow_mut(dev)?);
            if dev.index() == 1 {
                return Err(Error::custom("later"));
            }
            let _ = dev.barrier();
            assert_eq!(*state.borrow(dev)?, 0);
            Ok(())
        }));
        assert!(matches!(failure(state.run(|_, _, _| Ok(()))), Error::Poisoned { .. }));
    }

    // A device is at the next scope while its peer fails the one before: that the later one went well heals nothing.
    2: fn the_next_scope_does_not_hide_what_a_failing_one_has_written(gpus) {
        let pool = gpus.pool(2);
        let mut state = pool.per_device(|_, _| Ok(0)).unwrap();
        let (written, next) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|threads| {
            let first = threads.spawn(|| {
                pool.run(|dev, _| {
                    *state.borrow_mut(dev)? += 1;
                    if dev.index() == 1 {
                        written.store(true, Release);
                        until("the next scope has run", || next.load(Acquire))?;
                        return Err(Error::custom("half done"));
                    }
                    Ok(())
                })
            });
            until("the first scope is at work", || written.load(Acquire)).unwrap();
            // Twice, since each of these scopes is one that wrote.
            for found in [1, 2] {
                let borrowed = pool.on(&[0]).run(|dev, _| {
                    let mut x = state.borrow_mut(dev)?;
                    *x += 1;
                    Ok(*x - 1)
                });
                assert_eq!(borrowed.unwrap(), [found]);
            }
            next.store(true, Release);
            assert_eq!(failure(first.join().unwrap()).to_string(), "half done");
        });
        for device in [0, 1] {
            let error = failure(pool.on(&[device]).run(|dev, _| state.borrow(dev).map(drop)));
            assert!(matches!(error, Error::Poisoned { device: d, .. } if d == device), "{error}");
        }
        state.clear_poison().unwrap();
        assert_eq!(state.run(|_, _, x| Ok(*x)).unwrap(), [3, 1]);
    }

    // Some devices have a new value then, others the old one.
    2: fn a_reset_that_fails_half_way_is_poison(gpus) {
        let pool = gpus.pool(2);
        let mut state = pool.per_device(|_, _| Ok(1)).unwrap();
        let first = failure(state.reset(|dev, _| {
            if dev.index() == 0 {
                return Ok(2);
            }
            // Not before the other has its value.
            thread::sleep(std::time::Duration::from_millis(30));
            Err(Error::custom("no data for device 1"))
        }));
        assert_eq!(first.to_string(), "no data for device 1");
        for device in 0..2 {
            let error = failure(state.on(&[device]).run(|_, _, x| Ok(*x)));
            assert!(matches!(error, Error::Poisoned { device: found, .. } if found == device), "{error}");
        }
        state.reset(|_, _| Ok(3)).unwrap();
        assert_eq!(state.run(|_, _, x| Ok(*x)).unwrap(), [3, 3]);
    }

    2: fn state_that_could_not_be_made_is_no_state(gpus) {
        let pool = gpus.pool(2);
        let dropped = Arc::new(Mutex::new(Vec::new()));
        let error = failure(pool.per_device(|dev, _| match dev.index() {
            0 => Ok(Witness(dropped.clone())),
            _ => Err(Error::custom("no")),
        }));
        assert_eq!(error.to_string(), "no");
        pool.run(|_, _| Ok(())).unwrap();
        assert_eq!(dropped.lock().len(), 1);
    }

    2: fn a_gang_of_some_devices_has_its_own_values_only(gpus) {
        let pool = gpus.pool(2);
        let mut state = pool.per_device(|dev, _| Ok(10 * dev.index())).unwrap();
        let found = state.on(&[1]).run(|dev, shard, x| {
            *x += 1;
            Ok((dev.index(), dev.rank(), shard.count(), *x))
        });
        assert_eq!(found.unwrap(), [(1, 0, 1, 11)]);
        assert_eq!(state.on(&[1, 0]).run(|_, _, x| Ok(*x)).unwrap(), [11, 0]);
        let error = failure(state.on(&[2]).run(|_, _, _| Ok(())));
        assert!(matches!(error, Error::InvalidArgument { op: "run", .. }), "{error}");
        // Only what was borrowed in the scope that failed is poisoned.
        let error = failure(state.on(&[1]).run(|_, _, _| Err::<(), _>(Error::custom("no"))));
        assert_eq!(error.to_string(), "no");
        assert_eq!(state.on(&[0]).run(|_, _, x| Ok(*x)).unwrap(), [0]);
        assert!(matches!(failure(state.on(&[1]).run(|_, _, x| Ok(*x))), Error::Poisoned { device: 1, .. }));
    }

    2: fn try_run_carries_the_callers_own_error(gpus) {
        let pool = gpus.pool(2);
        let mut state = pool.per_device(|dev, _| Ok(dev.index())).unwrap();
        let told = Mutex::new(None);
        let found: anyhow::Result<Vec<usize>> = state.try_run(|_, _, x| Ok(*x));
        assert_eq!(found.unwrap(), [0, 1]);
        let failed: anyhow::Result<Vec<()>> = state.try_run(|dev, _, x| {
            anyhow::ensure!(*x == 0, "{} is too much", *x);
            let error = failure(dev.barrier());
            *told.lock() = Some(error.to_string());
            Err(error.into())
        });
        assert_eq!(failed.unwrap_err().to_string(), "1 is too much");
        let told = told.into_inner().unwrap();
        assert!(told.contains("1 is too much"), "{told}");
        let poisoned: anyhow::Result<Vec<usize>> = state.try_run(|_, _, x| Ok(*x));
        assert!(matches!(poisoned.unwrap_err().downcast_ref(), Some(Error::Poisoned { .. })));
    }

    2: fn state_of_another_pool_is_refused(gpus) {
        let (one, two) = (gpus.pool(1), gpus.pool(1));
        let state = one.per_device(|_, _| Ok(5)).unwrap();
        let line = std::panic::Location::caller().line() + 1;
        let error = failure(two.run(|dev, _| state.borrow(dev).map(|x| *x)));
        assert!(matches!(error, Error::WrongPool { device: 0, site, .. } if site.line() == line), "{error}");
        assert!(matches!(failure(two.run(|dev, _| state.borrow_mut(dev).map(drop))), Error::WrongPool { .. }));
        assert_eq!(one.run(|dev, _| Ok(*state.borrow(dev)?)).unwrap(), [5]);
    }

    1: fn values_that_panic_when_dropped_harm_nobody(gpus) {
        struct Bomb(Arc<AtomicUsize>);
        impl Drop for Bomb {
            fn drop(&mut self) {
                self.0.fetch_add(1, Relaxed);
                panic!("dropping panics");
            }
        }
        let n = gpus.up_to(2);
        let pool = gpus.pool(n);
        let drops = Arc::new(AtomicUsize::new(0));
        for round in 1..4 {
            drop(pool.per_device(|_, _| Ok(Bomb(drops.clone()))).unwrap());
            assert_eq!(pool.run(|dev, _| dev.exchange(dev.rank())).unwrap().len(), n);
            assert_eq!(drops.load(Relaxed), round * n);
        }
        // Left behind by a forgotten handle: they go with the pool.
        let (left, more) =
            (pool.per_device(|_, _| Ok(Bomb(drops.clone()))), pool.per_device(|_, _| Ok(Bomb(drops.clone()))));
        std::mem::forget((left.unwrap(), more.unwrap()));
        pool.close().unwrap();
        assert_eq!(drops.load(Relaxed), 5 * n);
    }

    1: fn state_may_own_streams_buffers_and_other_state(gpus) {
        let pool = gpus.pool(1);
        let mut state = pool
            .per_device(|dev, _| {
                let stream = dev.stream()?;
                let x = dev.on(&stream).upload(&[1.0f32; 100])?;
                Ok((stream, RefCell::new(x)))
            })
            .unwrap();
        let inner = pool.per_device(|_, _| Ok(1u8)).unwrap();
        let outer = pool.per_device(|_, _| Ok(RefCell::new(None::<PerDevice<u8>>))).unwrap();
        let parked = Mutex::new(Some(inner));
        pool.run(|dev, _| {
            *outer.borrow(dev)?.borrow_mut() = parked.lock().take();
            Ok(())
        })
        .unwrap();
        for _ in 0..3 {
            state.run(|dev, _, (stream, x)| dev.on(stream).scale(&mut *x.borrow_mut(), 2.0)).unwrap();
        }
        assert_eq!(state.run(|dev, _, (_, x)| dev.download(&*x.borrow())).unwrap(), [[8.0; 100]]);
        drop(outer);
        pool.close().unwrap();
        drop(state);
    }

    1: fn many_handles_come_and_go(gpus) {
        let pool = gpus.pool(1);
        for i in 0..200 {
            let state = pool.per_device(|dev, _| dev.upload(&[i])).unwrap();
            assert_eq!(pool.run(|dev, _| dev.download(&*state.borrow(dev)?)).unwrap(), [[i]]);
        }
        pool.run(|_, _| Ok(())).unwrap();
        assert_eq!(pool.run(|dev, _| Ok(dev.stats().in_use)).unwrap(), [0]);
    }

    /// The state keeps no pool. Its scope may get the last one as a result, which the failure of another device drops.
    2: fn a_result_that_fails_its_scope_ends_the_pool(gpus) {
        let pool = gpus.pool(2);
        let mut state = pool.per_device(|_, _| Ok(())).unwrap();
        let parked = Mutex::new(Some(pool));
        let failed = state.run(|dev, _, ()| match parked.lock().take_if(|_| dev.index() == 0) {
            None => Err(Error::custom(format!("device {}", dev.index()))),
            pool => Ok(pool),
        });
        assert!(failure(failed).to_string().contains("device 1"));
        assert!(parked.lock().is_none());
        assert!(matches!(failure(state.run(|_, _, ()| Ok(()))), Error::Closed));
    }
}
