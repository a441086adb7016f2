//! The order of gangs on one physical GPU, over all pools of the process.
//!
//! Two pools may hold the same GPU (the process-wide pool and a library's own). Each has its own device thread for it;
//! a ticket lock per GPU, keyed by UUID, makes their gangs take turns in the order of dispatch. Within one pool the
//! turn has always come when the device thread gets to the entry.

use super::presence::Presence;
use crate::sync::{EventCount, Sequence};
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};

/// One physical GPU's queue.
///
/// On cache lines of its own: its device's thread writes to it at every operation.
#[repr(align(128))]
pub(crate) struct Turns {
    issued: Sequence,
    served: Sequence,
    changed: EventCount,
    /// Operations begun on the GPU, by whichever pool.
    progress: Sequence,
    /// Signs of life of others, passed on by a device that waits for them. Not progress of its own.
    relayed: Sequence,
}

static ALL: Lazy<Mutex<HashMap<[u8; 16], std::sync::Weak<Turns>>>> = Lazy::new(Mutex::default);

impl Turns {
    /// The queue of the GPU with this UUID.
    pub(crate) fn of(uuid: [u8; 16]) -> Arc<Turns> {
        let mut all = ALL.lock();
        if let Some(turns) = all.get(&uuid).and_then(std::sync::Weak::upgrade) {
            return turns;
        }
        all.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::new(Turns {
            issued: Sequence::new(),
            served: Sequence::new(),
            changed: EventCount::new(),
            progress: Sequence::new(),
            relayed: Sequence::new(),
        });
        all.insert(uuid, Arc::downgrade(&turns));
        turns
    }

    /// Notes that the GPU's host thread has got further.
    pub(crate) fn progress(&self) {
        self.progress.fetch_advance();
    }

    /// Notes that those whom the GPU's host thread waits for have got further.
    pub(crate) fn relay(&self) {
        self.relayed.fetch_advance();
    }

    /// Grows while the GPU's own host thread gets on.
    pub(crate) fn own_progress(&self) -> u64 {
        self.progress.get()
    }

    /// Grows while the GPU's host thread gets on, or those whom it waits for do.
    pub(crate) fn any_progress(&self) -> u64 {
        self.progress.get() + self.relayed.get()
    }

    /// Takes the next place; called under the dispatch lock.
    pub(crate) fn issue(&self) -> u64 {
        self.issued.fetch_advance()
    }

    /// Waits for a place. It ends: each place before this one belongs to a gang that is earlier in every queue.
    pub(crate) fn wait(self: &Arc<Self>, turn: u64, presence: &Presence) -> Done<'_> {
        if !self.is_served(turn) {
            let turns = self.clone();
            presence.while_so(
                move || !turns.is_served(turn),
                || self.changed.wait_until(None, || self.is_served(turn).then_some(())).unwrap_or(()),
            );
        }
        Done(self)
    }

    fn is_served(&self, turn: u64) -> bool {
        self.served.get() + 1 == turn
    }
}

/// Passes the turn on when dropped.
pub(crate) struct Done<'a>(&'a Turns);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.served.fetch_advance();
        self.0.changed.notify();
    }
}
