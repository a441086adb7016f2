//! Gradients that graphs write: what may be captured, and that no graph writes to where gradients are no more.

use crate::{
    on_both,
    rig::{self, SIZES, all, backwards, bits, give, plain, small, step},
};
use gpu_pool::{
    Device, DeviceBuffer, Error, Graph, ReduceOp,
    gradients::{GradientExchange, GradientExchangeBuilder},
};

/// Buckets of one gradient each.
fn each() -> GradientExchangeBuilder {
    GradientExchange::builder().first_bucket_bytes(1).bucket_bytes(1)
}

/// A graph that writes a gradient.
fn fills(dev: &Device, exchange: &mut GradientExchange, gradient: usize, value: f32) -> Result<Graph, Error> {
    let mut x = exchange.grad_mut(gradient)?;
    dev.capture(|dev| dev.fill(&mut x, value)).map(|(graph, ())| graph)
}

/// Whether a graph is refused for what has become of its memory.
#[track_caller]
fn stale(result: Result<(), Error>) {
    match result {
        Err(Error::GraphInvalidated { op: "launch_graph", why, site, .. }) => {
            assert!(why.contains("gradients") && site.file().starts_with("tests/"), "{why} at {site}");
        }
        other => panic!("not stale: {other:?}"),
    }
}

