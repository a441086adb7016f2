//! Buffers outlive their pool, their scope, their thread; pools end wherever they end; what is left is told. (PyTorch
//! `test_tensor_delete_after_allocator_delete`; RMM `SharedOwnership`, `process_is_exiting_shutdown_test`, `tracking`
//! adaptor; snmalloc `teardown`; mimalloc `heap_destroy`; cubecl `find_stale_descriptor_returns_not_found`.)

use crate::{
    on_both,
    rig::{Gate, KIB, MIB, Rng, assert_at_rest, bytes_of, on_backings},
    support::{Gpus, builder, failure, guarded, in_a_process, slow_add, task},
};
use gpu_pool::{DeviceBuffer, Error, GpuPool};
use parking_lot::Mutex;
use std::{panic::Location, sync::Arc, thread, time::Duration};

on_both! {
    // PyTorch: test_tensor_delete_after_allocator_delete; RMM: SharedOwnership. Small ones, large ones, some freed
    // before, some while, some after; on threads of all kinds.
    1: fn buffers_outlive_their_pool_on_any_thread(gpus) {
        on_backings(|backing| {
            for round in 0..4 {
                let n = gpus.up_to(2);
                let pool = gpus.builder(n).memory_backing(backing).build().unwrap();
                let mut rng = Rng(round);
                let made = pool.run(|dev, _| {
                    let mut rng = Rng(round + dev.rank() as u64);
                    (0..60).map(|_| dev.zeros::<u8>(rng.size(20))).collect::<Result<Vec<_>, _>>()
                });
                let mut made: Vec<_> = made.unwrap().into_iter().flatten().collect();
                let mut take = |some: usize| -> Vec<DeviceBuffer<u8>> {
                    (0..some).map(|_| made.swap_remove(rng.below(made.len()))).collect()
                };
                let (before, during, after) = (take(10), take(20), take(20));
                drop(before);
                let freeing = thread::spawn(move || drop(during));
                match round % 2 {
                    0 => pool.close().unwrap(),
                    _ => drop(pool),
                }
                freeing.join().unwrap();
                // On a thread of another pool's device, and on one that knows of no device.
                let (other, after) = (gpus.pool(1), Mutex::new(after));
                other.run(|_, _| { after.lock().drain(..10).for_each(drop); Ok(()) }).unwrap();
                let after = after.into_inner();
                thread::spawn(move || drop(after)).join().unwrap();
                assert!(made.iter().all(|buffer| buffer.device() < n));
                drop(made);
                assert_at_rest(&other);
            }
        });
    }

    // A pool ends on a device thread, with its buffers: its own cannot wait for itself.
    1: fn a_pool_ends_on_a_device_thread(gpus) {
        let outer = gpus.pool(1);
        for _ in 0..5 {
            let inner = gpus.pool(1);
            let buffers = inner
                .run(|dev, _| (1..20).map(|i| dev.zeros::<u8>(i * 50 * KIB)).collect::<Result<Vec<_>, _>>())
                .unwrap();
            let both = Mutex::new(Some((inner, buffers)));
            outer
                .run(|_, _| {
                    let (inner, buffers) = both.lock().take().unwrap();
                    drop(inner);
                    drop(buffers);
                    Ok(())
                })
                .unwrap();
        }
        // On its own: the pool is the last thing that its own closure holds.
        let own = Arc::new(Mutex::new(None));
        let pool = Arc::new(gpus.pool(1));
        *own.lock() = Some(pool.clone());
        let held = pool.run(|dev, _| {
            let buffer = bytes_of(dev, MIB)?;
            drop(own.lock().take());
            Ok(buffer)
        });
        drop(pool);
        drop(held);
        assert_at_rest(&outer);
    }

    // The stream works on it still when its last handle goes, and then the pool goes.
    1: fn a_pool_ends_while_freed_memory_is_used(gpus) {
        on_backings(|backing| {
            for _ in 0..3 {
                let pool = gpus.builder(1).memory_backing(backing).build().unwrap();
                let held = pool.run(|dev, _| {
                    let side = dev.stream()?;
                    let mut x = dev.on(&side).zeros::<u32>(MIB)?;
                    let keep = x.copy_to(dev)?;
                    slow_add(&dev.on(&side), &mut x, 1, 5000)?;
                    Ok(keep)
                });
                // The checker would refuse to give back what is in use, and say so.
                pool.close().unwrap();
                drop(held);
            }
        });
    }

    // cubecl: find_stale_descriptor_returns_not_found, held_binding_survives_explicit_cleanup_renumber. A handle of a
    // pool that is gone is refused by another that has the same devices.
    1: fn handles_of_a_pool_that_is_gone(gpus) {
        let old = gpus.pool(1);
        let buffer = old.run(|dev, _| dev.upload(&[1u32; 100])).unwrap().remove(0);
        old.close().unwrap();
        let new = gpus.pool(1);
        let error = failure(new.run(|dev, _| dev.download(&buffer)));
        assert!(matches!(error, Error::WrongPool { .. }), "{error}");
        drop(buffer);
        assert_at_rest(&new);
        // What lives stays what it is, whatever is cleaned up around it.
        new.run(|dev, _| {
            let held = dev.upload(&[7u32; 1000])?;
            let around = (0..50).map(|_| bytes_of(dev, 4000)).collect::<Result<Vec<_>, _>>()?;
            drop(around);
            dev.trim()?;
            let _again = dev.upload(&[8u32; 3000])?;
            assert_eq!(dev.download(&held)?, [7; 1000]);
            Ok(())
        })
        .unwrap();
    }

    // RMM: AllocationsLeftWithStacks, LogOutstandingAllocations, AllFreed; the crate's `GpuPool::leaks`.
    2: fn what_is_left_is_told_by_call_site(gpus) {
        let pool = gpus.builder(2).record_memory(true).build().unwrap();
        assert!(pool.leaks().unwrap().is_empty(), "{}", pool.leaks().unwrap());
        let line = Location::caller().line() + 2;
        let some =
            pool.run(|dev, _| (0..3).map(|_| dev.zeros::<u8>(100 * KIB)).collect::<Result<Vec<_>, _>>()).unwrap();
        let one = pool.on(&[1]).run(|dev, _| dev.upload(&[0u8; 5000])).unwrap();
        let report = pool.leaks().unwrap();
        let found: Vec<_> = report
            .leaks
            .iter()
            .map(|leak| {
                let site = leak.site.as_ref().unwrap();
                assert!(site.file.ends_with("lifetime.rs"), "{site}");
                (leak.device, site.op.to_string(), site.line - line, leak.blocks)
            })
            .collect();
        let expected = [(0, "zeros", 0, 3), (1, "zeros", 0, 3), (1, "upload", 1, 1)];
        assert_eq!(found, expected.map(|(device, op, line, blocks)| (device, op.to_owned(), line, blocks)));
        assert!(report.bytes() >= 600 * KIB as u64 && report.to_string().contains("lifetime.rs"), "{report}");
        drop((some, one));
        assert!(pool.leaks().unwrap().is_empty(), "{}", pool.leaks().unwrap());
        pool.close().unwrap();
    }

    // The counters of all devices without a scope.
    2: fn the_pools_counters_are_those_of_the_devices(gpus) {
        let pool = gpus.pool(2);
        let held = pool.run(|dev, _| bytes_of(dev, (1 + dev.rank()) * MIB)).unwrap();
        let of_pool = pool.memory_stats();
        let of_devices = pool.run(|dev, _| Ok(dev.stats())).unwrap();
        for (pool, device) in of_pool.iter().zip(&of_devices) {
            assert_eq!(
                (pool.in_use, pool.requested, pool.reserved),
                (device.in_use, device.requested, device.reserved)
            );
        }
        drop(held);
        assert_at_rest(&pool);
    }

    // Scopes end while streams work on what was freed: the next one gets it only when they are done.
    1: fn a_scope_ends_with_freed_memory_in_use(gpus) {
        let pool = gpus.builder(1).memory_limit(8 << 20).build().unwrap();
        for round in 0..5u32 {
            let gate = Gate::new(gpus);
            thread::scope(|s| {
                s.spawn(|| {
                    thread::sleep(Duration::from_millis(10));
                    gate.open();
                });
                pool.run(|dev, _| {
                    let mut x = dev.zeros::<u32>(MIB)?;
                    gate.hold(dev, &mut x)?;
                    dev.fill(&mut x, 99)
                })
                .unwrap();
            });
            let found = pool.run(|dev, _| dev.download(&dev.upload(&vec![round; 3 * MIB / 2])?)).unwrap();
            assert!(found[0].iter().all(|&x| x == round), "{round}");
        }
    }
}

