//! Tests whether memory of a window works: written by the device, copied by the copy engines, also over the edge of two
//! mappings, and read by the host.
//!
//! Called once by [`open`](super::open()). Invariant: after a test nothing of it is in flight, or its memory is leaked.

use super::{Backing, ProbeContext, vmm::Vmm};
use crate::{
    driver::{Address, DriverRef, DriverResult, FaultKind, RawStream, fault, host},
    memory::DeviceHandle,
    stall::StallTimer,
};
use std::{slice, time::Duration};

/// Bytes to check on each side of the edge.
const HALF: u64 = 32 << 10;
/// A test that takes longer has failed.
const LIMIT: Duration = Duration::from_secs(10);

/// Whether memory of this window works. A fault is one of the test itself. Stepped software GPUs are not tested: the
/// order of steps belongs to the program.
pub(super) fn verify_backing(vmm: &mut Vmm, probe: ProbeContext) -> DriverResult<bool> {
    let handle = vmm.region.handle.clone();
    if handle.stepped || host::is_dry(&*handle.driver) {
        return Ok(true);
    }
    let unit = vmm.granularity;
    let mapped = vmm.grow(2 * unit, unit, u64::MAX, &|_, _| (0, 0))?;
    let edge = mapped[0].address + mapped[0].bytes;
    let tried = on_a_stream(&handle, probe.stream, |stream, host| {
        let probing = Probe { handle: &handle, stream, host, edge: edge - HALF, far: mapped[0].address };
        let mut good = probing.copies_within()?;
        if let Some(peer) = probe.peer.filter(|_| good) {
            good = probing.copies_to_a_peer(peer)?;
        }
        Ok(good)
    });
    for mapping in &mapped {
        let unit = mapping.address..mapping.address + mapping.bytes;
        if let Err(Unfinished) = tried {
            // An operation hangs on this memory, and may do so for ever.
            vmm.region.leak(&unit);
        } else {
            // SAFETY: mapped above, and all operations on it are over.
            unsafe { vmm.unmap(mapping.region, unit)? };
        }
    }
    tried.unwrap_or_else(|Unfinished| Err(fault::not_ready("")))
}

struct Unfinished;

/// After `Ok` nothing of the test is in flight.
fn on_a_stream(
    handle: &DeviceHandle,
    stream: Option<RawStream>,
    probe: impl FnOnce(RawStream, *mut u8) -> DriverResult<bool>,
) -> Result<DriverResult<bool>, Unfinished> {
    let driver = &handle.driver;
    let own = match stream {
        Some(_) => None,
        None => match driver.stream_create(0) {
            Ok(stream) => Some(stream),
            Err(fault) => return Ok(Err(fault)),
        },
    };
    let Some(stream) = stream.or(own) else { return Ok(Ok(true)) };
    let tried = driver.host_alloc(2 * SPAN).map(|host| {
        let tried = probe(stream, host);
        let (over, waited) = idle(handle, stream);
        // SAFETY: allocated above, and all operations on it are over.
        let freed = over.then(|| unsafe { driver.host_free(host) }).ok_or(Unfinished)?;
        Ok(waited.and(tried).and_then(|good| freed.map(|()| good)))
    });
    let destroyed = own.map_or(Ok(()), |own| {
        // SAFETY: made above, and not used again.
        unsafe { driver.stream_destroy(own) }
    });
    let tried = tried.unwrap_or_else(|fault| Ok(Err(fault)))?;
    Ok(tried.and_then(|good| destroyed.map(|()| good)))
}

/// Returns whether nothing is in flight any more, and the wait's own result.
fn idle(handle: &DeviceHandle, stream: RawStream) -> (bool, DriverResult) {
    let wait = || -> DriverResult<bool> {
        let mut stall = StallTimer::new(LIMIT);
        loop {
            let over = handle.driver.stream_wait_idle(stream, stall.tick(LIMIT))?;
            if over || stall.is_over() {
                return Ok(over);
            }
        }
    };
    // Twice, since a fault may concern the call alone.
    match wait().or_else(|_| wait()) {
        Ok(over) => (over, Ok(())),
        // A wait reports a loss after the running work has ended.
        Err(fault) => (fault.kind == FaultKind::DeviceLost, Err(fault)),
    }
}

