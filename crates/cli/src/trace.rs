//! `gpu-pool trace`: a summary of a timeline, in the terminal. `read` reads the file, `summary` sums it up.

mod read;
mod summary;

use comfy_table::{CellAlignment, Table, presets::NOTHING};
use std::{fs, path::PathBuf, process::ExitCode};
use summary::Summary;

/// Sums up a timeline: how busy each GPU was, how much communication nothing hid, the longest waits and their causes.
///
/// The file is a Chrome trace, as `GPU_POOL_TRACE` and `TaskTrace::to_chrome_trace` write it. The file of a program
/// that was killed is readable, too.
#[derive(clap::Args)]
pub struct Arguments {
    /// The trace; with `--merge`, several.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Puts the files together on one axis of time, in this file, and sums it up.
    #[arg(long, value_name = "OUT")]
    merge: Option<PathBuf>,
    /// Shows at most so many waits, and kinds of work.
    #[arg(long, default_value_t = 8)]
    top: usize,
    /// Writes JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let file = match (&arguments.merge, &arguments.files[..]) {
        (Some(out), files) => {
            gpu_pool::trace::merge(files, out).map_err(|error| error.to_string())?;
            out
        }
        (None, [file]) => file,
        (None, _) => return Err("several files need --merge OUT".to_owned()),
    };
    let named = |why: &dyn std::fmt::Display| format!("{}: {why}", file.display());
    let text = fs::read_to_string(file).map_err(|error| named(&error))?;
    let (events, whole) = read::events(&text).map_err(|error| named(&error))?;
    let summary = summary::summary(&events, whole, arguments.top);
    match arguments.json {
        true => println!("{}", serde_json::to_string_pretty(&summary).map_err(|error| error.to_string())?),
        false => print!("{}", shown(&summary)),
    }
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
