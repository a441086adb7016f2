//! Red zones of device memory: laid and copied out by operations of its streams, looked at by the host when they have
//! run.

use super::{Found, POISON, ZONE, buffer, look, zone};
use crate::{
    driver::{DriverRef, check::Allocation},
    error::Result,
    memory::{block::Block, handle::DeviceHandle, hazard::Access, stream::StreamCore},
};
use std::{ops::Range, slice, sync::Arc, time::Duration};

/// Page-locked bytes that zones are copied to: a thousand small ones, or sixty of the largest.
const AREA: usize = 1 << 20;

/// What was copied out and not looked at.
struct Slot {
    /// In the area.
    bytes: Range<usize>,
    requested: usize,
    buffer: Option<Allocation>,
}

pub(super) struct Slots {
    /// The stream that zones are copied and memory is poisoned on.
    main: Arc<StreamCore>,
    /// The device itself, below the checker.
    driver: DriverRef,
    deadline: Duration,
    /// Made when first needed.
    area: Option<*mut u8>,
    slots: Vec<Slot>,
    filled: usize,
    /// The number of the last copy.
    last: u64,
}

// SAFETY: the area is the slots' own, and is touched only by whoever has them.
unsafe impl Send for Slots {}

impl Slots {
    pub fn new(main: &Arc<StreamCore>, deadline: Duration) -> Self {
        let driver = main.handle.unwatched().clone();
        Slots { main: main.clone(), driver, deadline, area: None, slots: Vec::new(), filled: 0, last: 0 }
    }

    /// Fills a block's zone, on the stream that asked for it or else on the main one; whether that could be done.
    pub fn lay(&self, block: &Block, stream: Option<&Arc<StreamCore>>) -> bool {
        let (zone, stream) = (zone(block), stream.unwrap_or(&self.main));
        block.hazards.begin();
        // With the last byte that was asked for: whoever touches that, on whatever stream, is likely to be the one that
        // goes too far, and then comes after the fill.
        let bytes = zone.start.saturating_sub(1)..zone.end;
        if block.hazards.order("audit", stream, &bytes, Access::Write).is_err() {
            return false;
        }
        let at = block.address + zone.start as u64;
        // SAFETY: these bytes are the block's own; the stream waits for all that used them, and the fill is noted as a
        // use.
        if unsafe { self.driver.fill_u8(at, ZONE, zone.len(), stream.raw) }.is_err() {
            return false;
        }
        // That byte by itself: its next write stands for it, whereas the zone's use stays, and would keep readers of
        // the buffer waiting for whatever the stream has by then.
        let sequence = stream.submit();
        for part in [bytes.start..zone.start, zone] {
            block.hazards.note(stream, sequence, part, Access::Write);
        }
        true
    }

    /// A block has come home: its zone is copied out, if it was laid, and the rest is poisoned.
    pub fn returned(&mut self, handle: &DeviceHandle, block: &Block, laid: bool, found: &mut Found) {
        let (whole, zone) = (0..block.bytes, zone(block));
        if block.hazards.order("audit", &self.main, &whole, Access::Write).is_err() {
            return;
        }
        if laid && let Some(slot) = self.room(handle, zone.len(), found) {
            let at = block.address + zone.start as u64;
            // SAFETY: the slot is free, and not touched before the copy is over; the block's uses come before it on
            // this stream, and it is noted as one.
            if unsafe { self.driver.copy_to_host(slot, at, zone.len(), self.main.raw) }.is_ok() {
                self.last = self.main.submit();
                block.hazards.note(&self.main, self.last, whole.clone(), Access::Write);
                let bytes = self.filled..self.filled + zone.len();
                self.filled = bytes.end;
                self.slots.push(Slot { bytes, requested: block.requested, buffer: buffer(handle, block.address) });
            }
        }
        if block.requested > 0 {
            // SAFETY: as above; nobody is to use these bytes again but the next owner, who comes after this.
            let poisoned = unsafe { self.driver.fill_u8(block.address, POISON, block.requested, self.main.raw) };
            if poisoned.is_ok() {
                block.hazards.note(&self.main, self.main.submit(), whole, Access::Write);
            }
        }
    }

    /// A place for a copy; waits when there is none left.
    fn room(&mut self, handle: &DeviceHandle, bytes: usize, found: &mut Found) -> Option<*mut u8> {
        if self.filled + bytes > AREA
            && let Err(error) = self.look(handle, found)
        {
            event!(warn, device = handle.device, %error, "a red zone was not looked at");
            return None;
        }
        if self.area.is_none() {
            self.area = self.driver.host_alloc(AREA).ok();
        }
        // Larger than the area: then it is no zone of ours.
        self.area.filter(|_| self.filled + bytes <= AREA).map(|area| area.wrapping_add(self.filled))
    }

    /// Looks at what was copied out, once it is there.
    pub fn look(&mut self, handle: &DeviceHandle, found: &mut Found) -> Result<()> {
        let Some(area) = self.area.filter(|_| !self.slots.is_empty()) else { return Ok(()) };
        self.main.wait_host("audit", self.last, self.deadline)?;
        for slot in self.slots.drain(..) {
            // SAFETY: within the area; the copy that filled it is over, and there is none after it.
            let copied = unsafe { slice::from_raw_parts(area.add(slot.bytes.start), slot.bytes.len()) };
            found.extend(look(handle, copied, slot.requested, || slot.buffer));
        }
        self.filled = 0;
        Ok(())
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let over = self.slots.is_empty() || self.main.has_completed(self.last);
        if let Some(area) = self.area.take().filter(|_| over) {
            // SAFETY: it came from this driver, and no copy into it is in flight. Where one may be, it is leaked.
            let _ = unsafe { self.driver.host_free(area) };
        }
    }
}
