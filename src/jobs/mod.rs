//! Jobs: independent work from any thread, each to whichever device is free.
//!
//! A job is a closure with a device of its own for as long as it runs; results come by handles, which are futures, too.
//! `placement` decides, as plain data, which job begins next, and where; `core` has the state, and `visit` and `gang`
//! its uses by device threads; `keeper` is a thread that keeps deadlines, while there are some.

mod borrowed;
mod core;
mod gang;
mod handle;
mod job;
mod keeper;
mod map;
mod placement;
mod spec;
mod state;
mod stats;
mod visit;

use self::{
    core::{Core, Refused},
    job::{Answer, Answers, Ended, Job, Packet, Placed, Single},
    placement::{Need, Rank, Table},
    state::{Running, Ticket},
    stats::Meter,
};
use crate::error::{Error, Result};
use crate::scope::{TICK, check_pid};
use crate::{Device, GpuPool, PerDevice, stall::StallTimer, sync::Returned, thread::worker::on_device_thread};
use std::{future::Future, ops::Deref, panic::Location, sync::Arc, time::Instant};

pub use borrowed::{JobScope, ScopedJob};
pub use handle::JobHandle;
pub use map::{JobMap, JobStream};
pub use placement::Waits;
pub use spec::{Again, JobSpec, Once, Several, TrySubmitError};
pub use stats::{DeviceJobs, JobStats, Progress};

const MOST_OVERLAP: usize = 3;

type Make<S> = Arc<dyn Fn(&Device) -> Result<S> + Send + Sync>;

/// A queue of independent jobs over the devices of a pool.
///
/// Any thread submits; a job goes to the device that is free first. Clones are of one queue. It keeps no borrow of the
/// pool: when the pool is closed, jobs that have not begun end with [`Error::Closed`].
///
/// The page "Jobs" of the guide has an example.
///
/// # How a job runs
/// Its closure runs on the thread of its device, as a scope of one device: all rules of scopes hold. The next job's
/// closure begins when the thread is free, while the work of up to [`overlap`](JobsBuilder::overlap) earlier jobs still
/// runs on the GPU; each has a stream of its own. A handle is ready when the job's own work is over.
///
/// # Scopes beside
/// [`GpuPool::run`] and its like still work. On each device a scope waits for the job that has begun, and for those in
/// flight; then it comes before all jobs that have not begun. After each scope at least one waiting job begins before
/// the next scope that comes later. A pool that shares a GPU waits for at most 64 jobs.
///
/// # Failures
/// An error or a panic ends its own job only. A lost device fails the jobs that have begun on it; others go elsewhere.
#[derive(Clone)]
pub struct Jobs {
    core: Arc<Core>,
}

debug_as!(Jobs, |self| queued = self.stats().queued, running = self.stats().running, ..);

/// [`Jobs`] whose closures get state of their device, from [`GpuPool::jobs_with`]. It is made once per device, on the
/// device's thread. After a job has failed with it (an `Err`, a panic, or a cancellation after its start) the next job
/// there drops it and makes it anew. So an error that leaves the state alone belongs into the result: `Ok(Err(..))`.
///
/// Its own `submit` and `map` take closures with state; [`with`](Self::with) makes such closures fit all calls that
/// take one that is called once.
///
/// ```
/// let pool = gpu_pool::GpuPool::builder().host(1).build()?;
/// let jobs = pool.jobs_with(|dev| dev.upload(&[10.0f32])).build()?;
/// let first = jobs.submit(|dev, weights| dev.download(&*weights))?;
/// let named = jobs.job().name("twice").submit(jobs.with(|dev, weights| {
///     dev.scale(weights, 2.0)?;
///     dev.download(&*weights)
/// }))?;
/// assert_eq!((first.wait()?, named.wait()?), (vec![10.0], vec![20.0]));
/// # Ok::<(), gpu_pool::Error>(())
/// ```
pub struct JobsWith<S: 'static> {
    jobs: Jobs,
    state: Arc<PerDevice<S>>,
    make: Make<S>,
}

impl<S> Clone for JobsWith<S> {
    fn clone(&self) -> Self {
        JobsWith { jobs: self.jobs.clone(), state: self.state.clone(), make: self.make.clone() }
    }
}

debug_as!(JobsWith<S> [S], |self| jobs = self.jobs, state = self.state);

impl<S> Deref for JobsWith<S> {
    type Target = Jobs;
    fn deref(&self) -> &Jobs {
        &self.jobs
    }
}

/// Builds a queue of jobs, from [`GpuPool::jobs`] and [`GpuPool::jobs_with`].
#[must_use = "`build` makes the queue"]
pub struct JobsBuilder<'p, M = ()> {
    pool: &'p GpuPool,
    make: M,
    queue: usize,
    overlap: usize,
    progress: Option<Box<stats::OnProgress>>,
}

