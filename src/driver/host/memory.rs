//! Memory: one window of addresses per device, and the host memory that all devices see.
//!
//! A device address means nothing to the host. It lies in the device's window, 8 TiB wide and not used by another
//! device of the process while this one lives (nor for long afterwards), far outside what the operating system hands
//! out, and is translated when an operation runs. The upper half is for addresses that are reserved first and mapped
//! later (`window`). Page-locked and managed memory keep their host addresses. Addresses of a window are reused as late
//! as possible, and a gap follows each allocation, so that stale and overshooting addresses find nothing.

use super::{clock::Side, fault, pages::Pages, window::Windows};
use crate::driver::{Address, DriverResult, Fault};
use parking_lot::Mutex;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    collections::BTreeMap,
    ptr::{self, NonNull},
    sync::Arc,
};

/// As the CUDA driver's allocations of some size and page-locked memory are.
const ALIGN: usize = 4096;
const BASE: u64 = 1 << 62;
const WINDOW_BITS: u32 = 43;
/// The half of a window that allocations lie in.
const WINDOW: u64 = 1 << (WINDOW_BITS - 1);

/// Fresh device memory is filled with this byte in debug builds, for its first [`POISON_LIMIT`] bytes (the rest stays
/// untouched, so that a large chunk is not committed), lest a program relies on zeroes that a GPU does not give.
const POISON: u8 = 0xCB;
const POISON_LIMIT: usize = 1 << 20;

/// Backing memory of one allocation; it lives until its table entry and the last running operation on it are gone.
pub(super) struct Block {
    raw: Raw,
    first: NonNull<u8>,
    bytes: usize,
}

/// What a block has to give back.
enum Raw {
    Allocated(NonNull<u8>, Layout),
    /// Of a window: memory is behind the parts of it that are mapped.
    Reserved(Pages),
    /// There is no memory behind it: see [`Block::nothing`].
    Nothing,
}

// SAFETY: a block is plain memory; accesses to its bytes are ordered by `access` among operations, and by the driver's
// users between operations and the host.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// Zeroed and committed lazily: small alignment lets the allocator take untouched pages, so we align by hand.
    pub fn zeroed(bytes: usize) -> Option<Arc<Block>> {
        let layout = Layout::from_size_align(bytes.checked_add(ALIGN)?, 16).ok()?;
        // SAFETY: the size is not zero.
        let raw = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let pad = raw.as_ptr().align_offset(ALIGN);
        // SAFETY: `pad < ALIGN`, and the allocation is `ALIGN` larger than asked for.
        let first = unsafe { raw.add(pad) };
        Some(Arc::new(Block { raw: Raw::Allocated(raw, layout), first, bytes }))
    }

    /// Addresses without memory, for a dry machine's sizes that this computer refuses to promise. They are nobody
    /// else's: they are those of the device's window.
    pub fn nothing(address: Address, bytes: usize) -> Option<Arc<Block>> {
        let first = NonNull::new(ptr::without_provenance_mut(address as usize))?;
        Some(Arc::new(Block { raw: Raw::Nothing, first, bytes }))
    }

    /// A window, with nothing behind it so far.
    pub fn reserved(pages: Pages, bytes: usize) -> Arc<Block> {
        Arc::new(Block { first: pages.first(), raw: Raw::Reserved(pages), bytes })
    }

    /// Puts memory behind a part of a window; whether there was any.
    pub fn commit(&self, offset: usize, bytes: usize) -> bool {
        if let Raw::Reserved(pages) = &self.raw { pages.commit(offset, bytes) } else { true }
    }

    /// Takes it away. Nobody uses it.
    pub fn decommit(&self, offset: usize, bytes: usize) {
        if let Raw::Reserved(pages) = &self.raw {
            pages.decommit(offset, bytes);
        }
    }

    /// Whether there are bytes behind its addresses.
    pub fn is_real(&self) -> bool {
        !matches!(self.raw, Raw::Nothing)
    }

    /// The byte at `offset`.
    pub fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        self.first.as_ptr().wrapping_add(offset)
    }

    /// Marks fresh memory as nobody's.
    fn poison(&self, offset: usize, bytes: usize) {
        // SAFETY: there is memory there, and no operation names it yet.
        unsafe { self.at(offset).write_bytes(POISON, bytes.min(POISON_LIMIT)) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Raw::Allocated(raw, layout) = self.raw {
            // SAFETY: it came from `alloc_zeroed` with this layout.
            unsafe { dealloc(raw.as_ptr(), layout) }
        }
    }
}

/// Where memory lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    Device(usize),
    /// Page-locked or managed: everyone's.
    Host,
}

/// A translated address.
pub(super) struct Resolved<'a> {
    pub home: Home,
    pub block: &'a Arc<Block>,
    pub offset: usize,
}

