//! The checker: a layer around a driver that records all accesses to memory and the edges that order them.
//!
//! # Contract
//!
//! [`wrap`] puts one [`Checker`] around the devices of a pool, for software GPUs and CUDA devices alike. Every call is
//! forwarded to the driver, except for mistakes: these are refused with a [`Report`] in the `Fault`. A refused call
//! submits nothing and does not change the account. [`Kind`] lists the mistakes that the checker finds.
//!
//! Two operations are ordered if one of these holds: they are on one stream; an event is recorded after the first and
//! awaited before the second; the first one's stream raises a flag that the second one's stream waits for
//! (`write_value`); a host thread has waited for the first and submits the second. Each host thread knows only the work
//! that it has waited for, and the knowledge that other threads have given it (`release`, `acquire`). A running host
//! function (`launch_host`) knows the earlier work of its stream.
//!
//! Operations of a capturing stream touch no memory. Each launch of the graph counts as all of its operations, in their
//! order, and is refused as a whole.
//!
//! [`Check::Memory`] adds mistakes that are independent of order: the pool audits the bytes behind its buffers, and
//! reports its findings as [`Report`]s, too.
//!
//! Limits of the checker:
//!
//! * It does not see a flag that the host writes with a store of its own. It assumes that such a wait is ended by a
//!   thread with the knowledge that all threads together have when one of them learns that the wait is over. Until
//!   then, it does not report conflicts that the flag might order.
//! * It does not see unfinished work on a lost device: that device's memory may be freed.
//! * It does not know the word that a user's spinning kernel ([`Kernel::resumable`](gpu_pool::Kernel::resumable)) waits
//!   for. Such a kernel reads words that another operation writes, which is a race for the checker, so such programs
//!   run without it.
//! * It does not see an access by the host that is followed by an access of a device which another thread submits, if
//!   no edge orders the two threads. For the library's own memory, Rust's borrows order them.
//! * It does not see accesses of a kernel outside its declared arguments, nor the bytes of an argument that the kernel
//!   really touches: `&mut` counts as a write of the whole argument.
//! * It does not see edges that the host makes between its own threads, as above.
//!
//! # Mechanism
//!
//! There are vector clocks (`clock`) for streams and host threads, and a map of the last accesses of all bytes
//! (`shadow`). Everything happens when an operation is submitted, under one lock that is held while the call is
//! forwarded (`judge`, `state`), so that two threads cannot miss each other's submission. Calls that wait, allocate or
//! free are made without the lock. A submission that blocks (CUDA's do when a stream's queue is full) delays the
//! submissions of all other threads.

mod calls;
mod checked;
mod clock;
mod deferred;
mod flags;
mod heap;
mod host;
mod judge;
#[cfg(test)]
#[path = "../../tests/unit/check/model.rs"]
mod model;
#[cfg(test)]
#[path = "../../tests/unit/check/model_flags.rs"]
mod model_flags;
mod note;
mod ranges;
mod replay;
mod shadow;
mod state;

pub use gpu_pool::{
    error::{Allocation, Kind, Operation, Report},
    extend::lab::annotate,
};
pub use host::Token;

use checked::Checked;
use gpu_pool::extend::driver::{Address, Driver, DriverRef, RawEvent, RawStream};
use gpu_pool::extend::{
    OpSite,
    lab::{self, HappensBefore},
};
use judge::Operand;
use parking_lot::Mutex;
use shadow::Manner;
use state::State;
use std::{
    any::Any,
    sync::{Arc, Weak},
};

/// The mistakes that a pool's checker looks for; see [`LabBuilder::check`](crate::prelude::LabBuilder::check).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Check {
    /// Nothing; costs nothing.
    #[default]
    Off,
    /// Accesses that no stream, event or wait of the host orders, and the related mistakes in [`Kind`].
    Races,
    /// Everything in `Races`, and writes past the end of a buffer. The pool leaves a red zone of 256 bytes or more
    /// behind every buffer, and checks it after the drop of the buffer. It fills dropped buffers with the byte `0xCB`,
    /// so that a late read finds no plausible numbers. It reports overwritten bytes ([`Kind::OutOfBounds`]) at the end
    /// of the scope, or when the pool is closed. No operation is refused for this, since the accesses of a kernel are
    /// not known before it has run.
    ///
    /// A buffer counts as dropped when its device's thread has seen the drop. Buffers that outlive their pool, and
    /// managed memory ([`UnifiedBuffer`](gpu_pool::memory::UnifiedBuffer)), are not checked. If operations run one at a
    /// time, neither are buffers that other devices have used, and buffers that other threads have dropped only when
    /// the pool is closed: else it would depend on time. In addition to the costs of `Races`, each buffer costs the
    /// memory of the red zone, two fills and a copy.
    Memory,
}

