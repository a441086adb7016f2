//! A member's side of a scope, on its device thread: the closure, the drain of its streams, the recovery. Invariant: a
//! member leaves its gang and reports its drain exactly once, also after a panic.

use crate::driver::{FailPoint, observe::Token};
use crate::error::{Error, Result, op_site::OpSite};
use crate::memory::{
    InGang,
    calls::{Entry, Kind},
};
use crate::{
    Device, Shard, collective::barrier, fabric::ProcessScope, gang::Gang, panics, thread::worker::Worker,
    timeline::Category,
};
use parking_lot::Mutex;
use std::{cell::Cell, rc::Rc, sync::Arc};

/// The outcome of a member's closure. The caller converts and drops the user's values in it, never the device thread:
/// that code may panic while peers wait.
pub(super) enum Outcome<R, E> {
    Done(R),
    Failed { error: E, first: bool },
    Panicked,
}

/// A member's part in its gang. Peers wait until the member has left and drained, so the drop does both after a panic.
pub(super) struct Part<'g> {
    gang: &'g Arc<Gang>,
    world: Option<&'g Arc<dyn ProcessScope>>,
    rank: usize,
    left: Cell<bool>,
    drained: Cell<bool>,
}

impl<'g> Part<'g> {
    pub fn of(gang: &'g Arc<Gang>, world: Option<&'g Arc<dyn ProcessScope>>, rank: usize) -> Self {
        Part { gang, world, rank, left: Cell::new(false), drained: Cell::new(false) }
    }

    fn leave(&self) {
        if !self.left.replace(true) {
            self.gang.leave(self.rank);
        }
    }

    fn drained(&self) {
        if !self.drained.replace(true) {
            self.gang.drained();
        }
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        if !self.drained.get() {
            // A panic. It is not known what this member's streams do, nor whether its closure has run.
            let device = self.gang.device(self.rank);
            let (message, place) =
                ("the device's thread, outside of the closure".to_owned(), panics::UNKNOWN.to_owned());
            self.gang.stuck();
            self.gang.poison(device, Error::Panicked { device, message, place });
        }
        self.leave();
        self.drained();
    }
}

/// A member on its device thread: the closure, then the drain of its streams, then the recovery if the gang has failed.
pub(super) fn run<F, R, E>(
    worker: &Rc<Worker>,
    part: &Part<'_>,
    f: &F,
    shard: Shard,
    tell: &impl Fn(&E, &dyn Fn(Error) -> bool) -> bool,
    known: &Mutex<Option<Box<Token>>>,
) -> Outcome<R, E>
where
    F: Fn(&Device, Shard) -> Result<R, E>,
{
    let (device, gang) = (worker.handle.device, part.gang);
    let in_gang = InGang::enter(gang.word());
    let begun = panics::catch(device, || begin(worker, gang)).and_then(|begun| begun);
    // Then the deadline has passed for these streams, or the gang has failed.
    let waited = begun.is_err() && worker.barrier_state.is_spoiled();
    let begun = begun.and_then(|entry| worker.take_deferred_error().map(|()| entry));
    let returned = begun.and_then(|_entry| {
        let dev = Device::new(worker, gang, part.rank, part.world);
        let slice =
            worker.handle.lane.slice(Category::Closure, "closure", Some(OpSite { op: "scope", site: gang.site }));
        let returned = panics::catch(device, || f(&dev, shard));
        drop(slice);
        gang.last_call(part.rank, dev.session.last_call.get());
        returned
    });
    let outcome = match returned {
        Ok(Ok(result)) => Outcome::Done(result),
        Ok(Err(error)) => {
            let first = tell(&error, &|cause| gang.fail(device, cause));
            if first {
                gang.tell_outside();
            }
            Outcome::Failed { error, first }
        }
        Err(error) => {
            gang.poison(device, error);
            Outcome::Panicked
        }
    };
    part.leave();
    if let Err(error) = panics::catch(device, || drain(worker, gang, known, waited)).and_then(|drained| drained) {
        // The work has failed after the closure returned, so the closure's result is worth nothing. After these two
        // errors the operations have ended nevertheless: they were cancelled, or were found wrong after they had run.
        if !matches!(error, Error::Deadlock { .. } | Error::Misuse { .. }) {
            gang.stuck();
        }
        gang.poison(device, error);
    }
    part.drained();
    // The gang may have ended already, so it is too late to fail it.
    if let Err(error) = panics::catch(device, || end(worker, gang, in_gang, known)) {
        worker.defer_error(error);
    }
    outcome
}

pub(super) fn begin<'w>(worker: &'w Worker, gang: &Arc<Gang>) -> Result<Entry<'w>> {
    worker.handle.strike(FailPoint::BeforeMember);
    worker.handle.progress.advance();
    let entry = worker.calls.begin(Kind::Scope, "scope begin", gang.site, 0);
    // An earlier gang may have failed on another member only, so that this member has not forgotten its messages.
    forget(worker, gang.place() - 1);
    barrier::resync_later(worker, gang)?;
    if let Some(signals) = worker.shared.signals.get() {
        signals.enter(worker.handle.device, gang);
    }
    Ok(entry)
}

/// After the closure: drains this member's streams. If the scope has `waited` for them in vain, it only looks.
pub(super) fn drain(worker: &Rc<Worker>, gang: &Gang, known: &Mutex<Option<Box<Token>>>, waited: bool) -> Result<()> {
    worker.cache.borrow_mut().begin_audit();
    let drained = if waited { worker.wait_idle("scope end", || true) } else { worker.drain() };
    let drained = drained.inspect(|()| worker.end_scope()).inspect(|()| worker.shared.check_kernels(gang));
    worker.handle.strike(FailPoint::InDrain);
    let drained = drained.and_then(|()| worker.cache.borrow_mut().audit("scope end"));
    if let Some(token) = worker.handle.release() {
        Token::add(&mut known.lock(), Some(token));
    }
    drained
}

fn forget(worker: &Worker, upto: u64) {
    let left = worker.endpoint.borrow_mut().leftovers(upto);
    drop(left);
}

/// After the drain: if the gang has failed, waits for all members and recovers.
pub(super) fn end(worker: &Rc<Worker>, gang: &Arc<Gang>, in_gang: InGang<'_>, known: &Mutex<Option<Box<Token>>>) {
    worker.handle.strike(FailPoint::InRecovery);
    if gang.is_aborted() {
        worker.failures.borrow_mut().push(gang.id);
        let recovering = gang.clone();
        let quiescence = &worker.shared.quiescence[worker.handle.device];
        quiescence.while_blocked(move || !recovering.is_recovered(), || gang.recover());
        // With a checker: the work that the other members have waited for is over for this thread, too, as the
        // quarantine below must be.
        worker.handle.acquire(known.lock().as_deref());
        forget(worker, gang.place());
        // An earlier gang's work has ended no sooner than this gang's.
        let late = worker.barrier_state.is_spoiled();
        worker.barrier_state.set_spoiled(worker.shared.signals.get().is_some());
        // If this fails, it is to be done before the next scope. That is this member's affair: the gang has recovered.
        let stuck = gang.is_stuck() || barrier::resync(worker, gang, late).is_err();
        for block in worker.quarantine.take() {
            if stuck {
                block.abandon();
            }
        }
        in_gang.unpark(stuck);
    }
    let mut cache = worker.cache.borrow_mut();
    cache.let_go();
    cache.publish_stats();
}
