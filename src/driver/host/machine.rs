//! The machine: the scheduler's lock, the worker threads, and threads of the host that wait.
//!
//! A worker takes ready streams until there are none, looks again for a few yields (work often comes in bursts, and
//! going to sleep costs more), and then sleeps. Whoever makes a stream ready wakes one worker unless one is looking
//! already, and a worker that takes a stream while others are ready wakes the next. Workers are started as needed, up
//! to one per core (at least two), and one more for each host function under way, since those may block. A worker that
//! has spent some time on a stream leaves it to the next, so that streams take turns.
//!
//! Where operations run one at a time (`step`) there is one worker, in `steps`.

mod steps;

use super::{
    HostConfig, MachineConfig,
    deadlock::Suspicion,
    exec::{Ended, Job},
    fault,
    op::{Engine, Op},
    quiescence::HostThreads,
    sched::{Core, Next, Start},
    slab::Key,
    step::Stepper,
    stream::{State as StreamState, Waiter, Who},
};
use crate::{driver::DriverResult, panics};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    mem,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Operations that a worker performs on one stream before the other ready streams have their turn,
const BATCH: usize = 16;
/// unless they take longer than this.
const TURN: Duration = Duration::from_micros(200);
/// Looks that a thread takes before it sleeps, with a yield after each.
const LOOKS: usize = 32;
/// How often the words that streams wait for are looked at: the host may write them without a call.
const POLL: Duration = Duration::from_micros(250);
/// How often a thread that waits looks for a deadlock,
const SLICE: Duration = Duration::from_millis(10);
/// and a worker looks whether a program has come to rest: threads go to sleep without telling it.
const PAUSE: Duration = Duration::from_micros(50);
/// How long the drop of the last handle waits for work that can still run.
const FAREWELL: Duration = Duration::from_secs(5);

pub(super) struct Machine {
    state: Mutex<State>,
    /// For workers that sleep.
    work: Condvar,
    /// For the drop of the last handle.
    ended: Condvar,
    /// Workers, not counting those for host functions.
    base_workers: usize,
    /// Operations are not performed.
    dry: bool,
    /// Kernels are watched: see `watch`.
    watch_reads: bool,
}

/// What the lock guards.
pub(super) struct State {
    pub core: Core,
    pub crew: Crew,
    pub threads: HostThreads,
    /// The order of steps, where operations run one at a time.
    pub stepper: Option<Stepper>,
    pub suspicion: Option<Suspicion>,
}

#[derive(Default)]
pub(super) struct Crew {
    handles: Vec<JoinHandle<()>>,
    /// Workers that have not ended,
    alive: usize,
    /// of them asleep and not yet woken,
    asleep: usize,
    /// looking for work,
    looking: usize,
    /// performing an operation,
    pub performing: usize,
    /// among these trying a kernel again though nothing has completed since it was tried last,
    pub retrying: usize,
    /// and running a host function.
    calling: usize,
    /// Whether one of those asleep looks at awaited words from time to time.
    polling: bool,
    /// How many operations had completed at the last look whether any did, and since when.
    pace: Option<(u64, Instant)>,
    shutdown: bool,
}

/// Held by the devices of a machine together; dropping it ends the workers.
pub(super) struct Owner(Arc<Machine>);

impl Owner {
    pub fn new(configs: &[HostConfig], machine: &MachineConfig) -> DriverResult<Self> {
        let state = State {
            core: Core::new(configs, machine)?,
            crew: Crew::default(),
            threads: HostThreads::default(),
            stepper: Stepper::new(&machine.schedule),
            suspicion: None,
        };
        Ok(Owner(Arc::new(Machine {
            state: Mutex::new(state),
            work: Condvar::new(),
            ended: Condvar::new(),
            base_workers: thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 8)),
            dry: machine.dry,
            watch_reads: machine.watch_reads,
        })))
    }

    pub fn machine(&self) -> &Arc<Machine> {
        &self.0
    }

    pub fn is(&self, other: &Owner) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Appends to a stream that exists, under the lock that `state` holds.
    pub fn push(&self, state: &mut State, stream: Key, op: Op) -> DriverResult {
        self.push_all(state, stream, std::iter::once(op))
    }

    /// The same for several operations that one call submits, and that cost the caller one call.
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
    /// Lets the work that can run finish, within reason, and ends the workers. Never panics; on a worker (whose host
    /// function held the last handle) it waits for nobody.
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
    let (worker, hushed) = (machine.clone(), panics::is_hushed());
    let run = move || {
        let _hushed = panics::inherit(hushed);
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

    /// Sees to it that a worker will look at what is ready.
    fn wake_worker(self: &Arc<Self>, state: &mut State) {
        let crew = &mut state.crew;
        if crew.looking > 0 {
            return;
        }
        if crew.asleep > 0 {
            // None is woken if the one asleep has just come to the end of a poll; then it will look anyway.
            if self.work.notify_one() {
                crew.asleep -= 1;
            }
        } else if crew.alive < self.base_workers + crew.calling && !crew.shutdown {
            // A worker less makes things slower, not wrong: the first one was started by `push` or not at all.
            let _ = hire(self, crew);
        }
    }

    /// Hires one more worker if streams are ready, and the workers have all been busy with the same operations for a
    /// while: there may be more streams with long operations than workers, and operations that never end. At most one
    /// worker for each stream.
    fn relieve(self: &Arc<Self>, state: &mut State) {
        let State { core, crew, .. } = state;
        let now = Instant::now();
        let pace = crew.pace.filter(|(completions, _)| *completions == core.completions);
        let is_free = crew.looking + crew.asleep > 0;
        match pace {
            Some((_, since)) if now - since < SLICE => {}
            Some(_) if core.has_ready() && !is_free && !crew.shutdown && crew.alive < core.streams.len() => {
                crew.pace = None;
                // Without it things take longer, or the deadline passes.
                let _ = hire(self, crew);
            }
            Some(_) => {}
            None => crew.pace = Some((core.completions, now)),
        }
    }

    // ---- workers ----------------------------------------------------------------------------------------------------

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

    /// Runs operations of one stream, for a while.
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

    /// Performs an operation that was started, without the lock, and finishes it. Whether it came to its end.
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

    /// Drops operations that will not run, without the lock.
    fn bury(&self, state: &mut MutexGuard<'_, State>) {
        if !state.core.graveyard.is_empty() {
            let dead = mem::take(&mut state.core.graveyard);
            MutexGuard::unlocked(state, || drop(dead));
        }
    }

    /// Looks for work for a moment, then sleeps until woken, or until it is time to look at awaited words again.
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

    // ---- threads of the host ----------------------------------------------------------------------------------------

    /// Looks for a deadlock, and lets go on whoever can when one was resolved.
    pub fn find_deadlock(self: &Arc<Self>, state: &mut MutexGuard<'_, State>) {
        state.find_deadlock();
        if state.core.has_ready() {
            self.wake_worker(state);
        }
        self.relieve(state);
        self.work.notify_all();
        self.bury(state);
    }

    /// Waits until `stream` has completed `seq` operations, or is gone, or `limit` has passed.
    pub fn wait(self: &Arc<Self>, state: &mut MutexGuard<'_, State>, stream: Key, seq: u64, limit: Duration) {
        let done = |state: &State| state.core.has_passed(stream, seq);
        let start = Instant::now();
        // Where operations run one at a time they wait for this thread to block.
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
