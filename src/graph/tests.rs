//! How often the members meet, which nobody outside can see.

use crate::{Check, Device, GpuPool, ReduceOp, error::Result};

/// Collectives in the graph.
const CAPTURED: u64 = 5;
const LAUNCHES: u64 = 100;

/// Meetings so far of the whole gang in this scope.
fn meetings(dev: &Device) -> u64 {
    dev.session.gang.word().committed()
}

/// How many meetings a launch of a graph with [`CAPTURED`] collectives is, and the parts that it has.
fn meetings_of_a_launch(pool: &GpuPool) -> (u64, usize) {
    let found = pool.run(|dev, _| {
        let mut x = dev.upload(&[1.0f32; 100])?;
        let before = meetings(dev);
        let (graph, ()) = dev.capture(|dev| {
            (0..CAPTURED).try_for_each(|_| -> Result<()> {
                dev.scale(&mut x, 1.0)?;
                dev.all_reduce(&mut x, ReduceOp::Avg)
            })
        })?;
        assert_eq!(meetings(dev) - before, CAPTURED, "each is met for while it is captured");
        let before = meetings(dev);
        (0..LAUNCHES).try_for_each(|_| dev.launch_graph(&graph))?;
        let met = meetings(dev) - before;
        assert_eq!(dev.download(&x)?, [1.0; 100]);
        // One collective that comes after it: the numbers go on.
        dev.all_reduce(&mut x, ReduceOp::Avg)?;
        assert_eq!(meetings(dev) - before, met + 1);
        Ok((met, graph.parts.len()))
    });
    let (met, parts) = found.unwrap().remove(0);
    assert_eq!(met % LAUNCHES, 0);
    (met / LAUNCHES, parts)
}

#[test]
fn where_kernels_do_not_meet_a_launch_is_a_meeting_for_each_collective() {
    let pool = GpuPool::builder().host(3).build().unwrap();
    assert_eq!(meetings_of_a_launch(&pool), (CAPTURED, 2 * CAPTURED as usize));
}

#[test]
fn a_gang_of_one_meets_nobody() {
    let pool = GpuPool::builder().host(1).build().unwrap();
    let parts = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(10)?;
        let (graph, ()) = dev.capture(|dev| dev.all_reduce(&mut x, ReduceOp::Avg))?;
        assert!(graph.gathering.is_none());
        Ok(graph.parts.len())
    });
    assert_eq!(parts.unwrap(), [1]);
}

/// The claim: one meeting and one call of the driver for the whole graph.
#[cfg(feature = "cuda")]
#[test]
fn where_kernels_meet_a_launch_is_one_meeting() {
    match crate::driver::cuda::device_count().unwrap_or(0) {
        0 => println!("skipped: no CUDA device"),
        1 => println!("skipped: needs 2 CUDA devices"),
        _ => {
            let pool = GpuPool::builder().cuda().devices(&[0, 1]).check(Check::Off).build().unwrap();
            if pool.shared.signals.get().is_none() {
                println!("skipped: kernels of these devices do not meet");
                return;
            }
            assert_eq!(meetings_of_a_launch(&pool), (1, 1));
        }
    }
}

/// Without one the devices' kernels run as they are called, and a graph is cut: in a pool that is watched, and on software GPUs.
#[test]
fn a_watched_pool_cuts_its_graphs() {
    let pool = GpuPool::builder().host(2).check(Check::Races).build().unwrap();
    assert_eq!(meetings_of_a_launch(&pool).0, CAPTURED);
}
