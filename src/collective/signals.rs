//! The memory through which the kernels of a collective meet on the devices: epochs, flags and packets on each device
//! (`kernels/meet.cuh` has the layout and the protocol), and words in page-locked memory by which the host ends their waiting.

use super::kernels::{self, MOST, signals};
use crate::{
    GpuPool,
    driver::Address,
    error::Result,
    memory::{DeviceBuffer, link::Link},
    runtime::{gang::Alarm, worker::Shared},
    sync::{load_word, raise_word, store_word},
};
use std::sync::Arc;

/// Bytes of page-locked memory for each device: its abort word with the place of the gang that launches graphs on it, and its
/// report, each on a line of its own.
const LINES: usize = 256;
const PLACE: usize = 8;
const REPORT: usize = 128;

/// Of one pool.
pub(crate) struct Signals {
    /// On each device, by ordinal. Before the words: kernels that are gone poll nothing.
    devices: Vec<OnDevice>,
    words: Arc<Words>,
}

/// Memory of a device that is not its pool's: it would be in use for ever in the pool's counts. Given back when it is dropped.
struct OnDevice(Arc<Link>, Address);

impl Drop for OnDevice {
    fn drop(&mut self) {
        // SAFETY: `set_up` has failed before any kernel knew it, or the pool's devices have drained: its threads, which had shares
        // of `Signals`, are gone.
        let _ = unsafe { self.0.driver.mem_free(self.1) };
    }
}

/// Page-locked memory, [`LINES`] bytes for each device. Given back when it is dropped.
struct Words {
    link: Arc<Link>,
    first: usize,
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: as for `OnDevice`.
        let _ = unsafe { self.link.driver.host_free(self.at(0, 0).cast()) };
    }
}

impl Signals {
    /// Sets them up, if kernels of these devices can meet: GPUs that all have access to each other, that run what was launched
    /// while the host goes on, and that no checker watches (which knows no flags).
    pub(crate) fn set_up(pool: &GpuPool) -> Result<Option<Arc<Signals>>> {
        if can_meet(&pool.shared) { Signals::make(pool).map(Some) } else { Ok(None) }
    }

    /// The same, whether or not the kernels can meet.
    pub(crate) fn make(pool: &GpuPool) -> Result<Arc<Signals>> {
        let bytes = signals::bytes(pool.shared.devices());
        let made = pool.run(|dev, _| {
            let link = &dev.worker.link;
            let own = OnDevice(link.clone(), link.check("signals", link.driver.mem_alloc(bytes))?);
            let words = match dev.rank() {
                0 => {
                    let first = link.check("signals", link.driver.host_alloc(MOST * LINES))?.expose_provenance();
                    Some(Arc::new(Words { link: link.clone(), first }))
                }
                _ => None,
            };
            let (peers, mut words): (Vec<_>, Vec<_>) = dev.exchange((own.1, words))?.into_iter().unzip();
            let words = words.swap_remove(0).expect("the first has them");
            let (abort, report) = (words.abort(dev.index()) as u64, words.report(dev.index()) as u64);
            let head = signals::header(&peers, abort, report);
            let head: DeviceBuffer<u64> = dev.upload(&head)?;
            let op = dev.op("signals")?;
            op.submit(|driver, stream| {
                // SAFETY: fresh memory, which nobody else knows before this closure has ended.
                unsafe {
                    driver.fill_u8(own.1, 0, bytes, stream)?;
                    driver.copy_within(own.1, head.address(), head.len() * 8, stream)
                }
            })?;
            dev.synchronize()?;
            Ok((own, words))
        })?;
        let (devices, mut words): (Vec<_>, Vec<_>) = made.into_iter().unzip();
        Ok(Arc::new(Signals { devices, words: words.swap_remove(0) }))
    }

    /// What a kernel of this device is given.
    pub(crate) fn address(&self, device: usize) -> Address {
        self.devices[device].1
    }

    /// The most that one push can carry, in bytes.
    pub(crate) fn push_bytes(&self) -> usize {
        signals::packets(self.devices.len()) * 8
    }

    /// Tells kernels of a graph, which know no gang, in which one they run: called on the device's thread before the launch. All
    /// work of gangs before it is over.
    pub(crate) fn launches_in(&self, device: usize, place: u64) {
        // SAFETY: a word of `words`, which lives; one thread of the host writes it.
        unsafe { store_word(self.words.at(device, PLACE), place) };
    }

    /// What kernels of a graph are told.
    #[cfg(test)]
    pub(crate) fn place(&self, device: usize) -> u64 {
        // SAFETY: as above.
        unsafe { load_word(self.words.at(device, PLACE)) }
    }

    /// Which device a kernel of `device`'s was waiting for when it gave up, in the gang of this place.
    pub(crate) fn missing(&self, device: usize, place: u64) -> Option<usize> {
        // SAFETY: a word of `words`, which lives; kernels write it whole.
        let report = unsafe { load_word(self.words.report(device)) };
        kernels::reported(report).filter(|&(of, _)| of == place).map(|(_, missing)| missing)
    }
}

fn can_meet(shared: &Shared) -> bool {
    let n = shared.devices();
    let hardware = |link: &Arc<Link>| link.driver.info().compute_capability != (0, 0) && link.watch().is_none();
    let serial = std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some_and(|set| !set.is_empty() && set != "0");
    (2..=MOST).contains(&n)
        && !serial
        && shared.links.iter().all(hardware)
        && shared.are_direct(&(0..n).collect::<Vec<_>>())
}

impl Words {
    fn at(&self, device: usize, offset: usize) -> *mut u64 {
        std::ptr::with_exposed_provenance_mut(self.first + device * LINES + offset)
    }

    fn abort(&self, device: usize) -> *mut u64 {
        self.at(device, 0)
    }

    fn report(&self, device: usize) -> *mut u64 {
        self.at(device, REPORT)
    }
}

impl Alarm for Signals {
    /// Kernels of these devices that wait for a peer give up. Each device runs one gang at a time, in the order of places, so what
    /// comes later is not meant. An earlier gang may fail later than a later one (members that are done with it have gone on), so
    /// the word is only ever raised.
    fn raise(&self, members: &[usize], place: u64) {
        for &device in members {
            // SAFETY: a word of `words`, which lives as long as this; the host writes it here alone.
            unsafe { raise_word(self.words.abort(device), place) };
        }
    }
}
