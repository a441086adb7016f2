//! The checker: a driver around a driver that keeps account of who touched what, and which edges order it.
//!
//! # Contract
//!
//! [`wrap`] puts one [`Checker`] around the devices of a pool, software GPUs and CUDA devices alike. Every call goes
//! through to the driver; one that is a mistake is refused instead, with a [`Report`] in its
//! [`Fault`](super::Fault::report): nothing is submitted, and the account is as if it had not been made. What it finds
//! is listed at [`Kind`].
//!
//! Two operations are ordered if they are on one stream; by an event, recorded after one and waited for before the
//! other; by a flag that one's stream raises and the other's waits for ([`write_value`](super::Driver::write_value));
//! or by a host thread that has waited for one and submits the other. Each host thread knows only what it has waited
//! for itself, or has been told ([`Checker::release`], [`Checker::acquire`]). A host function
//! ([`launch_host`](super::Driver::launch_host)) knows while it runs what comes before it on its stream.
//!
//! Operations of a stream that captures touch nothing; each launch of the graph counts as all of them, in their order,
//! and is refused as a whole.
//!
//! [`Check::Memory`] adds what no order can tell: the pool's own audit of what lies behind its buffers, whose finds are
//! [`Report`]s like the others.
//!
//! What it does not see:
//!
//! * a flag that the host writes with a store of its own. A wait for it is taken to be ended by a thread that knew what
//!   all threads together know when one of them learns that the wait is over; until then, conflicts that the flag might
//!   order are not reported;
//! * what is left of work on a lost device: its memory may be freed;
//! * which word a spinning kernel ([`Kernel::resumable`](crate::Kernel::resumable)) waits for: that it reads what
//!   another operation writes is a race to the checker, so such programs run without it;
//! * an access by the host and then one by a device that another thread submits, if nothing orders the two threads:
//!   Rust's borrows do where the memory is the library's;
//! * what a kernel does beyond its declared arguments, and which bytes of an argument it really touches: `&mut` counts
//!   as a write of all of it;
//! * edges that the host makes between its own threads, as above.
//!
//! # Mechanism
//!
//! Vector clocks (`clock`) for streams and host threads, and a map of who touched which bytes last (`shadow`).
//! Everything happens when an operation is submitted, under one lock that is held while the call goes through (`judge`,
//! `state`), so that two threads cannot slip by each other. Calls that wait, allocate or free are made without the
//! lock; one that submits and blocks, as CUDA's do when a stream's queue is full, holds up the submissions of all other
//! threads.

mod calls;
mod checked;
mod clock;
mod deferred;
mod flags;
mod heap;
mod host;
mod judge;
#[cfg(test)]
mod model;
#[cfg(test)]
mod model_flags;
mod note;
#[cfg(test)]
mod pool_tests;
mod ranges;
mod replay;
mod shadow;
mod state;

pub use crate::error::{
    misuse::{Allocation, Deed, Kind, Report},
    op_site::annotate,
};
pub use host::Token;

pub(crate) use crate::error::op_site::{OpGuard, OpSite};

use super::{Address, Driver, DriverRef, RawEvent, RawStream};
use checked::Checked;
use judge::Operand;
use parking_lot::Mutex;
use shadow::Manner;
use state::State;
use std::{
    any::Any,
    sync::{Arc, Weak},
};

/// What a pool's checker looks for; see [`Builder::check`](crate::Builder::check).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Check {
    /// Nothing; costs nothing.
    #[default]
    Off,
    /// Accesses that no stream, event or wait of the host orders, and their kin.
    Races,
    /// The same, and writes past the end of a buffer. The pool leaves a red zone of 256 bytes or more behind every
    /// buffer and looks at it when the buffer has been dropped; and it fills what was dropped with the byte `0xCB`, so
    /// that whoever reads it all the same finds no plausible numbers. It tells what was overwritten
    /// ([`Kind::OutOfBounds`]) when the scope ends, or when the pool is closed; an operation is not refused, since what
    /// a kernel does with its arguments cannot be known before it has run.
    ///
    /// A buffer counts as dropped when its device's thread has seen it. Buffers that outlive their pool, and managed
    /// memory ([`UnifiedBuffer`](crate::UnifiedBuffer)), are not looked at; nor, where operations run one at a time,
    /// buffers that other devices have used or other threads have dropped, since that would depend on time. Costs,
    /// besides what `Races` does, the memory, two fills and a copy for each buffer.
    Memory,
}

/// Puts one checker around all of these devices. Those that have one already stay as they are.
///
/// ```
/// # use gpu_pool::driver::{check::{self, Kind}, host};
/// let gpus = check::wrap(host::machine(&[Default::default()]));
/// let gpu = &gpus[0];
/// let (x, s, t) = (gpu.mem_alloc(64)?, gpu.stream_create(0)?, gpu.stream_create(0)?);
/// // SAFETY: the memory is live until both streams are idle.
/// let refused = unsafe {
///     gpu.fill_u8(x, 1, 64, s)?;
///     gpu.fill_u8(x, 2, 64, t).unwrap_err()
/// };
/// assert_eq!(refused.report.unwrap().kind, Kind::Race);
/// # gpu.stream_wait_idle(s, std::time::Duration::MAX)?;
/// # unsafe { gpu.mem_free(x)? };
/// # Ok::<(), gpu_pool::driver::Fault>(())
/// ```
pub fn wrap(drivers: Vec<DriverRef>) -> Vec<DriverRef> {
    let checker = Checker::new(drivers.len());
    let wrap = |(index, inner): (usize, DriverRef)| match inner.checker() {
        Some(_) => inner,
        None => Arc::new(Checked { inner, index, checker: checker.clone() }),
    };
    drivers.into_iter().enumerate().map(wrap).collect()
}

