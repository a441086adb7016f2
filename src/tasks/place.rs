//! Where tasks run: device threads, runners of the CPU, and the caller's own looks.
//!
//! A device thread starts a task's work behind the work of the tasks that it depends on, by events that were recorded
//! when those ended. The CPU and the caller wait for these events on the host. The threads of rayon may wait for this
//! very call: so a waiting caller runs the CPU's tasks where rayon does not. It calls no `rayon::yield_now`: that would
//! run any job on this stack, also one that needs these devices.

use super::engine::{Engine, Finished, Started, State, StreamKind, Wake};
use super::{Failure, TaskPanicked, cpu_work::WaitingThread, trace::Times};
use crate::driver::host::{self, Attendee};
use crate::error::{Error, Result, op_site::OpSite};
use crate::scope::{Watch, holding};
use crate::{Device, Event, Stream, contain::contain, gang::Gang, panics, timeline::Category};
use once_cell::unsync::OnceCell;
use rayon::Scope;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};
use std::{ops::ControlFlow, sync::Arc, thread};

/// How often a waiting caller looks whether the devices and the CPU get on.
const TICK: Duration = Duration::from_millis(50);

#[derive(Default)]
struct Streams {
    upload: OnceCell<Stream>,
    download: OnceCell<Stream>,
    peer: OnceCell<Stream>,
}

impl Streams {
    fn stream(&self, dev: &Device, stream: StreamKind) -> Result<Option<&Stream>> {
        let cell = match stream {
            StreamKind::Compute => return Ok(None),
            StreamKind::Upload => &self.upload,
            StreamKind::Download => &self.download,
            StreamKind::Peer => &self.peer,
        };
        cell.get_or_try_init(|| dev.stream()).map(Some)
    }
}

