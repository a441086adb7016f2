//! The engine: which task runs next at each place, and what follows when it has run.
//!
//! The caller adds tasks; device threads and the runners of the CPU take them ([`super::place`]), under one lock, which
//! is never held while a task runs or a value is dropped. Invariant: a thread that makes a task ready wakes its place,
//! after the lock is released.

use super::graph::{Access, Graph, TaskId};
use super::trace::{self, TaskTrace, Times};
use super::{Failure, cpu_work::CpuWork, value::Home};
use crate::error::{Error, Result, Site, op_site::OpSite};
use crate::memory::{DeviceHandle, Handover};
use crate::sync::{EventCount, shim};
use crate::{Device, Event, gang::Gang, thread::worker::Shared};
use once_cell::sync::OnceCell;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    sync::Arc,
};

/// The body of a task. It drops what it has captured before it returns.
pub(super) type Job<'env> = Box<dyn FnOnce(Option<&Device>) -> Result<()> + Send + 'env>;

/// The stream of a device on which a task works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StreamKind {
    Compute,
    Upload,
    Download,
    Peer,
}

pub(super) struct Task<'env> {
    /// `None` while it runs, and for a look of the caller.
    pub job: Option<Job<'env>>,
    pub place: usize,
    pub stream: StreamKind,
    pub here: OpSite,
    /// Its name in the timeline, if a trace is written.
    pub label: Option<Box<str>>,
    pub failure: Option<Failure>,
    pub known: Option<Box<Handover>>,
    pub traced: Option<usize>,
}

#[derive(Default)]
pub(super) struct Notes {
    failure: Option<Failure>,
    /// Where the caller has taken the content.
    taken: Option<Site>,
    /// The end of the last write's work on its device.
    written: Option<Event>,
    /// The ends of the reads' work since then: one for each stream.
    read: SmallVec<[Event; 2]>,
    known: Option<Box<Handover>>,
    pub traced: trace::Users,
}

pub(super) struct Started<'env> {
    pub id: TaskId,
    pub job: Option<Job<'env>>,
    pub stream: StreamKind,
    pub here: OpSite,
    pub label: Option<Box<str>>,
    pub failure: Option<Failure>,
    pub after: SmallVec<[Event; 4]>,
    pub traced: Option<&'env TaskTrace>,
}

pub(super) struct Finished {
    pub id: TaskId,
    pub failure: Option<Failure>,
    /// The end of its work on its device, if it has submitted any.
    pub event: Option<Event>,
    pub times: Option<Times>,
}

#[derive(Default)]
pub(super) struct Wake {
    places: SmallVec<[usize; 8]>,
    pub runners: usize,
}

#[derive(Default)]
struct Place {
    /// Tasks that are ready; if the order is fixed, all tasks.
    queue: VecDeque<TaskId>,
    running: usize,
    started: u64,
}

pub(super) struct State<'env> {
    pub graph: Graph<Task<'env>, Notes>,
    /// The devices, then the CPU, then the caller.
    places: Vec<Place>,
    /// Runners of the CPU that exist.
    pub runners: usize,
    left: usize,
    /// The last task of each stream that has submitted work: the end of that work.
    ends: BTreeMap<(usize, StreamKind), Event>,
    /// The pool of threads does not run the CPU's tasks, so the waiting caller does.
    pub is_starved: bool,
    pub is_closed: bool,
    /// No task is started any more, for this reason.
    pub ended: Option<Failure>,
    /// Failures of tasks, the first one first.
    pub failures: Vec<Failure>,
    pub trace: Option<&'env TaskTrace>,
    sweep_at: usize,
}

pub(super) struct Engine<'env> {
    pub state: Mutex<State<'env>>,
    pub shared: Arc<Shared>,
    pub home: Arc<Home>,
    pub caller: shim::Arc<EventCount>,
    pub gang: OnceCell<Arc<Gang>>,
    /// Software GPUs that run one operation at a time: each device runs its tasks in the order in which they were
    /// added, so that what it submits does not depend on time.
    in_order: bool,
    threads: usize,
    /// The caller is a thread of rayon, maybe the only one that can run the CPU's tasks: it runs them while it waits.
    helps: bool,
    pub cpu: Arc<CpuWork>,
}

impl<'env> Engine<'env> {
    pub fn new(shared: &Arc<Shared>, threads: usize) -> Self {
        let places = (0..shared.device_count() + 2).map(|_| Place::default()).collect();
        let state = State {
            graph: Graph::new(),
            places,
            runners: 0,
            left: 0,
            ends: BTreeMap::new(),
            is_starved: false,
            is_closed: false,
            ended: None,
            failures: Vec::new(),
            trace: None,
            sweep_at: 64,
        };
        Engine {
            state: Mutex::new(state),
            shared: shared.clone(),
            home: Arc::default(),
            caller: shim::Arc::new(EventCount::new()),
            gang: OnceCell::new(),
            in_order: shared.handles[0].stepped,
            threads,
            helps: rayon::current_thread_index().is_some(),
            cpu: Arc::default(),
        }
    }