impl dyn Driver {
    /// The checker that keeps account of this device's work, and the device's number there; see [`wrap`].
    pub fn checker(&self) -> Option<(&Arc<Checker>, usize)> {
        checked(self).map(|checked| (&checked.checker, checked.index))
    }
}

/// The checker among the layers around a device.
fn checked<'a>(mut driver: &'a (dyn Driver + 'static)) -> Option<&'a Checked> {
    loop {
        if let Some(checked) = (driver as &dyn Any).downcast_ref() {
            return Some(checked);
        }
        driver = &**driver.inner()?;
    }
}

/// What a pool keeps of its checker, for one device.
pub(crate) struct Watch {
    pub(crate) checker: Arc<Checker>,
    /// The device's number there. A pool of survivors has other numbers.
    pub(crate) device: usize,
    /// The device, for calls that the checker is not to see.
    pub(crate) unwatched: DriverRef,
}

impl Watch {
    /// None where no checker is.
    pub(crate) fn of(driver: &DriverRef) -> Option<Watch> {
        let Checked { inner, index, checker } = checked(&**driver)?;
        Some(Watch { checker: checker.clone(), device: *index, unwatched: inner.clone() })
    }
}

/// What the devices of one [`wrap`] have done.
pub struct Checker {
    state: Mutex<State>,
    me: Weak<Checker>,
}

impl Checker {
    fn new(devices: usize) -> Arc<Self> {
        let mut state = State::new(devices);
        // The seat of threads that are ending.
        state.host_enters();
        Arc::new_cyclic(|me| Checker { state: Mutex::new(state), me: me.clone() })
    }

    /// A pool hands out a block of memory that it has from the driver. Without `zeroed`, its bytes count as unwritten.
    pub(crate) fn allocated(&self, address: Address, bytes: usize, device: Option<usize>, zeroed: bool) {
        self.state.lock().heap.hand_out(address..address + bytes as u64, device, zeroed);
    }

    /// The buffer that starts here, or was the last to: for reports of others.
    pub(crate) fn buffer(&self, address: Address) -> Option<Allocation> {
        self.state.lock().heap.block(address).map(note::allocation)
    }

    /// The block that starts here is at rest again.
    pub(crate) fn freed(&self, address: Address) {
        self.state.lock().heap.take_back(address);
    }

    /// The calling thread is about to touch page-locked or managed memory. The crate's own buffers say so themselves;
    /// those who use drivers without a pool do it here.
    ///
    /// # Errors
    /// What is wrong with it: a device's operation on these bytes that the thread has not waited for
    /// ([`Kind::HostAccess`]), memory that was freed.
    pub fn host_access(&self, address: Address, bytes: usize, write: bool) -> Result<(), Arc<Report>> {
        let (mut state, by) = self.enter();
        let manner = if write { Manner::WRITE } else { Manner::READ };
        state.host_access(by, Operand { address, bytes, manner })
    }

    /// Somebody else submits an operation to a stream, by calls that do not come this way.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn lent(
        &self,
        device: usize,
        stream: RawStream,
        address: Address,
        bytes: usize,
        write: bool,
    ) -> Result<(), Arc<Report>> {
        let (mut state, by) = self.enter();
        let manner = if write { Manner::WRITE } else { Manner::READ };
        let call = note::Call::new("foreign work", "by a foreign call");
        state.lend(by, (device, stream.0), call, Operand { address, bytes, manner })
    }

    /// The calling thread is about to tell others how far a stream is, as far as it knows.
    pub(crate) fn publish(&self, device: usize, stream: RawStream) {
        let (mut state, by) = self.enter();
        let clock = state.host(by).clock.clone();
        if let Some(stream) = state.streams.get_mut(&(device, stream.0)) {
            stream.done.join(&clock);
        }
    }

    /// The calling thread reads from a stream's own word how far it is, for others to [`observe`](Self::observe). The
    /// thread itself learns nothing: it may have been tidying up only, and what it happens to see depends on time.
    pub(crate) fn publish_word(
        &self,
        device: usize,
        stream: RawStream,
        address: Address,
        read: impl FnOnce() -> u64,
    ) -> u64 {
        let mut state = self.state.lock();
        let State { flags, streams, .. } = &mut *state;
        // Under the lock, so that whoever wrote the value is in the account.
        let value = read();
        if let (Some(clock), Some(stream)) = (flags.seen(address, value), streams.get_mut(&(device, stream.0))) {
            stream.done.join(&clock);
        }
        value
    }

    /// The calling thread has read how far a stream is.
    pub(crate) fn observe(&self, device: usize, stream: RawStream) {
        let (mut state, by) = self.enter();
        if let Some(done) = state.streams.get(&(device, stream.0)).map(|stream| stream.done.clone()) {
            state.learn(by, &done);
        }
    }

    /// What the calling thread would know if it read how far a stream is.
    pub(crate) fn observed(&self, device: usize, stream: RawStream) -> Token {
        let state = self.state.lock();
        Token::new(state.streams.get(&(device, stream.0)).map(|stream| stream.done.clone()).unwrap_or_default())
    }

    /// A pool keeps an event for another use: until it is recorded again there is nothing to wait for.
    pub(crate) fn forget_event(&self, device: usize, event: RawEvent) {
        if let Some(event) = self.state.lock().events.get_mut(&(device, event.0)) {
            event.record = None;
        }
    }
}
