//! Wrong calls, members that differ, and members that fail: typed errors, nobody hangs, and the exchange goes on after
//! a reset.

use crate::{
    on_both,
    rig::{self, SIZES, all, backwards, bits, give, plain, refused, small, step},
    support::{failure, until},
};
use gpu_pool::{
    Device, Error, ReduceOp,
    gradients::{GradientExchange, Wire},
};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::*};

/// A step that must give what it should.
fn works(dev: &Device, exchange: &mut GradientExchange, number: usize) -> Result<(), Error> {
    step(dev, exchange, &SIZES, number, &backwards(SIZES.len()))?;
    assert_eq!(bits(&all(dev, exchange)?), bits(&plain(dev, &SIZES, number, ReduceOp::Avg, |_| true)?));
    Ok(())
}

on_both! {
    // nccl#1417, #1394: hangs at times, and is silently wrong at others.
    2: fn what_members_must_agree_on(gpus) {
        let n = gpus.up_to(3);
        let pool = rig::pool(gpus, n);
        let last = n - 1;
        let differ = |make: &(dyn Fn(&Device, bool) -> Result<GradientExchange, Error> + Sync)| {
            let error = failure(pool.run(|dev, _| make(dev, dev.rank() == last).map(|exchange| exchange.len())));
            let Error::Mismatch { what, a, b, a_call, b_call, a_site, .. } = &error else {
                panic!("no mismatch: {error}")
            };
            assert_eq!((*a, *b), (0, last), "{error}");
            assert!(a_site.file().ends_with("failures.rs"), "{error}");
            assert_ne!(a_call, b_call);
            (*what, b_call.clone())
        };
        let sizes = |other: bool| if other { [3, 4, 5] } else { [3, 4, 4] };
        assert_eq!(
            differ(&|dev, other| small().build(dev, &sizes(other))),
            ("size", "GradientExchange(gradient 2 of 5 elements)".to_owned())
        );
        assert_eq!(differ(&|dev, other| small().build(dev, if other { &[3] } else { &[3, 4] })).0, "count");
        assert_eq!(
            differ(&|dev, other| small().reduce(if other { ReduceOp::Sum } else { ReduceOp::Avg }).build(dev, &[1])).0,
            "reduce op"
        );
        assert_eq!(
            differ(&|dev, other| small().bucket_bytes(if other { 8 } else { 4 }).build(dev, &[1])).0,
            "settings"
        );
        let (what, call) =
            differ(&|dev, other| small().wire(if other { Wire::F16 } else { Wire::Same }).build(dev, &[1]));
        assert!(what == "settings" && call.contains("F16"), "{call}");
        // Weights may differ.
        pool.run(|dev, _| small().reduce(ReduceOp::Scaled(dev.rank() as f64)).build(dev, &[1]).map(drop)).unwrap();
    }

    1: fn settings_that_cannot_be(gpus) {
        rig::pool(gpus, 1)
            .run(|dev, _| {
                for op in [ReduceOp::Max, ReduceOp::Prod, ReduceOp::Scaled(f64::NAN), ReduceOp::Scaled(1e300)] {
                    refused(small().reduce(op).build(dev, &[1]));
                }
                refused(small().bucket_bytes(0).build(dev, &[1]));
                refused(small().build(dev, &[usize::MAX, 5]));
                Ok(())
            })
            .unwrap();
    }

    // None of these touches the step.
    2: fn wrong_calls(gpus) {
        let pool = rig::pool(gpus, 2);
        let mut state = pool.per_device(|dev, _| small().build(dev, &SIZES)).unwrap();
        for number in 0..3 {
            state
                .run(|dev, _, exchange| {
                    assert!(refused(exchange.finish(dev)).contains("nothing"));
                    refused(exchange.finish_bucket(dev, 0));
                    refused(exchange.ready(dev, SIZES.len()));
                    refused(exchange.grad_mut(SIZES.len()));
                    refused(exchange.grad(usize::MAX));
                    refused(exchange.take(0));
                    refused(exchange.set_weight(1.0));
                    refused(exchange.ready_from(dev, 0, dev.zeros(SIZES[0] + 1)?));
                    give(dev, exchange, 8, &rig::numbers(number, dev.rank(), 8, SIZES[8]))?;
                    assert!(refused(exchange.ready(dev, 8)).contains("already"));
                    refused(exchange.grad_mut(8));
                    refused(exchange.grad(8));
                    refused(exchange.lend(8, dev.zeros(SIZES[8])?));
                    refused(exchange.take(8));
                    refused(exchange.set_sync(false));
                    refused(exchange.finish_bucket(dev, 99));
                    step(dev, exchange, &SIZES, number, &backwards(SIZES.len() - 1))?;
                    refused(exchange.finish(dev));
                    assert_eq!(bits(&all(dev, exchange)?), bits(&plain(dev, &SIZES, number, ReduceOp::Avg, |_| true)?));
                    Ok(())
                })
                .unwrap();
        }
    }

    1: fn what_comes_after_the_end_of_its_step(gpus) {
        rig::run(gpus, 1, |dev| {
            let mut exchange = GradientExchange::builder().first_bucket_bytes(4).bucket_bytes(4).build(dev, &[4, 4])?;
            exchange.ready(dev, 1)?;
            exchange.finish_bucket(dev, 0)?;
            assert!(refused(exchange.ready(dev, 0)).contains("finish_bucket"));
            assert!(refused(exchange.ready(dev, 1)).contains("after its exchange"));
            exchange.finish(dev)?;
            exchange.ready(dev, 0)
        });
    }

    2: fn memory_of_another_device(gpus) {
        let pool = rig::pool(gpus, 2);
        let handed = Mutex::new(None);
        pool.run(|dev, _| {
            if dev.rank() == 0 {
                *handed.lock() = Some(dev.zeros::<f32>(4)?);
            }
            dev.barrier()?;
            let mut exchange = small().build(dev, &[4])?;
            if dev.rank() == 1 {
                let theirs = handed.lock().take().unwrap();
                let error = failure(exchange.ready_from(dev, 0, theirs));
                assert!(matches!(error, Error::WrongDevice { buffer: 0, device: 1, .. }), "{error}");
            }
            Ok(())
        })
        .unwrap();
    }

    2: fn members_in_different_steps(gpus) {
        let pool = rig::pool(gpus, 2);
        let error = failure(pool.run(|dev, _| {
            let mut exchange = small().build(dev, &[4])?;
            // Rank 1 does one of them without the others: its next step is their first.
            for number in 0..3 {
                exchange.set_sync(dev.rank() == 0 || number > 0)?;
                give(dev, &mut exchange, 0, &[1.0; 4])?;
                exchange.finish(dev)?;
            }
            Ok(())
        }));
        assert!(matches!(error, Error::Mismatch { what: "step" | "operation" | "participation", .. }), "{error}");
    }

    // Which steps exchange is not compared by itself; that they are not the same ones is found at the first exchange of
    // both.
    2: fn members_that_leave_out_different_exchanges(gpus) {
        let pool = rig::pool(gpus, 2);
        let error = failure(pool.run(|dev, _| {
            let mut exchange = small().build(dev, &[4])?;
            // As many on each: nothing else differs.
            for number in 0..4 {
                exchange.set_sync(number == 3 || number == [0, 2][dev.rank()])?;
                give(dev, &mut exchange, 0, &[1.0; 4])?;
                exchange.finish(dev)?;
            }
            Ok(())
        }));
        let Error::Mismatch { what: "step", a_call, b_call, .. } = &error else { panic!("no mismatch: {error}") };
        assert_eq!((&a_call[..], &b_call[..]), ("finish of step 0", "finish of step 2"), "{error}");
    }

    // What it holds would be lost, and what is lent would count in its place.
    2: fn memory_for_what_is_held(gpus) {
        let pool = rig::pool(gpus, 2);
        let found = pool.run(|dev, _| {
            let mut exchange = small().build(dev, &[4, 4])?;
            exchange.set_sync(false)?;
            give(dev, &mut exchange, 0, &[1.0; 4])?;
            exchange.ready_from(dev, 1, dev.upload(&[2.0; 4])?)?;
            exchange.finish(dev)?;
            exchange.set_sync(true)?;
            for gradient in [0, 1] {
                assert!(refused(exchange.lend(gradient, dev.zeros(4)?)).contains("grad_mut"));
                assert!(refused(exchange.ready_from(dev, gradient, dev.zeros(4)?)).contains("grad_mut"));
            }
            // Added to where it is, and in its own memory, which was taken for that.
            let one = dev.upload(&[10.0; 4])?;
            dev.axpy(1.0, &one, &mut exchange.grad_mut(0)?)?;
            exchange.ready(dev, 0)?;
            let mut own = exchange.take(1)?;
            dev.axpy(1.0, &one, &mut own)?;
            exchange.ready_from(dev, 1, own)?;
            exchange.finish(dev)?;
            exchange.lend(0, dev.zeros(4)?)?;
            assert_eq!(dev.download(&exchange.take(0)?)?, [0.0; 4]);
            all(dev, &exchange)
        });
        assert_eq!(found.unwrap(), vec![[vec![11.0; 4], vec![12.0; 4]]; 2]);
    }

    1: fn memory_of_another_pool(gpus) {
        let (one, other) = (rig::pool(gpus, 1), rig::pool(gpus, 1));
        let theirs =
            Mutex::new(other.run(|dev, _| Ok([dev.zeros::<f32>(4)?, dev.zeros(4)?])).unwrap().remove(0).map(Some));
        one.run(|dev, _| {
            let mut exchange = small().build(dev, &[4])?;
            let [first, second] = theirs.lock().each_mut().map(|buffer| buffer.take().unwrap());
            for error in [failure(exchange.lend(0, first)), failure(exchange.ready_from(dev, 0, second))] {
                let Error::WrongPool { device: 0, site, .. } = &error else { panic!("another error: {error}") };
                assert!(site.file().ends_with("failures.rs"), "{error}");
            }
            // The step is as it was.
            give(dev, &mut exchange, 0, &[3.0; 4])?;
            exchange.finish(dev)?;
            assert_eq!(dev.download(&exchange.grad(0)?)?, [3.0; 4]);
            Ok(())
        })
        .unwrap();
    }

    // The half of a step that is left from a scope that has failed since is not to be finished.
    2: fn a_scope_that_fails_between_ready_and_finish(gpus) {
        let pool = rig::pool(gpus, 2);
        let mut state = pool.per_device(|dev, _| small().build(dev, &[4, 4])).unwrap();
        let ended = AtomicBool::new(false);
        failure(state.run(|dev, _, exchange| {
            give(dev, exchange, 1, &[1.0; 4])?;
            if dev.rank() == 1 {
                until("the other has nothing more to do", || ended.load(Acquire))?;
                return Err(Error::custom("no"));
            }
            ended.store(true, Release);
            Ok(())
        }));
        state.clear_poison().unwrap();
        let told = Mutex::new(Vec::new());
        failure(state.run(|dev, _, exchange| {
            let error = failure(exchange.ready(dev, 0));
            told.lock().push(refused::<()>(Err(error.clone())));
            dev.barrier()?;
            Err::<(), _>(error)
        }));
        let told = told.into_inner();
        assert!(told.len() == 2 && told.iter().all(|why| why.contains("reset")), "{told:?}");
        state.clear_poison().unwrap();
        let found = state.run(|dev, _, exchange| {
            exchange.reset(dev)?;
            step(dev, exchange, &[4, 4], 0, &[1, 0])?;
            Ok(bits(&all(dev, exchange)?) == bits(&plain(dev, &[4, 4], 0, ReduceOp::Avg, |_| true)?))
        });
        assert_eq!(found.unwrap(), [true; 2]);
        // A step may go over several scopes that did not fail.
        state.run(|dev, _, exchange| give(dev, exchange, 1, &[2.0; 4])).unwrap();
        state
            .run(|dev, _, exchange| give(dev, exchange, 0, &[3.0; 4]).and_then(|()| exchange.finish(dev).map(drop)))
            .unwrap();
        assert_eq!(state.run(|dev, _, exchange| all(dev, exchange)).unwrap(), vec![[vec![3.0; 4], vec![2.0; 4]]; 2]);
    }

    // What members differ in is told with the lines of the user's program, not with those of this crate.
    2: fn errors_name_the_callers_line(gpus) {
        type Call = fn(&Device, &mut GradientExchange) -> Result<(), Error>;
        let calls: [Call; 4] = [
            |dev, exchange| exchange.finish(dev).map(drop),
            |dev, exchange| exchange.finish_bucket(dev, 0).map(drop),
            |dev, exchange| exchange.ready(dev, 0),
            // Only the meeting at the end is left.
            |dev, exchange| {
                exchange.ready(dev, 0)?;
                exchange.finish(dev).map(drop)
            },
        ];
        for (k, call) in calls.into_iter().enumerate() {
            let error = failure(rig::pool(gpus, 2).run(|dev, _| {
                let mut exchange = small().build(dev, &[4])?;
                if k < 2 {
                    exchange.nothing();
                }
                match dev.rank() {
                    0 => call(dev, &mut exchange),
                    _ if k == 3 => exchange.ready(dev, 0).and_then(|()| dev.barrier()),
                    _ => dev.barrier(),
                }
            }));
            let Error::Mismatch { a_site, b_site, .. } = &error else { panic!("{k}: no mismatch: {error}") };
            for site in [a_site, b_site] {
                assert!(site.file().ends_with("failures.rs"), "{k}: {error}");
            }
        }
    }

    // As many members, and the same rank in both: only who they are differs, and which orders they have followed.
    4: fn in_a_gang_of_others(gpus) {
        let pool = rig::pool(gpus, 4);
        let state = pool.per_device(|_, _| Ok(None)).unwrap();
        for (members, order) in [([0, 1], [0, 1]), ([2, 3], [1, 0])] {
            pool.on(&members).run(|dev, _| {
                let made = GradientExchange::builder().first_bucket_bytes(4).bucket_bytes(4);
                let mut exchange = made.build(dev, &[4, 4])?;
                step(dev, &mut exchange, &[4, 4], 0, &order)?;
                *state.borrow_mut(dev)? = Some(exchange);
                Ok(())
            })
            .unwrap();
        }
        let error = failure(pool.on(&[0, 3]).run(|dev, _| state.borrow_mut(dev)?.as_mut().unwrap().ready(dev, 0)));
        let why = refused::<()>(Err(error));
        assert!(why.contains("[0, 1]") || why.contains("[2, 3]"), "{why}");
    }

    3: fn in_another_gang(gpus) {
        let pool = rig::pool(gpus, 3);
        let mut state = pool.per_device(|dev, _| small().build(dev, &SIZES)).unwrap();
        let error = failure(pool.on(&[1, 0]).run(|dev, _| state.borrow_mut(dev)?.ready(dev, 0)));
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        state.clear_poison().unwrap();
        state.run(|dev, _, exchange| works(dev, exchange, 0)).unwrap();
    }

    // pytorch#113281, nccl#829, #863: peers of a rank that fails hang, or wait for a watchdog.
    2: fn a_member_fails_in_the_backward_pass(gpus) {
        let n = gpus.up_to(4);
        let pool = rig::pool(gpus, n);
        for (wire, ready_order) in [(Wire::Same, true), (Wire::Bf16, false)] {
            let made = small().wire(wire).ready_order(ready_order);
            let mut state = pool.per_device(|dev, _| made.build(dev, &SIZES)).unwrap();
            // After none, some and all gradients; in the first step, whose order counts, and later.
            for (round, after) in [0, 3, SIZES.len(), 5].into_iter().enumerate() {
                let fails = round % n;
                let told = Mutex::new(Vec::new());
                let error = failure(state.run(|dev, _, exchange| {
                    let mut run = || {
                        for number in 0..2 {
                            for (k, gradient) in backwards(SIZES.len()).into_iter().enumerate() {
                                if number == round % 2 && k == after && dev.rank() == fails {
                                    return Err(Error::custom("the backward pass failed"));
                                }
                                give(dev, exchange, gradient, &vec![1.0; SIZES[gradient]])?;
                            }
                            if number == round % 2 && after == SIZES.len() && dev.rank() == fails {
                                return Err(Error::custom("the backward pass failed"));
                            }
                            exchange.finish(dev)?;
                        }
                        dev.synchronize()
                    };
                    run().inspect_err(|error| told.lock().push((dev.rank(), error.clone())))
                }));
                assert_eq!(error.to_string(), "the backward pass failed");
                for (rank, error) in told.into_inner() {
                    let aborted = matches!(&error, Error::Aborted { by, .. } if *by == fails);
                    // Who comes later finds that the member has left.
                    assert!(rank == fails || aborted || matches!(error, Error::Mismatch { .. }), "{rank}: {error}");
                }
                // The state of a failed scope is not for use as it is.
                let error = failure(state.run(|dev, _, exchange| works(dev, exchange, 0)));
                assert!(matches!(error, Error::Poisoned { .. }), "{error}");
                state.clear_poison().unwrap();
                state.run(|dev, _, exchange| exchange.reset(dev)).unwrap();
                for number in 0..3 {
                    state
                        .run(|dev, _, exchange| match wire {
                            Wire::Same => works(dev, exchange, number),
                            _ => step(dev, exchange, &SIZES, number, &backwards(SIZES.len())).map(drop),
                        })
                        .unwrap();
                }
            }
            // Or from scratch.
            state.reset(|dev, _| made.build(dev, &SIZES)).unwrap();
            state.run(|dev, _, exchange| step(dev, exchange, &SIZES, 0, &[2]).map(drop)).unwrap();
        }
    }

    // Without a reset the exchange says so.
    2: fn a_failed_step_is_told(gpus) {
        let pool = rig::pool(gpus, 2);
        let mut state = pool.per_device(|dev, _| small().build(dev, &SIZES)).unwrap();
        let about_to = AtomicBool::new(false);
        failure(state.run(|dev, _, exchange| {
            if dev.rank() == 0 {
                until("the other is there", || about_to.load(Acquire))?;
                return Err(Error::custom("no"));
            }
            about_to.store(true, Release);
            backwards(SIZES.len()).into_iter().try_for_each(|gradient| exchange.ready(dev, gradient))
        }));
        state.clear_poison().unwrap();
        let told = Mutex::new(None);
        let error = failure(state.run(|dev, _, exchange| match dev.rank() {
            0 => Ok(()),
            _ => exchange.ready(dev, 0).inspect_err(|error| *told.lock() = Some(error.clone())),
        }));
        assert!(refused::<()>(Err(error)).contains("reset"));
        state.clear_poison().unwrap();
        state.run(|dev, _, exchange| exchange.reset(dev).and_then(|()| works(dev, exchange, 1))).unwrap();
    }
}
