//! Collectives whose kernels wait for each other on the devices: by a start and an end barrier over flags in each
//! other's memory, by flags in the data, or by flags behind the data. One launch is the whole collective, with no event
//! and no second meeting of the host threads.
//!
//! Such a kernel spins until its peers' kernels run. These rules see to it that all of them get to run:
//!
//! * No member launches before all have arrived and match (the [meeting](super::meeting)). From the commit on each
//!   member launches.
//! * Meanwhile the [launch gate](crate::sync::LaunchGate) keeps driver calls out that wait for kernels
//!   ([`commit`](super::meeting::commit)).
//! * On each device these kernels run one at a time, in the gang's order, whatever their streams are.
//! * All blocks of a kernel are on the device at once. On a shared GPU, all blocks of all its devices' kernels are.
//! * A device that shares its GPU submits nothing between its launch and its peers' launches
//!   ([`LaunchWindow`](super::meeting::commit::LaunchWindow)): streams share hardware queues, and a kernel behind one
//!   that waits for its peer never runs.
//!
//! If a member fails nevertheless, the gang's abort ends the others' kernels. Devices count their barriers pair by
//! pair; a member that has skipped one launches it when the gang has drained ([`resync`]).

use super::{kernels, launch};
use crate::error::{Error, Result};
use crate::fabric::{DeviceBarrier, EMPTY, SignalPad};
use crate::{gang::Gang, memory::StreamCore, sync::EventCount, thread::worker::Worker};

/// Launches the kernels that this device has skipped, and empties its inbox, after its gang has failed and has drained.
/// The kernels only count: they find the abort word raised and give up. No member sends to the inbox meanwhile: for
/// that its kernel needs a meeting with this device's thread. `late`: the peers had done this before this device got
/// through with its work. Its kernels may have sent meanwhile, so it removes that, too.
pub(crate) fn resync(worker: &Worker, gang: &Gang, late: bool) -> Result<()> {
    let pad = worker.shared.signals.get().filter(|pad| pad.inbox(worker.handle.device).1 > 0);
    let pad = pad.filter(|_| late || worker.barrier_state.is_spoiled());
    let lock = pad.filter(|_| late).map(|_| CleanerLock::take(worker, gang)).transpose()?;
    let mut all = true;
    if let Some(pad) = pad {
        empty_inbox(worker, pad)?;
        if lock.is_some() {
            all = empty_what_was_sent(worker, pad, gang)?;
        }
        // Work without a number is not waited for.
        worker.main.submit();
    }
    let skipped = worker.barrier_state.resync(|barrier| {
        count(worker, &worker.main, "recovery", barrier)?;
        worker.main.submit();
        Ok::<_, Error>(())
    })?;
    if skipped || pad.is_some() {
        worker.drain()?;
    }
    worker.barrier_state.set_spoiled(!all);
    Ok(())
}

/// One device of a pool at a time may clear its peers' inboxes. A late peer's kernels may still write to memory that is
/// copied to the peer; that peer has the lock later, and clears its inbox when these copies are over.
struct CleanerLock<'w>(&'w Worker);

impl<'w> CleanerLock<'w> {
    /// Waits until no other device has it, the gang fails (then its recovery may wait again), or for the deadline.
    fn take(worker: &'w Worker, gang: &Gang) -> Result<Self> {
        let (shared, device) = (&worker.shared, worker.handle.device);
        let look = || {
            let mut cleaner = shared.cleaner.lock();
            let is_free = cleaner.is_none();
            if is_free {
                *cleaner = Some(device);
            }
            is_free.then_some(true).or((gang.is_aborted() && !gang.is_recovered()).then_some(false))
        };
        // Who gives it back, and a gang that fails, notifies this waker.
        match shared.wakers[device].wait_until(Some(shared.deadline), look) {
            Some(true) => Ok(CleanerLock(worker)),
            _ => {
                let missing = vec![shared.cleaner.lock().unwrap_or(device)];
                let last_calls = shared.last_calls(gang.members());
                Err(Error::Timeout { device, op: "recovery", waited: shared.deadline, missing, last_calls })
            }
        }
    }
}

impl Drop for CleanerLock<'_> {
    fn drop(&mut self) {
        *self.0.shared.cleaner.lock() = None;
        EventCount::notify_all(self.0.shared.wakers.iter().map(|waker| &**waker));
    }
}

fn empty_inbox(worker: &Worker, pad: &SignalPad) -> Result<()> {
    let (address, bytes) = pad.inbox(worker.handle.device);
    let (driver, stream) = (worker.handle.unwatched(), worker.main.raw);
    // SAFETY: the pad's memory, which lives as long as the pool; the caller says why no kernel uses it now, but for
    // those of a late peer, whose device removes what they send.
    worker.handle.check("recovery", unsafe { driver.fill_u8(address, EMPTY, bytes, stream) })
}

/// From its own inbox, which is empty, the part that the peer writes is copied to the peer. (If a late peer's kernels
/// write there now, that peer removes the copy, see [`CleanerLock`].) Returns false if it failed for a peer outside of
/// the gang: it is to be done again before a later gang.
fn empty_what_was_sent(worker: &Worker, pad: &SignalPad, gang: &Gang) -> Result<bool> {
    let (me, stream, handles) = (worker.handle.device, worker.main.raw, &worker.shared.handles);
    let mut all = true;
    for peer in (0..worker.shared.device_count()).filter(|&peer| peer != me && !handles[peer].is_lost()) {
        let (sent, received) = (pad.inbox_of_sender(me, peer), pad.inbox_of_sender(peer, me));
        for ((to, bytes), (from, _)) in sent.into_iter().zip(received).filter(|((_, bytes), _)| *bytes > 0) {
            let (own, other) = (worker.handle.unwatched(), handles[peer].unwatched());
            // SAFETY: parts of the two pads' inboxes, of so many bytes. They live as long as the pool, and no kernel
            // takes anything from them: for that it needs a meeting with this device's thread.
            let copied = unsafe { own.copy_peer(to, &**other, from, &**own, bytes, stream) };
            match worker.handle.check("recovery", copied) {
                Ok(()) => {}
                Err(error) if !gang.members().contains(&peer) => {
                    event!(
                        warn, "inbox_not_emptied", device = me, peer, %error,
                        "what was sent to a peer is still in its inbox"
                    );
                    all = false;
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(all)
}

/// [`resync`] at the beginning of a scope, for a gang that got stuck. It waits until this device is through with that
/// gang's work, and fails as that work does, when the new gang fails, or after the deadline.
pub(crate) fn resync_later(worker: &Worker, gang: &Gang) -> Result<()> {
    if !worker.barrier_state.is_spoiled() && worker.barrier_state.skipped.borrow().is_empty() {
        return Ok(());
    }
    worker.wait_idle("scope begin", || gang.is_aborted())?;
    resync(worker, gang, true)
}

/// Launches a kernel that takes part in the barrier and touches no memory.
pub(super) fn count(worker: &Worker, stream: &StreamCore, name: &'static str, barrier: DeviceBarrier) -> Result<()> {
    let (entry, args) = kernels::counting(barrier);
    launch::launch_on(worker, stream, name, &entry, 1, &args)
}