on_both! {
    // A graph would write the gradient when it is launched, and the exchange would not wait for that.
    2: fn within_a_capture(gpus) {
        let pool = rig::pool(gpus, 2);
        let mut state = pool.per_device(|dev, _| small().build(dev, &SIZES)).unwrap();
        state
            .run(|dev, _, exchange| {
                give(dev, exchange, 8, &rig::numbers(0, dev.rank(), 8, SIZES[8]))?;
                type Call = fn(&Device, &mut GradientExchange) -> Result<(), Error>;
                let calls: [(&str, Call); 5] = [
                    ("ready", |dev, exchange| exchange.ready(dev, 0)),
                    ("ready_from", |dev, exchange| exchange.ready_from(dev, 0, dev.zeros(SIZES[0])?)),
                    ("finish_bucket", |dev, exchange| exchange.finish_bucket(dev, 0).map(drop)),
                    ("finish", |dev, exchange| exchange.finish(dev).map(drop)),
                    ("reset", |dev, exchange| exchange.reset(dev)),
                ];
                for (name, call) in calls {
                    let captured = dev.capture(|dev| {
                        let mut x = exchange.grad_mut(0)?;
                        dev.fill(&mut x, 1.0)?;
                        call(dev, exchange)
                    });
                    match captured.map(drop) {
                        Err(Error::InvalidArgument { op, .. }) => assert_eq!(op, name),
                        other => panic!("{name}: {other:?}"),
                    }
                }
                // The step goes on as if nothing had been.
                step(dev, exchange, &SIZES, 0, &backwards(SIZES.len() - 1))?;
                assert_eq!(bits(&all(dev, exchange)?), bits(&plain(dev, &SIZES, 0, ReduceOp::Avg, |_| true)?));
                Ok(())
            })
            .unwrap();
    }

    // pytorch#89546, #83495 (11 steps before a capture): a graph from before the buckets were rebuilt trains on
    // nothing, silently.
    2: fn a_graph_from_before_the_move(gpus) {
        rig::run(gpus, 2, |dev| {
            let mut exchange = each().build(dev, &[4, 4])?;
            let mut graph = fills(dev, &mut exchange, 0, 1.0 + dev.rank() as f32)?;
            for number in 0..4 {
                if number == 1 {
                    stale(dev.launch_graph(&graph));
                    // Nothing of it has run, and it stays so.
                    stale(dev.launch_graph(&graph));
                    assert_eq!(all(dev, &exchange)?, [[1.5; 4], [10.0; 4]]);
                    graph = fills(dev, &mut exchange, 0, 3.0 + dev.rank() as f32)?;
                }
                dev.launch_graph(&graph)?;
                exchange.ready(dev, 0)?;
                give(dev, &mut exchange, 1, &[10.0; 4])?;
                assert_eq!(exchange.finish(dev)?.moved(), number == 0);
                let mean = if number == 0 { 1.5 } else { 3.5 };
                assert_eq!(all(dev, &exchange)?, [[mean; 4], [10.0; 4]]);
            }
            Ok(())
        });
    }

    2: fn a_graph_goes_on_where_nothing_moves(gpus) {
        let pool = rig::pool(gpus, 2);
        // As the buckets are anyway, and in another order that is not followed.
        for (order, follow) in [([1, 0], true), ([0, 1], false)] {
            pool.run(|dev, _| {
                let mut exchange = each().ready_order(follow).build(dev, &[4, 4])?;
                let graph = fills(dev, &mut exchange, 0, dev.rank() as f32)?;
                for number in 0..3 {
                    dev.launch_graph(&graph)?;
                    for gradient in order {
                        match gradient {
                            0 => exchange.ready(dev, 0)?,
                            _ => give(dev, &mut exchange, 1, &[number as f32; 4])?,
                        }
                    }
                    assert!(!exchange.finish(dev)?.moved());
                    assert_eq!(all(dev, &exchange)?, [[0.5; 4], [number as f32; 4]]);
                }
                // Nor does this move anything.
                exchange.reset(dev)?;
                dev.launch_graph(&graph)?;
                assert_eq!(dev.download(&exchange.grad(0)?)?, [dev.rank() as f32; 4]);
                Ok(())
            })
            .unwrap();
        }
    }

    2: fn a_graph_from_before_a_reset_and_of_an_exchange_that_is_gone(gpus) {
        rig::run(gpus, 2, |dev| {
            let mut exchange = each().norm(true).build(dev, &[4, 4])?;
            give(dev, &mut exchange, 0, &[1.0; 4])?;
            give(dev, &mut exchange, 1, &[1.0; 4])?;
            assert!(exchange.finish(dev)?.moved());
            let before = fills(dev, &mut exchange, 1, 1.0)?;
            // Back to where they were at first.
            exchange.reset(dev)?;
            stale(dev.launch_graph(&before));
            let behind = fills(dev, &mut exchange, 1, 2.0)?;
            dev.launch_graph(&behind)?;
            exchange.ready(dev, 1)?;
            let step = exchange.finish(dev)?;
            let norm = step.norm().expect("asked for");
            let (reads, copy) = dev.capture(|dev| {
                // SAFETY: written at once.
                let mut copy: DeviceBuffer<f32> = unsafe { dev.uninit(1)? };
                dev.copy(&norm, &mut copy)?;
                Ok(copy)
            })?;
            dev.launch_graph(&reads)?;
            assert_eq!(dev.download(&copy)?, [4.0]);
            drop(exchange);
            stale(dev.launch_graph(&behind));
            stale(dev.launch_graph(&reads));
            Ok(())
        });
    }

    // What is given away for a gradient is dropped with what takes its place; what is taken back is the caller's as
    // before.
    2: fn graphs_of_memory_that_is_lent(gpus) {
        rig::run(gpus, 2, |dev| {
            let mut exchange = each().build(dev, &[4, 4])?;
            let mut own = [dev.zeros::<f32>(4)?, dev.zeros(4)?];
            let mut graphs = Vec::new();
            for own in &mut own {
                graphs.push(dev.capture(|dev| dev.fill(own, 5.0))?.0);
            }
            let [first, second] = own;
            exchange.lend(0, first)?;
            exchange.lend(1, second)?;
            exchange.lend(1, dev.zeros(4)?)?;
            stale(dev.launch_graph(&graphs[1]));
            dev.launch_graph(&graphs[0])?;
            exchange.ready(dev, 0)?;
            exchange.finish(dev)?;
            let own = exchange.take(0)?;
            drop(exchange);
            dev.launch_graph(&graphs[0])?;
            assert_eq!(dev.download(&own)?, [5.0; 4]);
            Ok(())
        });
    }

    // Members find it out alike, before any meeting.
    2: fn a_graph_with_collectives_from_before_the_move(gpus) {
        rig::run(gpus, 2, |dev| {
            let mut exchange = each().build(dev, &[4, 4])?;
            let mut x = exchange.grad_mut(1)?;
            let (graph, ()) = dev.capture(|dev| dev.all_reduce(&mut x, ReduceOp::Sum))?;
            dev.launch_graph(&graph)?;
            give(dev, &mut exchange, 0, &[1.0; 4])?;
            give(dev, &mut exchange, 1, &[1.0; 4])?;
            assert!(exchange.finish(dev)?.moved());
            stale(dev.launch_graph(&graph));
            dev.barrier()?;
            assert_eq!(all(dev, &exchange)?, [[1.0; 4]; 2]);
            Ok(())
        });
    }

    // The memory itself is as good as any when nobody holds it any more.
    1: fn memory_that_gradients_have_left_is_used_again(gpus) {
        rig::run(gpus, 1, |dev| {
            let mut exchange = each().build(dev, &[1000])?;
            let address = exchange.grad_mut(0)?.address();
            let graph = fills(dev, &mut exchange, 0, 1.0)?;
            drop(exchange);
            stale(dev.launch_graph(&graph));
            drop(graph);
            dev.synchronize()?;
            let mut fresh = Vec::new();
            while fresh.len() < 64 && fresh.iter().all(|x: &DeviceBuffer<f32>| x.address() != address) {
                fresh.push(dev.zeros(1000)?);
            }
            let mut same = fresh.pop().expect("one at least");
            assert_eq!(same.address(), address, "not used again");
            let (graph, ()) = dev.capture(|dev| dev.fill(&mut same, 2.0))?;
            dev.launch_graph(&graph)?;
            assert_eq!(dev.download(&same)?, [2.0; 1000]);
            Ok(())
        });
    }
}
