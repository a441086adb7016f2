//! Everything that can go wrong: it is reported in words that name device and place, nobody hangs, and the pool goes on.

#[path = "../support/mod.rs"]
mod support;

use gpu_pool::{AsViewMut, Device, DeviceBuffer, Error, GpuPool, LaunchDims, Module, ReduceOp, kernel};
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::*},
    mpsc,
};
use std::{panic::panic_any, thread, time::Duration};
use support::{failure, guarded, slow_add, until};

/// The pool does all that pools do.
#[track_caller]
fn assert_works(pool: &GpuPool) {
    let n = pool.devices();
    for _ in 0..3 {
        let sums = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.0f32; 50])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.barrier()?;
            assert_eq!(dev.exchange(dev.rank())?, (0..n).collect::<Vec<_>>());
            dev.download(&x)
        });
        assert_eq!(sums.unwrap(), vec![vec![n as f32; 50]; n]);
    }
}

fn reduce(dev: &Device, len: usize) -> Result<(), Error> {
    dev.all_reduce(&mut dev.zeros::<f32>(len)?, ReduceOp::Sum)
}

on_both! {
    // Each operation says where in the caller's code it was given the wrong buffer.
    2: fn a_buffer_of_another_device_is_refused_with_the_callers_line(gpus) {
        let pool = gpus.pool(2);
        let theirs = Arc::new(pool.run_on(&[1], |dev, _| dev.upload(&[1.0f32; 8])).unwrap().remove(0));
        let line = AtomicUsize::new(0);
        type Try<'a> = &'a (dyn Fn(&Device, &DeviceBuffer<f32>, &mut DeviceBuffer<f32>) -> Result<(), Error> + Sync);
        let attempts: [(&str, Try<'_>); 6] = [
            ("download", &|dev, x, _| dev.download(x).map(drop)),
            ("upload", &|dev, _, y| dev.upload_into(&[0.0; 8], y)),
            ("sum", &|dev, x, _| dev.sum(x).map(drop)),
            ("scale", &|dev, _, y| dev.scale(y, 2.0)),
            ("all_reduce", &|dev, _, y| dev.all_reduce(y, ReduceOp::Sum)),
            ("fill", &|dev, _, y| dev.fill(y, 1.0)),
        ];
        let mut own = pool.run_on(&[1], |dev, _| dev.zeros::<f32>(8)).unwrap().remove(0);
        for (name, attempt) in attempts {
            let target = Mutex::new(own);
            let error = failure(pool.run_on(&[0], |dev, _| attempt(dev, &theirs, &mut target.lock())));
            match error {
                Error::WrongDevice { op, buffer: 1, device: 0, site } => {
                    assert!(site.file() == file!(), "{name}: {site}");
                    assert!(!op.is_empty());
                    line.fetch_max(site.line() as usize, Relaxed);
                }
                other => panic!("{name}: {other}"),
            }
            own = target.into_inner();
        }
        let marked = std::panic::Location::caller().line() + 1;
        let error = failure(pool.run_on(&[0], |dev, _| dev.download(&*theirs)));
        assert!(matches!(error, Error::WrongDevice { op: "download", site, .. } if site.line() == marked), "{error}");
        // A copy between two other devices is nobody's here; with one side here, it is fine.
        assert_eq!(pool.run_on(&[0], |dev, _| dev.download(&theirs.copy_to(dev)?)).unwrap(), [[1.0; 8]]);
        let target = Mutex::new(own);
        let error = failure(pool.run_on(&[0], |dev, _| dev.copy(&theirs.peer(), &mut *target.lock())));
        assert!(matches!(error, Error::WrongDevice { op: "copy", .. }), "{error}");
        assert_works(&pool);
    }

    1: fn things_of_another_pool_are_refused(gpus) {
        let (one, two) = (gpus.pool(1), gpus.pool(1));
        let x = one.run(|dev, _| dev.upload(&[1.0f32])).unwrap().remove(0);
        let event = one.run(|dev, _| dev.record()).unwrap().remove(0);
        let pinned = one.pinned::<f32>(1).unwrap();
        let line = std::panic::Location::caller().line() + 1;
        let error = failure(two.run(|dev, _| dev.sum(&x)));
        assert!(matches!(error, Error::WrongPool { device: 0, site, .. } if site.line() >= line - 1), "{error}");
        for error in [
            failure(two.run(|dev, _| dev.download(&x))),
            failure(two.run(|dev, _| x.copy_to(dev))),
            failure(two.run(|dev, _| dev.wait(&event))),
            failure(two.run(|dev, _| dev.upload_pinned(&pinned))),
        ] {
            assert!(matches!(error, Error::WrongPool { .. }), "{error}");
        }
        assert_works(&two);
    }

    // pytorch#18055: errors that lost their traceback.
    2: fn a_panic_is_reported_with_its_place_and_peers_are_released(gpus) {
        let n = gpus.up_to(4);
        let pool = gpus.pool(n);
        for round in 0..5 {
            let told = Mutex::new(Vec::new());
            let line = std::panic::Location::caller().line() + 3;
            let error = failure(pool.run(|dev, _| {
                if dev.index() == 1 {
                    panic!("round {round} goes wrong");
                }
                // The others wait for device 1, which never comes.
                let waited = if dev.index() % 2 == 0 { reduce(dev, 10) } else { dev.barrier() };
                told.lock().push(failure(waited));
                // Nothing works any more in this scope, and each says why.
                told.lock().push(failure(dev.zeros::<u8>(1)));
                told.lock().push(failure(dev.check()));
                dev.synchronize()
            }));
            let Error::Panicked { device: 1, message, place } = &error else { panic!("{error}") };
            assert_eq!(message, &format!("round {round} goes wrong"));
            assert!(place.contains(file!()) && place.contains(&format!(":{line}:")), "{place}, not {line}");
            let told = told.into_inner();
            assert_eq!(told.len(), 3 * (n - 1));
            for error in told {
                let Error::Aborted { by: 1, cause } = &error else { panic!("{error}") };
                assert!(matches!(&**cause, Error::Panicked { device: 1, .. }), "{error}");
            }
            assert_works(&pool);
        }
    }

    2: fn an_error_is_returned_as_it_is_and_peers_are_released(gpus) {
        let pool = gpus.pool(2);
        for late in [false, true] {
            let error = failure(pool.run(|dev, _| {
                if dev.index() == 0 {
                    // Also when the peer waits already.
                    thread::sleep(Duration::from_millis(if late { 50 } else { 0 }));
                    return Err::<(), _>(Error::custom("the label column is missing"));
                }
                let error = failure(dev.barrier());
                assert!(matches!(&error, Error::Aborted { by: 0, .. }), "{error}");
                assert!(error.to_string().contains("label column"), "{error}");
                Err(error)
            }));
            assert_eq!(error.to_string(), "the label column is missing");
            assert!(matches!(error, Error::Custom(_)));
            assert_works(&pool);
        }
    }

    // Peers notice within the waits for their own streams, too.
    2: fn an_abort_reaches_those_who_wait_for_their_stream(gpus) {
        let pool = gpus.pool(2);
        for wait in 0..2 {
            let waiting = AtomicBool::new(false);
            let error = failure(pool.run(|dev, _| {
                if dev.index() == 1 {
                    until("the other waits", || waiting.load(SeqCst) || dev.check().is_err())?;
                    thread::sleep(Duration::from_millis(5));
                    return Err::<(), _>(Error::custom("no more"));
                }
                let mut x = dev.zeros::<u32>(10)?;
                slow_add(dev, &mut x, 1, 800_000)?;
                waiting.store(true, SeqCst);
                let waited = if wait == 0 { dev.synchronize() } else { dev.download(&x).map(drop) };
                let error = failure(waited);
                assert!(matches!(&error, Error::Aborted { by: 1, .. }), "{error}");
                // The buffer is dropped while the kernel runs.
                Err(error)
            }));
            assert_eq!(error.to_string(), "no more");
            // What was freed during the abort is used again only now.
            let clean = pool.run(|dev, _| dev.download(&dev.upload(&[7u32; 10])?));
            assert_eq!(clean.unwrap(), [[7; 10]; 2]);
            assert_works(&pool);
        }
    }

    2: fn a_member_that_ends_without_the_collective_is_a_mismatch(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.pool(n);
        let error = failure(pool.run(|dev, _| if dev.index() == 1 { Ok(()) } else { reduce(dev, 4) }));
        match &error {
            Error::Mismatch { what: "participation", b: 1, a_call, a_site, b_call, .. } => {
                assert!(a_call.contains("all_reduce(4 x F32, Sum)"), "{a_call}");
                assert!(a_site.file() == file!() && b_call.contains("ended"), "{error}");
            }
            other => panic!("{other}"),
        }
        assert_works(&pool);
    }

    // No buffer is touched, both call sites are named, every member gets the same error, and the scope may go on.
    2: fn mismatches_name_both_call_sites_and_touch_nothing(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.pool(n);
        let all = pool
            .run(|dev, _| {
                let last = dev.index() == n - 1;
                let mut x = dev.upload(&[5.0f32; 6])?;
                let mut wide = dev.upload(&[5.0f64; 6])?;
                let errors = vec![
                failure(match last {
                    false => dev.all_reduce(&mut x, ReduceOp::Sum),
                    true => dev.all_reduce(&mut x.slice_mut(1..), ReduceOp::Sum),
                }),
                failure(match last {
                    false => dev.all_reduce(&mut x, ReduceOp::Sum),
                    true => dev.all_reduce(&mut wide, ReduceOp::Sum),
                }),
                failure(match last {
                    false => dev.all_reduce(&mut x, ReduceOp::Sum),
                    true => dev.all_reduce(&mut x, ReduceOp::Avg),
                }),
                failure(match last {
                    false => dev.all_reduce(&mut x, ReduceOp::Sum),
                    true => dev.barrier(),
                }),
                failure(match last {
                    false => dev.exchange(1u32).map(drop),
                    true => dev.exchange(1i32).map(drop),
                }),
                ];
                assert_eq!(dev.download(&x)?, [5.0; 6]);
                assert_eq!(dev.download(&wide)?, [5.0; 6]);
                // The same scope goes on.
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                dev.barrier()?;
                assert_eq!(dev.download(&x)?, [5.0 * n as f32; 6]);
                Ok(errors)
            })
            .unwrap();
        let expected = ["count", "dtype", "reduce op", "operation", "dtype"];
        for errors in &all {
            for ((error, expected), first) in errors.iter().zip(expected).zip(&all[0]) {
                assert_eq!(error.to_string(), first.to_string());
                let Error::Mismatch { what, a: 0, a_site, b, b_site, .. } = error else { panic!("{error}") };
                assert_eq!((*what, *b), (expected, n - 1), "{error}");
                assert!(a_site.file() == file!() && b_site.file() == file!(), "{error}");
                assert_ne!(a_site.line(), b_site.line(), "{error}");
            }
        }
        assert_works(&pool);
    }

    // jax#38503, nccl#2353: hangs without a word. Here: who is missing, and the pool works again.
    2: fn a_member_that_never_comes_is_named(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.builder(n).timeout(Duration::from_millis(300)).build().unwrap();
        for _ in 0..2 {
            let error = failure(pool.run(|dev, _| {
                if dev.index() == 1 {
                    // Busy with something on the host; but it looks whether it is still wanted.
                    return until("the others have given up", || dev.check().is_err());
                }
                dev.barrier()
            }));
            assert!(matches!(&error, Error::Timeout { missing, op: "barrier", .. } if missing == &[1]), "{error}");
            assert_works(&pool);
        }
    }

    // However often a member asks for those who have left: no ring fills up, nobody waits.
    2: fn those_who_have_left_are_not_waited_for(gpus) {
        let pool = gpus.builder(2).timeout(Duration::from_secs(5)).build().unwrap();
        for stays in [0, 1] {
            pool.run(|dev, _| {
                for _ in 0..if dev.rank() == stays { 50 } else { 0 } {
                    let error = failure(reduce(dev, 3));
                    assert!(matches!(error, Error::Mismatch { what: "participation", .. }), "{error}");
                }
                Ok(())
            })
            .unwrap();
            assert_works(&pool);
        }
    }

    // A thread that a closure starts is no device thread, so this cannot be refused; but it comes to an end.
    1: fn a_scope_that_waits_for_itself_in_a_roundabout_way_is_a_timeout(gpus) {
        let pool = gpus.builder(1).timeout(Duration::from_millis(200)).build().unwrap();
        let error = failure(pool.run(|_, _| {
            thread::scope(|s| s.spawn(|| pool.run(|_, _| Ok(()))).join()).expect("it does not panic").map(drop)
        }));
        assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[0]), "{error}");
        assert_works(&pool);
    }

    1: fn scopes_within_scopes_are_refused(gpus) {
        let n = gpus.up_to(2);
        let (pool, other) = (gpus.pool(n), gpus.pool(1));
        let closing = Mutex::new([Some(gpus.pool(1)), Some(gpus.pool(1))]);
        let nested = pool
            .run(|dev, _| {
                let mut own = vec![
                    failure(pool.run(|_, _| Ok(()))),
                    failure(other.run(|_, _| Ok(()))),
                    failure(pool.run_on(&[0], |_, _| Ok(()))),
                    failure(pool.run_mut(&mut vec![0u8; n], 1, |_, _, _| Ok(()))),
                    failure(pool.per_device(|_, _| Ok(()))),
                    failure(support::builder().host(1).build()),
                    failure(pool.survivors()),
                    failure(GpuPool::scope(|_, _| Ok(()))),
                ];
                let victim = closing.lock()[dev.index()].take().unwrap();
                own.push(failure(victim.close()));
                Ok(own)
            })
            .unwrap();
        for error in nested.iter().flatten() {
            assert!(matches!(error, Error::NestedScope { .. }), "{error}");
        }
        assert_works(&pool);
        assert_works(&other);
    }

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

    1: fn a_memory_limit_holds_and_nothing_is_lost(gpus) {
        const MIB: usize = 1 << 20;
        let pool = gpus.builder(1).memory_limit(64 * MIB as u64).build().unwrap();
        pool.run(|dev, _| {
            let kept = dev.upload(&[3u8; 100])?;
            let half = dev.zeros::<u8>(32 * MIB)?;
            let error = failure(dev.zeros::<u8>(48 * MIB));
            match error {
                Error::OutOfMemory { device: 0, op: "zeros", requested, in_use, capacity, .. } => {
                    assert!(requested >= 48 * MIB as u64 && capacity == 64 * MIB as u64, "{requested} {capacity}");
                    assert!(in_use >= 32 * MIB as u64 && in_use <= 34 * MIB as u64, "{in_use}");
                }
                other => panic!("{other}"),
            }
            // What fits is still served, from what is there.
            let small: Vec<_> = (0..100).map(|_| dev.zeros::<u8>(100)).collect::<Result<_, _>>()?;
            drop(half);
            let large = dev.zeros::<u8>(48 * MIB)?;
            assert!(dev.stats().reserved <= 64 * MIB as u64, "{:?}", dev.stats());
            assert_eq!(dev.download(&kept)?, [3; 100]);
            drop((small, large, kept));
            Ok(())
        })
        .unwrap();
        assert_works(&pool);
    }

    // Memory that failed requests have searched is still there for small ones.
    1: fn running_out_does_not_lose_the_free_parts_of_a_slab(gpus) {
        const MIB: usize = 1 << 20;
        // Two chunks of 2 MiB: one is a slab for small blocks, the other a buffer of its own.
        let pool = gpus.builder(1).memory_limit(4 * MIB as u64).build().unwrap();
        pool.run(|dev, _| {
            let small = dev.upload(&[1u8; 1000])?;
            let large = dev.zeros::<u8>(2 * MIB)?;
            for _ in 0..3 {
                let error = failure(dev.zeros::<u8>(3 * MIB));
                assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
                // The slab has room for as many again.
                let more: Vec<_> = (0..64).map(|_| dev.zeros::<u8>(1000)).collect::<Result<_, _>>()?;
                drop(more);
            }
            assert_eq!(dev.download(&small)?, [1; 1000]);
            drop((small, large));
            // And a slab that is quite free can become something else.
            drop(dev.zeros::<u8>(4 * MIB)?);
            Ok(())
        })
        .unwrap();
    }

    1: fn a_kernel_whose_module_the_pool_does_not_have_is_not_found(gpus) {
        let pool = gpus.pool(1);
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(4)?;
            // SAFETY: the kernel is never found.
            unsafe { dev.launch(&STRAY, LaunchDims::cover(4), (&mut x,)) }
        }));
        match &error {
            Error::KernelNotFound { device: 0, kernel, why } => {
                assert!(kernel == "stray" && why.contains("Builder::module"), "{error}");
            }
            other => panic!("{other}"),
        }
        assert_works(&pool);
    }

    1: fn lengths_must_agree(gpus) {
        let pool = gpus.pool(1);
        pool.run(|dev, _| {
            let (mut x, mut pinned) = (dev.zeros::<f32>(4)?, dev.pinned::<f32>(3)?);
            let mut host = [0.0; 5];
            let y = dev.zeros::<f32>(5)?;
            for error in [
                failure(dev.upload_into(&[1.0; 5], &mut x)),
                failure(dev.download_into(&x, &mut host)),
                failure(dev.upload_pinned_into(&pinned, &mut x)),
                failure(dev.download_pinned(&x, &mut pinned)),
                failure(dev.copy(&y, &mut x)),
                failure(dev.axpy(1.0, &y, &mut x)),
            ] {
                assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            }
            // Such an error fails nobody but its call.
            dev.fill(&mut x, 1.0)?;
            assert_eq!(dev.download(&x)?, [1.0; 4]);
            Ok(())
        })
        .unwrap();
    }

    1: fn a_slice_out_of_range_panics_as_in_the_standard_library(gpus) {
        let pool = gpus.pool(1);
        let error = failure(pool.run(|dev, _| {
            let x = dev.zeros::<f32>(4)?;
            dev.download(&x.slice(2..6))
        }));
        assert!(matches!(&error, Error::Panicked { message, .. } if message.contains("2..6")), "{error}");
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(4)?;
            Ok(x.view_mut().split_at_mut(5).0.len())
        }));
        assert!(matches!(&error, Error::Panicked { .. }), "{error}");
        assert_works(&pool);
    }

    1: fn panic_payloads_of_any_kind(gpus) {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("the payload panics when it is dropped");
            }
        }
        let n = gpus.up_to(2);
        let pool = gpus.pool(n);
        for kind in 0..4 {
            let error = failure(pool.run(|dev, _| {
                if dev.index() + 1 < n {
                    return reduce(dev, 4);
                }
                match kind {
                    0 => panic_any(42),
                    1 => panic_any(String::from("owned")),
                    2 => panic_any("static"),
                    _ => panic_any(Bomb),
                }
            }));
            let Error::Panicked { device, message, .. } = &error else { panic!("{error}") };
            assert_eq!(*device, n - 1);
            let expected = ["a payload that is not text", "owned", "static", "a payload that is not text"];
            assert_eq!(message, expected[kind]);
            assert_works(&pool);
        }
    }

    // The first failure is reported; those that follow from it, or come at the same time, are not.
    2: fn everybody_may_fail_at_once(gpus) {
        let n = gpus.up_to(4);
        let pool = gpus.pool(n);
        for round in 0..30 {
            let error = failure(pool.run(|dev, _| -> Result<(), Error> {
                match (dev.index() + round) % 3 {
                    0 => panic!("panicked"),
                    1 => Err(Error::custom("failed")),
                    _ => reduce(dev, 7),
                }
            }));
            assert!(matches!(error, Error::Panicked { .. } | Error::Custom(_)), "{error}");
        }
        assert_works(&pool);
    }

    // What failed scopes leave behind in the rings between the devices must not fill them: here each of the later ranks
    // has told the others and heard nothing yet when the first fails.
    2: fn failed_meetings_leave_nothing_behind(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.builder(n).timeout(Duration::from_secs(5)).build().unwrap();
        for _ in 0..40 {
            let error = failure(pool.run(|dev, _| {
                if dev.rank() == 0 {
                    thread::sleep(Duration::from_millis(4));
                    return Err(Error::custom("too late"));
                }
                reduce(dev, 100)
            }));
            assert_eq!(error.to_string(), "too late");
        }
        assert_works(&pool);
    }

    // Failures of one caller's scopes are never seen by another's.
    2: fn failing_scopes_do_not_disturb_others(gpus) {
        let n = gpus.up_to(4);
        let pool = gpus.builder(n).timeout(Duration::from_secs(20)).build().unwrap();
        let broken = AtomicUsize::new(0);
        thread::scope(|s| {
            for caller in 0..6 {
                let (pool, broken) = (&pool, &broken);
                s.spawn(move || {
                    for round in 0..40 {
                        if caller % 3 == 0 {
                            let culprit = (caller + round) % n;
                            let error = failure(pool.run(|dev, _| {
                                match dev.rank() == culprit {
                                    true if round % 2 == 0 => Ok(()),
                                    true => Err(Error::custom("on purpose")),
                                    false => reduce(dev, 9).and_then(|()| dev.barrier()),
                                }
                            }));
                            let expected = if round % 2 == 0 { "participation" } else { "on purpose" };
                            assert!(error.to_string().contains(expected), "{error}");
                            broken.fetch_add(1, Relaxed);
                        } else {
                            let sums = pool.run(|dev, _| {
                                let mut x = dev.upload(&[round as f64; 9])?;
                                dev.all_reduce(&mut x, ReduceOp::Sum)?;
                                dev.barrier()?;
                                dev.download(&x)
                            });
                            assert_eq!(sums.unwrap(), vec![vec![(round * n) as f64; 9]; n]);
                        }
                    }
                });
            }
        });
        assert_eq!(broken.into_inner(), 80);
    }

    2: fn an_error_can_be_cloned_sent_and_shared(gpus) {
        static_assertions::assert_impl_all!(Error: Clone, Send, Sync, std::error::Error);
        let pool = gpus.pool(2);
        let error = failure(pool.run(|_, _| -> Result<(), Error> { Err(Error::custom(std::io::Error::other("disk"))) }));
        let copy = error.clone();
        assert_eq!(thread::spawn(move || copy.to_string()).join().unwrap(), "disk");
    }
}

