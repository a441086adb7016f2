//! How a scope runs: a gang of device threads, one closure, one outcome.
//!
//! [`run`] is the caller's side, [`member`] a device thread's side. Invariant: when [`run`] returns or unwinds, no
//! closure of the scope runs, and no work of the scope is in flight on a stream of its devices, unless the gang is
//! [stuck](Gang::is_stuck).

pub(crate) mod flight;
mod member;

use crate::contain::{Contained, text_of};
use crate::error::{Error, Result, Site, listed, op_site::OpSite};
use crate::fabric::{broadcast, processes::NewScope};
use crate::gang::{
    Alarm, CancelToken, Gang, Outside, Queue,
    dispatch::Order,
    job::{Body, Waiting},
};
use crate::thread::worker::{Shared, Worker, on_device_thread};
use crate::{Device, Shard, memory::Handover, stall::StallTimer, sync::EventCount, timeline::Category};
use crossbeam::utils::CachePadded;
use member::{Outcome, Part};
use once_cell::sync::{Lazy, OnceCell};
use parking_lot::Mutex;
use std::{cell::RefCell, fmt, mem, rc::Rc, sync::Arc, time::Duration};

/// The one order of gangs in this process.
pub(crate) static ORDER: Lazy<Order> = Lazy::new(Order::new);
/// Its deadline is later than the members' by this time: their waits end first, and with errors that say more.
pub(crate) const TICK: Duration = Duration::from_millis(500);
const CANCEL_TICK: Duration = Duration::from_millis(5);
/// How long the caller stays awake, if there is a core for it. A pass of some kernels takes tens of microseconds, and
/// a wake-up about five.
const LINGER: Duration = Duration::from_micros(100);

pub(crate) fn check_pid(shared: &Shared) -> Result<()> {
    let (built, now) = (shared.pid, std::process::id());
    if built == now { Ok(()) } else { Err(Error::Forked { built, now }) }
}

pub(crate) fn shard(shared: &Shared, rank: usize, members: Option<&[usize]>) -> Shard {
    let weights = shared.weights.as_ref().map(|all| match members {
        None => all.clone(),
        Some(members) => members.iter().map(|&device| all[device]).collect(),
    });
    Shard::new(rank, members.map_or(shared.device_count(), <[usize]>::len), weights)
}

pub(crate) type Wakers = Arc<[crate::sync::shim::Arc<EventCount>]>;

pub(crate) fn gang(shared: &Shared, all: Box<[usize]>, site: Site) -> Gang {
    let wakers = match all.len() == shared.device_count() && all.is_sorted() {
        true => shared.wakers.clone(),
        false => all.iter().map(|&device| shared.wakers[device].clone()).collect(),
    };
    gang_with(shared, all, wakers, site)
}

pub(crate) fn gang_with(shared: &Shared, all: Box<[usize]>, wakers: Wakers, site: Site) -> Gang {
    let alarm = shared.signals.get().map(|signals| signals.clone() as Arc<dyn Alarm>);
    let alarm = alarm.or_else(|| shared.world.as_ref()?.alarm());
    let mut gang = Gang::new(all, wakers).with_alarm(alarm);
    gang.site = site;
    gang.witness = Some(shared.recorder.clone());
    if (2..=broadcast::MOST).contains(&gang.count()) { gang.with_broadcasts() } else { gang }
}

pub(crate) fn queues<'s>(shared: &'s Shared, devices: &[usize]) -> Vec<&'s Queue<Rc<Worker>>> {
    devices.iter().map(|&device| &shared.queues[device]).collect()
}

#[track_caller]
pub(crate) fn members<'d>(shared: &Shared, op: &'static str, devices: &'d [usize]) -> Result<&'d [usize]> {
    for (i, &device) in devices.iter().enumerate() {
        invalid_if!(device >= shared.device_count(), op, "device {device} of {}", shared.device_count());
        invalid_if!(devices[..i].contains(&device), op, "device {device} is listed twice");
    }
    invalid_if!(devices.is_empty(), op, "an empty list of devices");
    Ok(devices)
}

