//! The handle of a job: its answer, by a wait or by a future.

use super::core::{Core, Ended, Work};
use crate::{
    Device,
    contain::Contained,
    error::{Error, Result},
    memory::handle::Handover,
    scope::TICK,
    stall::StallTimer,
    sync::{EventCount, Getter, Setter, one_shot},
    thread::worker::on_device_thread,
};
use parking_lot::Mutex;
use std::{
    fmt,
    future::Future,
    panic::Location,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

/// What a job gives its handle.
pub(super) struct Answer<T> {
    how: Result<T>,
    place: Option<usize>,
    known: Option<Box<Handover>>,
}

/// A closure that runs once, or again after a failure.
pub(super) struct Single<F, T> {
    f: Mutex<Option<F>>,
    result: Mutex<Option<Contained<T>>>,
    setter: Mutex<Option<Setter<Answer<T>>>>,
    /// Runs the closure; `false` if it cannot run again.
    call: fn(&mut Option<F>, &Device) -> Result<T>,
}

impl<F, T: Send> Single<F, T> {
    pub fn new(f: F, call: fn(&mut Option<F>, &Device) -> Result<T>) -> (Self, Getter<Answer<T>>) {
        let (setter, getter) = one_shot();
        let single =
            Single { f: Mutex::new(Some(f)), result: Mutex::new(None), setter: Mutex::new(Some(setter)), call };
        (single, getter)
    }

    /// Takes the closure back, of a job that was not taken.
    pub fn take_closure(&self) -> Option<F> {
        self.f.lock().take()
    }
}

impl<F: Send, T: Send> Work for Single<F, T> {
    fn run(&self, dev: &Device) -> Result<()> {
        // The lock is the device thread's alone: no other thread runs the job.
        let value = (self.call)(&mut self.f.lock(), dev)?;
        *self.result.lock() = Some(Contained::new(value));
        Ok(())
    }

    fn end(&self, ended: Ended) {
        let Ended { how, place, known } = ended;
        let closure = self.f.lock().take().map(Contained::new);
        drop(closure);
        let value = self.result.lock().take();
        let how = how.and_then(|()| value.map(Contained::into_inner).ok_or(Error::Closed));
        if let Some(setter) = self.setter.lock().take() {
            setter.set(Answer { how, place, known });
        }
    }
}

/// A closure that runs on each device of a gang.
pub(super) struct Each<F, T> {
    f: F,
    results: Mutex<Vec<(usize, Contained<T>)>>,
    setter: Mutex<Option<Setter<Answer<Vec<T>>>>>,
}

impl<F, T: Send> Each<F, T> {
    pub fn new(f: F) -> (Self, Getter<Answer<Vec<T>>>) {
        let (setter, getter) = one_shot();
        (Each { f, results: Mutex::default(), setter: Mutex::new(Some(setter)) }, getter)
    }
}

impl<F, T> Work for Each<F, T>
where
    F: Fn(&Device, &crate::Group<'_>) -> Result<T> + Send + Sync,
    T: Send,
{
    fn run(&self, dev: &Device) -> Result<()> {
        let value = Contained::new((self.f)(dev, &dev.everyone())?);
        self.results.lock().push((dev.rank(), value));
        Ok(())
    }

    fn end(&self, ended: Ended) {
        let Ended { how, place, known } = ended;
        let mut values = std::mem::take(&mut *self.results.lock());
        values.sort_by_key(|(rank, _)| *rank);
        let how = how.map(|()| values.into_iter().map(|(_, value)| value.into_inner()).collect());
        if let Some(setter) = self.setter.lock().take() {
            setter.set(Answer { how, place, known });
        }
    }
}

/// The handle of a job, from [`Jobs::submit`](super::Jobs::submit): a future of the job's result, or a value to wait
/// with. Any thread may have it, and no runtime is needed: any executor polls it.
///
/// If it is dropped, the job runs nevertheless, and its result is dropped.
///
/// ```
/// # use gpu_pool::GpuPool;
/// let pool = GpuPool::builder().host(2).build()?;
/// let jobs = pool.jobs().build()?;
/// let sum = jobs.submit(|dev| dev.download(&dev.sum(&dev.upload(&[1.0f32, 2.0])?)?))?;
/// assert_eq!(sum.wait()?, [3.0]); // in an async function: `sum.await?`
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[must_use = "a dropped handle lets its job run, and drops the result"]
pub struct JobHandle<T> {
    core: Arc<Core>,
    seq: u64,
    getter: Getter<Answer<T>>,
    place: Option<usize>,
}

/// Wakes a thread that waits.
struct Parker(EventCount);

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.notify();
    }
}

thread_local! {
    static PARKER: Arc<Parker> = Arc::new(Parker(EventCount::new()));
}

