//! A job with its options, and its way into the queue.

use super::job::{Each, Extras, GivesBack};
use super::{Job, Jobs, Need, Packet, Rank, Refused, Single, Ticket, core::Core, handle::JobHandle};
use crate::{
    Device, Group,
    error::{Error, Result, Site},
    sync::{Returned, unique_id},
};
use parking_lot::Mutex;
use std::future::{Future, poll_fn};
use std::time::{Duration, Instant};
use std::{fmt, marker::PhantomData, panic::Location, sync::Arc, task::Poll};

/// A job whose closure runs once.
#[derive(Debug)]
pub struct Once(());
/// A job whose closure may run again, after [`JobSpec::retry`].
#[derive(Debug)]
pub struct Again(());
/// A job on several devices, after [`JobSpec::gpus`].
#[derive(Debug)]
pub struct Several(());

/// Why [`Jobs::try_submit`] has not taken a job.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TrySubmitError<F> {
    /// The queue is full. Here is the closure.
    #[error("the queue of jobs is full")]
    Full(F),
    /// The job is refused.
    #[error("{0}")]
    Refused(Error),
}

impl<F> fmt::Debug for TrySubmitError<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TrySubmitError::Full(_) => f.write_str("Full(..)"),
            TrySubmitError::Refused(error) => f.debug_tuple("Refused").field(error).finish(),
        }
    }
}

/// A job with options, from [`Jobs::job`]. The options come in any order; `submit` submits it.
///
/// ```
/// # use std::time::Duration;
/// let pool = gpu_pool::GpuPool::builder().host(2).build()?;
/// let jobs = pool.jobs().build()?;
/// let job = jobs.job().name("fold 7").memory(1 << 20).prefer(1).priority(3).deadline(Duration::from_secs(60));
/// let folded = job.submit(|dev| dev.download(&dev.zeros::<f32>(4)?))?;
/// assert_eq!(folded.wait()?, [0.0; 4]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[must_use = "`submit` submits the job"]
pub struct JobSpec<'j, K = Once> {
    core: &'j Arc<Core>,
    need: Need,
    name: Option<Box<str>>,
    retries: u32,
    limit: Option<Duration>,
    kind: PhantomData<K>,
}

debug_as!(JobSpec<'_, K> [K], |self| name = self.name, need = self.need, ..);

impl<'j> JobSpec<'j> {
    pub(super) fn new(jobs: &'j Jobs) -> Self {
        JobSpec { core: &jobs.core, need: Need::default(), name: None, retries: 0, limit: None, kind: PhantomData }
    }

    /// Begins again after an error, a panic or its device's loss, at most so many times. The closure is an `FnMut`.
    pub fn retry(mut self, times: u32) -> JobSpec<'j, Again> {
        self.retries = times;
        self.into_kind()
    }
}

impl<'j, K> JobSpec<'j, K> {
    /// Runs on so many devices in parallel, as one gang: the closure runs on each of them, with the group of all, and
    /// the handle has the results by rank. It begins when so many are idle. The guide's page "Jobs" has an example.
    pub fn gpus(mut self, gpus: usize) -> JobSpec<'j, Several> {
        self.need.gpus = gpus;
        self.into_kind()
    }

    fn into_kind<L>(self) -> JobSpec<'j, L> {
        let JobSpec { core, need, name, retries, limit, .. } = self;
        JobSpec { core, need, name, retries, limit, kind: PhantomData }
    }

    pub(super) fn into_packet<W>(self, work: W, site: Site) -> (Need, Arc<Packet<W>>) {
        let JobSpec { core, need, name, retries, limit, .. } = self;
        let deadline = limit.and_then(|limit| Some((Instant::now().checked_add(limit)?, limit)));
        let known = core.shared.handles[0].hand_over();
        let few = name.is_some() || retries > 0 || deadline.is_some() || known.is_some();
        let extras = few.then(|| Box::new(Extras { name, retries: Mutex::new(retries), deadline, known }));
        (need, Arc::new(Packet { site, extras, work }))
    }
}

setters! { JobSpec<'_, K> [K];
    /// A name for spans, and for the reports of jobs that run out of memory.
    pub fn name(self, name: impl Into<String>) { self.name = Some(name.into().into_boxed_str()); }

    /// Books so many bytes on each of its devices before it begins, until it is over. Beside other jobs it begins only
    /// if they fit the rest of the device's memory or of the pool's [limit](crate::Builder::memory_limit), less the
    /// memory of buffers when the device had no job; without a number, if there is a rest. Alone it begins always.
    pub fn memory(self, bytes: u64) { self.need.bytes = bytes; }

    /// Runs on this device only (its ordinal in the pool).
    pub fn on(self, device: usize) { self.need.among = Some([device].into()); }

    /// Runs on one of these devices only; a gang on as many of them as it has members.
    pub fn among(self, devices: &[usize]) { self.need.among = Some(devices.into()); }

    /// Runs on this device if it is as idle as the others.
    pub fn prefer(self, device: usize) { self.need.prefer = Some(device); }

    /// Jobs of higher priorities begin first (default 0). A job is overtaken at most 64 times more often than by its
    /// place in the queue.
    pub fn priority(self, priority: i32) { self.need.priority = priority; }

    /// The job must be over so long after its submission; otherwise it is cancelled, with [`Error::Timeout`]. A
    /// submission that still waits for room then fails with it; one by `submit_async` when it is polled next.
    pub fn deadline(self, limit: Duration) { self.limit = Some(limit); }
}

