//! Red zones of device memory: streams fill them and copy them out, the host checks the copies. Called by
//! [`Audit`](super::Audit). Uses the driver below the checker.

use super::{Found, POISON, ZONE, buffer, look, zone};
use crate::{
    driver::DriverRef,
    error::{Result, misuse::Allocation},
    memory::{Access, Block, DeviceHandle, StreamCore},
};
use std::{ops::Range, slice, sync::Arc, time::Duration};

/// Page-locked bytes that zones are copied to: room for a thousand small zones, or sixty of the largest.
const AREA: usize = 1 << 20;

struct Slot {
    bytes: Range<usize>,
    requested: usize,
    buffer: Option<Allocation>,
}

pub(super) struct Slots {
    /// The stream that copies zones and poisons memory.
    main: Arc<StreamCore>,
    driver: DriverRef,
    deadline: Duration,
    area: Option<*mut u8>,
    slots: Vec<Slot>,
    filled: usize,
    last: u64,
}

// SAFETY: the area belongs to the slots, and only their holder touches it.
unsafe impl Send for Slots {}

impl Slots {
    pub fn new(main: &Arc<StreamCore>, deadline: Duration) -> Self {
        let driver = main.handle.unwatched().clone();
        Slots { main: main.clone(), driver, deadline, area: None, slots: Vec::new(), filled: 0, last: 0 }
    }

    /// Fills a block's zone on `stream`, or else on the main stream. Returns whether that was possible.
    pub fn lay(&self, block: &Block, stream: Option<&Arc<StreamCore>>) -> bool {
        let (zone, stream) = (zone(block), stream.unwrap_or(&self.main));
        block.hazards.begin();
        // The range includes the last requested byte: an operation that touches that byte, on any stream, is likely to
        // be the one that writes too far, and then it comes after the fill.
        let bytes = zone.start.saturating_sub(1)..zone.end;
        if block.hazards.lock().order("audit", stream, &bytes, Access::Write).is_err() {
            return false;
        }
        let at = block.address + zone.start as u64;
        // SAFETY: these bytes belong to the block; the stream waits for all operations that used them, and the fill is
        // noted as a use.
        if unsafe { self.driver.fill_u8(at, ZONE, zone.len(), stream.raw) }.is_err() {
            return false;
        }
        // The last requested byte is noted separately: its next write replaces this use. The use of the zone stays, and
        // would make every reader of the buffer wait for all that the stream has by then.
        let sequence = stream.submit();
        for part in [bytes.start..zone.start, zone] {
            block.hazards.note(stream, sequence, part, Access::Write);
        }
        true
    }

    /// Takes a freed block: its zone is copied out, if it was filled, and the rest is poisoned.
    pub fn returned(&mut self, handle: &DeviceHandle, block: &Block, laid: bool, found: &mut Found) {
        let (whole, zone) = (0..block.bytes, zone(block));
        if block.hazards.lock().order("audit", &self.main, &whole, Access::Write).is_err() {
            return;
        }
        if laid && let Some(slot) = self.room(handle, zone.len(), found) {
            let at = block.address + zone.start as u64;
            // SAFETY: the slot is free, and not touched before the copy is over. The copy comes after the block's uses
            // on this stream, and is noted as a use.
            if unsafe { self.driver.copy_to_host(slot, at, zone.len(), self.main.raw) }.is_ok() {
                self.last = self.main.submit();
                block.hazards.note(&self.main, self.last, whole.clone(), Access::Write);
                let bytes = self.filled..self.filled + zone.len();
                self.filled = bytes.end;
                self.slots.push(Slot { bytes, requested: block.requested, buffer: buffer(handle, block.address) });
            }
        }
        if block.requested > 0 {
            // SAFETY: as above; only the next owner may use these bytes again, and comes after this fill.
            let poisoned = unsafe { self.driver.fill_u8(block.address, POISON, block.requested, self.main.raw) };
            if poisoned.is_ok() {
                block.hazards.note(&self.main, self.main.submit(), whole, Access::Write);
            }
        }
    }

    /// A slot for a copy. Waits when the area is full.
    fn room(&mut self, handle: &DeviceHandle, bytes: usize, found: &mut Found) -> Option<*mut u8> {
        if self.filled + bytes > AREA
            && let Err(error) = self.look(handle, found)
        {
            event!(warn, "red_zone_unread", device = handle.device, %error, "a red zone was not looked at");
            return None;
        }
        if self.area.is_none() {
            self.area = self.driver.host_alloc(AREA).ok();
        }
        // A zone that is larger than the area is not checked.
        self.area.filter(|_| self.filled + bytes <= AREA).map(|area| area.wrapping_add(self.filled))
    }

    pub fn look(&mut self, handle: &DeviceHandle, found: &mut Found) -> Result<()> {
        let Some(area) = self.area.filter(|_| !self.slots.is_empty()) else { return Ok(()) };
        self.main.wait_host("audit", self.last, self.deadline)?;
        for slot in self.slots.drain(..) {
            // SAFETY: within the area. The copy that filled it is over, and none comes after it.
            let copied = unsafe { slice::from_raw_parts(area.add(slot.bytes.start), slot.bytes.len()) };
            found.extend(look(handle.device, copied, slot.requested, || slot.buffer));
        }
        self.filled = 0;
        Ok(())
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let over = self.slots.is_empty() || self.main.has_completed(self.last);
        if let Some(area) = self.area.take().filter(|_| over) {
            // SAFETY: the area came from this driver, and no copy into it is in flight; if one may be, the area is
            // leaked.
            let _ = unsafe { self.driver.host_free(area) };
        }
    }
}
