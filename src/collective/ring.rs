//! All-reduce around a ring.
//!
//! The buffer is cut into as many chunks as there are ranks. Rank `r` reads only from its predecessor:
//!
//! ```text
//! reduce-scatter, step s:  chunk (r - 1 - s) of the predecessor is copied to scratch and added to the own one
//! all-gather, step s:      chunk (r - s) of the predecessor replaces the own one
//! ```
//!
//! After the first phase rank `r` holds the whole sum of chunk `r + 1`. Each step waits, on the GPU, for the event that
//! the predecessor recorded after its step before; the event travels through the ring buffer between the two threads.
//! So no kernel spins, and the order of additions is fixed: chunk `c` is added up from rank `c` onwards.
//!
//! Why nothing else must be waited for: rank `r` overwrites chunk `c` in the second phase only after the complete sum of
//! `c` came back to it, which happened after the successor had read and added the old contents. The last reads of the
//! second phase are covered by the final event, which goes to the predecessor: when its stream has passed it, nobody
//! touches its buffer any more.

use super::{
    Element, ReduceOp,
    board::{Call, Payload},
};
use crate::{
    Device, DeviceBuffer, DeviceViewMut, Event,
    error::{Error, Result},
    memory::{AsView, AsViewMut, hazard::Access},
    plant::Bug,
    shard::balanced,
};
use std::ops::Range;

#[track_caller]
pub(super) fn all_reduce<T: Element>(dev: &Device, mut x: DeviceViewMut<'_, T>, op: ReduceOp) -> Result<()> {
    let call = Call::new("all_reduce", Some(T::DTYPE), x.len(), Some(op));
    let ranks = dev.count();
    let mut access = dev.op("all_reduce")?;
    access.touch(x.block, x.bytes(), Access::Write, false)?;
    let largest = balanced(0, ranks, x.len()).len();
    let scratch = if ranks > 1 && largest > 0 { Some(dev.allocate::<T>("all_reduce", largest)?) } else { None };
    if let Some(scratch) = &scratch {
        access.touch(&scratch.block, scratch.view().bytes(), Access::Write, false)?;
    }
    let ready = Event::record(&dev.stream, "all_reduce", false)?;
    let next = (dev.rank() + 1) % ranks;
    let theirs = dev.meet(call.clone(), |rank| match rank == next {
        true => Payload::Buffer { block: x.block.clone(), address: x.address, ready: ready.clone() },
        false => Payload::Nothing,
    })?;
    let factor = (op == ReduceOp::Avg).then(|| 1.0 / ranks as f64);
    let Some(scratch) = scratch else {
        // One device, or nothing to add.
        return Ok(());
    };
    let previous = (dev.rank() + ranks - 1) % ranks;
    let Some(Payload::Buffer { block, address, ready }) = &theirs[previous] else {
        unreachable!("the predecessor sends its buffer")
    };
    // Managed memory is at home everywhere.
    let device = block.device().unwrap_or(dev.index());
    let peer = Peer { device, address: *address };
    let ready = match dev.worker.link.planted(Bug::StartSkipped) {
        true => Ok(()),
        false => dev.stream.wait_event("all_reduce", ready.0.raw, &ready.0.stream, ready.0.covered),
    };
    let done = ready.and_then(|()| Ring { dev, call, ranks, peer }.run(&mut x, &scratch, factor));
    access.submitted();
    done.inspect_err(|cause| {
        // The successor may have reads of this buffer under way that no event of ours covers.
        dev.worker.suspects.borrow_mut().push(x.block.clone());
        // The call was committed, so the peers count on this member; they must not wait for it.
        if !matches!(cause, Error::Aborted { .. }) {
            dev.session.gang.poison(dev.index(), cause.clone());
        }
    })
}

/// The predecessor's buffer. It is alive: the predecessor's call does not return before it has submitted its part, and
/// its stream ends after the reads of this one.
struct Peer {
    device: usize,
    address: u64,
}

struct Ring<'d> {
    dev: &'d Device,
    call: Call,
    ranks: usize,
    peer: Peer,
}

impl Ring<'_> {
    fn run<T: Element>(&self, x: &mut DeviceViewMut<'_, T>, scratch: &DeviceBuffer<T>, avg: Option<f64>) -> Result<()> {
        let (dev, n, rank) = (self.dev, self.ranks, self.dev.rank());
        let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
        // The caller's `Op` has ordered the whole buffer; the steps order themselves.
        // SAFETY: all work below is on one stream, and waits for the predecessor's events before it reads there.
        let raw = unsafe { dev.unordered() };
        let len = x.len();
        let chunk = |back: usize| balanced((rank + 2 * n - back) % n, n, len);
        for step in 0..n - 1 {
            if step > 0 {
                dev.await_step(&self.call, previous)?;
            }
            let range = chunk(1 + step);
            if !range.is_empty() {
                self.fetch::<T>(&range, scratch.block.address)?;
                let last = step == n - 2;
                let own = x.view_mut().slice_mut(range.clone());
                T::add(&raw, own, scratch.slice(..range.len()), avg.filter(|_| last))?;
            }
            dev.send_step(&self.call, next, Event::record(&dev.stream, "all_reduce", false)?)?;
        }
        for step in 0..n - 1 {
            dev.await_step(&self.call, previous)?;
            let range = chunk(step);
            if !range.is_empty() {
                self.fetch::<T>(&range, x.address() + (range.start * size_of::<T>()) as u64)?;
            }
            if step < n - 2 {
                dev.send_step(&self.call, next, Event::record(&dev.stream, "all_reduce", false)?)?;
            }
        }
        dev.send_step(&self.call, previous, Event::record(&dev.stream, "all_reduce", false)?)?;
        dev.await_step(&self.call, next)
    }

    /// Copies a chunk of the predecessor's buffer to this device.
    fn fetch<T: Element>(&self, range: &Range<usize>, dst: u64) -> Result<()> {
        let src = self.peer.address + (range.start * size_of::<T>()) as u64;
        let bytes = range.len() * size_of::<T>();
        crate::copy::peer::copy(self.dev, dst, self.dev.index(), src, self.peer.device, bytes)
    }
}
