//! A job: its closure, and what the queue knows of it, in one allocation that the handle shares.

use super::{Need, Rank};
use crate::contain::{Contained, contain};
use crate::error::{Error, Result, Site};
use crate::{Device, memory::Handover, sync::OneShot};
use parking_lot::{Mutex, RwLock};
use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

pub(super) trait Work: Send + Sync {
    fn run(&self, dev: &Device) -> Result<()>;

    fn end(&self, ended: Ended);
}

pub(super) trait Answers<T>: Send + Sync {
    fn answer(&self) -> &OneShot<Answer<T>>;
}

pub(super) struct Ended {
    pub how: Result<()>,
    pub place: Option<usize>,
    pub known: Option<Box<Handover>>,
}

pub(super) struct Answer<T> {
    // A queued job has room for it: a box keeps it small.
    pub how: Result<Contained<T>, Box<Error>>,
    pub place: Option<u32>,
    pub known: Option<Box<Handover>>,
}

impl<T> Answer<T> {
    fn give(to: &OneShot<Self>, ended: Ended, value: Option<Contained<T>>) {
        let Ended { how, place, known } = ended;
        let how = how.and_then(|()| value.ok_or(Error::Closed)).map_err(Box::new);
        // If the handle is gone, the value is dropped here.
        drop(to.set(Answer { how, place: place.map(|place| place as u32), known }));
    }
}

pub(super) struct Packet<W: ?Sized = dyn Work> {
    pub site: Site,
    pub extras: Option<Box<Extras>>,
    pub work: W,
}

#[derive(Default)]
pub(super) struct Extras {
    pub name: Option<Box<str>>,
    pub retries: Mutex<u32>,
    /// When it must be over, and how long after its submission that is.
    pub deadline: Option<(Instant, Duration)>,
    pub known: Option<Box<Handover>>,
}

impl Packet {
    pub fn name(&self) -> &str {
        self.extras.as_ref().and_then(|extras| extras.name.as_deref()).unwrap_or("job")
    }

    pub fn deadline(&self) -> Option<(Instant, Duration)> {
        self.extras.as_ref()?.deadline
    }

    pub fn until(&self) -> Option<Instant> {
        self.deadline().map(|(deadline, _)| deadline)
    }

    pub fn known(&self) -> Option<&Handover> {
        self.extras.as_ref()?.known.as_deref()
    }

    pub fn retries(&self) -> bool {
        self.extras.as_ref().is_some_and(|extras| {
            let mut left = extras.retries.lock();
            let had = *left > 0;
            *left -= u32::from(had);
            had
        })
    }
}

/// It ends the job, also if it is lost on its way.
pub(super) struct Job(Option<Arc<Packet>>);

impl Job {
    pub fn new(packet: Arc<Packet>) -> Self {
        Job(Some(packet))
    }

    pub fn packet(&self) -> &Arc<Packet> {
        self.0.as_ref().expect("only its end takes it")
    }

    /// Answers the handle. The job's closure is dropped, which is user code.
    pub fn end(mut self, ended: Ended) {
        self.end_with(|| ended);
    }

    pub fn fail(self, error: &Error) {
        self.end(Ended { how: Err(error.clone()), place: None, known: None });
    }

    fn end_with(&mut self, ended: impl FnOnce() -> Ended) {
        if let Some(packet) = self.0.take() {
            contain(|| packet.work.end(ended()));
            // With it may go the last reference to a queue.
            contain(|| drop(packet));
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.end_with(|| Ended { how: Err(Error::Closed), place: None, known: None });
    }
}

pub(super) struct Placed {
    pub rank: Rank,
    pub need: Need,
    pub job: Job,
}

pub(super) struct Single<F, T> {
    /// The closure and its result. The lock is the device thread's alone: no other thread runs the job.
    inner: Mutex<(Option<F>, Option<Contained<T>>)>,
    call: fn(&mut Option<F>, &Device) -> Result<T>,
    answer: OneShot<Answer<T>>,
}

impl<F, T> Single<F, T> {
    pub fn new(f: F, call: fn(&mut Option<F>, &Device) -> Result<T>) -> Self {
        Single { inner: Mutex::new((Some(f), None)), call, answer: OneShot::default() }
    }

    pub fn answer(&self) -> &OneShot<Answer<T>> {
        &self.answer
    }
}

impl<F: FnOnce(&Device) -> Result<T>, T> Single<F, T> {
    pub fn once(f: F) -> Self {
        Single::new(f, |f, dev| f.take().ok_or(Error::Closed).and_then(|f| f(dev)))
    }
}

impl<F: FnMut(&Device) -> Result<T>, T> Single<F, T> {
    pub fn again(f: F) -> Self {
        Single::new(f, |f, dev| f.as_mut().ok_or(Error::Closed).and_then(|f| f(dev)))
    }
}

impl<F: Send, T: Send> Work for Single<F, T> {
    fn run(&self, dev: &Device) -> Result<()> {
        let mut inner = self.inner.lock();
        let (f, result) = &mut *inner;
        *result = Some(Contained::new((self.call)(f, dev)?));
        Ok(())
    }

    fn end(&self, ended: Ended) {
        let (closure, value) = mem::take(&mut *self.inner.lock());
        drop(closure.map(Contained::new));
        Answer::give(&self.answer, ended, value);
    }
}

pub(super) struct Each<F, T> {
    f: RwLock<Option<F>>,
    results: Mutex<Vec<(usize, Contained<T>)>>,
    answer: OneShot<Answer<Vec<T>>>,
}

impl<F, T> Each<F, T> {
    pub fn new(f: F) -> Self {
        Each { f: RwLock::new(Some(f)), results: Mutex::default(), answer: OneShot::default() }
    }
}

impl<F, T> Work for Each<F, T>
where
    F: Fn(&Device, &crate::Group<'_>) -> Result<T> + Send + Sync,
    T: Send,
{
    fn run(&self, dev: &Device) -> Result<()> {
        let f = self.f.read();
        let f = f.as_ref().ok_or(Error::Closed)?;
        let value = Contained::new(f(dev, &dev.everyone())?);
        // Before a retry this rank may have succeeded.
        let mut results = self.results.lock();
        let old = results.iter().position(|(rank, _)| *rank == dev.rank()).map(|i| results.swap_remove(i));
        results.push((dev.rank(), value));
        drop((results, old));
        Ok(())
    }

    fn end(&self, ended: Ended) {
        let closure = self.f.write().take();
        drop(closure.map(Contained::new));
        let mut values = mem::take(&mut *self.results.lock());
        values.sort_by_key(|(rank, _)| *rank);
        let values = ended.how.is_ok().then(|| values.into_iter().map(|(_, value)| value.into_inner()).collect());
        Answer::give(&self.answer, ended, values.map(Contained::new));
    }
}

pub(super) trait GivesBack<F> {
    fn give_back(&self) -> Option<F>;
}

impl<F, T> GivesBack<F> for Single<F, T> {
    fn give_back(&self) -> Option<F> {
        self.inner.lock().0.take()
    }
}

impl<F, T> GivesBack<F> for Each<F, T> {
    fn give_back(&self) -> Option<F> {
        self.f.write().take()
    }
}

impl<F: Send, T: Send> Answers<T> for Packet<Single<F, T>> {
    fn answer(&self) -> &OneShot<Answer<T>> {
        &self.work.answer
    }
}

impl<F: Send + Sync, T: Send> Answers<Vec<T>> for Packet<Each<F, T>> {
    fn answer(&self) -> &OneShot<Answer<Vec<T>>> {
        &self.work.answer
    }
}
