//! The memory through which the kernels of a collective meet on the devices: epochs, flags, packets and rooms on each
//! device (`kernels/meet.cuh` has the layout and the protocol), and words in page-locked memory by which the host ends
//! their waiting.
//!
//! Between devices that cannot name each other's memory, what others write (flags and packets) and read (the stages) is
//! in page-locked memory of the host, a piece for each device; on the device there is only what it alone writes.

use super::{
    kernels::{
        self, MOST, STAGED_BLOCKS, STAGED_COUNTS, STAGED_SLOTS,
        signals::{self, Places},
    },
    tuner::multiprocessors,
};
use crate::{
    Device, GpuPool,
    driver::Address,
    error::Result,
    gang::{Alarm, Gang},
    memory::{DeviceBuffer, handle::DeviceHandle},
    sync::{load_word, raise_word, store_word},
    thread::worker::Shared,
};
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

/// Bytes of page-locked memory for each device: its abort word with the place of the gang that launches graphs on it,
/// and its report, each on a line of its own.
const LINES: usize = 256;
const PLACE: usize = 8;
const REPORT: usize = 128;

/// Bytes of a slot of a stage. A stage has 4 MiB then: pieces that a device writes are still in the host's cache when
/// others read them.
pub(super) const SLOT: usize = 16 << 10;
const STAGE: usize = SLOT * STAGED_SLOTS * STAGED_BLOCKS;

/// Of one pool.
pub(crate) struct Signals {
    /// On each device, by ordinal. Before the words: kernels that are gone poll nothing.
    devices: Vec<OnDevice>,
    /// Where devices meet in the host's memory: a piece for each.
    rooms: Vec<Pinned>,
    words: Arc<Words>,
    places: Places,
    /// The place of the gang that each device is in, or was in last.
    gangs: Vec<Mutex<u64>>,
    /// Set when a device could not be drained.
    kept: OnceLock<()>,
}

impl Drop for Signals {
    fn drop(&mut self) {
        if self.kept.get().is_some() {
            event!(warn, "signals that kernels may still use were leaked");
            std::mem::forget((std::mem::take(&mut self.devices), std::mem::take(&mut self.rooms), self.words.clone()));
        }
    }
}

/// Memory of a device that is not its pool's: it would be in use for ever in the pool's counts. Given back when it is
/// dropped.
struct OnDevice(Arc<DeviceHandle>, Address);

impl Drop for OnDevice {
    fn drop(&mut self) {
        // SAFETY: `set_up` has failed before any kernel knew it, or the pool's devices have drained: its threads, which
        // had shares of `Signals`, are gone, and none of them has called `keep`.
        let _ = unsafe { self.0.driver.mem_free(self.1) };
    }
}

/// Page-locked memory. Given back when it is dropped.
struct Pinned {
    handle: Arc<DeviceHandle>,
    first: usize,
}

impl Pinned {
    fn new(handle: &Arc<DeviceHandle>, bytes: usize) -> Result<Self> {
        let first = handle.check("signals", handle.driver.host_alloc(bytes))?.expose_provenance();
        Ok(Pinned { handle: handle.clone(), first })
    }

    fn at(&self, offset: usize) -> *mut u64 {
        std::ptr::with_exposed_provenance_mut(self.first + offset)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: as for `OnDevice`.
        let _ = unsafe { self.handle.driver.host_free(self.at(0).cast()) };
    }
}

/// [`LINES`] bytes for each device.
struct Words(Pinned);

impl Signals {
    /// Sets them up, if kernels of these devices can meet: GPUs that run what was launched while the host goes on, and
    /// that no checker watches (which knows no flags). In the host's memory unless all have access to each other.
    pub(crate) fn set_up(pool: &GpuPool) -> Result<Option<Arc<Signals>>> {
        if can_meet(&pool.shared) { Signals::make(pool).map(Some) } else { Ok(None) }
    }

