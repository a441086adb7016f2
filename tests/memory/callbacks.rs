//! Who is out of memory asks the user's callback, once everything else has been tried. (RMM
//! `failure_callback_resource_adaptor`, PyTorch `test_notifies_oom`, CUDA.jl's reclaim levels and `retry_reclaim`.)

use crate::{
    on_both,
    rig::{MIB, assert_at_rest, assert_empty, bytes_of, check_books, limited, on_backings, refused},
    support::{all_are, failure},
};
use gpu_pool::{DeviceBuffer, Error};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::*},
    },
    thread,
};

type Cached = Arc<Mutex<Vec<DeviceBuffer<u8>>>>;

on_both! {
    // RMM: RetryAllocationOnce; PyTorch: test_notifies_oom. `true` asks for another attempt, of which there are a few.
    1: fn a_callback_is_asked_a_bounded_number_of_times(gpus) {
        on_backings(|backing| {
            for (answer, at_most) in [(false, 1), (true, 64)] {
                let asked = Arc::new(AtomicUsize::new(0));
                let counter = asked.clone();
                let pool = limited(gpus, 1, backing, 8 * MIB)
                    .on_out_of_memory(move |report| {
                        assert_eq!((report.device, report.requested), (0, 10 * MIB as u64));
                        counter.fetch_add(1, Relaxed);
                        answer
                    })
                    .build()
                    .unwrap();
                pool.run(|dev, _| {
                    for round in 1..=2 {
                        refused(bytes_of(dev, 10 * MIB));
                        let asked = asked.load(Relaxed);
                        assert!((round..=round * at_most).contains(&asked), "{answer}: {asked} times");
                        assert_eq!(answer, asked > round);
                    }
                    bytes_of(dev, 7 * MIB).map(drop)
                })
                .unwrap();
                assert_at_rest(&pool);
            }
        });
    }

    // The use of it: caches of the user's own, on this and on other devices. CUDA.jl: reclaim levels.
    2: fn a_callback_drops_buffers_of_this_and_of_other_devices(gpus) {
        on_backings(|backing| {
            let cached: Cached = Arc::default();
            let cache = cached.clone();
            let pool = limited(gpus, 2, backing, 16 * MIB)
                .on_out_of_memory(move |_| {
                    // One at a time, so that several attempts are made.
                    let dropped = cache.lock().pop();
                    dropped.is_some()
                })
                .build()
                .unwrap();
            for round in 0..3 {
                for _ in 0..2 {
                    let made = pool.run(|dev, _| Ok((bytes_of(dev, 6 * MIB)?, bytes_of(dev, 100)?))).unwrap();
                    cached.lock().extend(made.into_iter().flat_map(|(a, b)| [a, b]));
                }
                assert_eq!(cached.lock().len(), 8);
                pool.on(&[round % 2]).run(|dev, _| {
                    let x = dev.upload(&vec![5u8; 14 * MIB])?;
                    check_books(dev);
                    assert!(all_are(&dev.download(&x)?, 5));
                    Ok(())
                })
                .unwrap();
                assert!(cached.lock().len() <= 4);
                cached.lock().clear();
                assert_at_rest(&pool);
            }
        });
    }

    // Both devices at once, each other's buffers, in each other's callbacks.
    2: fn callbacks_of_several_devices_at_once(gpus) {
        on_backings(|backing| {
            let cached: Cached = Arc::default();
            let cache = cached.clone();
            let n = gpus.up_to(3);
            let pool = limited(gpus, n, backing, 8 * MIB)
                .on_out_of_memory(move |_| {
                    let dropped = std::mem::take(&mut *cache.lock());
                    !dropped.is_empty()
                })
                .build()
                .unwrap();
            pool.run(|dev, _| {
                for round in 0..40 {
                    let own = bytes_of(dev, 2 * MIB)?;
                    cached.lock().push(own);
                    match bytes_of(dev, 7 * MIB) {
                        Ok(buffer) => drop(buffer),
                        // Its own block had been dropped by a peer, and was not counted as dropped here.
                        Err(Error::OutOfMemory { .. }) => drop(bytes_of(dev, 100 + round)?),
                        Err(other) => return Err(other),
                    }
                }
                dev.barrier()?;
                cached.lock().clear();
                dev.barrier()?;
                bytes_of(dev, 8 * MIB)?;
                assert_empty(dev)
            })
            .unwrap();
        });
    }

    // RMM: DifferentExceptionTypes. A callback that panics is the user's panic; the pool is none the worse for it.
    1: fn a_callback_that_panics_harms_nothing(gpus) {
        on_backings(|backing| {
            let pool =
                limited(gpus, 1, backing, 8 * MIB).on_out_of_memory(|_| panic!("no memory, no fun")).build().unwrap();
            for _ in 0..2 {
                let error = failure(pool.run(|dev, _| {
                    let _live = bytes_of(dev, 5 * MIB)?;
                    bytes_of(dev, 5 * MIB).map(drop)
                }));
                assert!(matches!(&error, Error::Panicked { message, .. } if message.contains("no fun")), "{error}");
                assert_at_rest(&pool);
                pool.run(|dev, _| bytes_of(dev, 8 * MIB).map(drop)).unwrap();
            }
        });
    }

    // Memory that comes back from another thread while the device waits in the callback.
    1: fn what_others_free_meanwhile_is_found(gpus) {
        on_backings(|backing| {
            let (cached, freed): (Cached, _) = (Arc::default(), Arc::new(AtomicUsize::new(0)));
            let (cache, count) = (cached.clone(), freed.clone());
            let pool = limited(gpus, 1, backing, 12 * MIB)
                .on_out_of_memory(move |_| {
                    let gone = std::mem::take(&mut *cache.lock());
                    count.fetch_add(gone.len(), Relaxed);
                    thread::spawn(move || drop(gone)).join().is_ok()
                })
                .build()
                .unwrap();
            pool.run(|dev, _| {
                for _ in 0..10 {
                    let own = bytes_of(dev, 3 * MIB)?;
                    cached.lock().push(own);
                }
                assert!(freed.load(Relaxed) >= 6);
                Ok(())
            })
            .unwrap();
            cached.lock().clear();
            assert_at_rest(&pool);
        });
    }
}
