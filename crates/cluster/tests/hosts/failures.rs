//! What happens when a process fails, calls something else, does not come, or is lost; and scopes of several threads.

use crate::loopback::Hosts;
use gpu_pool::{Builder, Device, Error, ReduceOp, Result};
use gpu_pool_cluster::extend::{HostTransport, Message, Transport};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};

fn works(hosts: &Hosts) {
    let found = hosts.all(|dev| {
        let mut x = dev.upload(&[1.0f32])?;
        dev.world()?.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.download(&x)
    });
    assert!(found.iter().all(|x| *x == [found.len() as f32]));
}

#[test]
fn a_failed_closure_fails_all_processes_and_leaves_the_cluster_usable() {
    let hosts = Hosts::new(&[2, 2]);
    let step = |dev: &Device| {
        let mut x = dev.upload(&[1.0f32; 100])?;
        dev.world()?.all_reduce(&mut x, ReduceOp::Sum)
    };
    for round in 0..10 {
        let found = hosts.run(|dev| {
            let me = dev.world()?.rank();
            (0..round).try_for_each(|_| step(dev))?;
            if me == 3 {
                return Err(Error::custom("on purpose"));
            }
            step(dev)
        });
        assert!(matches!(&found[1], Err(Error::Custom(_))), "{:?}", found[1]);
        match &found[0] {
            Err(Error::AbortedByHost { host: 1, device: Some(1), cause }) => assert_eq!(cause, "on purpose"),
            other => panic!("{other:?}"),
        }
        works(&hosts);
    }
}

/// Process 1 has committed a sum between devices and then cannot launch its part. The others' calls end.
#[test]
fn a_launch_that_fails_behind_a_commit_ends_the_others_calls() {
    crate::user_code::guarded(|| {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).op(FaultOp::Launch).from(2)).paused();
        let (second, built) = (plan.clone(), std::cell::Cell::new(0));
        let hosts = Hosts::on_devices_with(&[1, 1], |builder| match built.replace(built.get() + 1) {
            1 => builder.faults(second.clone()),
            _ => builder,
        });
        let found = hosts.run(|dev| {
            let mut x = dev.upload(&[1.0f32; 300])?;
            dev.synchronize()?;
            if dev.world()?.rank() == 1 {
                plan.resume();
            }
            dev.world()?.all_reduce(&mut x, ReduceOp::Max)?;
            dev.download(&x).map(drop)
        });
        plan.pause();
        assert!(found.iter().all(Result::is_err), "{found:?}");
        assert!(!hosts.mails[1].calls.lock().is_empty(), "it was committed");
        assert!(hosts.mails[1].failure.cause().is_some());
    });
}

/// It has no room for messages of senders, and no memory for receivers.
struct Full;