    pub fn device_count(&self) -> usize {
        self.shared.device_count()
    }

    pub fn cpu_place(&self) -> usize {
        self.device_count()
    }

    pub fn caller_place(&self) -> usize {
        self.device_count() + 1
    }

    /// For what belongs to no device: knowledge of threads that are no device threads.
    pub fn handle(&self) -> &DeviceHandle {
        &self.shared.handles[0]
    }

    pub fn gang(&self) -> &Arc<Gang> {
        self.gang.get().expect("set before any task is added")
    }

    pub fn add(&self, state: &mut State<'env>, task: Task<'env>, uses: &[(usize, Access)], wake: &mut Wake) {
        let place = task.place;
        if let Some((trace, number)) = state.trace.zip(task.traced) {
            let graph = &mut state.graph;
            for &(var, access) in uses {
                trace.order(number, access, &mut graph.notes(var).traced);
            }
        }
        let (id, is_ready) = state.graph.add(task, uses);
        state.left += 1;
        self.enqueue(state, id, place, true, is_ready, wake);
    }

    fn enqueue(&self, state: &mut State<'env>, id: TaskId, place: usize, new: bool, ready: bool, wake: &mut Wake) {
        let fixed = self.in_order && place < self.device_count();
        if if fixed { new } else { ready } {
            state.places[place].queue.push_back(id);
        }
        if !ready || state.ended.is_some() {
            return;
        }
        if place == self.cpu_place() {
            self.cpu.more();
            if state.runners < self.threads {
                state.runners += 1;
                wake.runners += 1;
            }
            if (self.helps || state.is_starved) && !wake.places.contains(&self.caller_place()) {
                wake.places.push(self.caller_place());
            }
        } else if !wake.places.contains(&place) {
            wake.places.push(place);
        }
    }

