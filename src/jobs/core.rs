//! The core of a queue of jobs: its state under one lock, and what the device threads do with it.
//!
//! [`Jobs`](super::Jobs) and handles call [`Core`]; device threads call it by visits ([`Visit`]). A visit is an entry
//! in the queue of a device's thread, in the order of gangs. It takes jobs one after the other. As soon as another
//! entry waits it ends, and a new visit goes to the end of the queue.
//!
//! Invariant: while a job is in the queue, a visit of a device is under way or will come, or a gang's is. So there is
//! always a thread that looks at the queue again. The lock is never held while user code runs.

use super::{
    placement::{Devices, Need, Start, Table},
    stats::Meter,
};
use crate::{
    Device,
    contain::contain,
    driver::observe::Token,
    error::{Error, Result, Site},
    gang::{
        Gang,
        dispatch::{Entry, Visit},
        next_place,
    },
    memory::handle::{DeviceHandle, Handover},
    scope::{
        ORDER,
        flight::{self, Flight},
        gang, queues,
    },
    sync::{EventCount, Sequence},
    thread::worker::{Shared, Worker, on_device_thread},
};
use once_cell::sync::OnceCell;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    mem,
    rc::Rc,
    sync::Arc,
    task::Waker,
    time::{Duration, Instant},
};

/// A visit begins so many jobs at most: then pools that share the GPU have their turn.
const MOST: usize = 64;
/// How often a device thread looks at work in flight while it has nothing else to do.
const LOOK: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];

/// A job's closure and the way to its handle.
pub(super) trait Work: Send + Sync {
    /// Runs the closure on a device of the job.
    fn run(&self, dev: &Device) -> Result<()>;

    /// Answers the handle. Called once.
    fn end(&self, ended: Ended);
}

/// How a job has ended.
pub(super) struct Ended {
    pub how: Result<()>,
    /// The first device on which it has begun.
    pub place: Option<usize>,
    /// What the device's thread knew, for a checker.
    pub known: Option<Box<Handover>>,
}

/// A job in the queue.
pub(super) struct Job {
    pub work: Arc<dyn Work>,
    pub site: Site,
    pub name: Option<Box<str>>,
    pub retries: u32,
    /// When it must be over, and how long after its submission that is.
    pub deadline: Option<(Instant, Duration)>,
    pub known: Option<Box<Handover>>,
}

impl Job {
    fn end(self, how: Result<()>) {
        end(&self.work, Ended { how, place: None, known: None });
    }
}

/// Answers a handle. The job's closure is dropped, which is user code.
fn end(work: &Arc<dyn Work>, ended: Ended) {
    contain(|| work.end(ended));
}

/// Wakes futures, which is code of their executors.
fn wake(room: Vec<Waker>) {
    room.into_iter().for_each(|waker| {
        contain(|| waker.wake());
    });
}

/// A job that has a device.
struct Placed {
    seq: u64,
    need: Need,
    job: Box<Job>,
}

/// A job whose closure has ended.
struct Flying {
    placed: Placed,
    flight: Flight,
}

/// A job that has begun.
struct Running {
    gang: Arc<Gang>,
    place: usize,
    /// It does not begin again, whatever its closure fails with.
    cancelled: bool,
}

pub(super) struct State {
    pub table: Table<Box<Job>>,
    /// By device: the job that its thread takes next.
    assigned: Vec<Option<Placed>>,
    /// By device: a visit is under way, or in its queue.
    visiting: Vec<bool>,
    running: HashMap<u64, Running>,
    /// No job is taken any more.
    closed: bool,
    /// No job begins any more.
    ended: bool,
    /// The first loss of a device.
    loss: Option<Error>,
    /// Futures that wait for room in the queue.
    room: Vec<Waker>,
    deadlines: BTreeMap<(Instant, u64), Duration>,
    keeper: bool,
    pub meter: Meter,
}

impl State {
    /// Jobs that have a device and are not over.
    pub fn begun(&self) -> usize {
        self.assigned.iter().flatten().count() + self.running.len()
    }

