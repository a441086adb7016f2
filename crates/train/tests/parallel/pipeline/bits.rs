//! Losses and gradients have the bits of one device.

use super::{SHAPES, model::*, schedules};
use crate::{
    on_both,
    support::{Gpus, cases},
};
use gpu_pool::{Device, DeviceBuffer, Error, GpuPool, ReduceOp};
use gpu_pool_lab::Explorer;
use gpu_pool_train::{Pipeline, PipelineSchedule, Stage, StageContext};
use std::any::Any;

fn have_the_bits_of_one_device(gpus: Gpus, shapes: usize, pool: impl Fn(usize) -> GpuPool) {
    for (ranks, micros) in SHAPES.into_iter().take(shapes).filter(|&(ranks, _)| ranks <= gpus.up_to(4)) {
        let pool = pool(ranks);
        for (name, schedule) in schedules(ranks, micros) {
            let found = pipelined(&pool, &schedule, 2).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(found.0.iter().all(|&loss| loss > 0.0) && found.1.iter().flatten().any(|&g| g != 0.0));
            assert_eq!(found, on_one_device(gpus, &schedule, 2), "{name} on {ranks}");
        }
    }
}

on_both! {
    // `test_grad_with_manual`, `test_grad_with_manual_interleaved`, `test_schedule_with_native_zero_bubble`,
    // `test_v_shape_schedules`, and uneven micro-batches, which pytorch#126600 refuses. Under the race checker.
    2: fn of_each_schedule(gpus) { have_the_bits_of_one_device(gpus, 3, |ranks| gpus.pool(ranks)); }
    2: fn of_each_schedule_without_peer_access(gpus) {
        have_the_bits_of_one_device(gpus, cases(1, 3), |ranks| gpus.staged(ranks));
    }

    // `test_grad_with_manual_interleaved` looks for leaks, too: a step leaves no memory behind.
    2: fn a_step_leaves_no_memory_behind(gpus) {
        let pool = gpus.pool(2);
        for (name, schedule) in schedules(2, 6) {
            let mut pipeline = pipeline(&pool, &schedule).unwrap();
            let mut in_use = || {
                step(&mut pipeline, |dev, layer| layer.gradients(dev)).unwrap();
                pool.run(|dev, _| Ok(dev.stats().in_use)).unwrap()
            };
            let first = in_use();
            assert_eq!([in_use(), in_use()], [first.clone(), first], "{name}");
        }
    }

    // Data parallel times pipeline parallel.
    4: fn two_pipelines_beside_each_other(gpus) {
        let pool = gpus.pool(4);
        for (name, schedule) in schedules(2, 4) {
            // The ranks of the second pipeline run down the devices.
            let ranks = |dev: &Device| if dev.rank().is_multiple_of(3) { [0, 3] } else { [2, 1] };
            let group = Pipeline::new_in(&pool, move |dev| dev.group(&ranks(dev)), schedule.clone(), Layer::new);
            let mut two = group.unwrap();
            let losses = two.step(|dev, micro| input(dev, micro, 4), |dev, _, y| loss(dev, y)).unwrap();
            let gradients = two
                .each(|dev, stage, layer| {
                    let rank = schedule.rank_of(stage);
                    dev.group(&[[0, 3][rank], [2, 1][rank]])?.all_reduce(&mut layer.dw, ReduceOp::Sum)?;
                    dev.download(&layer.dw)
                })
                .unwrap();
            let one = on_one_device(gpus, &schedule, 1);
            assert_eq!(losses, [one.0.clone(), one.0].concat(), "{name}");
            let double = |g: &Vec<f32>| g[..WIDTH * WIDTH].iter().map(|g| 2.0 * g).collect::<Vec<_>>();
            let doubled: Vec<_> = one.1.iter().map(double).collect();
            assert_eq!(gradients, [doubled.clone(), doubled].concat(), "{name}");
        }
    }

    // Stages that differ, as variants of an enum and as boxes.
    2: fn stages_of_different_types(gpus) {
        let schedule = PipelineSchedule::interleaved(2, 2, 4).unwrap();
        let pool = gpus.pool(2);
        let mut model = Pipeline::new(&pool, schedule.clone(), |dev, stage| {
            Ok(if stage == 1 { Part::Pass(Pass) } else { Part::Layer(Layer::new(dev, stage)?) })
        })
        .unwrap();
        let by_enum = step(&mut model, |dev, part| match part {
            Part::Layer(layer) => layer.gradients(dev),
            Part::Pass(_) => Ok(vec![]),
        });
        let mut model = Pipeline::new(&pool, schedule, |dev, stage| -> Result<Boxed, Error> {
            Ok(if stage == 1 { Box::new(AnySaved(Pass)) } else { Box::new(AnySaved(Layer::new(dev, stage)?)) })
        })
        .unwrap();
        let losses = model.step(|dev, micro| input(dev, micro, 4), |dev, _, y| loss(dev, y)).unwrap();
        let by_enum = by_enum.unwrap();
        assert_eq!(losses, by_enum.0);
        assert!(by_enum.1[1].is_empty() && by_enum.1[2].iter().any(|&g| g != 0.0));
    }
}

