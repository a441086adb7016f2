//! Between devices: directly by the copy engines, or staged through the host.
//!
//! The staged copy is the schedule of the CUDA Handbook's listing 9.1 (`chMemcpyPeerToPeer`): two portable page-locked
//! buffers and two events; the source's stream fills one buffer while the destination's stream empties the other, and
//! nobody waits on the CPU.
//!
//! ```text
//! source stream       up 0 | up 1 |   wait empty 0, up 2 | wait empty 1, up 3 | ...
//!                        \      \      /                  /
//! destination stream      down 0 \----/ down 1 ----------/  down 2 | ...
//! ```
//!
//! One of the two streams is the caller's current one. The other belongs to the pair; it starts after the caller's
//! stream (which waited for all hazards), and the caller's stream ends after it, so to the rest of the crate a staged
//! copy is one operation of one stream.

use crate::{
    device::Device,
    driver::{Address, Driver, RawEvent},
    error::Result,
    memory::{block::BlockRef, handle::DeviceHandle, hazard::Access, pinned::Locality, stream::StreamCore},
    mutation::Bug,
    thread::worker::Shared,
};
use parking_lot::Mutex;
use std::sync::Arc;

/// Bytes of a staging buffer: at most this much goes at once. On an H200 a copy of 256 MB reached 89 % of the slower
/// bus direction in pieces of 4 MiB, and 92 % in these; the aim is 90.
const PIECE: usize = 8 << 20;
/// Smaller copies go in about eight pieces, so that both buses work most of the time; but not in pieces below this.
const SMALLEST: usize = 256 << 10;

/// Submits a copy to `dev`'s current stream; one of the devices is `dev`'s. Hazards are the caller's `Op`'s.
pub(crate) fn copy(
    dev: &Device,
    dst: Address,
    dst_device: usize,
    src: Address,
    src_device: usize,
    bytes: usize,
) -> Result<()> {
    let (shared, handle) = (&dev.worker.shared, &dev.worker.handle);
    if bytes == 0 {
        return Ok(());
    }
    if dst_device == src_device {
        // SAFETY: both ranges are live, do not overlap (one is borrowed exclusively), ordered by the caller's `Op`.
        let copied = unsafe { handle.driver.copy_within(dst, src, bytes, dev.stream.raw) };
        return handle.check("copy", copied);
    }
    let other = if dst_device == dev.index() { src_device } else { dst_device };
    if shared.is_direct(dev.index(), other) {
        let (to, from) = (&*shared.handles[dst_device].driver, &*shared.handles[src_device].driver);
        // SAFETY: as above.
        let copied = unsafe { handle.driver.copy_peer(dst, to, src, from, bytes, dev.stream.raw) };
        return handle.check("copy", copied);
    }
    shared.stage(src_device, dst_device)?.copy(shared, &dev.stream, dev.index() == src_device, dst, src, bytes)
}

/// The means of staged copies from one device to another, shared by whoever copies on that pair.
pub(crate) struct Stage {
    source: Arc<DeviceHandle>,
    destination: Arc<DeviceHandle>,
    state: Mutex<State>,
}

struct State {
    source: Arc<StreamCore>,
    destination: Arc<StreamCore>,
    buffers: [BlockRef; 2],
    /// Recorded on the source's side when a buffer is full, and on the destination's when it is empty again.
    full: [RawEvent; 2],
    empty: [RawEvent; 2],
    next: usize,
    /// A copy has failed half way: the events do not cover all uses of the buffers.
    spoilt: bool,
}

/// Two pieces, near to the device that fills them.
fn buffers(shared: &Shared, source: &DeviceHandle) -> Result<[BlockRef; 2]> {
    let piece = || shared.pinned.block("staged copy", PIECE, Locality::Device(source.device));
    Ok([piece()?, piece()?])
}

