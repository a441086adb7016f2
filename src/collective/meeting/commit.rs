//! The commit of a collective: the point from which on every member carries it out. For kernels that wait for each
//! other it also opens the launch gate ([`gate`]).
//!
//! Invariant: commit and abort of a sequence number are one compare-and-swap on one word for all members. A member that
//! commits to a launch either launches or notes the barrier as skipped.

use super::Meeting;
use crate::error::{Error, Result};
use crate::{Device, driver::gate, fabric::SkippedBarrier, memory::BlockRef, stall::StallTimer, sync::CommitWord};
use std::hint;

/// How often the other members look whether the first one has committed, before they do: some microseconds.
const LEAD_POLLS: usize = 64;

/// A launch that this member has committed to. It is dropped after the launch.
pub(crate) struct LaunchWindow {
    /// The device shares its GPU, and so may share a hardware queue with a peer.
    shares: bool,
}

impl LaunchWindow {
    /// The device has met its peers, and the gate is open.
    pub(in super::super) fn of(dev: &Device) -> Self {
        LaunchWindow { shares: dev.worker.handle.sharers > 1 }
    }
}

impl Drop for LaunchWindow {
    fn drop(&mut self) {
        gate::launches().close(1);
        if self.shares {
            // Waits until all members have launched: what this device submits next must not get in front of a peer's
            // launch. A launch that waits for room in a queue, with the context's lock held, must not either.
            drop(gate::launches().block());
        }
    }
}

impl Meeting<'_> {
    /// Commits the next collective, unless the gang has failed first. `spins`: by kernels that wait for each other.
    pub(super) fn commit(&self, spins: bool) -> Result<()> {
        let (word, number) = (self.word(), self.next_number());
        if self.rank > 0 {
            // One member commits, and mostly the others see it: if all wrote to this cache line, it would travel.
            let polls = self.dev.worker.shared.polls.min(LEAD_POLLS);
            (0..polls).take_while(|_| word.committed() < number && !word.is_aborted()).for_each(|_| hint::spin_loop());
        }
        if spins {
            self.open_gate(word, number);
        }
        if !word.commit(number) {
            self.dev.session.gang.check().and(Err(Error::Closed))?;
        }
        // Only committed collectives count: calls that did not match leave no gap.
        self.membership.calls.set(number);
        Ok(())
    }

    /// Opens the gate for the launches of collective `number` and commits it; unless a peer has done so, or the gang
    /// has failed. It fails the gang when blocking calls keep the gate closed for the pool's deadline.
    fn open_gate(&self, word: &CommitWord, number: u64) {
        let (gate, members, dev) = (gate::launches(), self.count(), self.dev);
        let mut stall = None;
        while word.committed() < number && !word.is_aborted() {
            // No sleep: a peer may open the gate meanwhile, and then a blocking call waits for this launch.
            if gate.try_open(members) {
                if word.lead(number) != Some(true) {
                    gate.close(members);
                }
                return;
            }
            let stall = stall.get_or_insert_with(|| StallTimer::new(dev.worker.shared.deadline));
            std::thread::yield_now();
            if stall.is_over() {
                // The gang fails before this member gives up: from here on no member can commit.
                let (device, op) = (dev.index(), "wait for blocking calls of the driver");
                let (waited, missing, gang) = (stall.waited(), vec![device], &dev.session.gang);
                let last_calls = dev.worker.shared.last_calls(gang.members());
                gang.poison(device, Error::Timeout { device, op, waited, missing, last_calls });
            }
        }
    }

    /// If a peer committed it before the failure was seen, `owed` is skipped. `blocks` are what peers' kernels touch.
    #[cold]
    pub(in super::super) fn skip_launch(
        &self,
        number: u64,
        owed: SkippedBarrier,
        blocks: impl Iterator<Item = BlockRef>,
    ) {
        if self.keep_if_committed(number, blocks) {
            gate::launches().close(1);
            // Peers' kernels that are still to come may meet the kernel that `resync` launches.
            self.dev.worker.barrier_state.skip(owed);
        }
    }

    /// If a peer has committed it before the failure was seen, it may touch the blocks. Whether that is so.
    #[cold]
    pub(in super::super) fn keep_if_committed(&self, number: u64, blocks: impl Iterator<Item = BlockRef>) -> bool {
        let is_committed = self.word().committed() >= number;
        if is_committed {
            self.dev.worker.quarantine.borrow_mut().extend(blocks);
        }
        is_committed
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/collective/meeting/commit_tests.rs"]
mod tests;