static STRAY_MODULE: Module = Module::ptx(".version 7.5\n.target sm_75\n.address_size 64\n");
kernel! {
    static STRAY: "stray" in STRAY_MODULE, fn(x: &mut [u32]) |_dims| { x.fill(1) }
    static TWINLESS: "twinless" in STRAY_MODULE, fn(x: &mut [u32]);
    static CRASH: "crash" in STRAY_MODULE, fn(x: &mut [u32]) |_dims| {
        panic!("illegal address, so to speak, at {:?}", x.first());
    }
}

// ---- software GPUs only: faults that hardware does not have on demand ----------------------------------------------

fn host(count: usize) -> GpuPool {
    support::builder().host(count).module(&STRAY_MODULE).module(&support::MODULE).build().unwrap()
}

/// rules 2 and 8: a scope whose devices never become free is withdrawn, and says which were busy.
#[test]
fn a_queued_scope_is_withdrawn_when_its_devices_make_no_progress() {
    guarded(|| {
        let pool = support::builder().host(2).timeout(Duration::from_millis(200)).build().unwrap();
        let (inside, withdrawn) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|s| {
            let blocker = s.spawn(|| {
                pool.run_on(&[1], |_, _| {
                    inside.store(true, SeqCst);
                    until("the other scope is withdrawn", || withdrawn.load(SeqCst))
                })
            });
            until("the device is busy", || inside.load(SeqCst)).unwrap();
            // Device 0 starts, and waits for device 1, which never starts.
            let error = failure(pool.run(|dev, _| {
                let error = failure(dev.barrier());
                assert!(matches!(error, Error::Aborted { .. } | Error::Timeout { .. }), "{error}");
                Err::<(), _>(error)
            }));
            assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error}");
            // One that device 1 would have had to itself is never run at all.
            let ran = AtomicBool::new(false);
            let error = failure(pool.run_on(&[1], |_, _| {
                ran.store(true, SeqCst);
                Ok(())
            }));
            assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[1]), "{error}");
            withdrawn.store(true, SeqCst);
            blocker.join().unwrap().unwrap();
            assert_works(&pool);
            assert!(!ran.into_inner());
        });
    });
}

