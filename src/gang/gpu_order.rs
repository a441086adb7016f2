//! The order of gangs on one physical GPU, over all pools of the process.
//!
//! Two pools may hold the same GPU (the process-wide pool and a library's own). Each has its own device thread for it;
//! a ticket lock per GPU, keyed by UUID, makes their gangs take turns in the order of dispatch. Within one pool the
//! turn has always come when the device thread gets to the entry.
//!
//! The lock is the pool's, not the device's: several devices of a pool may be on one GPU
//! ([`Builder::share_gpus`](crate::Builder::share_gpus)), and a gang of these is on it as a whole. So entries of one
//! pool that follow each other hold the GPU together, and only those of another pool before them are waited for:
//!
//! ```text
//!   entries   A0 A1 A2 | B0 | A1     A0, A1, A2 run side by side; B0 when three are served; the last A1 when four are
//! ```

use super::quiescence::Quiescence;
use crate::{
    memory::progress::Progress,
    sync::{EventCount, Mirror, Sequence},
};
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

/// One physical GPU's queue.
struct Gpu {
    /// The pool of the last entry, how many entries there were, and how many before the first of those that hold the
    /// GPU together with the last one. Written under the dispatch lock.
    line: Mirror<3>,
    served: Sequence,
    changed: EventCount,
}

/// What is known of a device on a GPU, whichever pools have one there: its turns, and its signs of progress.
pub(crate) struct GpuOrder {
    gpu: Arc<Gpu>,
    pub(crate) progress: Arc<Progress>,
}

/// By UUID and place. Devices that share a GPU have signs of progress of their own: one that waits for another must see
/// whether that one gets on.
type Known = HashMap<([u8; 16], usize), Weak<GpuOrder>>;

static ALL: Lazy<Mutex<Known>> = Lazy::new(Mutex::default);

impl GpuOrder {
    /// Those of a device on the GPU with this UUID; `place` counts the devices that a pool has there.
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

    /// An entry of this pool, under the dispatch lock: how many must have been served when its turn comes.
    pub(crate) fn issue(&self, pool: u64) -> u64 {
        let [last, issued, before] = self.gpu.line.read();
        let before = if last == pool { before } else { issued };
        self.gpu.line.write([pool, issued + 1, before]);
        before
    }

    /// Waits for a turn. It ends: each entry before it that is another pool's belongs to a gang that is earlier in
    /// every queue.
    pub(crate) fn wait(self: &Arc<Self>, turn: u64, quiescence: &Quiescence) -> Done<'_> {
        if !self.has_come(turn) {
            let gpu_order = self.clone();
            quiescence.while_so(
                move || !gpu_order.has_come(turn),
                || self.gpu.changed.wait_until(None, || self.has_come(turn).then_some(())).unwrap_or(()),
            );
        }
        Done(&self.gpu)
    }

    fn has_come(&self, turn: u64) -> bool {
        self.gpu.served.get() >= turn
    }
}

/// Passes the turn on when dropped.
pub(crate) struct Done<'a>(&'a Gpu);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.served.fetch_advance();
        self.0.changed.notify();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(place: usize, name: &[u8; 16]) -> Arc<GpuOrder> {
        GpuOrder::of(*name, place)
    }

    #[test]
    fn entries_of_one_pool_hold_a_gpu_together_and_pools_take_turns() {
        let [a, b, c] = [0, 1, 2].map(|place| gpu(place, b"held together..."));
        let (first, second) = (7, 8);
        let gang = [a.issue(first), b.issue(first), c.issue(first)];
        let other = a.issue(second);
        let later = [b.issue(first), c.issue(first)];
        assert_eq!((gang, other, later), ([0; 3], 3, [4; 2]));
        assert!(b.has_come(gang[1]) && !a.has_come(other) && !b.has_come(later[0]));
        // The gang is over when all of it is, in whatever order.
        drop((Done(&c.gpu), Done(&a.gpu)));
        assert!(!a.has_come(other));
        drop(Done(&b.gpu));
        assert!(a.has_come(other) && !b.has_come(later[0]));
        drop(Done(&a.gpu));
        assert!(later.iter().all(|&turn| c.has_come(turn)));
    }

    #[test]
    fn a_gpu_is_one_for_all_of_its_places_and_signs_of_life_are_each_ones_own() {
        let name = b"one for all.....";
        let (a, b) = (gpu(0, name), gpu(1, name));
        assert!(Arc::ptr_eq(&a, &gpu(0, name)) && !Arc::ptr_eq(&a, &b) && Arc::ptr_eq(&a.gpu, &b.gpu));
        b.progress.advance();
        b.progress.relay();
        assert_eq!((a.progress.any(), b.progress.own(), b.progress.any()), (0, 1, 2));
        // Also when the first of them is gone.
        drop(a);
        assert!(Arc::ptr_eq(&gpu(0, name).gpu, &b.gpu));
        assert!(!Arc::ptr_eq(&gpu(0, b"another one.....").gpu, &b.gpu));
    }
}
