//! Red zones and poison, for [`Check::Memory`](crate::Check::Memory): who writes past the end of a buffer is found out,
//! and who reads a buffer that was dropped finds no plausible numbers.
//!
//! ```text
//!   | what was asked for          | red zone, 256 bytes or more | the next block
//!   ^ 0xCB when it comes home     ^ 0xA5 from when it is handed out, looked at when it comes home
//! ```
//!
//! With an audit every block has room for a red zone, which is all of it that was not asked for. Every block ends with
//! one, so who writes before the start of a block is found out as well, by the zone of the block before it. Red zones
//! are AddressSanitizer's (Serebryany et al., "AddressSanitizer: a fast address sanity checker", 2012); there
//! instrumented code looks before it writes, here the pool looks when it is too late. That freed memory be poisoned was
//! asked for in pytorch#58385.
//!
//! Device memory is filled and copied by operations of its streams ([`slots`]): the zone on the stream that asked for
//! the block (in a capture on the main stream: the graph may never be launched, or many times, each of which would mend
//! the zone), the rest on the device's main stream, after all uses of the block; both are noted as uses, as any
//! operation is. To the checker a zone belongs to nobody, so the driver below it is used. Page-locked memory is the
//! host's to fill and to look at, once no copy uses it: until then its blocks are held back ([`held`](Audit::held)).
//!
//! What fails in here costs a look, nothing else: a zone that could not be filled is not looked at, memory that could
//! not be poisoned is not.

mod slots;

use super::Cache;
use crate::{
    driver::{
        Address,
        check::{Allocation, Deed, Kind, Report},
        host,
    },
    error::Result,
    memory::{block::Block, handle::DeviceHandle, stream::StreamCore},
};
use slots::Slots;
use std::{
    collections::{HashSet, VecDeque},
    mem,
    ops::Range,
    slice,
    sync::Arc,
};

/// The least that lies behind a buffer.
pub(super) const RED: usize = 256;
/// What a red zone is filled with: neither zeros nor ones, nor what freed or fresh memory holds.
const ZONE: u8 = 0xA5;
/// What freed memory is filled with, as fresh memory of software GPUs is in debug builds: -2.67e7 as `f32`.
const POISON: u8 = 0xCB;

/// What was found, in the order of the finds.
type Found = Vec<Arc<Report>>;

/// The audit of one cache.
pub(super) struct Audit {
    handle: Arc<DeviceHandle>,
    /// Blocks in use whose zones are filled.
    armed: HashSet<Address>,
    /// Of device memory.
    slots: Option<Slots>,
    /// Page-locked blocks that have come home and were not looked at.
    held: VecDeque<Box<Block>>,
    found: Found,
}

/// The bytes of a block behind what was asked for.
fn zone(block: &Block) -> Range<usize> {
    block.requested..block.bytes
}

impl Audit {
    fn new(handle: &Arc<DeviceHandle>, slots: Option<Slots>) -> Box<Self> {
        let (armed, held, found) = Default::default();
        Box::new(Audit { handle: handle.clone(), armed, slots, held, found })
    }