    fn forget(&mut self, seq: u64, job: &Job) {
        self.running.remove(&seq);
        if let Some((deadline, _)) = job.deadline {
            self.deadlines.remove(&(deadline, seq));
        }
    }
}

/// What is to be done once the lock is released.
#[derive(Default)]
pub(super) struct Posts {
    visits: SmallVec<[usize; 4]>,
    wakes: SmallVec<[usize; 4]>,
    gangs: Vec<Arc<GangJob>>,
    room: Vec<Waker>,
    has_room: bool,
}

/// Why a job was not taken.
pub(super) enum Refused {
    /// The queue is full. Here is the job.
    Full(Box<Job>),
    Error(Error),
}

pub(super) struct Core {
    pub shared: Arc<Shared>,
    state: Mutex<State>,
    bound: usize,
    overlap: usize,
    /// By device: how often it was given a job. Its thread looks at this without the lock.
    given: Vec<Sequence>,
    /// Told when the queue has room, and when a job is over.
    pub changed: EventCount,
    /// Told when a deadline is earlier than all others.
    keeper: EventCount,
    pub progress: Option<Box<super::stats::OnProgress>>,
}

impl Core {
    pub fn new(
        shared: &Arc<Shared>,
        bound: usize,
        overlap: usize,
        progress: Option<Box<super::stats::OnProgress>>,
    ) -> Arc<Self> {
        let devices = shared.devices();
        let capacity = |handle: &Arc<DeviceHandle>| {
            let total = handle.driver.info().total_memory;
            shared.memory.limit.map_or(total, |limit| limit.of(total))
        };
        let state = State {
            table: Table::new(shared.handles.iter().map(capacity), overlap),
            assigned: (0..devices).map(|_| None).collect(),
            visiting: vec![false; devices],
            running: HashMap::new(),
            closed: false,
            ended: false,
            loss: None,
            room: Vec::new(),
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
            changed: EventCount::new(),
            keeper: EventCount::new(),
            progress,
        })
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// How many jobs can be in flight on all devices.
    pub fn slots(&self) -> usize {
        self.shared.devices() * (1 + self.overlap)
    }

    /// Whether the queue has room, or takes no job any more. Jobs that jobs submit go beyond its bound.
    pub fn has_room(&self) -> bool {
        let state = self.state.lock();
        state.closed || state.table.len() < self.bound
    }

    /// As [`has_room`](Self::has_room); if there is none, `waker` is woken when there is.
    pub fn poll_room(&self, waker: &Waker) -> bool {
        let mut state = self.state.lock();
        let room = state.closed || state.table.len() < self.bound;
        if !room && !state.room.iter().any(|known| known.will_wake(waker)) {
            state.room.push(waker.clone());
        }
        room
    }

    /// Adds a job. Returns its number.
    pub fn submit(self: &Arc<Self>, op: &'static str, need: Need, job: Box<Job>) -> Result<u64, Refused> {
        crate::scope::check_pid(&self.shared).map_err(Refused::Error)?;
        let (deadline, site) = (job.deadline, job.site);
        let mut state = self.state.lock();
        if state.closed || self.shared.gate.is_closed() {
            return Err(Refused::Error(Error::Closed));
        }
        if let Some(why) = state.table.refusal(&need) {
            let loss = state.loss.clone().filter(|_| state.table.has_lost_all());
            let error = loss.unwrap_or_else(|| Error::invalid_at(site, op, why));
            return Err(Refused::Error(error));
        }
        if state.table.len() >= self.bound && !on_device_thread() {
            return Err(Refused::Full(job));
        }
        let seq = state.table.add(need, job);
        let first = deadline.is_some_and(|(deadline, limit)| {
            state.deadlines.insert((deadline, seq), limit);
            state.deadlines.first_key_value().is_some_and(|(first, _)| *first == (deadline, seq))
        });
        let keeper = first && !mem::replace(&mut state.keeper, true);
        let posts = self.start(&mut state);
        drop(state);
        if first {
            self.keep(keeper);
        }
        self.post(posts);
        Ok(seq)
    }