/// Puts one checker around all of these devices. Devices that already have one are not changed.
///
/// ```
/// # use gpu_pool::{error::Kind, extend::driver::host};
/// # use gpu_pool_lab::check;
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
/// # Ok::<(), gpu_pool::extend::driver::Fault>(())
/// ```
pub fn wrap(drivers: Vec<DriverRef>) -> Vec<DriverRef> {
    let checker = Checker::new(drivers.len());
    let wrap = |(index, inner): (usize, DriverRef)| match inner.checker() {
        Some(_) => inner,
        None => Arc::new(Checked { inner, index, checker: checker.clone() }),
    };
    drivers.into_iter().enumerate().map(wrap).collect()
}

/// The checker of a driver.
pub trait CheckedDriver {
    /// The checker of this device, and the device's number in it; see [`wrap`].
    fn checker(&self) -> Option<(&Arc<Checker>, usize)>;
}

impl CheckedDriver for dyn Driver {
    fn checker(&self) -> Option<(&Arc<Checker>, usize)> {
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

/// The account of the devices of one [`wrap`].
pub struct Checker {
    state: Mutex<State>,
    me: Weak<Checker>,
}

gpu_pool::debug_as!(Checker, |self| ..);

impl Checker {
    fn new(devices: usize) -> Arc<Self> {
        let mut state = State::new(devices);
        // The seat that all ending threads share.
        state.host_enters();
        Arc::new_cyclic(|me| Checker { state: Mutex::new(state), me: me.clone() })
    }

    /// The calling thread is about to access page-locked or managed memory. The crate's own buffers call this
    /// themselves; programs that use drivers without a pool must call it.
    ///
    /// # Errors
    /// A device's operation on these bytes that the thread has not waited for ([`Kind::HostAccess`]), or freed memory.
    pub fn host_access(&self, address: Address, bytes: usize, write: bool) -> Result<(), Arc<Report>> {
        let (mut state, by) = self.enter();
        let manner = if write { Manner::WRITE } else { Manner::READ };
        state.host_access(by, Operand { address, bytes, manner })
    }
}

#[doc(hidden)]
impl HappensBefore for Checker {
    fn anew(&self, drivers: Vec<DriverRef>) -> Vec<DriverRef> {
        wrap(drivers)
    }

    fn release(&self) -> lab::Token {
        lab::Token(Box::new(self.release()))
    }

    fn acquire(&self, token: &lab::Token) {
        if let Some(token) = (&*token.0 as &dyn Any).downcast_ref() {
            self.acquire(token);
        }
    }

    fn host_access(&self, address: Address, bytes: usize, write: bool) -> Result<(), Arc<Report>> {
        self.host_access(address, bytes, write)
    }

    fn allocated(&self, address: Address, bytes: usize, device: Option<usize>, zeroed: bool) {
        self.state.lock().heap.hand_out(address..address + bytes as u64, device, zeroed);
    }

    fn buffer(&self, address: Address) -> Option<Allocation> {
        self.state.lock().heap.block(address).map(note::allocation)
    }

    fn freed(&self, address: Address) {
        self.state.lock().heap.take_back(address);
    }

    fn lent(
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

    fn publish(&self, device: usize, stream: RawStream) {
        let (mut state, by) = self.enter();
        let clock = state.host(by).clock.clone();
        if let Some(stream) = state.streams.get_mut(&(device, stream.0)) {
            stream.done.join(&clock);
        }
    }

    fn publish_word(&self, device: usize, stream: RawStream, address: Address, read: &mut dyn FnMut() -> u64) -> u64 {
        let mut state = self.state.lock();
        let State { flags, streams, .. } = &mut *state;
        // Under the lock, so that the writer of the value is already in the account.
        let value = read();
        if let (Some(clock), Some(stream)) = (flags.seen(address, value), streams.get_mut(&(device, stream.0))) {
            stream.done.join(&clock);
        }
        value
    }

    fn observe(&self, device: usize, stream: RawStream) {
        let (mut state, by) = self.enter();
        if let Some(done) = state.streams.get(&(device, stream.0)).map(|stream| stream.done.clone()) {
            state.learn(by, &done);
        }
    }

    fn observed(&self, device: usize, stream: RawStream) -> lab::Token {
        let state = self.state.lock();
        let done = state.streams.get(&(device, stream.0)).map(|stream| stream.done.clone()).unwrap_or_default();
        lab::Token(Box::new(Token::new(done)))
    }

    fn forget_event(&self, device: usize, event: RawEvent) {
        if let Some(event) = self.state.lock().events.get_mut(&(device, event.0)) {
            event.record = None;
        }
    }
}

#[cfg(test)]
#[path = "../../tests/unit/check_tests.rs"]
mod tests;
