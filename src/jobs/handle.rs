//! The handle of a job: its answer, by a wait or by a future.

use super::{Answer, Answers, Rank, core::Core};
use crate::error::{Error, Result};
use crate::scope::{TICK, check_pid};
use crate::{
    contain::Contained, memory::InGang, stall::StallTimer, sync::EventCount, thread::worker::on_device_thread,
};
use std::task::{Context, Poll, Wake, Waker};
use std::{future::Future, panic::Location, pin::Pin, sync::Arc, time::Duration};

/// The handle of a job, from [`Jobs::submit`](super::Jobs::submit): a future of the job's result, or a value to wait
/// with. Any thread may have it, and no runtime is needed: any executor polls it. In a closure on a device, which must
/// not wait, a poll before the job is over returns [`Error::NestedScope`].
///
/// If it is dropped, the job runs nevertheless, and its result is dropped.
///
/// ```
/// let pool = gpu_pool::GpuPool::builder().host(2).build()?;
/// let jobs = pool.jobs().build()?;
/// let sum = jobs.submit(|dev| dev.download(&dev.sum(&dev.upload(&[1.0f32, 2.0])?)?))?;
/// assert_eq!(sum.wait()?, [3.0]); // in an async function: `sum.await?`
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[must_use = "a dropped handle lets its job run, and drops the result"]
pub struct JobHandle<T> {
    core: Arc<Core>,
    rank: Rank,
    job: Arc<dyn Answers<T>>,
    place: Option<usize>,
}

struct Parker(EventCount);

impl Wake for Parker {
    fn wake(self: Arc<Self>) {
        self.0.notify();
    }
}

thread_local! {
    static PARKER: Arc<Parker> = Arc::new(Parker(EventCount::new()));
}

impl<T: Send> JobHandle<T> {
    pub(super) fn new(core: &Arc<Core>, rank: Rank, job: Arc<dyn Answers<T>>) -> Self {
        JobHandle { core: core.clone(), rank, job, place: None }
    }

    fn take(&mut self, waker: &Waker) -> Poll<Result<T>> {
        self.job.answer().poll(waker).map(|answer| {
            let Some(Answer { how, place, known }) = answer else { return Err(Error::Closed) };
            self.place = place.map(|place| place as usize);
            self.core.shared.handles[0].take_over(known.as_deref());
            how.map(Contained::into_inner).map_err(|error| *error)
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
        let parker = PARKER.try_with(Arc::clone).unwrap_or_else(|_| Arc::new(Parker(EventCount::new())));
        let waker = Waker::from(parker.clone());
        if let Poll::Ready(answer) = self.take(&waker) {
            return Some(answer);
        }
        if on_device_thread() {
            return Some(Err(Error::NestedScope { op, site: Location::caller() }));
        }
        let end = limit.and_then(|limit| std::time::Instant::now().checked_add(limit));
        let mut stall = StallTimer::new(self.core.shared.deadline.saturating_add(TICK));
        // The first look at the devices comes after a wait: it would disturb them.
        let mut seen = None;
        loop {
            let left = end.map(|end| end.saturating_duration_since(std::time::Instant::now()));
            let tick = stall.tick(TICK).min(left.unwrap_or(TICK));
            let over = parker.0.wait_until(Some(tick), || self.job.answer().is_set().then_some(()));
            if (over.is_some() || self.job.answer().is_set())
                && let Poll::Ready(answer) = self.take(&waker)
            {
                return Some(answer);
            }
            if left.is_some_and(|left| left <= tick) {
                return None;
            }
            if let Err(forked) = check_pid(&self.core.shared) {
                return Some(Err(forked));
            }
            let now = Some(self.core.progress());
            if now != seen {
                seen = now;
                stall.renew();
            } else if stall.is_over() && !self.core.has_begun(self.rank) {
                self.core.cancel(self.rank, self.core.shared.timeout_of_all(op, stall.waited()), false);
            }
        }
    }

    /// Whether the job is over, so that [`wait`](Self::wait) does not wait.
    pub fn is_finished(&self) -> bool {
        self.job.answer().is_set()
    }

    /// Cancels the job. If it has not begun, it never will. Otherwise [`Device::cancelled`](crate::Device::cancelled)
    /// is true in its closure, its next operation returns [`Error::Aborted`], and a collective in which it waits ends.
    /// Either way the answer is [`Error::Cancelled`], unless the closure has ended. Returns whether it had not begun.
    #[track_caller]
    pub fn cancel(&self) -> bool {
        self.core.cancel(self.rank, Error::Cancelled { op: "cancel", site: Location::caller() }, true)
    }

    /// The device on which the job runs or has run, of a gang the first one. `None` if it has not begun, and after its
    /// end until the handle has the answer.
    pub fn place(&self) -> Option<usize> {
        self.place.or_else(|| self.core.place(self.rank))
    }
}

impl<T> JobHandle<T> {
    /// Cancels the job of a dropped map, if it has not begun.
    pub(super) fn give_up(self, site: crate::error::Site) {
        self.core.cancel(self.rank, Error::Cancelled { op: "map", site }, false);
    }
}

impl<T> Drop for JobHandle<T> {
    fn drop(&mut self) {
        // The result is dropped here, or on the device's thread if it comes later.
        drop(self.job.answer().give_up());
    }
}

impl<T: Send> Future for JobHandle<T> {
    type Output = Result<T>;

    #[track_caller]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        match self.take(cx.waker()) {
            // As in `wait`. Wakers run after the closure, and may poll.
            Poll::Pending if InGang::is_here() => {
                Err(Error::NestedScope { op: "poll", site: Location::caller() }).into()
            }
            polled => polled,
        }
    }
}

debug_as!(JobHandle<T> [T], |self| job = self.rank.seq, finished = self.job.answer().is_set());