// ---- the end of the process -----------------------------------------------------------------------------------------

/// RMM: process_is_exiting_shutdown_test; snmalloc: teardown. The process ends with live buffers, in statics, in
/// thread-locals, on device threads, in pools that nobody closes; by returning from `main` and by `exit`.
#[test]
fn process_exit_after_driver_shutdown() {
    for way in ["static", "exit", "leaked"] {
        in_a_process("lifetime::ends_with_live_buffers", way);
    }
}

/// The process that ends.
#[test]
fn ends_with_live_buffers() {
    static HELD: Mutex<Vec<DeviceBuffer<u8>>> = Mutex::new(Vec::new());
    static POOL: Mutex<Option<GpuPool>> = Mutex::new(None);
    thread_local! {
        static LOCAL: Mutex<Vec<DeviceBuffer<u8>>> = const { Mutex::new(Vec::new()) };
    }
    let Some(way) = task() else { return };
    let pool = builder().host(2).build().unwrap();
    let made =
        pool.run(|dev, _| (0..20).map(|i| dev.zeros::<u8>(i * 30 * KIB)).collect::<Result<Vec<_>, _>>()).unwrap();
    let mut made: Vec<_> = made.into_iter().flatten().collect();
    LOCAL.with(|local| local.lock().extend(made.drain(..10)));
    HELD.lock().extend(made.drain(..10));
    let parked = Mutex::new(made);
    // Thread-local on a device thread.
    pool.run(|_, _| {
        let some = parked.lock().pop();
        LOCAL.with(|local| local.lock().extend(some));
        Ok(())
    })
    .unwrap();
    match way.as_str() {
        "static" => *POOL.lock() = Some(pool),
        "leaked" => std::mem::forget((pool, parked)),
        _ => std::process::exit(0),
    }
}

