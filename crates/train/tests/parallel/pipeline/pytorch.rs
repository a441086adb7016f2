//! PyTorch's tests of pipelines: `test/distributed/pipelining/test_schedule_multiproc.py` and `test_stage.py`.

use super::{model::*, schedules};
use crate::on_both;
use gpu_pool::Device;
use gpu_pool_train::{Pipeline, PipelineSchedule, StageContext};
use std::{thread, time::Duration};

on_both! {
    // `test_forward_only`: twenty iterations, each with the output of the whole model.
    2: fn forward_only(gpus) {
        let ranks = gpus.up_to(4);
        let schedule = PipelineSchedule::gpipe(ranks, 4).unwrap();
        let expected = on_one_device(gpus, &schedule, 1).0;
        let pool = gpus.pool(ranks);
        let mut model = pipeline(&pool, &schedule).unwrap();
        for _ in 0..20 {
            let outputs = model.forward(|dev, micro| input(dev, micro, 4), |dev, _, y| dev.download(&y)).unwrap();
            for (micro, output) in outputs.iter().enumerate() {
                assert_eq!(output.len(), rows(micro, 4).len() * WIDTH);
            }
            let losses = model.forward(|dev, micro| input(dev, micro, 4), |dev, _, y| Ok(loss(dev, y)?.1));
            assert_eq!(losses.unwrap(), expected);
        }
    }

    // `test_multi_iter`: the state of one step does not reach the next; the weights change after each.
    2: fn multi_iter(gpus) {
        let pool = gpus.pool(2);
        for (name, schedule) in [schedules(2, 3).remove(1), schedules(2, 3).remove(6)] {
            assert_eq!(pipelined(&pool, &schedule, 20).unwrap(), on_one_device(gpus, &schedule, 20), "{name}");
        }
    }

    // PiPPy#1088: stages that take their time in different ways must not get stuck.
    2: fn sleeping_stages(gpus) {
        let pool = gpus.pool(2);
        for (name, schedule) in schedules(2, 4) {
            let sleep = |at: StageContext, _| {
                thread::sleep(Duration::from_millis([3, 0, 1, 5][(at.stage + at.micro) % 4]));
                Ok(())
            };
            let make = |dev: &Device, stage| Ok(Around(Layer::new(dev, stage)?, sleep));
            let mut model = Pipeline::new(&pool, schedule.clone(), make).unwrap();
            let found = step(&mut model, |dev, stage| stage.0.gradients(dev)).unwrap();
            assert_eq!(found, on_one_device(gpus, &schedule, 1), "{name}");
        }
    }

    // `test_stage.py`: a single stage is a pipeline, too, and a training step and an inference go by turns.
    1: fn one_stage(gpus) {
        let pool = gpus.pool(1);
        let schedule = PipelineSchedule::one_f_one_b(1, 3).unwrap();
        let expected = on_one_device(gpus, &schedule, 1);
        let mut model = pipeline(&pool, &schedule).unwrap();
        for _ in 0..2 {
            assert_eq!(step(&mut model, |dev, layer| layer.gradients(dev)).unwrap(), expected);
            let losses = model.forward(|dev, micro| input(dev, micro, 3), |dev, _, y| Ok(loss(dev, y)?.1));
            assert_eq!(losses.unwrap(), expected.0);
        }
    }
}
