//! A step that fails ends on all devices, with its error, and the pool works on.

use super::{SHAPES, model::*, schedules};
use crate::{
    on_both,
    support::{Gpus, cases, failure},
};
use gpu_pool::{Device, Error, GpuPool};
use gpu_pool_lab::{FaultPlan, FaultRule, Injected, prelude::*};
use gpu_pool_train::{Action, Pipeline, PipelineSchedule, StageContext, Work};
use std::sync::{Arc, Mutex};

/// How a stage fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Error,
    Panic,
}

/// The action that fails, if one does.
type Fault = Arc<Mutex<Option<(Action, How)>>>;

/// A layer that fails at one action, when the work of it is in flight.
fn fails(
    fault: &Fault,
    dev: &Device,
    stage: usize,
) -> gpu_pool::Result<Around<impl Fn(StageContext, Work) -> gpu_pool::Result<()> + use<>>> {
    let fault = fault.clone();
    let look = move |at: StageContext, work| {
        let fault = *fault.lock().unwrap();
        match fault.filter(|(action, _)| *action == Action { stage: at.stage, work, micro: at.micro }) {
            None => Ok(()),
            Some((action, How::Error)) => Err(Error::custom(format!("{action} fails"))),
            Some((action, How::Panic)) => panic!("{action} panics"),
        }
    };
    Ok(Around(Layer::new(dev, stage)?, look))
}

/// A step fails at each action of the schedule in turn; the next one is right.
fn at_every_action(gpus: Gpus, pool: &GpuPool, name: &str, schedule: &PipelineSchedule, how: How) {
    let fault = Fault::default();
    let expected = on_one_device(gpus, schedule, 1);
    let make = |dev: &Device, stage| fails(&fault, dev, stage);
    let mut model = Pipeline::new(pool, schedule.clone(), make).unwrap();
    let mut go = || step(&mut model, |dev, stage| stage.0.gradients(dev));
    assert_eq!(go().unwrap(), expected);
    for rank in 0..schedule.ranks() {
        for &action in schedule.actions(rank).iter().step_by(cases(5, 1)) {
            *fault.lock().unwrap() = Some((action, how));
            let error = failure(step(&mut model, |dev, stage| stage.0.gradients(dev)));
            match (&error, how) {
                (Error::Custom(_), How::Error) => assert_eq!(error.to_string(), format!("{action} fails"), "{name}"),
                (Error::Panicked { device, message, .. }, How::Panic) => {
                    assert_eq!((*device, message.as_str()), (rank, format!("{action} panics").as_str()), "{name}");
                }
                _ => panic!("{name} at {action}: {error}"),
            }
            *fault.lock().unwrap() = None;
            let poisoned = failure(step(&mut model, |dev, stage| stage.0.gradients(dev)));
            assert!(matches!(poisoned, Error::Poisoned { .. }), "{poisoned}");
            model.clear_poison().unwrap();
            let after = step(&mut model, |dev, stage| stage.0.gradients(dev)).unwrap();
            assert_eq!(after, expected, "{name} after {action}");
        }
    }
    model.reset(make).unwrap();
    assert_eq!(step(&mut model, |dev, stage| stage.0.gradients(dev)).unwrap(), expected);
}

on_both! {
    2: fn a_stage_that_fails(gpus) {
        let (ranks, micros) = SHAPES[0];
        let pool = gpus.pool(ranks);
        for (name, schedule) in schedules(ranks, micros) {
            at_every_action(gpus, &pool, name, &schedule, How::Error);
        }
    }
    3: fn a_stage_of_three_that_panics(gpus) {
        let schedule = PipelineSchedule::zero_bubble_v(3, 3).unwrap();
        at_every_action(gpus, &gpus.pool(3), "zero bubble v", &schedule, How::Panic);
    }

    // The closures of the caller fail as stages do.
    2: fn inputs_and_losses_that_fail(gpus) {
        let pool = gpus.pool(2);
        let schedule = PipelineSchedule::one_f_one_b(2, 4).unwrap();
        let mut model = pipeline(&pool, &schedule).unwrap();
        for micro in 0..4 {
            let no = |at: usize, what: &str| match at == micro {
                true => Err(Error::custom(format!("no {what} {at}"))),
                false => Ok(()),
            };
            let error = failure(model.step(
                |dev, at| no(at, "input").and_then(|()| input(dev, at, 4)),
                |dev, _, y| loss(dev, y),
            ));
            assert_eq!(error.to_string(), format!("no input {micro}"));
            model.clear_poison().unwrap();
            let error = failure(model.step(
                |dev, at| input(dev, at, 4),
                |dev, at, y| no(at, "loss").and_then(|()| loss(dev, y)),
            ));
            assert_eq!(error.to_string(), format!("no loss {micro}"));
            model.clear_poison().unwrap();
        }
        assert_eq!(step(&mut model, |dev, layer| layer.gradients(dev)).unwrap(), on_one_device(gpus, &schedule, 1));
    }
}

/// A call of one device's driver fails, every seventh one in turn: a typed error or the right result, and a pool that
/// works. (Without `GPU_POOL_LONG=1` every 83rd.)
#[test]
fn with_a_call_that_fails() {
    let gpus = Gpus::software();
    for (name, schedule) in schedules(2, 3) {
        let expected = on_one_device(gpus, &schedule, 1);
        for fault in [Injected::Error, Injected::OutOfMemory] {
            for n in (1..).step_by(cases(83, 7)) {
                let plan = FaultPlan::new().on(FaultRule::new(fault).device(1).nth(n)).paused();
                let pool = gpus.builder(2).faults(plan.clone()).build().unwrap();
                let mut model = pipeline(&pool, &schedule).unwrap();
                plan.resume();
                let found = step(&mut model, |dev, layer| layer.gradients(dev));
                plan.pause();
                let fired = plan.fired();
                match found {
                    Ok(found) => assert_eq!(found, expected, "{name}: {fired:?}"),
                    Err(Error::Driver { device: 1, .. } | Error::OutOfMemory { .. }) => {
                        model.reset(Layer::new).unwrap();
                    }
                    Err(error) => panic!("{name}: {fired:?} became {error}"),
                }
                assert_eq!(step(&mut model, |dev, layer| layer.gradients(dev)).unwrap(), expected, "{name}: {fired:?}");
                if fired.is_empty() {
                    break;
                }
            }
        }
    }
}
