//! Tasks: one thread says what is to be done, on the CPU and on several devices; what does not depend on each other
//! runs at once.
//!
//! Users call [`GpuPool::tasks`]. Dependencies follow from the values that tasks read (`&x`) and write (`&mut x`), as
//! with MXNet's engine and StarPU; D2L calls it automatic parallelism. This module may use every room below `parallel`.
//!
//! * [`graph`]: which tasks may run; plain data.
//! * [`engine`]: the queues of the places, and what follows when a task has run.
//! * [`place`]: device threads, runners of the CPU and the caller.
//! * [`value`]: values and arguments. [`trace`]: the graph and its times, as DOT and SVG.
//!
//! A call is one scope of all devices, in which each device thread takes its tasks one by one. So the rules of scopes
//! hold: gang order, aborts, deadlines, drains. The caller works beside the scope, on its own thread.

mod engine;
mod graph;
mod place;
mod svg;
mod trace;
mod value;

use crate::{
    Device, DeviceBuffer, DeviceCopy, GpuPool, PinnedBuffer,
    contain::{Contained, contain},
    driver::host::{self, Attendee},
    error::{Error, Result, Site},
    panics,
    scope::{Watch, as_it_is, run_beside},
    sync::Flag,
};
use engine::{Engine, Lane, Task, Wake};
use graph::{Access, VarId};
use std::{
    cell::Cell,
    fmt, mem,
    panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind},
    sync::Arc,
};
use value::{Slot, Uses};

pub use trace::TaskTrace;
pub use value::{TaskArg, TaskArgs, TaskCell, TaskCells, Value};

/// A failure of a task, which all tasks get that depend on it.
#[derive(Clone)]
struct Failure(Arc<Told>);

struct Told {
    error: Error,
    /// It is in the list of failures.
    noted: Flag,
    /// The caller has got it.
    reported: Flag,
}

impl Failure {
    fn new(error: Error) -> Self {
        Failure(Arc::new(Told { error, noted: Flag::new(), reported: Flag::new() }))
    }

    fn invalid(site: Site, why: impl fmt::Display) -> Self {
        Failure::new(Error::invalid_at(site, "tasks", why))
    }

    fn error(&self) -> &Error {
        &self.0.error
    }

    /// The error, for the caller.
    fn report(self) -> Error {
        self.0.reported.raise();
        self.0.error.clone()
    }

    /// Adds it to the list of failures. The caller holds the engine's lock.
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
    /// `f` runs on the calling thread, beside the tasks. A task is a closure with arguments: it reads what it gets by
    /// `&value` and writes what it gets by `&mut value`. A task starts when the tasks are over that it depends on, as
    /// if all tasks ran one after the other; tasks that do not depend on each other run at once. Tasks of the CPU run
    /// on rayon's global pool of threads.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let batch: Vec<f32> = (0..100).map(|i| i as f32).collect();
    /// let total = pool.tasks(|t| {
    ///     // Both devices work at once, since neither needs the other's result.
    ///     let [a, b] = [0, 1].map(|i| {
    ///         let half = &batch[50 * i..][..50];
    ///         t.gpu(i).run((), move |dev, ()| dev.download(&dev.sum(&dev.upload(half)?)?))
    ///     });
    ///     let sum = t.cpu().run((&a, &b), |(a, b)| Ok(a[0] + b[0]));
    ///     t.get(&sum)
    /// })?;
    /// assert_eq!(total, 4950.0);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Devices
    /// A task of a device begins when the *host's* part of the tasks before it is over; its work on the device waits for
    /// their work on the device. So a task should only submit work; one that waits keeps its device's thread. The tasks
    /// of a device work on its main stream; copies by [`copy`](GpuTasks::copy), [`upload`](GpuTasks::upload) and
    /// [`download`](GpuTasks::download) have streams of their own, so they overlap with other tasks. A task of the CPU,
    /// and [`get`](Tasks::get), begin when the work of the tasks before them is complete.
    ///
    /// Ready tasks of a device run in the order in which they became ready. Collectives of several tasks must run in one
    /// order on all devices: give each device a value of its own that these tasks write, such as the buffer itself.
    ///
    /// The call is a scope of all devices: other scopes of the pool wait until it is over.
    ///
    /// # Failures
    /// A task that returns an error or panics makes no value. Tasks that need the value do not run, and fail with the
    /// same error; so do tasks that need what the task has written. Others run on. `get` returns the error. An error that
    /// `get` has not returned is returned by this call: none is lost. What fails a whole scope (a collective that does
    /// not match, a deadline) ends this call, and so does a failed task for whose collective another device waits. If `f`
    /// returns an error or panics, tasks that have not started do not run.
    ///
    /// # Errors
    /// That of `f`; else the first failure of a task that `f` has not got; else as [`run`](Self::run).
    ///
    /// # Panics
    /// If `f` panics: after the tasks that run have ended.
    #[track_caller]
    pub fn tasks<'env, R>(&self, f: impl FnOnce(&Tasks<'_, 'env>) -> Result<R>) -> Result<R> {
        let threads = rayon::current_num_threads();
        let engine = Engine::new(&self.shared, threads);
        rayon::in_place_scope(|scope| run(self, &engine, scope, f))
    }

    /// [`tasks`](Self::tasks), with the tasks of the CPU on the caller's own pool of threads.
    ///
    /// ```
    /// # use gpu_pool::{Error, GpuPool};
    /// let pool = GpuPool::builder().host(1).build()?;
    /// let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().map_err(Error::custom)?;
    /// let found = pool.tasks_in(&threads, |t| {
    ///     let index = t.cpu().run((), |()| Ok(rayon::current_thread_index()));
    ///     t.get(&index)
    /// })?;
    /// assert!(found.is_some_and(|index| index < 2));
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`tasks`](Self::tasks).
    #[track_caller]
    pub fn tasks_in<'env, R>(
        &self,
        threads: &rayon::ThreadPool,
        f: impl FnOnce(&Tasks<'_, 'env>) -> Result<R>,
    ) -> Result<R> {
        let engine = Engine::new(&self.shared, threads.current_num_threads());
        threads.in_place_scope(|scope| run(self, &engine, scope, f))
    }
}

