//! How a scope runs: a gang of device threads, one closure, one outcome.

use crate::{
    Device, Shard,
    collective::{board, headlines::Headlines, spin},
    driver::check::Token,
    error::{Error, Result},
    memory::{block::InGang, link::Handover},
    patience::Patience,
    runtime::{
        dispatch::{Order, Queue},
        gang::{Alarm, Gang},
        job::{Body, Waiting},
        panics,
        worker::{Shared, Worker, on_device_thread},
    },
    sync::EventCount,
};
use crossbeam::utils::CachePadded;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

/// The one order of gangs in this process.
static ORDER: Lazy<Order> = Lazy::new(Order::new);
/// How often a waiting scope looks after its members, at least; and by how much it has more patience than they. What they wait for
/// ends first then, or fails with an error that says more.
const TICK: Duration = Duration::from_millis(500);

pub(crate) fn check_pid(shared: &Shared) -> Result<()> {
    let (built, now) = (shared.pid, std::process::id());
    if built == now { Ok(()) } else { Err(Error::Forked { built, now }) }
}

pub(crate) fn shard(shared: &Shared, rank: usize, members: Option<&[usize]>) -> Shard {
    let weights = shared.weights.as_ref().map(|all| match members {
        None => all.clone(),
        Some(members) => members.iter().map(|&device| all[device]).collect(),
    });
    Shard::new(rank, members.map_or(shared.devices(), <[usize]>::len), weights)
}

/// Runs a scope. `cause` says what peers are told of the caller's error.
pub(crate) fn run<F, R, E>(
    shared: &Arc<Shared>,
    members: Option<&[usize]>,
    f: F,
    cause: impl Fn(&E) -> Error + Sync,
) -> Result<Vec<R>, E>
where
    F: Fn(&Device, Shard) -> Result<R, E> + Sync,
    R: Send,
    E: From<Error> + Send,
{
    if on_device_thread() {
        return Err(Error::NestedScope { op: "run" }.into());
    }
    check_pid(shared)?;
    let _pass = shared.gate.enter().ok_or(Error::Closed)?;
    let all: Box<[usize]> = members.map_or_else(|| (0..shared.devices()).collect(), Into::into);
    let queues: Vec<&Queue<Rc<Worker>>> = all.iter().map(|&device| &shared.queues[device]).collect();
    let wakers = match members {
        None => shared.wakers.clone(),
        Some(members) => members.iter().map(|&device| shared.wakers[device].clone()).collect(),
    };
    let alarm = shared.signals.get().map(|signals| signals.clone() as Arc<dyn Alarm>);
    let gang = Gang::new(all.clone(), wakers).with_alarm(alarm);
    let gang = Arc::new(if Headlines::are_for(gang.count()) { gang.with_headlines() } else { gang });
    let outcomes: Vec<CachePadded<Slot<R, E>>> = all.iter().map(|_| Mutex::new(None).into()).collect();

    // What threads know goes with the closure and comes back with its outcome.
    let link = &shared.links[0];
    let begun = link.hand_over();
    let ended: Vec<Mutex<Option<Box<Handover>>>> =
        begun.iter().flat_map(|_| &all[..]).map(|_| Mutex::new(None)).collect();
    let drained = Mutex::new(None);

    let body = |worker: &Rc<Worker>, rank: usize| {
        worker.link.take_over(begun.as_deref());
        let outcome = member(worker, &gang, rank, &f, shard(shared, rank, members), &cause, &drained);
        *outcomes[rank].lock() = Some(outcome);
        if let Some(ended) = ended.get(rank) {
            *ended.lock() = worker.link.hand_over();
        }
    };
    let body: &Body<'_, Rc<Worker>> = &body;
    let waiting = Waiting::new(body, all.len(), crate::sync::shim::Arc::new(EventCount::new()));
    let door = shared.door.enter();
    ORDER.enter(&waiting.ticket(), &queues, |rank| {
        if rank == 0 {
            gang.enter();
        }
        shared.turns[all[rank]].issue(link.pool)
    });
    drop(door);
    let withdrawn = wait(shared, &gang, &waiting);
    drop(waiting);
    for from in ended {
        link.take_over(from.into_inner().as_deref());
    }

    let mut results = Vec::with_capacity(all.len());
    let mut root = None;
    for outcome in outcomes {
        match CachePadded::into_inner(outcome).into_inner() {
            Some(Outcome::Done(result)) => results.push(result),
            Some(Outcome::Failed { error, first: true }) => root = Some(error),
            // A peer of the one that failed, one that panicked, or one that was withdrawn.
            Some(Outcome::Failed { .. } | Outcome::Panicked) | None => {}
        }
    }
    match (root, gang.cause()) {
        (Some(error), _) => Err(error),
        (None, Some((_, cause))) => Err(cause.into()),
        (None, None) if withdrawn => Err(Error::Closed.into()),
        (None, None) => shared.pinned.audit("scope end").map(|()| results).map_err(E::from),
    }
}

/// Where a member leaves what its closure came to.
type Slot<R, E> = Mutex<Option<Outcome<R, E>>>;

/// What a member's closure came to. Users' values in it are converted and dropped by the caller, never on the device
/// thread: that code may panic, and the peers are waiting.
enum Outcome<R, E> {
    Done(R),
    Failed { error: E, first: bool },
    Panicked,
}

