//! What a pool can do, for [`choose`](super::choose): read from the pool once per call.

use super::choose::{KernelBarrier, Machine};
use crate::{fabric::types::ReduceOrder, thread::worker::Shared};

impl Machine {
    /// The capabilities of a pool, and the wishes of its builder.
    pub(crate) fn of(shared: &Shared) -> Machine {
        let handle = &shared.handles[0];
        let barrier = match shared.signals.get() {
            None => KernelBarrier::None,
            Some(pad) if pad.have_stages() => KernelBarrier::InHost { ll: pad.ll_bytes() },
            Some(pad) => KernelBarrier::OnDevices { ll: pad.ll_bytes(), eager: pad.eager_bytes() },
        };
        Machine {
            software: handle.driver.info().compute_capability == (0, 0),
            virtual_time: handle.in_virtual_time(),
            barrier,
            alone: matches!(barrier, KernelBarrier::InHost { .. })
                && shared.handles.iter().all(|handle| handle.sharers == 1),
            wish: shared.algorithm,
            rank_order: shared.reduce_order == ReduceOrder::Rank,
        }
    }
}
