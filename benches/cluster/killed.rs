//! A process that is killed in mid-collective: when the other one knows, and when it has ended.

use std::{
    thread,
    time::{Duration, Instant},
};

use crate::{
    processes::Processes,
    support::{Bench, MILLISECONDS, Side},
};

const RUNS: u64 = 30;

/// `software/killed/known` and `software/killed/ended`: milliseconds from the signal to the other process's typed
/// error, and to its end with an exit code that is not zero. Every run must get there.
pub fn measure(bench: &mut Bench) {
    let cases = [("software/killed/known", 0), ("software/killed/ended", 1)];
    if !cases.iter().any(|(case, _)| bench.wants(case)) {
        return;
    }
    let runs: Vec<_> = (0..RUNS).map(run).collect();
    bench.set_turns(0, 1);
    for (case, which) in cases {
        bench.note("runs", RUNS as f64);
        let times = |samples: &mut Vec<f64>| samples.extend(runs.iter().map(|run| run[which]));
        bench.compare(case, MILLISECONDS, Side::sampling("gpu-pool", times), vec![]);
    }
}

fn run(number: u64) -> [f64; 2] {
    let Processes { first, second } = Processes::by_hand(&format!("host 2 {}", 16 << 20), "shm", |_, _| {});
    let mut first = first.into_inner();
    first.order(&format!("forever/{}", 16 << 20), 1);
    assert_eq!(first.answer(), 0.0, "it has begun");
    // Some place or other in the collectives.
    thread::sleep(Duration::from_millis(10 + 7 * number));
    let clock = Instant::now();
    drop(second);
    let known = (first.answer(), clock.elapsed());
    assert_eq!(known.0, 1.0, "run {number}: the lost host");
    assert!(!first.ends().success(), "run {number}: exit code 0 after a loss");
    [known.1, clock.elapsed()].map(|time| time.as_secs_f64() * 1e3)
}
