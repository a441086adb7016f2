//! Waiting on the host for a peer.
//!
//! Collectives wait here for messages of other members. A wait ends when its answer is there, when the gang fails, when
//! the software GPUs find a deadlock, or when the pool's deadline passes without progress.
//!
//! Invariant: a deadline measures missing progress of the gang, not time. A wait that times out fails the gang.

use super::worker::Worker;
use crate::error::{DeviceCall, Error, Result, op_site::OpSite};
use crate::timeline::{Cause, Slice};
use crate::{driver::host, gang::Gang, stall::StallTimer};
use std::{mem, time::Duration};

/// A sleeping wait looks at the clock at least this often.
const TICK: Duration = Duration::from_millis(10);
/// How long a member that waits for a peer stays awake, if it has a core to itself. A device thread has nothing else to
/// do, its peers call their operations at about the same time, and a wake-up costs more than a small collective.
const LINGER: Duration = Duration::from_millis(2);

/// [`LINGER`], or zero where it does not pay: without a core to spare, and on software GPUs with computed time or with
/// one operation at a time, which go on only when all threads are asleep.
pub(crate) fn linger(cores: usize, devices: usize, computed: bool) -> Duration {
    if computed || cores <= devices { Duration::ZERO } else { LINGER }
}

#[derive(Clone, Copy)]
pub(crate) struct Waiter<'a> {
    pub(crate) worker: &'a Worker,
    pub(crate) gang: &'a Gang,
    pub(crate) rank: usize,
}

/// Waits until `poll` has an answer that depends on the member `peer`. Ends early with [`Error::Aborted`] when the gang
/// fails. Ends with [`Error::Timeout`], which names the peer and fails the gang, when no member of the gang has begun
/// an operation for the pool's deadline.
pub(crate) fn for_peer<R>(
    Waiter { worker, gang, rank }: Waiter<'_>,
    op: &'static str,
    peer: usize,
    mut poll: impl FnMut() -> Option<Result<R>>,
) -> Result<R> {
    let (device, shared) = (worker.handle.device, &worker.shared);
    // If the gang has failed, its cause explains more than an error of this wait.
    let mut poll = || match poll() {
        Some(Ok(answer)) => Some(Ok(answer)),
        other => gang.check().err().map(Err).or(other),
    };
    let _entry = worker.calls.wait(op, gang.device(peer));
    let waker = gang.waker(rank);
    let progress = || gang.members().iter().map(|&d| shared.gpu_order[d].progress.own()).sum::<u64>();
    let (mut stall, mut seen) = (StallTimer::new(shared.deadline), None);
    let (mut wait, mut linger) = (None, shared.linger);
    let slice = worker.handle.lane.wait(op, || None);
    let caused = |slice: &mut Slice| {
        let peer = gang.device(peer);
        let call = shared.handles[peer].last_call().map(|DeviceCall { op, site, .. }| OpSite { op, site });
        slice.cause = Some(Cause::Device(peer, call));
    };
    loop {
        if let Some(answer) = waker.wait_lingering(Some(stall.tick(TICK)), mem::take(&mut linger), &mut poll) {
            drop(slice.note(caused));
            return answer;
        }
        let wait =
            wait.get_or_insert_with(|| shared.quiescence[device].wait_for_peer(describe(gang, device, op, peer)));
        // While a thread looks for a deadlock it counts as asleep: otherwise threads that look at the same pace would
        // never find each other asleep. But it does so only while no message has arrived: with a message it has work to
        // do, and peers may wait for that work.
        if let Some(answer) = waker.while_asleep(&mut poll, || host::find_deadlock(&*worker.handle.driver)) {
            drop(slice.note(caused));
            return answer;
        }
        if let Some(who) = wait.deadlock() {
            return Err(fail(gang, device, Error::Deadlock { device, op, who }));
        }
        let now = Some(progress());
        if now != seen {
            // Scopes that wait for this device see that it is not stuck.
            shared.gpu_order[device].progress.relay();
            seen = now;
            stall.renew();
        } else if stall.is_over() {
            let (missing, last_calls) = (vec![gang.device(peer)], shared.last_calls(gang.members()));
            let error = Error::Timeout { device, op, waited: stall.waited(), missing, last_calls };
            return Err(fail(gang, device, error));
        }
    }
}

fn fail(gang: &Gang, device: usize, error: Error) -> Error {
    gang.poison(device, error.clone());
    gang.cause().map_or(error, |(by, cause)| match by == device {
        true => cause,
        false => Error::Aborted { by, cause: std::sync::Arc::new(cause) },
    })
}

fn describe(gang: &Gang, device: usize, op: &str, peer: usize) -> String {
    let mut text = format!("device {device} waits in {op} for device {}", gang.device(peer));
    if let Some(place) = OpSite::current() {
        text += &format!(", in {} at {}", place.op, place.site);
    }
    text
}

#[cfg(test)]
#[path = "../../tests/unit/thread/wait_tests.rs"]
mod tests;
