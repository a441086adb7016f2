//! Predicts how long an all-reduce takes on a machine that you do not have: software GPUs in virtual time, on machines
//! described by a [`Topology`](gpu_pool_lab::Topology).
//!
//! `cargo run --release --example predict` compares the prediction with measurements on 8 x H200, and then predicts
//! where nothing was measured: 16 and 64 devices on one switch, and two nodes. `--plot
//! docs/src/plots/predicted_all_reduce.svg` draws the result; `--machine FILE` (with `--features topology-files`)
//! predicts for a machine of your own. The pools are *dry*: nothing is computed, and no memory is touched.
//!
//! `--hosts` compares two ways over 2 to 128 hosts: one ring over all devices, and a hierarchy.
//!
//! * `hosts`: that comparison
//! * `ring`: the copy-engine ring that was measured, call by call; `pool`: the crate's own `Device::all_reduce`
//! * `measured`: the measurements; `report`, `plot`: tables and the picture

mod hosts;
mod measured;
mod plot;
mod pool;
mod report;
mod ring;
#[path = "../plot/style.rs"]
mod style;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use gpu_pool::extend::driver::host::{self, ExecutionOrder, MachineConfig};
use gpu_pool_lab::Topology;
use ring::{Ring, Timing};
use std::{path::PathBuf, process::ExitCode, sync::Arc};

const MB: usize = 1 << 20;
/// The measured sizes.
const SIZES: [usize; 5] = [64 * MB, 128 * MB, 256 * MB, 512 * MB, 1024 * MB];

/// Predicts all-reduces on machines that are not here.
#[derive(Debug, Parser)]
struct Options {
    /// Pieces of each chunk in the copy-engine ring
    #[arg(long, value_name = "N", default_value_t = 2)]
    pieces: usize,
    /// Draws the predictions to FILE.svg or FILE.png
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Instead: one ring or a hierarchy, over 2 to 128 hosts of eight H200s
    #[arg(long, conflicts_with = "devices")]
    hosts: bool,
    /// With --hosts: run machines of up to this many devices; a cost model predicts the others
    #[arg(long, value_name = "N", default_value_t = 64, requires = "hosts")]
    run_up_to: usize,
    /// With --hosts: writes the predictions to FILE, a JSON object in each line
    #[arg(long, value_name = "FILE", requires = "hosts")]
    json: Option<PathBuf>,
    /// Only this many H200s on one switch
    #[arg(long, value_name = "N")]
    devices: Option<usize>,
    /// A machine of your own, in TOML; examples/data/machines has some
    #[cfg(feature = "topology-files")]
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    ensure!(options.pieces > 0, "--pieces 0: a chunk has at least one piece");
    options.plot.as_deref().map(plot::check).transpose()?;
    if options.hosts {
        return hosts::compare(options.run_up_to, options.plot.as_deref(), options.json.as_deref());
    }
    if let Some(devices) = options.devices {
        ensure!((2..=64).contains(&devices), "--devices {devices}: 2 to 64");
        return own(&Topology::nvswitch(devices), options.pieces);
    }
    #[cfg(feature = "topology-files")]
    if let Some(path) = &options.machine {
        return own(&Topology::from_file(path)?, options.pieces);
    }

    // First a check with real data, on software GPUs that do compute: the ring must give the right sums.
    ring::check(&host::machine(&vec![host::HostConfig::default(); 4]), options.pieces)?;
    let eight = Topology::nvswitch(8);
    print!("{eight}");
    println!("\nThe copy-engine ring on it, in {} pieces, against what was measured:", options.pieces);
    println!("{}", report::against_measured(&curve(&eight, options.pieces)?));
    println!(
        "(Submitting was measured at {} us, with the waiting of the host threads for each other.)\n",
        measured::SUBMIT
    );
    println!("What that is made of: by how much less the ring would take if a thing cost nothing");
    println!("{}", report::contributions(&eight, |machine, bytes| predict(machine, bytes, options.pieces))?);
    println!("`Device::all_reduce` of this crate on it (its ring pulls, in one piece):");
    println!("{}", report::of_the_pool(&eight, &SIZES)?);

    let machines = [eight, Topology::nvswitch(16), Topology::nvswitch(64), Topology::two_nodes(8, 50.0, 10.0)];
    let curves = machines
        .iter()
        .map(|machine| Ok((machine.name().to_owned(), curve(machine, options.pieces)?)))
        .collect::<Result<Vec<_>>>()?;
    println!("Predicted times of the ring, us; in brackets the bus bandwidth, GB/s");
    println!("{}", report::predictions(&curves));
    if let Some(path) = &options.plot {
        plot::draw(path, &curves, options.pieces).with_context(|| format!("cannot draw {}", path.display()))?;
        println!("drawn in {}", path.display());
    }
    Ok(())
}

/// The prediction for one size on one machine.
#[derive(Clone, Copy, Debug)]
struct Point {
    bytes: usize,
    devices: usize,
    timing: Timing,
}

impl Point {
    /// Bus bandwidth as nccl-tests defines it: bytes that each device sends and receives per byte reduced, over the
    /// time.
    fn bus_bandwidth(&self) -> f64 {
        let share = 2.0 * (self.devices - 1) as f64 / self.devices as f64;
        share * self.bytes as f64 / self.timing.call / 1e3
    }
}

fn curve(machine: &Topology, pieces: usize) -> Result<Vec<Point>> {
    let point = |&bytes: &usize| -> Result<Point> {
        Ok(Point { bytes, devices: machine.len(), timing: predict(machine, bytes, pieces)? })
    };
    SIZES.iter().map(point).collect()
}

/// The ring's time on a dry machine. As in the measurement, small sizes run more often.
fn predict(machine: &Topology, bytes: usize, pieces: usize) -> Result<Timing> {
    machine.validate()?;
    let settings = MachineConfig {
        schedule: ExecutionOrder::Virtual,
        topology: Some(Arc::new(machine.clone())),
        dry: true,
        ..MachineConfig::default()
    };
    let gpus = host::machine_with(&machine.host_configs(), &settings).unwrap();
    Ring::new(&gpus, bytes, pieces)?.run(if bytes > 64 * MB { 4 } else { 10 })
}

/// Predicts for the user's machine: the ring if its neighbours are peers, and the crate's own all-reduce.
fn own(machine: &Topology, pieces: usize) -> Result<()> {
    print!("{machine}");
    let linked = (0..machine.len()).all(|d| machine.peers(d).contains(&((d + 1) % machine.len())));
    if machine.len() > 1 && linked {
        let curves = [(machine.name().to_owned(), curve(machine, pieces)?)];
        println!("\nThe copy-engine ring, us; in brackets the bus bandwidth, GB/s\n{}", report::predictions(&curves));
    } else {
        println!("\nNot every device is a peer of the next one, so there is no copy-engine ring.");
    }
    println!("`Device::all_reduce` (staged through the host where there is no link):");
    println!("{}", report::of_the_pool(machine, &SIZES)?);
    Ok(())
}