    /// A block has come home. None if it is held back: it was page-locked memory, which may be in use.
    pub(super) fn returned(&mut self, block: Box<Block>, remote: bool) -> Option<Box<Block>> {
        let armed = self.armed.contains(&block.address);
        match &mut self.slots {
            Some(slots) => {
                self.armed.remove(&block.address);
                // In steps no operation may depend on time. When others drop a buffer, and who drops the last handle of
                // one that other devices have used, does.
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

/// What was found behind a buffer.
fn look(
    handle: &DeviceHandle,
    zone: &[u8],
    requested: usize,
    of: impl FnOnce() -> Option<Allocation>,
) -> Option<Arc<Report>> {
    let first = zone.iter().position(|byte| *byte != ZONE)?;
    let last = zone.iter().rposition(|byte| *byte != ZONE).unwrap_or(first);
    let count = zone.iter().filter(|byte| **byte != ZONE).count();
    let bytes = requested + first..requested + last + 1;
    let far = if last == first { String::new() } else { format!(", the last {last} bytes behind") };
    let missing = format!(
        "{count} of the bytes behind the buffer are not as the pool left them, the first {first} bytes behind its end{far}: \
         while the buffer was live, a kernel or a raw copy wrote past the end of it, or before the start of the buffer behind it"
    );
    let now =
        Deed { op: "audit", detail: String::new(), site: None, device: Some(handle.device), stream: None, write: true };
    let report = Report { kind: Kind::OutOfBounds, now, before: None, bytes, allocation: of(), missing };
    event!(error, device = handle.device, "{report}");
    Some(Arc::new(report))
}

/// What the checker knows of the buffer that starts here.
fn buffer(handle: &DeviceHandle, address: Address) -> Option<Allocation> {
    handle.watch()?.checker.buffer(address)
}

impl Cache {
    /// From now on red zones are laid, if the settings say so. `main` is the stream that device memory is looked at on.
    pub(crate) fn audited(&mut self, main: Option<&Arc<StreamCore>>) {
        // Where operations only take their time, memory holds nothing.
        if self.settings.audit && !host::is_dry(&*self.handle.driver) {
            let slots = main.map(|main| Slots::new(main, self.settings.deadline));
            self.audit = Some(Audit::new(&self.handle, slots));
            self.watched = true;
        }
    }

    /// The bytes that a request needs.
    #[inline]
    pub(super) fn with_zone(&self, bytes: usize) -> usize {
        if self.audit.is_none() { bytes } else { bytes.saturating_add(RED) }
    }

    /// Lays the red zone of a block that was handed out for `stream`; of one that was handed out in a capture, for
    /// none.
    #[inline]
    pub(crate) fn lay_zone(&mut self, block: &Block, stream: Option<&Arc<StreamCore>>) {
        if let Some(audit) = &mut self.audit
            && let Some(slots) = &audit.slots
            && slots.lay(block, stream)
        {
            audit.armed.insert(block.address);
        }
    }

    /// Before the device drains: takes in what others have dropped. In steps it would depend on time what that is.
    pub(crate) fn begin_audit(&mut self) {
        if self.audit.is_some() && !self.handle.stepped {
            self.collect();
        }
    }

    /// When the device has drained: looks at the zones of all blocks that have come home. What was found first is an
    /// error.
    pub(crate) fn audit(&mut self, op: &'static str) -> Result<()> {
        let Some(audit) = &mut self.audit else { return Ok(()) };
        if let Some(slots) = &mut audit.slots {
            slots.look(&self.handle, &mut audit.found)?;
        }
        self.verdict(op)
    }

    /// What was found first, as an error; the rest has been logged.
    pub(crate) fn verdict(&mut self, op: &'static str) -> Result<()> {
        let found = self.audit.as_mut().map(|audit| mem::take(&mut audit.found)).unwrap_or_default();
        found.into_iter().next().map_or(Ok(()), |report| Err(self.handle.misuse(op, report)))
    }

    /// The last of it: what is found now, `close` will tell. Returns what was held back.
    pub(super) fn end_audit(&mut self) -> VecDeque<Box<Block>> {
        let Some(mut audit) = self.audit.take() else { return VecDeque::new() };
        if let Some(slots) = &mut audit.slots
            && let Err(error) = slots.look(&self.handle, &mut audit.found)
        {
            event!(warn, device = self.handle.device, %error, "red zones of the last buffers were not looked at");
        }
        for report in mem::take(&mut audit.found) {
            self.handle.refuse(report);
        }
        mem::take(&mut audit.held)
    }
}

/// Page-locked memory, looked at by the host.
impl Cache {
    /// Lays the red zone of a page-locked block. Nobody uses it any more.
    pub(crate) fn lay_zone_here(&mut self, block: &Block) {
        let Some(audit) = &mut self.audit else { return };
        let zone = zone(block);
        // SAFETY: these bytes are the block's own, no operation is given them, and those of earlier owners are over.
        unsafe { (block.address as *mut u8).add(zone.start).write_bytes(ZONE, zone.len()) };
        audit.armed.insert(block.address);
    }

    /// Blocks that have come home and were not looked at: each is to be looked at ([`look_here`]) or
    /// [held back](Self::hold) again.
    pub(crate) fn held(&mut self) -> VecDeque<Box<Block>> {
        self.collect();
        self.audit.as_mut().map(|audit| mem::take(&mut audit.held)).unwrap_or_default()
    }

    /// A block that is in use still.
    pub(crate) fn hold(&mut self, block: Box<Block>) {
        match &mut self.audit {
            Some(audit) if block.is_owned_by(&self.owner) => audit.held.push_back(block),
            _ => block.release(),
        }
    }

    /// A block that was looked at, or cannot be, comes to rest; unless another cache has come in place of its own
    /// meanwhile.
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

/// Looks at the zone of a page-locked block that nothing uses any more, and poisons it.
pub(crate) fn look_here(block: &Block) -> Option<Arc<Report>> {
    let (handle, zone, at) = (&block.handle, zone(block), block.address as *mut u8);
    // SAFETY: the block has come home, so the caller alone has its bytes; all operations on it are over. Page-locked
    // memory has been zeroed by the driver, so there are no bytes without a value.
    let behind = unsafe { slice::from_raw_parts(at.add(zone.start), zone.len()) };
    let found = look(handle, behind, block.requested, || buffer(handle, block.address));
    // SAFETY: as above.
    unsafe { at.write_bytes(POISON, block.requested) };
    found
}
