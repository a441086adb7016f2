//! The signal pads of a pool: the memory in which the kernels of a collective wait for each other on the devices, and
//! words in page-locked memory by which the host ends their waiting.
//!
//! [`layout`](super::layout) and `kernels/meet.cuh` have the layout and the protocol; a gang raises the abort words
//! ([`Alarm`]). Devices without access to each other's memory keep what others write (flags and packets) and read
//! (stages) in page-locked memory of the host. Invariant: an abort word only grows. Each device runs one gang at a
//! time, in the order of the gangs' places.

use super::{
    MOST, PadLayout, STAGED_BLOCKS,
    layout::{STAGED_COUNTS, STAGED_SLOTS, reported},
};
use crate::gang::{Alarm, Gang};
use crate::sync::{load_word, raise_word, store_word};
use crate::{driver::Address, error::Result, memory::DeviceHandle};
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

/// Page-locked bytes for each device: its abort word, the place of the gang that launches graphs, and its report word.
const LINES: usize = 256;
pub(crate) const PLACE: usize = 8;
pub(crate) const REPORT: usize = 128;

/// Bytes of a slot. A stage then has 4 MiB: pieces are still in the host's cache when others read them.
pub(crate) const SLOT: usize = 16 << 10;
const STAGE: usize = SLOT * STAGED_SLOTS * STAGED_BLOCKS;

pub(crate) struct SignalPad {
    /// One per device, by ordinal. Dropped before the words: then no kernel is left that polls them.
    devices: Vec<DevicePages>,
    /// One per device, where the devices have no access to each other's memory; else empty.
    pages: Vec<HostPages>,
    words: Arc<Words>,
    layout: PadLayout,
    gangs: Vec<Mutex<u64>>,
}

/// Set when a device could not be drained: its kernels may still use the memory, which is then not freed.
#[derive(Default)]
struct Kept(OnceLock<()>);

impl Kept {
    fn set(&self) -> bool {
        self.0.set(()).is_ok()
    }

    /// Whether it is set. Then the device's context stays as long as the memory is used.
    fn holds(&self, handle: &Arc<DeviceHandle>) -> bool {
        self.0.get().inspect(|()| handle.keep_context()).is_some()
    }
}

/// Memory of a device, outside of its memory pool: there it would count as in use for ever. Dropping it frees it.
pub(crate) struct DevicePages(Arc<DeviceHandle>, Address, Kept);

impl DevicePages {
    pub(crate) fn new(handle: &Arc<DeviceHandle>, bytes: usize) -> Result<Self> {
        let first = handle.check_alloc("signals", bytes, handle.driver.mem_alloc(bytes))?;
        Ok(DevicePages(handle.clone(), first, Kept::default()))
    }

    pub(crate) fn address(&self) -> Address {
        self.1
    }
}

impl Drop for DevicePages {
    fn drop(&mut self) {
        if self.2.holds(&self.0) {
            return;
        }
        // SAFETY: either the set-up has failed before any kernel knew the memory; or the pool's devices have drained:
        // its threads, which had shares of `SignalPad`, are gone, and none of them has called `keep`.
        let _ = unsafe { self.0.driver.mem_free(self.1) };
    }
}

pub(crate) struct HostPages {
    handle: Arc<DeviceHandle>,
    first: usize,
    kept: Kept,
}

impl HostPages {
    fn new(handle: &Arc<DeviceHandle>, bytes: usize) -> Result<Self> {
        let first = handle.check_alloc("signals", bytes, handle.driver.host_alloc(bytes))?.expose_provenance();
        Ok(HostPages { handle: handle.clone(), first, kept: Kept::default() })
    }

    /// A signal pad of this layout in the host's memory, with counters and a stage. Call it near the device.
    pub(crate) fn for_pad(handle: &Arc<DeviceHandle>, layout: PadLayout, devices: usize) -> Result<Self> {
        HostPages::new(handle, layout.bytes(devices) + STAGED_COUNTS + STAGE)
    }

    pub(crate) fn address(&self) -> Address {
        self.first as u64
    }

    fn at(&self, offset: usize) -> *mut u64 {
        std::ptr::with_exposed_provenance_mut(self.first + offset)
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        if self.kept.holds(&self.handle) {
            return;
        }
        // SAFETY: as for `DevicePages`.
        let _ = unsafe { self.handle.driver.host_free(self.at(0).cast()) };
    }
}

pub(crate) struct Words(HostPages);

impl Words {
    pub(crate) fn new(handle: &Arc<DeviceHandle>) -> Result<Self> {
        HostPages::new(handle, MOST * LINES).map(Words)
    }

    /// A new header for the pad of a device, whose peers have pads at these addresses.
    pub(crate) fn header(&self, layout: PadLayout, peers: &[Address], device: usize) -> Vec<u64> {
        layout.header(peers, self.abort(device) as u64, self.report(device) as u64)
    }

    fn abort(&self, device: usize) -> *mut u64 {
        self.0.at(device * LINES)
    }

    fn place(&self, device: usize) -> *mut u64 {
        self.0.at(device * LINES + PLACE)
    }

    fn report(&self, device: usize) -> *mut u64 {
        self.0.at(device * LINES + REPORT)
    }
}