    /// Gives jobs to devices as long as one can begin.
    fn start(self: &Arc<Self>, state: &mut State) -> Posts {
        let mut posts = Posts::default();
        while let Some(Start { seq, devices, need, job }) = state.table.next() {
            posts.has_room = true;
            state.meter.began(&devices);
            if let (&[device], 1) = (&devices[..], need.gpus) {
                state.assigned[device] = Some(Placed { seq, need, job });
                self.given[device].fetch_advance();
                let visiting = mem::replace(&mut state.visiting[device], true);
                if visiting { &mut posts.wakes } else { &mut posts.visits }.push(device);
            } else {
                let gang = Arc::new(gang(&self.shared, devices.to_vec().into(), job.site));
                state.running.insert(seq, Running { gang: gang.clone(), place: devices[0], cancelled: false });
                posts.gangs.push(Arc::new(GangJob::new(self, gang, Placed { seq, need, job }, devices)));
            }
        }
        if posts.has_room {
            posts.room = mem::take(&mut state.room);
        }
        posts
    }

    fn post(self: &Arc<Self>, posts: Posts) {
        let Posts { visits, wakes, gangs, room, has_room } = posts;
        for device in wakes {
            self.shared.queues[device].waker().notify();
        }
        if !visits.is_empty() || !gangs.is_empty() {
            // While this thread has the pass, the pool does not end its threads: they find these entries.
            let Some(_pass) = self.shared.gate.enter() else {
                gangs.into_iter().for_each(|gang| gang.withdraw());
                self.fail_queued(&Error::Closed);
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
            self.changed.notify();
            wake(room);
        }
    }

    /// Enters a visit into the queues of these devices.
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

    /// Ends all jobs that have not begun. The queue takes no more.
    fn fail_queued(&self, error: &Error) {
        let mut state = self.state.lock();
        (state.closed, state.ended) = (true, true);
        let mut jobs = state.table.remove_all();
        for device in 0..state.assigned.len() {
            if let Some(Placed { need, job, .. }) = state.assigned[device].take() {
                state.table.thread_is_free(device);
                state.table.over(device, need.bytes);
                state.meter.ended(&[device], false);
                jobs.push(job);
            }
        }
        state.deadlines.clear();
        state.meter.cancelled += jobs.len() as u64;
        let room = mem::take(&mut state.room);
        drop(state);
        jobs.into_iter().for_each(|job| job.end(Err(error.clone())));
        self.changed.notify();
        wake(room);
    }

    /// Ends a job with an error: immediately if it has not begun, otherwise as an abort of its gang. Returns whether it
    /// had not begun.
    pub fn cancel(self: &Arc<Self>, seq: u64, error: Error) -> bool {
        let mut state = self.state.lock();
        let mut found = state.table.remove(seq).map(|(_, job)| job);
        if found.is_none() {
            let is_it = |placed: &Option<Placed>| placed.as_ref().is_some_and(|placed| placed.seq == seq);
            if let Some(device) = state.assigned.iter().position(is_it) {
                let Placed { need, job, .. } = state.assigned[device].take().expect("just found");
                state.table.thread_is_free(device);
                state.table.over(device, need.bytes);
                state.meter.ended(&[device], false);
                found = Some(job);
            }
        }
        if let Some(job) = found {
            state.forget(seq, &job);
            state.meter.cancelled += 1;
            let mut posts = self.start(&mut state);
            posts.has_room = true;
            posts.room.append(&mut state.room);
            drop(state);
            job.end(Err(error));
            self.post(posts);
            return true;
        }
        let running = state.running.get_mut(&seq).map(|running| {
            running.cancelled = true;
            (running.gang.clone(), running.place)
        });
        drop(state);
        if let Some((gang, place)) = running {
            gang.poison(place, error);
        }
        false
    }

    /// Cancels all jobs; the queue takes no more.
    pub fn abort(&self, error: &Error) {
        self.fail_queued(error);
        let running: Vec<_> =
            self.state.lock().running.values().map(|running| (running.gang.clone(), running.place)).collect();
        for (gang, place) in running {
            gang.poison(place, error.clone());
        }
    }

    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let room = mem::take(&mut state.room);
        drop(state);
        self.changed.notify();
        wake(room);
    }

