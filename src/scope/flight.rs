//! Gangs of jobs: no caller waits for them. Invariant: after [`fly`] failed, no device stream has work in flight.

use super::{
    as_it_is,
    member::{self, Part},
    shard,
};
use crate::error::{Error, Result};
use crate::thread::{streams::PooledStream, worker::Worker};
use crate::{Device, Event, driver::observe::Token, gang::Gang, memory::InGang, panics};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{rc::Rc, sync::Arc};

pub(crate) struct Flight {
    gang: Arc<Gang>,
    /// The ends of its work: one for each stream that it has used. None once it is known to be over.
    ends: SmallVec<[Event; 1]>,
    /// Keeps its stream from being handed out.
    _stream: Option<PooledStream>,
}

impl Flight {
    pub(crate) fn is_over(&mut self) -> Result<bool> {
        while let Some(end) = self.ends.last() {
            if !end.is_complete()? {
                return Ok(false);
            }
            self.ends.pop();
        }
        Ok(true)
    }

    /// Blocks until its work is over. An error if it makes no progress until the deadline.
    pub(crate) fn wait(&self, worker: &Worker) -> Result<()> {
        self.ends.iter().try_for_each(|end| end.wait_host("job", worker.shared.deadline, &|| false))
    }

    pub(crate) fn land(self, worker: &Worker, how: Result<()>) -> Result<()> {
        let device = worker.handle.device;
        if let Err(error) = how {
            self.gang.poison(device, error);
        }
        self.gang.drained();
        let Some((_, cause)) = self.gang.cause() else { return Ok(()) };
        worker.failures.borrow_mut().push(self.gang.id);
        Err(cause)
    }
}

/// Its work may still be in flight on return. With `own_stream` the token works on a stream that no other flight has.
pub(crate) fn fly(
    worker: &Rc<Worker>,
    gang: &Arc<Gang>,
    own_stream: bool,
    f: impl FnOnce(&Device) -> Result<()>,
) -> Result<Flight> {
    let device = worker.handle.device;
    let in_gang = InGang::enter(gang.word());
    let flown = panics::catch(device, || {
        let _entry = member::begin(worker, gang)?;
        let before = worker.submitted();
        let stream = if own_stream { Some(worker.stream(0)?) } else { None };
        let mut dev = Device::new(worker, gang, 0, None);
        if let Some(stream) = &stream {
            dev.stream = stream.core.clone();
        }
        let returned = panics::catch(device, || f(&dev)).and_then(|returned| returned);
        gang.last_call(0, dev.session.last_call.get());
        returned?;
        gang.check()?;
        Ok(Flight { gang: gang.clone(), ends: worker.record_new("job", &before)?, _stream: stream })
    });
    gang.leave(0);
    let error = match flown.and_then(|flown| flown) {
        Ok(flight) => return Ok(flight),
        Err(error) => error,
    };
    gang.poison(device, error);
    let known: Mutex<Option<Box<Token>>> = Mutex::new(None);
    if let Err(error) = panics::catch(device, || member::drain(worker, gang, &known, false)).and_then(|drained| drained)
        && !matches!(error, Error::Deadlock { .. } | Error::Misuse { .. })
    {
        gang.stuck();
    }
    gang.drained();
    if let Err(error) = panics::catch(device, || member::end(worker, gang, in_gang, &known)) {
        worker.defer_error(error);
    }
    Err(gang.cause().map_or(Error::Closed, |(_, cause)| cause))
}

pub(crate) fn join(
    worker: &Rc<Worker>,
    gang: &Arc<Gang>,
    rank: usize,
    known: &Mutex<Option<Box<Token>>>,
    f: impl Fn(&Device) -> Result<()>,
) {
    let part = Part::of(gang, None, rank);
    let shard = shard(&worker.shared, rank, Some(gang.members()));
    // The gang has the cause if it has failed.
    let _ = member::run(worker, &part, &|dev: &Device, _| f(dev), shard, &as_it_is, known);
}

pub(crate) fn rest(worker: &Worker) -> Result<()> {
    let mut cache = worker.cache.borrow_mut();
    cache.begin_audit();
    drop(cache);
    worker.drain()?;
    worker.end_scope();
    let mut cache = worker.cache.borrow_mut();
    let audited = cache.audit("jobs");
    cache.let_go();
    cache.publish_stats();
    audited
}
