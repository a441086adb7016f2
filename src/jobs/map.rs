//! Results in the order of inputs.

use super::{Answers, Job, JobHandle, Jobs, Need, Refused, Single, Ticket};
use crate::{
    Device,
    error::{Result, Site},
    sync::{Returned, unique_id},
};
use std::task::{Context, Poll, Waker};
use std::{collections::VecDeque, fmt, future::poll_fn, iter::Fuse, panic::Location, pin::Pin, sync::Arc};

/// The results of [`Jobs::map`].
#[must_use = "jobs are submitted when results are asked for"]
pub struct JobMap<I: Iterator, F, T> {
    jobs: Jobs,
    items: Fuse<I>,
    f: Arc<F>,
    site: Site,
    ahead: VecDeque<Result<JobHandle<T>>>,
    waiting: Option<(Need, Job, Arc<dyn Answers<T>>)>,
    ticket: Ticket,
}

/// The results of [`Jobs::stream`].
#[must_use = "jobs are submitted when results are asked for"]
pub struct JobStream<I: Iterator, F, T>(pub(super) JobMap<I, F, T>);

impl<I, F, T> JobMap<I, F, T>
where
    I: Iterator<Item: Send + 'static>,
    F: Fn(&Device, I::Item) -> Result<T> + Send + Sync + 'static,
    T: Returned + 'static,
{
    #[track_caller]
    pub(super) fn new(jobs: &Jobs, items: I, f: F) -> Self {
        let (jobs, items, f, site) = (jobs.clone(), items.fuse(), Arc::new(f), Location::caller());
        let ticket = Ticket(jobs.core.clone(), unique_id(), None);
        JobMap { jobs, items, f, site, ahead: VecDeque::new(), waiting: None, ticket }
    }

    /// Submits jobs that are to be ahead. If no job is and the queue has no room, it waits, or leaves `waker` there.
    fn fill(&mut self, waker: Option<&Waker>) {
        let core = self.jobs.core.clone();
        while self.ahead.len() < 2 * core.slots() {
            let (need, job, answers) = match self.waiting.take() {
                Some(waiting) => waiting,
                None => {
                    let Some(item) = self.items.next() else { return };
                    let f = self.f.clone();
                    let work = Single::once(move |dev: &Device| f(dev, item));
                    let (need, packet) = self.jobs.job().into_packet(work, self.site);
                    (need, Job::new(packet.clone()), packet as Arc<dyn Answers<T>>)
                }
            };
            match core.submit("map", need.clone(), job) {
                Ok(rank) => self.ahead.push_back(Ok(JobHandle::new(&core, rank, answers))),
                Err(Refused::Error(error)) => self.ahead.push_back(Err(error)),
                Err(Refused::Full(job)) => {
                    self.waiting = Some((need, job, answers));
                    if !self.ahead.is_empty() {
                        return;
                    }
                    match waker {
                        Some(waker) if self.ticket.is_over(waker) => {}
                        Some(_) => return,
                        None => {
                            if let Err(error) = core.wait_while("map", None, || !core.has_room()) {
                                self.waiting = None;
                                self.ahead.push_back(Err(error));
                                return;
                            }
                        }
                    }
                }
            }
        }
    }
}

impl<I, F, T> Iterator for JobMap<I, F, T>
where
    I: Iterator<Item: Send + 'static>,
    F: Fn(&Device, I::Item) -> Result<T> + Send + Sync + 'static,
    T: Returned + 'static,
{
    type Item = Result<T>;

    #[track_caller]
    fn next(&mut self) -> Option<Result<T>> {
        self.fill(None);
        self.ahead.pop_front().map(|handle| handle.and_then(JobHandle::wait))
    }
}

impl<I: Iterator, F, T> Drop for JobMap<I, F, T> {
    fn drop(&mut self) {
        for handle in self.ahead.drain(..).flatten() {
            handle.give_up(self.site);
        }
    }
}

debug_as!(JobMap<I, F, T> [I: Iterator, F, T], |self| ahead = self.ahead.len(), ..);

impl<I, F, T> JobStream<I, F, T>
where
    I: Iterator<Item: Send + 'static>,
    F: Fn(&Device, I::Item) -> Result<T> + Send + Sync + 'static,
    T: Returned + 'static,
{
    /// The next result, in the order of the items. `None` after the last one.
    pub async fn next(&mut self) -> Option<Result<T>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// [`next`](Self::next) for an implementation of `futures::Stream`.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<T>>> {
        let JobStream(map) = self;
        map.fill(Some(cx.waker()));
        let Some(first) = map.ahead.front_mut() else {
            return if map.waiting.is_some() { Poll::Pending } else { Poll::Ready(None) };
        };
        let answer = match first {
            Ok(handle) => match Pin::new(handle).poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(answer) => answer,
            },
            Err(error) => Err(error.clone()),
        };
        map.ahead.pop_front();
        Poll::Ready(Some(answer))
    }
}

impl<I: Iterator, F, T> fmt::Debug for JobStream<I, F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("JobStream").field(&self.0).finish()
    }
}