    pub fn start(&self, state: &mut State<'env>, place: usize) -> Option<Started<'env>> {
        if state.ended.is_some() {
            return None;
        }
        let id = *state.places[place].queue.front().filter(|&&id| state.graph.is_ready(id))?;
        state.places[place].queue.pop_front();
        state.places[place].running += 1;
        state.places[place].started += 1;
        let Task { job, stream, here, label, failure, known, traced, .. } = state.graph.payload(id);
        let (stream, here, traced) = (*stream, *here, *traced);
        let (job, mut failure, known, label) = (job.take(), failure.take(), known.take(), label.take());
        let handle = self.handle();
        handle.take_over(known.as_deref());
        let mut after = SmallVec::new();
        state.graph.each_use(id, |access, notes| {
            if failure.is_none() {
                failure = notes.failure.clone();
            }
            if let Some(taken) = notes.taken.filter(|_| failure.is_none()) {
                failure = Some(Failure::invalid(here, format_args!("the content was taken at {taken}")));
            }
            after.extend(notes.written.clone());
            if access == Access::Write {
                after.extend(notes.read.iter().cloned());
            }
            handle.take_over(notes.known.as_deref());
        });
        if let Some(failure) = &failure {
            failure.note(&mut state.failures);
        }
        let traced = state.trace.filter(|_| traced.is_some());
        Some(Started { id, job, stream, here, label, failure, after, traced })
    }

    /// Notes that a task has run, or will not run, and makes the tasks ready that have waited for it.
    pub fn finish(&self, state: &mut State<'env>, finished: Finished, wake: &mut Wake) {
        let Finished { id, failure, event, times } = finished;
        let handle = self.handle();
        state.graph.each_use(id, |access, notes| {
            if handle.hands_over() {
                Handover::add(&mut notes.known, handle.hand_over());
            }
            match (access, &event) {
                (Access::Write, Some(event)) => {
                    notes.written = Some(event.clone());
                    notes.read.clear();
                }
                (Access::Read, Some(event)) => {
                    let same = |known: &&mut Event| Arc::ptr_eq(&known.0.stream, &event.0.stream);
                    match notes.read.iter_mut().find(same) {
                        Some(known) => *known = event.clone(),
                        None => notes.read.push(event.clone()),
                    }
                }
                (_, None) => {}
            }
            if access == Access::Write && notes.failure.is_none() {
                notes.failure.clone_from(&failure);
            }
        });
        if let Some(failure) = &failure {
            failure.note(&mut state.failures);
        }
        let mut ready = SmallVec::<[(TaskId, usize); 8]>::new();
        let task = state.graph.finish(id, |id, task| ready.push((id, task.place)));
        if let Some(event) = event {
            state.ends.insert((task.place, task.stream), event);
        }
        if let Some((trace, number)) = state.trace.zip(task.traced) {
            trace.finish(number, times, failure.is_some());
        }
        for (id, place) in ready {
            self.enqueue(state, id, place, false, true, wake);
        }
        state.places[task.place].running -= 1;
        state.left -= 1;
        if state.is_over() && !wake.places.contains(&self.caller_place()) {
            wake.places.extend(0..self.device_count());
            wake.places.push(self.caller_place());
        } else if state.is_idle() && !wake.places.contains(&self.caller_place()) {
            wake.places.push(self.caller_place());
        }
        drop(task.known);
    }

    /// Takes a task of the CPU for the waiting caller, if it is to help.
    pub fn help(&self, state: &mut State<'env>) -> Option<Started<'env>> {
        if self.helps || state.is_starved { self.start(state, self.cpu_place()) } else { None }
    }

    /// A look at the CPU, some time after the last one, which has returned `before`: if a task was ready all the time
    /// and none has run, the pool of threads has no thread for it.
    pub fn look_at_cpu(&self, state: &mut State<'env>, before: Option<u64>) -> Option<u64> {
        let cpu = &state.places[self.cpu_place()];
        let waiting = (cpu.running == 0 && !cpu.queue.is_empty()).then_some(cpu.started);
        state.is_starved |= waiting.is_some() && waiting == before;
        waiting
    }

    pub fn taken(&self, var: usize, site: Site) {
        self.state.lock().graph.notes(var).taken = Some(site);
    }

    /// No task is started any more. The first call decides why.
    pub fn end(&self, failure: Failure) {
        let mut state = self.state.lock();
        if state.ended.is_none() {
            // Who has waited in vain has waited for a task that failed, if one has.
            let in_vain = matches!(failure.error(), Error::Deadlock { .. } | Error::Timeout { .. });
            let failure = state.unreported().filter(|_| in_vain).cloned().unwrap_or(failure);
            failure.note(&mut state.failures);
            state.ended = Some(failure);
            self.cpu.stop();
        }
        drop(state);
        self.wake_all();
    }

    pub fn close(&self) {
        self.state.lock().is_closed = true;
        self.wake_all();
    }

    fn wake_all(&self) {
        EventCount::notify_all(self.shared.wakers.iter().map(|waker| &**waker).chain([&*self.caller]));
    }

    pub fn wake(&self, wake: &Wake) {
        if wake.places.is_empty() {
            return;
        }
        let event = |&place: &usize| match place < self.device_count() {
            true => &*self.shared.wakers[place],
            false => &*self.caller,
        };
        EventCount::notify_all(wake.places.iter().map(event));
    }

    /// Forgets the variables whose values are gone, now and then.
    pub fn sweep(&self, state: &mut State<'env>) {
        if state.graph.vars() < state.sweep_at {
            return;
        }
        for var in mem::take(&mut *self.home.released.lock()) {
            state.graph.release(var);
        }
        state.sweep_at = 64 + 2 * state.graph.vars();
    }

    /// The devices that run a task, with the number of started tasks, if nothing can start before one of these ends.
    pub fn waits_only_for_devices(&self) -> Option<(SmallVec<[usize; 8]>, u64)> {
        let state = self.state.lock();
        let waits = |place: usize| {
            let queue = &state.places[place].queue;
            state.ended.is_some() || queue.front().is_none_or(|&id| !state.graph.is_ready(id))
        };
        let busy = (0..self.device_count()).filter(|&place| state.places[place].running > 0).collect::<SmallVec<_>>();
        let started = state.places.iter().map(|place| place.started).sum();
        let others = self.cpu_place()..=self.caller_place();
        let idle = |place: usize| state.places[place].running > 0 || waits(place);
        let quiet =
            (0..self.device_count()).all(idle) && others.into_iter().all(|p| state.places[p].running == 0 && waits(p));
        (quiet && !busy.is_empty()).then_some((busy, started))
    }

    pub fn has_work(&self) -> bool {
        self.state.lock().places.iter().take(self.device_count()).any(|place| place.running > 0)
    }

    pub fn lock(&self) -> MutexGuard<'_, State<'env>> {
        self.state.lock()
    }
}

impl State<'_> {
    pub fn is_over(&self) -> bool {
        (self.is_closed || self.ended.is_some()) && self.is_idle()
    }

    /// Whether nothing runs or waits for its turn. The caller's look does not count: the caller may wait within it.
    pub fn is_idle(&self) -> bool {
        let Some((caller, others)) = self.places.split_last() else { return true };
        match self.ended {
            Some(_) => others.iter().all(|place| place.running == 0),
            None => self.left == caller.running,
        }
    }

    pub fn unreported(&self) -> Option<&Failure> {
        self.failures.iter().find(|failure| !failure.0.reported.is_raised())
    }

    /// The ends of the work of all tasks so far: for each stream the last one.
    pub fn ends(&self) -> Vec<Event> {
        self.ends.values().cloned().collect()
    }
}
