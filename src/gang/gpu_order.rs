//! The order of gangs on one physical GPU, across all pools of the process: a ticket lock per GPU, keyed by UUID.
//!
//! Two pools may use the same GPU, each with a device thread for it. Invariant: gangs of different pools run on a GPU
//! one after the other, in the order of dispatch. Within one pool a device thread never waits here: its queue has the
//! order already. A pool holds the lock, not a device: several devices of a pool may be on one GPU
//! ([`Builder::share_gpus`](crate::Builder::share_gpus)). They wait only for earlier entries of other pools:
//!
//! ```text
//!   entries   A0 A1 A2 | B0 | A1
//!   A0, A1 and A2 run side by side. B0 runs when three entries have ended, the last A1 when four have ended.
//! ```

use super::Quiescence;
use crate::{
    memory::Progress,
    sync::{EventCount, Mirror, Sequence},
};
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

struct Gpu {
    /// Written under the dispatch lock: the last entry's pool; the entries so far, and before the last run of one pool.
    line: Mirror<3>,
    served: Sequence,
    changed: EventCount,
}

/// A device on a physical GPU: its turns, and its progress. Pools that have the same device there share it.
pub(crate) struct GpuOrder {
    gpu: Arc<Gpu>,
    pub(crate) progress: Arc<Progress>,
}

/// By UUID, and position among the devices that share the GPU: each device has progress of its own.
type Registry = HashMap<([u8; 16], usize), Weak<GpuOrder>>;

static ALL: Lazy<Mutex<Registry>> = Lazy::new(Mutex::default);

impl GpuOrder {
    pub(crate) fn of(uuid: [u8; 16], place: usize) -> Arc<GpuOrder> {
        let mut all = ALL.lock();
        if let Some(gpu_order) = all.get(&(uuid, place)).and_then(Weak::upgrade) {
            return gpu_order;
        }
        all.retain(|_, gpu_order| gpu_order.strong_count() > 0);
        let there = all.iter().filter(|((gpu, _), _)| *gpu == uuid).find_map(|(_, gpu_order)| gpu_order.upgrade());
        let new = || Arc::new(Gpu { line: Mirror::new(), served: Sequence::new(), changed: EventCount::new() });
        let gpu = there.map_or_else(new, |gpu_order| gpu_order.gpu.clone());
        let gpu_order = Arc::new(GpuOrder { gpu, progress: Arc::default() });
        all.insert((uuid, place), Arc::downgrade(&gpu_order));
        gpu_order
    }

    pub(crate) fn is_on_gpu_of(&self, other: &GpuOrder) -> bool {
        Arc::ptr_eq(&self.gpu, &other.gpu)
    }

    /// Issues a turn to an entry of this pool, under the dispatch lock: how many entries must have ended before.
    pub(crate) fn issue(&self, pool: u64) -> u64 {
        let [last, issued, before] = self.gpu.line.read();
        let before = if last == pool { before } else { issued };
        self.gpu.line.write([pool, issued + 1, before]);
        before
    }

    /// Waits for a turn. It ends: each earlier entry of another pool is of a gang that is earlier in every queue.
    pub(crate) fn wait(self: &Arc<Self>, turn: u64, quiescence: &Quiescence) -> Turn<'_> {
        if !self.has_come(turn) {
            let gpu_order = self.clone();
            quiescence.while_blocked(
                move || !gpu_order.has_come(turn),
                || self.gpu.changed.wait_until(None, || self.has_come(turn).then_some(())).unwrap_or(()),
            );
        }
        Turn(&self.gpu)
    }

    fn has_come(&self, turn: u64) -> bool {
        self.gpu.served.get() >= turn
    }
}

pub(crate) struct Turn<'a>(&'a Gpu);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.served.fetch_advance();
        self.0.changed.notify();
    }
}

#[cfg(test)]
#[path = "../../tests/unit/gang/gpu_order_tests.rs"]
mod tests;