/// All memory of a machine.
pub(super) struct Memory {
    first_window: u64,
    /// Whether fresh memory is touched at all.
    dry: bool,
    devices: Vec<Space>,
    host: BTreeMap<Address, (Arc<Block>, HostKind)>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        NUMBERS.lock().give(self.first_window, self.devices.len() as u64);
    }
}

/// What kind of host memory an allocation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostKind {
    Pinned,
    Managed,
}

struct Space {
    capacity: u64,
    used: u64,
    /// Where the search for free addresses starts, relative to the window.
    cursor: u64,
    /// By address.
    blocks: BTreeMap<Address, Arc<Block>>,
    windows: Windows,
}

/// The windows of this process.
static NUMBERS: Mutex<Numbers> = Mutex::new(Numbers { next: 1, end: 1 << 20, free: BTreeMap::new() });

/// Numbers of windows. Those that were given back are handed out again when there are no new ones: what is stale finds
/// nothing for as long as possible.
struct Numbers {
    next: u64,
    end: u64,
    /// Given back: the length of each run by its first number. Runs that touch are one.
    free: BTreeMap<u64, u64>,
}

impl Numbers {
    /// The first of `n` numbers in a row that nobody has.
    fn take(&mut self, n: u64) -> Option<u64> {
        if n <= self.end - self.next {
            self.next += n;
            return Some(self.next - n);
        }
        let (&first, &length) = self.free.iter().find(|(_, length)| **length >= n)?;
        self.free.remove(&first);
        if length > n {
            self.free.insert(first + n, length - n);
        }
        Some(first)
    }

    fn give(&mut self, mut first: u64, mut n: u64) {
        if n == 0 {
            return;
        }
        if let Some(after) = self.free.remove(&(first + n)) {
            n += after;
        }
        if let Some((&start, &length)) = self.free.range(..first).next_back()
            && start + length == first
        {
            (first, n) = (start, n + length);
        }
        self.free.insert(first, n);
    }
}

/// The first address of a window.
fn window_of(number: u64) -> Address {
    BASE + (number << WINDOW_BITS)
}

impl Memory {
    pub fn new(capacities: impl ExactSizeIterator<Item = u64>, dry: bool) -> DriverResult<Self> {
        let count = capacities.len() as u64;
        let first_window = NUMBERS.lock().take(count);
        let first_window = first_window.ok_or_else(|| {
            fault::exhausted(format!("there are no addresses for {count} more software GPUs in this process"))
        })?;
        let space = |(device, capacity)| {
            let upper = window_of(first_window + device as u64) + WINDOW;
            let windows = Windows::new(upper..upper + WINDOW);
            Space { capacity, used: 0, cursor: 0, blocks: BTreeMap::new(), windows }
        };
        let devices = capacities.enumerate().map(space).collect();
        Ok(Memory { first_window, dry, devices, host: BTreeMap::new() })
    }

    /// A number that no other machine has at the time.
    pub fn first_window(&self) -> u64 {
        self.first_window
    }

    /// `(free, total)`.
    pub fn info(&self, device: usize) -> (u64, u64) {
        let space = &self.devices[device];
        (space.capacity - space.used, space.capacity)
    }

    /// Enters an allocation; the poison says that the memory is nobody's yet.
    pub fn alloc(&mut self, device: usize, bytes: usize) -> DriverResult<Address> {
        let window = window_of(self.first_window + device as u64);
        let space = &mut self.devices[device];
        let (asked, free) = (bytes as u64, space.capacity - space.used);
        if asked > free {
            return Err(fault::out_of_memory(asked, free));
        }
        let none = || fault::out_of_memory(asked, free);
        let offset = space.find(window, asked).ok_or_else(none)?;
        let nothing = || if self.dry { Block::nothing(window + offset, bytes) } else { None };
        let block = Block::zeroed(bytes).or_else(nothing).ok_or_else(none)?;
        if cfg!(debug_assertions) && !self.dry {
            block.poison(0, bytes);
        }
        space.cursor = offset + footprint(asked).ok_or_else(none)?;
        space.used += asked;
        space.blocks.insert(window + offset, block);
        Ok(window + offset)
    }

    /// Forgets an allocation. Operations that run on it right now keep the bytes alive.
    pub fn free(&mut self, device: usize, address: Address) -> DriverResult {
        let space = &mut self.devices[device];
        let block = space.blocks.remove(&address).ok_or_else(|| {
            fault::invalid(format!("{address:#x} is not the start of a live allocation of device {device}"))
        })?;
        space.used -= block.bytes as u64;
        Ok(())
    }

