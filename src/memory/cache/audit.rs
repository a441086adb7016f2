//! Red zones and poison, for `Check::Memory`: they find writes past the end of a buffer, and make reads of a dropped
//! buffer return implausible numbers.
//!
//! ```text
//!   | bytes that were asked for    | red zone, 256 bytes or more | the next block
//!   ^ 0xCB when it is freed        ^ 0xA5 when it is handed out, checked when it is freed
//! ```
//!
//! Every block ends with a zone, so a write before the start of a block is found as well, in the zone of the block
//! before it. (Red zones are AddressSanitizer's, Serebryany et al. 2012. Poison: pytorch#58385.)
//!
//! Operations of the device's streams fill and copy device memory ([`slots`]). The zone is filled on the stream that
//! asked for the block; in a capture on the main stream, because each launch of the graph would repair the zone. The
//! rest happens on the main stream, after all uses of the block. To the checker a zone has no owner, so these
//! operations use the driver below it. The host itself fills and checks page-locked memory, once no copy uses it; until
//! then its blocks are [`held`](Audit::held).
//!
//! A failure in here costs a check, nothing else.

mod slots;

use super::Cache;
use crate::driver::{Address, host};
use crate::error::{
    Result,
    misuse::{Allocation, Kind, Operation, Report},
};
use crate::memory::{Block, DeviceHandle, StreamCore};
use slots::Slots;
use std::collections::{HashSet, VecDeque};
use std::{mem, ops::Range, slice, sync::Arc};

/// Smallest red zone behind a buffer.
pub(super) const RED: usize = 256;
/// Fill byte of a red zone: neither zero nor all ones, and different from freed or fresh memory.
const ZONE: u8 = 0xA5;
/// Fill byte of freed memory; -2.67e7 as `f32`. Fresh memory of software GPUs has it, too, in debug builds.
const POISON: u8 = 0xCB;

type Found = Vec<Arc<Report>>;

pub(super) struct Audit {
    handle: Arc<DeviceHandle>,
    armed: HashSet<Address>,
    slots: Option<Slots>,
    /// Freed page-locked blocks that were not checked yet.
    held: VecDeque<Box<Block>>,
    found: Found,
}

fn zone(block: &Block) -> Range<usize> {
    block.requested..block.bytes
}

impl Audit {
    fn new(handle: &Arc<DeviceHandle>, slots: Option<Slots>) -> Box<Self> {
        let (armed, held, found) = Default::default();
        Box::new(Audit { handle: handle.clone(), armed, slots, held, found })
    }

    /// Takes a freed block. None if the block is held back: page-locked memory may still be in use.
    pub(super) fn returned(&mut self, block: Box<Block>, remote: bool) -> Option<Box<Block>> {
        let armed = self.armed.contains(&block.address);
        match &mut self.slots {
            Some(slots) => {
                self.armed.remove(&block.address);
                // When stepped, no operation may depend on time. When another thread drops a buffer depends on time,
                // and so does which thread drops the last handle of a block that other devices have used.
                let by_chance = self.handle.stepped && (remote || block.hazards.was_used_by_peer(self.handle.device));
                if !by_chance {
                    slots.returned(&self.handle, &block, armed, &mut self.found);
                }
            }
            None if armed => {
                self.held.push_back(block);
                return None;
            }
            None => {}
        }
        Some(block)
    }
}

fn look(device: usize, zone: &[u8], requested: usize, of: impl FnOnce() -> Option<Allocation>) -> Option<Arc<Report>> {
    let first = zone.iter().position(|byte| *byte != ZONE)?;
    let last = zone.iter().rposition(|byte| *byte != ZONE).unwrap_or(first);
    let count = zone.iter().filter(|byte| **byte != ZONE).count();
    let bytes = requested + first..requested + last + 1;
    let far = if last == first { String::new() } else { format!(", the last {last} bytes behind") };
    let missing = format!(
        "{count} of the bytes behind the buffer are not as the pool left them, the first {first} bytes behind its \
         end{far}: while the buffer was live, a kernel or a raw copy wrote past the end of it, or before the start of \
         the buffer behind it"
    );
    let (op, detail) = ("audit", String::new());
    let now = Operation { op, detail, site: None, device: Some(device), stream: None, write: true };
    let report = Report { kind: Kind::OutOfBounds, now, before: None, bytes, allocation: of(), missing };
    event!(error, "red_zone_damaged", device, "{report}");
    Some(Arc::new(report))
}

fn buffer(handle: &DeviceHandle, address: Address) -> Option<Allocation> {
    handle.watch()?.checker.buffer(address)
}

