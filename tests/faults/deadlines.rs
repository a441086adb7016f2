//! What does not come to an end: who is missing is named, what is only slow is left alone, and the pool goes on.

use crate::{
    on_both,
    rig::{STRAY_MODULE, assert_works},
    support::{self, failure, guarded, slow_add, until},
};
use gpu_pool::{Error, LaunchDims, kernel};
use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::*},
        mpsc::channel,
    },
    thread,
    time::Duration,
};

on_both! {
    // jax#38503, nccl#2353: hangs without a word. Here: who is missing, and the pool works again.
    2: fn a_member_that_never_comes_is_named(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.builder(n).timeout(Duration::from_secs(1)).build().unwrap();
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

    // A closure that is stuck in something of the host: the others do not wait for its end, and know where it was last.
    2: fn a_member_stuck_in_a_channel_is_named_while_it_is_stuck(gpus) {
        let n = gpus.up_to(3);
        let pool = gpus.builder(n).timeout(Duration::from_secs(1)).build().unwrap();
        let ((release, released), (tell, told)) = (channel::<()>(), channel());
        let released = Mutex::new(released);
        let others = thread::spawn(move || {
            // All of them come while device 1 is stuck, which only this thread ends.
            let errors: Vec<Error> = (1..n).map(|_| told.recv_timeout(support::TIMEOUT / 4).unwrap()).collect();
            drop(release);
            errors
        });
        let line = line!() + 3;
        let error = failure(pool.run(|dev, _| {
            if dev.index() == 1 {
                drop(dev.upload(&[1.0f32])?);
                let _ = released.lock().unwrap().recv();
                return Ok(());
            }
            let error = dev.barrier().unwrap_err();
            tell.send(error.clone()).unwrap();
            Err(error)
        }));
        for error in others.join().unwrap().iter().chain([&error]) {
            let cause = match error { Error::Aborted { cause, .. } => cause, timeout => timeout };
            let Error::Timeout { missing, last_calls, .. } = cause else { panic!("{cause}") };
            assert_eq!(missing, &[1]);
            let of = |device| last_calls.iter().find(|call| call.device == device).unwrap();
            assert_eq!(last_calls.len(), n);
            assert_eq!((of(1).op, of(1).site.line(), of(1).site.file()), ("upload", line, file!()));
            assert_eq!((of(0).op, of(0).site.line()), ("barrier", line + 4));
            let text = format!("device 1: upload at {}:{line}:", file!());
            assert!(cause.to_string().contains(&text), "{cause}");
        }
        assert_works(&pool);
    }

    // A thread that a closure starts is no device thread, so this cannot be refused; but it comes to an end.
    1: fn a_scope_that_waits_for_itself_in_a_roundabout_way_is_a_timeout(gpus) {
        let pool = gpus.builder(1).timeout(Duration::from_secs(1)).build().unwrap();
        let error = failure(pool.run(|_, _| {
            thread::scope(|s| s.spawn(|| pool.run(|_, _| Ok(()))).join()).expect("it does not panic").map(drop)
        }));
        assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[0]), "{error}");
        assert_works(&pool);
    }
}

/// rules 2 and 8: a scope whose devices never become free is withdrawn, and says which were busy.
#[test]
fn a_queued_scope_is_withdrawn_when_its_devices_make_no_progress() {
    guarded(|| {
        let pool = support::builder().host(2).timeout(Duration::from_secs(1)).build().unwrap();
        let (inside, withdrawn) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|s| {
            let blocker = s.spawn(|| {
                pool.on(&[1]).run(|_, _| {
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
            let error = failure(pool.on(&[1]).run(|_, _| {
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

/// Many small kernels are progress, even if all of them together take longer than the deadline.
#[test]
fn a_long_queue_of_healthy_kernels_is_not_a_timeout() {
    guarded(|| {
        let pool =
            support::builder().host(1).module(&support::MODULE).timeout(Duration::from_millis(1500)).build().unwrap();
        let x = pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(1)?;
            for _ in 0..64 {
                slow_add(dev, &mut x, 1, 40_000)?;
            }
            dev.synchronize()?;
            dev.download(&x)
        });
        assert_eq!(x.unwrap(), [[64]]);
    });
}

/// More software GPUs than workers: each operation is progress, streams take turns, and nobody is late for want of a
/// worker.
#[test]
fn more_busy_streams_than_workers_miss_no_deadline() {
    static ORDER: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    kernel! {
        static NAP: "nap" in STRAY_MODULE, fn(x: &mut [u32], device: u32) |_dims| {
            thread::sleep(Duration::from_millis(50));
            ORDER.lock().unwrap().push(device);
            x[0] += 1;
        }
    }
    // One more than the machine has workers, also where there are eight cores.
    let (devices, naps) = (thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8)) + 1, 40);
    guarded(move || {
        let builder = support::builder().host(devices).module(&STRAY_MODULE).timeout(Duration::from_secs(1));
        let done = builder.build().unwrap().run(|dev, _| {
            let mut x = dev.zeros::<u32>(1)?;
            for _ in 0..naps {
                // SAFETY: the kernel touches the first element.
                unsafe { dev.launch(&NAP, LaunchDims::cover(1), (&mut x, dev.index() as u32))? };
            }
            dev.download(&x)
        });
        assert_eq!(done.unwrap(), vec![[naps]; devices]);
    });
    let order = ORDER.lock().unwrap();
    let first = |device: usize| order.iter().position(|&d| d as usize == device).unwrap();
    let last = (0..devices).map(first).max().unwrap();
    assert!(last < 10 * devices, "the last stream has had its first turn after {last} operations of others: {order:?}");
}

/// Who waits for a peer sees that the peer's stream gets on, whatever call the peer waits in.
#[test]
fn a_peer_whose_stream_gets_on_is_not_missing() {
    guarded(|| {
        let pool = support::builder().host(3).module(&support::MODULE).timeout(Duration::from_secs(1)).build().unwrap();
        let done = pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(1)?;
            if dev.index() == 1 {
                (0..40).try_for_each(|_| slow_add(dev, &mut x, 1, 50_000))?;
            }
            let events = dev.exchange(dev.record()?)?;
            match dev.index() {
                1 => drop(dev.download(&x)?),
                // Its stream waits for that of device 1, and gets on as that does.
                2 => {
                    dev.wait(&events[1])?;
                    dev.synchronize()?;
                }
                _ => {}
            }
            dev.barrier()
        });
        done.unwrap();
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
        assert!(matches!(&error, Error::Timeout { device: 0, missing, .. } if missing == &[0]), "{error}");
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
