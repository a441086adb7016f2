//! `gpu-pool doctor`: is this machine all right for several GPUs? If not, it names the remedy.
//!
//! `host` reads files of the system and looks for libraries, `nvml` asks the driver, `gpus` judges what it says, and
//! `proof` lets the devices of a pool exchange data. Each adds [`Line`]s. Without a GPU the proof is on software GPUs.
//!
//! Invariant: it ends. What a broken driver may hang in runs on a thread of its own, which has a limit.

#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "without NVML no state is known"))]
mod gpus;
mod host;
#[cfg(feature = "cuda")]
mod nvml;
mod proof;
mod report;
mod system;

use gpu_pool::{Error, GpuPool, extend::cli};
use report::{Level, Line};
use serde::Serialize;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use std::{mem, process::ExitCode, thread};
use system::{Machine, System};

/// A wait of a proof.
const DEADLINE: Duration = Duration::from_secs(2);
/// Each step of the GPUs' part: NVML, the pool, the proof.
const LIMIT: Duration = Duration::from_secs(30);

/// Looks at driver, GPUs, links, limits, libraries and variables. Each pair of GPUs exchanges data, which is checked.
///
/// The exit code is 1 if a line is wrong.
#[derive(clap::Args)]
pub struct Arguments {
    /// Writes JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    version: u32,
    ok: bool,
    seconds: f64,
    lines: &'a [Line],
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let start = Instant::now();
    let (steps, answers) = mpsc::channel();
    let started = thread::Builder::new().name("gpu-pool:doctor".to_owned()).spawn(move || {
        let mut lines = Vec::new();
        // The main thread may have given up. Then no thread receives the lines.
        let tell = |lines: &mut Vec<Line>| drop(steps.send((mem::take(lines), false)));
        hardware(&Machine, &mut lines, &tell);
        let _ = steps.send((lines, true));
    });
    started.map_err(|error| error.to_string())?;
    let mut lines = Vec::new();
    let libraries = gpu_pool_cluster::libraries().into_iter();
    let libraries: Vec<_> = libraries.map(|(name, found)| (name, found.map_err(|error| error.to_string()))).collect();
    host::limits(&Machine, &mut lines);
    host::libraries(&libraries, &mut lines);
    let value = |name: &str| cli::variable(name).map(|value| value.to_string_lossy().into_owned());
    host::variables(&cli::unknown_variables().collect::<Vec<_>>(), &value, &mut lines);
    lines.splice(0..0, received(&answers, LIMIT));
    let ok = lines.iter().all(|line| line.level != Level::Wrong);
    let seconds = start.elapsed().as_secs_f64();
    if arguments.json {
        let report = Report { version: 1, ok, seconds, lines: &lines };
        println!("{}", serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?);
    } else {
        lines.iter().for_each(|line| println!("{line}"));
        let count = |level| lines.iter().filter(|line| line.level == level).count();
        println!("{} wrong, {} notes; {seconds:.1} s", count(Level::Wrong), count(Level::Note));
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The lines of all steps. If a step takes longer than the limit: those of the steps before, and one with that fault.
fn received(answers: &Receiver<(Vec<Line>, bool)>, limit: Duration) -> Vec<Line> {
    let mut lines = Vec::new();
    loop {
        let (text, help) = match answers.recv_timeout(limit) {
            Ok((mut more, last)) => {
                lines.append(&mut more);
                if last {
                    return lines;
                }
                continue;
            }
            Err(RecvTimeoutError::Timeout) => (
                format!("no answer for {} s: a call of the driver hangs", limit.as_secs()),
                "see `dmesg | grep -i nvrm`; a reset of the GPU or a reboot may help",
            ),
            Err(RecvTimeoutError::Disconnected) => ("the look at it panicked".to_owned(), "stderr says why"),
        };
        lines.push(Line::wrong("driver", text, help));
        return lines;
    }
}

/// The GPUs, or the software GPUs that work without them. Tells the lines of each step.
fn hardware(system: &(dyn System + Sync), lines: &mut Vec<Line>, tell: &dyn Fn(&mut Vec<Line>)) {
    #[cfg(feature = "cuda")]
    let nvml = nvml::open();
    #[cfg(feature = "cuda")]
    match &nvml {
        Ok(nvml) => {
            if let Some(driver) = nvml::driver(nvml) {
                gpus::driver(&driver, lines);
            }
        }
        // Without a driver the next lines say so.
        Err(_) if system.names("/proc/driver/nvidia/gpus").is_empty() => {}
        Err(why) => lines.push(Line::note("NVML", format!("not found: {why}"), "nothing is known of the GPUs' health")),
    }
    tell(lines);
    let pool = match GpuPool::builder().timeout(DEADLINE).build() {
        Ok(pool) if pool.report().devices[0].pci_bus_id.is_empty() => return software(system, pool, lines),
        Ok(pool) => pool,
        Err(error) => return lines.push(unusable(system, &error)),
    };
    let report = pool.report();
    let buses: Vec<String> = report.devices.iter().map(|info| info.pci_bus_id.clone()).collect();
    for (gpu, info) in report.devices.iter().enumerate() {
        gpus::device(gpu, info, lines);
    }
    #[cfg(feature = "cuda")]
    for (gpu, bus) in buses.iter().enumerate() {
        if let Some(health) = nvml.as_ref().ok().and_then(|nvml| nvml::health(nvml, bus)) {
            gpus::health(gpu, &health, lines);
        }
    }
    let cpus = |gpu| pool.on_device(gpu).run(|_| Ok(host::own_cpus(system))).ok().flatten().unwrap_or_default();
    let placed: Vec<_> = buses.iter().enumerate().map(|(gpu, bus)| (bus.clone(), cpus(gpu))).collect();
    host::numa(system, &placed, lines);
    host::pcie(system, &buses, lines);
    tell(lines);
    proof::all(&pool, lines);
}

fn unusable(system: &dyn System, error: &Error) -> Line {
    let there = host::on_the_bus(system);
    let to_do = match error {
        Error::InvalidArgument { .. } => "correct the variable".to_owned(),
        _ => format!("{there} GPUs are on the PCI bus; GPU_POOL_BACKEND=host runs on software GPUs"),
    };
    Line::wrong("GPU", error.to_string(), to_do)
}

/// The pool has software GPUs: no GPU was found, or the environment asks for them.
fn software(system: &dyn System, pool: GpuPool, lines: &mut Vec<Line>) {
    let devices = format!("{} software GPUs: programs, tests and this doctor run on the CPU", pool.device_count());
    let asked = cli::variable("GPU_POOL_BACKEND").is_some_and(|backend| !backend.is_empty());
    let found = if asked { None } else { GpuPool::builder().cuda().build().err() };
    let there = host::on_the_bus(system);
    lines.push(match found {
        // A driver that is there should work. Without one, this machine or container is meant to have no GPU.
        Some(why) if !system.names("/proc/driver/nvidia/gpus").is_empty() => unusable(system, &why),
        Some(why) if there > 0 => Line::note(
            "GPU",
            format!("none for this process, but {there} on the PCI bus: {why}"),
            "start the container with `--gpus all`, or install the driver",
        ),
        Some(why) => Line::note("GPU", why.to_string(), "nothing, if this machine has no GPU"),
        None => Line::ok("GPU", "GPU_POOL_BACKEND asks for software GPUs"),
    });
    lines.push(Line::ok("software", devices));
    proof::all(&pool, lines);
}

#[cfg(test)]
#[path = "../tests/unit/doctor_tests.rs"]
mod tests;
