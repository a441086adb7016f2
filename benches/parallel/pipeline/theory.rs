//! The executor against `PipelineSchedule::simulate`, on software GPUs with kernels of known length.
//!
//! * `software/pipeline/virtual/<schedule>/<devices>x<micro-batches>`: milliseconds of virtual time, from the first to
//!   the last action of the first device. A forward pass takes 5 ms, a backward pass 10
//! * `software/pipeline/sleep/...`: milliseconds of a step by the clock, on asynchronous software GPUs. A kernel sleeps
//!   10 ms; a backward pass is two kernels. This shows what virtual time does not: a wait for more than is needed.
//!   Four devices, or two on a host of less than 8 cores, where sleeping kernels can also delay copies
//!
//! The peer is `simulate`, so a ratio of 1 is right. Targets: 1 % for virtual time, 10 % by the clock.

use std::{
    thread,
    time::{Duration, Instant},
};

use gpu_pool::{Device, DeviceBuffer, Event, GpuPool, LaunchDims, Module, Result, kernel};
use gpu_pool_lab::{Topology, prelude::*};
use gpu_pool_train::{Costs, Pipeline, PipelineSchedule, Stage, StageContext};

use crate::{
    machine::build,
    support::{Bench, MILLISECONDS, Side},
};

// The software GPUs run the function below; no GPU has this kernel.
static MODULE: Module = Module::ptx(include_str!("../../../kernels/ptx/elementwise.ptx"));
kernel! {
    static NAP: "nap" in MODULE, fn(x: &mut [f32]) |_dims| {
        thread::sleep(NAP_TIME);
        x[0] += 1.0;
    }
}

const NAP_TIME: Duration = Duration::from_millis(10);
/// Of a forward pass in virtual time, about; what it really is, is measured.
const VIRTUAL: Duration = Duration::from_millis(5);

/// A stage that takes time and computes nothing.
struct Busy {
    x: DeviceBuffer<f32>,
    naps: bool,
    start: Option<Event>,
    end: Option<Event>,
}

impl Busy {
    fn new(dev: &Device, len: usize, naps: bool) -> Result<Self> {
        Ok(Busy { x: dev.zeros(len)?, naps, start: None, end: None })
    }

    /// So many kernels, the first one behind `needs`.
    fn work(&mut self, dev: &Device, kernels: usize, needs: Option<&DeviceBuffer<f32>>) -> Result<()> {
        if self.start.is_none() {
            self.start = Some(dev.record_timed()?);
        }
        if let Some(needs) = needs {
            dev.copy(needs, &mut self.x.slice_mut(..1))?;
        }
        for _ in 0..kernels {
            if self.naps {
                // SAFETY: it adds 1 to the first element.
                unsafe { dev.launch(&NAP, LaunchDims::cover(1), (&mut self.x,))? };
            } else {
                dev.scale(&mut self.x, 1.0)?;
            }
        }
        self.end = Some(dev.record_timed()?);
        Ok(())
    }

    /// From the first kernel to the last.
    fn took(&self) -> Result<Duration> {
        let (start, end) = (self.start.as_ref().expect("it has run"), self.end.as_ref().expect("it has run"));
        end.elapsed_since(start)
    }
}

impl Stage for Busy {
    type Activation = DeviceBuffer<f32>;
    type Saved = ();

    fn forward(&mut self, dev: &Device, _: StageContext, x: DeviceBuffer<f32>) -> Result<(DeviceBuffer<f32>, ())> {
        self.work(dev, 1, Some(&x))?;
        Ok((dev.zeros(1)?, ()))
    }

