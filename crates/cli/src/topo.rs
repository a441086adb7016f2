//! `gpu-pool topo`: how fast each ordered pair of devices and each device's path to the host is, measured.
//!
//! A number is the best of some copies by copy engines, timed by events of the reading device, one pair at a time.

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use gpu_pool::{Device, DeviceBuffer, GpuPool, Result, collective::Route};
use gpu_pool_lab::{
    Topology,
    topology::{DeviceModel, Link, Path},
};
use serde::Serialize;
use std::{fs, path::PathBuf, process::ExitCode, sync::Arc};

/// Bytes of a large copy.
const LARGE: usize = 64 << 20;
/// The same on software GPUs.
const LARGE_SOFTWARE: usize = 1 << 20;
/// Bytes of a small one, which measures the latency.
const SMALL: usize = 4;
/// The best of so many counts.
const TIMES: usize = 5;

/// Measures the links: GB/s and latency of each ordered pair of devices, and of each device and the host.
#[derive(clap::Args)]
pub struct Arguments {
    /// Writes JSON.
    #[arg(long)]
    json: bool,
    /// Writes a machine file: `Topology::from_file` of gpu-pool-lab runs software GPUs on it in virtual time.
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,
}

/// A measured path.
#[derive(Clone, Copy, Debug, Serialize)]
struct Measured {
    us: f64,
    gbps: f64,
}

#[derive(Debug, Serialize)]
struct Pair {
    from: usize,
    to: usize,
    /// Over a link; else through the host.
    direct: bool,
    #[serde(flatten)]
    measured: Measured,
}

#[derive(Debug, Serialize)]
struct DeviceRow {
    name: String,
    pci: String,
    memory: u64,
    from_host: Measured,
    to_host: Measured,
    /// Its own memory: read and written.
    within_gbps: f64,
}