impl HostTransport for Full {
    fn name(&self) -> &'static str {
        "full"
    }

    fn exchange(&self, messages: Vec<Message>, lost: &dyn Fn() -> Option<Error>) -> Result<Vec<Message>> {
        if messages.iter().any(|message| matches!(message, Message::Receive { .. })) {
            return Err(Error::custom("no memory"));
        }
        loop {
            lost().map_or(Ok(()), Err)?;
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The sender's scope ends, though its message never goes.
#[test]
fn a_receiver_that_fails_behind_the_meeting_holds_no_sender() {
    crate::user_code::guarded(|| {
        let set = |builder: Builder| builder.timeout(Duration::from_secs(3));
        let hosts = Hosts::over(&[1, 1], set, |_, _| (Transport::Host(Arc::new(Full)), None));
        let found = hosts.run(|dev| {
            let world = dev.world()?;
            match world.rank() {
                0 => world.send(&dev.zeros::<f32>(1 << 20)?, 1),
                _ => world.recv(&mut dev.zeros::<f32>(1 << 20)?, 0),
            }
        });
        let told: Vec<String> = found.into_iter().map(|found| found.unwrap_err().to_string()).collect();
        assert!(told.iter().all(|told| told.contains("no memory")), "{told:?}");
    });
}

/// Once the next scope of the host that had failed met the one that the others were in.
#[test]
fn a_failure_before_the_first_world_is_of_the_same_scope_everywhere() {
    let hosts = Hosts::new(&[1, 2]);
    let found = hosts.each(|host, pool| {
        let step = |step: usize| {
            pool.run(|dev, _| {
                if (host, step) == (1, 2) {
                    return Err(Error::custom("early"));
                }
                let mut x = dev.upload(&[step as f32])?;
                dev.world()?.all_reduce(&mut x, ReduceOp::Sum)?;
                Ok(dev.download(&x)?[0])
            })
        };
        (0..5).map(step).collect::<Vec<_>>()
    });
    for (host, steps) in found.iter().enumerate() {
        for (step, found) in steps.iter().enumerate() {
            match found {
                Ok(sums) => assert!(step != 2 && sums.iter().all(|x| *x == (3 * step) as f32), "{step}: {sums:?}"),
                Err(Error::AbortedByHost { host: 1, cause, .. }) => assert!((host, step) == (0, 2) && cause == "early"),
                Err(error) => assert!((host, step) == (1, 2) && matches!(error, Error::Custom(_)), "{error:?}"),
            }
        }
    }
}

#[test]
fn calls_that_differ_name_both_places() {
    let hosts = Hosts::new(&[2, 1]);
    let found = hosts.run(|dev| {
        let world = dev.world()?;
        let mut x = dev.zeros::<f32>(if world.rank() < 2 { 10 } else { 11 })?;
        world.all_reduce(&mut x, ReduceOp::Sum)
    });
    for found in found {
        let Err(Error::WorldMismatch { a, b, .. }) = found else { panic!("{found:?}") };
        let (both, calls) = ([a.host, b.host], format!("{} {}", a.call, b.call));
        assert!(both == [0, 1] || both == [1, 0]);
        assert!(calls.contains("10 x F32") && calls.contains("11 x F32"), "{calls}");
        assert!(a.site.contains("failures.rs") && b.site.contains("failures.rs"));
    }
    works(&hosts);
    // Counts that do not fit.
    let found = hosts.run(|dev| {
        let world = dev.world()?;
        let (src, mut dst) = (dev.zeros::<f32>(3)?, dev.zeros::<f32>(3)?);
        let receive = if world.rank() == 2 { [1, 2, 0] } else { [1, 1, 1] };
        let mut x = dev.zeros::<f32>(3)?;
        match world.all_to_all_v(&src, &if world.rank() == 2 { [1, 2, 0] } else { [1, 1, 1] }, &mut dst, &receive) {
            Err(Error::WorldMismatch { what: "counts", a, b, .. }) => {
                // Nothing was begun, so the group goes on.
                world.all_reduce(&mut x, ReduceOp::Sum)?;
                Ok(((a.host, a.device), (b.host, b.device)))
            }
            other => panic!("{other:?}"),
        }
    });
    assert!(found.into_iter().flat_map(Result::unwrap).all(|pair| pair == ((0, 1), (1, 0))));
}

#[test]
fn a_host_that_does_not_come_is_named() {
    let deadline = Duration::from_secs(1);
    let hosts = Hosts::with(&[1, 2], |builder| builder.timeout(deadline));
    let found = hosts.run(|dev| {
        let world = dev.world()?;
        if world.rank() == 0 {
            std::thread::sleep(3 * deadline);
            return Ok(());
        }
        world.barrier()
    });
    assert!(matches!(&found[1], Err(Error::HostTimeout { missing, .. }) if *missing == [0]), "{:?}", found[1]);
    works(&hosts);
    // One that has ended its scope.
    let found = hosts.run(|dev| if dev.world()?.rank() == 0 { Ok(()) } else { dev.world()?.barrier() });
    assert!(matches!(&found[1], Err(Error::WorldMismatch { what: "participation", .. })), "{:?}", found[1]);
    works(&hosts);
}

#[test]
fn a_lost_host_ends_the_cluster_but_not_the_pool() {
    let hosts = Hosts::new(&[2, 1]);
    let found = hosts.run(|dev| {
        let world = dev.world()?;
        if world.rank() == 2 {
            hosts.hub.lose(1);
            return Ok(());
        }
        world.barrier()
    });
    assert!(matches!(found[0], Err(Error::HostLost { host: 1, .. })), "{:?}", found[0]);
    let found = hosts.pools[0].run(|dev, _| dev.world()?.barrier());
    assert!(matches!(found, Err(Error::HostLost { host: 1, .. })), "{found:?}");
    let found = hosts.pools[0].run(|dev, _| {
        let mut x = dev.upload(&[1.0f32])?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.download(&x)
    });
    assert_eq!(found.unwrap(), [[2.0], [2.0]]);
}

/// Also where all members had come to their ends: the other process's values are unspecified.
#[test]
fn state_is_poisoned_in_all_processes() {
    let hosts = Hosts::new(&[1, 1]);
    let states = hosts.each(|_, pool| pool.per_device(|_, _| Ok(0)).unwrap());
    let states: Vec<_> = states.into_iter().map(Mutex::new).collect();
    for _ in 0..20 {
        let found = hosts.each(|host, pool| {
            let state = states[host].lock();
            pool.run(|dev, _| {
                *state.borrow_mut(dev)? += 1;
                dev.world()?.barrier()?;
                if host == 1 { Err(Error::custom("on purpose")) } else { Ok(()) }
            })
        });
        assert!(found.iter().all(Result::is_err));
        let again = hosts.each(|host, _| states[host].lock().run(|_, _, _| Ok(())));
        assert!(again.iter().all(|again| matches!(again, Err(Error::Poisoned { .. }))), "{again:?}");
        hosts.each(|host, _| states[host].lock().clear_poison().unwrap());
    }
}

#[test]
fn two_scopes_at_once() {
    let hosts = Hosts::new(&[2, 2]);
    let found = hosts.each(|host, pool| {
        let scope = |name: &str, of: f32| {
            pool.named(name).run(|dev, _| {
                let mut x = dev.upload(&[of])?;
                dev.world()?.all_reduce(&mut x, ReduceOp::Sum)?;
                dev.download(&x)
            })
        };
        let names = if host == 0 { [("train", 1.0), ("eval", 10.0)] } else { [("eval", 10.0), ("train", 1.0)] };
        std::thread::scope(|threads| {
            let each = |(name, of)| threads.spawn(move || (0..5).map(|_| scope(name, of)).collect::<Result<Vec<_>>>());
            let both = names.map(each).map(|thread| thread.join().unwrap().unwrap());
            if host == 0 {
                both
            } else {
                let [eval, train] = both;
                [train, eval]
            }
        })
    });
    assert!(found.iter().all(|[train, eval]| {
        train.iter().flatten().all(|x| *x == [4.0]) && eval.iter().flatten().all(|x| *x == [40.0])
    }));
}

#[test]
fn what_cannot_cross_is_refused() {
    let hosts = Hosts::new(&[1, 1]);
    let found = hosts.all(|dev| {
        let world = dev.world()?;
        let refused = |result: Result<()>, word: &str| match result {
            Err(Error::InvalidArgument { why, site, .. }) => why.contains(word) && site.file().ends_with("failures.rs"),
            _ => false,
        };
        let mut x = dev.zeros::<f32>(1)?;
        let captured = dev.capture(|dev| dev.world()?.all_reduce(&mut x, ReduceOp::Sum)).map(drop);
        Ok([
            refused(world.exchange(1u8).map(drop), "u8"),
            refused(world.barrier().and_then(|()| dev.group(&[1]).map(drop)), "rank 1"),
            refused(captured, "graph"),
        ])
    });
    assert_eq!(found, [[true; 3]; 2]);
    let found = Hosts::new(&[2, 1]).pools[0].on(&[1]).run(|dev, _| dev.world().map(drop));
    assert!(matches!(found, Err(Error::InvalidArgument { .. })), "{found:?}");
}
