//! The machine: the scheduler's lock, the worker threads, and the host threads that wait.
//!
//! A worker takes ready streams until there are none, looks again for a few yields (work often comes in bursts), and
//! sleeps. A thread that makes a stream ready wakes one worker, unless one is already looking; a worker that takes a
//! stream while others are ready wakes the next. There are up to one per core (at least two), and one more for each
//! running host function, since those may block. A worker leaves a stream after some time, so that streams take turns.
//!
//! Brief operations run on the thread that submits them (`here`). Where operations run one at a time (`step`), there is
//! one worker; its loop is in `steps`.

mod here;
mod steps;

use super::{
    Core, Ended, Engine, HostConfig, Job, Key, MachineConfig, Next, Op, Waiter, Who, deadlock::Suspicion, fault,
    quiescence::HostThreads, sched::Start, step::Stepper, stream::State as StreamState,
};
use crate::{driver::DriverResult, panics};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    mem,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// The operations that a worker performs on one stream before it takes another ready stream.
const BATCH: usize = 16;
const TURN: Duration = Duration::from_micros(200);
/// How often a thread looks, with a yield after each look, before it sleeps.
const LOOKS: usize = 32;
/// Time between two looks at the words that streams wait for: the host may write them without a call.
const POLL: Duration = Duration::from_micros(250);
/// Time between two looks of a waiting thread for a deadlock.
const SLICE: Duration = Duration::from_millis(10);
/// Time between two looks of a worker for quiescence: threads block without telling the machine.
const PAUSE: Duration = Duration::from_micros(50);
/// How long the drop of the last handle waits for work that can still run.
const FAREWELL: Duration = Duration::from_secs(5);

pub(super) struct Machine {
    state: Mutex<State>,
    work: Condvar,
    ended: Condvar,
    /// Without those for host functions.
    base_workers: usize,
    dry: bool,
    watch_reads: bool,
}

pub(super) struct State {
    pub core: Core,
    pub crew: Crew,
    pub threads: HostThreads,
    pub stepper: Option<Stepper>,
    pub suspicion: Option<Suspicion>,
}

#[derive(Default)]
pub(super) struct Crew {
    handles: Vec<JoinHandle<()>>,
    alive: usize,
    /// Those that have not been woken.
    asleep: usize,
    looking: usize,
    pub performing: usize,
    /// Those that try a kernel again although nothing has completed since its last try.
    pub retrying: usize,
    calling: usize,
    polling: bool,
    pace: Option<(u64, Instant)>,
    shutdown: bool,
}

/// The devices of a machine share this; its drop ends the workers.
pub(super) struct Owner(Arc<Machine>);

impl Owner {
    pub fn new(configs: &[HostConfig], machine: &MachineConfig) -> DriverResult<Self> {
        let (core, stepper) = (Core::new(configs, machine)?, Stepper::new(&machine.schedule));
        let (crew, threads) = (Crew::default(), HostThreads::default());
        let state = Mutex::new(State { core, crew, threads, stepper, suspicion: None });
        let (work, ended) = (Condvar::new(), Condvar::new());
        let base_workers = thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8));
        let MachineConfig { dry, watch_reads, .. } = *machine;
        Ok(Owner(Arc::new(Machine { state, work, ended, base_workers, dry, watch_reads })))
    }

    pub fn machine(&self) -> &Arc<Machine> {
        &self.0
    }

    pub fn is(&self, other: &Owner) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Under the lock that `state` holds.
    pub fn push(&self, state: &mut State, stream: Key, op: Op) -> DriverResult {
        self.push_all(state, stream, std::iter::once(op))
    }

    /// For several operations of one call, which costs as one call in virtual time.
    pub fn push_all(&self, state: &mut State, stream: Key, ops: impl Iterator<Item = Op>) -> DriverResult {
        let mut ops = ops.peekable();
        let Some(first) = ops.peek() else { return Ok(()) };
        if state.crew.alive == 0 {
            self.hire(state)?;
        }
        state.threads.acts(thread::current().id());
        let submitted = state.core.price(&first.work);
        ops.for_each(|op| state.core.push(stream, Op { submitted, ..op }));
        if state.core.stepped {
            self.0.work.notify_one();
        }
        if state.core.has_ready() {
            self.0.wake_worker(state);
        }
        Ok(())
    }

    fn hire(&self, state: &mut State) -> DriverResult {
        hire(&self.0, &mut state.crew).map_err(|e| fault::exhausted(format!("no worker thread: {e}")))
    }
}

