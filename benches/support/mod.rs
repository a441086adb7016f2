//! The harness of the programs under `benches/`.
//!
//! A case measures *ours* against any number of peers in one run. After a warm-up the sides take turns, in a rotating
//! order, so that a slow period of the machine affects all of them. Each turn gives one or more samples; the table
//! shows their medians. A ratio above 1 means that ours is better, whatever the unit.
//!
//! ```text
//! cargo bench --bench ring                             # everything
//! cargo bench --bench ring -- --quick round_trip       # fewer turns; only cases whose name contains `round_trip`
//! cargo bench --bench ring -- --json results.jsonl     # one line per case and peer, appended
//! ```

// Each bench compiles this file itself and uses a part of it.
#![allow(dead_code)]

pub mod child;
pub mod gpus;

use std::{
    fs::OpenOptions,
    io::Write,
    path::{Path, PathBuf},
};

use clap::Parser;
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde_json::json;

#[derive(Parser)]
#[command(about = "Measures gpu-pool against its peers")]
struct Options {
    /// Append one JSON object per case and peer to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Fewer and shorter turns: a quick look, not a measurement
    #[arg(long)]
    quick: bool,
    /// Only sizes up to this, in benches that sweep over sizes
    #[arg(long, value_name = "BYTES")]
    max: Option<usize>,
    /// Draw pictures into this folder, in benches that have some
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// How long a case of a sweep over sizes is measured, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1000)]
    case_ms: u32,
    /// Run only the cases whose name contains this
    #[arg(value_name = "CASE")]
    filter: Option<String>,
    // `cargo bench` passes it to every program.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What a sample counts, and whether higher is better.
#[derive(Clone, Copy)]
pub struct Unit {
    name: &'static str,
    higher_is_better: bool,
}

/// Nanoseconds per operation.
pub const NANOSECONDS: Unit = Unit { name: "ns", higher_is_better: false };
/// Microseconds per operation.
pub const MICROSECONDS: Unit = Unit { name: "us", higher_is_better: false };
/// Milliseconds per operation.
pub const MILLISECONDS: Unit = Unit { name: "ms", higher_is_better: false };
/// Millions of operations per second.
pub const MOPS: Unit = Unit { name: "Mop/s", higher_is_better: true };
/// Words that a model writes in a second.
pub const TOKENS: Unit = Unit { name: "tokens/s", higher_is_better: true };
/// Calls, waits, failures: the fewer, the better.
pub const COUNT: Unit = Unit { name: "times", higher_is_better: false };
/// Bytes that are held for each byte that is needed.
pub const FACTOR: Unit = Unit { name: "x", higher_is_better: false };
/// 10^6 bytes.
pub const MEGABYTES: Unit = Unit { name: "MB", higher_is_better: false };
/// 10^9 bytes per second.
pub const GIGABYTES: Unit = Unit { name: "GB/s", higher_is_better: true };

/// Runs one turn and pushes its samples.
type Turn<'a> = Box<dyn FnMut(&mut Vec<f64>) + 'a>;

/// One contestant: a name, and a closure that takes one turn and pushes its samples.
pub struct Side<'a> {
    name: &'a str,
    turn: Turn<'a>,
    samples: Vec<f64>,
}

impl<'a> Side<'a> {
    /// A turn that gives one sample, for example the throughput of a million operations.
    pub fn new(name: &'a str, mut turn: impl FnMut() -> f64 + 'a) -> Self {
        Self::sampling(name, move |samples| samples.push(turn()))
    }

    /// A turn that gives many samples, for example the times of single round trips.
    pub fn sampling(name: &'a str, turn: impl FnMut(&mut Vec<f64>) + 'a) -> Self {
        Self { name, turn: Box::new(turn), samples: Vec::new() }
    }

    fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The value that 99 of 100 samples reach or beat.
    fn p99(&self, unit: Unit) -> f64 {
        self.quantile(if unit.higher_is_better { 0.01 } else { 0.99 })
    }

    fn quantile(&self, q: f64) -> f64 {
        self.samples[(q * (self.samples.len() - 1) as f64).round() as usize]
    }
}

/// One program's run: takes cases, prints the table at the end.
pub struct Bench {
    name: &'static str,
    options: Options,
    machine: String,
    table: Table,
    /// Warm-up turns, and turns that count.
    turns: (usize, usize),
    /// Further numbers for the next case.
    notes: Vec<(&'static str, f64)>,
}

impl Bench {
    /// Reads the command line.
    pub fn new(name: &'static str) -> Self {
        let machine = machine();
        println!("{name} on {machine}");
        let mut table = Table::new();
        table.load_preset(UTF8_FULL_CONDENSED);
        table.set_header(["case", "unit", "ours", "p99", "peer", "peer's", "peer's p99", "ratio"]);
        for column in [2, 3, 5, 6, 7] {
            table.column_mut(column).expect("the header has eight").set_cell_alignment(CellAlignment::Right);
        }
        let options = Options::parse();
        let turns = if options.quick { (1, 5) } else { (3, 31) };
        Self { name, options, machine, table, turns, notes: Vec::new() }
    }

