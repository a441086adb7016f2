//! The one door for observers of a pool: checkers, injected faults, machines in virtual time.
//!
//! `gpu-pool-lab` implements the traits. A builder has at most one [`Observer`]; a process may [`install`] one for all
//! pools. It wraps the drivers of a pool as layers, says whether memory is audited, and decides the library's [fail
//! points](FailPoint). A layer that follows the order of all work answers
//! [`Driver::watch`](crate::driver::Driver::watch); the pool tells it what no driver call shows ([`HappensBefore`]).
//!
//! Invariant: without an observer each question costs one branch.

use crate::driver::{Address, DriverRef, RawEvent, RawStream, host::timing::Machine};
use crate::error::{
    Result, Site,
    misuse::{Allocation, Report},
};
use once_cell::sync::OnceCell;
use std::{any::Any, fmt, sync::Arc};

/// An observer of pools. A builder keeps it as settings; each pool has one of its own, from [`begin`](Self::begin).
pub trait Observer: Any + fmt::Debug + Send + Sync {
    /// The observer of one pool: with settings that the program has not made, from the environment. Errors name `site`.
    fn begin(&self, site: Site) -> Result<Arc<dyn Observer>>;

    /// Whether software GPUs look for kernels that write to arguments which they declare as read-only.
    fn watches_reads(&self) -> bool;

    /// Whether the pool has red zones behind its buffers, and checks them.
    fn audits_memory(&self) -> bool;

    /// The machine of software GPUs in virtual time, if the program names none.
    fn machine(&self, devices: usize) -> Option<Arc<dyn Machine>>;

    /// Puts this observer's layers around the devices of the pool.
    fn wrap(&self, drivers: Vec<DriverRef>) -> Vec<DriverRef>;

    /// The pool is built.
    fn built(&self);

    /// Whether the library fails at `point` of a device, by the device's ordinal in the pool.
    fn fails(&self, device: usize, point: FailPoint) -> bool;
}

/// A place in the library that an observer can make fail, to prove that the tests notice it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailPoint {
    /// A stream does not wait for a conflicting use on another stream.
    OrderDropped,
    /// An upload fills a staging piece while a copy may still read it.
    PieceFilledEarly,
    /// A download empties a staging piece before the copy into it is over.
    PieceEmptiedEarly,
    /// A staged copy fills a buffer that the other device may not have emptied: one event instead of two.
    OneStagingEvent,
    /// A step of a collective does not wait for the peer's previous step.
    StepSkipped,
    /// A collective begins to read a peer's buffer before the peer's stream has reached the collective.
    StartSkipped,
    /// An exchange fetches into a slot whose old piece may not have been reduced yet.
    SlotFilledEarly,
    /// An exchange writes a result into a slot whose old result may not have been sent yet.
    ResultMadeEarly,
    /// A freed block forgets the operations that may still use it.
    UsesForgotten,
    /// A stream's count of completed operations is higher than the awaited work.
    CompletedTooEarly,
    /// The host reads page-locked memory without waiting for the copy into it.
    HostDoesNotWait,
    /// A host thread reduces data that may not have been copied to the host yet.
    FoldedEarly,
    /// A chunk goes back to the driver while operations may still use it.
    ChunkReleasedEarly,
    /// A panic of the device's thread: before its entry may run.
    BeforeTurn,
    /// A panic: before the member's closure.
    BeforeMember,
    /// A panic: while the member's streams drain.
    InDrain,
    /// A panic: after all members have drained.
    InRecovery,
    /// A panic: at the end of the thread.
    AtEnd,
}

static INSTALLED: OnceCell<Arc<dyn Observer>> = OnceCell::new();

/// Makes `observer` that of all pools whose builders have none. False if there is one already.
pub fn install(observer: Arc<dyn Observer>) -> bool {
    INSTALLED.set(observer).is_ok()
}