debug_as!(JobsBuilder<'_, M> [M], |self| queue = self.queue, overlap = self.overlap, ..);

impl GpuPool {
    /// A queue of independent jobs over this pool's devices. See [`Jobs`].
    pub fn jobs(&self) -> JobsBuilder<'_> {
        JobsBuilder { pool: self, make: (), queue: 64, overlap: 1, progress: None }
    }

    /// [`jobs`](Self::jobs) with state on each device, which `make` makes there. See [`JobsWith`].
    pub fn jobs_with<S: 'static>(
        &self,
        make: impl Fn(&Device) -> Result<S> + Send + Sync + 'static,
    ) -> JobsBuilder<'_, Make<S>> {
        JobsBuilder { pool: self, make: Arc::new(make), queue: 64, overlap: 1, progress: None }
    }
}

impl<M> JobsBuilder<'_, M> {
    #[track_caller]
    fn make_jobs(self, op: &'static str) -> Result<Jobs> {
        check_pid(&self.pool.shared)?;
        fail_if!(self.pool.shared.gate.is_closed(), Error::Closed);
        invalid_if!(self.queue == 0, op, "a queue without room");
        invalid_if!(self.overlap > MOST_OVERLAP, op, "an overlap of {}; at most {MOST_OVERLAP}", self.overlap);
        crate::panics::note_places();
        Ok(Jobs { core: Core::new(&self.pool.shared, self.queue, self.overlap, self.progress) })
    }
}

setters! { JobsBuilder<'_, M> [M];
    /// Most jobs that wait for a device (default 64, at least 1). Then [`submit`](Jobs::submit) waits.
    pub fn queue(self, jobs: usize) { self.queue = jobs; }

    /// How many earlier jobs of a device may still work on it when the next closure begins (default 1; 0 to 3). With 0
    /// a job begins when the work of the one before is over.
    pub fn overlap(self, jobs: usize) { self.overlap = jobs; }

    /// A callback after each job that is over, on a device's thread: for a progress bar. It must not wait.
    pub fn on_progress(self, progress: impl Fn(Progress) + Send + Sync + 'static) {
        self.progress = Some(Box::new(progress));
    }
}

impl JobsBuilder<'_> {
    /// The queue.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a queue of 0 or an overlap above 3; [`Error::Closed`]; [`Error::Forked`].
    #[track_caller]
    pub fn build(self) -> Result<Jobs> {
        self.make_jobs("build")
    }
}

impl<S: 'static> JobsBuilder<'_, Make<S>> {
    /// The queue, once each device has made its state.
    ///
    /// # Errors
    /// As without state; and as [`GpuPool::run`]: the first failure to make a state.
    #[track_caller]
    pub fn build(self) -> Result<JobsWith<S>> {
        let (pool, make) = (self.pool, self.make.clone());
        let jobs = self.make_jobs("build")?;
        let state = pool.per_device(|dev, _| make(dev))?;
        Ok(JobsWith { jobs, state: Arc::new(state), make })
    }
}

