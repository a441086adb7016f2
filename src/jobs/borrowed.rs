//! Jobs that borrow from the caller: they are over when the call returns.
//!
//! Invariant: the closure of each job of a [`JobScope`], and a result without a handle, are dropped before
//! [`Jobs::scope`] returns or unwinds. So the lifetime of what they borrow may be erased. A job's end counts a latch
//! down after its last use of the borrows; the call waits for all latches.

use super::{Answer, Answers, Ended, Job, JobHandle, Jobs, Packet, Rank, Single, core::Core, job::Work};
use crate::error::{Error, Result};
use crate::sync::{CountLatch, EventCount, OneShot, Returned, shim};
use crate::{Device, scope::TICK, stall::StallTimer, thread::worker::on_device_thread};
use parking_lot::Mutex;
use std::{marker::PhantomData, mem, panic::Location, sync::Arc, time::Duration};

/// Gives out jobs that borrow, in [`Jobs::scope`].
pub struct JobScope<'scope, 'env: 'scope> {
    core: Arc<Core>,
    waker: shim::Arc<EventCount>,
    given: Mutex<Vec<Given>>,
    // As in `std::thread::scope`: both are invariant.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

struct Given {
    /// `None` if it was refused.
    rank: Option<Rank>,
    latch: shim::Arc<CountLatch>,
    note: Arc<Mutex<Note>>,
}

#[derive(Default)]
struct Note {
    error: Option<Error>,
    /// Its handle has got the answer.
    told: bool,
}

/// The handle of a job of a [`JobScope`]. If it does not get the answer, the scope returns the job's error.
pub struct ScopedJob<'scope, T: Returned + 'scope> {
    handle: Result<JobHandle<T>>,
    note: Arc<Mutex<Note>>,
    scope: PhantomData<&'scope ()>,
}

struct Borrowing<W> {
    work: W,
    note: Arc<Mutex<Note>>,
    done: Mutex<Option<Done>>,
}

/// Counts its latch down when it is dropped.
struct Done(shim::Arc<CountLatch>);

impl Drop for Done {
    fn drop(&mut self) {
        // SAFETY: the only call for this latch, which this reference keeps.
        unsafe { CountLatch::set(&*self.0) }
    }
}

impl<W: Work> Work for Borrowing<W> {
    fn run(&self, dev: &Device) -> Result<()> {
        self.work.run(dev)
    }

    fn end(&self, ended: Ended) {
        // Counted last, also if a waker panics.
        let _done = self.done.lock().take();
        self.note.lock().error = ended.how.as_ref().err().cloned();
        self.work.end(ended);
    }
}

impl<F: Send, T: Send> Answers<T> for Packet<Borrowing<Single<F, T>>> {
    fn answer(&self) -> &OneShot<Answer<T>> {
        self.work.work.answer()
    }
}

impl Jobs {
    /// Runs `f`, which gives out jobs that may borrow from the caller. Returns when all are over, also if `f` panics.
    ///
    /// The page "Jobs" of the guide has an example.
    ///
    /// # Errors
    /// The first error of a job whose handle was dropped; of these, as those of [`submit`](Self::submit) and
    /// [`JobHandle::wait`]. [`Error::NestedScope`] on a device's thread; then `f` does not run.
    ///
    /// # Panics
    /// If `f` panics: after its jobs are over.
    #[track_caller]
    pub fn scope<'env, R>(&self, f: impl for<'scope> FnOnce(&'scope JobScope<'scope, 'env>) -> R) -> Result<R> {
        fail_if!(on_device_thread(), Error::NestedScope { op: "scope", site: Location::caller() });
        let (core, waker) = (self.core.clone(), shim::Arc::new(EventCount::new()));
        let scope = JobScope { core, waker, given: Mutex::default(), scope: PhantomData, env: PhantomData };
        let joined = Joined(&scope.core, &scope.given);
        let result = f(&scope);
        drop(joined);
        let given = mem::take(&mut *scope.given.lock());
        let untold = given.iter().map(|given| given.note.lock()).filter(|note| !note.told);
        untold.filter_map(|mut note| note.error.take()).next().map_or(Ok(result), Err)
    }
}