enum Part {
    Layer(Layer),
    Pass(Pass),
}

enum PartSaved {
    Layer(Saved),
    Pass,
}

/// Passes on what it gets.
struct Pass;

impl Stage for Pass {
    type Activation = DeviceBuffer<f32>;
    type Saved = ();
    fn forward(&mut self, _: &Device, _: StageContext, x: DeviceBuffer<f32>) -> Result<(DeviceBuffer<f32>, ()), Error> {
        Ok((x, ()))
    }
    fn backward(
        &mut self,
        _: &Device,
        _: StageContext,
        _: (),
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>, Error> {
        Ok(Some(dy))
    }
}

impl Stage for Part {
    type Activation = DeviceBuffer<f32>;
    type Saved = PartSaved;
    fn forward(
        &mut self,
        dev: &Device,
        at: StageContext,
        x: DeviceBuffer<f32>,
    ) -> Result<(DeviceBuffer<f32>, PartSaved), Error> {
        Ok(match self {
            Part::Layer(layer) => layer.forward(dev, at, x).map(|(y, saved)| (y, PartSaved::Layer(saved)))?,
            Part::Pass(pass) => pass.forward(dev, at, x).map(|(y, ())| (y, PartSaved::Pass))?,
        })
    }
    fn backward(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: PartSaved,
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>, Error> {
        match (self, saved) {
            (Part::Layer(layer), PartSaved::Layer(saved)) => layer.backward(dev, at, saved, dy),
            (Part::Pass(pass), PartSaved::Pass) => pass.backward(dev, at, (), dy),
            _ => unreachable!("a stage gets what it has saved"),
        }
    }
}

/// Any stage, as a box.
type Boxed = Box<dyn Stage<Activation = DeviceBuffer<f32>, Saved = Box<dyn Any>>>;

/// A stage whose saved values have no type of their own.
struct AnySaved<S>(S);

impl<S: Stage<Activation = DeviceBuffer<f32>, Saved: 'static>> Stage for AnySaved<S> {
    type Activation = DeviceBuffer<f32>;
    type Saved = Box<dyn Any>;
    fn forward(
        &mut self,
        dev: &Device,
        at: StageContext,
        x: DeviceBuffer<f32>,
    ) -> Result<(DeviceBuffer<f32>, Box<dyn Any>), Error> {
        let (y, saved) = self.0.forward(dev, at, x)?;
        Ok((y, Box::new(saved)))
    }
    fn backward(
        &mut self,
        dev: &Device,
        at: StageContext,
        saved: Box<dyn Any>,
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>, Error> {
        self.0.backward(dev, at, *saved.downcast().expect("a stage gets what it has saved"), dy)
    }
}

#[test]
fn in_many_interleavings() {
    for (name, schedule) in schedules(2, 4) {
        let expected = on_one_device(Gpus::software(), &schedule, 1);
        let explorer = Explorer::new().devices(2).seeds(cases(4, 100));
        let run = explorer.run(|pool| {
            assert_eq!(pipelined(pool, &schedule, 1)?, expected);
            Ok(())
        });
        if let Err(failure) = run {
            panic!("{name}: {failure}");
        }
    }
}
