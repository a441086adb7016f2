//! Measures the cost of the checker: off, compared with a build of the crate before it had a checker; and on, compared
//! with off. Microseconds per call of the slowest device.
//!
//! Each side is a process with the same pool. It waits for a line on its standard input and answers with its time; the
//! sides take turns. `GPU_POOL_BEFORE` names the executable of this bench built before the checker existed: commit
//! d7439dc with this file, less the line marked below, and this `benches/support`, in a target folder of its own, since
//! the executables have the same name. Without the variable that side is missing.
//!
//! * `<gpu or software>/<what>/<devices>`, where `what` is `launch` (`fill_u32` of 8 elements), `copy_4K` (from
//!   page-locked memory), `record_wait` (an event of one stream, waited for by another), `allocate_free` (4 KB),
//!   `all_reduce` (1024 f32), `scope` (an empty one)

mod support;

use std::{cell::RefCell, env, process::Command, sync::Barrier, time::Instant};

use gpu_pool::{Builder, Device, DeviceBuffer, GpuPool, PerDevice, PinnedBuffer, ReduceOp, Result, Stream};
use gpu_pool_lab::prelude::*;
use support::{
    Bench, MICROSECONDS, Side,
    child::{Process, serve},
    gpus,
};

const ELEMENTS: usize = 8;
const COPIED: usize = 1024;
const WHAT: [&str; 6] = ["launch", "copy_4K", "record_wait", "allocate_free", "all_reduce", "scope"];

fn pool(software: bool, devices: usize, checked: bool) -> GpuPool {
    let builder = GpuPool::builder();
    let builder: Builder = match software {
        true => builder.host(devices),
        false => builder.cuda().devices(&(0..devices).collect::<Vec<_>>()),
    };
    let builder = if checked { check(builder) } else { builder };
    builder.build().expect("the devices can be opened")
}

fn check(builder: Builder) -> Builder {
    let builder = builder.check(gpu_pool_lab::Check::Races); // not in a build before the checker
    builder
}

/// The state of one device for all loops.
struct State {
    filled: DeviceBuffer<u32>,
    source: PinnedBuffer<u32>,
    target: DeviceBuffer<u32>,
    gradients: DeviceBuffer<f32>,
    other: Stream,
}

impl State {
    fn new(dev: &Device) -> Result<Self> {
        let mut source = dev.pinned(COPIED)?;
        source.as_mut_slice()?.copy_from_slice(&gpus::noise(COPIED, 1));
        Ok(State {
            filled: dev.zeros(ELEMENTS)?,
            source,
            target: dev.zeros(COPIED)?,
            gradients: dev.zeros(COPIED)?,
            other: dev.stream()?,
        })
    }
}

/// Microseconds per call of `what`, `rounds` times.
fn time(dev: &Device, state: &mut State, what: &str, rounds: usize) -> Result<f64> {
    let State { filled, source, target, gradients, other } = state;
    let once = || match what {
        "launch" => dev.fill(filled, 7),
        "copy_4K" => dev.upload_pinned_into(source, target),
        "record_wait" => dev.on(other).wait(&dev.record()?),
        // SAFETY: nobody reads it.
        "allocate_free" => unsafe { dev.uninit::<u32>(COPIED) }.map(drop),
        "all_reduce" => dev.all_reduce(gradients, ReduceOp::Sum),
        _ => panic!("{what}?"),
    };
    let micros = support::gpus::micros_per_call(dev, rounds, once)?;
    dev.on(other).synchronize()?;
    dev.synchronize()?;
    Ok(micros)
}

/// Calls per turn.
fn rounds(bench: &Bench, what: &str) -> usize {
    let full = match what {
        "allocate_free" | "scope" => 2000,
        "all_reduce" => 100,
        _ => 500,
    };
    bench.size(full, 20)
}

struct Subject {
    pool: GpuPool,
    states: PerDevice<State>,
}

impl Subject {
    /// The time of the slowest device. All devices start together.
    fn time(&self, what: &str, rounds: usize) -> f64 {
        if what == "scope" {
            let clock = Instant::now();
            for _ in 0..rounds {
                self.pool.run(|_, _| Ok(())).expect("an empty scope");
            }
            return clock.elapsed().as_secs_f64() * 1e6 / rounds as f64;
        }
        let start = Barrier::new(self.pool.device_count());
        let times = self.pool.run(|dev, _| {
            start.wait();
            time(dev, &mut *self.states.borrow_mut(dev)?, what, rounds)
        });
        times.expect("every call succeeds").into_iter().fold(0.0, f64::max)
    }
}

/// A process with a pool.
fn start(program: &str, software: bool, devices: usize, checked: bool) -> Process {
    let kind = if software { "software" } else { "gpu" };
    let mut command = Command::new(program);
    command.args(["--child", kind]).args([devices.to_string(), checked.to_string()]);
    Process::start(&mut command)
}

fn time_process(process: &RefCell<Process>, what: &str, rounds: usize) -> f64 {
    let mut process = process.borrow_mut();
    process.order(what, rounds);
    process.answer()
}

fn child(arguments: &[String]) {
    let [kind, devices, checked] = arguments else { panic!("--child KIND DEVICES CHECKED") };
    let devices = devices.parse().expect("a number");
    let pool = pool(kind == "software", devices, checked == "true");
    let states = pool.per_device(|dev, _| State::new(dev)).expect("streams and little memory");
    let subject = Subject { pool, states };
    serve(|what, rounds| subject.time(what, rounds));
}

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "--child") {
        return child(&arguments[1..]);
    }
    let mut bench = Bench::new("check");
    let hardware = gpus::count();
    let mut kinds = vec![("software", true, 2)];
    if hardware > 0 {
        kinds.push(("gpu", false, hardware.min(8)));
    }
    let this = env::current_exe().expect("this program has a path");
    let this = this.to_str().expect("a readable path");
    let before = env::var("GPU_POOL_BEFORE").ok();
    for (kind, software, devices) in kinds {
        let start = |program: &str, checked| RefCell::new(start(program, software, devices, checked));
        let (off, on) = (start(this, false), start(this, true));
        let before = before.as_ref().map(|program| start(program, false));
        for what in WHAT {
            let rounds = rounds(&bench, what);
            let mut peers = vec![Side::new("checker on", || time_process(&on, what, rounds))];
            if let Some(before) = &before {
                peers.push(Side::new("before the checker", || time_process(before, what, rounds)));
            }
            let ours = Side::new("checker off", || time_process(&off, what, rounds));
            bench.compare(&format!("{kind}/{what}/{devices}"), MICROSECONDS, ours, peers);
        }
    }
    bench.finish();
}
