//! Asking whether work is over: a load of the word that the stream has written, against a driver call.

use std::{hint::black_box, ptr, time::Instant};

use cudarc::driver::sys;
use gpu_pool::{Device, Event, GpuPool, PerDevice, Result};

use crate::{
    Machine,
    driver_pool::check,
    spin,
    support::{Bench, NANOSECONDS, Side},
};

/// A kernel, and events behind it.
struct State {
    ours: Event,
    driver: Option<sys::CUevent>,
}

impl State {
    fn new(dev: &Device, software: bool) -> Result<Self> {
        let mut buffer = dev.zeros(1)?;
        spin::spin(dev, &mut buffer, 1000)?;
        let ours = dev.record()?;
        let driver = if software { None } else { Some(record(dev)?) };
        dev.synchronize()?;
        Ok(State { ours, driver })
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if let Some(event) = self.driver {
            // SAFETY: it belongs to this value, and nobody waits for it.
            let _ = unsafe { sys::cuEventDestroy_v2(event) };
        }
    }
}

/// Records the driver's event on the same stream.
fn record(dev: &Device) -> Result<sys::CUevent> {
    let (cuda, mut event) = (dev.cuda()?, ptr::null_mut());
    // SAFETY: the pointer is to a live value, the stream is live, and its context current.
    unsafe {
        check(sys::cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32));
        check(sys::cuEventRecord(event, cuda.stream().cu_stream()));
    }
    Ok(event)
}

pub fn run(bench: &mut Bench, machine: &Machine) {
    let case = format!("{}/words/is_complete", machine.kind);
    if !bench.wants(&case) {
        return;
    }
    let pool = machine.builder(1).module(&spin::MODULE).build().expect("the device can be opened");
    let states = &pool.per_device(|dev, _| State::new(dev, machine.software)).expect("an event");
    let rounds = bench.size(10_000, 1000);
    let ours = || each(&pool, states, rounds, |state| state.ours.is_complete().expect("the stream is healthy"));
    let mut peers = Vec::new();
    if !machine.software {
        peers.push(Side::new("cuEventQuery", || {
            each(&pool, states, rounds, |state| {
                // SAFETY: the event is live.
                let result = unsafe { sys::cuEventQuery(state.driver.expect("a GPU has one")) };
                result == sys::CUresult::CUDA_SUCCESS
            })
        }));
    }
    bench.set_turns(bench.size(3, 1), bench.size(31, 5));
    bench.compare(&case, NANOSECONDS, Side::new("gpu-pool", ours), peers);
}

/// Nanoseconds per question. The answer must always be yes.
fn each(pool: &GpuPool, states: &PerDevice<State>, rounds: usize, question: impl Fn(&State) -> bool + Sync) -> f64 {
    let times = pool.run(|dev, _| {
        let state = &*states.borrow(dev)?;
        let clock = Instant::now();
        let yes = (0..rounds).filter(|_| black_box(question(black_box(state)))).count();
        let nanos = clock.elapsed().as_secs_f64() * 1e9;
        assert_eq!(yes, rounds, "the work is over");
        Ok(nanos / rounds as f64)
    });
    times.expect("the device is healthy")[0]
}