#[test]
fn a_software_gpu_runs_out_of_memory() {
    guarded(|| {
        const MIB: usize = 1 << 20;
        let pool = support::builder().host(2).software_memory(32 * MIB as u64).build().unwrap();
        pool.run(|dev, _| {
            let first = dev.upload(&vec![dev.index() as u8; 12 * MIB])?;
            for _ in 0..3 {
                match failure(dev.upload(&vec![0u8; 24 * MIB])) {
                    Error::OutOfMemory { device, op: "upload", requested, in_use, free, capacity, .. } => {
                        assert_eq!((device, capacity), (dev.index(), 32 * MIB as u64));
                        assert!(requested >= 24 * MIB as u64 && in_use >= 12 * MIB as u64 && free < 24 * MIB as u64);
                    }
                    other => panic!("{other}"),
                }
                // The next that fits is served; over and over, so nothing leaks.
                let fits = dev.upload(&vec![7u8; 14 * MIB])?;
                assert_eq!(dev.download(&fits.slice(MIB..MIB + 5))?, [7; 5]);
            }
            assert_eq!(dev.download(&first.slice(12 * MIB - 3..))?, [dev.index() as u8; 3]);
            assert!(matches!(failure(dev.zeros::<f64>(usize::MAX / 4)), Error::OutOfMemory { .. }));
            Ok(())
        })
        .unwrap();
        assert_works(&pool);
    });
}

