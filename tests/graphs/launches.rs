//! What is captured runs when it is launched, ordered like any other operation.

use crate::{
    on_both,
    rig::{SLOW, step},
    support::slow_add,
};
use gpu_pool::{AsViewMut, Result};
use parking_lot::Mutex;
use std::sync::Arc;

on_both! {
    1: fn a_thousand_launches_are_a_thousand_steps(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        pool.run(|dev, shard| {
            let start: Vec<f32> = (0..500).map(|i| (i + shard.index()) as f32 / 500.0).collect();
            let eager = {
                let (mut x, mut y) = (dev.upload(&start)?, dev.upload(&start)?);
                let mut dots = Vec::new();
                for round in 0..1000 {
                    let dot = step(dev, &mut x, &mut y)?;
                    if round % 100 == 99 {
                        dots.push(dev.download(&dot)?);
                    }
                }
                (dots, dev.download(&x)?, dev.download(&y)?)
            };
            let (mut x, mut y) = (dev.upload(&start)?, dev.upload(&start)?);
            let (graph, dot) = dev.capture(|dev| step(dev, &mut x, &mut y))?;
            assert!(graph.operations() >= 8, "{graph:?}");
            assert_eq!((dev.download(&x)?, dev.download(&y)?), (start.clone(), start), "the capture has touched them");
            let mut dots = Vec::new();
            for round in 0..1000 {
                dev.launch_graph(&graph)?;
                if round % 100 == 99 {
                    dots.push(dev.download(&dot)?);
                }
            }
            assert_eq!((dots, dev.download(&x)?, dev.download(&y)?), eager);
            Ok(())
        })
        .unwrap();
    }

    1: fn launches_are_ordered_over_streams(gpus) {
        gpus.run(1, |dev| {
            let (a, b) = (dev.stream()?, dev.stream()?);
            let (a, b) = (dev.on(&a), dev.on(&b));
            let mut x = dev.upload(&[0u32; 100])?;
            let (mut y, mut busy) = (dev.zeros::<u32>(100)?, dev.zeros::<u32>(1)?);
            let (graph, ()) = dev.capture(|dev| {
                slow_add(dev, &mut x, 1, 0)?;
                dev.copy(&x, &mut y)
            })?;
            for round in 0..5 {
                slow_add(&a, &mut busy, 1, SLOW / 3)?;
                dev.fill(&mut x.view_mut(), 10 * round)?;
                a.launch_graph(&graph)?; // after the fill
                b.launch_graph(&graph)?; // after that
                b.fill(&mut y.slice_mut(50..), 99)?;
                assert_eq!(dev.download(&x)?, [10 * round + 2; 100]);
                assert_eq!(dev.download(&y)?, [vec![10 * round + 2; 50], vec![99; 50]].concat());
            }
            Ok(())
        });
    }

    2: fn peers_read_what_a_graph_writes(gpus) {
        let n = gpus.up_to(3);
        for staged in [false, true] {
            let pool = if staged { gpus.staged(n) } else { gpus.pool(n) };
            let seen = pool.run(|dev, _| {
                let mut mine = dev.upload(&[dev.rank() as u32; 5000])?;
                let (graph, ()) = dev.capture(|dev| {
                    slow_add(dev, &mut mine, 10, SLOW / 5)?;
                    slow_add(dev, &mut mine, 10, 0)
                })?;
                let mine = Arc::new(mine);
                let mut all = Vec::new();
                let theirs = dev.exchange(mine.clone())?[(dev.rank() + 1) % n].clone();
                for _ in 0..5 {
                    dev.launch_graph(&graph)?;
                    dev.barrier()?;
                    let copy = theirs.copy_to(dev)?;
                    // The next launch waits for the peer's copy, which nobody has waited for here.
                    dev.barrier()?;
                    all.push(copy);
                }
                dev.launch_graph(&graph)?;
                all.iter().map(|copy| dev.download(copy)).collect::<Result<Vec<_>>>()
            });
            for (rank, copies) in seen.unwrap().into_iter().enumerate() {
                for (round, copy) in copies.into_iter().enumerate() {
                    let expected = ((rank + 1) % n + 20 * (round + 1)) as u32;
                    assert_eq!(copy, vec![expected; 5000], "staged: {staged}");
                }
            }
        }
    }

    2: fn a_graph_copies_from_a_peer(gpus) {
        let pool = gpus.pool(2);
        if pool.report().peer(0, 1).route != gpu_pool::collective::Route::Direct
            || pool.report().peer(1, 0).route != gpu_pool::collective::Route::Direct
        {
            println!("skipped: no direct route between devices 0 and 1");
            return;
        }
        let seen = pool.run(|dev, _| {
            let theirs = dev.exchange(Arc::new(Mutex::new(dev.zeros::<u32>(1000)?)))?;
            let (mine, theirs) = (&theirs[dev.rank()], &theirs[1 - dev.rank()]);
            let mut here = dev.zeros::<u32>(1000)?;
            let (graph, ()) = dev.capture(|dev| dev.copy(&theirs.lock().peer(), &mut here))?;
            let mut seen = Vec::new();
            for round in 0..5 {
                let mut busy = dev.zeros::<u32>(1)?;
                slow_add(dev, &mut busy, 1, SLOW / 5)?;
                dev.fill(&mut *mine.lock(), round * 10 + dev.rank() as u32)?;
                dev.barrier()?;
                dev.launch_graph(&graph)?;
                dev.barrier()?;
                seen.push(dev.download(&here)?);
            }
            Ok(seen)
        });
        for (rank, seen) in seen.unwrap().into_iter().enumerate() {
            for (round, seen) in seen.into_iter().enumerate() {
                assert_eq!(seen, vec![(round * 10 + 1 - rank) as u32; 1000]);
            }
        }
    }
}