    /// The same, whether or not the kernels can meet.
    pub(crate) fn make(pool: &GpuPool) -> Result<Arc<Signals>> {
        let shared = &pool.shared;
        let n = shared.devices();
        let direct = shared.are_direct(&(0..n).collect::<Vec<_>>());
        let places = if direct { Places::direct(n) } else { Places::through_host(n) };
        let bytes = if direct { places.bytes(n) } else { signals::HEADER };
        let made = pool.run(|dev, _| {
            let handle = &dev.worker.handle;
            let own = OnDevice(handle.clone(), handle.check("signals", handle.driver.mem_alloc(bytes))?);
            // By this thread, which is near to its device.
            let room = (!direct).then(|| Pinned::new(handle, places.bytes(n) + STAGED_COUNTS + STAGE)).transpose()?;
            let inbox = room.as_ref().map_or(own.1, |room| room.first as u64);
            let words = match dev.rank() {
                0 => Some(Arc::new(Words(Pinned::new(handle, MOST * LINES)?))),
                _ => None,
            };
            let (peers, mut words): (Vec<_>, Vec<_>) = dev.exchange((inbox, words))?.into_iter().unzip();
            let words = words.swap_remove(0).expect("the first has them");
            let (abort, report) = (words.abort(dev.index()) as u64, words.report(dev.index()) as u64);
            let header = signals::header(&peers, abort, report, places);
            // SAFETY: fresh memory, whose address nobody uses before this closure has ended.
            unsafe { lay_out(dev, own.1, bytes, &header)? };
            Ok((own, room, words))
        })?;
        let (mut devices, mut rooms) = (Vec::with_capacity(n), Vec::new());
        let mut first = None;
        for (own, room, words) in made {
            devices.push(own);
            rooms.extend(room);
            first = Some(words);
        }
        let words = first.expect("there are several devices");
        let gangs = (0..n).map(|_| Mutex::new(0)).collect();
        Ok(Arc::new(Signals { devices, rooms, words, places, gangs, kept: OnceLock::new() }))
    }

    /// Never gives the memory back: a device could not be drained, and its kernels may still come.
    pub(crate) fn keep(&self) {
        let _ = self.kept.set(());
    }

    /// Whether devices meet in the host's memory, where they have stages.
    pub(crate) fn have_stages(&self) -> bool {
        !self.rooms.is_empty()
    }

    /// Bytes from a device's signals to what it is told of stages, and to its own, where it has one.
    pub(crate) fn stage_offsets(&self) -> (u64, u64) {
        let counts = self.places.bytes(self.devices.len());
        (counts as u64, (counts + STAGED_COUNTS) as u64)
    }

    /// As new, but every pair of devices has counted up to `epoch`: for tests of what comes after the last number. What
    /// is left of earlier meetings goes, too, since some of it may have numbers that come again.
    pub(crate) fn restart(&self, pool: &GpuPool, epoch: u32) -> Result<()> {
        let n = self.devices.len();
        let inboxes: Vec<_> = (0..n).map(|k| self.inbox(k)).collect();
        let (bytes, places) = (self.places.bytes(n), self.places);
        let restarted = pool.run(|dev, _| {
            let me = dev.index();
            let (abort, report) = (self.words.abort(me) as u64, self.words.report(me) as u64);
            let mut header = signals::header(&inboxes, abort, report, places);
            signals::count_up_to(&mut header, epoch);
            // All are here, and have drained what was before: nobody writes flags or packets any more.
            dev.barrier()?;
            // SAFETY: the memory is this device's own, and no kernel that knows it runs before the barrier below.
            unsafe {
                match self.rooms.get(me) {
                    None => lay_out(dev, self.address(me), bytes, &header)?,
                    Some(room) => {
                        lay_out(dev, self.address(me), signals::HEADER, &header)?;
                        room.at(0).cast::<u8>().write_bytes(0, bytes + STAGED_COUNTS);
                    }
                }
            }
            dev.barrier()
        });
        restarted.map(drop)
    }

    /// Where the others find a device's flags and packets.
    fn inbox(&self, device: usize) -> Address {
        self.rooms.get(device).map_or(self.address(device), |room| room.first as u64)
    }

    /// What a kernel of this device is given.
    pub(crate) fn address(&self, device: usize) -> Address {
        self.devices[device].1
    }

    /// The most that one push can carry, in bytes.
    pub(crate) fn push_bytes(&self) -> usize {
        self.places.packets * 8
    }

    /// The most that one member can send another eagerly, in bytes; 0: none can.
    pub(crate) fn eager_bytes(&self) -> usize {
        self.places.room
    }

    /// A device comes to a gang; what it has launched in gangs before has ended, or never will.
    pub(crate) fn enter(&self, device: usize, gang: &Gang) {
        *self.gangs[device].lock() = gang.place();
        // A failure is noted before it is raised, so one that was raised too early for this device is seen here.
        if gang.is_aborted() {
            self.raise(&[device], gang.place());
        }
    }