impl Jobs {
    /// Submits a job. Waits while the queue is full, except on device threads: a job's submissions exceed the bound.
    ///
    /// # Errors
    /// [`Error::Closed`] after [`close`](Self::close) or [`abort`](Self::abort), or if the pool is closed;
    /// [`Error::DeviceLost`] if no device is left; [`Error::Timeout`] if the queue is full, and no device makes
    /// progress for the pool's deadline; [`Error::Forked`].
    #[track_caller]
    pub fn submit<T: Returned + 'static>(
        &self,
        f: impl FnOnce(&Device) -> Result<T> + Send + 'static,
    ) -> Result<JobHandle<T>> {
        self.job().submit(f)
    }

    /// [`submit`](Self::submit) that never waits: a full queue gives the closure back.
    ///
    /// # Errors
    /// [`TrySubmitError::Full`]; [`TrySubmitError::Refused`] with an error of [`submit`](Self::submit).
    #[track_caller]
    pub fn try_submit<F, T>(&self, f: F) -> Result<JobHandle<T>, TrySubmitError<F>>
    where
        F: FnOnce(&Device) -> Result<T> + Send + 'static,
        T: Returned + 'static,
    {
        self.job().try_submit(f)
    }

    /// [`submit`](Self::submit) for async code: while the queue is full, the future is pending.
    ///
    /// # Errors
    /// As [`submit`](Self::submit), without a timeout.
    #[track_caller]
    pub fn submit_async<F, T>(&self, f: F) -> impl Future<Output = Result<JobHandle<T>>> + Send + use<F, T>
    where
        F: FnOnce(&Device) -> Result<T> + Send + 'static,
        T: Returned + 'static,
    {
        self.job().submit_async(f)
    }

    /// A job with options. See [`JobSpec`].
    pub fn job(&self) -> JobSpec<'_> {
        JobSpec::new(self)
    }

    /// Runs `f` for each item, and returns the results in the order of the items. Some jobs are ahead of the result
    /// that is asked for, at most twice as many as can be in flight; the iterator is asked for items only then.
    /// Dropped, it cancels jobs that have not begun. `for sum in jobs.map(batches, |dev, batch| ..)`, for example.
    #[track_caller]
    pub fn map<I, F, T>(&self, items: I, f: F) -> JobMap<I::IntoIter, F, T>
    where
        I: IntoIterator<Item: Send + 'static>,
        F: Fn(&Device, I::Item) -> Result<T> + Send + Sync + 'static,
        T: Returned + 'static,
    {
        JobMap::new(self, items.into_iter(), f)
    }

    /// [`map`](Self::map) for async code: [`JobStream::next`] is a future of the next result, and
    /// [`JobStream::poll_next`] has the shape of `futures::Stream`.
    #[track_caller]
    pub fn stream<I, F, T>(&self, items: I, f: F) -> JobStream<I::IntoIter, F, T>
    where
        I: IntoIterator<Item: Send + 'static>,
        F: Fn(&Device, I::Item) -> Result<T> + Send + Sync + 'static,
        T: Returned + 'static,
    {
        JobStream(self.map(items, f))
    }

    /// Counts, and why the first job waits. Any thread may ask.
    pub fn stats(&self) -> JobStats {
        self.core.lock().stats()
    }

    /// Takes no further job, and waits until all jobs are over. Other clones get [`Error::Closed`].
    ///
    /// # Errors
    /// [`Error::NestedScope`] on a device's thread, where it would wait for itself; [`Error::Timeout`] if jobs are
    /// queued and no device makes progress for the pool's deadline: those jobs are cancelled.
    #[track_caller]
    pub fn close(&self) -> Result<()> {
        let (op, site) = ("close", Location::caller());
        fail_if!(on_device_thread(), Error::NestedScope { op, site });
        self.core.close();
        let stalled = self.core.wait_while(op, None, || !self.core.is_idle());
        if let Err(error) = &stalled {
            self.core.abort(error);
        }
        stalled
    }

    /// Cancels all jobs, as [`JobHandle::cancel`] does, and takes no further one. It does not wait.
    #[track_caller]
    pub fn abort(&self) {
        self.core.close();
        self.core.abort(&Error::Cancelled { op: "abort", site: Location::caller() });
    }
}

impl Core {
    /// Waits while `holds`, `until` then at most. An error if no device makes progress for the pool's deadline, and no
    /// closure runs.
    #[track_caller]
    fn wait_while(&self, op: &'static str, until: Option<Instant>, holds: impl Fn() -> bool) -> Result<()> {
        let mut stall = StallTimer::new(self.shared.deadline.saturating_add(TICK));
        let mut seen = self.progress();
        let left = || until.map_or(TICK, |until| until.saturating_duration_since(Instant::now()).min(TICK));
        let over = || (!holds() || left().is_zero()).then_some(());
        while self.changed.wait_until(Some(stall.tick(left())), over).is_none() {
            check_pid(&self.shared)?;
            let now = self.progress();
            if now != seen || self.lock().is_at_work() {
                seen = now;
                stall.renew();
            } else if stall.is_over() {
                return Err(self.shared.timeout_of_all(op, stall.waited()));
            }
        }
        Ok(())
    }
}

impl<S: 'static> JobsWith<S> {
    /// A closure for [`Jobs`] that gets the state of its device.
    pub fn with<F, T>(&self, f: F) -> impl FnOnce(&Device) -> Result<T> + Send + use<F, T, S>
    where
        F: FnOnce(&Device, &mut S) -> Result<T> + Send + 'static,
    {
        let (state, make) = (self.state.clone(), self.make.clone());
        move |dev| {
            if state.drop_if_poisoned(dev)? {
                state.put(dev, make(dev)?);
            }
            f(dev, &mut *state.borrow_mut(dev)?)
        }
    }

    /// [`Jobs::submit`] of a closure that gets the state of its device.
    ///
    /// # Errors
    /// As [`Jobs::submit`].
    #[track_caller]
    pub fn submit<T: Returned + 'static>(
        &self,
        f: impl FnOnce(&Device, &mut S) -> Result<T> + Send + 'static,
    ) -> Result<JobHandle<T>> {
        self.jobs.submit(self.with(f))
    }

    /// [`Jobs::map`] with a closure that gets the state of its device.
    #[allow(clippy::type_complexity, reason = "a type alias cannot have `impl`")]
    #[track_caller]
    pub fn map<I, F, T>(
        &self,
        items: I,
        f: F,
    ) -> JobMap<I::IntoIter, impl Fn(&Device, I::Item) -> Result<T> + Send + Sync + use<I, F, T, S>, T>
    where
        I: IntoIterator<Item: Send + 'static>,
        F: Fn(&Device, &mut S, I::Item) -> Result<T> + Send + Sync + 'static,
        T: Returned + 'static,
    {
        let (this, f) = (self.clone(), Arc::new(f));
        self.jobs.map(items, move |dev, item| {
            let f = f.clone();
            this.with(move |dev, state| f(dev, state, item))(dev)
        })
    }
}
