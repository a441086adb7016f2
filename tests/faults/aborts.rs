//! A member fails: its peers are released and told why, the first failure is what the scope reports, and nobody else
//! notices.

use crate::{
    on_both,
    rig::{assert_works, reduce},
    support::{failure, slow_add, until},
};
use gpu_pool::{Error, ReduceOp};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::{panic::panic_any, thread, time::Duration};

on_both! {
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
        let pool = gpus.pool(n);
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
        let pool = gpus.pool(n);
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
        let error =
            failure(pool.run(|_, _| -> Result<(), Error> { Err(Error::custom(std::io::Error::other("disk"))) }));
        let copy = error.clone();
        assert_eq!(thread::spawn(move || copy.to_string()).join().unwrap(), "disk");
    }
}
