//! Tasks: one thread gives out work for the CPU and several devices. Independent tasks run in parallel.
//!
//! Dependencies follow from the values that tasks read (`&x`) and write (`&mut x`), as with MXNet's engine and StarPU.
//! `graph` knows which tasks may run; `engine` has the queues of the places, and `place` the threads. A call is one
//! scope of all devices, in which each device thread takes its tasks one by one. So the rules of scopes hold. The
//! caller works beside the scope.

mod cpu_work;
mod engine;
mod face;
mod graph;
mod place;
mod trace;
mod value;

use crate::contain::{Contained, contain};
use crate::driver::host::{self, Attendee};
use crate::error::{Error, Result, op_site::OpSite};
use crate::scope::{self, Begin, Watch, as_it_is, holding};
use crate::{GpuPool, gang::Quiescence, panics, sync::Flag};
use engine::{Engine, Wake};
use std::{
    fmt, mem,
    panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind},
    sync::Arc,
};

pub use face::{CpuTasks, GpuTasks, HostData, Tasks};
pub use trace::TaskTrace;
pub use value::{TaskArg, TaskArgs, TaskCell, TaskCells, Value};

/// A failure of a task, which all tasks get that depend on it.
#[derive(Clone)]
struct Failure(Arc<Report>);

struct Report {
    error: Error,
    noted: Flag,
    reported: Flag,
}

impl Failure {
    fn new(error: Error) -> Self {
        Failure(Arc::new(Report { error, noted: Flag::new(), reported: Flag::new() }))
    }

    fn invalid(here: OpSite, why: impl fmt::Display) -> Self {
        Failure::new(Error::invalid_at(here.site, here.op, why))
    }

    fn error(&self) -> &Error {
        &self.0.error
    }

    fn report(self) -> Error {
        self.0.reported.raise();
        self.0.error.clone()
    }

    fn note(&self, failures: &mut Vec<Failure>) {
        if !self.0.noted.is_raised() {
            self.0.noted.raise();
            failures.push(self.clone());
        }
    }
}

/// A task of the CPU has panicked: in [`Error::Custom`]. (A task of a device that panics is [`Error::Panicked`].)
#[derive(Clone, Debug, thiserror::Error)]
#[error("a task of the CPU panicked at {place}: {message}")]
#[non_exhaustive]
pub struct TaskPanicked {
    /// The panic's message.
    pub message: String,
    /// File, line and column of the panic.
    pub place: String,
}

impl TaskPanicked {
    fn of(error: Error) -> Error {
        match error {
            Error::Panicked { message, place, .. } => Error::custom(TaskPanicked { message, place }),
            other => other,
        }
    }
}

impl GpuPool {
    /// Runs `f`, which gives out tasks to the devices and to the CPU while they run. Returns when all are over.
    ///
    /// `f` runs on the calling thread, beside the tasks. A task is a closure with arguments: it reads `&value` and
    /// writes `&mut value`. A task starts when the tasks that it depends on are over, as if all tasks ran one after the
    /// other. Independent tasks run in parallel.
    ///
    /// Tasks of the CPU run on rayon's global pool of threads. While the caller waits it runs some of them itself: if
    /// it is a thread of rayon, or if that pool has started none for a while, since other work has all of its threads.
    ///
    /// The page "Tasks" of the guide has an example.
    ///
    /// # Devices
    /// A task of a device begins when the *host's* part of the tasks before it is over; its work on the device waits
    /// for their work on the device. So a task should only submit work; one that waits keeps its device's thread. The
    /// tasks of a device work on its main stream; copies by [`copy`](GpuTasks::copy), [`upload`](GpuTasks::upload) and
    /// [`download`](GpuTasks::download) have streams of their own, so they overlap with other tasks. A task of the CPU,
    /// and [`get`](Tasks::get), begin when the work of the tasks before them is complete.
    ///
    /// Ready tasks of a device run in the order in which they became ready. Collectives of several tasks must run in
    /// one order on all devices: give each device a value of its own that these tasks write, such as the buffer itself.
    ///
    /// The call is a scope of all devices: other scopes of the pool wait until it is over. `f` and tasks cannot start
    /// one, nor a scope of another pool on these GPUs: that is [`Error::InvalidArgument`].
    ///
    /// # Threads of rayon
    /// A thread of rayon may make this call, as in `jobs.par_iter().map(|job| pool.tasks(..))`. But a task of the CPU
    /// that waits for a parallel iterator of its own lets rayon run any other job of its pool on this thread. If that
    /// job uses these devices, it fails with [`Error::InvalidArgument`]. Let such tasks use another pool of threads:
    /// [`tasks_in`](Self::tasks_in).
    ///
    /// The call returns when the pool of threads has had a free thread after the last task of the CPU.
    ///
    /// # Failures
    /// A task that returns an error or panics makes no value. Tasks that need the value do not run, and fail with the
    /// same error; so do tasks that need memory which it has written. Others run on. `get` returns the error. An error
    /// that `get` has not returned is returned by this call: none is lost. A failure of a whole scope (a collective
    /// that does not match, a deadline) ends this call, and so does a failed task for whose collective another device
    /// waits. If `f` returns an error or panics, tasks that have not started do not run.
    ///
    /// # Errors
    /// That of `f`; else the first failure of a task that `f` has not got; else as [`run`](Self::run).
    /// [`Error::NoThread`] if rayon could not start its pool of threads.
    ///
    /// # Panics
    /// If `f` panics: after the tasks that run have ended.
    #[track_caller]
    pub fn tasks<'env, R>(&self, f: impl FnOnce(&Tasks<'_, 'env>) -> Result<R>) -> Result<R> {
        let site = Location::caller();
        let (threads, begin) = (threads(site)?, Begin::at("tasks", site));
        let engine = Engine::new(&self.shared, threads);
        rayon::in_place_scope(|scope| run(self, &engine, scope, f, begin))
    }

    /// [`tasks`](Self::tasks), with the tasks of the CPU on the caller's own pool of threads, such as rayon's.
    ///
    /// # Errors
    /// As [`tasks`](Self::tasks).
    #[track_caller]
    pub fn tasks_in<'env, R>(
        &self,
        threads: &rayon::ThreadPool,
        f: impl FnOnce(&Tasks<'_, 'env>) -> Result<R>,
    ) -> Result<R> {
        let begin = Begin::at("tasks_in", Location::caller());
        let engine = Engine::new(&self.shared, threads.current_num_threads());
        threads.in_place_scope(|scope| run(self, &engine, scope, f, begin))
    }
}