#[derive(Debug, Serialize)]
struct Matrix {
    version: u32,
    devices: Vec<DeviceRow>,
    pairs: Vec<Pair>,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let text = |error: gpu_pool::Error| error.to_string();
    let matrix = measure(&GpuPool::builder().build().map_err(text)?).map_err(text)?;
    match arguments.json {
        true => println!("{}", serde_json::to_string_pretty(&matrix).map_err(|error| error.to_string())?),
        false => print!("{}", shown(&matrix)),
    }
    if let Some(file) = &arguments.machine {
        let toml = machine(&matrix).to_toml().map_err(text)?;
        fs::write(file, toml).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(pool: &GpuPool) -> Result<Matrix> {
    let report = pool.report();
    let software = report.devices[0].pci_bus_id.is_empty();
    let large = if software { LARGE_SOFTWARE } else { LARGE };
    let mut devices = Vec::new();
    for (device, info) in report.devices.iter().enumerate() {
        let [from_host, to_host, within] = pool.on_device(device).run(|dev| host(dev, large))?;
        let (name, pci, memory) = (info.name.clone(), info.pci_bus_id.clone(), info.total_memory);
        devices.push(DeviceRow { name, pci, memory, from_host, to_host, within_gbps: 2.0 * within.gbps });
    }
    let mut pairs = Vec::new();
    for peer in report.peers.iter().filter(|peer| peer.from != peer.to) {
        // The report is of the device that accesses memory: `to` reads here.
        let (from, to) = (peer.to, peer.from);
        let found = pool.on(&[from, to]).run(|dev, _| between(dev, large))?;
        let measured = found.into_iter().flatten().next().unwrap_or(Measured { us: 0.0, gbps: 0.0 });
        pairs.push(Pair { from, to, direct: peer.route == Route::Direct, measured });
    }
    pairs.sort_by_key(|pair| (pair.from, pair.to));
    Ok(Matrix { version: 1, devices, pairs })
}

/// The second member reads the first one's memory.
fn between(dev: &Device, large: usize) -> Result<Option<Measured>> {
    let lent = dev.exchange(Arc::new(dev.zeros::<u8>(large)?))?;
    let measured = if dev.rank() == 1 {
        let mut near = dev.zeros::<u8>(large)?;
        Some(best(dev, large, |bytes| dev.copy(&lent[0].slice(..bytes), &mut near.slice_mut(..bytes)))?)
    } else {
        None
    };
    // No member frees memory that the other one reads.
    dev.barrier()?;
    Ok(measured)
}

/// From the host, to the host, within the device.
fn host(dev: &Device, large: usize) -> Result<[Measured; 3]> {
    let (source, mut target): (DeviceBuffer<u8>, DeviceBuffer<u8>) = (dev.zeros(large)?, dev.zeros(large)?);
    let (pinned, mut back) = (dev.pinned::<u8>(large)?, dev.pinned::<u8>(large)?);
    let (few, mut few_back) = (dev.pinned::<u8>(SMALL)?, dev.pinned::<u8>(SMALL)?);
    Ok([
        best(dev, large, |bytes| {
            let from = if bytes == large { &pinned } else { &few };
            dev.upload_pinned_into(from, &mut target.slice_mut(..bytes))
        })?,
        best(dev, large, |bytes| {
            let to = if bytes == large { &mut back } else { &mut few_back };
            dev.download_pinned(&source.slice(..bytes), to)
        })?,
        best(dev, large, |bytes| dev.copy(&source.slice(..bytes), &mut target.slice_mut(..bytes)))?,
    ])
}

/// The best small copy and the best large one.
fn best(dev: &Device, large: usize, mut copy: impl FnMut(usize) -> Result<()>) -> Result<Measured> {
    let mut shortest = |bytes: usize| -> Result<f64> {
        let mut shortest = f64::INFINITY;
        // The first one is a warm-up.
        for time in 0..=TIMES {
            let start = dev.record_timed()?;
            copy(bytes)?;
            let end = dev.record_timed()?;
            dev.synchronize()?;
            if time > 0 {
                shortest = shortest.min(end.elapsed_since(&start)?.as_secs_f64());
            }
        }
        Ok(shortest)
    };
    let us = shortest(SMALL)? * 1e6;
    Ok(Measured { us, gbps: large as f64 / shortest(large)?.max(1e-9) / 1e9 })
}

fn shown(matrix: &Matrix) -> String {
    let count = matrix.devices.len();
    let mut text = String::new();
    for (device, DeviceRow { name, pci, within_gbps, .. }) in matrix.devices.iter().enumerate() {
        let space = if pci.is_empty() { "" } else { " " };
        text += &format!("{device}: {name}{space}{pci}, own memory {within_gbps:.0} GB/s\n");
    }
    let mut add = |title: &str, of: &dyn Fn(&Measured) -> String| {
        let head =
            [vec![title.to_owned()], (0..count).map(|to| format!("to {to}")).collect(), vec!["to host".to_owned()]];
        let mut table = Table::new();
        table.load_preset(NOTHING).set_header(head.concat());
        for (from, device) in matrix.devices.iter().enumerate() {
            let cell = |to: usize| match matrix.pairs.iter().find(|pair| (pair.from, pair.to) == (from, to)) {
                Some(pair) => of(&pair.measured) + if pair.direct { "" } else { " *" },
                None => "-".to_owned(),
            };
            let cells = [vec![format!("from {from}")], (0..count).map(cell).collect(), vec![of(&device.to_host)]];
            table.add_row(cells.concat());
        }
        let host = matrix.devices.iter().map(|device| of(&device.from_host)).collect();
        table.add_row([vec!["from host".to_owned()], host, vec!["-".to_owned()]].concat());
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        text += &format!("\n{}\n", table.trim_fmt());
    };
    add("GB/s", &|measured| format!("{:.1}", measured.gbps));
    add("us", &|measured| format!("{:.1}", measured.us));
    if matrix.pairs.iter().any(|pair| !pair.direct) {
        text += "\n* through the host\n";
    }
    text
}

/// A model of the machine. Shares of ports are unknown: each path is alone in it.
fn machine(matrix: &Matrix) -> Topology {
    // A model has no rate of zero.
    let path = |measured: &Measured| Path::new(measured.us.max(0.0), measured.gbps.max(1e-3));
    let first = matrix.devices.first().map_or("", |device| &device.name);
    let name = format!("{} x {first}, measured by gpu-pool topo", matrix.devices.len());
    let machine = matrix.devices.iter().fold(Topology::new(name), |machine, device| {
        machine.device(DeviceModel {
            name: device.name.clone(),
            memory: device.memory,
            memory_gbps: device.within_gbps.max(1e-3),
            up: path(&device.from_host),
            down: path(&device.to_host),
            ..DeviceModel::default()
        })
    });
    let direct = matrix.pairs.iter().filter(|pair| pair.direct);
    direct.fold(machine, |machine, pair| machine.link(Link::new(pair.from, pair.to, path(&pair.measured))))
}
