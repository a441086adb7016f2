//! Runs many interleavings of one program, and finds the simplest one that fails.
//!
//! Software GPUs run one operation at a time, in an order drawn from a seed ([`ExecutionOrder::Seeded`]). A failing run
//! is then replayed with fewer and fewer switches between streams, by delta debugging (Zeller and Hildebrandt,
//! "Simplifying and isolating failure-inducing input", 2002). If several switches remain, single switches are tried,
//! since most bugs need few (Musuvathi and Qadeer, "Iterative context bounding", 2007).

mod shrink;

use super::{
    check::Check,
    observer::{Lab, LabBuilder},
};
use gpu_pool::{
    Builder, Error, GpuPool, Result, display_as,
    extend::driver::host::{ExecutionOrder, Trace},
    extend::lab::{discard, payload_text, seed, write_steps},
    setters,
};
use shrink::Shrink;
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

const AROUND: usize = 3;
const SHOWN: usize = 12;

/// Runs `f` once for each of `seeds` seeds, on 4 software GPUs with the checker. The seed sets the order of operations.
///
/// The page "Testing without GPUs" of the guide has an example.
///
/// # Panics
/// If `f` returns an error or panics for one of the seeds. The message has the seed, the error, and the simplest
/// failing trace that was found. [`Explorer`] has more settings.
#[track_caller]
pub fn explore(seeds: u64, f: impl Fn(&GpuPool) -> Result<()>) {
    if let Err(failure) = Explorer::new().seeds(seeds).run(f) {
        panic!("{failure}");
    }
}

/// Settings of an exploration.
///
/// The order of operations is a function of the seed, as long as each device thread's submissions do not depend on
/// time. [`ExecutionOrder`] lists the exceptions.
///
/// The environment does not change backend, number of devices and checker: `GPU_POOL_BACKEND`, `GPU_POOL_DEVICES` and
/// `GPU_POOL_CHECK=off` have no effect here.
///
/// The failing run prints its panic as usual. The runs that simplify it do not: meanwhile panics of the calling thread
/// and of the pool's threads are silent (but not those of threads that the program starts itself).
#[derive(Clone, Debug)]
#[must_use = "nothing runs before `run`"]
pub struct Explorer {
    devices: usize,
    first: u64,
    seeds: u64,
    builder: Builder,
    is_configured: bool,
    choices: Option<Arc<[u32]>>,
    shrink: bool,
}

impl Default for Explorer {
    fn default() -> Self {
        Self::new()
    }
}

impl Explorer {
    /// 4 devices, 100 seeds, the checker on.
    pub fn new() -> Self {
        let builder = GpuPool::builder().check(Check::Races);
        Explorer { devices: 4, first: 0, seeds: 100, builder, is_configured: false, choices: None, shrink: true }
    }

    /// Runs `f` for each seed, on a new pool each time.
    ///
    /// # Errors
    /// The first [`Failure`], shrunk.
    #[track_caller]
    pub fn run(&self, f: impl Fn(&GpuPool) -> Result<()>) -> Result<Explored, Box<Failure>> {
        let f = &f;
        if let Some(choices) = &self.choices {
            let run = self.once(ExecutionOrder::Replay(choices.clone()), f);
            return self.judge(None, run, 1, f);
        }
        let seeds = match seed() {
            Err(error) => {
                let run = Run { failed: Some(Cause::Error(error)), trace: Trace::default() };
                return self.clone().without_shrinking().judge(None, run, 0, f);
            }
            Ok(Some(seed)) => seed..=seed,
            Ok(None) if self.seeds == 0 => return Ok(Explored { runs: 0, steps: 0 }),
            Ok(None) => self.first..=self.first.saturating_add(self.seeds - 1),
        };
        let mut explored = Explored { runs: 0, steps: 0 };
        for seed in seeds {
            let run = self.once(ExecutionOrder::Seeded(seed), f);
            explored.runs += 1;
            explored.steps += self.judge(Some(seed), run, explored.runs, f)?.steps;
        }
        Ok(explored)
    }

    #[track_caller]
    fn judge(
        &self,
        seed: Option<u64>,
        run: Run,
        runs: u64,
        f: &dyn Fn(&GpuPool) -> Result<()>,
    ) -> Result<Explored, Box<Failure>> {
        let steps = run.trace.steps().len() as u64;
        let Some(cause) = run.failed else { return Ok(Explored { runs, steps }) };
        let found = run.trace.switches();
        let first = Failing { cause, trace: run.trace };
        let (failing, tries, replays) = match self.shrink {
            true => Shrink::new(self, f).shrink(first),
            false => (first, 0, true),
        };
        let Failing { cause, trace } = failing;
        let Explorer { devices, is_configured, .. } = *self;
        Err(Box::new(Failure { seed, cause, trace, found, tries, replays, devices, is_configured }))
    }

    #[track_caller]
    fn once(&self, schedule: ExecutionOrder, f: &dyn Fn(&GpuPool) -> Result<()>) -> Run {
        // A fault plan is equal for each run: it counts from zero, and is paused if it was paused.
        let plan = Lab::plan(&self.builder).map(|plan| {
            let is_paused = plan.start_over();
            (plan, is_paused)
        });
        let run = self.on_a_pool(schedule, f);
        match plan {
            Some((plan, true)) => plan.pause(),
            Some((plan, false)) => plan.resume(),
            None => {}
        }
        run
    }

