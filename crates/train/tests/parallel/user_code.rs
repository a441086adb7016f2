//! The program's own code panics where a model's parallel calls it: the call says so, the next scope works, and no
//! memory is lost.

use crate::bomb::{At, Bomb, Case, MESSAGE, Memory, fails_only_its_call};
use gpu_pool::{Device, DeviceBuffer, Group, Result};
use gpu_pool_train::{self as parallel, DataParallel, Model, Optimizer, Pipeline, PipelineSchedule, Stage};

impl Model for Memory {
    fn parameters(&mut self) -> Vec<&mut DeviceBuffer<f32>> {
        self.0.strike(At::Parameters);
        vec![&mut self.1]
    }
}

/// Passes on what it gets.
struct Passes;

impl Stage for Passes {
    type Activation = Bomb;
    type Saved = ();

    fn forward(&mut self, _: &Device, _: parallel::StageContext, x: Bomb) -> Result<(Bomb, ())> {
        Ok((x, ()))
    }

    fn backward(&mut self, _: &Device, _: parallel::StageContext, (): (), dy: Bomb) -> Result<Option<Bomb>> {
        Ok(Some(dy))
    }
}

/// Device 1 runs the program's code while device 0 waits for it.
const FAIL: &[Case] = &[
    ("Transfer", |pool| {
        let mut pipeline = Pipeline::new(pool, PipelineSchedule::gpipe(2, 2)?, |_, _| Ok(Passes))?;
        pipeline.forward(|_, _| Ok(Bomb(At::Transfer)), |_, _, _| Ok(())).map(drop)
    }),
    ("Model::parameters", |pool| {
        let own = |dev: &Device| if dev.rank() == 1 { At::Parameters } else { At::Transfer };
        DataParallel::new(pool, Optimizer::sgd(0.1), |dev| Memory::new(dev, own(dev))).map(drop)
    }),
    ("the groups of a model", |pool| {
        fn group(dev: &Device) -> Result<Group<'_>> {
            assert!(dev.rank() != 1, "{MESSAGE}");
            dev.group(&[0, 1])
        }
        DataParallel::new_in(pool, group, Optimizer::sgd(0.1), |dev| Memory::new(dev, At::Transfer)).map(drop)
    }),
];

#[test]
fn code_of_the_program_that_panics_fails_only_its_call() {
    fails_only_its_call(FAIL, &[]);
}