impl<T: Send> JobHandle<T> {
    pub(super) fn new(core: &Arc<Core>, seq: u64, getter: Getter<Answer<T>>) -> Self {
        JobHandle { core: core.clone(), seq, getter, place: None }
    }

    fn take(&mut self, waker: &Waker) -> Poll<Result<T>> {
        self.getter.poll(waker).map(|answer| {
            let Some(Answer { how, place, known }) = answer else { return Err(Error::Closed) };
            self.place = place;
            self.core.shared.handles[0].take_over(known.as_deref());
            how
        })
    }

    /// Waits for the job's result: until its closure has ended, and the work that it has submitted.
    ///
    /// # Errors
    /// The error of the closure; [`Error::Panicked`] if it panicked; [`Error::Cancelled`]; [`Error::DeviceLost`] if the
    /// job had begun on a device that is lost, or no device is left; [`Error::Closed`] if the pool was closed before it
    /// began; [`Error::Timeout`] if its [deadline](super::JobSpec::deadline) has passed, or if no device of the pool
    /// makes progress for the pool's deadline and the job has not begun (then it never will).
    /// [`Error::NestedScope`] on a device thread, if the job is not over: the thread would wait for itself.
    #[track_caller]
    pub fn wait(mut self) -> Result<T> {
        self.wait_at(None, "JobHandle::wait").unwrap_or(Err(Error::Closed))
    }

    /// [`wait`](Self::wait) for at most `limit`. `None` if the job is not over by then. After an answer, there is no
    /// other.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    #[track_caller]
    pub fn wait_timeout(&mut self, limit: Duration) -> Option<Result<T>> {
        self.wait_at(Some(limit), "JobHandle::wait_timeout")
    }

    #[track_caller]
    fn wait_at(&mut self, limit: Option<Duration>, op: &'static str) -> Option<Result<T>> {
        let parker = PARKER.with(Arc::clone);
        let waker = Waker::from(parker.clone());
        if let Poll::Ready(answer) = self.take(&waker) {
            return Some(answer);
        }
        if on_device_thread() {
            return Some(Err(Error::NestedScope { op, site: Location::caller() }));
        }
        let end = limit.and_then(|limit| std::time::Instant::now().checked_add(limit));
        let mut stall = StallTimer::new(self.core.shared.deadline.saturating_add(TICK));
        let mut seen = self.core.progress();
        loop {
            let left = end.map(|end| end.saturating_duration_since(std::time::Instant::now()));
            let tick = stall.tick(TICK).min(left.unwrap_or(TICK));
            let over = parker.0.wait_until(Some(tick), || self.getter.is_set().then_some(()));
            if over.is_some() || self.getter.is_set() {
                // Ready: it is set.
                if let Poll::Ready(answer) = self.take(&waker) {
                    return Some(answer);
                }
            }
            if left.is_some_and(|left| left <= tick) {
                return None;
            }
            let now = self.core.progress();
            if now != seen {
                seen = now;
                stall.renew();
            } else if stall.is_over() && !self.core.has_begun(self.seq) {
                let missing: Vec<usize> = (0..self.core.shared.devices()).collect();
                let (device, waited) = (missing[0], stall.waited());
                let last_calls = self.core.shared.last_calls(&missing);
                let error = Error::Timeout { device, op, waited, missing, last_calls };
                self.core.cancel(self.seq, error);
            }
        }
    }

    /// Whether the job is over, so that [`wait`](Self::wait) does not wait.
    pub fn is_finished(&self) -> bool {
        self.getter.is_set()
    }

    /// Cancels the job. If it has not begun, it never will. Otherwise [`Device::cancelled`] is true in its closure, its
    /// next operation returns [`Error::Aborted`], and a collective in which it waits ends. In both cases the answer is
    /// [`Error::Cancelled`], unless the closure has already ended. Returns whether the job had not begun.
    #[track_caller]
    pub fn cancel(&self) -> bool {
        self.core.cancel(self.seq, Error::Cancelled { op: "cancel", site: Location::caller() })
    }

    /// The device on which the job runs or has run, of a gang the first one. `None` if it has not begun, and after its
    /// end until the handle has the answer.
    pub fn place(&self) -> Option<usize> {
        self.place.or_else(|| self.core.place(self.seq))
    }
}

impl<T> JobHandle<T> {
    /// Cancels the job of a dropped map, if it has not begun.
    pub(super) fn give_up(self, site: crate::error::Site) {
        if !self.core.has_begun(self.seq) {
            self.core.cancel(self.seq, Error::Cancelled { op: "map", site });
        }
    }
}

impl<T: Send> Future for JobHandle<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        self.take(cx.waker())
    }
}

impl<T> fmt::Debug for JobHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobHandle").field("job", &self.seq).field("finished", &self.getter.is_set()).finish()
    }
}
