//! Output for the user: the progress bar, the final table, the hash of the weights.

use crate::train::{Outcome, Progress};
use comfy_table::{Cell, CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// A progress bar over epochs on stderr; nothing if stderr is no terminal, or if another process shows it.
pub fn bar(epochs: usize, what: &'static str, show: bool) -> ProgressBar {
    if !show {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(epochs as u64);
    let style = ProgressStyle::with_template("{prefix} {bar:20} epoch {pos}/{len}  {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(what);
    bar
}

/// Advances the bar by an epoch.
pub fn advance(bar: &ProgressBar, now: Progress) {
    let (loss, accuracy, rate) = (now.loss, 100.0 * now.accuracy, now.rows_per_second);
    bar.inc(1);
    bar.set_message(format!("loss {loss:.4}  held out {accuracy:.1} %  {rate:.0} rows/s"));
}

/// The work of every device.
pub fn table(outcome: &Outcome) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(["device", "name", "rows", "compute", "exchange + wait", "memory peak"]);
    for (i, device) in outcome.devices.iter().enumerate() {
        table.add_row(vec![
            Cell::new(i),
            Cell::new(&device.name),
            Cell::new(device.rows),
            Cell::new(milliseconds(device.compute)),
            Cell::new(milliseconds(device.exchange)),
            Cell::new(kibibytes(device.memory_peak)),
        ]);
    }
    for column in table.column_iter_mut().enumerate().filter(|(i, _)| *i != 1).map(|(_, column)| column) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", 1e3 * time.as_secs_f64())
}

fn kibibytes(bytes: u64) -> String {
    format!("{:.1} KiB", bytes as f64 / 1024.0)
}

/// FNV-1a over the bits: if the hashes of two runs differ, the runs differ.
pub fn hash(weights: &[f32]) -> u64 {
    let bytes = weights.iter().flat_map(|w| w.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Whether two sets of weights have the same bits (so a NaN equals itself, and -0 is not 0).
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}