#[track_caller]
fn run<'scope, 'env, R>(
    pool: &GpuPool,
    engine: &'scope Engine<'env>,
    scope: &rayon::Scope<'scope>,
    f: impl FnOnce(&Tasks<'_, 'env>) -> Result<R>,
) -> Result<R> {
    panics::note_places();
    let tell = |wake: Wake| engine.tell(wake, scope);
    let mut returned = None;
    let beside = |watch: &Watch<'_>| {
        let _ = engine.gang.set(watch.gang.clone());
        let caller = place::caller(engine);
        let driver = &*pool.shared.handles[0].driver;
        host::attend(driver, &(caller.clone() as Arc<dyn Attendee>));
        host::attend(driver, &(engine.cpu.clone() as Arc<dyn Attendee>));
        let registered = caller.register();
        let tasks = Tasks::new(engine, watch, &tell);
        let result = catch_unwind(AssertUnwindSafe(|| f(&tasks)));
        match &result {
            Ok(Ok(_)) => engine.close(),
            Ok(Err(error)) => engine.end(Failure::new(error.clone())),
            Err(_) => engine.end(Failure::new(Error::custom("the closure that gives out the tasks panicked"))),
        }
        engine.wait(watch, |state| state.is_idle().then_some(()));
        drop(registered);
        returned = Some(result);
    };
    let ran = run_beside(&pool.shared, None, |dev, _| engine.serve(dev, scope), as_it_is, beside);
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

/// Where tasks are given out: the argument of the closure of [`GpuPool::tasks`].
///
/// It stays on the caller's thread. A task gets values as arguments, and cannot give out tasks:
///
/// ```compile_fail,E0277
/// # use gpu_pool::GpuPool;
/// let pool = GpuPool::builder().host(1).build()?;
/// pool.tasks(|t| {
///     let x = t.cpu().run((), |()| Ok(1));
///     t.cpu().run((), |()| t.get(&x)); // `Tasks` cannot be shared between threads
///     Ok(())
/// })?;
/// # Ok::<(), gpu_pool::Error>(())
/// ```
pub struct Tasks<'t, 'env> {
    engine: &'t Engine<'env>,
    watch: &'t Watch<'t>,
    tell: &'t dyn Fn(Wake),
    /// The variable of the next value: made under the lock of the task before.
    next: Cell<VarId>,
    trace: Cell<Option<&'env TaskTrace>>,
}

impl<'t, 'env> Tasks<'t, 'env> {
    fn new(engine: &'t Engine<'env>, watch: &'t Watch<'t>, tell: &'t dyn Fn(Wake)) -> Self {
        let next = engine.lock().graph.var();
        Tasks { engine, watch, tell, next: Cell::new(next), trace: Cell::new(None) }
    }