    /// Whether all jobs are over.
    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.table.len() + state.begun() == 0
    }

    /// The first device on which a job has begun.
    pub fn place(&self, seq: u64) -> Option<usize> {
        self.state.lock().running.get(&seq).map(|running| running.place)
    }

    /// Whether a job has begun, or is over.
    pub fn has_begun(&self, seq: u64) -> bool {
        let state = self.state.lock();
        !state.table.holds(seq) && !state.assigned.iter().flatten().any(|placed| placed.seq == seq)
    }

    /// A number that grows while devices make progress.
    pub fn progress(&self) -> u64 {
        let devices: u64 = self.shared.gpu_order.iter().map(|order| order.progress.any()).sum();
        devices + self.state.lock().meter.ever()
    }

    /// Accounts for a job that is over. Returns it if it is to begin again.
    fn account(
        self: &Arc<Self>,
        state: &mut State,
        placed: Placed,
        devices: &[usize],
        how: &Result<()>,
    ) -> Option<Box<Job>> {
        let Placed { seq, need, mut job } = placed;
        devices.iter().for_each(|&device| state.table.over(device, need.bytes));
        state.meter.ended(devices, how.is_ok());
        let cancelled = matches!(how, Err(Error::Cancelled { .. } | Error::Closed))
            || state.running.get(&seq).is_some_and(|running| running.cancelled);
        if how.is_err() && !cancelled && job.retries > 0 && !state.ended && state.table.refusal(&need).is_none() {
            job.retries -= 1;
            state.running.remove(&seq);
            state.meter.retried += 1;
            state.table.put_back(seq, need, job);
            return None;
        }
        state.forget(seq, &job);
        state.meter.count(how);
        Some(job)
    }

    /// A job that has not begun leaves its devices, one of which is lost. Returns it if no others can run it.
    fn move_on(self: &Arc<Self>, state: &mut State, placed: Placed, devices: &[usize]) -> Option<Box<Job>> {
        let Placed { seq, need, job } = placed;
        devices.iter().for_each(|&device| state.table.over(device, need.bytes));
        state.meter.ended(devices, false);
        if state.ended || state.table.refusal(&need).is_some() {
            state.forget(seq, &job);
            state.meter.failed += 1;
            return Some(job);
        }
        state.running.remove(&seq);
        state.meter.moved += 1;
        state.table.put_back(seq, need, job);
        None
    }

    /// Tells that a job is over, once it is accounted for.
    fn tell(&self, worker: &Worker, job: Box<Job>, place: usize, how: Result<()>) {
        worker.handle.progress.advance();
        end(&job.work, Ended { how, place: Some(place), known: worker.handle.hand_over() });
        // Closures without a waiter may hold a queue: drop them here, contained.
        contain(|| drop(job));
        self.changed.notify();
        if let Some(progress) = &self.progress {
            let stats = self.lock().meter.progress();
            contain(|| progress(stats));
        }
    }

    /// If the device is lost, its jobs that have not begun go elsewhere.
    fn look_for_loss(self: &Arc<Self>, device: usize, cause: Option<&Error>) {
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
        if let Some(Placed { seq, need, job }) = state.assigned[device].take() {
            state.table.thread_is_free(device);
            state.table.over(device, need.bytes);
            state.meter.ended(&[device], false);
            state.meter.moved += 1;
            state.table.put_back(seq, need, job);
        }
        let hopeless = state.table.lose(device);
        state.meter.failed += hopeless.len() as u64;
        let posts = self.start(&mut state);
        drop(state);
        event!(warn, device, "a device of a queue of jobs is lost: its jobs that have not begun go elsewhere");
        hopeless.into_iter().for_each(|job| job.end(Err(loss.clone())));
        self.post(posts);
    }

    /// The next job of a device, whose thread is free. It begins with this gang.
    fn take(self: &Arc<Self>, device: usize, gang: impl FnOnce(Site) -> Arc<Gang>) -> Option<(Placed, Arc<Gang>)> {
        let mut state = self.state.lock();
        let placed = state.assigned[device].take()?;
        let gang = gang(placed.job.site);
        state.running.insert(placed.seq, Running { gang: gang.clone(), place: device, cancelled: false });
        Some((placed, gang))
    }
}