impl Drop for Owner {
    /// Lets the work that can run finish (for at most [`FAREWELL`]), and ends the workers. Never panics. A worker whose
    /// host function held the last handle does not wait.
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.crew.shutdown = true;
        self.0.work.notify_all();
        state.crew.asleep = 0;
        let handles = mem::take(&mut state.crew.handles);
        if handles.iter().any(|handle| handle.thread().id() == thread::current().id()) {
            return;
        }
        let deadline = Instant::now() + FAREWELL;
        while state.crew.alive > 0 && !self.0.ended.wait_until(&mut state, deadline).timed_out() {}
        let all_ended = state.crew.alive == 0;
        drop(state);
        if all_ended {
            handles.into_iter().for_each(|handle| drop(handle.join()));
        }
    }
}

fn hire(machine: &Arc<Machine>, crew: &mut Crew) -> std::io::Result<()> {
    let name = format!("gpu-pool:host:{}", crew.alive);
    let (worker, silenced) = (machine.clone(), panics::is_silenced());
    let run = move || {
        let _silenced = panics::inherit(silenced);
        worker.run();
    };
    let handle = thread::Builder::new().name(name).spawn(run)?;
    crew.handles.push(handle);
    crew.alive += 1;
    Ok(())
}

impl Machine {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub fn is_dry(&self) -> bool {
        self.dry
    }

    pub fn workers(&self) -> usize {
        self.base_workers
    }

    fn wake_worker(self: &Arc<Self>, state: &mut State) {
        let crew = &mut state.crew;
        if crew.looking > 0 {
            return;
        }
        if crew.asleep > 0 {
            // `notify_one` wakes none if the sleeping worker has just reached the end of a poll; that one looks anyway.
            if self.work.notify_one() {
                crew.asleep -= 1;
            }
        } else if crew.alive < self.base_workers + crew.calling && !crew.shutdown {
            let _ = hire(self, crew);
        }
    }

    /// Starts another worker if streams are ready and all have long been busy with the same operations: some never end.
    fn relieve(self: &Arc<Self>, state: &mut State) {
        let State { core, crew, .. } = state;
        let now = Instant::now();
        let pace = crew.pace.filter(|(completions, _)| *completions == core.completions);
        let is_free = crew.looking + crew.asleep > 0;
        match pace {
            Some((_, since)) if now - since < SLICE => {}
            Some(_) if core.has_ready() && !is_free && !crew.shutdown && crew.alive < core.streams.len() => {
                crew.pace = None;
                let _ = hire(self, crew);
            }
            Some(_) => {}
            None => crew.pace = Some((core.completions, now)),
        }
    }

    fn run(self: &Arc<Self>) {
        let mut job = Job::default();
        let mut state = self.state.lock();
        if state.core.stepped {
            self.run_steps(&mut state, &mut job);
        }
        loop {
            if let Some(stream) = state.core.pick_next() {
                self.advance(&mut state, stream, &mut job);
            } else if state.crew.shutdown {
                break;
            } else {
                self.rest(&mut state);
            }
        }
        state.crew.alive -= 1;
        if state.crew.alive == 0 {
            self.ended.notify_all();
        }
    }

    fn advance(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, stream: Key, job: &mut Job) {
        let began = Instant::now();
        for _ in 0..BATCH {
            match state.core.start(stream, job) {
                Start::Done => continue,
                Start::Left => return self.bury(state),
                Start::Run => {}
            }
            if state.core.has_ready() || (state.core.awaits_values() && !state.crew.polling) {
                self.wake_worker(state);
            }
            let calls = usize::from(job.engine == Some(Engine::HostThread));
            state.crew.calling += calls;
            let (next, _) = self.perform(state, job);
            state.crew.calling -= calls;
            self.bury(state);
            match next {
                Next::Continue if began.elapsed() < TURN => {}
                Next::Continue | Next::Yield => break,
                Next::Left => return,
            }
        }
        state.core.requeue(stream);
    }