/// The number of threads of rayon that the caller uses. The first call starts rayon's global pool, which panics, then
/// and ever after, if the system gives it no threads.
fn threads(site: crate::error::Site) -> Result<usize> {
    panics::note_places();
    let _quiet = panics::silence_panics();
    panics::catch(0, rayon::current_num_threads).map_err(|error| {
        let why = match error {
            Error::Panicked { message, .. } => message,
            other => other.to_string(),
        };
        Error::NoThread { op: "tasks", device: None, why: format!("rayon: {why}"), site }
    })
}

fn run<'scope, 'env, R>(
    pool: &GpuPool,
    engine: &'scope Engine<'env>,
    scope: &rayon::Scope<'scope>,
    f: impl FnOnce(&Tasks<'_, 'env>) -> Result<R>,
    begin: Begin<'_>,
) -> Result<R> {
    panics::note_places();
    let tell = |wake: Wake| engine.tell(wake, scope);
    let mut returned = None;
    let meanwhile = |watch: &Watch<'_>| {
        let _ = engine.gang.set(watch.gang.clone());
        let caller = Quiescence::new(engine.caller.clone(), engine.shared.gpu_order[0].clone());
        let driver = &*pool.shared.handles[0].driver;
        host::attend(driver, &(caller.clone() as Arc<dyn Attendee>));
        host::attend(driver, &(engine.cpu.clone() as Arc<dyn Attendee>));
        let registered = caller.register();
        let tasks = Tasks::new(engine, watch, &tell);
        let result = catch_unwind(AssertUnwindSafe(|| holding(&pool.shared, || f(&tasks))));
        match &result {
            Ok(Ok(_)) => engine.close(),
            Ok(Err(error)) => engine.end(Failure::new(error.clone())),
            Err(_) => engine.end(Failure::new(Error::custom("the closure that gives out the tasks panicked"))),
        }
        engine.wait(watch, &tell, |state| state.is_idle().then_some(()));
        drop(registered);
        returned = Some(result);
    };
    let ran = scope::run(&pool.shared, None, |dev, _| engine.serve(dev, scope), as_it_is, meanwhile, begin);
    let (left, trace) = {
        let mut state = engine.lock();
        (state.graph.drain(), state.trace)
    };
    if let Some(trace) = trace {
        trace.resolve();
    }
    for task in left {
        contain(|| drop(task));
    }
    let failures = mem::take(&mut engine.lock().failures);
    let unreported = || failures.iter().find(|failure| !failure.0.reported.is_raised());
    match returned {
        Some(Err(payload)) => resume_unwind(payload),
        Some(Ok(Err(error))) => Err(error),
        Some(Ok(Ok(value))) => {
            let value = Contained::new(value);
            match unreported() {
                Some(failure) => Err(failure.error().clone()),
                None => ran.map(|_| value.into_inner()),
            }
        }
        None => Err(ran.err().unwrap_or(Error::Closed)),
    }
}

#[cfg(all(test, target_os = "linux", not(loom)))]
#[path = "../tests/unit/tasks_tests.rs"]
mod tests;