/// The library's own unit tests run under the checker.
pub(crate) fn installed() -> Option<Arc<dyn Observer>> {
    #[cfg(test)]
    return Some(crate::lab::watching());
    #[cfg(not(test))]
    INSTALLED.get().cloned()
}

/// The happens-before order of a pool's work, kept by a layer around its drivers. The pool tells it what no call shows.
pub trait HappensBefore: Send + Sync {
    /// The same observation around the drivers of a new pool, which numbers its devices anew.
    fn anew(&self, drivers: Vec<DriverRef>) -> Vec<DriverRef>;

    /// The calling host thread's knowledge, to be given to another thread.
    fn release(&self) -> Token;

    /// Gives the calling host thread what another one has [released](Self::release).
    fn acquire(&self, token: &Token);

    /// The pool hands out a block of driver memory. Without `zeroed`, its bytes count as unwritten.
    fn allocated(&self, address: Address, bytes: usize, device: Option<usize>, zeroed: bool);

    /// The buffer that starts here, live or freed, for reports of other modules.
    fn buffer(&self, address: Address) -> Option<Allocation>;

    /// The block that starts here is free again.
    fn freed(&self, address: Address);

    /// The calling thread is about to access page-locked or managed memory. Errors: the mistake, if the thread has not
    /// waited for a device's operation on these bytes.
    fn host_access(&self, address: Address, bytes: usize, write: bool) -> Result<(), Arc<Report>>;

    /// Other code submits an operation to a stream by calls that do not pass the drivers. Errors: the mistake, if the
    /// operation is not ordered after another one.
    fn lent(
        &self,
        device: usize,
        stream: RawStream,
        address: Address,
        bytes: usize,
        write: bool,
    ) -> Result<(), Arc<Report>>;

    /// The calling thread is about to publish its knowledge of a stream's progress.
    fn publish(&self, device: usize, stream: RawStream);

    /// Reads a stream's progress word, for other threads to [`observe`](Self::observe). This thread gains no knowledge.
    fn publish_word(&self, device: usize, stream: RawStream, address: Address, read: &mut dyn FnMut() -> u64) -> u64;

    /// The calling thread has read a stream's progress.
    fn observe(&self, device: usize, stream: RawStream);

    /// The knowledge that a stream's progress would give the calling thread.
    fn observed(&self, device: usize, stream: RawStream) -> Token;

    /// The pool keeps an event for reuse: until its next record, a wait for it has no effect.
    fn forget_event(&self, device: usize, event: RawEvent);
}

/// One host thread's knowledge of completed work, to be given to another.
pub struct Token(pub Box<dyn Knowledge>);

/// The inside of a [`Token`]; its observer knows the type.
pub trait Knowledge: Any + Send + Sync {
    /// Adds the knowledge of another thread, from the same observer.
    fn join(&mut self, other: &dyn Knowledge);

    /// The same knowledge once more.
    fn copied(&self) -> Box<dyn Knowledge>;
}

impl Clone for Token {
    fn clone(&self) -> Self {
        Token(self.0.copied())
    }
}

impl Token {
    pub(crate) fn add(to: &mut Option<Box<Token>>, other: Option<Box<Token>>) {
        match (to, other) {
            (Some(known), Some(other)) => known.0.join(&*other.0),
            (known, Some(other)) => *known = Some(other),
            (_, None) => {}
        }
    }
}

/// A pool's access to the order of its work, for one device.
pub struct Watch {
    /// The order.
    pub checker: Arc<dyn HappensBefore>,
    /// The device's number in it. In a pool of survivors the ordinals of devices differ from it.
    pub device: usize,
    /// The device, for calls that the observer must not see.
    pub unwatched: DriverRef,
}

impl Watch {
    /// That of the layers around a device; `None` if no layer follows the order of work.
    pub(crate) fn of(driver: &DriverRef) -> Option<Watch> {
        let mut layer = driver;
        loop {
            if let Some(watch) = layer.watch() {
                return Some(watch);
            }
            layer = layer.inner()?;
        }
    }
}
