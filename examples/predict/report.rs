//! The tables that are printed.

use crate::{MB, Point, Timing, measured, pool};
use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use gpu_pool_lab::{Topology, topology::HostCosts};

const GB: usize = 1 << 30;

/// Prediction and measurement, for 8 devices.
pub fn against_measured(points: &[Point]) -> Table {
    let mut table = table(&["size", "predicted", "of it submitting", "measured", "off by", "best measured", "NCCL"]);
    for point in points {
        let predicted = point.timing.call;
        let time = |from| measured::of(from, point.bytes).map_or_else(|| "-".to_owned(), us);
        let off = measured::of(&measured::RING, point.bytes)
            .map_or_else(|| "-".to_owned(), |measured| format!("{:+.1} %", 100.0 * (predicted / measured - 1.0)));
        table.add_row([
            size(point.bytes),
            us(predicted),
            us(point.timing.submit),
            time(&measured::RING),
            off,
            time(&measured::BEST),
            time(&measured::NCCL),
        ]);
    }
    table
}

/// By how much the prediction falls on a machine on which one cost is zero.
pub fn contributions(machine: &Topology, predict: impl Fn(&Topology, usize) -> Result<Timing>) -> Result<Table> {
    const FREE: f64 = 1e12;
    let m = || machine.clone();
    let without = [
        (
            "bytes on the links",
            m().with_links(|link| {
                link.path.gbps = FREE;
                link.path.uses.clear();
            }),
        ),
        ("latency of the copies", m().with_links(|link| link.path.latency_us = 0.0)),
        ("streams that wait for events", m().with_devices(|_, device| device.wait_us = 0.0)),
        ("additions", m().with_devices(|_, device| (device.memory_gbps, device.launch_us) = (FREE, 0.0))),
        ("calls of the host", m().with_host(|host| *host = HostCosts::FREE)),
    ];
    let mut table = table(&["without", "64 MB", "256 MB", "1 GB"]);
    let sizes = [64 * MB, 256 * MB, 1024 * MB];
    let whole = sizes.iter().map(|&bytes| Ok(predict(machine, bytes)?.call)).collect::<Result<Vec<_>>>()?;
    table.add_row(["(nothing left out)".to_owned()].into_iter().chain(whole.iter().map(|&time| us(time))));
    for (what, machine) in without {
        let mut row = vec![what.to_owned()];
        for (&bytes, whole) in sizes.iter().zip(&whole) {
            row.push(format!("-{}", us(whole - predict(&machine, bytes)?.call)));
        }
        table.add_row(row);
    }
    Ok(table)
}

/// The crate's own all-reduce.
pub fn of_the_pool(machine: &Topology, sizes: &[usize]) -> Result<Table> {
    let mut table = table(&["size", "time"]);
    for &bytes in sizes {
        table.add_row([size(bytes), us(pool::all_reduce(machine, bytes)?)]);
    }
    Ok(table)
}

/// A column for each machine.
pub fn predictions(curves: &[(String, Vec<Point>)]) -> Table {
    let names = curves.iter().map(|(name, _)| name.as_str());
    let mut table = table(&["size"].into_iter().chain(names).collect::<Vec<_>>());
    for row in 0..curves.first().map_or(0, |(_, points)| points.len()) {
        let cell = |point: &Point| format!("{} ({:.0})", us(point.timing.call), point.bus_bandwidth());
        let cells = curves.iter().map(|(_, points)| cell(&points[row]));
        table.add_row([size(curves[0].1[row].bytes)].into_iter().chain(cells));
    }
    table
}

/// A table whose first column is to the left.
pub fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(header);
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

/// `32 KB`, `256 MB`, `1 GB`: powers of two, as the measurements call them.
pub fn size(bytes: usize) -> String {
    let (unit, name) = match bytes {
        0..MB => (1 << 10, "KB"),
        MB..GB => (MB, "MB"),
        _ => (GB, "GB"),
    };
    format!("{} {name}", (bytes as f64 / unit as f64).round())
}

/// `16`, `0.5`.
pub fn factor(value: f64) -> String {
    if value < 1.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn us(time: f64) -> String {
    format!("{time:.0} us")
}