impl Core {
    #[track_caller]
    pub(super) fn send(self: &Arc<Self>, op: &'static str, need: Need, mut job: Job) -> Result<Rank> {
        loop {
            job = match self.submit(op, need.clone(), job) {
                Ok(rank) => return Ok(rank),
                Err(Refused::Error(error)) => return Err(error),
                Err(Refused::Full(job)) => job,
            };
            self.wait_while(op, job.packet().until(), || !self.has_room())?;
        }
    }
}

/// Submission of a job with a closure of type `F`, whose handle has an `Out`.
macro_rules! submission {
    ($kind:ty, $out:ty, $work:expr, $($closure:tt)+) => {
        impl<'j> JobSpec<'j, $kind> {
            /// Submits the job. Waits while the queue is full, except on a device's thread. The handle of a job on
            /// several devices has the results of all, by rank.
            ///
            /// # Errors
            /// As [`Jobs::submit`]; [`Error::InvalidArgument`] if no device can ever run it: it needs more memory than
            /// the limit of each, or devices that are not there.
            #[track_caller]
            pub fn submit<F, T>(self, f: F) -> Result<JobHandle<$out>>
            where
                F: $($closure)+,
                T: Returned + 'static,
            {
                let core = self.core;
                let (need, packet) = self.into_packet($work(f), Location::caller());
                let rank = core.send("submit", need, Job::new(packet.clone()))?;
                Ok(JobHandle::new(core, rank, packet))
            }

            /// [`submit`](Self::submit) that never waits: a full queue gives the closure back.
            ///
            /// # Errors
            /// [`TrySubmitError::Full`]; [`TrySubmitError::Refused`] with an error of [`submit`](Self::submit).
            #[track_caller]
            pub fn try_submit<F, T>(self, f: F) -> Result<JobHandle<$out>, TrySubmitError<F>>
            where
                F: $($closure)+,
                T: Returned + 'static,
            {
                let core = self.core;
                let (need, packet) = self.into_packet($work(f), Location::caller());
                match core.submit("try_submit", need, Job::new(packet.clone())) {
                    Ok(rank) => Ok(JobHandle::new(core, rank, packet)),
                    Err(Refused::Error(error)) => Err(TrySubmitError::Refused(error)),
                    // While the refused job lives, its closure does.
                    Err(Refused::Full(_job)) => {
                        let f = packet.work.give_back();
                        Err(f.map_or(TrySubmitError::Refused(Error::Closed), TrySubmitError::Full))
                    }
                }
            }

            /// [`submit`](Self::submit) for async code: while the queue is full, the future is pending.
            ///
            /// # Errors
            /// As [`submit`](Self::submit). Only the job's [deadline](Self::deadline) limits the wait.
            #[track_caller]
            pub fn submit_async<F, T>(self, f: F) -> impl Future<Output = Result<JobHandle<$out>>> + Send + use<F, T>
            where
                F: $($closure)+,
                T: Returned + 'static,
            {
                let core = self.core.clone();
                let (need, packet) = self.into_packet($work(f), Location::caller());
                let mut job = Job::new(packet.clone());
                async move {
                    loop {
                        job = match core.submit("submit_async", need.clone(), job) {
                            Ok(rank) => return Ok(JobHandle::new(&core, rank, packet)),
                            Err(Refused::Error(error)) => return Err(error),
                            Err(Refused::Full(job)) => job,
                        };
                        let ticket = Ticket(core.clone(), unique_id(), job.packet().until());
                        poll_fn(|cx| if ticket.is_over(cx.waker()) { Poll::Ready(()) } else { Poll::Pending }).await;
                    }
                }
            }
        }
    };
}

submission!(Once, T, Single::once, FnOnce(&Device) -> Result<T> + Send + 'static);
submission!(Again, T, Single::again, FnMut(&Device) -> Result<T> + Send + 'static);
submission!(Several, Vec<T>, Each::new, Fn(&Device, &Group<'_>) -> Result<T> + Send + Sync + 'static);

setters! { JobSpec<'_, Several>;
    /// Begins again after an error, a panic or the loss of a device: at most so many times.
    pub fn retry(self, times: u32) { self.retries = times; }
}
