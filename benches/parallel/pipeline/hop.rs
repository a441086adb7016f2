//! What a hop of a pipeline costs the host: steps of stages that give on what they got, with many micro-batches.

use std::time::Instant;

use gpu_pool::{Device, DeviceBuffer, GpuPool, Result};
use gpu_pool_train::{Pipeline, PipelineSchedule, Stage, StageContext};

use crate::{
    Machine,
    machine::build,
    support::{Bench, MICROSECONDS, Side},
};

/// A stage without work.
struct Pass;

impl Stage for Pass {
    type Activation = DeviceBuffer<f32>;
    type Saved = ();

    fn forward(&mut self, _: &Device, _: StageContext, x: DeviceBuffer<f32>) -> Result<(DeviceBuffer<f32>, ())> {
        Ok((x, ()))
    }

    fn backward(
        &mut self,
        _: &Device,
        _: StageContext,
        (): (),
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>> {
        Ok(Some(dy))
    }
}

pub fn run(bench: &mut Bench, machine: &Machine) {
    let micros = bench.size(1000, 100);
    bench.set_turns(2, bench.size(15, 3));
    for (kind, devices) in [("software", 2), ("gpu", 2)] {
        let case = format!("{kind}/hop/{devices}");
        if !bench.wants(&case) || (kind == "gpu" && (machine.software || machine.devices < devices)) {
            continue;
        }
        let pool = if kind == "gpu" { machine.pool(devices) } else { build(GpuPool::builder().host(devices)) };
        let schedule = PipelineSchedule::one_f_one_b(devices, micros).expect("a schedule");
        let mut pipeline = Pipeline::new(&pool, schedule, |_, _| Ok(Pass)).expect("a stage on each device");
        // Each micro-batch goes to the last stage and back.
        let hops = 2 * micros * (devices - 1);
        let ours = Side::new("gpu-pool", || {
            let clock = Instant::now();
            pipeline.step(|dev, _| dev.zeros(1), |_, _, y| Ok((y, ()))).expect("a step");
            clock.elapsed().as_secs_f64() * 1e6 / hops as f64
        });
        bench.compare(&case, MICROSECONDS, ours, vec![]);
    }
}