impl<'env> Engine<'env> {
    /// A device thread runs the tasks of its device until there will be no more.
    pub fn serve<'scope>(&'scope self, dev: &Device, scope: &Scope<'scope>) -> Result<()> {
        let (place, gang) = (dev.rank(), &dev.session.gang);
        let streams = Streams::default();
        let mut finished = None;
        loop {
            let mut wake = Wake::default();
            let next = self.step(place, finished.take(), &mut wake);
            self.tell(wake, scope);
            let next = next.or_else(|| {
                // The last task has been told of, so a step wakes no thread.
                let step = || self.step(place, None, &mut Wake::default());
                let look = || if gang.is_aborted() { Some(None) } else { step() };
                gang.waker(place).wait_lingering(None, self.shared.linger, look)
            });
            finished = next.flatten().map(|task| self.on_device(dev, &streams, task));
            if let Err(error) = gang.check() {
                self.end(Failure::new(root(gang, error)));
            }
            if finished.is_none() {
                return dev.check();
            }
        }
    }

    /// Ends a task, and takes the next one. `Some(None)`: there will be none.
    fn step(&self, place: usize, finished: Option<Finished>, wake: &mut Wake) -> Option<Option<Started<'env>>> {
        let mut state = self.lock();
        if let Some(finished) = finished {
            self.finish(&mut state, finished, wake);
        }
        let next = self.start(&mut state, place);
        (next.is_some() || state.is_over() || state.ended.is_some()).then_some(next)
    }

    fn on_device(&self, dev: &Device, streams: &Streams, task: Started<'env>) -> Finished {
        let Started { id, job, stream, here, label, failure, after, traced } = task;
        let Some(job) = job else { return Finished { id, failure, event: None, times: None } };
        if failure.is_some() {
            contain(|| drop(job));
            return Finished { id, failure, event: None, times: None };
        }
        let gang = &dev.session.gang;
        let (mut event, mut times) = (None, None);
        let run = || {
            let _here = here.enter();
            let stream = streams.stream(dev, stream)?;
            let on = stream.map(|stream| dev.on(stream));
            let dev = on.as_deref().unwrap_or(dev);
            for event in &after {
                if !dev.stream.comes_after(&event.0.stream, event.0.covered) {
                    dev.wait(event)?;
                }
            }
            let began = traced.map(|trace| trace.begin_on(dev)).transpose()?;
            let before = dev.stream.submitted();
            let lane = &dev.worker.handle.lane;
            let slice = lane.slice(Category::Task, "task", Some(here)).note(|slice| slice.label = label);
            let done = panics::catch(dev.index(), || job(Some(dev))).and_then(|done| done);
            drop(slice);
            // Also after a failure: submitted work may use the inputs. A task that submits nothing may pass on an input
            // whose work is not over.
            let recorded = (|| {
                if (dev.stream.submitted() != before || !after.is_empty()) && !gang.is_aborted() {
                    event = Some(dev.record()?);
                }
                times = began.map(|began| Times::on(began, dev)).transpose()?;
                Ok(())
            })();
            done.and(recorded)
        };
        let done = panics::catch(dev.index(), run).and_then(|done| done);
        // An abort's cause says more than the abort.
        let say = |error| if matches!(error, Error::Aborted { .. }) { root(gang, error) } else { error };
        Finished { id, failure: done.err().map(|error| Failure::new(say(error))), event, times }
    }

    pub fn tell<'scope>(&'scope self, wake: Wake, scope: &Scope<'scope>) {
        self.wake(&wake);
        for _ in 0..wake.runners {
            scope.spawn(|scope| self.run_cpu(scope));
        }
    }

    fn run_cpu<'scope>(&'scope self, scope: &Scope<'scope>) {
        let mut finished = None;
        loop {
            let mut wake = Wake::default();
            let mut state = self.lock();
            let had = finished.is_some();
            if let Some(finished) = finished.take() {
                self.finish(&mut state, finished, &mut wake);
            }
            let next = self.start(&mut state, self.cpu_place());
            match next {
                Some(_) => state.is_starved = false,
                None => state.runners -= 1,
            }
            drop(state);
            self.tell(wake, scope);
            if had {
                // Those that it has made ready are awake by now.
                self.cpu.less();
            }
            let Some(task) = next else { return };
            finished = Some(self.on_cpu(task));
        }
    }

    fn on_cpu(&self, task: Started<'env>) -> Finished {
        let Started { id, job, here, label, failure, after, traced, .. } = task;
        let job = job.expect("a task of the CPU has a body");
        if failure.is_some() {
            contain(|| drop(job));
            return Finished { id, failure, event: None, times: None };
        }
        let mut times = None;
        let _here = here.enter();
        let done = self.wait_for(&after, true).and_then(|()| {
            let began = Instant::now();
            let slice = self.handle().lane.slice(Category::Task, "task", Some(here));
            let _slice = slice.note(|slice| slice.label = label);
            let done = panics::catch(0, || holding(&self.shared, || job(None)))
                .unwrap_or_else(|error| Err(TaskPanicked::of(error)));
            times = traced.map(|_| Times::Host(began, Instant::now()));
            done
        });
        Finished { id, failure: done.err().map(Failure::new), event: None, times }
    }

    /// The calling host thread waits for the ends of tasks' work. `counted`: the thread runs a task of the CPU.
    pub fn wait_for(&self, events: &[Event], counted: bool) -> Result<()> {
        let gang = self.gang();
        for event in events {
            let stop = || gang.is_aborted();
            // The thread counts by itself while it waits, and until it counts among the tasks of the CPU again.
            let waiting = counted.then(|| Arc::new(WaitingThread(thread::current().id())) as Arc<dyn Attendee>);
            if let Some(waiting) = &waiting {
                host::attend(&*self.handle().driver, waiting);
                self.cpu.less();
            }
            let waited = event.wait_host("tasks", self.shared.deadline, &stop);
            if waiting.is_some() {
                self.cpu.more();
            }
            drop(waiting);
            waited.map_err(|error| if gang.is_aborted() { root(gang, error) } else { error })?;
        }
        // A collective that was given up leaves no result.
        self.shared.check_kernels(gang);
        gang.check().map_err(|error| root(gang, error))
    }

    /// The caller waits until `poll` has an answer. It never takes other jobs of rayon: they may need these devices.
    pub fn wait<T>(
        &self,
        watch: &Watch<'_>,
        tell: &dyn Fn(Wake),
        mut poll: impl FnMut(&mut State<'env>) -> Option<T>,
    ) -> T {
        let (mut suspected, mut cpu) = (None, None);
        let mut looked = Instant::now();
        loop {
            let look = || {
                let mut state = self.lock();
                let answer = poll(&mut state).map(ControlFlow::Break);
                answer.or_else(|| self.help(&mut state).map(ControlFlow::Continue))
            };
            match self.caller.wait_until(Some(TICK), look) {
                Some(ControlFlow::Break(answer)) => return answer,
                Some(ControlFlow::Continue(task)) => {
                    let (finished, mut wake) = (self.on_cpu(task), Wake::default());
                    self.finish(&mut self.lock(), finished, &mut wake);
                    tell(wake);
                    self.cpu.less();
                }
                None => {}
            }
            if looked.elapsed() < TICK {
                continue;
            }
            looked = Instant::now();
            cpu = self.look_at_cpu(&mut self.lock(), cpu);
            watch.look(self.has_work());
            self.shared.check_kernels(watch.gang);
            if watch.gang.is_aborted() {
                self.end(Failure::new(root(watch.gang, Error::Closed)));
            }
            let stuck = self.stuck();
            if let (Some(now), Some(before)) = (&stuck, &suspected)
                && now.seen == *before
            {
                watch.gang.poison(now.device, now.failure.error().clone());
            }
            suspected = stuck.map(|stuck| stuck.seen);
        }
    }

    /// A device whose task waits in vain for a peer: a task has failed, and nothing else runs or can start.
    fn stuck(&self) -> Option<Stuck> {
        let (busy, started) = self.waits_only_for_devices()?;
        let failure = {
            let state = self.lock();
            // A caller that has got its failure may go on without that task.
            let failure = if state.ended.is_some() { state.failures.first() } else { state.unreported() };
            failure.cloned()?
        };
        let mut seen = vec![started];
        for &device in &busy {
            let thread = &*self.shared.quiescence[device];
            thread.waits_for()?;
            // Asleep, with no message that it has not seen.
            seen.extend([thread.blocked()?, thread.progress()]);
        }
        Some(Stuck { device: busy[0], seen, failure })
    }

    /// A look of the caller at a value: waits for its turn, and for the work of the tasks before it.
    pub fn look<R>(&self, watch: &Watch<'_>, tell: &dyn Fn(Wake), f: impl FnOnce() -> R) -> Result<R> {
        let place = self.caller_place();
        let started = self.wait(watch, tell, |state| {
            let ended = state.ended.clone().map(Err);
            self.start(state, place).map(Ok).or(ended)
        });
        let Started { id, here, failure, after, .. } = started.map_err(Failure::report)?;
        let _here = here.enter();
        let done = match failure {
            Some(failure) => Err(failure.report()),
            // The turn ends also if the caller's code panics.
            None => self.wait_for(&after, false).map(|()| catch_unwind(AssertUnwindSafe(|| OpSite::outside(f)))),
        };
        let (mut state, mut wake) = (self.lock(), Wake::default());
        self.finish(&mut state, Finished { id, failure: None, event: None, times: None }, &mut wake);
        drop(state);
        tell(wake);
        Ok(done?.unwrap_or_else(|payload| resume_unwind(payload)))
    }
}

struct Stuck {
    device: usize,
    /// The number of started tasks, and what each busy device's thread has done. Unchanged if nothing goes on.
    seen: Vec<u64>,
    failure: Failure,
}

/// The failure of a gang, as its caller sees it.
fn root(gang: &Gang, error: Error) -> Error {
    gang.cause().map_or(error, |(_, cause)| cause)
}

#[cfg(test)]
#[path = "../../tests/unit/tasks/place_tests.rs"]
mod tests;
