//! Copies between devices: directly by the copy engines, or staged through the host.
//!
//! A staged copy follows the CUDA Handbook's listing 9.1 (`chMemcpyPeerToPeer`): two portable page-locked buffers and
//! two events. The CPU does not wait.
//!
//! ```text
//! source stream       up 0 | up 1 |   wait empty 0, up 2 | wait empty 1, up 3 | ...
//!                        \      \      /                  /
//! destination stream      down 0 \----/ down 1 ----------/  down 2 | ...
//! ```
//!
//! One stream is the caller's current stream, the other belongs to the pair of devices. Invariant: the pair's stream
//! starts after the caller's, which has waited for all hazards, and the caller's stream waits for it at the end.

use crate::driver::{Address, Driver, DriverResult, FailPoint};
use crate::error::Result;
use crate::memory::{
    Access, PeerStaging, StreamCore,
    peer_staging::{Buffers, PIECE},
};
use crate::thread::worker::{Shared, Worker};
use std::sync::Arc;

/// A smaller copy has about eight pieces, so that both buses work most of the time, but none smaller than this.
const SMALLEST: usize = 256 << 10;

/// Submits a copy to a stream of the worker's device, which is one of the two. The caller's `Op` orders the memory.
pub(crate) fn copy(
    worker: &Worker,
    stream: &Arc<StreamCore>,
    dst: Address,
    dst_device: usize,
    src: Address,
    src_device: usize,
    bytes: usize,
) -> Result<()> {
    let (shared, handle) = (&worker.shared, &worker.handle);
    if bytes == 0 {
        return Ok(());
    }
    if dst_device == src_device {
        // SAFETY: both ranges are live, ordered by the caller's `Op`, and do not overlap: one is borrowed exclusively.
        let copied = unsafe { handle.driver.copy_within(dst, src, bytes, stream.raw) };
        return handle.check("copy", copied);
    }
    let own = handle.device;
    let other = if dst_device == own { src_device } else { dst_device };
    if shared.is_direct(own, other) {
        let (to, from) = (&*shared.handles[dst_device].driver, &*shared.handles[src_device].driver);
        // SAFETY: as above.
        let copied = unsafe { handle.driver.copy_peer(dst, to, src, from, bytes, stream.raw) };
        return handle.check("copy", copied);
    }
    shared.peer_staging(src_device, dst_device)?.copy(shared, stream, own == src_device, dst, src, bytes)
}

impl PeerStaging {
    /// `on_source` says whether `current`, the caller's stream, is on the source's device.
    fn copy(
        &self,
        shared: &Shared,
        current: &Arc<StreamCore>,
        on_source: bool,
        dst: Address,
        src: Address,
        bytes: usize,
    ) -> Result<()> {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.repair(&shared.pinned)?;
        let (up, down) = if on_source {
            (current.clone(), state.destination.clone())
        } else {
            (state.source.clone(), current.clone())
        };
        let other = if on_source { &down } else { &up };
        other.wait_for("staged copy", current, current.submit())?;
        let copied = self.pieces(state, (&up, &down), dst, src, bytes);
        // Even after an error: the work on the other stream belongs to the caller's operation.
        let last = other.submit();
        let joined = current.wait_for("staged copy", other, last);
        if copied.is_err() || joined.is_err() {
            state.spoilt = true;
            for buffer in &state.buffers {
                // Noted as reads, since a write would replace the uses that were noted before it.
                buffer.hazards.note(current, current.submit(), 0..PIECE, Access::Read);
                buffer.hazards.note(other, last, 0..PIECE, Access::Read);
            }
        }
        if joined.is_err() {
            // The caller's stream does not wait for the other stream, so the work there must end now.
            other.wait_idle("staged copy", shared.deadline, || false)?;
        }
        copied.and(joined)
    }

    fn pieces(
        &self,
        state: &mut Buffers,
        (up, down): (&StreamCore, &StreamCore),
        dst: Address,
        src: Address,
        bytes: usize,
    ) -> Result<()> {
        let piece = (bytes / 8).next_multiple_of(SMALLEST).clamp(SMALLEST, PIECE);
        for start in (0..bytes).step_by(piece) {
            let (slot, len) = (state.next, piece.min(bytes - start));
            state.next ^= 1;
            let buffer = state.buffers[slot].address as *mut u8;
            let at = start as u64;
            if !self.source.injected(FailPoint::OneStagingEvent) {
                up.wait_raw("staged copy", state.empty[slot], &self.destination)?;
            }
            // SAFETY: the source is live and ordered before this stream. The buffer is empty after the event.
            self.up(|driver| unsafe { driver.copy_to_host(buffer, src + at, len, up.raw) })?;
            self.up(|driver| driver.event_record(state.full[slot], up.raw))?;
            down.wait_raw("staged copy", state.full[slot], &self.source)?;
            // SAFETY: the buffer is full after the event. The destination is live and ordered.
            self.down(|driver| unsafe { driver.copy_to_device(dst + at, buffer, len, down.raw) })?;
            self.down(|driver| driver.event_record(state.empty[slot], down.raw))?;
        }
        Ok(())
    }

    fn up(&self, call: impl FnOnce(&dyn Driver) -> DriverResult) -> Result<()> {
        self.source.check("staged copy", call(&*self.source.driver))
    }

    fn down(&self, call: impl FnOnce(&dyn Driver) -> DriverResult) -> Result<()> {
        self.destination.check("staged copy", call(&*self.destination.driver))
    }
}