    /// The number of devices.
    pub fn devices(&self) -> usize {
        self.engine.devices()
    }

    /// A device, by its ordinal in the pool. If there is no such device, tasks that it is given fail with
    /// [`Error::InvalidArgument`].
    pub fn gpu(&self, device: usize) -> GpuTasks<'_, 'env> {
        GpuTasks { tasks: self, device, name: None }
    }

    /// The CPU.
    pub fn cpu(&self) -> CpuTasks<'_, 'env> {
        CpuTasks { tasks: self, name: None }
    }

    /// Waits until the tasks before have made `value`, and their work on devices is complete. Returns a clone of it.
    ///
    /// Tasks that only read the value run on meanwhile.
    ///
    /// # Errors
    /// The failure of the task that should have made or changed the value, or of one that it depends on;
    /// [`Error::InvalidArgument`] for a value that was [taken](Self::take), or is of another call of
    /// [`GpuPool::tasks`].
    #[track_caller]
    pub fn get<T: Clone + Send + Sync + 'static>(&self, value: &Value<T>) -> Result<T> {
        self.read(value, T::clone)
    }

    /// [`get`](Self::get) for what cannot be cloned: lets `f` look at the content, on the calling thread.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(1).build()?;
    /// let host = pool.tasks(|t| {
    ///     let x = t.gpu(0).run((), |dev, ()| dev.upload(&[1.0f32, 2.0]));
    ///     let host = t.gpu(0).download(&x);
    ///     t.read(&host, |host| host.as_slice().map(<[f32]>::to_vec))?
    /// })?;
    /// assert_eq!(host, [1.0, 2.0]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`get`](Self::get).
    ///
    /// # Panics
    /// If `f` does.
    #[track_caller]
    pub fn read<T: Send + Sync + 'static, R>(&self, value: &Value<T>, f: impl FnOnce(&T) -> R) -> Result<R> {
        let site = Location::caller();
        let content = || f(value.slot.content.read().as_ref().expect("the value was made"));
        self.look(value, Access::Read, site, content)
    }

    /// Moves the content out, after all tasks that use it. Later uses of the value fail with [`Error::InvalidArgument`],
    /// which names the place of this call.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    #[track_caller]
    pub fn take<T: Send + Sync + 'static>(&self, value: &mut Value<T>) -> Result<T> {
        let site = Location::caller();
        let content = || value.slot.content.write().take().expect("the value was made");
        let content = self.look(value, Access::Write, site, content)?;
        self.engine.taken(value.slot.var, site);
        Ok(content)
    }

    fn look<T, R>(&self, value: &Value<T>, access: Access, site: Site, f: impl FnOnce() -> R) -> Result<R> {
        if !Arc::ptr_eq(&value.slot.home, &self.engine.home) {
            return Err(foreign(site).report());
        }
        let place = self.engine.caller_place();
        let task = self.task(None, place, Lane::Compute, site, None);
        self.add(task, &[(value.slot.var, access)]);
        self.engine.look(self.watch, self.tell, f)
    }

    /// Waits until all tasks that were given out are over. A program that gives out tasks faster than they run can limit
    /// their number by it.
    ///
    /// # Errors
    /// The first failure that the caller has not got yet.
    pub fn wait(&self) -> Result<()> {
        self.engine.wait(self.watch, |state| state.is_idle().then_some(()));
        let state = self.engine.lock();
        let failure = state.failures.iter().find(|failure| !failure.0.reported.is_raised());
        failure.map_or(Ok(()), |failure| Err(failure.clone().report()))
    }

    /// Notes all later tasks in `trace`, with their times. Only the first call has an effect.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// # use gpu_pool::parallel::TaskTrace;
    /// let pool = GpuPool::builder().host(1).build()?;
    /// let trace = TaskTrace::new();
    /// pool.tasks(|t| {
    ///     t.trace(&trace);
    ///     let x = t.gpu(0).named("input").run((), |dev, ()| dev.zeros::<f32>(8));
    ///     t.gpu(0).named("sum").run((&x,), |dev, (x,)| dev.download(&dev.sum(x)?));
    ///     Ok(())
    /// })?;
    /// assert!(trace.to_dot().contains(r#"t0 -> t1"#)); // `dot -Tsvg` draws it
    /// assert!(trace.to_svg().starts_with("<svg "));    // times from left to right
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn trace(&self, trace: &'env TaskTrace) {
        if self.trace.get().is_some() {
            return;
        }
        trace.begin(self.devices());
        self.engine.lock().trace = Some(trace);
        self.trace.set(Some(trace));
    }

    fn task(
        &self,
        job: Option<engine::Job<'env>>,
        place: usize,
        lane: Lane,
        site: Site,
        name: Option<&str>,
    ) -> Task<'env> {
        let known = self.engine.handle().hand_over();
        let trace = self.trace.get().filter(|_| job.is_some());
        let traced = trace.map(|trace| trace.add(place, lane, site, name));
        Task { job, place, lane, site, failure: None, known, traced }
    }

    /// Adds a task. The variable of the value after the next one is made with it, under one lock.
    fn add(&self, task: Task<'env>, uses: &[(VarId, Access)]) {
        let mut wake = Wake::default();
        let mut state = self.engine.lock();
        self.engine.add(&mut state, task, uses, &mut wake);
        if uses.iter().any(|&(var, _)| var == self.next.get()) {
            self.engine.sweep(&mut state);
            self.next.set(state.graph.var());
        }
        drop(state);
        (self.tell)(wake);
    }

    fn submit<A, F, R>(&self, given: Given<'_>, args: A, f: F) -> Value<R>
    where
        A: TaskArgs,
        R: Send + Sync + 'static,
        F: for<'a> FnOnce(Option<&Device>, <A::Cells as TaskCells>::Refs<'a>) -> Result<R> + Send + 'env,
    {
        let Given { device, lane, name, site } = given;
        let mut uses = Uses { home: self.engine.home.clone(), list: Default::default(), is_foreign: false };
        let cells = args.cells(&mut uses);
        let slot = Slot::new(self.next.get(), &self.engine.home);
        let out = slot.clone();
        let job = Box::new(move |dev: Option<&Device>| {
            let made = cells.call(|refs| f(dev, refs))?;
            *out.content.write() = Some(made);
            Ok(())
        });
        let (place, wrong) = match device {
            None => (self.engine.cpu_place(), None),
            Some(device) if device < self.devices() => (device, None),
            Some(device) => {
                let why = format_args!("device {device} of {}", self.devices());
                (0, Some(Failure::invalid(site, why)))
            }
        };
        let mut task = self.task(Some(job), place, lane, site, name);
        task.failure = wrong.or_else(|| uses.is_foreign.then(|| foreign(site)));
        uses.list.push((slot.var, Access::Write));
        self.add(task, &uses.list);
        Value { slot }
    }
}

