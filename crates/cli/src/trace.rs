//! `gpu-pool trace`: a summary of a timeline, or of flight records, in the terminal. `read` reads a file, `summary`
//! sums up a timeline, `flight` puts flight records together.

mod flight;
mod read;
mod summary;

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use read::Content;
use std::{fs, path::PathBuf, process::ExitCode};
use summary::Summary;

/// Sums up a timeline: how busy each GPU was, how much communication nothing hid, the longest waits and their causes.
/// Or flight records: the missing device, the waits of the others, and the last calls of each.
///
/// A timeline is a Chrome trace, as `GPU_POOL_TRACE` and `TaskTrace::to_chrome_trace` write it. The file of a program
/// that was killed is readable, too. A flight record is a `.json` that a hang has left in `GPU_POOL_FLIGHT_RECORD`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The timeline; with `--merge`, several. Or the flight records of one hang.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Puts the files together on one axis of time, in this file, and sums it up.
    #[arg(long, value_name = "OUT")]
    merge: Option<PathBuf>,
    /// Shows at most so many waits, and kinds of work; or calls of each device.
    #[arg(long, default_value_t = 8)]
    top: usize,
    /// Writes JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let files = match &arguments.merge {
        // Without OUT, the first trace would be taken for it, and overwritten.
        Some(out) if out.exists() => return Err(format!("{} is there: --merge OUT writes a new file", out.display())),
        Some(out) => {
            gpu_pool::trace::merge(&arguments.files, out).map_err(|error| error.to_string())?;
            std::slice::from_ref(out)
        }
        None => &arguments.files[..],
    };
    let (mut records, mut traces) = (Vec::new(), Vec::new());
    for file in files {
        let named = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
        let text = fs::read_to_string(file).map_err(|error| named(&error))?;
        match read::content(&text).map_err(|error| named(&error))? {
            Content::Record(record) => records.push(record),
            Content::Trace(events, whole) => traces.push((events, whole)),
        }
    }
    let json = |json: serde_json::Result<String>| json.map(|json| json + "\n").map_err(|error| error.to_string());
    let text = match &traces[..] {
        [] => {
            let summary = flight::summary(records, arguments.top);
            if arguments.json { json(serde_json::to_string_pretty(&summary))? } else { flight::shown(&summary) }
        }
        [(events, whole)] if records.is_empty() => {
            let summary = summary::summary(events, *whole, arguments.top);
            if arguments.json { json(serde_json::to_string_pretty(&summary))? } else { shown(&summary) }
        }
        _ => return Err("several timelines need --merge OUT, without flight records".to_owned()),
    };
    print!("{text}");
    Ok(ExitCode::SUCCESS)
}

fn shown(summary: &Summary) -> String {
    let Summary { events, span_us, .. } = summary;
    let end = if summary.whole { "" } else { "; the program was killed" };
    let mut text = format!("{:.3} ms, {events} events{end}\n", span_us / 1e3);
    let share = |us: f64| format!("{:.1} %", 100.0 * us / span_us.max(f64::MIN_POSITIVE));
    let mut gpus = table(&["", "busy", "communicates", "exposed", "thread waits"]);
    for gpu in &summary.gpus {
        let shares = [gpu.busy_us, gpu.communication_us, gpu.exposed_us, gpu.thread_waits_us].map(share);
        gpus.add_row([vec![gpu.name.clone()], shares.to_vec()].concat());
    }
    text += &format!("\n{}\n", gpus.trim_fmt());
    if !summary.waits.is_empty() {
        let mut waits = table(&["longest waits", "us", "at us", "call", "because of"]);
        for wait in &summary.waits {
            let place = wait.place.as_ref().map(|place| format!(" ({place})")).unwrap_or_default();
            let cause = wait.cause.clone().unwrap_or_default();
            let times = [wait.us, wait.start_us].map(|us| format!("{us:.1}"));
            waits.add_row([vec![wait.row.clone()], times.to_vec(), vec![wait.name.clone() + &place, cause]].concat());
        }
        left(&mut waits, &[3, 4]);
        text += &format!("\n{}\n", waits.trim_fmt());
    }
    if !summary.work.is_empty() {
        let mut work = table(&["most time on streams", "us", "count", "mean us"]);
        for done in &summary.work {
            let mean = format!("{:.1}", done.us / done.count as f64);
            let name = format!("{} ({})", done.name, done.kind);
            work.add_row([name, format!("{:.1}", done.us), done.count.to_string(), mean]);
        }
        text += &format!("\n{}\n", work.trim_fmt());
    }
    text
}

/// A table of numbers, with names in the first column.
fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(head);
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

fn left(table: &mut Table, columns: &[usize]) {
    for &column in columns {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Left);
        }
    }
}

#[cfg(test)]
#[path = "../tests/unit/trace_tests.rs"]
mod tests;
