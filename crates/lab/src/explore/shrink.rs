//! Shrinks a failing run: finds fewer choices with which the program still fails.

use super::{Explorer, Failing, Run};
use gpu_pool::{
    GpuPool, Result,
    extend::driver::host::{ExecutionOrder, Trace},
    extend::lab::silence_panics,
};
use std::time::{Duration, Instant};

const RUNS: u32 = 200;
const TIME: Duration = Duration::from_secs(20);

pub(super) struct Shrink<'a> {
    explorer: &'a Explorer,
    f: &'a dyn Fn(&GpuPool) -> Result<()>,
    tries: u32,
    until: Instant,
}

impl<'a> Shrink<'a> {
    pub(super) fn new(explorer: &'a Explorer, f: &'a dyn Fn(&GpuPool) -> Result<()>) -> Self {
        Shrink { explorer, f, tries: 0, until: Instant::now() + TIME }
    }

    /// One more run; `None` if runs or time are used up.
    #[track_caller]
    fn run(&mut self, choices: &[u32]) -> Option<Run> {
        if self.tries >= RUNS || Instant::now() >= self.until {
            return None;
        }
        self.tries += 1;
        // The failing run has printed its panic. The shrinking runs print nothing, or 200 copies of it would hide it.
        let _hushed = silence_panics();
        Some(self.explorer.once(ExecutionOrder::Replay(choices.into()), self.f))
    }

    /// One more run; `None` if it passes or cannot be made.
    #[track_caller]
    fn fails(&mut self, choices: &[u32]) -> Option<Failing> {
        let Run { failed, trace } = self.run(choices)?;
        failed.map(|cause| Failing { cause, trace })
    }

    /// The simplest failing run, the number of runs, and whether the first failing run could be repeated.
    #[track_caller]
    pub(super) fn shrink(mut self, first: Failing) -> (Failing, u32, bool) {
        let choices = first.trace.choices();
        let Some(mut best) = self.fails(&choices) else { return (first, self.tries, false) };
        // First without any switch; then the shortest failing prefix, by bisection.
        let straight = match self.run(&[]) {
            Some(Run { failed: Some(cause), trace }) => return (Failing { cause, trace }, self.tries, true),
            Some(run) => run.trace,
            None => return (best, self.tries, true),
        };
        let (mut passes, mut fails) = (0, choices.len());
        while fails - passes > 1 {
            let middle = passes + (fails - passes) / 2;
            match self.fails(&choices[..middle]) {
                Some(failing) => (best, fails) = (failing, middle),
                None => passes = middle,
            }
        }
        best = self.minimise(choices[..fails].to_vec(), best);
        if best.trace.switches() > 1
            && let Some(single) = self.single(&straight)
        {
            best = single;
        }
        (best, self.tries, true)
    }

    /// From the end, where the failure is. A failing run with fewer choices need not be the simplest.
    #[track_caller]
    fn single(&mut self, straight: &Trace) -> Option<Failing> {
        for (at, step) in straight.steps().iter().enumerate().rev() {
            for choice in 1..step.candidates {
                let mut choices = vec![0; at];
                choices.push(choice);
                let Run { failed, trace } = self.run(&choices)?;
                if let Some(cause) = failed {
                    return Some(Failing { cause, trace });
                }
            }
        }
        None
    }

    #[track_caller]
    fn minimise(&mut self, mut choices: Vec<u32>, mut best: Failing) -> Failing {
        let mut parts = 2;
        loop {
            let switches: Vec<usize> = (0..choices.len()).filter(|&i| choices[i] != 0).collect();
            let size = switches.len().div_ceil(parts).max(1);
            let mut smaller = None;
            for block in switches.chunks(size) {
                let mut without = choices.clone();
                block.iter().for_each(|&i| without[i] = 0);
                if let Some(failing) = self.fails(&without) {
                    smaller = Some((without, failing));
                    break;
                }
            }
            match smaller {
                Some(found) => {
                    (choices, best) = found;
                    parts = parts.saturating_sub(1).max(2);
                }
                None if size == 1 => break,
                None => parts = (parts * 2).min(switches.len()),
            }
        }
        best
    }
}