/// The visit of one device: it takes jobs one after the other.
impl Visit<Rc<Worker>> for Core {
    fn visit(self: Arc<Self>, worker: &Rc<Worker>, _rank: usize, place: u64, others: &dyn Fn() -> bool) {
        let device = worker.handle.device;
        let again = self.jobs(worker, place, others);
        let rested = crate::panics::catch(device, || flight::rest(worker)).and_then(|rest| rest);
        // No job is to blame. The next scope reports it, or the end of the pool.
        if let Err(error) = rested
            && !worker.handle.is_lost()
        {
            worker.defer_error(error);
        }
        self.look_for_loss(device, None);
        if again.is_some() {
            // With a place of its own, behind all that waits.
            self.post(Posts { visits: SmallVec::from_slice(&[device]), ..Posts::default() });
        }
    }
}

impl Core {
    /// The jobs of a visit. When it returns, none of them is in flight. Returns whether a further visit has to come.
    fn jobs(self: &Arc<Self>, worker: &Rc<Worker>, place: u64, others: &dyn Fn() -> bool) -> Option<()> {
        let (device, shared) = (worker.handle.device, &self.shared);
        let mut flying = VecDeque::new();
        let mut began = 0;
        // On software GPUs whose operations go on only when all threads are blocked, this thread blocks.
        let blocks = worker.handle.stepped || worker.handle.in_virtual_time();
        let in_use = worker.cache.borrow_mut().stats().in_use;
        let mut state = self.state.lock();
        state.table.set_resident(device, in_use);
        drop(state);
        self.look_for_loss(device, None);
        loop {
            if shared.gate.is_closed() {
                self.fail_queued(&Error::Closed);
            }
            self.land(worker, &mut flying);
            if began > 0 && (began >= MOST || others()) {
                self.land_all(worker, &mut flying);
                return self.leave(device, true);
            }
            let seen = self.given[device].get();
            let gang = |site| {
                let gang = gang(shared, [device].into(), site);
                gang.enter_at(place);
                Arc::new(gang)
            };
            if let Some((placed, gang)) = self.take(device, gang) {
                began += 1;
                if !self.run(worker, placed, &gang, &mut flying) {
                    // No gang may have this place after one that has failed.
                    self.land_all(worker, &mut flying);
                    return self.leave(device, true);
                }
            } else if flying.is_empty() {
                if let Some(()) = self.leave(device, false) {
                    continue;
                }
                return None;
            } else if blocks {
                self.land_first(worker, &mut flying);
            } else {
                self.wait(worker, &mut flying, || self.given[device].get() != seen || began > 0 && others());
            }
        }
    }

    /// Ends a visit, unless the device has a job. With `always` another visit follows if there is any job.
    fn leave(&self, device: usize, always: bool) -> Option<()> {
        let mut state = self.state.lock();
        let more = state.assigned[device].is_some() || always && state.table.len() > 0;
        state.visiting[device] = more;
        more.then_some(())
    }

