//! Collectives whose kernels wait for each other on the devices: by a start and an end barrier over flags in each
//! other's memory, by flags in the data, or by flags behind the data. One launch is the whole collective, with no event
//! and no second meeting of the host threads.
//!
//! Such a kernel spins until its peers' kernels run. So all of them must get to run, and these rules see to it:
//!
//! * No member launches before all have arrived and match (the [meeting](super::meet)). From the commit on each member
//!   launches.
//! * Meanwhile no thread of the process is in a driver call that waits for kernels. The [launch
//!   gate](crate::sync::LaunchGate) keeps such calls out: the member that commits opens it for all, and each member
//!   closes it for itself when it has launched ([`commit`](super::commit)).
//! * On each device these kernels run one at a time, in the gang's order, which is one for all members, whatever their
//!   streams are.
//! * All blocks of a kernel are on the device at once. On a shared GPU, all blocks of all its devices' kernels are.
//! * A device that shares its GPU submits nothing between its launch and its peers' launches
//!   ([`LaunchWindow`](super::commit::LaunchWindow)). Streams share hardware queues, and a kernel behind one that waits
//!   for its peer never runs.
//!
//! If a member fails nevertheless, the gang's abort ends the others' kernels. Devices count their barriers pair by
//! pair. A member that has skipped one launches it when the gang has drained ([`resync`]).

use super::{
    kernels::{
        self,
        twin::{self, Place},
    },
    launch,
};
use crate::{
    copy::peer,
    error::{Error, Result},
    fabric::layout::{DeviceBarrier, EMPTY},
    gang::Gang,
    memory::stream::StreamCore,
    mutation::Bug,
    thread::worker::Worker,
};

/// Launches the kernels that this device has skipped, and empties its inbox. Called when the device's gang has failed,
/// and all its members have drained. The kernels only count: they find the abort word raised and give up at once.
///
/// No member sends to the inbox meanwhile: for that its kernel needs a meeting with this device's thread. A member that
/// has left a gang before it failed need not do this: its kernels have taken all that was sent to it.
///
/// `late` says that the device got through with its work when its peers had done this already. Its kernels may have
/// sent meanwhile, so it removes that, too.
pub(crate) fn resync(worker: &Worker, late: bool) -> Result<()> {
    let emptied = worker.spinning.is_spoiled() && empty_inbox(worker)?;
    if late {
        empty_what_was_sent(worker)?;
    }
    let skipped = worker.spinning.resync(|barrier| {
        count(worker, &worker.main, "recovery", barrier)?;
        // Work without a number is not waited for.
        worker.main.submit();
        Ok::<_, Error>(())
    })?;
    if skipped || emptied {
        worker.drain()?;
    }
    worker.spinning.set_spoiled(false);
    Ok(())
}

/// Submits the removal of what is in the device's inbox, if it has one, and of what a kernel that never ended has left
/// in the registers.
fn empty_inbox(worker: &Worker) -> Result<bool> {
    let Some(pad) = worker.shared.signals.get() else { return Ok(false) };
    let (address, bytes) = pad.inbox(worker.handle.device);
    if bytes == 0 || worker.handle.injected(Bug::InboxKept) {
        return Ok(false);
    }
    let (registers, more) = pad.registers(worker.handle.device);
    let (driver, stream) = (&worker.handle.driver, worker.main.raw);
    // SAFETY: the pad's memory, which lives as long as the pool; the caller says why no kernel uses it now.
    let filled = unsafe {
        driver.fill_u8(address, EMPTY, bytes, stream).and_then(|()| driver.fill_u8(registers, 0, more, stream))
    };
    worker.handle.check("recovery", filled)?;
    // Work without a number is not waited for.
    worker.main.submit();
    Ok(true)
}

/// Submits the removal of what this device has sent to its peers. Copied from the inbox, which is empty: the part of it
/// that the peer writes. (If the peer's kernels write there now, it has this to do itself, before they meet.)
fn empty_what_was_sent(worker: &Worker) -> Result<()> {
    let Some(pad) = worker.shared.signals.get() else { return Ok(()) };
    let me = worker.handle.device;
    for peer in (0..worker.shared.devices()).filter(|&peer| peer != me) {
        let (sent, received) = (pad.inbox_of_sender(me, peer), pad.inbox_of_sender(peer, me));
        for ((to, bytes), (from, _)) in sent.into_iter().zip(received) {
            peer::copy(worker, &worker.main, to, peer, from, me, bytes)?;
        }
    }
    Ok(())
}

/// [`resync`] at the beginning of a scope, for a gang that got stuck and could not do it. It waits until this device is
/// through with that gang's work, and fails as that work does, when the new gang fails, or after the pool's deadline
/// without progress.
pub(crate) fn resync_later(worker: &Worker, gang: &Gang) -> Result<()> {
    if !worker.spinning.is_spoiled() && !worker.spinning.has_skipped() {
        return Ok(());
    }
    worker.wait_idle("scope begin", || gang.is_aborted())?;
    resync(worker, true)
}

/// Launches a kernel that takes part in the barrier and touches no memory.
pub(super) fn count(worker: &Worker, stream: &StreamCore, name: &'static str, barrier: DeviceBarrier) -> Result<()> {
    let pad = worker.shared.signals.get().filter(|pad| pad.layout().registers > 0);
    if let Some(pad) = pad {
        let place = Place { handle: &worker.handle, pad, meet: barrier };
        let args = twin::counting_args(&place);
        return launch::launch_on(worker, stream, name, &twin::counting(), 1, &args);
    }
    let (entry, args) = kernels::counting(barrier);
    launch::launch_on(worker, stream, name, &entry, 1, &args)
}