fn foreign(site: Site) -> Failure {
    Failure::invalid(site, "a value of another call of `tasks`")
}

/// Where a task is to run, and what is told of it.
struct Given<'n> {
    /// `None`: the CPU.
    device: Option<usize>,
    lane: Lane,
    name: Option<&'n str>,
    site: Site,
}

/// A device that takes tasks, from [`Tasks::gpu`].
#[derive(Clone, Copy)]
pub struct GpuTasks<'t, 'env> {
    tasks: &'t Tasks<'t, 'env>,
    device: usize,
    name: Option<&'t str>,
}

impl<'t, 'env> GpuTasks<'t, 'env> {
    /// A name for the next tasks in a [`TaskTrace`]. Without one they are named after their places in the program.
    pub fn named(self, name: &'t str) -> Self {
        GpuTasks { name: Some(name), ..self }
    }

    #[track_caller]
    fn given(&self, lane: Lane) -> Given<'t> {
        Given { device: Some(self.device), lane, name: self.name, site: Location::caller() }
    }

    /// Gives the device a task, which runs on the device's thread. Returns at once, with the value that the task will
    /// make.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(1).build()?;
    /// let y = pool.tasks(|t| {
    ///     let x = t.gpu(0).run((), |dev, ()| dev.upload(&[1.0f32, 2.0]));
    ///     let mut y = t.gpu(0).run((), |dev, ()| dev.zeros::<f32>(2));
    ///     t.gpu(0).run((&x, &mut y), |dev, (x, y)| dev.axpy(10.0, x, y)); // after both
    ///     let y = t.gpu(0).run((y,), |dev, (y,)| dev.download(&y)); // takes `y`, which is freed then
    ///     t.get(&y)
    /// })?;
    /// assert_eq!(y, [10.0, 20.0]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// A value cannot be read and written by one task:
    ///
    /// ```compile_fail,E0502
    /// # use gpu_pool::GpuPool;
    /// # let pool = GpuPool::builder().host(1).build()?;
    /// pool.tasks(|t| {
    ///     let mut x = t.gpu(0).run((), |dev, ()| dev.zeros::<f32>(2));
    ///     t.gpu(0).run((&x, &mut x), |dev, (x, y)| dev.axpy(1.0, x, y));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    #[track_caller]
    pub fn run<A, F, R>(&self, args: A, f: F) -> Value<R>
    where
        A: TaskArgs,
        R: Send + Sync + 'static,
        F: for<'a> FnOnce(&Device, <A::Cells as TaskCells>::Refs<'a>) -> Result<R> + Send + 'env,
    {
        self.on(self.given(Lane::Compute), args, f)
    }

    fn on<A, F, R>(&self, given: Given<'t>, args: A, f: F) -> Value<R>
    where
        A: TaskArgs,
        R: Send + Sync + 'static,
        F: for<'a> FnOnce(&Device, <A::Cells as TaskCells>::Refs<'a>) -> Result<R> + Send + 'env,
    {
        self.tasks.submit(given, args, move |dev, refs| f(dev.expect("a device's thread has its token"), refs))
    }

    /// A copy of a buffer in this device's memory, on a stream of its own. The buffer may be any device's.
    #[track_caller]
    pub fn copy<T: DeviceCopy>(&self, x: &Value<DeviceBuffer<T>>) -> Value<DeviceBuffer<T>> {
        self.on(self.given(Lane::Peer), (x,), |dev, (x,)| x.copy_to(dev))
    }

    /// A copy of host memory in this device's memory, on a stream of its own.
    #[track_caller]
    pub fn upload<H: HostData>(&self, x: &Value<H>) -> Value<DeviceBuffer<H::Elem>> {
        self.on(self.given(Lane::Upload), (x,), |dev, (x,)| x.upload(dev))
    }

    /// A copy of this device's memory in page-locked host memory, on a stream of its own. Tasks of the CPU that use it
    /// wait until it has arrived; the device's thread does not.
    #[track_caller]
    pub fn download<T: DeviceCopy>(&self, x: &Value<DeviceBuffer<T>>) -> Value<PinnedBuffer<T>> {
        self.on(self.given(Lane::Download), (x,), |dev, (x,)| {
            let mut host = dev.pinned(x.len())?;
            dev.download_pinned(x, &mut host)?;
            Ok(host)
        })
    }
}