/// One member's lack of memory fails a collective for all, and only that.
#[test]
fn no_memory_for_scratch_fails_the_gang_not_the_pool() {
    guarded(|| {
        const MIB: usize = 1 << 20;
        let pool = support::builder().host(2).software_memory(32 * MIB as u64).build().unwrap();
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<u8>(if dev.index() == 0 { 24 * MIB } else { 1 })?;
            let mut y = dev.zeros::<f32>(MIB)?;
            dev.fill(&mut x, 1)?;
            dev.all_reduce(&mut y, ReduceOp::Sum)?;
            let _hog = dev.zeros::<u8>(if dev.index() == 0 { 2 * MIB } else { 1 })?;
            let mut z = dev.zeros::<f32>(MIB / 2)?;
            dev.all_reduce(&mut z, ReduceOp::Sum)?;
            let mut all = dev.zeros::<f32>(2 * MIB)?;
            dev.all_reduce(&mut all, ReduceOp::Sum)
        }));
        assert!(matches!(&error, Error::OutOfMemory { device: 0, .. }), "{error}");
        assert_works(&pool);
    });
}

#[test]
fn too_little_memory_for_a_pool_is_an_error_of_build() {
    guarded(|| {
        let error = failure(support::builder().host(3).software_memory(1000).build());
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    });
}