impl Stage {
    pub(crate) fn new(shared: &Shared, source: usize, destination: usize) -> Result<Self> {
        let (source, destination) = (shared.handles[source].clone(), shared.handles[destination].clone());
        let event = |handle: &DeviceHandle| handle.check("staged copy", handle.take_event(false));
        let state = State {
            source: StreamCore::new(&source, "staged copy")?,
            destination: StreamCore::new(&destination, "staged copy")?,
            buffers: buffers(shared, &source)?,
            full: [event(&source)?, event(&source)?],
            empty: [event(&destination)?, event(&destination)?],
            next: 0,
            spoilt: false,
        };
        // Both buffers are empty.
        for event in state.empty {
            let handle = &destination;
            handle.check("staged copy", handle.driver.event_record(event, state.destination.raw))?;
        }
        Ok(Stage { source, destination, state: Mutex::new(state) })
    }

    /// Submits the copy. `current` is the caller's stream, on the source's device if `on_source`.
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
        if state.spoilt {
            state.buffers = buffers(shared, &self.source)?;
            state.spoilt = false;
        }
        let (up, down) = if on_source {
            (current.clone(), state.destination.clone())
        } else {
            (state.source.clone(), current.clone())
        };
        let other = if on_source { &down } else { &up };
        other.wait_for("staged copy", current, current.submit())?;
        let copied = self.pieces(state, (&up, &down), dst, src, bytes);
        // Also after a failure: what was submitted to the other stream belongs to the caller's operation.
        let last = other.submit();
        let joined = current.wait_for("staged copy", other, last);
        if copied.is_err() || joined.is_err() {
            state.spoilt = true;
            for buffer in &state.buffers {
                // As reads, since a write would stand for what was noted before it.
                buffer.hazards.note(current, current.submit(), 0..PIECE, Access::Read);
                buffer.hazards.note(other, last, 0..PIECE, Access::Read);
            }
        }
        if joined.is_err() {
            // The caller's operation ends before its part on the other stream does, so that must be over now.
            other.wait_idle("staged copy", shared.deadline, || false)?;
        }
        copied.and(joined)
    }

    fn pieces(
        &self,
        state: &mut State,
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
            if !self.source.injected(Bug::OneStagingEvent) {
                up.wait_raw("staged copy", state.empty[slot], &self.destination)?;
            }
            // SAFETY: the source is live and ordered before this stream; the buffer is empty once the event has passed.
            self.up(|driver| unsafe { driver.copy_to_host(buffer, src + at, len, up.raw) })?;
            self.up(|driver| driver.event_record(state.full[slot], up.raw))?;
            down.wait_raw("staged copy", state.full[slot], &self.source)?;
            // SAFETY: the buffer is full once the event has passed; the destination is live and ordered.
            self.down(|driver| unsafe { driver.copy_to_device(dst + at, buffer, len, down.raw) })?;
            self.down(|driver| driver.event_record(state.empty[slot], down.raw))?;
        }
        Ok(())
    }

    fn up(&self, call: impl FnOnce(&dyn Driver) -> crate::driver::DriverResult) -> Result<()> {
        self.source.check("staged copy", call(&*self.source.driver))
    }

    fn down(&self, call: impl FnOnce(&dyn Driver) -> crate::driver::DriverResult) -> Result<()> {
        self.destination.check("staged copy", call(&*self.destination.driver))
    }
}

impl Drop for State {
    fn drop(&mut self) {
        for (slot, buffer) in self.buffers.iter().enumerate() {
            let over = |stream: &StreamCore, event| stream.handle.driver.event_query(event).unwrap_or(true);
            if !(over(&self.source, self.full[slot]) && over(&self.destination, self.empty[slot])) {
                // A stream got stuck with a copy in this buffer: it must never be given to anyone else.
                std::mem::forget(buffer.clone());
            }
        }
        for event in self.full {
            self.source.handle.give_event(event, false);
        }
        for event in self.empty {
            self.destination.handle.give_event(event, false);
        }
    }
}