    #[track_caller]
    fn on_a_pool(&self, schedule: ExecutionOrder, f: &dyn Fn(&GpuPool) -> Result<()>) -> Run {
        // All devices by ordinal, or `GPU_POOL_DEVICES` would choose. A limited list: the builder refuses too many.
        let ordinals: Vec<usize> = (0..self.devices).take(1 << 12).collect();
        let builder = self.builder.clone().host(self.devices).devices(&ordinals);
        let pool = match builder.schedule(schedule).build() {
            Ok(pool) => pool,
            Err(error) => return Run { failed: Some(Cause::Error(error)), trace: Trace::default() },
        };
        let failed = match catch_unwind(AssertUnwindSafe(|| f(&pool))) {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Cause::Error(error)),
            Err(payload) => {
                let text = payload_text(&*payload).unwrap_or("a payload that is not text").to_owned();
                discard(payload);
                Some(Cause::Panic(text))
            }
        };
        Run { failed, trace: pool.trace().unwrap_or_default() }
    }
}

setters! { Explorer;
    /// Sets the number of software GPUs.
    pub fn devices(self, devices: usize) { self.devices = devices; }

    /// Sets the number of seeds. With `GPU_POOL_SEED` in the environment only that seed runs.
    pub fn seeds(self, seeds: u64) { self.seeds = seeds; }

    /// Sets the first seed (default 0).
    pub fn first_seed(self, seed: u64) { self.first = seed; }

    /// Changes other settings of the pools. The explorer sets the number of devices and the schedule. A topology is
    /// refused: its times, not the schedule, would determine the order. A fault plan starts over with each run.
    pub fn configure(self, with: impl FnOnce(Builder) -> Builder) {
        self.builder = with(self.builder);
        self.is_configured = true;
    }

    /// These choices instead of seeds, as [`Failure::choices`] has them.
    pub fn replay(self, choices: impl Into<Arc<[u32]>>) { self.choices = Some(choices.into()); }

    /// A failure is reported as it was found.
    pub fn without_shrinking(self) { self.shrink = false; }
}

struct Run {
    failed: Option<Cause>,
    trace: Trace,
}

struct Failing {
    cause: Cause,
    trace: Trace,
}

/// The statistics of an exploration without a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explored {
    /// Number of runs of the program.
    pub runs: u64,
    /// Number of operations in all runs together.
    pub steps: u64,
}

/// The kind of a program's failure.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// The program returned this error.
    Error(Error),
    /// The program panicked with this message.
    Panic(String),
}

display_as!(Cause, |self, f| match self {
    Cause::Error(error) => write!(f, "{error}"),
    Cause::Panic(message) => write!(f, "it panicked: {message}"),
});

/// A program's failure, with the simplest failing interleaving that was found. `Display` shows all of it.
#[derive(Clone, Debug)]
pub struct Failure {
    seed: Option<u64>,
    cause: Cause,
    trace: Trace,
    found: usize,
    tries: u32,
    replays: bool,
    devices: usize,
    is_configured: bool,
}

impl Failure {
    /// The seed of the failing run; `None` for a replay.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// The failure of the reported run.
    pub fn cause(&self) -> &Cause {
        &self.cause
    }

    /// The steps of the reported run.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// The choices of the reported run, for [`Explorer::replay`]. Zeros at the end are left out.
    pub fn choices(&self) -> Arc<[u32]> {
        trimmed(&self.trace.choices()).into()
    }

    /// Whether the failing run could be repeated from its choices. If not, the submissions differed between runs, and
    /// the trace is that of the first failing run.
    pub fn replays(&self) -> bool {
        self.replays
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seed {
            Some(seed) => writeln!(f, "seed {seed}: {}", self.cause)?,
            None => writeln!(f, "replay: {}", self.cause)?,
        }
        let (left, steps) = (self.trace.switches(), self.trace.steps().len());
        if !self.replays {
            writeln!(f, "Its choices, replayed, do not fail again: what was submitted differed from run to run.")?;
        } else if self.tries > 0 && self.found > 0 {
            let Failure { found, tries, .. } = self;
            let left = match left {
                0 => "none is needed".to_owned(),
                1 => "1 is left".to_owned(),
                _ => format!("{left} are left"),
            };
            writeln!(f, "Of its {found} switches between streams {left} (after {tries} more runs of {steps} steps).")?;
        }
        if steps == 0 {
            return writeln!(f, "It had taken no step.");
        }
        if left == 0 {
            writeln!(f, "It fails without any switch: each stream goes on as long as it can.")?;
        } else {
            writeln!(f, "The steps around the switches (*):")?;
        }
        let at = self.trace.steps().iter().enumerate().filter(|(_, step)| step.choice != 0).map(|(i, _)| i);
        let mut written = 0;
        for i in at.take(SHOWN) {
            let range = i.saturating_sub(AROUND).max(written)..(i + AROUND + 1).max(written).min(steps);
            if range.start > written {
                writeln!(f, "     ...")?;
            }
            write_steps(&self.trace, range.clone(), f)?;
            written = range.end;
        }
        if left > SHOWN {
            writeln!(f, "     ... and {} more switches", left - SHOWN)?;
        }
        if let Some(seed) = self.seed {
            writeln!(f, "Again: GPU_POOL_SEED={seed} cargo test ...")?;
        }
        let Failure { devices, .. } = self;
        let choices = trimmed(&self.trace.choices()).to_vec();
        if choices.len() <= 400 {
            let configure = if self.is_configured { ".configure(/* as before */)" } else { "" };
            writeln!(f, "Exactly this run: Explorer::new().devices({devices}){configure}.replay({choices:?}).run(f)")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

fn trimmed(choices: &[u32]) -> &[u32] {
    let end = choices.iter().rposition(|&choice| choice != 0).map_or(0, |last| last + 1);
    &choices[..end]
}