#[test]
fn a_kernel_without_a_twin_needs_hardware() {
    guarded(|| {
        let pool = host(1);
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(4)?;
            // SAFETY: the kernel is never found.
            unsafe { dev.launch(&TWINLESS, LaunchDims::cover(4), (&mut x,)) }
        }));
        let text = error.to_string();
        assert!(matches!(error, Error::KernelNotFound { .. }) && text.contains("twin"), "{text}");
        assert_works(&pool);
    });
}

/// Rule 9. xmr-stak#2054: the bad GPU is named, and the others go on.
#[test]
fn a_lost_device_is_named_and_the_others_keep_working() {
    guarded(|| {
        let pool = host(3);
        let kept = pool.run(|dev, _| dev.upload(&[dev.index() as f32; 4])).unwrap();
        let error = failure(pool.run(|dev, _| {
            if dev.index() == 1 {
                let mut x = dev.zeros::<u32>(4)?;
                // SAFETY: the kernel touches nothing.
                unsafe { dev.launch(&CRASH, LaunchDims::cover(1), (&mut x,)) }?;
            }
            reduce(dev, 1000)?;
            dev.barrier()?;
            dev.synchronize()
        }));
        let Error::DeviceLost { device: 1, name, .. } = &error else { panic!("{error}") };
        assert!(name.contains("LAUNCH_FAILED") && name.contains("illegal address, so to speak"), "{name}");
        assert_eq!(pool.report().lost, [false, true, false]);
        // The device stays lost, whatever is asked of it,
        for _ in 0..2 {
            let error = failure(pool.run_on(&[1], |dev, _| dev.zeros::<u8>(1)));
            assert!(matches!(error, Error::DeviceLost { device: 1, .. }), "{error}");
            let error = failure(pool.run(|dev, _| dev.zeros::<u8>(1)));
            assert!(matches!(error, Error::DeviceLost { device: 1, .. }), "{error}");
        }
        // a gang of the others works on, with their data,
        let sums = pool.run_on(&[0, 2], |dev, _| {
            let mut x = kept[dev.index()].copy_to(dev)?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.download(&x)
        });
        assert_eq!(sums.unwrap(), [[2.0; 4]; 2]);
        // and they make a pool of their own.
        let rest = pool.survivors().unwrap();
        assert_eq!(rest.devices(), 2);
        assert_eq!(rest.run(|dev, _| Ok(dev.info().ordinal)).unwrap(), [0, 2]);
        assert_works(&rest);
        drop(kept);
        pool.close().unwrap();
        assert_works(&rest);
    });
}