    /// For turns that take seconds: sets the number of warm-up turns and of turns that count, from the next case on.
    pub fn set_turns(&mut self, warm_up: usize, turns: usize) {
        self.turns = (warm_up, turns);
    }

    /// `full`, or `quick` under `--quick`: how much work a turn does.
    pub fn size(&self, full: usize, quick: usize) -> usize {
        if self.options.quick { quick } else { full }
    }

    /// The largest size of a sweep that goes up to `most` by default.
    pub fn most_bytes(&self, most: usize) -> usize {
        self.options.max.map_or(most, |max| max.min(most))
    }

    /// How long a case of a sweep is measured, in microseconds.
    pub fn micros_of_case(&self) -> usize {
        self.size(self.options.case_ms as usize * 1000, 100_000)
    }

    /// A further number in the JSON lines of the next case.
    pub fn note(&mut self, name: &'static str, value: f64) {
        self.notes.push((name, value));
    }

    /// The largest size, if one was asked for.
    pub fn asked_for(&self) -> Option<usize> {
        self.options.max
    }

    /// The folder for pictures, if one was given.
    pub fn plot_folder(&self) -> Option<&Path> {
        self.options.plot.as_deref()
    }

    /// Whether the case was requested, for cases that take long to prepare.
    pub fn wants(&self, case: &str) -> bool {
        self.options.filter.as_ref().is_none_or(|filter| case.contains(filter.as_str()))
    }

    /// Measures `ours` and `peers` in turns. Without peers it only records ours.
    pub fn compare(&mut self, case: &str, unit: Unit, ours: Side<'_>, peers: Vec<Side<'_>>) {
        if !self.wants(case) {
            self.notes.clear();
            return;
        }
        let (warm_up, turns) = self.turns;
        let mut sides = vec![ours];
        sides.extend(peers);

        let count = sides.len();
        for turn in 0..warm_up + turns {
            if turn == warm_up {
                sides.iter_mut().for_each(|side| side.samples.clear());
            }
            for k in 0..count {
                let side = &mut sides[(turn + k) % count];
                (side.turn)(&mut side.samples);
            }
        }
        for side in &mut sides {
            assert!(!side.samples.is_empty(), "{case}: {} took its turns and measured nothing", side.name);
            side.samples.sort_by(f64::total_cmp);
        }

        let (ours, peers) = sides.split_first().expect("ours is one");
        if peers.is_empty() {
            self.record(case, unit, ours, None);
        }
        for peer in peers {
            self.record(case, unit, ours, Some(peer));
        }
        self.notes.clear();
    }

    fn record(&mut self, case: &str, unit: Unit, ours: &Side<'_>, peer: Option<&Side<'_>>) {
        let (value, p99) = (ours.median(), ours.p99(unit));
        let ratio = peer.map(|peer| match unit.higher_is_better {
            true => value / peer.median(),
            false => peer.median() / value,
        });
        let mut line = json!({
            "bench": self.name, "case": case, "unit": unit.name, "value": value, "p99": p99,
            "peer": peer.map(|peer| peer.name),
            "peer_value": peer.map(Side::median),
            "peer_p99": peer.map(|peer| peer.p99(unit)),
            "ratio": ratio,
            "machine": self.machine,
        });
        for (name, value) in &self.notes {
            line[*name] = json!(value);
        }
        self.append(&line.to_string());

        let or_blank = |number: Option<f64>| number.map(show).unwrap_or_default();
        self.table.add_row([
            case.to_owned(),
            unit.name.to_owned(),
            show(value),
            show(p99),
            peer.map(|peer| peer.name.to_owned()).unwrap_or_default(),
            or_blank(peer.map(Side::median)),
            or_blank(peer.map(|peer| peer.p99(unit))),
            ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
        ]);
    }

    /// Writes the line at once, so that nothing is lost if the bench hangs later.
    fn append(&self, line: &str) {
        if let Some(path) = &self.options.json {
            let file = OpenOptions::new().create(true).append(true).open(path);
            let written = file.and_then(|mut file| writeln!(file, "{line}"));
            written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        }
    }

    /// Prints the table.
    pub fn finish(self) {
        println!("{}", self.table);
        println!("medians; a ratio above 1 means that ours is better");
    }
}

/// Three significant digits, more where the whole part has more.
fn show(number: f64) -> String {
    match number.abs() {
        n if n >= 100.0 => format!("{number:.0}"),
        n if n >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

/// `GPU_POOL_MACHINE`, or cores and model of the CPU; never a host name, since results are published.
fn machine() -> String {
    if let Ok(name) = std::env::var("GPU_POOL_MACHINE") {
        return name;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or("unknown CPU", |(_, model)| model.trim());
    format!("{cores} x {model}")
}
