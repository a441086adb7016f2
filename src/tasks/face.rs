//! The interface of the closure of [`GpuPool::tasks`](crate::GpuPool::tasks).

use super::{
    Failure, TaskTrace,
    engine::{Engine, Job, StreamKind, Task, Wake},
    graph::{Access, VarId},
    value::{Slot, TaskArgs, TaskCells, Uses, Value},
};
use crate::error::{Result, op_site::OpSite};
use crate::{Device, DeviceBuffer, DeviceCopy, PinnedBuffer, memory::Locality, scope::Watch};
#[cfg(doc)]
use crate::{Error, GpuPool};
use std::{cell::Cell, panic::Location, sync::Arc};

/// Where tasks are given out: the argument of the closure of [`GpuPool::tasks`].
///
/// It stays on the caller's thread. A task gets values as arguments, and cannot give out tasks:
///
/// ```compile_fail,E0277
/// let pool = gpu_pool::GpuPool::builder().host(1).build()?;
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

debug_as!(Tasks<'_, '_>, |self| ..);

impl<'t, 'env> Tasks<'t, 'env> {
    pub(super) fn new(engine: &'t Engine<'env>, watch: &'t Watch<'t>, tell: &'t dyn Fn(Wake)) -> Self {
        let next = engine.lock().graph.var();
        Tasks { engine, watch, tell, next: Cell::new(next), trace: Cell::new(None) }
    }

    /// The number of devices.
    pub fn device_count(&self) -> usize {
        self.engine.device_count()
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
        let _here = OpSite::here("get");
        self.read(value, T::clone)
    }

    /// [`get`](Self::get) for contents that cannot be cloned: lets `f` look at the content, on the calling thread.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    ///
    /// # Panics
    /// If `f` does.
    #[track_caller]
    pub fn read<T: Send + Sync + 'static, R>(&self, value: &Value<T>, f: impl FnOnce(&T) -> R) -> Result<R> {
        let here = OpSite::outermost("read", Location::caller());
        let content = || f(value.slot.content.read().as_ref().expect("the value was made"));
        self.look(value, Access::Read, here, content)
    }

    /// Moves the content out, after all tasks that use it. Later uses of the value fail with
    /// [`Error::InvalidArgument`], which names the place of this call.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    #[track_caller]
    pub fn take<T: Send + Sync + 'static>(&self, value: &mut Value<T>) -> Result<T> {
        let here = OpSite::outermost("take", Location::caller());
        let content = || value.slot.content.write().take().expect("the value was made");
        let content = self.look(value, Access::Write, here, content)?;
        self.engine.taken(value.slot.var, here.site);
        Ok(content)
    }

    fn look<T, R>(&self, value: &Value<T>, access: Access, here: OpSite, f: impl FnOnce() -> R) -> Result<R> {
        fail_if!(!Arc::ptr_eq(&value.slot.home, &self.engine.home), foreign(here).report());
        let place = self.engine.caller_place();
        let task = self.task(None, place, StreamKind::Compute, here, None);
        self.add(task, &[(value.slot.var, access)]);
        self.engine.look(self.watch, self.tell, f)
    }

    /// Waits until all tasks that were given out are over, and the devices have completed the work of these tasks in
    /// their streams. (Not the work in a [stream of a task's own](Device::stream).) A program that gives out tasks
    /// faster than they run can limit their number by it.
    ///
    /// # Errors
    /// The first failure that the caller has not got yet; else that of the devices' work.
    #[track_caller]
    pub fn wait(&self) -> Result<()> {
        let _here = OpSite::here("wait");
        let ends = self.engine.wait(self.watch, self.tell, |state| state.is_idle().then(|| state.ends()));
        let waited = self.engine.wait_for(&ends, false);
        let failure = self.engine.lock().unreported().cloned();
        failure.map_or(waited, |failure| Err(failure.report()))
    }

    /// Notes all later tasks in `trace`, with their times. Only the first call has an effect.
    pub fn trace(&self, trace: &'env TaskTrace) {
        if self.trace.get().is_some() {
            return;
        }
        trace.begin(self.device_count());
        self.engine.lock().trace = Some(trace);
        self.trace.set(Some(trace));
    }

    fn task(
        &self,
        job: Option<Job<'env>>,
        place: usize,
        stream: StreamKind,
        here: OpSite,
        name: Option<&str>,
    ) -> Task<'env> {
        let known = self.engine.handle().hand_over();
        let trace = self.trace.get().filter(|_| job.is_some());
        let traced = trace.map(|trace| trace.add(place, stream, here.site, name));
        let label = name.filter(|_| self.engine.handle().lane.is_on()).map(Into::into);
        Task { job, place, stream, here, label, failure: None, known, traced }
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

    fn submit<A: TaskArgs, R: Send + Sync + 'static>(
        &self,
        given: Given<'_>,
        args: A,
        f: impl for<'a> FnOnce(Option<&Device>, <A::Cells as TaskCells>::Refs<'a>) -> Result<R> + Send + 'env,
    ) -> Value<R> {
        let Given { device, stream, name, here } = given;
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
            Some(device) if device < self.device_count() => (device, None),
            Some(device) => {
                let why = format_args!("device {device} of {}", self.device_count());
                (0, Some(Failure::invalid(here, why)))
            }
        };
        let mut task = self.task(Some(job), place, stream, here, name);
        task.failure = wrong.or_else(|| uses.is_foreign.then(|| foreign(here)));
        uses.list.push((slot.var, Access::Write));
        self.add(task, &uses.list);
        Value { slot }
    }
}