/// One after the other, while peers wait for each in a collective.
#[test]
fn devices_are_lost_until_none_is_left() {
    guarded(|| {
        let mut pool = support::builder().host(3).module(&STRAY_MODULE).memory_limit(64 << 20).build().unwrap();
        for left in (0..3).rev() {
            let error = failure(pool.run(|dev, _| {
                if dev.rank() == 0 {
                    let mut x = dev.zeros::<u32>(1)?;
                    // SAFETY: the kernel touches nothing.
                    unsafe { dev.launch(&CRASH, LaunchDims::cover(1), (&mut x,)) }?;
                    return dev.synchronize();
                }
                reduce(dev, 10)
            }));
            assert!(matches!(error, Error::DeviceLost { device: 0, .. }), "{error}");
            match pool.survivors() {
                Ok(rest) => {
                    assert_eq!(rest.devices(), left);
                    assert_works(&rest);
                    // The settings go with it.
                    let error = failure(rest.run(|dev, _| dev.zeros::<u8>(100 << 20)));
                    assert!(matches!(error, Error::OutOfMemory { capacity, .. } if capacity == 64 << 20), "{error}");
                    pool = rest;
                }
                Err(error) => {
                    assert!(left == 0 && matches!(error, Error::NoDevice { .. }), "{left}: {error}");
                    return;
                }
            }
        }
        panic!("three devices died, and some are left");
    });
}

