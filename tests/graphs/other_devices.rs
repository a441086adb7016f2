//! A graph names memory of another device, which works on it meanwhile. Each operation comes before or after the other
//! one, or is [`Error::Borrowed`] and names a call of this file.

use crate::{
    on_both,
    rig::all_work,
    support::{Gpus, TIMEOUT, all_are, cases, failure, until},
};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, Graph, ReduceOp, Result};
use gpu_pool_lab::Explorer;
use parking_lot::Mutex;
use std::{sync::Arc, thread, time::Instant};

/// Operations of the owner in a scope.
const ROUNDS: usize = 4;

/// Elements. On GPUs so many that a copy takes a while.
fn len(gpus: Gpus) -> usize {
    if gpus.is_cuda() { 1 << 20 } else { 200 }
}

/// Whether the operation was done. If not, another call of this file was in its way.
fn is_done(result: Result<()>) -> Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(Error::Borrowed { site, holder: Some((_, held)), .. }) => {
            assert_eq!([site.file(), held.file()], [file!(); 2]);
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Repeats an operation until it is done.
fn at_last(mut op: impl FnMut() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    while !is_done(op())? {
        assert!(start.elapsed() < TIMEOUT / 4, "refused again and again");
        thread::yield_now();
    }
    Ok(())
}

/// The first error.
fn refused(op: impl Fn() -> Result<()>) -> Result<Error> {
    let error = Mutex::new(None);
    until("an operation is refused", || {
        *error.lock() = op().err();
        error.lock().is_some()
    })?;
    Ok(error.into_inner().expect("seen above"))
}

/// The value of all elements.
#[track_caller]
fn value(x: &[f32]) -> f32 {
    assert!(all_are(x, x[0]), "torn: {} and others", x[0]);
    x[0]
}

/// Device 1 captures a copy of device 0's memory and a sum of both. Then device 0 has its memory alone, and uploads to
/// it while device 1 launches.
fn uploads_beside_launches(pool: &GpuPool, len: usize) -> Result<()> {
    pool.run(|dev, _| {
        let (mine, mut sum) = (Arc::new(dev.zeros::<f32>(len)?), dev.zeros::<f32>(len)?);
        let theirs = dev.exchange(mine.clone())?.swap_remove(0);
        let (graph, ()) = dev.capture(|dev| {
            match dev.rank() {
                0 => dev.fill(&mut sum, 0.0)?,
                _ => dev.copy(&theirs.peer(), &mut sum)?,
            }
            dev.all_reduce(&mut sum, ReduceOp::Sum)
        })?;
        drop(theirs);
        dev.barrier()?;
        until("the memory is shared no more", || Arc::strong_count(&mine) == 1)?;
        let mut mine = Arc::into_inner(mine).expect("counted above");
        let mut before = 0.0;
        for round in 1..=ROUNDS {
            dev.barrier()?;
            // Once only: the launch of device 1 may be in the way until this device launches, too.
            let uploads = dev.rank() == 0 && is_done(dev.upload_into(&vec![round as f32; len], &mut mine))?;
            at_last(|| dev.launch_graph(&graph))?;
            let (now, seen) = (if uploads { round as f32 } else { before }, value(&dev.download(&sum)?));
            assert!(dev.rank() != 0 || [before, now].contains(&seen), "{seen}: neither {before} nor {now}");
            before = now;
        }
        Ok(())
    })?;
    Ok(())
}

on_both! {
    2: fn an_upload_beside_a_launch(gpus) {
        let pool = gpus.unwatched(2).build().unwrap();
        for _ in 0..cases(60, 400) {
            uploads_beside_launches(&pool, len(gpus)).unwrap();
        }
        all_work(&pool);
    }

    3: fn a_download_beside_a_launch(gpus) {
        side_by_side(gpus, Graphs::Write, |dev, mine, _| {
            let mut seen = vec![0.0; mine.len()];
            dev.download_into(mine, &mut seen)?;
            value(&seen);
            Ok(())
        });
    }

    3: fn a_collective_beside_a_launch(gpus) {
        for graphs in [Graphs::Read, Graphs::Write] {
            side_by_side(gpus, graphs, |dev, mine, _| dev.group(&[0, 2])?.all_reduce(mine, ReduceOp::Max));
        }
    }

    3: fn a_kernel_beside_a_launch(gpus) {
        for graphs in [Graphs::Read, Graphs::Write] {
            side_by_side(gpus, graphs, |dev, mine, round| dev.fill(mine, round));
        }
    }

    3: fn an_upload_beside_a_launch_that_writes(gpus) {
        side_by_side(gpus, Graphs::Write, |dev, mine, round| dev.upload_into(&vec![round; mine.len()], mine));
    }

    3: fn a_drop_beside_a_launch(gpus) {
        for graphs in [Graphs::Read, Graphs::Write] {
            side_by_side(gpus, graphs, |dev, mine, round| {
                *mine = dev.upload(&vec![round; mine.len()])?;
                Ok(())
            });
        }
    }

    3: fn a_graph_beside_a_graph(gpus) {
        for graphs in [Graphs::Read, Graphs::Write] {
            side_by_side(gpus, graphs, |dev, mine, round| {
                let (graph, ()) = dev.capture(|dev| {
                    dev.fill(mine, round)?;
                    dev.group(&[0, 2])?.all_reduce(mine, ReduceOp::Max)
                })?;
                at_last(|| dev.launch_graph(&graph))
            });
        }
    }

    3: fn a_failed_scope_beside_a_launch(gpus) {
        let pool = gpus.unwatched(3).build().unwrap();
        for _ in 0..cases(5, 50) {
            let error = failure(beside(&pool, len(gpus), Graphs::Read, &|dev, mine, round| {
                if round == 3.0 {
                    return Err(Error::custom("in the middle"));
                }
                dev.group(&[0, 2])?.all_reduce(mine, ReduceOp::Max)?;
                dev.upload_into(&vec![round; mine.len()], mine)
            }));
            assert!(matches!(error, Error::Custom(_)), "{error}");
        }
        beside(&pool, len(gpus), Graphs::Read, &|dev, mine, round| dev.fill(mine, round)).unwrap();
        all_work(&pool);
    }

    2: fn a_collective_refuses_a_launch(gpus) {
        let pool = gpus.unwatched(2).build().unwrap();
        let (place, len) = (Mutex::new(None), len(gpus));
        let seen = pool.run(|dev, _| {
            let (mut mine, mut here) = (dev.upload(&vec![1.0 + dev.rank() as f32; len])?, dev.zeros::<f32>(len)?);
            if dev.rank() == 0 {
                let mut mine = lend(dev, &place, mine)?;
                dev.all_reduce(&mut mine, ReduceOp::Sum)?;
                return Ok(value(&dev.download(&mine)?));
            }
            let graph = capture(dev, &place, &mut here, Graphs::Read)?;
            let error = refused(|| dev.launch_graph(&graph))?;
            let Error::Borrowed { op: "launch_graph", device: 0, holder: Some(("all_reduce", held)), .. } = error else {
                panic!("{error}")
            };
            assert_eq!(held.file(), file!());
            dev.all_reduce(&mut mine, ReduceOp::Sum)?;
            at_last(|| dev.launch_graph(&graph))?;
            Ok(value(&dev.download(&here)?))
        });
        assert_eq!(seen.unwrap(), [3.0, 3.0]);
        all_work(&pool);
    }

    2: fn a_launch_with_a_collective_refuses_another_launch(gpus) {
        let pool = gpus.unwatched(2).build().unwrap();
        let (place, len) = (Mutex::new(None), len(gpus));
        let seen = pool.run(|dev, _| {
            let (mut mine, mut here) = (dev.upload(&vec![1.0 + dev.rank() as f32; len])?, dev.zeros::<f32>(len)?);
            let (sums, ()) = dev.capture(|dev| dev.all_reduce(&mut mine, ReduceOp::Sum))?;
            if dev.rank() == 0 {
                let mine = lend(dev, &place, mine)?;
                dev.launch_graph(&sums)?;
                return Ok(value(&dev.download(&mine)?));
            }
            let graph = capture(dev, &place, &mut here, Graphs::Write)?;
            let error = refused(|| dev.launch_graph(&graph))?;
            let Error::Borrowed { op: "launch_graph", device: 0, holder: Some((_, held)), .. } = error else {
                panic!("{error}")
            };
            assert_eq!(held.file(), file!());
            dev.launch_graph(&sums)?;
            Ok(value(&dev.download(&mine)?))
        });
        // If the copy was done before it was refused, it has written zeros.
        let seen = seen.unwrap();
        assert_eq!(seen[0], seen[1]);
        assert!([2.0, 3.0].contains(&seen[0]), "{seen:?}");
        all_work(&pool);
    }
}

/// The program of the first test, in orders that seeds determine.
#[test]
fn an_upload_beside_a_launch_in_all_orders() {
    let explored = Explorer::new().devices(2).seeds(cases(20, 100)).run(|pool| uploads_beside_launches(pool, 8));
    explored.unwrap_or_else(|failure| panic!("{failure}"));
}

/// What the graph of device 1 does with the memory of device 0.
#[derive(Clone, Copy)]
enum Graphs {
    Read,
    Write,
}

type Place = Mutex<Option<DeviceBuffer<f32>>>;

/// Lets device 1 [capture] a graph that names `mine`.
fn lend(dev: &Device, place: &Place, mine: DeviceBuffer<f32>) -> Result<DeviceBuffer<f32>> {
    *place.lock() = Some(mine);
    dev.barrier()?;
    dev.barrier()?;
    Ok(place.lock().take().expect("put there above"))
}

/// A copy from or to what device 0 [lends](lend).
fn capture(dev: &Device, place: &Place, here: &mut DeviceBuffer<f32>, graphs: Graphs) -> Result<Graph> {
    dev.barrier()?;
    let (graph, ()) = dev.capture(|dev| match (&mut *place.lock(), graphs) {
        (Some(theirs), Graphs::Read) => dev.copy(&theirs.peer(), here),
        (Some(theirs), Graphs::Write) => dev.copy(here, theirs),
        (None, _) => unreachable!("put there before the barrier"),
    })?;
    dev.barrier()?;
    Ok(graph)
}

type Owner<'a> = &'a (dyn Fn(&Device, &mut DeviceBuffer<f32>, f32) -> Result<()> + Sync);

/// Device 0 and device 2 call `owner` with memory of theirs and the numbers of rounds. Meanwhile device 1 launches a
/// graph that names device 0's memory.
fn beside(pool: &GpuPool, len: usize, graphs: Graphs, owner: Owner<'_>) -> Result<()> {
    let place = Mutex::new(None);
    pool.run(|dev, _| {
        let mut mine = dev.zeros::<f32>(len)?;
        let rounds = (1..=ROUNDS).map(|round| round as f32);
        match dev.rank() {
            0 => mine = lend(dev, &place, mine)?,
            1 => {
                let graph = capture(dev, &place, &mut mine, graphs)?;
                let mut before = 0.0;
                for round in (1..=2 * ROUNDS).map(|round| round as f32) {
                    if let Graphs::Write = graphs {
                        dev.fill(&mut mine, round)?;
                    }
                    is_done(dev.launch_graph(&graph))?;
                    let now = value(&dev.download(&mine)?);
                    assert!(before <= now, "{now} after {before}");
                    before = now;
                }
                return Ok(());
            }
            _ => (0..2).try_for_each(|_| dev.barrier())?,
        }
        for round in rounds {
            at_last(|| owner(dev, &mut mine, round))?;
        }
        value(&dev.download(&mine)?);
        Ok(())
    })?;
    Ok(())
}

/// [`beside`], some times. Then all devices still work.
fn side_by_side(gpus: Gpus, graphs: Graphs, owner: impl Fn(&Device, &mut DeviceBuffer<f32>, f32) -> Result<()> + Sync) {
    let pool = gpus.unwatched(3).build().unwrap();
    for _ in 0..cases(10, 200) {
        beside(&pool, len(gpus), graphs, &owner).unwrap();
    }
    all_work(&pool);
}
