//! Waiting on the host for a peer: polls, knows the abort, and has a deadline that means "no progress".

use crate::{
    device::Device,
    error::{Error, Result},
};
use std::time::{Duration, Instant};

/// How often a sleeping wait looks at the clock.
const TICK: Duration = Duration::from_millis(10);

/// Waits until `poll` has an answer that depends on the member `rank`. Ends early with
/// [`Error::Aborted`] when the gang fails, and with [`Error::Timeout`] naming the missing member when no member of the
/// gang has begun an operation for the pool's deadline; that timeout fails the gang.
pub(crate) fn for_peer<R>(
    dev: &Device,
    op: &'static str,
    rank: usize,
    mut poll: impl FnMut() -> Option<Result<R>>,
) -> Result<R> {
    let (gang, shared) = (&dev.session.gang, &dev.worker.shared);
    // A failure of the gang explains more than what it makes of this wait.
    let mut poll = || match poll() {
        Some(Ok(answer)) => Some(Ok(answer)),
        other => gang.check().err().map(Err).or(other),
    };
    let waker = gang.waker(dev.rank());
    let progress = || gang.members().iter().map(|&d| shared.turns[d].own_progress()).sum::<u64>();
    let (mut since, mut seen) = (Instant::now(), None);
    loop {
        if let Some(answer) = waker.wait_until(Some(TICK), &mut poll) {
            return answer;
        }
        let now = Some(progress());
        if now != seen {
            // Whoever waits for this device, to run a later scope on it, learns that it is not stuck.
            shared.turns[dev.index()].relay();
            (since, seen) = (Instant::now(), now);
        } else if since.elapsed() >= shared.deadline {
            let (device, waited) = (dev.index(), since.elapsed());
            let error = Error::Timeout { device, op, waited, missing: vec![gang.device(rank)] };
            // Peers that wait for this member, or for the same one, end with the same cause.
            gang.poison(device, error.clone());
            return Err(gang.cause().map_or(error, |(by, cause)| match by == device {
                true => cause,
                false => Error::Aborted { by, cause: std::sync::Arc::new(cause) },
            }));
        }
    }
}