#[derive(Clone, Copy)]
pub(crate) struct Begin<'n> {
    here: OpSite,
    /// The name that all processes give it: the devices begin it in the order in which those of other processes do.
    name: Option<&'n str>,
    until: Option<&'n CancelToken>,
}

impl<'n> Begin<'n> {
    pub(crate) fn at(op: &'static str, site: Site) -> Self {
        Begin { here: OpSite::outermost(op, site), name: None, until: None }
    }
}

setters! { Begin<'n> ['n];
    pub(crate) fn named(self, name: Option<&'n str>) { self.name = name; }

    pub(crate) fn until(self, until: Option<&'n CancelToken>) { self.until = until; }
}

/// When a closure fails, `tell` gets its error and a function that poisons the gang; it must call the function with the
/// error that peers are to see. Both return whether this was the gang's first failure. Other processes are told when
/// `tell` has returned. The calling thread runs `meanwhile`, which must not unwind. If a member's closure waits for
/// `meanwhile`, it must end that wait before it returns.
pub(crate) fn run<R: Send, E: From<Error> + Send>(
    shared: &Arc<Shared>,
    members: Option<&[usize]>,
    f: impl Fn(&Device, Shard) -> Result<R, E> + Sync,
    tell: impl Fn(&E, &dyn Fn(Error) -> bool) -> bool + Sync,
    meanwhile: impl FnOnce(&Watch<'_>),
    begin: Begin<'_>,
) -> Result<Vec<R>, E> {
    let OpSite { op, site } = begin.here;
    fail_if!(on_device_thread(), Error::NestedScope { op, site }.into());
    check_pid(shared)?;
    let all: Box<[usize]> = members.map_or_else(|| (0..shared.device_count()).collect(), Into::into);
    if is_held(shared, &all) {
        let why = "a task, or the closure that gives out tasks, would wait for devices that wait for it";
        return Err(Error::invalid_at(site, op, why).into());
    }
    let pass = shared.gate.enter().ok_or(Error::Closed)?;
    let slice = shared.handles[0].lane.slice(Category::Scope, op, Some(begin.here));
    let _slice = slice.note(|slice| slice.label = begin.name.map(Into::into));
    // Other processes have begun theirs, or will: there the gang begins and fails.
    if let Some(error) = begin.until.filter(|_| shared.world.is_none()).and_then(CancelToken::error) {
        return Err(error.into());
    }
    let queues = queues(shared, &all);
    let counts = begin.name.is_none() && all.len() == shared.device_count();
    let new = || NewScope { deadline: shared.deadline, progress: progress_of(shared, &all), site, counts };
    let world = shared.world.as_ref().map(|world| world.scope(new()));
    let mut gang = gang(shared, all.clone(), site);
    gang.outside = world.clone().map(|world| world as Arc<dyn Outside>);
    gang.can_be_cancelled = begin.until.is_some();
    let gang = Arc::new(gang);
    let outcomes: Vec<CachePadded<Slot<R, E>>> = all.iter().map(|_| Mutex::new(None).into()).collect();

    // A checker's knowledge of what has happened before goes along with the closure, and comes back with its outcome.
    let handle = &shared.handles[0];
    let begun = handle.hand_over();
    let ended: Vec<Mutex<Option<Box<Handover>>>> =
        begun.iter().flat_map(|_| &all[..]).map(|_| Mutex::new(None)).collect();
    let drained = Mutex::new(None);

    let place = OpSite::current();
    let body = |worker: &Rc<Worker>, rank: usize| {
        let part = Part::of(&gang, world.as_ref(), rank);
        let _here = place.map(OpSite::enter);
        worker.handle.take_over(begun.as_deref());
        let outcome = member::run(worker, &part, &f, shard(shared, rank, members), &tell, &drained);
        *outcomes[rank].lock() = Some(outcome);
        if let Some(ended) = ended.get(rank) {
            *ended.lock() = worker.handle.hand_over();
        }
    };
    let body: &Body<'_, Rc<Worker>> = &body;
    // Before the ticket is made: its end waits for members, and a scope that cannot begin has none.
    let window = match (&world, begin.name) {
        (Some(world), Some(name)) => Some(world.begin(name, &gang)?),
        _ => None,
    };
    let waiting = Waiting::new(body, all.len(), crate::sync::shim::Arc::new(EventCount::new()));
    let entering = shared.entering.enter();
    ORDER.enter(&waiting.ticket(), &queues, |rank| {
        if rank == 0 {
            gang.enter();
        }
        shared.gpu_order[all[rank]].issue(handle.pool)
    });
    drop((entering, window));
    let registered = begin.until.map(|token| token.register(&gang));
    let watch = Watch::new(shared, &gang, &waiting, begin.until);
    meanwhile(&watch);
    let withdrawn = watch.wait();
    drop(waiting);
    // All processes end the scope together: nobody goes on with half of it. What has failed elsewhere fails the gang,
    // and so poisons what it has borrowed, also if all members have come to their ends.
    if let Some(Err(error)) = world.as_ref().map(|world| world.end()) {
        gang.poison(all[0], error);
    }
    drop(registered);
    gang.end();
    for from in ended {
        handle.take_over(from.into_inner().as_deref());
    }

    let (mut results, mut others) = (Vec::with_capacity(all.len()), Vec::new());
    let mut root = None;
    for outcome in outcomes {
        match CachePadded::into_inner(outcome).into_inner() {
            Some(Outcome::Done(result)) => results.push(Contained::new(result)),
            Some(Outcome::Failed { error, first: true }) => root = Some(error),
            Some(Outcome::Failed { error, .. }) => others.push(Contained::new(error)),
            Some(Outcome::Panicked) | None => {}
        }
    }
    let outcome = match (root, gang.cause()) {
        (Some(error), _) => Err(error),
        (None, Some((_, cause))) => Err(cause.into()),
        (None, None) if withdrawn => Err(Error::Closed.into()),
        (None, None) => shared.pinned.audit("scope end").map_err(Into::into),
    };
    // Before values of the user are dropped: one may have the last reference to the pool, whose end waits for the pass.
    drop(pass);
    outcome.map(|()| results.into_iter().map(Contained::into_inner).collect())
}

thread_local! {
    static HELD: RefCell<Vec<Arc<Shared>>> = const { RefCell::new(Vec::new()) };
}

/// It may be the GPU of another pool's device.
fn is_held(shared: &Shared, devices: &[usize]) -> bool {
    // A drop of a thread-local value may start a scope when the list is gone, which is empty then.
    let held = HELD.try_with(|held| {
        let held = held.borrow();
        let mut waiting = held.iter().flat_map(|pool| &pool.gpu_order);
        waiting.any(|waiting| devices.iter().any(|&device| waiting.is_on_gpu_of(&shared.gpu_order[device])))
    });
    held.unwrap_or(false)
}

/// The code cannot start a scope on their GPUs.
#[cfg(feature = "tasks")]
pub(crate) fn holding<R>(shared: &Arc<Shared>, f: impl FnOnce() -> R) -> R {
    let _ = HELD.try_with(|held| held.borrow_mut().push(shared.clone()));
    let _held = crate::contain::Finally(|| drop(HELD.try_with(|held| held.borrow_mut().pop())));
    f()
}

/// For errors of this crate's type: peers see the error itself.
pub(crate) fn as_it_is(error: &Error, poison: &dyn Fn(Error) -> bool) -> bool {
    poison(error.clone())
}

/// Peers see the error's text, which is user code's. So peers learn about the failure first, and only a peer that reads
/// the text waits for it. It is made once, and only if this failure is the gang's first.
pub(crate) fn by_its_text<E: fmt::Display>(error: &E, poison: &dyn Fn(Error) -> bool) -> bool {
    let told = Arc::new(TextOfError::default());
    let first = poison(Error::Custom(told.clone()));
    if first {
        told.0.get_or_init(|| text_of(error, "the closure returned an error, whose text panicked"));
    }
    first
}

#[derive(Debug, Default)]
struct TextOfError(OnceCell<String>);

display_as!(TextOfError, |self, f| f.write_str(self.0.wait()));

impl std::error::Error for TextOfError {}

type Slot<R, E> = Mutex<Option<Outcome<R, E>>>;

/// It withdraws members that cannot start before the deadline, and logs members that make no progress.
pub(crate) struct Watch<'w> {
    shared: &'w Shared,
    pub(crate) gang: &'w Arc<Gang>,
    waiting: &'w Waiting<'w, Rc<Worker>>,
    until: Option<&'w CancelToken>,
    seen: RefCell<Seen>,
}

struct Seen {
    stall: StallTimer,
    progress: u64,
    told: bool,
    withdrawn: bool,
}

impl<'w> Watch<'w> {
    fn new(
        shared: &'w Shared,
        gang: &'w Arc<Gang>,
        waiting: &'w Waiting<'w, Rc<Worker>>,
        until: Option<&'w CancelToken>,
    ) -> Self {
        let stall = StallTimer::new(shared.deadline.saturating_add(TICK));
        let seen = Seen { stall, progress: progress(shared, gang), told: false, withdrawn: false };
        Watch { shared, gang, waiting, until, seen: RefCell::new(seen) }
    }

    fn wait(self) -> bool {
        let tick = self.seen.borrow().stall.tick(TICK);
        let tick = if self.until.is_some() { tick.min(CANCEL_TICK) } else { tick };
        let mut linger = self.shared.linger.min(LINGER);
        while !self.waiting.wait(Some(tick), mem::take(&mut linger)) {
            if self.until.is_some_and(CancelToken::is_cancelled) {
                self.withdraw();
            }
            self.look(true);
        }
        self.seen.into_inner().withdrawn
    }

    /// `busy`: members that have started have work.
    pub(crate) fn look(&self, busy: bool) {
        let (gang, now, mut seen) = (self.gang, progress(self.shared, self.gang), self.seen.borrow_mut());
        if now != seen.progress {
            (seen.progress, seen.told) = (now, false);
            seen.stall.renew();
            return;
        }
        if !seen.stall.is_over() {
            return;
        }
        let ranks = 0..gang.count();
        let queued: Vec<usize> = ranks.clone().filter(|&rank| self.waiting.is_queued(rank)).collect();
        if !queued.is_empty() {
            let missing: Vec<usize> = queued.iter().map(|&rank| gang.device(rank)).collect();
            let (device, waited) = (missing[0], seen.stall.waited());
            let (op, last_calls) = ("waiting for its turn", self.shared.last_calls(gang.members()));
            gang.poison(device, Error::Timeout { device, op, waited, missing, last_calls });
            drop(seen);
            self.withdraw();
        } else if busy && !seen.told {
            // A scope always waits for a closure that has started, but not silently.
            let missing: Vec<usize> = ranks.filter(|&r| !gang.has_left(r)).map(|r| gang.device(r)).collect();
            let (waited, started) = (seen.stall.waited(), gang.site);
            let last_calls = listed(&self.shared.last_calls(gang.members()));
            event!(
                warn, "scope_stalls", ?missing, ?waited, %started, %last_calls,
                "a scope waits for closures that make no progress"
            );
            if !gang.is_aborted() {
                let reason = format!("the scope of {started} waits for closures that make no progress");
                self.shared.recorder.write(&self.shared.recorder.look(&reason, Some(&missing)));
            }
            seen.told = true;
        }
    }
}

impl Watch<'_> {
    /// The gang has failed.
    fn withdraw(&self) {
        for rank in (0..self.gang.count()).filter(|&rank| self.waiting.withdraw(rank)) {
            self.gang.withdraw(rank);
            self.seen.borrow_mut().withdrawn = true;
        }
    }
}

fn progress(shared: &Shared, gang: &Gang) -> u64 {
    gang.members().iter().map(|&device| shared.gpu_order[device].progress.any()).sum()
}

fn progress_of(shared: &Shared, devices: &[usize]) -> Arc<dyn Fn() -> u64 + Send + Sync> {
    let all: Vec<_> = devices.iter().map(|&device| shared.gpu_order[device].progress.clone()).collect();
    Arc::new(move || all.iter().map(|progress| progress.any()).sum())
}