impl SignalPad {
    /// The pads of a pool, from the pages of all its devices. Headers are written already.
    pub(crate) fn new(devices: Vec<DevicePages>, pages: Vec<HostPages>, words: Arc<Words>, layout: PadLayout) -> Self {
        let gangs = devices.iter().map(|_| Mutex::new(0)).collect();
        SignalPad { devices, pages, words, layout, gangs }
    }

    /// Never frees the memory: a device could not be drained, and its kernels may still use it.
    pub(crate) fn keep(&self) {
        if self.words.0.kept.set() {
            event!(warn, "signals_leaked", "signals that kernels may still use were leaked");
        }
        let all = self.devices.iter().map(|pages| &pages.2).chain(self.pages.iter().map(|pages| &pages.kept));
        for kept in all {
            kept.set();
        }
    }

    /// Whether the devices wait for each other in the host's memory, where they have stages.
    pub(crate) fn have_stages(&self) -> bool {
        !self.pages.is_empty()
    }

    /// Bytes from a device's signal pad to the counters of its stage, and to the stage.
    pub(crate) fn stage_offsets(&self) -> (u64, u64) {
        let counts = self.layout.bytes(self.devices.len());
        (counts as u64, (counts + STAGED_COUNTS) as u64)
    }

    pub(crate) fn layout(&self) -> PadLayout {
        self.layout
    }

    pub(crate) fn header(&self, device: usize) -> Vec<u64> {
        let shared = |k| self.pages.get(k).map_or(self.address(k), HostPages::address);
        let shared: Vec<_> = (0..self.devices.len()).map(shared).collect();
        self.words.header(self.layout, &shared, device)
    }

    /// Zeroes a device's pages of the host, with the counters.
    ///
    /// # Safety
    /// No other thread and no kernel uses them meanwhile.
    pub(crate) unsafe fn clear_host_pages(&self, device: usize) {
        let bytes = self.layout.bytes(self.devices.len()) + STAGED_COUNTS;
        // SAFETY: the pages have more bytes, and the caller promises that no other code uses them.
        unsafe { self.pages[device].at(0).cast::<u8>().write_bytes(0, bytes) };
    }

    pub(crate) fn address(&self, device: usize) -> Address {
        self.devices[device].1
    }

    /// Address and bytes of a device's inbox; no bytes: it has none.
    pub(crate) fn inbox(&self, device: usize) -> (Address, usize) {
        let inbox = self.layout.inbox(self.devices.len());
        (self.address(device) + inbox.start as u64, inbox.bytes())
    }

    /// Address and bytes of the two parts of a receiver's inbox that a sender writes.
    pub(crate) fn inbox_of_sender(&self, sender: usize, receiver: usize) -> [(Address, usize); 2] {
        let (devices, pad) = (self.devices.len(), self.address(receiver));
        let parts = self.layout.inbox(devices).of_sender(devices, sender, receiver);
        parts.map(|(offset, bytes)| (pad + offset as u64, bytes))
    }

    /// Most bytes that one member can send to another by the LL algorithm.
    pub(crate) fn ll_bytes(&self) -> usize {
        self.layout.packets * 8
    }

    /// Most bytes that one member can send to another by the eager algorithm; 0: it cannot.
    pub(crate) fn eager_bytes(&self) -> usize {
        self.layout.slot
    }

    /// A device enters a gang. Its kernels of earlier gangs have ended, or will never run.
    pub(crate) fn enter(&self, device: usize, gang: &Gang) {
        *self.gangs[device].lock() = gang.place();
        // A gang notes its failure before it raises the alarm: one that came too early is seen here.
        if gang.is_aborted() {
            self.raise(&[device], gang.place());
        }
    }

    /// Tells a graph's kernels in which gang they run. Before the launch; all work of earlier gangs is over.
    pub(crate) fn launches_in(&self, device: usize, place: u64) {
        // SAFETY: a word of `words`, which lives; one thread of the host writes it.
        unsafe { store_word(self.words.place(device), place) };
    }

    #[cfg(test)]
    pub(crate) fn place(&self, device: usize) -> u64 {
        // SAFETY: as above.
        unsafe { load_word(self.words.place(device)) }
    }

    #[cfg(test)]
    pub(crate) fn abort(&self, device: usize) -> u64 {
        // SAFETY: a word of `words`, which lives.
        unsafe { load_word(self.words.abort(device)) }
    }
}

impl Alarm for SignalPad {
    /// Ends the waiting of these devices' kernels, on the devices that are in the gang. A device that is not in the
    /// gang yet may still be in an earlier one, whose kernels would give up too. One that has gone on has none left.
    fn raise(&self, members: &[usize], place: u64) {
        for &device in members {
            let gang = self.gangs[device].lock();
            if *gang == place {
                // SAFETY: a word of `words`, which lives as long as this; the host writes it here alone.
                unsafe { raise_word(self.words.abort(device), place) };
            }
        }
    }

    fn given_up(&self, members: &[usize], place: u64) -> Option<(usize, usize)> {
        members.iter().find_map(|&device| {
            // SAFETY: a word of `words`, which lives; kernels write it whole.
            let report = unsafe { load_word(self.words.report(device)) };
            let (of, missing) = reported(report)?;
            (of == place).then_some((device, missing))
        })
    }
}
