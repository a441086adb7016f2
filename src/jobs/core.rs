//! The core of a queue of jobs: its state under one lock.
//!
//! Device threads call [`Core`] by [visits](Visit): entries in a device thread's queue, in the order of gangs. A visit
//! takes jobs until another entry waits; then a new one goes to the end of the queue. Invariant: while a job is in the
//! queue, a visit of a device is under way or will come, or a gang's is. The lock is never held while user code runs.

use super::{Ended, Job, Meter, Need, Placed, Rank, Running, Table, gang::GangJob, placement::Start};
use super::{state::State, stats::OnProgress};
use crate::{
    contain::{Contained, contain},
    error::{Error, Result},
    gang::{Visit, dispatch::Entry, next_place},
    memory::DeviceHandle,
    scope::{ORDER, Wakers, gang, queues},
    sync::{EventCount, Sequence},
    thread::worker::{Shared, Worker, on_device_thread},
};
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use std::{cell::RefCell, collections::BTreeMap, mem, ptr, rc::Rc, sync::Arc, task::Waker, time::Instant};

thread_local! {
    /// Jobs that this thread ends, by queue: a drop of a user's value there does not wait for itself.
    static ENDING: RefCell<Vec<(*const Core, usize)>> = const { RefCell::new(Vec::new()) };
}

#[derive(Default)]
pub(super) struct Posts {
    visits: SmallVec<[usize; 4]>,
    wakes: SmallVec<[usize; 4]>,
    gangs: Vec<Arc<GangJob>>,
    room: BTreeMap<u64, Waker>,
    has_room: bool,
}

impl Posts {
    pub fn visit(device: usize) -> Self {
        Posts { visits: SmallVec::from_slice(&[device]), ..Posts::default() }
    }
}

pub(super) enum Refused {
    /// The queue is full. Here is the job.
    Full(Job),
    Error(Error),
}

pub(super) struct Core {
    pub shared: Arc<Shared>,
    state: Mutex<State>,
    pub bound: usize,
    pub overlap: usize,
    /// By device: how often it was given a job. Its thread looks at this without the lock.
    pub given: Vec<Sequence>,
    /// By device: its waker, for its gangs of one.
    pub wakers: Vec<Wakers>,
    /// Told when the queue has room, and when a job is over.
    pub changed: EventCount,
    /// Told when a deadline is earlier than all others.
    pub keeper: EventCount,
    pub progress: Option<Contained<Box<OnProgress>>>,
}