const SPAN: usize = 2 * HALF as usize;

struct Probe<'a> {
    handle: &'a DeviceHandle,
    stream: RawStream,
    host: *mut u8,
    /// A span over the edge of two mappings.
    edge: Address,
    /// A span within the first mapping.
    far: Address,
}

impl Probe<'_> {
    fn copies_within(&self) -> DriverResult<bool> {
        let (driver, stream) = (&self.handle.driver, self.stream);
        // SAFETY: both device spans are mapped, and do not overlap, since a unit is more than three times `HALF`; the
        // host's spans are live. All operations are on one stream, which is waited for before any of the memory goes.
        unsafe {
            driver.fill_u32(self.edge, 0x1357_9bdf, SPAN / 4, stream)?;
            driver.fill_u32(self.far, 0xdead_0000, SPAN / 4, stream)?;
            driver.copy_within(self.far, self.edge, SPAN, stream)?;
            driver.copy_to_host(self.host, self.far, SPAN, stream)?;
            driver.fill_u32(self.far, 0x2468_ace0, SPAN / 4, stream)?;
            driver.copy_within(self.edge, self.far, SPAN, stream)?;
            driver.copy_to_host(self.host.add(SPAN), self.edge, SPAN, stream)?;
        }
        let (over, waited) = idle(self.handle, stream);
        waited.map(|()| over && self.holds(0, 0x1357_9bdf) && self.holds(1, 0x2468_ace0))
    }

    /// Copies to a mapping on another device and back, if it is a peer at all.
    fn copies_to_a_peer(&self, peer: &DriverRef) -> DriverResult<bool> {
        let driver = &self.handle.driver;
        let Some(unit) = peer.vm_granularity() else { return Ok(true) };
        if !driver.can_access_peer(&**peer)? || driver.enable_peer(&**peer).is_err() {
            return Ok(true);
        }
        let bytes = unit.max(SPAN.next_multiple_of(unit));
        let there = peer.vm_reserve(bytes as u64)?;
        // SAFETY: a fresh window.
        let mapped = unsafe { peer.vm_map(there, bytes) };
        let tried = mapped.and_then(|()| {
            // SAFETY: as in `copies_within`; the peer's memory stays mapped until the stream has been waited for.
            let submitted = unsafe { self.there_and_back(peer, there) };
            let (over, waited) = idle(self.handle, self.stream);
            if over {
                // SAFETY: mapped above, and all operations on it are over.
                unsafe { peer.vm_unmap(there, bytes)? };
            }
            submitted.and(waited)?;
            Ok(over && self.holds(0, 0x369c_f258))
        });
        // SAFETY: reserved above; the driver refuses it if anything is still mapped.
        let released = unsafe { peer.vm_release(there, bytes as u64) };
        tried.and_then(|good| released.map(|()| good))
    }

    /// `there` is a span in the peer's memory, live until the stream has been waited for.
    unsafe fn there_and_back(&self, peer: &DriverRef, there: Address) -> DriverResult {
        let (driver, stream) = (&self.handle.driver, self.stream);
        // SAFETY: the caller's promise, and as in `copies_within`.
        unsafe {
            driver.fill_u32(self.edge, 0x369c_f258, SPAN / 4, stream)?;
            driver.copy_peer(there, &**peer, self.edge, &**driver, SPAN, stream)?;
            driver.fill_u32(self.edge, 0xdead_0000, SPAN / 4, stream)?;
            driver.copy_peer(self.edge, &**driver, there, &**peer, SPAN, stream)?;
            driver.copy_to_host(self.host, self.edge, SPAN, stream)
        }
    }

    fn holds(&self, span: usize, word: u32) -> bool {
        // SAFETY: live, and nothing of the stream is in flight. The bytes were zeroed by the driver.
        let bytes = unsafe { slice::from_raw_parts(self.host.add(span * SPAN), SPAN) };
        bytes.chunks_exact(4).all(|at| at == word.to_ne_bytes())
    }
}