    fn backward(
        &mut self,
        dev: &Device,
        _: StageContext,
        (): (),
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>> {
        self.work(dev, 2, Some(&dy))?;
        dev.zeros(1).map(Some)
    }

    fn backward_input(
        &mut self,
        dev: &Device,
        _: StageContext,
        (): &mut (),
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>> {
        self.work(dev, 1, Some(&dy))?;
        dev.zeros(1).map(Some)
    }

    fn backward_weights(&mut self, dev: &Device, _: StageContext, (): ()) -> Result<()> {
        self.work(dev, 1, None)
    }
}

fn schedules(ranks: usize, micros: usize) -> [(&'static str, PipelineSchedule); 3] {
    let right = "a schedule";
    [
        ("gpipe", PipelineSchedule::gpipe(ranks, micros).expect(right)),
        ("1f1b", PipelineSchedule::one_f_one_b(ranks, micros).expect(right)),
        ("zero_bubble", PipelineSchedule::zero_bubble(ranks, 1, micros).expect(right)),
    ]
}

pub fn run(bench: &mut Bench) {
    for (ranks, micros) in [(2, 4), (2, 16), (4, 8), (4, 32), (8, 16), (8, 64)] {
        for (name, schedule) in schedules(ranks, micros) {
            let case = format!("software/pipeline/virtual/{name}/{ranks}x{micros}");
            if bench.wants(&case) {
                let (found, right) = virtual_time(&schedule).expect("a dry run");
                bench.set_turns(0, 1);
                let side = |name, value| Side::new(name, move || value);
                bench.compare(&case, MILLISECONDS, side("gpu-pool", found), vec![side("simulate", right)]);
            }
        }
    }
    // Software GPUs have as many workers as the host has cores, up to 8. A sleeping kernel keeps one.
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let (ranks, micros) = if cores < 8 { (2, 8) } else { (4, 8) };
    for (name, schedule) in schedules(ranks, micros) {
        let case = format!("software/pipeline/sleep/{name}/{ranks}x{micros}");
        if bench.wants(&case) {
            sleeping(bench, &case, &schedule);
        }
    }
}

fn step(pipeline: &mut Pipeline<Busy>) -> Result<()> {
    pipeline.step(|dev, _| dev.zeros(1), |_, _, y| Ok((y, ()))).map(drop)
}

/// Milliseconds of the first device, and those that `simulate` says.
fn virtual_time(schedule: &PipelineSchedule) -> Result<(f64, f64)> {
    let ranks = schedule.ranks();
    let pool = build(GpuPool::builder().topology(Topology::nvswitch(ranks)).dry());
    let unit = |len| -> Result<Duration> {
        let times = pool.on(&[0]).run(|dev, _| {
            let mut stage = Busy::new(dev, len, false)?;
            stage.work(dev, 100, None)?;
            dev.synchronize()?;
            stage.took()
        })?;
        Ok(times[0] / 100)
    };
    let guess = 1 << 28;
    let len = (guess as f64 * VIRTUAL.as_secs_f64() / unit(guess)?.as_secs_f64()) as usize;
    let part = unit(len)?;
    let costs = Costs { forward: part, backward_input: part, backward_weights: part, hop: hop(&pool)? };
    let right = schedule.simulate(costs).expect("a time").spans[0].last().expect("an action").end;
    let mut pipeline = Pipeline::new(&pool, schedule.clone(), |dev, _| Busy::new(dev, len, false))?;
    step(&mut pipeline)?;
    let found = pipeline.each(|_, _, stage| stage.took())?[0];
    Ok((found.as_secs_f64() * 1e3, right.as_secs_f64() * 1e3))
}

/// What a copy of one element from device 0 to device 1 takes.
fn hop(pool: &GpuPool) -> Result<Duration> {
    let x = pool.on(&[0]).run(|dev, _| dev.zeros::<f32>(1))?.remove(0);
    let times = pool.on(&[1]).run(|dev, _| {
        let start = dev.record_timed()?;
        let _copy = x.copy_to(dev)?;
        let end = dev.record_timed()?;
        dev.synchronize()?;
        end.elapsed_since(&start)
    })?;
    Ok(times[0])
}

fn sleeping(bench: &mut Bench, case: &str, schedule: &PipelineSchedule) {
    let costs = Costs { forward: NAP_TIME, backward_input: NAP_TIME, backward_weights: NAP_TIME, hop: Duration::ZERO };
    let right = schedule.simulate(costs).expect("a time").end.as_secs_f64() * 1e3;
    let pool = build(GpuPool::builder().host(schedule.ranks()).module(&MODULE));
    let pipeline = Pipeline::new(&pool, schedule.clone(), |dev, _| Busy::new(dev, 1, true));
    let mut pipeline = pipeline.expect("a stage on each device");
    let ours = Side::new("gpu-pool", || {
        let clock = Instant::now();
        step(&mut pipeline).expect("a step");
        clock.elapsed().as_secs_f64() * 1e3
    });
    bench.set_turns(1, bench.size(5, 1));
    bench.compare(case, MILLISECONDS, ours, vec![Side::new("simulate", || right)]);
}