/// The CPU, which takes tasks, from [`Tasks::cpu`].
#[derive(Clone, Copy)]
pub struct CpuTasks<'t, 'env> {
    tasks: &'t Tasks<'t, 'env>,
    name: Option<&'t str>,
}

impl<'t, 'env> CpuTasks<'t, 'env> {
    /// A name for the next tasks in a [`TaskTrace`], as [`GpuTasks::named`].
    pub fn named(self, name: &'t str) -> Self {
        CpuTasks { name: Some(name), ..self }
    }

    /// Gives the CPU a task, which runs on a thread of the pool of threads. Returns at once, with the value that the task
    /// will make. The task begins when the devices' work for its arguments is complete.
    #[track_caller]
    pub fn run<A, F, R>(&self, args: A, f: F) -> Value<R>
    where
        A: TaskArgs,
        R: Send + Sync + 'static,
        F: for<'a> FnOnce(<A::Cells as TaskCells>::Refs<'a>) -> Result<R> + Send + 'env,
    {
        let given = Given { device: None, lane: Lane::Compute, name: self.name, site: Location::caller() };
        self.tasks.submit(given, args, move |_, refs| f(refs))
    }
}

/// Host memory that [`GpuTasks::upload`] takes: `Vec<T>` and [`PinnedBuffer<T>`](PinnedBuffer). A `Vec` is copied to
/// page-locked memory first, by the device's thread.
pub trait HostData: Send + Sync + 'static {
    /// The elements.
    type Elem: DeviceCopy;
    #[doc(hidden)]
    fn upload(&self, dev: &Device) -> Result<DeviceBuffer<Self::Elem>>;
}

impl<T: DeviceCopy> HostData for Vec<T> {
    type Elem = T;
    fn upload(&self, dev: &Device) -> Result<DeviceBuffer<T>> {
        dev.upload(self)
    }
}

impl<T: DeviceCopy> HostData for PinnedBuffer<T> {
    type Elem = T;
    fn upload(&self, dev: &Device) -> Result<DeviceBuffer<T>> {
        dev.upload_pinned(self)
    }
}
