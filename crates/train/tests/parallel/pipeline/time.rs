//! A step in virtual time takes as long as `simulate` says.

use super::schedules;
use crate::support::{builder, cases};
use gpu_pool::{Device, DeviceBuffer, Error, Event, GpuPool, LaunchDims, Module, kernel};
use gpu_pool_lab::prelude::*;
use gpu_pool_lab::{Topology, topology::KernelCost};
use gpu_pool_train::{Costs, Pipeline, PipelineSchedule, Stage, StageContext};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

static MODULE: Module = Module::ptx("");

kernel! {
    /// Takes 5 ms on the machine below.
    static BUSY: "busy" in MODULE, fn(_x: &mut [f32]) |_dims| {}
}

const PART: Duration = Duration::from_millis(5);
/// Threads of the kernel.
const THREADS: u32 = 1024;
/// Elements of an activation: 4 MiB.
const ELEMENTS: usize = 1 << 20;

/// By rank: when its actions have begun and ended.
type Times = Arc<Mutex<Vec<Vec<(Event, Event)>>>>;

/// Each part of its work keeps the device busy for so long. Results leave when the whole action is over.
struct Busy(DeviceBuffer<f32>, Times);

impl Busy {
    fn work(
        &mut self,
        dev: &Device,
        parts: usize,
        input: Option<&DeviceBuffer<f32>>,
    ) -> Result<DeviceBuffer<f32>, Error> {
        if let Some(input) = input {
            // The device waits for its input.
            dev.copy(&input.slice(..1), &mut self.0.slice_mut(..1))?;
        }
        let mut output = dev.zeros(ELEMENTS)?;
        let start = dev.record_timed()?;
        for _ in 0..parts {
            // SAFETY: the kernel touches nothing.
            unsafe {
                dev.launch(
                    &BUSY,
                    LaunchDims { grid: (1, 1, 1), block: (THREADS, 1, 1), shared_bytes: 0 },
                    (&mut self.0,),
                )?
            };
        }
        dev.copy(&self.0, &mut output.slice_mut(..1))?;
        let span = (start, dev.record_timed()?);
        self.1.lock().unwrap()[dev.rank()].push(span);
        Ok(output)
    }
}

impl Stage for Busy {
    type Activation = DeviceBuffer<f32>;
    type Saved = ();
    fn forward(
        &mut self,
        dev: &Device,
        _: StageContext,
        x: DeviceBuffer<f32>,
    ) -> Result<(DeviceBuffer<f32>, ()), Error> {
        self.work(dev, 1, Some(&x)).map(|y| (y, ()))
    }
    fn backward(
        &mut self,
        dev: &Device,
        _: StageContext,
        _: (),
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>, Error> {
        self.work(dev, 2, Some(&dy)).map(Some)
    }
    fn backward_input(
        &mut self,
        dev: &Device,
        _: StageContext,
        _: &mut (),
        dy: DeviceBuffer<f32>,
    ) -> Result<Option<DeviceBuffer<f32>>, Error> {
        self.work(dev, 1, Some(&dy)).map(Some)
    }
    fn backward_weights(&mut self, dev: &Device, _: StageContext, _: ()) -> Result<(), Error> {
        self.work(dev, 1, None).map(drop)
    }
}

fn machine(ranks: usize) -> Topology {
    let machine = Topology::nvswitch(ranks);
    // By each of the kernel's threads: what the device does in that time, in all.
    let operations = machine.devices()[0].gflops * 1e9 * PART.as_secs_f64() / f64::from(THREADS);
    machine.with_kernel("busy", KernelCost { reads: 0.0, writes: 0.0, operations })
}

/// From the end of an action to the arrival of its result: a wait, the copy over the link, and a wait.
fn hop(pool: &GpuPool, machine: &Topology) -> Duration {
    let copied = pool.on(&[0, 1]).run(|dev, _| {
        if dev.rank() == 0 {
            dev.give(dev.zeros::<f32>(ELEMENTS)?, 1, 0)?;
            return dev.barrier().map(|()| Duration::ZERO);
        }
        let there = dev.take::<DeviceBuffer<f32>>(0, 0)?;
        let _here = there.copy_to(dev)?;
        let start = dev.record_timed()?;
        let _here = there.copy_to(dev)?;
        let end = dev.record_timed()?;
        dev.synchronize()?;
        dev.barrier()?;
        end.elapsed_since(&start)
    });
    copied.unwrap()[1] + 2 * Duration::from_secs_f64(machine.devices()[0].wait_us * 1e-6)
}

/// How far each rank's time from its first to its last action is off `simulate`, at most.
fn off(pool: &GpuPool, schedule: &PipelineSchedule, hop: Duration) -> f64 {
    let times: Times = Arc::new(Mutex::new(vec![Vec::new(); schedule.ranks()]));
    let make = |dev: &Device, _| Ok(Busy(dev.zeros(1)?, times.clone()));
    let mut model = Pipeline::new(pool, schedule.clone(), make).unwrap();
    model.step(|dev, _| dev.zeros(ELEMENTS), |_, _, y| Ok((y, ()))).unwrap();
    let costs = Costs { forward: PART, backward_input: PART, backward_weights: PART, hop };
    let ideal = schedule.simulate(costs).unwrap();
    let found = times.lock().unwrap();
    let each = found.iter().zip(&ideal.spans).map(|(found, ideal)| {
        assert_eq!(found.len(), ideal.len());
        let last = found.last().unwrap().1.elapsed_since(&found[0].0).unwrap();
        let expected = ideal.last().unwrap().end - ideal[0].start;
        last.as_secs_f64() / expected.as_secs_f64() - 1.0
    });
    each.fold(0.0, |most: f64, off| if off.abs() > most.abs() { off } else { most })
}

/// 5 ms forward, 10 ms backward, on a model of NVSwitch machines. In both directions: a step that is faster than the
/// schedule allows would be as wrong as one that is slower.
#[test]
fn a_step_takes_as_long_as_simulate_says() {
    // Interleaved schedules want as many micro-batches in each round as there are ranks.
    let all = [2, 3, 5, 8].into_iter().flat_map(|p| [4usize, 16, 64].map(|m| (p, m.next_multiple_of(p)))).collect();
    for (ranks, micros) in cases(vec![(2, 4), (4, 8), (8, 16)], all) {
        let machine = machine(ranks);
        // Memory for a whole step: host threads run ahead of their devices, and a small pool makes streams wait for it.
        let pool = builder().topology(machine.clone()).dry().memory_reserve(32 << 30).module(&MODULE).build().unwrap();
        let hop = hop(&pool, &machine);
        for (name, schedule) in schedules(ranks, micros) {
            let off = 100.0 * off(&pool, &schedule, hop);
            println!("{name}, {ranks} ranks, {micros} micro-batches: {off:+.2} %");
            assert!(off.abs() <= 1.0, "{name}, {ranks} ranks, {micros} micro-batches: {off:+.2} % off `simulate`");
        }
    }
}
