//! What software GPUs show: slopes by many runs, all schedules, faults at each call, virtual time.

use super::{
    INPUT, LABELS,
    block::{self, Block, SHAPES},
    everyone, near, trained,
};
use crate::support::{self, Gpus, cases};
use gpu_pool::{Error, GpuPool, ReduceOp, Result};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{Check, Explorer, FaultOp, FaultPlan, FaultRule, Injected, Topology};
use gpu_pool_train::ColumnLinear;

/// The gradients are those of the loss: central differences, on two devices.
#[test]
fn gradients_are_slopes() {
    let pool = support::builder().host(2).build().unwrap();
    let loss = |weights: &[Vec<f64>]| -> f64 {
        let losses = pool.run(|dev, _| {
            let group = everyone(dev)?;
            let loss = Block::new(&group, weights)?.step(&group, &INPUT, &LABELS)?;
            dev.download(&loss)
        });
        losses.unwrap()[0].iter().sum::<f64>() / block::TOKENS as f64
    };
    let (_, gradients) = trained(&pool, &[0, 1], 1);
    for (i, (name, rows, cols)) in SHAPES.into_iter().enumerate() {
        for at in [rows * cols / 2, 0, rows * cols - 1].into_iter().take(cases(1, 3)) {
            let moved = |by: f64| {
                let mut weights = block::weights();
                weights[i][at] += by;
                loss(&weights)
            };
            let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            near(&[gradients[i][at]], &[slope], 1e-8, name);
        }
    }
}

/// In whatever order the devices' operations run: the same bits.
#[test]
fn every_schedule_gives_the_same_bits() {
    let want = trained(&Gpus::software().pool(3), &[0, 1, 2], 2);
    let explored = Explorer::new().devices(3).seeds(cases(5, 100)).run(|pool| {
        assert_eq!(trained(pool, &[0, 1, 2], 2), want);
        Ok(())
    });
    if let Err(failed) = explored {
        panic!("{failed}");
    }
}

/// A call of the driver fails, one after the other, in the collectives and between them: the scope returns the error,
/// and the next step is right.
#[test]
fn a_fault_at_any_call_leaves_a_usable_pool() {
    for op in [FaultOp::Record, FaultOp::Launch] {
        let mut at = 1;
        loop {
            let plan = FaultPlan::new().on(FaultRule::new(Injected::Error).device(1).op(op).nth(at)).paused();
            let pool = GpuPool::builder().host(3).check(Check::Races).faults(plan.clone()).build().unwrap();
            plan.resume();
            let step = |pool: &GpuPool| {
                pool.run(|dev, _| {
                    let group = everyone(dev)?;
                    let loss = Block::new(&group, &block::weights())?.step(&group, &INPUT, &LABELS)?;
                    dev.download(&loss)
                })
            };
            let found = step(&pool);
            plan.pause();
            if plan.fired().is_empty() {
                found.unwrap();
                assert!(at > 20, "{op:?}: only {at} calls");
                break;
            }
            if let Err(error) = &found {
                assert!(matches!(error, Error::Driver { device: 1, .. }), "{op:?} {at}: {error}");
            }
            let losses = step(&pool).unwrap();
            assert!(losses.iter().all(|loss| *loss == losses[0] && loss.iter().all(|x| x.is_finite())));
            at += cases(5, 1);
        }
    }
}

/// In virtual time a step back takes less than its parts, one after the other: the all-reduce goes on beside the
/// gradients of the weights.
#[test]
fn the_all_reduce_is_beside_the_gradients_of_the_weights() {
    let pool = GpuPool::builder().topology(Topology::nvswitch(2)).dry().build().unwrap();
    let (rows, inputs, outputs) = (2048, 4096, 4096);
    let times = pool.run(|dev, _| {
        let group = everyone(dev)?;
        let (weight, bias) = (vec![0.0f32; inputs * outputs], vec![0.0f32; outputs]);
        let mut layer = ColumnLinear::new(&group, &weight, &bias)?;
        let (x, dy) = (dev.zeros::<f32>(rows * inputs)?, dev.zeros::<f32>(rows * outputs / 2)?);
        let mut sum = dev.zeros::<f32>(rows * inputs)?;
        let alone = dev.group(&[dev.rank()])?;
        let time = |what: &mut dyn FnMut() -> Result<()>| {
            dev.synchronize()?;
            dev.barrier()?;
            let start = dev.record_timed()?;
            what()?;
            let end = dev.record_timed()?;
            dev.synchronize()?;
            end.elapsed_since(&start)
        };
        let together = time(&mut || {
            let dx = layer.backward(&group, &x, &dy, rows, false)?;
            dev.scale(&mut sum.slice_mut(..1), 1.0)?;
            dev.copy(&dx.slice(..1), &mut sum.slice_mut(..1))
        })?;
        // The same with a group of one exchanges nothing.
        let computing = time(&mut || layer.backward(&alone, &x, &dy, rows, false).map(drop))?;
        let exchanging = time(&mut || group.all_reduce(&mut sum, ReduceOp::Sum))?;
        Ok((together, computing, exchanging))
    });
    for (together, computing, exchanging) in times.unwrap() {
        let shorter = computing.min(exchanging);
        println!("together {together:?}, computing {computing:?}, exchanging {exchanging:?}");
        assert!(together < computing + exchanging - shorter / 4, "{together:?} {computing:?} {exchanging:?}");
    }
}
