//! Peers that say yes and deliver something else, and links that are slow.
//!
//! Hardware does that: open-gpu-kernel-modules#1257, nccl-tests#117, FIDESlib#28.

use super::{assert_works, collectives, plan};
use crate::{on_both, support::bytes};
use gpu_pool::{GpuPool, collective::Route};
use gpu_pool_lab::{FaultOp, FaultPlan, FaultRule, Injected, prelude::*};
use std::{sync::Mutex, time::Duration};

/// Copies both ways on each pair, by either device, with the right data.
#[track_caller]
fn assert_copies(pool: &GpuPool) {
    let n = pool.device_count();
    for len in [1, 300, 100_000] {
        let own = |device: usize| bytes(len, device as u8 + 1);
        let kept = pool.run(|dev, _| dev.upload(&own(dev.index()))).unwrap();
        let targets = pool.run(|dev, _| (0..n).map(|_| dev.zeros::<u8>(len)).collect::<Result<Vec<_>, _>>()).unwrap();
        let targets: Vec<Vec<_>> =
            targets.into_iter().map(|row| row.into_iter().map(|target| Mutex::new(Some(target))).collect()).collect();
        pool.run(|dev, _| {
            for peer in 0..n {
                assert_eq!(dev.download(&kept[peer].copy_to(dev)?)?, own(peer), "{} from {peer}", dev.index());
                let mut target = targets[peer][dev.index()].lock().unwrap().take().expect("each has one writer");
                dev.copy(&kept[dev.index()], &mut target)?;
                dev.synchronize()?;
                *targets[peer][dev.index()].lock().unwrap() = Some(target);
            }
            dev.barrier()?;
            for (writer, target) in targets[dev.index()].iter().enumerate() {
                let target = target.lock().unwrap().take().expect("it was given back");
                assert_eq!(dev.download(&target)?, own(writer), "{writer} to {}", dev.index());
            }
            Ok(())
        })
        .unwrap();
    }
}