/// FBGEMM#530, xgboost#4194: a free on a thread without a context silently made one on device 0. In a process of its
/// own, with a pool of device 1 alone: nothing may touch device 0, whoever drops what.
#[cfg(feature = "cuda")]
#[test]
fn drop_on_a_thread_with_no_context_creates_none() {
    use cudarc::driver::sys;
    if gpu_pool::extend::driver::cuda::device_count().unwrap_or(0) < 2 {
        println!("skipped: needs 2 CUDA devices");
        return;
    }
    if task().is_none() {
        return in_a_process("lifetime::drop_on_a_thread_with_no_context_creates_none", "alone");
    }
    let pool = builder().cuda().devices(&[1]).build().unwrap();
    let held =
        pool.run(|dev, _| (0..40).map(|i| dev.zeros::<u8>(i * 100 * KIB)).collect::<Result<Vec<_>, _>>()).unwrap();
    let mut held: Vec<_> = held.into_iter().flatten().collect();
    let late = held.split_off(20);
    let state_of_this_thread = || {
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver was initialised by the pool; the pointer is to a live local.
        let called = unsafe { sys::cuCtxGetCurrent(&mut context) };
        assert_eq!(called, sys::CUresult::CUDA_SUCCESS);
        context.is_null()
    };
    thread::scope(|s| {
        s.spawn(|| {
            drop(held);
            assert!(state_of_this_thread(), "a free has left a context behind on this thread");
        });
    });
    drop(pool);
    thread::spawn(move || drop(late)).join().unwrap();
    let (mut flags, mut active) = (0, 0);
    // SAFETY: as above.
    let called = unsafe { sys::cuDevicePrimaryCtxGetState(0, &mut flags, &mut active) };
    assert_eq!((called, active), (sys::CUresult::CUDA_SUCCESS, 0), "somebody has made a context on device 0");
}

/// Pools that come and go: the device has all of its memory again each time. (snmalloc `teardown`, mimalloc
/// `heap_destroy`.)
#[test]
fn pools_come_and_go() {
    fn come_and_go(_: Gpus) {
        for round in 0..20 {
            // 64 MiB each: a leak of a part would be seen in a few rounds, were the devices the same. They are not, so
            // it is the checker and the counters that see it; what a pool leaves behind in the process, the address
            // space does.
            let pool = builder().host(2).software_memory(64 << 20).build().unwrap();
            let held = pool.run(|dev, _| bytes_of(dev, 50 * MIB)).unwrap();
            if round % 2 == 0 {
                drop(held);
                pool.close().unwrap();
            } else {
                pool.close().unwrap();
                drop(held);
            }
        }
    }
    crate::support::on_host(1, come_and_go);
    // Also side by side.
    guarded(|| {
        thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..5 {
                        let pool = builder().host(1).build().unwrap();
                        drop(pool.run(|dev, _| bytes_of(dev, 3 * MIB)).unwrap());
                    }
                });
            }
        });
    });
}