/// One member's part: the closure, then its streams, then the others if something failed.
fn member<F, R, E>(
    worker: &Rc<Worker>,
    gang: &Arc<Gang>,
    rank: usize,
    f: &F,
    shard: Shard,
    cause: &impl Fn(&E) -> Error,
    known: &Mutex<Option<Box<Token>>>,
) -> Outcome<R, E>
where
    F: Fn(&Device, Shard) -> Result<R, E>,
{
    let device = worker.link.device;
    worker.progress();
    // A gang that failed for one of its members only has not been cleared away.
    board::forget(worker, gang.place() - 1);
    spin::make_up_later(worker);
    if let Some(signals) = worker.shared.signals.get() {
        signals.enter(device, gang);
    }
    let in_gang = InGang::enter(gang.word());
    let returned = catch_unwind(AssertUnwindSafe(|| f(&Device::new(worker, gang, rank), shard)));
    let outcome = match returned {
        Ok(Ok(result)) => Outcome::Done(result),
        Ok(Err(error)) => Outcome::Failed { first: gang.poison(device, cause(&error)), error },
        Err(payload) => {
            let error = panics::error(device, &*payload);
            // Before the peers hear of it: the drop runs the user's code.
            panics::contain(|| drop(payload));
            gang.poison(device, error);
            Outcome::Panicked
        }
    };
    gang.leave(rank);
    worker.cache.borrow_mut().begin_audit();
    let drained = worker.drain().inspect(|()| notice_given_up(worker, gang));
    if let Err(error) = drained.and_then(|()| worker.cache.borrow_mut().audit("scope end")) {
        // The work failed behind the closure's back; what it returned is worth nothing. Operations that were given up, or
        // were found out after they had run, are over nevertheless.
        if !matches!(error, Error::Deadlock { .. } | Error::Misuse { .. }) {
            gang.stuck();
        }
        gang.poison(device, error);
    }
    if let Some(token) = worker.link.release() {
        Token::add(&mut known.lock(), Some(token));
    }
    gang.drained();
    if gang.is_aborted() {
        worker.failures.set(worker.failures.get() + 1);
        let recovering = gang.clone();
        worker.shared.presence[device].while_so(move || !recovering.is_recovered(), || gang.recover());
        // With a checker: what the others have waited for is over for this thread, too, as the suspects below must be.
        worker.link.acquire(known.lock().as_deref());
        board::forget(worker, gang.place());
        if !gang.is_stuck() && spin::make_up(worker).is_err() {
            // The device is lost, or its stream is; the next operation says so.
            gang.stuck();
        }
        for block in worker.suspects.take() {
            if gang.is_stuck() {
                std::mem::forget(block);
            }
        }
        in_gang.unpark(gang.is_stuck());
    }
    worker.cache.borrow_mut().show();
    outcome
}

/// Fails the gang if a collective's kernel, on whichever of its devices, has waited for a peer until the deadline, and then gone on
/// without it. What comes after it there, and what others get from there, may be made of what it left.
pub(crate) fn notice_given_up(worker: &Worker, gang: &Gang) {
    let Some(signals) = worker.shared.signals.get() else { return };
    if gang.is_aborted() {
        return;
    }
    let given_up = |&device: &usize| Some((device, signals.missing(device, gang.place())?));
    if let Some((device, missing)) = gang.members().iter().find_map(given_up) {
        let waited = worker.shared.deadline;
        gang.poison(device, Error::Timeout { device, op: "collective", waited, missing: vec![missing] });
    }
}

/// Waits for all members; looks after them meanwhile. Whether anything was withdrawn.
fn wait(shared: &Shared, gang: &Gang, waiting: &Waiting<'_, Rc<Worker>>) -> bool {
    let progress = || gang.members().iter().map(|&device| shared.turns[device].life.any_progress()).sum::<u64>();
    let (mut patience, mut seen, mut told) = (Patience::new(shared.deadline.saturating_add(TICK)), progress(), false);
    let mut withdrawn = false;
    while !waiting.wait(Some(patience.tick(TICK))) {
        let now = progress();
        if now != seen {
            (seen, told) = (now, false);
            patience.renew();
            continue;
        }
        if !patience.is_over() {
            continue;
        }
        let ranks = 0..gang.count();
        let queued: Vec<usize> = ranks.clone().filter(|&rank| waiting.is_queued(rank)).collect();
        if !queued.is_empty() {
            let missing: Vec<usize> = queued.iter().map(|&rank| gang.device(rank)).collect();
            let error =
                Error::Timeout { device: missing[0], op: "waiting for its turn", waited: patience.waited(), missing };
            gang.poison(gang.device(queued[0]), error);
            for rank in queued {
                if waiting.withdraw(rank) {
                    gang.withdraw(rank);
                    withdrawn = true;
                }
            }
        } else if !told {
            // A closure that has started is always waited for, but not silently.
            let missing: Vec<usize> = ranks.filter(|&r| !gang.has_left(r)).map(|r| gang.device(r)).collect();
            tracing::warn!(?missing, waited = ?patience.waited(), "a scope waits for closures that make no progress");
            told = true;
        }
    }
    withdrawn
}