    /// Tells kernels of a graph, which know no gang, in which one they run: called on the device's thread before the
    /// launch. All work of gangs before it is over.
    pub(crate) fn launches_in(&self, device: usize, place: u64) {
        // SAFETY: a word of `words`, which lives; one thread of the host writes it.
        unsafe { store_word(self.words.place(device), place) };
    }

    /// What kernels of a graph are told.
    #[cfg(test)]
    pub(crate) fn place(&self, device: usize) -> u64 {
        // SAFETY: as above.
        unsafe { load_word(self.words.place(device)) }
    }

    /// Which device a kernel of `device`'s was waiting for when it gave up, in the gang of this place.
    pub(crate) fn missing(&self, device: usize, place: u64) -> Option<usize> {
        // SAFETY: a word of `words`, which lives; kernels write it whole.
        let report = unsafe { load_word(self.words.report(device)) };
        kernels::reported(report).filter(|&(of, _)| of == place).map(|(_, missing)| missing)
    }
}

/// Zeroes that begin with a header, when it returns.
///
/// # Safety
/// There are so many bytes, and nobody else uses them meanwhile.
unsafe fn lay_out(dev: &Device, at: Address, bytes: usize, header: &[u64]) -> Result<()> {
    // Not by `upload`: its pieces are megabytes, and to page-lock them would be most of what the set-up of a pool
    // takes.
    let mut page = dev.pinned(header.len())?;
    page.as_mut_slice()?.copy_from_slice(header);
    let header: DeviceBuffer<u64> = dev.upload_pinned(&page)?;
    let op = dev.op("signals")?;
    op.submit(|driver, stream| {
        // SAFETY: the caller's promise; the header is no longer than the memory.
        unsafe {
            driver.fill_u8(at, 0, bytes, stream)?;
            driver.copy_within(at, header.address(), header.len() * 8, stream)
        }
    })?;
    dev.synchronize()
}

fn can_meet(shared: &Shared) -> bool {
    let n = shared.devices();
    let hardware =
        |handle: &Arc<DeviceHandle>| handle.driver.info().compute_capability != (0, 0) && handle.watch().is_none();
    let serial = std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|set| !set.is_empty() && set != "0");
    // The most blocks that a kernel can have for want of fewer is one for each member (`fused::launch`).
    let fit = multiprocessors(shared) as usize >= n;
    (2..=MOST).contains(&n) && !serial && fit && shared.handles.iter().all(hardware)
}

impl Words {
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

impl Alarm for Signals {
    /// Kernels of these devices that wait for a peer give up, on devices that are in the gang: who is not there yet may
    /// still be in an earlier one, whose kernels would give up, too; who has gone on has nothing of it left. Each
    /// device runs one gang at a time, in the order of places, so the word is only ever raised.
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
        members.iter().find_map(|&device| Some((device, self.missing(device, place)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Error,
        sync::{EventCount, shim},
    };

    /// A gang may fail before all its devices are through with the gangs before it.
    #[test]
    fn a_failed_gang_ends_the_kernels_of_no_other() {
        let pool = GpuPool::builder().host(3).build().unwrap();
        let signals = Signals::make(&pool).unwrap();
        let gang = |members: [usize; 2]| {
            let wakers = members.map(|_| shim::Arc::new(EventCount::new())).to_vec();
            let gang = Gang::new(members.into(), wakers).with_alarm(Some(signals.clone()));
            gang.enter();
            gang
        };
        let (first, second) = (gang([0, 1]), gang([0, 2]));
        let (p, q) = (first.place(), second.place());
        // SAFETY: a word of `words`, which lives.
        let aborted = || [0, 1, 2].map(|device| unsafe { load_word(signals.words.abort(device)) });
        for (device, gang) in [(0, &first), (1, &first), (2, &second)] {
            signals.enter(device, gang);
        }
        second.poison(2, Error::Closed);
        assert_eq!(aborted(), [0, 0, q], "device 0 is still in the first");
        signals.enter(0, &second);
        assert_eq!(aborted(), [q, 0, q], "it hears of it when it comes");
        // Device 0 has gone on when the first fails.
        first.poison(1, Error::Closed);
        assert_eq!(aborted(), [q, p, q]);
    }
}