impl Cache {
    /// Starts the audit, if the settings ask for it. `main` is the stream on which device memory is checked.
    pub(crate) fn audited(&mut self, main: Option<&Arc<StreamCore>>) {
        // Dry software GPUs only count time; their memory has no contents.
        if self.settings.audit && !host::is_dry(&*self.handle.driver) {
            let slots = main.map(|main| Slots::new(main, self.settings.deadline));
            self.audit = Some(Audit::new(&self.handle, slots));
            self.watched = true;
        }
    }

    #[inline]
    pub(super) fn with_zone(&self, bytes: usize) -> usize {
        if self.audit.is_none() { bytes } else { bytes.saturating_add(RED) }
    }

    /// Fills the red zone of a block that was handed out for `stream`. None: the block was handed out in a capture.
    #[inline]
    pub(crate) fn lay_zone(&mut self, block: &Block, stream: Option<&Arc<StreamCore>>) {
        if let Some(audit) = &mut self.audit
            && let Some(slots) = &audit.slots
            && slots.lay(block, stream)
        {
            audit.armed.insert(block.address);
        }
    }

    pub(crate) fn begin_audit(&mut self) {
        if self.audit.is_some() && !self.handle.stepped {
            self.collect();
        }
    }

    /// After the device has drained: checks the zones of all freed blocks. The first find is an error.
    pub(crate) fn audit(&mut self, op: &'static str) -> Result<()> {
        let Some(audit) = &mut self.audit else { return Ok(()) };
        if let Some(slots) = &mut audit.slots {
            slots.look(&self.handle, &mut audit.found)?;
        }
        self.verdict(op)
    }

    pub(crate) fn verdict(&mut self, op: &'static str) -> Result<()> {
        let found = self.audit.as_mut().map(|audit| mem::take(&mut audit.found)).unwrap_or_default();
        found.into_iter().next().map_or(Ok(()), |report| Err(self.handle.misuse(op, report)))
    }

    /// Ends the audit; `close` will return what is found now. Returns the blocks that were held back.
    pub(super) fn end_audit(&mut self) -> VecDeque<Box<Block>> {
        let Some(mut audit) = self.audit.take() else { return VecDeque::new() };
        if let Some(slots) = &mut audit.slots
            && let Err(error) = slots.look(&self.handle, &mut audit.found)
        {
            event!(
                warn, "red_zone_unread", device = self.handle.device, %error,
                "red zones of the last buffers were not looked at"
            );
        }
        for report in mem::take(&mut audit.found) {
            self.handle.refuse(report);
        }
        mem::take(&mut audit.held)
    }

    /// Fills the red zone of a page-locked block that nothing uses any more.
    pub(crate) fn lay_zone_here(&mut self, block: &Block) {
        let Some(audit) = &mut self.audit else { return };
        let zone = zone(block);
        // SAFETY: these bytes belong to the block, no operation is given them, and earlier owners' operations are over.
        unsafe { (block.address as *mut u8).add(zone.start).write_bytes(ZONE, zone.len()) };
        audit.armed.insert(block.address);
    }

    /// Each must be checked ([`look_here`]) or [held back](Self::hold) again.
    pub(crate) fn held(&mut self) -> VecDeque<Box<Block>> {
        self.collect();
        self.audit.as_mut().map(|audit| mem::take(&mut audit.held)).unwrap_or_default()
    }

    pub(crate) fn hold(&mut self, block: Box<Block>) {
        match &mut self.audit {
            Some(audit) if block.is_owned_by(&self.owner) => audit.held.push_back(block),
            _ => block.release(),
        }
    }

    /// Takes a block that was checked, or cannot be. Releases it if another cache has replaced the block's own.
    pub(crate) fn looked_at(&mut self, block: Box<Block>, found: Option<Arc<Report>>) {
        if let Some(audit) = &mut self.audit {
            audit.found.extend(found);
            if block.is_owned_by(&self.owner) {
                audit.armed.remove(&block.address);
                return self.put(block);
            }
        }
        block.release();
    }
}

/// Checks the zone of a page-locked block that nothing uses any more, and poisons the block.
pub(crate) fn look_here(block: &Block) -> Option<Arc<Report>> {
    let (handle, zone, at) = (&block.handle, zone(block), block.address as *mut u8);
    // SAFETY: the block was freed, so only the caller has its bytes, and all operations on it are over. The driver has
    // zeroed page-locked memory, so every byte has a value.
    let behind = unsafe { slice::from_raw_parts(at.add(zone.start), zone.len()) };
    let found = look(handle.device, behind, block.requested, || buffer(handle, block.address));
    // SAFETY: as above.
    unsafe { at.write_bytes(POISON, block.requested) };
    found
}
