//! Measurements on 8 x H200 (NVSwitch, driver 580, NVLink multicast off), of 2026-11-21 or before: f32 all-reduce in
//! place, back-to-back calls, in microseconds, of the slowest rank.

const MB: usize = 1 << 20;

/// The copy-engine ring in two pieces: bytes and time. One number of the model was fitted to the first value, while the
/// second was known.
pub const RING: [(usize, f64); 2] = [(256 * MB, 1355.0), (1024 * MB, 4947.0)];

/// The part of that time that the host threads spent in submitting, including their waits for each other.
pub const SUBMIT: f64 = 400.0;

/// NCCL 2.28.9, the better of plain and symmetric windows.
pub const NCCL: [(usize, f64); 3] = [(64 * MB, 364.0), (256 * MB, 1356.0), (1024 * MB, 5230.0)];

/// The best of all prototypes: a write-only ring within one kernel, and at 1 GB the copy-engine ring. It is another
/// algorithm, so it is no bound for this one.
pub const BEST: [(usize, f64); 3] = [(64 * MB, 335.0), (256 * MB, 1306.0), (1024 * MB, 4947.0)];

/// The measurement for a size.
pub fn of(table: &[(usize, f64)], bytes: usize) -> Option<f64> {
    table.iter().find(|(size, _)| *size == bytes).map(|&(_, time)| time)
}