    /// Runs a job's closure. False if the job has failed: then its gang has, too.
    fn run(
        self: &Arc<Self>,
        worker: &Rc<Worker>,
        placed: Placed,
        gang: &Arc<Gang>,
        flying: &mut VecDeque<Flying>,
    ) -> bool {
        let device = worker.handle.device;
        worker.handle.take_over(placed.job.known.as_deref());
        let work = placed.job.work.clone();
        let span = super::stats::span(&placed.job, placed.seq, device);
        let flown = span.in_scope(|| flight::fly(worker, gang, self.overlap > 0, |dev| work.run(dev)));
        drop(work);
        let (failed, error) = match flown {
            Ok(mut flight) => match flight.is_over() {
                Ok(false) => {
                    flying.push_back(Flying { placed, flight });
                    let mut state = self.state.lock();
                    state.table.thread_is_free(device);
                    let posts = self.start(&mut state);
                    drop(state);
                    self.post(posts);
                    return true;
                }
                how => flight.land(worker, how.map(drop)).map_or_else(|error| (true, Some(error)), |()| (false, None)),
            },
            Err(error) => (true, Some(error)),
        };
        self.finish(worker, placed, true, error.map_or(Ok(()), Err));
        !failed
    }

    /// A job is over: `thread` if its closure has ended only now.
    fn finish(self: &Arc<Self>, worker: &Rc<Worker>, placed: Placed, thread: bool, how: Result<()>) {
        let device = worker.handle.device;
        if let Err(error) = &how {
            self.look_for_loss(device, Some(error));
        }
        let mut state = self.state.lock();
        if thread {
            state.table.thread_is_free(device);
        }
        let job = self.account(&mut state, placed, &[device], &how);
        let posts = self.start(&mut state);
        drop(state);
        if let Some(job) = job {
            self.tell(worker, job, device, how);
        }
        self.post(posts);
    }

    /// Lands the flights whose work is over.
    fn land(self: &Arc<Self>, worker: &Rc<Worker>, flying: &mut VecDeque<Flying>) {
        let mut i = 0;
        while i < flying.len() {
            match flying[i].flight.is_over() {
                Ok(false) => i += 1,
                how => {
                    let Flying { placed, flight } = flying.remove(i).expect("it is there");
                    let how = flight.land(worker, how.map(drop));
                    self.finish(worker, placed, false, how);
                }
            }
        }
    }

    /// Blocks until the oldest flight is over.
    fn land_first(self: &Arc<Self>, worker: &Rc<Worker>, flying: &mut VecDeque<Flying>) {
        if let Some(Flying { placed, flight }) = flying.pop_front() {
            let how = flight.wait(worker);
            let how = flight.land(worker, how);
            self.finish(worker, placed, false, how);
        }
    }

    fn land_all(self: &Arc<Self>, worker: &Rc<Worker>, flying: &mut VecDeque<Flying>) {
        while !flying.is_empty() {
            self.land_first(worker, flying);
        }
    }

    /// Waits until a flight is over, or until `news`. A flight without progress until the deadline fails.
    fn wait(self: &Arc<Self>, worker: &Rc<Worker>, flying: &mut VecDeque<Flying>, news: impl Fn() -> bool) {
        let waker = self.shared.queues[worker.handle.device].waker();
        let since = Instant::now();
        let mut tick = LOOK[0];
        loop {
            let over = flying.iter_mut().any(|flying| !matches!(flying.flight.is_over(), Ok(false)));
            if over || waker.wait_until(Some(tick), || news().then_some(())).is_some() {
                return;
            }
            tick = (since.elapsed() / 16).clamp(LOOK[0], LOOK[1]);
            if since.elapsed() > self.shared.deadline / 4 {
                // Only a blocking wait sees whether the stream makes progress.
                return self.land_first(worker, flying);
            }
        }
    }