/// Its drop waits for the jobs that were given out.
struct Joined<'a>(&'a Arc<Core>, &'a Mutex<Vec<Given>>);

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        let Joined(core, given) = self;
        let (mut stall, mut seen) = (StallTimer::new(core.shared.deadline.saturating_add(TICK)), core.progress());
        let mut waited = 0;
        // Without the lock: a job may give out further ones. It ends after they are in the list.
        let next = |at: usize| given.lock().get(at).map(|given| (given.rank, given.latch.clone()));
        while let Some((rank, latch)) = next(waited) {
            waited += 1;
            while !latch.wait(Some(stall.tick(TICK)), Duration::ZERO) {
                let now = core.progress();
                if now != seen {
                    seen = now;
                    stall.renew();
                } else if let Some(rank) = rank.filter(|&rank| stall.is_over() && !core.has_begun(rank)) {
                    core.cancel(rank, core.shared.timeout_of_all("scope", stall.waited()), false);
                }
            }
        }
    }
}

impl<'scope> JobScope<'scope, '_> {
    /// Submits a job that may borrow. Waits while the queue is full. If it is refused, its handle has the error.
    #[track_caller]
    pub fn submit<T: Returned + 'scope>(
        &'scope self,
        f: impl FnOnce(&Device) -> Result<T> + Send + 'scope,
    ) -> ScopedJob<'scope, T> {
        let latch = shim::Arc::new(CountLatch::new(1, self.waker.clone()));
        let note: Arc<Mutex<Note>> = Arc::default();
        let done = Mutex::new(Some(Done(latch.clone())));
        let work = Borrowing { work: Single::once(f), note: note.clone(), done };
        let jobs = Jobs { core: self.core.clone() };
        let (need, packet) = jobs.job().into_packet(work, Location::caller());
        let answers: Arc<dyn Answers<T> + 'scope> = packet.clone();
        let job: Arc<Packet<dyn Work + 'scope>> = packet;
        // SAFETY: only the lifetime changes. The job's end drops all that borrows and then counts the latch: there is
        // no closure any more, and the result is with the handle, or was dropped. Each job has an end (`Job`).
        // `Jobs::scope` waits for it before it returns or unwinds: `Joined` finds it in `given`, or it was counted
        // before, within `send`.
        let job = unsafe { mem::transmute::<Arc<Packet<dyn Work + 'scope>>, Arc<Packet>>(job) };
        // SAFETY: only the lifetime changes. The handle has that of the scope, and `T` outlives it. What a handle that
        // is forgotten keeps is never dropped.
        let answers = unsafe { mem::transmute::<Arc<dyn Answers<T> + 'scope>, Arc<dyn Answers<T>>>(answers) };
        let rank = self.core.send("submit", need, Job::new(job));
        if let Err(error) = &rank {
            note.lock().error = Some(error.clone());
        }
        self.given.lock().push(Given { rank: rank.as_ref().ok().copied(), latch, note: note.clone() });
        let handle = rank.map(|rank| JobHandle::new(&self.core, rank, answers));
        ScopedJob { handle, note, scope: PhantomData }
    }
}

impl<T: Returned> ScopedJob<'_, T> {
    /// As [`JobHandle::wait`].
    ///
    /// # Errors
    /// As [`JobHandle::wait`], and as [`Jobs::submit`] if the job was refused.
    #[track_caller]
    pub fn wait(self) -> Result<T> {
        let answer = match self.handle {
            Ok(handle) => handle.wait(),
            Err(error) => Err(error),
        };
        self.note.lock().told = true;
        answer
    }
}

debug_as!(ScopedJob<'_, T> [T: Returned], |self| handle = self.handle);
debug_as!(JobScope<'_, '_>, |self| given = self.given.lock().len(), ..);
