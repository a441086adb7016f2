//! What happens when something fails while buckets travel: every process has a typed error, no message is left, and the
//! cluster goes on, unless a process is lost.

use super::{Hosts, SIZES, build, small, step, works, write};
use gpu_pool::{Device, DeviceBuffer, Error, Result, gradients::GradientExchange};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use parking_lot::Mutex;
use std::{
    cell::Cell,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

/// The gradients before this one, and the end of the step.
fn rest(dev: &Device, exchange: &mut GradientExchange, before: usize) -> Result<()> {
    for gradient in (0..before).rev() {
        write(dev, exchange, gradient)?;
        exchange.ready(dev, gradient)?;
    }
    exchange.finish(dev).map(drop)
}

fn all_ready(dev: &Device, exchange: &mut GradientExchange) -> Result<()> {
    rest(dev, exchange, SIZES.len())
}

/// After the commit of some buckets, and before that of others.
#[test]
fn an_abort_in_mid_step_is_told_and_leaves_the_cluster_usable() {
    for nth in [1, 2, 5, 9] {
        let hosts = Hosts::new(&[2, 2]);
        let (count, hub) = (Mutex::new(0), Arc::downgrade(&hosts.hub));
        let tap = move |_| {
            let mut count = count.lock();
            *count += 1;
            if *count == nth {
                drop(count);
                hub.upgrade().expect("the test has it").abort();
            }
        };
        assert!(hosts.hub.tap.set(Box::new(tap)).is_ok());
        let found = hosts.run(|dev| all_ready(dev, &mut build(dev)?));
        assert!(found.iter().all(|found| matches!(found, Err(Error::AbortedByHost { host: 2, .. }))), "{found:?}");
        works(&hosts);
    }
}

/// Also by a closure, while its buckets travel.
#[test]
fn a_failed_closure_is_told_to_all() {
    for device in [0, 1] {
        let hosts = Hosts::new(&[2, 2]);
        let found = hosts.run(|dev| {
            let world = dev.world()?;
            let mut exchange = build(dev)?;
            write(dev, &mut exchange, SIZES.len() - 1)?;
            exchange.ready(dev, SIZES.len() - 1)?;
            if world.place(world.rank()) == (1, device) {
                return Err(Error::custom("on purpose"));
            }
            rest(dev, &mut exchange, SIZES.len() - 1)
        });
        let from = |found: &Result<Vec<()>>| match found {
            Err(Error::AbortedByHost { host: 1, device: Some(of), .. }) => *of == device,
            _ => false,
        };
        assert!(from(&found[0]), "{found:?}");
        assert!(matches!(&found[1], Err(Error::Custom { .. })), "{found:?}");
        works(&hosts);
    }
}

/// The thread that carries a process's buckets fails behind a commit, and the process lives on. It sends nothing more,
/// so the other one's thread gives its message up, a deadline after the scope has failed.
#[test]
fn a_carrier_that_fails_behind_a_commit_ends_the_waits_for_it() {
    let hosts = Hosts::with(&[1, 1], |builder| builder.timeout(Duration::from_secs(1)));
    let failed = AtomicBool::new(false);
    let tap = move |host| assert!(host != 1 || failed.swap(true, SeqCst), "the library of process 1 fails");
    assert!(hosts.hub.tap.set(Box::new(tap)).is_ok());
    let found = hosts.run(|dev| all_ready(dev, &mut build(dev)?));
    assert!(matches!(found[0], Err(Error::AbortedByHost { host: 1, .. })), "{found:?}");
    assert!(matches!(found[1], Err(Error::Custom { .. })), "{found:?}");
    // The message to process 1 is left, and harms nothing.
    assert!(hosts.all(|dev| step(dev, &mut build(dev)?)).iter().all(|same| *same));
}

#[test]
fn a_lost_process_ends_the_step_but_not_the_pool() {
    let hosts = Hosts::new(&[2, 1]);
    let found = hosts.run(|dev| {
        let (world, mut exchange) = (dev.world()?, build(dev)?);
        if world.rank() == 2 {
            write(dev, &mut exchange, SIZES.len() - 1)?;
            exchange.ready(dev, SIZES.len() - 1)?;
            hosts.hub.lose(1);
            return Ok(());
        }
        all_ready(dev, &mut exchange)
    });
    assert!(matches!(found[0], Err(Error::HostLost { host: 1, .. })), "{:?}", found[0]);
    let found = hosts.pools[0].run(|dev, _| {
        let mut exchange = small::<f32>().build(dev, &[9])?;
        dev.fill(&mut exchange.grad_mut(0)?, dev.rank() as f32)?;
        exchange.ready(dev, 0)?;
        exchange.finish(dev)?;
        dev.download(&exchange.grad(0)?)
    });
    assert_eq!(found.unwrap(), [[0.5; 9]; 2]);
}

/// One process does not start all buckets: the others hear of it when its scope ends.
#[test]
fn a_process_that_leaves_its_step_is_named() {
    let hosts = Hosts::new(&[2, 2]);
    let found = hosts.run(|dev| {
        let (world, mut exchange) = (dev.world()?, build(dev)?);
        if world.place(world.rank()).0 == 1 {
            write(dev, &mut exchange, SIZES.len() - 1)?;
            return exchange.ready(dev, SIZES.len() - 1);
        }
        all_ready(dev, &mut exchange)
    });
    assert!(matches!(&found[0], Err(Error::WorldMismatch { what: "participation", .. })), "{:?}", found[0]);
    works(&hosts);
}

/// Two exchanges in two orders: no data is mixed up.
#[test]
fn buckets_in_another_order_are_a_mismatch() {
    let hosts = Hosts::new(&[1, 2]);
    let found = hosts.run(|dev| {
        let world = dev.world()?;
        let mut both = [100, 200].map(|len| small::<f32>().build_in(&world, &[len]).unwrap());
        if world.rank() > 0 {
            both.reverse();
        }
        both.iter_mut().try_for_each(|exchange| {
            exchange.nothing();
            exchange.finish(dev).map(drop)
        })
    });
    for found in found {
        let Err(Error::WorldMismatch { a, b, .. }) = &found else { panic!("{found:?}") };
        let calls = format!("{} {}", a.call, b.call);
        assert!(calls.contains("100 x F32") && calls.contains("200 x F32"), "{calls}");
        assert!(a.site.contains("failures.rs") && b.site.contains("failures.rs"));
    }
    works(&hosts);
}

/// A device is lost while its elements are copied for the proxy, and when they come back.
#[test]
fn a_lost_device_is_told_to_all() {
    for (op, nth) in [(FaultOp::Launch, 3), (FaultOp::CopyUp, 2), (FaultOp::CopyUp, 5)] {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::DeviceLost).device(1).op(op).nth(nth)).paused();
        let built = Cell::new(0);
        let hosts = Hosts::with(&[2, 2], |builder| {
            built.set(built.get() + 1);
            if built.get() == 2 { builder.faults(plan.clone()) } else { builder }
        });
        let found = hosts.run(|dev| {
            let (world, mut exchange) = (dev.world()?, build(dev)?);
            let mut x: DeviceBuffer<f32> = dev.zeros(9)?;
            dev.synchronize()?;
            world.barrier()?;
            // By the device that counts alone: it sets the counts to zero.
            if world.rank() == 3 {
                plan.resume();
            }
            dev.fill(&mut x, 1.0)?;
            all_ready(dev, &mut exchange)
        });
        assert!(!plan.fired().is_empty());
        assert!(matches!(found[0], Err(Error::AbortedByHost { host: 1, .. })), "{:?}", found[0]);
        assert!(matches!(found[1], Err(Error::DeviceLost { device: 1, .. })), "{:?}", found[1]);
    }
}
