//! `predict --hosts`: an all-reduce over 2 to 128 hosts of eight H200s, as one flat ring over all devices and as a
//! hierarchy: reduce-scatter on each host, all-reduce on each rail, all-gather on each host.
//!
//! `run`: both ways on dry pools; `model`: both in closed form, for machines of more devices than a pool runs; `plot`:
//! the picture. The table and the JSON lines have both where there are both.

pub mod model;
mod plot;
pub mod run;

use crate::report;
use anyhow::{Context, Result};
use comfy_table::Table;
use gpu_pool_lab::{Topology, topology::Nic};
use model::Model;
use serde_json::json;
use std::{fs, ops::RangeInclusive, path::Path};

/// Devices of a host.
const EACH: usize = 8;
const HOSTS: [usize; 7] = [2, 4, 8, 16, 32, 64, 128];
/// 400 Gbit/s; 10 us from end to end.
const NIC: Nic = Nic { latency_us: 5.0, gbps: 50.0 };
/// Adapters of a host: a rail for each device, or one for all.
const NICS: [usize; 2] = [EACH, 1];
/// The sizes that run.
const SIZES: [usize; 5] = [1 << 10, 1 << 15, 1 << 20, 1 << 25, 1 << 30];
/// The sizes of the model.
const RANGE: RangeInclusive<usize> = 1 << 10..=1 << 36;

/// One machine.
struct Case {
    hosts: usize,
    nics: usize,
    model: Model,
    /// Bytes, and the times of both ways; empty for machines that do not run.
    runs: Vec<(usize, [f64; 2])>,
}

impl Case {
    fn new(hosts: usize, nics: usize, most: usize) -> Result<Case> {
        let machine = Topology::nvswitch(EACH).on_hosts(hosts, &vec![NIC; nics]);
        machine.validate()?;
        let model = Model::of(&machine).context("all devices of a host are linked")?;
        let times = if machine.len() <= most { run::times(&machine, &SIZES)? } else { Vec::new() };
        Ok(Case { hosts, nics, model, runs: SIZES.into_iter().zip(times).collect() })
    }

    /// The times of both ways by the model.
    fn modelled(&self, bytes: usize) -> [f64; 2] {
        [self.model.flat(bytes), self.model.hierarchy(bytes)]
    }

    /// The largest error of the model, where there are runs.
    fn error(&self) -> Option<f64> {
        let off = |&(bytes, ran): &(usize, [f64; 2])| {
            self.modelled(bytes).into_iter().zip(ran).map(|(model, ran)| (model / ran - 1.0).abs()).fold(0.0, f64::max)
        };
        self.runs.iter().map(off).reduce(f64::max)
    }
}

/// Predicts, prints, and draws. Machines of up to `most` devices run.
pub fn compare(most: usize, plot: Option<&Path>, json: Option<&Path>) -> Result<()> {
    println!("{}", Topology::nvswitch(EACH).on_hosts(2, &[NIC; EACH]));
    let mut cases = Vec::new();
    for nics in NICS {
        for hosts in HOSTS {
            cases.push(Case::new(hosts, nics, most)?);
        }
    }
    println!("One all-reduce of f32, us: the ring over all devices / the hierarchy; * ran in virtual time");
    println!("{}", table(&cases));
    if let Some(path) = json {
        fs::write(path, lines(&cases)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(path) = plot {
        plot::draw(path, &cases).with_context(|| format!("cannot draw {}", path.display()))?;
        println!("drawn in {}", path.display());
    }
    Ok(())
}

fn table(cases: &[Case]) -> Table {
    let sizes = SIZES.map(report::size);
    let names = ["hosts", "NICs"].into_iter().chain(sizes.iter().map(String::as_str));
    let mut table = report::table(&names.chain(["flat wins from", "model off by"]).collect::<Vec<_>>());
    for case in cases {
        let cell = |bytes: usize| {
            let ran = case.runs.iter().find(|(size, _)| *size == bytes);
            let [flat, hierarchy] = ran.map_or_else(|| case.modelled(bytes), |(_, times)| *times);
            format!("{flat:.0} / {hierarchy:.0}{}", if ran.is_some() { "*" } else { "" })
        };
        let crossing = case.model.crossing(RANGE).map_or("nowhere".into(), report::size);
        let error = case.error().map_or("-".into(), |error| format!("{:.1} %", 100.0 * error));
        let start = [case.hosts.to_string(), case.nics.to_string()];
        table.add_row(start.into_iter().chain(SIZES.map(cell)).chain([crossing, error]));
    }
    table
}

/// To nanoseconds.
fn rounded(us: f64) -> f64 {
    (1e3 * us).round() / 1e3
}

/// A JSON object for each size of each machine: the times of the model, and those of the runs. `flat_wins_from`: bytes,
/// if the ring over all devices wins anywhere.
fn lines(cases: &[Case]) -> String {
    let line = |case: &Case, bytes: usize| {
        let ran = case.runs.iter().find(|(size, _)| *size == bytes).map(|(_, times)| times);
        let [flat, hierarchy] = case.modelled(bytes).map(rounded);
        let of = json!({ "bench": "predict_hosts", "unit": "us", "hosts": case.hosts, "devices": EACH * case.hosts,
            "nics": case.nics, "bytes": bytes, "flat": flat, "hierarchy": hierarchy,
            "flat_ran": ran.map(|times| rounded(times[0])), "hierarchy_ran": ran.map(|times| rounded(times[1])),
            "flat_wins_from": case.model.crossing(RANGE) });
        format!("{of}\n")
    };
    cases.iter().flat_map(|case| SIZES.map(|bytes| line(case, bytes))).collect()
}