    /// Wakes the thread that keeps deadlines; `start` if there is none.
    fn keep(self: &Arc<Self>, start: bool) {
        self.keeper.notify();
        if !start {
            return;
        }
        let core = Arc::downgrade(self);
        let keep = move || {
            while let Some(core) = core.upgrade() {
                let mut state = core.lock();
                let Some((&(deadline, seq), &limit)) = state.deadlines.first_key_value() else {
                    state.keeper = false;
                    return;
                };
                drop(state);
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    core.lock().deadlines.remove(&(deadline, seq));
                    core.expire(seq, limit);
                    continue;
                }
                let other = || core.lock().deadlines.first_key_value().is_none_or(|(first, _)| first.1 != seq);
                core.keeper.wait_until(Some(left.min(Duration::from_millis(100))), || other().then_some(()));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("gpu-pool:jobs".to_owned()).spawn(keep) {
            self.lock().keeper = false;
            event!(error, %error, "no thread could be started that keeps the deadlines of jobs");
        }
    }

    /// The deadline of a job has passed.
    fn expire(self: &Arc<Self>, seq: u64, waited: Duration) {
        let place = self.place(seq);
        let missing: Vec<usize> = place.map_or_else(|| (0..self.shared.devices()).collect(), |place| vec![place]);
        let last_calls = self.shared.last_calls(&missing);
        let (device, op) = (missing[0], "job");
        self.cancel(seq, Error::Timeout { device, op, waited, missing, last_calls });
    }
}

/// A job on several devices.
pub(super) struct GangJob {
    core: Arc<Core>,
    gang: Arc<Gang>,
    devices: Devices,
    work: Arc<dyn Work>,
    placed: Mutex<Option<Placed>>,
    /// Decided by the member that comes first. False if a device is lost by then: the job goes to others.
    begins: OnceCell<bool>,
    known: Mutex<Option<Box<Token>>>,
    /// What the members knew at their ends.
    ended: Mutex<Vec<Option<Box<Handover>>>>,
}

impl GangJob {
    fn new(core: &Arc<Core>, gang: Arc<Gang>, placed: Placed, devices: Devices) -> Self {
        let work = placed.job.work.clone();
        let placed = Mutex::new(Some(placed));
        let (core, begins) = (core.clone(), OnceCell::new());
        GangJob { core, gang, devices, work, placed, begins, known: Mutex::default(), ended: Mutex::default() }
    }

    /// The pool is closed: it does not begin.
    fn withdraw(&self) {
        let Some(placed) = self.placed.lock().take() else { return };
        let mut state = self.core.lock();
        for &device in &self.devices {
            state.table.thread_is_free(device);
            state.table.over(device, placed.need.bytes);
        }
        state.meter.ended(&self.devices, false);
        state.forget(placed.seq, &placed.job);
        state.meter.cancelled += 1;
        drop(state);
        placed.job.end(Err(Error::Closed));
    }
}

impl Visit<Rc<Worker>> for GangJob {
    fn visit(self: Arc<Self>, worker: &Rc<Worker>, rank: usize, place: u64, _others: &dyn Fn() -> bool) {
        let is_lost = |device: &usize| self.core.shared.handles[*device].is_lost();
        let begins = *self.begins.get_or_init(|| !self.devices.iter().any(is_lost));
        if begins {
            // Each member may come first. All of them bring the same place.
            self.gang.enter_at(place);
            if let Some(placed) = &*self.placed.lock() {
                worker.handle.take_over(placed.job.known.as_deref());
            }
            flight::join(worker, &self.gang, rank, &self.known, |dev| self.work.run(dev));
        }
        let mut ended = self.ended.lock();
        ended.push(worker.handle.hand_over());
        if ended.len() < self.devices.len() {
            return;
        }
        // The last one ends the job.
        for known in ended.drain(..) {
            worker.handle.take_over(known.as_deref());
        }
        drop(ended);
        let Some(placed) = self.placed.lock().take() else { return };
        let mut how = self.gang.cause().map_or(Ok(()), |(_, cause)| Err(cause));
        let core = &self.core;
        for &device in &self.devices {
            core.look_for_loss(device, how.as_ref().err());
        }
        let mut state = core.lock();
        self.devices.iter().for_each(|&device| state.table.thread_is_free(device));
        let job = if begins || how.is_err() {
            core.account(&mut state, placed, &self.devices, &how)
        } else {
            how = Err(if state.ended { Error::Closed } else { state.loss.clone().unwrap_or(Error::Closed) });
            core.move_on(&mut state, placed, &self.devices)
        };
        let posts = core.start(&mut state);
        drop(state);
        if let Some(job) = job {
            core.tell(worker, job, self.devices[0], how);
        }
        core.post(posts);
    }
}