    /// Reserves addresses.
    pub fn reserve(&mut self, device: usize, bytes: u64) -> DriverResult<Address> {
        self.devices[device].windows.reserve(bytes, self.dry)
    }

    /// Gives reserved addresses back.
    pub fn release(&mut self, device: usize, address: Address, bytes: u64) -> DriverResult {
        self.devices[device].windows.release(address, bytes)
    }

    /// Puts fresh memory behind reserved addresses.
    pub fn map(&mut self, device: usize, address: Address, bytes: usize) -> DriverResult {
        let space = &mut self.devices[device];
        space.windows.check_free(address, bytes)?;
        let (asked, free) = (bytes as u64, space.capacity - space.used);
        if asked > free {
            return Err(fault::out_of_memory(asked, free));
        }
        let (block, offset) = space.windows.map(address, bytes)?;
        if cfg!(debug_assertions) && !self.dry {
            block.poison(offset, bytes);
        }
        space.used += asked;
        Ok(())
    }

    /// Takes what one call has mapped away. `busy`: whether a running operation uses it, which keeps it.
    pub fn unmap(
        &mut self,
        device: usize,
        address: Address,
        bytes: usize,
        busy: impl FnOnce(*mut u8) -> bool,
    ) -> DriverResult {
        let space = &mut self.devices[device];
        space.windows.unmap(address, bytes, busy)?;
        space.used -= bytes as u64;
        Ok(())
    }

    /// Takes a mapping away and makes another one of its size. Nobody is to rely on the contents, so they do not come
    /// along.
    pub fn remap(
        &mut self,
        device: usize,
        [from, to]: [Address; 2],
        bytes: usize,
        busy: impl FnOnce(*mut u8) -> bool,
    ) -> DriverResult {
        let windows = &mut self.devices[device].windows;
        if !windows.is_mapping(from, bytes) {
            return Err(fault::invalid(format!("{bytes} bytes at {from:#x} are not what was mapped there")));
        }
        let (block, offset) = windows.map(to, bytes)?;
        if cfg!(debug_assertions) && !self.dry {
            block.poison(offset, bytes);
        }
        windows.unmap(from, bytes, busy)
    }

    /// Registers host memory and returns its address.
    pub fn host_insert(&mut self, block: Arc<Block>, kind: HostKind) -> *mut u8 {
        let first = block.at(0);
        self.host.insert(first as Address, (block, kind));
        first
    }

    /// Forgets host memory.
    pub fn host_remove(&mut self, ptr: *mut u8, kind: HostKind) -> DriverResult {
        let address = ptr as Address;
        if self.host.get(&address).is_none_or(|(_, have)| *have != kind) {
            return Err(fault::invalid(format!("{address:#x} is not the start of live {kind:?} memory")));
        }
        self.host.remove(&address);
        Ok(())
    }

    /// Translates a range, which must lie inside one live allocation, or inside mappings side by side.
    pub fn resolve(&self, address: Address, bytes: usize) -> DriverResult<Resolved<'_>> {
        let found = if address < BASE {
            self.host.range(..=address).next_back().map(|(start, (block, _))| (Home::Host, start, block))
        } else {
            let window = (address - BASE) >> WINDOW_BITS;
            let device = window.wrapping_sub(self.first_window) as usize;
            let Some(space) = self.devices.get(device) else {
                return Err(fault::peer_not_enabled(format!("{address:#x} is no address of this machine")));
            };
            if space.windows.are_at(address) {
                let found = space.windows.resolve(address, bytes);
                let home = Home::Device(device);
                return found
                    .map(|(block, offset)| Resolved { home, block, offset })
                    .ok_or_else(|| missing(address, bytes));
            }
            space.blocks.range(..=address).next_back().map(|(start, block)| (Home::Device(device), start, block))
        };
        if let Some((home, start, block)) = found {
            let offset = (address - start) as usize;
            if offset <= block.bytes && bytes <= block.bytes - offset {
                return Ok(Resolved { home, block, offset });
            }
        }
        Err(missing(address, bytes))
    }

    /// On whose side an address is; an unknown one counts as the host's.
    pub fn side(&self, address: Address) -> Side {
        match self.resolve(address, 0) {
            Ok(Resolved { home: Home::Device(device), .. }) => Side::Device(device),
            _ => Side::Host,
        }
    }

    /// Demands that a range is page-locked or managed, or empty.
    pub fn check_host(&self, address: Address, bytes: usize) -> DriverResult {
        match self.resolve(address, bytes) {
            _ if bytes == 0 => Ok(()),
            Ok(Resolved { home: Home::Host, .. }) => Ok(()),
            _ => Err(fault::invalid(format!("{bytes} bytes at {address:#x} are not page-locked host memory"))),
        }
    }
}