fn foreign(here: OpSite) -> Failure {
    Failure::invalid(here, "a value of another call of `tasks`")
}

struct Given<'n> {
    /// `None`: the CPU.
    device: Option<usize>,
    stream: StreamKind,
    name: Option<&'n str>,
    here: OpSite,
}

/// A device that takes tasks, from [`Tasks::gpu`].
#[derive(Clone, Copy, Debug)]
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
    fn given(&self, op: &'static str, stream: StreamKind) -> Given<'t> {
        let here = OpSite { op, site: Location::caller() };
        Given { device: Some(self.device), stream, name: self.name, here }
    }

    /// Gives the device a task, which runs on its thread. Returns immediately, with the value that it will make.
    ///
    /// A value cannot be read and written by one task:
    ///
    /// ```compile_fail,E0502
    /// # let pool = gpu_pool::GpuPool::builder().host(1).build()?;
    /// pool.tasks(|t| {
    ///     let mut x = t.gpu(0).run((), |dev, ()| dev.zeros::<f32>(2));
    ///     t.gpu(0).run((&x, &mut x), |dev, (x, y)| dev.axpy(1.0, x, y));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    #[track_caller]
    pub fn run<A: TaskArgs, R: Send + Sync + 'static>(
        &self,
        args: A,
        f: impl for<'a> FnOnce(&Device, <A::Cells as TaskCells>::Refs<'a>) -> Result<R> + Send + 'env,
    ) -> Value<R> {
        self.on(self.given("run", StreamKind::Compute), args, |dev, refs| OpSite::outside(|| f(dev, refs)))
    }

    fn on<A: TaskArgs, R: Send + Sync + 'static>(
        &self,
        given: Given<'t>,
        args: A,
        f: impl for<'a> FnOnce(&Device, <A::Cells as TaskCells>::Refs<'a>) -> Result<R> + Send + 'env,
    ) -> Value<R> {
        self.tasks.submit(given, args, move |dev, refs| f(dev.expect("a device's thread has its token"), refs))
    }

    /// A copy of a buffer in this device's memory, on a stream of its own. The buffer may be any device's.
    #[track_caller]
    pub fn copy<T: DeviceCopy>(&self, x: &Value<DeviceBuffer<T>>) -> Value<DeviceBuffer<T>> {
        self.on(self.given("copy", StreamKind::Peer), (x,), |dev, (x,)| x.copy_to(dev))
    }

    /// A copy of host memory in this device's memory, on a stream of its own.
    #[track_caller]
    pub fn upload<H: HostData>(&self, x: &Value<H>) -> Value<DeviceBuffer<H::Elem>> {
        self.on(self.given("upload", StreamKind::Upload), (x,), |dev, (x,)| x.upload(dev))
    }

    /// A copy of this device's memory in page-locked host memory, on a stream of its own. Tasks of the CPU that use it
    /// wait until it has arrived; the device's thread does not.
    #[track_caller]
    pub fn download<T: DeviceCopy>(&self, x: &Value<DeviceBuffer<T>>) -> Value<PinnedBuffer<T>> {
        self.on(self.given("download", StreamKind::Download), (x,), |dev, (x,)| {
            let mut host = dev.worker.shared.pinned.reused("pinned", x.len(), Locality::Device(dev.index()))?;
            dev.download_pinned(x, &mut host)?;
            Ok(host)
        })
    }
}

/// The CPU, which takes tasks, from [`Tasks::cpu`].
#[derive(Clone, Copy, Debug)]
pub struct CpuTasks<'t, 'env> {
    tasks: &'t Tasks<'t, 'env>,
    name: Option<&'t str>,
}

impl<'t, 'env> CpuTasks<'t, 'env> {
    /// A name for the next tasks in a [`TaskTrace`], as [`GpuTasks::named`].
    pub fn named(self, name: &'t str) -> Self {
        CpuTasks { name: Some(name), ..self }
    }

    /// Gives the CPU a task, which runs on a thread of the pool of threads. Returns immediately, with the value that
    /// the task will make. The task begins when the devices' work for its arguments is complete.
    #[track_caller]
    pub fn run<A: TaskArgs, R: Send + Sync + 'static>(
        &self,
        args: A,
        f: impl for<'a> FnOnce(<A::Cells as TaskCells>::Refs<'a>) -> Result<R> + Send + 'env,
    ) -> Value<R> {
        let here = OpSite { op: "run", site: Location::caller() };
        let given = Given { device: None, stream: StreamKind::Compute, name: self.name, here };
        self.tasks.submit(given, args, move |_, refs| OpSite::outside(|| f(refs)))
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

#[cfg(test)]
#[path = "../../tests/unit/tasks/face_tests.rs"]
mod tests;