impl Core {
    pub fn new(shared: &Arc<Shared>, bound: usize, overlap: usize, progress: Option<Box<OnProgress>>) -> Arc<Self> {
        let devices = shared.device_count();
        let capacity = |handle: &Arc<DeviceHandle>| {
            // As of the device's cache; but no limit is more than the GPU has.
            let whole = handle.driver.info().total_memory;
            let part = whole / handle.sharers as u64;
            shared.memory.limit.map_or(part, |limit| limit.of(part)).min(whole)
        };
        let state = State {
            table: Table::new(shared.handles.iter().map(capacity), overlap),
            assigned: (0..devices).map(|_| None).collect(),
            visiting: vec![false; devices],
            running: Vec::new(),
            ending: 0,
            closed: false,
            ended: false,
            loss: None,
            room: BTreeMap::new(),
            deadlines: BTreeMap::new(),
            keeper: false,
            meter: Meter::new(devices),
        };
        Arc::new(Core {
            shared: shared.clone(),
            state: Mutex::new(state),
            bound,
            overlap,
            given: (0..devices).map(|_| Sequence::new()).collect(),
            wakers: shared.wakers.iter().map(|waker| [waker.clone()].into()).collect(),
            changed: EventCount::new(),
            keeper: EventCount::new(),
            progress: progress.map(Contained::new),
        })
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// How many jobs can be in flight on all devices.
    pub fn slots(&self) -> usize {
        self.shared.device_count() * (1 + self.overlap)
    }

    /// Whether the queue has room, or takes no job any more. Jobs that jobs submit go beyond its bound.
    pub fn has_room(&self) -> bool {
        let state = self.state.lock();
        state.closed || state.table.len() < self.bound
    }

    pub fn submit(self: &Arc<Self>, op: &'static str, need: Need, job: Job) -> Result<Rank, Refused> {
        crate::scope::check_pid(&self.shared).map_err(Refused::Error)?;
        let (deadline, site) = (job.packet().deadline(), job.packet().site);
        let mut state = self.state.lock();
        fail_if!(state.closed || self.shared.gate.is_closed(), Refused::Error(Error::Closed));
        if let Some(why) = state.table.refusal(&need) {
            let loss = state.loss.clone().filter(|_| state.table.has_lost_all());
            let error = loss.unwrap_or_else(|| Error::invalid_at(site, op, why));
            return Err(Refused::Error(error));
        }
        if state.table.len() >= self.bound && !on_device_thread() {
            drop(state);
            let late = deadline.filter(|(deadline, _)| *deadline <= Instant::now());
            let late = late.map(|(_, limit)| Refused::Error(self.shared.timeout_of_all("job", limit)));
            return Err(late.unwrap_or(Refused::Full(job)));
        }
        let rank = state.table.add(need, job);
        let news = deadline.is_some_and(|(deadline, limit)| {
            state.deadlines.insert((deadline, rank), limit);
            !state.keeper || state.deadlines.first_key_value().is_some_and(|(first, _)| *first == (deadline, rank))
        });
        let posts = self.start(&mut state);
        drop(state);
        if news {
            self.keep();
        }
        self.post(posts);
        Ok(rank)
    }

    /// Gives jobs to devices as long as one can begin.
    pub fn start(self: &Arc<Self>, state: &mut State) -> Posts {
        let mut posts = Posts::default();
        while let Some(Start { rank, devices, need, job }) = state.table.next() {
            posts.has_room = true;
            state.meter.began(&devices);
            if let (&[device], 1) = (&devices[..], need.gpus) {
                state.assigned[device] = Some(Placed { rank, need, job });
                self.given[device].fetch_advance();
                let visiting = mem::replace(&mut state.visiting[device], true);
                if visiting { &mut posts.wakes } else { &mut posts.visits }.push(device);
            } else {
                let gang = Arc::new(gang(&self.shared, devices.to_vec().into(), job.packet().site));
                let (packet, place) = (job.packet().clone(), devices[0]);
                let job = Arc::new(GangJob::new(self, gang.clone(), Placed { rank, need, job }, devices));
                let waits = Some(job.clone());
                state.running.push(Running { rank, gang, place, packet, cancelled: false, waits });
                posts.gangs.push(job);
            }
        }
        if posts.has_room {
            posts.room = mem::take(&mut state.room);
        }
        posts
    }

    pub fn post(self: &Arc<Self>, posts: Posts) {
        let Posts { visits, wakes, gangs, room, has_room } = posts;
        for device in wakes {
            self.shared.queues[device].waker().notify();
        }
        if !visits.is_empty() || !gangs.is_empty() {
            // While this thread has the pass, the pool does not end its threads: they find these entries.
            let Some(_pass) = self.shared.gate.enter() else {
                self.fail_queued(&Error::Closed);
                self.wake(room);
                return;
            };
            for device in visits {
                self.enter(self.clone(), &[device]);
            }
            for gang in gangs {
                let devices = gang.devices.clone();
                self.enter(gang, &devices);
            }
        }
        if has_room {
            self.wake(room);
        }
    }

    fn enter(&self, visit: Arc<dyn Visit<Rc<Worker>>>, devices: &[usize]) {
        let shared = &self.shared;
        let entering = shared.entering.enter();
        let pool = shared.handles[0].pool;
        let place = std::cell::Cell::new(0);
        ORDER.enter_each(&queues(shared, devices), |rank| {
            if rank == 0 {
                place.set(next_place());
            }
            let turn = shared.gpu_order[devices[rank]].issue(pool);
            Entry::Visit { visit: visit.clone(), rank, place: place.get(), turn }
        });
        drop(entering);
    }

    /// The queue takes no more.
    pub fn fail_queued(self: &Arc<Self>, error: &Error) {
        let mut state = self.state.lock();
        (state.closed, state.ended) = (true, true);
        let mut jobs = state.table.remove_all();
        for device in 0..state.assigned.len() {
            jobs.extend(state.unassign(device).map(|placed| placed.job));
        }
        let waiting = state.running.iter_mut().filter_map(|running| running.waits.take()).collect::<Vec<_>>();
        jobs.extend(waiting.iter().filter_map(|gang| gang.withdraw(&mut state)));
        let State { deadlines, running, .. } = &mut *state;
        deadlines.retain(|(_, rank), _| running.iter().any(|running| running.rank == *rank));
        state.meter.cancelled += jobs.len() as u64;
        let room = mem::take(&mut state.room);
        self.fail(state, jobs, error, Posts { room, has_room: true, ..Posts::default() });
    }

    /// Ends a job with an error: immediately if it has not begun (then true); else, if `begun` says so, by an abort of
    /// its gang.
    pub fn cancel(self: &Arc<Self>, rank: Rank, error: Error, begun: bool) -> bool {
        let mut state = self.state.lock();
        let mut found = state.table.remove(rank).map(|(_, job)| job);
        if found.is_none() {
            let is_it = |placed: &Option<Placed>| placed.as_ref().is_some_and(|placed| placed.rank == rank);
            let device = state.assigned.iter().position(is_it);
            found = device.and_then(|device| state.unassign(device)).map(|placed| placed.job);
        }
        let mut running = state.running.iter_mut().find(|running| running.rank == rank);
        if let Some(gang) = running.as_mut().and_then(|running| running.waits.take()) {
            found = gang.withdraw(&mut state);
        }
        if let Some(job) = found {
            state.forget(rank, &job);
            state.meter.cancelled += 1;
            let mut posts = self.start(&mut state);
            posts.has_room = true;
            posts.room.append(&mut state.room);
            self.fail(state, vec![job], &error, posts);
            return true;
        }
        let running = state.running.iter_mut().find(|running| begun && running.rank == rank).map(|running| {
            running.cancelled = true;
            (running.gang.clone(), running.place)
        });
        drop(state);
        if let Some((gang, place)) = running {
            gang.poison(place, error);
        }
        false
    }

    /// The queue takes no more.
    pub fn abort(self: &Arc<Self>, error: &Error) {
        self.fail_queued(error);
        let running: Vec<_> =
            self.state.lock().running.iter().map(|running| (running.gang.clone(), running.place)).collect();
        for (gang, place) in running {
            gang.poison(place, error.clone());
        }
    }

    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let room = mem::take(&mut state.room);
        drop(state);
        self.wake(room);
    }

