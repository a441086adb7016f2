//! Training steps of GPT-2 small (124 million parameters; 8 sequences of 1024 words for each GPU) by the model of
//! `examples/gpt`, with `DataParallel`: bf16, with the optimizer's copies in f32, AdamW. The peer is the same model in
//! PyTorch (`peers/gpt.py`): DistributedDataParallel over NCCL, autocast to bf16 with parameters in f32, fused AdamW,
//! `scaled_dot_product_attention`, `torch.compile`. If it does not compile within 90 s, the peer goes on without that,
//! and its name says so. On software GPUs the model is small, in f32, and has no peer.
//!
//! * `<gpu or software>/gpt/<devices>/step`: milliseconds of a step, over some in a row, from idle devices to idle
//!   devices, of the slowest one. The batch is on the devices; words are random.
//! * `.../first_step_ms`: from the start of the processes to the loss of the first step: opening GPUs, the pool or
//!   NCCL, random parameters, loading kernels. Also against the peer without `torch.compile`. Compiled, it was measured
//!   once, with empty caches.
//!
//! The sides run in turns; values are medians. Here scores are products of matrices that go through memory, in torch
//! they are one kernel; here nothing is compiled, in torch what lies between products is fused.

#[path = "../examples/gpt/attention.rs"]
mod attention;
#[path = "../examples/gpt/kernels.rs"]
mod kernels;
#[path = "../examples/gpt/model.rs"]
mod model;
mod support;
#[path = "../examples/gpt/train.rs"]
mod train;

use gpu_pool::{GpuPool, Result, half::bf16};
use gpu_pool_lab::{Check, prelude::*};
use gpu_pool_train::{Optimizer, Parameter};
use kernels::Number;
use model::{GPT2, SMALL, Shape};
use std::{
    cell::{OnceCell, RefCell},
    env,
    process::Command,
    time::Instant,
};
use support::{Bench, MILLISECONDS, Side, child::Process, gpus};
use train::Training;

/// Sequences of each device.
const SEQUENCES: usize = 8;
/// The argument of a process that makes the first step, and tells the parent.
const FIRST: &str = "--first-step";

/// A pool as in production, and a training whose batch is on its devices.
fn training<T: Number + Parameter>(software: bool, devices: usize, shape: Shape) -> Result<(GpuPool, Training<T>)> {
    let builder = gpus::builder(software, devices).check(Check::Off).record_memory(false);
    let (pool, sequences) = (train::pool(builder)?, SEQUENCES * devices);
    let mut training = Training::new(&pool, shape, Optimizer::adam_w(3e-4), sequences)?;
    let text = gpus::noise(sequences * (shape.context + 1), 1);
    training.load(&text.into_iter().map(|x| x % shape.words as u32).collect::<Vec<_>>())?;
    Ok((pool, training))
}

/// The loss of the first step.
fn first<T: Number + Parameter>(software: bool, devices: usize, shape: Shape) -> Result<f64> {
    let (_pool, mut training) = training::<T>(software, devices, shape)?;
    training.step()?;
    training.loss()
}

/// Milliseconds per step, over `steps` in a row.
fn time<T: Number + Parameter>(training: &RefCell<Training<T>>, steps: usize) -> f64 {
    let clock = Instant::now();
    (0..steps).try_for_each(|_| training.borrow_mut().step()).expect("steps");
    clock.elapsed().as_secs_f64() * 1e3 / steps as f64
}

fn since(clock: Instant) -> f64 {
    clock.elapsed().as_secs_f64() * 1e3
}

/// Milliseconds until a fresh process of this program has made a step.
fn first_here(devices: usize) -> f64 {
    let clock = Instant::now();
    let program = env::current_exe().expect("this program");
    let mut process = Process::start(Command::new(program).args([FIRST, &devices.to_string()]));
    let loss = process.answer();
    let took = since(clock);
    assert!(loss.is_finite() && process.ends().success(), "a loss, and an end: {loss}");
    took
}

