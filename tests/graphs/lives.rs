//! How long a graph and its memory live: neither less nor more than they are needed.

use crate::{
    on_both,
    rig::{SLOW, all_work},
    support::{failure, slow_add, slow_copy},
};
use gpu_pool::{DeviceBuffer, Error, Graph};
use gpu_pool_lab::FaultPlan;
use gpu_pool_lab::prelude::*;

on_both! {
    // Frees during capture are deferred, and what a captured graph has seen stays its own until it is dropped (issue 4,
    // point 8).
    1: fn a_graph_keeps_its_memory_while_it_lives(gpus) {
        gpus.run(1, |dev| {
            let before = dev.stats().in_use;
            let len = 300_000;
            let mut outer = dev.upload(&vec![1u32; len])?;
            let mut out = dev.zeros::<u32>(len)?;
            let (graph, mine) = dev.capture(|dev| {
                let mut inner = dev.zeros::<u32>(len)?;
                slow_add(dev, &mut inner, 5, 0)?;
                slow_add(dev, &mut outer, 1, 0)?;
                slow_copy(dev, &inner, &mut out, 0)?;
                let mine = inner.address();
                drop(inner);
                let next = dev.zeros::<u32>(len)?;
                assert_ne!(next.address(), mine, "freed in the capture, and used again in it");
                Ok(mine)
            })?;
            let theirs = outer.address();
            drop(outer);
            // Whoever asks for memory now gets other memory, and no launch writes to it.
            let bytes = 4 * len as u64;
            let mut others = Vec::new();
            for i in 0..20 {
                let other = dev.upload(&vec![100 + i; len])?;
                for kept in [mine, theirs] {
                    let apart = other.address() + bytes <= kept || kept + bytes <= other.address();
                    assert!(apart, "{:#x} is the graph's", other.address());
                }
                others.push(other);
                dev.launch_graph(&graph)?;
            }
            for (i, other) in others.iter().enumerate() {
                assert_eq!(dev.download(other)?, vec![100 + i as u32; len]);
            }
            assert_eq!(dev.download(&out)?, vec![5; len]);
            drop((others, out));
            let held = dev.stats().in_use;
            assert!(held >= before + 3 * bytes, "{held} {before}");
            drop(graph);
            assert_eq!(dev.stats().in_use, before, "with the graph its memory goes");
            Ok(())
        });
    }

    // What a graph has let go of in flight is used again only after its launch (pytorch#196257).
    1: fn a_graph_is_dropped_in_flight(gpus) {
        let pool = gpus.run(1, |dev| {
            for round in 0..3u32 {
                let len = 300_000 << round;
                let mut out = dev.zeros::<u32>(len)?;
                let source = dev.upload(&vec![round; len])?;
                let mut busy = dev.zeros::<u32>(1)?;
                let (graph, ()) = dev.capture(|dev| slow_copy(dev, &source, &mut out, 0))?;
                drop(source);
                let side = dev.stream()?;
                let on_side = dev.on(&side);
                slow_add(&on_side, &mut busy, 1, SLOW)?;
                on_side.launch_graph(&graph)?;
                drop(graph);
                let again = dev.upload(&vec![u32::MAX; len])?;
                assert_eq!(dev.download(&out)?, vec![round; len]);
                assert_eq!(dev.download(&again)?, vec![u32::MAX; len]);
            }
            // And at the end of the scope, and of the pool.
            let mut x = dev.zeros::<u32>(1)?;
            let (graph, ()) = dev.capture(|dev| slow_add(dev, &mut x, 1, SLOW))?;
            dev.launch_graph(&graph)
        });
        pool.close().unwrap();
    }

    // Not under its launches, and not never.
    1: fn a_graph_is_destroyed_when_its_launches_are_over(gpus) {
        // The call is made in any case; the rule is there to count.
        let plan: FaultPlan = "0:graph-destroy:*:error".parse().unwrap();
        let pool = gpus.builder(1).faults(plan.clone()).build().unwrap();
        let kept = pool.per_device(|dev, _| Ok(dev.capture(|_| Ok(()))?.0)).unwrap();
        pool.run(|dev, _| {
            let mut x = dev.zeros::<u32>(1)?;
            drop(dev.capture(|dev| slow_add(dev, &mut x, 1, 0))?);
            assert_eq!(plan.fired().len(), 1, "it was never launched");
            let (graph, ()) = dev.capture(|dev| slow_add(dev, &mut x, 1, 10 * SLOW))?;
            dev.launch_graph(&graph)?;
            drop(graph);
            assert_eq!(plan.fired().len(), 1, "it is in flight");
            Ok(())
        })
        .unwrap();
        assert_eq!(plan.fired().len(), 2);
        drop(kept);
        pool.close().unwrap();
        assert_eq!(plan.fired().len(), 3);
    }

    1: fn a_graph_outlives_a_failed_scope(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        struct Step {
            x: DeviceBuffer<u32>,
            graph: Graph,
        }
        let mut steps = pool
            .per_device(|dev, _| {
                let mut x = dev.upload(&[0u32; 100])?;
                let (graph, ()) = dev.capture(|dev| slow_add(dev, &mut x, 1, 100))?;
                Ok(Step { x, graph })
            })
            .unwrap();
        for round in 1..4 {
            let error = failure(pool.run(|dev, _| {
                dev.launch_graph(&steps.borrow(dev)?.graph)?;
                // Both have launched when one of them fails.
                dev.barrier()?;
                Err::<(), _>(Error::custom("after the launch"))
            }));
            assert!(matches!(error, Error::Custom(_)), "{error}");
            let seen = pool
                .run(|dev, _| {
                    let step = steps.borrow(dev)?;
                    dev.launch_graph(&step.graph)?;
                    dev.download(&step.x)
                })
                .unwrap();
            assert!(seen.iter().all(|x| *x == [2 * round; 100]), "{seen:?}");
        }
        steps.run(|dev, _, step| dev.launch_graph(&step.graph)).unwrap();
        drop(steps);
        all_work(&pool);
    }
}