    fn wake(&self, room: BTreeMap<u64, Waker>) {
        self.changed.notify();
        room.into_values().for_each(|waker| {
            contain(|| waker.wake());
        });
    }

    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        let count = |&(core, count): &(*const Core, usize)| if ptr::eq(core, self) { count } else { 0 };
        let own = ENDING.try_with(|ending| ending.borrow().iter().map(count).sum());
        state.table.len() + state.begun() + state.ending == own.unwrap_or(0usize)
    }

    /// `None` also for a gang that has not begun.
    pub fn place(&self, rank: Rank) -> Option<usize> {
        self.state.lock().running(rank).filter(|running| running.waits.is_none()).map(|running| running.place)
    }

    pub fn has_begun(&self, rank: Rank) -> bool {
        let state = self.state.lock();
        !state.table.holds(rank)
            && !state.assigned.iter().flatten().any(|placed| placed.rank == rank)
            && state.running(rank).is_none_or(|running| running.waits.is_none())
    }

    /// A number that grows while devices make progress.
    pub fn progress(&self) -> u64 {
        let devices: u64 = self.shared.gpu_order.iter().map(|order| order.progress.any()).sum();
        devices + self.state.lock().meter.ever()
    }

    /// Accounts for a job that is over. Returns it if it is to begin again.
    pub fn account(
        self: &Arc<Self>,
        state: &mut State,
        placed: Placed,
        devices: &[usize],
        how: &mut Result<()>,
    ) -> Option<Job> {
        let Placed { rank, need, job } = placed;
        if let Err(Error::OutOfMemory { device, report, .. }) = how {
            Arc::make_mut(report).jobs = state.booked(*device);
        }
        devices.iter().for_each(|&device| state.table.over(device, need.bytes));
        let cancelled = matches!(how, Err(Error::Cancelled { .. } | Error::Closed))
            || state.running(rank).is_some_and(|running| running.cancelled);
        let may = how.is_err() && !cancelled && !state.ended && state.table.refusal(&need).is_none();
        let again = may && job.packet().retries();
        state.meter.ended(devices, !again);
        if again {
            state.ran(rank);
            state.meter.retried += 1;
            state.table.put_back(rank, need, job);
            return None;
        }
        state.forget(rank, &job);
        state.meter.count(how);
        state.ending += 1;
        Some(job)
    }

    /// A job that has not begun leaves its devices, one of which is lost. Returns it if no others can run it.
    pub fn move_on(self: &Arc<Self>, state: &mut State, placed: Placed, devices: &[usize]) -> Option<Job> {
        let Placed { rank, need, job } = placed;
        devices.iter().for_each(|&device| state.table.over(device, need.bytes));
        state.meter.ended(devices, false);
        if state.ended || state.table.refusal(&need).is_some() {
            state.forget(rank, &job);
            state.meter.failed += 1;
            state.ending += 1;
            return Some(job);
        }
        state.ran(rank);
        state.meter.moved += 1;
        state.table.put_back(rank, need, job);
        None
    }

    pub fn tell(&self, worker: &Worker, job: Job, place: usize, how: Result<()>) {
        worker.handle.progress.advance();
        job.end(Ended { how, place: Some(place), known: worker.handle.hand_over() });
        if let Some(progress) = &self.progress {
            let stats = self.lock().meter.progress();
            contain(|| (**progress)(stats));
        }
        self.lock().ending -= 1;
        self.changed.notify();
    }

    /// Ends jobs that have not begun. Posts first: their ends run user code, which may wait for jobs that begin.
    fn fail(self: &Arc<Self>, mut state: MutexGuard<'_, State>, jobs: Vec<Job>, error: &Error, posts: Posts) {
        let count = jobs.len();
        state.ending += count;
        drop(state);
        // A thread that ends has no list any more.
        let _ = ENDING.try_with(|ending| ending.borrow_mut().push((Arc::as_ptr(self), count)));
        self.post(posts);
        jobs.into_iter().for_each(|job| job.fail(error));
        let _ = ENDING.try_with(|ending| ending.borrow_mut().pop());
        self.lock().ending -= count;
        self.changed.notify();
    }

    /// If the device is lost, its jobs that have not begun go elsewhere.
    pub fn look_for_loss(self: &Arc<Self>, device: usize, cause: Option<&Error>) {
        if !self.shared.handles[device].is_lost() {
            return;
        }
        let mut state = self.state.lock();
        if state.table.is_lost(device) {
            return;
        }
        let (op, name) = ("jobs", "an earlier loss".to_owned());
        let found = Error::DeviceLost { device, op, code: 0, name, site: None };
        let loss = match cause {
            Some(error @ Error::DeviceLost { .. }) => error.clone(),
            _ => found,
        };
        state.loss.get_or_insert_with(|| loss.clone());
        if let Some(Placed { rank, need, job }) = state.unassign(device) {
            state.meter.moved += 1;
            state.table.put_back(rank, need, job);
        }
        let hopeless = state.table.lose(device);
        state.meter.failed += hopeless.len() as u64;
        let mut posts = self.start(&mut state);
        // The hopeless ones leave room.
        posts.has_room = true;
        posts.room.append(&mut state.room);
        self.fail(state, hopeless, &loss, posts);
        event!(warn, "device_lost", device, "a device of a job queue is lost: jobs that have not begun go elsewhere");
    }
}
