//! Sets up the [`SignalPad`] of a pool, when the pool is built.
//!
//! `builder/open.rs` calls [`set_up`]; tests call [`make`], and `testing` calls [`restart`].

use crate::fabric::{
    EMPTY, MOST, PadLayout, SignalPad,
    layout::{self, Inbox},
    limits::multiprocessors,
    signal_pad::{DevicePages, HostPages, Words},
};
use crate::{
    Device, DeviceBuffer, GpuPool, driver::Address, error::Result, memory::DeviceHandle, thread::worker::Shared,
};
use std::sync::Arc;

/// Makes the signal pads if kernels of these devices can wait for each other: GPUs that run what was launched while the
/// host goes on, and that no checker watches (a checker knows no flags). They are in the host's memory unless all
/// devices have access to each other's memory.
pub(crate) fn set_up(pool: &GpuPool) -> Result<Option<Arc<SignalPad>>> {
    can_meet(&pool.shared).then(|| make(pool)).transpose()
}

/// Makes the signal pads, whether or not the kernels can wait for each other.
pub(crate) fn make(pool: &GpuPool) -> Result<Arc<SignalPad>> {
    let n = pool.shared.device_count();
    let direct = pool.shared.are_direct(&(0..n).collect::<Vec<_>>());
    let layout = if direct { PadLayout::direct(n) } else { PadLayout::through_host(n) };
    let bytes = if direct { layout.bytes(n) } else { layout::HEADER };
    let made = pool.run(|dev, _| {
        let handle = &dev.worker.handle;
        let own = DevicePages::new(handle, bytes)?;
        let page = (!direct).then(|| HostPages::for_pad(handle, layout, n)).transpose()?;
        let address = page.as_ref().map_or(own.address(), HostPages::address);
        let words = match dev.rank() {
            0 => Some(Arc::new(Words::new(handle)?)),
            _ => None,
        };
        let (peers, mut words): (Vec<_>, Vec<_>) = dev.exchange((address, words))?.into_iter().unzip();
        let words = words.swap_remove(0).expect("the first has them");
        let header = words.header(layout, &peers, dev.index());
        // SAFETY: fresh memory, whose address no code uses before this closure has ended.
        unsafe { lay_out(dev, own.address(), bytes, layout.inbox(n), &header)? };
        Ok((own, page, words))
    })?;
    let (mut devices, mut pages) = (Vec::with_capacity(n), Vec::new());
    let mut first = None;
    for (own, page, words) in made {
        devices.push(own);
        pages.extend(page);
        first = Some(words);
    }
    let words = first.expect("there are several devices");
    Ok(Arc::new(SignalPad::new(devices, pages, words, layout)))
}

/// Makes the pads as new, but with every pair of devices at `epoch`: tests use it to pass the last number. It also
/// removes what earlier barriers have left, since some of that may have numbers that come again.
pub(crate) fn restart(pad: &SignalPad, pool: &GpuPool, epoch: u32) -> Result<()> {
    let (bytes, inbox) = (pad.layout().bytes(pool.device_count()), pad.layout().inbox(pool.device_count()));
    let restarted = pool.run(|dev, _| {
        let me = dev.index();
        let mut header = pad.header(me);
        layout::set_epochs(&mut header, epoch);
        // All members are here, and have drained their earlier work: no member writes flags or packets any more.
        dev.barrier()?;
        // SAFETY: the memory is this device's own, and no kernel that knows it runs before the barrier below.
        unsafe {
            match pad.have_stages() {
                false => lay_out(dev, pad.address(me), bytes, inbox, &header)?,
                true => {
                    lay_out(dev, pad.address(me), layout::HEADER, inbox, &header)?;
                    pad.clear_host_pages(me);
                }
            }
        }
        dev.barrier()
    });
    restarted.map(drop)
}

/// Zeroes memory of a device, but empties its inbox, and writes a header at its begin. It is done at the return.
///
/// # Safety
/// There are so many bytes, and no other work uses them meanwhile.
unsafe fn lay_out(dev: &Device, at: Address, bytes: usize, inbox: Inbox, header: &[u64]) -> Result<()> {
    // Not by `upload`: to page-lock its pieces of megabytes would take most of the set-up's time.
    let mut page = dev.pinned(header.len())?;
    page.as_mut_slice()?.copy_from_slice(header);
    let header: DeviceBuffer<u64> = dev.upload_pinned(&page)?;
    let op = dev.op("signals")?;
    op.submit(|driver, stream| {
        // SAFETY: the caller's promise; the header is no longer than the memory.
        unsafe {
            driver.fill_u8(at, 0, inbox.start.min(bytes), stream)?;
            if inbox.bytes() > 0 {
                driver.fill_u8(at + inbox.start as u64, EMPTY, inbox.bytes(), stream)?;
            }
            driver.copy_within(at, header.address(), header.len() * 8, stream)
        }
    })?;
    dev.synchronize()
}

fn can_meet(shared: &Shared) -> bool {
    let n = shared.device_count();
    let hardware =
        |handle: &Arc<DeviceHandle>| handle.driver.info().compute_capability != (0, 0) && handle.watch().is_none();
    let serial = crate::variables::os("CUDA_LAUNCH_BLOCKING").is_some_and(|set| !set.is_empty() && set != "0");
    // Some kernels cannot have fewer blocks than there are members: one for each (`fused::launch`).
    let fit = multiprocessors(&shared.handles) as usize >= n;
    (2..=MOST).contains(&n) && !serial && fit && shared.handles.iter().all(hardware)
}

#[cfg(test)]
#[path = "../../tests/unit/builder/signal_pad_tests.rs"]
mod tests;