    /// Without the lock. False: it must be tried again.
    fn perform(&self, state: &mut MutexGuard<'_, State>, job: &mut Job) -> (Next, bool) {
        let retries = usize::from(state.core.is_tried(job.stream));
        state.crew.performing += 1;
        state.crew.retrying += retries;
        let result = MutexGuard::unlocked(state, || job.perform(self.dry, self.watch_reads));
        state.crew.performing -= 1;
        state.crew.retrying -= retries;
        let again = matches!(result, Ok(Ended::Again));
        (state.core.finish(job, result), !again)
    }

    /// Without the lock.
    fn bury(&self, state: &mut MutexGuard<'_, State>) {
        if !state.core.graveyard.is_empty() {
            let dead = mem::take(&mut state.core.graveyard);
            MutexGuard::unlocked(state, || drop(dead));
        }
    }

    /// Looks for work for a moment. Then sleeps until the worker is woken or must look at awaited words again.
    fn rest(&self, state: &mut MutexGuard<'_, State>) {
        state.crew.looking += 1;
        for _ in 0..LOOKS {
            MutexGuard::unlocked(state, thread::yield_now);
            if state.core.has_ready() || state.crew.shutdown {
                break;
            }
        }
        state.crew.looking -= 1;
        if state.core.has_ready() || state.crew.shutdown {
            return;
        }
        state.crew.asleep += 1;
        if state.core.awaits_values() && !state.crew.polling {
            state.crew.polling = true;
            while self.work.wait_for(state, POLL).timed_out() {
                state.core.poll();
                if state.core.has_ready() || !state.core.awaits_values() || state.crew.shutdown {
                    state.crew.asleep = state.crew.asleep.saturating_sub(1);
                    break;
                }
            }
            state.crew.polling = false;
        } else {
            self.work.wait(state);
        }
    }

    pub fn find_deadlock(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) {
        state.find_deadlock();
        if state.core.has_ready() {
            self.wake_worker(state);
        }
        self.relieve(state);
        self.work.notify_all();
        // Else workers that are awake count as asleep for ever, and none is started while these are busy.
        state.crew.asleep = 0;
        self.bury(state);
    }

    /// Waits until `stream` has completed `seq` operations, or is destroyed, or `limit` has passed.
    pub fn wait(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, stream: Key, seq: u64, limit: Duration) {
        let done = |state: &State| state.core.has_passed(stream, seq);
        let start = Instant::now();
        // A stepped machine waits until this thread blocks, so looking first would only delay the step.
        let looks = if state.core.stepped { 0 } else { LOOKS };
        for _ in 0..looks {
            if done(state) || start.elapsed() >= limit {
                return;
            }
            MutexGuard::unlocked(state, thread::yield_now);
        }
        if done(state) {
            return;
        }
        let me = thread::current().id();
        if limit.is_zero() {
            return state.threads.polls(me);
        }
        let deadline = start.checked_add(limit);
        let condvar = Arc::new(Condvar::new());
        let number = state.threads.enter(me, stream, seq);
        if state.core.stepped {
            self.work.notify_one();
        }
        while !done(state) {
            if let Some(stream) = state.core.streams.get_mut(stream) {
                stream.waiters.push(Waiter { seq, who: Who::Thread(condvar.clone()) });
            }
            let slice = Instant::now() + SLICE;
            if !condvar.wait_until(state, deadline.map_or(slice, |deadline| deadline.min(slice))).timed_out() {
                continue;
            }
            if let Some(stream) = state.core.streams.get_mut(stream) {
                let mine = |who: &Who| matches!(who, Who::Thread(other) if Arc::ptr_eq(other, &condvar));
                stream.waiters.retain(|waiter| !mine(&waiter.who));
            }
            if done(state) {
                break;
            }
            self.find_deadlock(state);
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                break;
            }
        }
        state.threads.leave(number);
    }
}