/// Many small kernels are progress, even if all of them together take longer than the deadline.
#[test]
fn a_long_queue_of_healthy_kernels_is_not_a_timeout() {
    guarded(|| {
        let pool =
            support::builder().host(1).module(&support::MODULE).timeout(Duration::from_millis(700)).build().unwrap();
        let x = pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(1)?;
            for _ in 0..64 {
                slow_add(dev, &mut x, 1, 25_000)?;
            }
            dev.synchronize()?;
            dev.download(&x)
        });
        assert_eq!(x.unwrap(), [[64]]);
    });
}

/// A stream that is stuck for longer than the deadline is reported; what it still uses is not given to anybody else.
#[test]
fn a_stream_that_takes_too_long_is_a_timeout_and_keeps_its_memory() {
    guarded(|| {
        let pool =
            support::builder().host(1).module(&support::MODULE).timeout(Duration::from_millis(150)).build().unwrap();
        let error = failure(pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(1 << 20)?;
            slow_add(dev, &mut x, 1, 900_000)?;
            Ok(())
        }));
        assert!(matches!(&error, Error::Timeout { device: 0, missing, .. } if missing.is_empty()), "{error}");
        // The same memory, on another stream: ordered behind what still runs.
        let mut tries = 0;
        let x = loop {
            let again = pool.run(|dev, _| {
                let other = dev.stream()?;
                let dev = dev.on(&other);
                dev.download(&dev.upload(&vec![5u32; 1 << 20])?)
            });
            tries += 1;
            match again {
                Ok(x) => break x,
                Err(Error::Timeout { .. }) if tries < 50 => {}
                Err(error) => panic!("{error}"),
            }
        };
        assert!(x[0].iter().all(|&x| x == 5));
    });
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