fn missing(address: Address, bytes: usize) -> Fault {
    fault::invalid(format!("no live allocation covers {bytes} bytes at {address:#x}"))
}

/// Addresses that an allocation takes: whole units of `ALIGN`, and one more as a gap.
fn footprint(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(ALIGN as u64)?.checked_add(ALIGN as u64)
}

impl Space {
    /// The next hole at or after the cursor, else from the start of the window.
    fn find(&self, window: u64, bytes: u64) -> Option<u64> {
        let need = footprint(bytes).filter(|need| *need <= WINDOW)?;
        [self.cursor, 0].into_iter().find_map(|from| {
            let mut at = window + from;
            for (start, block) in self.blocks.range(at..) {
                if start - at >= need {
                    break;
                }
                at = start + footprint(block.bytes as u64)?;
            }
            (at + need <= window + WINDOW).then_some(at - window)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{super::pages::GRANULARITY, *};

    #[test]
    fn addresses_are_reused_late_and_never_overlap() {
        let mut memory = Memory::new([1 << 20].into_iter(), false).unwrap();
        let a = memory.alloc(0, 1000).unwrap();
        memory.free(0, a).unwrap();
        let b = memory.alloc(0, 1000).unwrap();
        assert_ne!(a, b);
        assert!(memory.resolve(a, 1).is_err() && memory.resolve(b, 1000).is_ok() && memory.resolve(b, 1001).is_err());
        // At the end of the window the search starts over and steps around what lives.
        memory.devices[0].cursor = WINDOW - 256;
        let c = memory.alloc(0, 5000).unwrap();
        let d = memory.alloc(0, 256).unwrap();
        assert!(c > b && d > c, "{a:#x} {b:#x} {c:#x} {d:#x}");
        assert!(memory.free(0, a).is_err() && memory.free(0, b + 256).is_err());
        assert_eq!(memory.info(0), ((1 << 20) - 1000 - 5000 - 256, 1 << 20));
    }

    #[test]
    fn windows_are_handed_out_again_as_late_as_possible() {
        let mut numbers = Numbers { next: 1, end: 9, free: BTreeMap::new() };
        let [a, b, c] = [3, 2, 2].map(|n| numbers.take(n).unwrap());
        assert_eq!((a, b, c, numbers.take(2)), (1, 4, 6, None));
        numbers.give(b, 2);
        assert_eq!(numbers.take(1), Some(8), "a new one first");
        assert_eq!(
            (numbers.take(3), numbers.take(1), numbers.take(1), numbers.take(1)),
            (None, Some(4), Some(5), None)
        );
        // In any order, what lies side by side becomes one run.
        for (first, n) in [(6, 2), (1, 3), (0, 0), (8, 1), (4, 1), (5, 1)] {
            numbers.give(first, n);
        }
        assert_eq!((numbers.free.len(), numbers.take(8), numbers.take(1)), (1, Some(1), None));
    }

    #[test]
    fn a_machine_gives_its_windows_back() {
        let memory = Memory::new([1, 2, 3].into_iter(), false).unwrap();
        let first = memory.first_window();
        drop(memory);
        let numbers = NUMBERS.lock();
        let (start, length) = numbers.free.range(..=first).next_back().unwrap();
        assert!(start + length >= first + 3);
    }

    #[test]
    fn no_size_overflows() {
        let mut memory = Memory::new([u64::MAX].into_iter(), true).unwrap();
        for bytes in [usize::MAX, usize::MAX - 4095, usize::MAX / 2 + 1, 2 * WINDOW as usize] {
            assert!(memory.alloc(0, bytes).is_err(), "{bytes}");
            assert!(memory.reserve(0, bytes as u64).is_err() && memory.map(0, window_of(1), bytes).is_err());
        }
        assert!(memory.reserve(0, !(GRANULARITY as u64 - 1)).is_err(), "the largest multiple");
    }

    #[test]
    fn host_memory_is_aligned_zeroed_and_of_one_kind() {
        let mut memory = Memory::new([].into_iter(), false).unwrap();
        let ptr = memory.host_insert(Block::zeroed(100).unwrap(), HostKind::Pinned);
        assert_eq!(ptr as usize % ALIGN, 0);
        // SAFETY: freshly allocated.
        assert!(unsafe { std::slice::from_raw_parts(ptr, 100) }.iter().all(|&b| b == 0));
        assert!(
            memory.check_host(ptr as Address + 99, 1).is_ok() && memory.check_host(ptr as Address + 99, 2).is_err()
        );
        assert!(memory.host_remove(ptr, HostKind::Managed).is_err());
        assert!(
            memory.host_remove(ptr, HostKind::Pinned).is_ok() && memory.host_remove(ptr, HostKind::Pinned).is_err()
        );
    }
}