on_both! {
    // Each kind of lie, in each way of reaching a peer, in each direction: found at build, and gone round.
    2: fn a_peer_that_lies_is_found_and_copies_are_staged(gpus) {
        for (fault, op) in [Injected::Drop, Injected::Corrupt].into_iter().flat_map(|fault| {
            [
                None,
                Some(FaultOp::Launch),
                Some(FaultOp::CopyPeer),
                Some(FaultOp::CopyToPeer),
                Some(FaultOp::CopyFromPeer),
            ]
            .map(|op| (fault, op))
        }) {
            for (from, to) in [(0, 1), (1, 0)] {
                let rule = FaultRule::new(fault).device(from).peer(to);
                let rule = op.map_or(rule, |op| rule.op(op));
                let plan = FaultPlan::new().seed(3).on(rule);
                let pool = gpus.builder(2).faults(plan.clone()).build().unwrap();
                let report = pool.report();
                let lying = report.peer(from, to);
                assert!(lying.claimed && !lying.verified && lying.route == Route::Staged, "{rule:?}: {lying:?}");
                let what = match op {
                    None | Some(FaultOp::Launch) => "stores and loads over the link do not arrive",
                    Some(FaultOp::CopyFromPeer) => "copies from the peer do not arrive",
                    _ => "copies to the peer do not arrive",
                };
                assert_eq!(lying.note, format!("claimed, but {what}"));
                let honest = report.peer(to, from);
                assert!(honest.verified == (honest.route == Route::Direct));
                if !gpus.is_cuda() {
                    assert_eq!(honest.route, Route::Direct);
                }
                let text = report.to_string();
                assert!(text.contains(&format!("{from} -> {to}: Staged (claimed, but {what})")), "{text}");
                let told = plan.fired().len();
                assert!(told > 0);
                assert_copies(&pool);
                assert_works(&pool);
                // Nobody has relied on the liar since.
                assert_eq!(plan.fired().len(), told);
                pool.close().unwrap();
            }
        }
    }

    2: fn every_pair_lies(gpus) {
        let pool =
            gpus.builder(gpus.up_to(3)).faults(FaultPlan::new().on(FaultRule::new(Injected::Drop))).build().unwrap();
        assert!(pool.report().peers.iter().all(|pair| (pair.from == pair.to) == pair.verified));
        assert_copies(&pool);
        assert_works(&pool);
    }

    // A lie that the probe could not see is seen by whoever looks: the plan does what it says.
    2: fn a_peer_that_begins_to_lie_later(gpus) {
        if !gpus.pool(2).report().peer(0, 1).verified {
            println!("skipped: the devices are no peers");
            return;
        }
        for fault in [Injected::Drop, Injected::Corrupt] {
            let plan = plan(FaultRule::new(fault).device(0).peer(1).op(FaultOp::CopyPeer).from(2));
            let pool = gpus.builder(2).faults(plan.clone()).build().unwrap();
            plan.resume();
            let kept = pool.run(|dev, _| dev.upload(&bytes(1000, 9))).unwrap();
            let differ = pool.on(&[0]).run(|dev, _| {
                let mut x = dev.upload(&[0u8; 1000])?;
                let mut differ = Vec::new();
                for _ in 0..3 {
                    dev.fill(&mut x, 0)?;
                    dev.copy(&kept[1].peer(), &mut x)?;
                    differ.push(dev.download(&x)?.iter().zip(bytes(1000, 9)).filter(|(a, b)| **a != *b).count());
                }
                Ok(differ)
            });
            let differ = &differ.unwrap()[0];
            assert_eq!(differ[0], 0);
            for &wrong in &differ[1..] {
                assert!(if fault == Injected::Drop { wrong > 900 } else { (1..=16).contains(&wrong) }, "{wrong}");
            }
            assert_eq!(plan.fired().len(), 2);
        }
    }

    // Rights that are refused, and questions that fail, at any pair.
    2: fn a_right_that_cannot_be_had_is_in_the_report(gpus) {
        let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).device(0).peer(1).op(FaultOp::EnablePeer));
        let pool = gpus.builder(2).faults(plan).build().unwrap();
        let report = pool.report();
        let pair = report.peer(0, 1);
        if pair.claimed {
            assert!(pair.note.contains("could not be enabled") && pair.note.contains("fault plan"), "{}", pair.note);
        }
        assert_eq!(pair.route, Route::Staged);
        assert_copies(&pool);
    }

    2: fn a_slow_link_only_slows(gpus) {
        let slow = Injected::Slow { per_copy: Duration::from_millis(3), per_megabyte: Duration::from_millis(30) };
        for staged in [false, true] {
            let rule = FaultRule::new(slow).device(0);
            let plan = plan(if staged { rule } else { rule.peer(1) });
            let builder = gpus.builder(2).faults(plan.clone());
            let pool = if staged { builder.without_peer_access() } else { builder }.build().unwrap();
            let direct = pool.report().peer(0, 1).route == Route::Direct;
            plan.resume();
            assert_copies(&pool);
            assert_works(&pool);
            plan.pause();
            let ops: Vec<_> = plan.fired().iter().map(|fired| fired.op).collect();
            if staged {
                assert!(ops.contains(&FaultOp::CopyUp) && ops.contains(&FaultOp::CopyDown), "{ops:?}");
            } else if direct {
                assert!(ops.contains(&FaultOp::CopyToPeer) && ops.contains(&FaultOp::CopyFromPeer), "{ops:?}");
                assert!(ops.iter().all(|op| op.is_peer_copy()), "{ops:?}");
            }
            pool.close().unwrap();
        }
    }

    // A copy that takes longer than the deadline is a timeout; that the others have got on is no excuse.
    2: fn a_link_slower_than_the_deadline_is_a_timeout(gpus) {
        let slow = Injected::Slow { per_copy: Duration::from_millis(900), per_megabyte: Duration::ZERO };
        let plan = plan(FaultRule::new(slow).device(1).op(FaultOp::CopyUp).nth(1));
        let pool = gpus.builder(2).timeout(Duration::from_millis(200)).faults(plan.clone()).build().unwrap();
        plan.resume();
        let error = pool.run(|dev, _| collectives(dev)).unwrap_err();
        plan.pause();
        assert!(matches!(error, gpu_pool::Error::Timeout { .. }), "{error}");
        // It has caught up one day.
        crate::support::until("the slow copy is over", || pool.run(|dev, _| collectives(dev)).is_ok()).unwrap();
        pool.close().unwrap();
    }
}