/// PyTorch's processes, once they have made a step.
struct Peer {
    process: RefCell<Process>,
    compiled: bool,
    first_ms: f64,
}

impl Peer {
    /// None without torch, with too few GPUs, and where it fails.
    fn start(devices: usize, how: &str) -> Option<Peer> {
        let clock = Instant::now();
        let mut process = Process::torch("gpt.py", devices, &[&devices.to_string(), how], &[])?;
        process.order("first", 1);
        let compiled = process.try_answer()? == 1.0;
        Some(Peer { process: RefCell::new(process), compiled, first_ms: since(clock) })
    }

    fn name(&self) -> &'static str {
        if self.compiled { "DDP, torch.compile" } else { "DDP, not compiled" }
    }

    fn steps(&self, steps: usize) -> f64 {
        let mut process = self.process.borrow_mut();
        process.order("step", steps);
        process.answer()
    }

    /// Waits until the processes have ended.
    fn end(&self) {
        self.process.borrow_mut().close();
    }
}

fn measure<T: Number + Parameter>(bench: &mut Bench, software: bool, devices: usize, shape: Shape) {
    let kind = if software { "software" } else { "gpu" };
    let [step, first] = ["step", "first_step_ms"].map(|what| format!("{kind}/gpt/{devices}/{what}"));
    if !bench.wants(&step) && !bench.wants(&first) {
        return;
    }
    // The import that looks for torch takes seconds, and is no part of a start.
    let torch = !software && Process::has_torch(devices);
    let peer = torch.then(|| Peer::start(devices, "compile").or_else(|| Peer::start(devices, "eager"))).flatten();
    if let Some(peer) = &peer {
        println!("{}: {:.1} s until the first step, with empty caches", peer.name(), peer.first_ms / 1e3);
    }

    if bench.wants(&step) {
        bench.set_turns(2, bench.size(15, 3));
        let steps = bench.size(10, 2);
        let (_pool, training) = training::<T>(software, devices, shape).expect("memory for it");
        let training = RefCell::new(training);
        let peers = peer.iter().map(|peer| Side::new(peer.name(), move || peer.steps(steps))).collect();
        let ours = Side::new("gpu-pool", || time(&training, steps));
        bench.compare(&step, MILLISECONDS, ours, peers);
        training.borrow_mut().verify().expect("replicas with the same bits");
    }
    if let Some(peer) = &peer {
        peer.end();
    }

    bench.set_turns(0, bench.size(2, 1));
    let once = OnceCell::new();
    let mut peers = Vec::new();
    if let Some(peer) = peer.as_ref().filter(|peer| peer.compiled) {
        let sample = |samples: &mut Vec<f64>| {
            if once.set(()).is_ok() {
                samples.push(peer.first_ms);
            }
        };
        peers.push(Side::sampling(peer.name(), sample));
    }
    if peer.is_some() {
        let start = || {
            let peer = Peer::start(devices, "eager").expect("it has started before");
            peer.end();
            peer.first_ms
        };
        peers.push(Side::new("DDP, not compiled", start));
    }
    bench.compare(&first, MILLISECONDS, Side::new("gpu-pool", || first_here(devices)), peers);
}

fn main() -> Result<()> {
    let software = gpus::count() == 0;
    let mut arguments = env::args().skip_while(|argument| argument != FIRST).skip(1);
    if let Some(devices) = arguments.next() {
        let devices = devices.parse().expect("a number of devices");
        let loss = match software {
            true => first::<f32>(software, devices, SMALL)?,
            false => first::<bf16>(software, devices, GPT2)?,
        };
        println!("{loss}");
        return Ok(());
    }
    let mut bench = Bench::new("gpt");
    let devices = if software { 2 } else { gpus::device_count() };
    match software {
        true => measure::<f32>(&mut bench, software, devices, SMALL),
        false => measure::<bf16>(&mut bench, software, devices, GPT2),
    }
    bench.finish();
    Ok(())
}
