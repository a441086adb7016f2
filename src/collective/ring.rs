//! All-reduce around a ring.
//!
//! The buffer is cut into as many chunks as there are ranks ([`cut`]), and chunk `c` is added up from rank `c` onwards: own element
//! plus what has arrived, an average times `1 / n` at the end. That is the order of additions, whichever of two forms has it:
//! one [`kernel`] on each member, which writes to its successor; or, here, copies in an order made by events, which leave the
//! processors to other work. The bits are the same.
//!
//! By copies rank `r` reads only from its predecessor:
//!
//! ```text
//! reduce-scatter, step s:  chunk (r - 1 - s) of the predecessor is copied to scratch and added to the own one
//! all-gather, step s:      chunk (r - s) of the predecessor replaces the own one
//! ```
//!
//! After the first phase rank `r` holds the whole sum of chunk `r + 1`. Each step waits, on the GPU, for the event that
//! the predecessor recorded after its step before; the event travels through the ring buffer between the two threads.
//! So no kernel spins. Out of place, the first step reads the predecessor's source, and a chunk of the own source is copied to
//! the destination before something is added to it.
//!
//! Why nothing else must be waited for: rank `r` overwrites chunk `c` in the second phase only after the complete sum of
//! `c` came back to it, which happened after the successor had read and added the old contents. The last reads of the
//! second phase are covered by the final event, which goes to the predecessor: when its stream has passed it, nobody
//! touches its buffer any more.

pub(crate) mod cut;
pub(super) mod kernel;
#[cfg(test)]
mod tests;

use super::{
    DType, Group, ReduceOp, direct,
    run::{Request, Spot, lent},
};
use crate::{
    DeviceBuffer, Event, Kernel, Signature,
    builtin::{ADD_F32, ADD_F64, ADD_SCALE_F32, ADD_SCALE_F64},
    collective::{
        board::{Area, Notice},
        kernels::Entry,
    },
    driver::{KernelArg, ValueBytes},
    error::Result,
    plant::Bug,
};
use std::{ops::Range, sync::Arc};

/// Room for the largest chunk, if anything arrives.
pub(super) fn scratch(group: &Group<'_>, len: usize, dtype: DType) -> Result<Option<DeviceBuffer<u8>>> {
    let largest = cut::chunk(0, group.count(), len, dtype.size()).len();
    let wanted = group.count() > 1 && largest > 0;
    wanted.then(|| group.dev.allocate::<u8>("all_reduce", largest * dtype.size())).transpose()
}

/// Submits a member's part to the current stream, step by step with its neighbours.
pub(super) fn submit(
    group: &Group<'_>,
    request: &Request,
    len: usize,
    scratch: Option<&DeviceBuffer<u8>>,
    notices: &[Arc<Notice>],
) -> Result<()> {
    // One device, or nothing to add.
    let Some(scratch) = scratch else { return Ok(()) };
    let (dev, ranks) = (group.dev, group.count());
    let previous = lent(&notices[(group.rank + ranks - 1) % ranks]);
    // Managed memory is at home everywhere.
    let spot = |area: &Area| Spot { device: area.block.device().unwrap_or(dev.index()), address: area.address };
    let peer = spot(previous.destination.as_ref().expect("all_reduce has a buffer"));
    let first = previous.source.as_ref().map_or(peer, spot);
    let ready = previous.ready.as_ref().expect("there are several members");
    if !dev.worker.link.planted(Bug::StartSkipped) {
        dev.stream.wait_event("all_reduce", ready.0.raw, &ready.0.stream, ready.0.covered)?;
    }
    let own = |area: &Area| Spot { device: dev.index(), address: area.address };
    let source = request.source.as_ref().map(own);
    let own = own(request.destination.as_ref().expect("all_reduce has a buffer"));
    let ring = Ring { group, request, first, peer, source, own };
    ring.run(len, Spot { device: dev.index(), address: scratch.address() })
}

struct Ring<'g> {
    group: &'g Group<'g>,
    request: &'g Request,
    /// The predecessor's buffers: what the first step reads, and all others. They are alive: its stream ends after the reads of
    /// this one.
    first: Spot,
    peer: Spot,
    /// The own ones; a source only out of place.
    source: Option<Spot>,
    own: Spot,
}

impl Ring<'_> {
    fn run(&self, len: usize, scratch: Spot) -> Result<()> {
        let (group, n, rank) = (self.group, self.group.count(), self.group.rank);
        let (dev, call) = (group.dev, &self.request.call);
        let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
        let factor = (self.request.reduce == ReduceOp::Avg).then(|| 1.0 / n as f64);
        let chunk = |back: usize| cut::chunk((rank + 2 * n - back) % n, n, len, self.request.dtype.size());
        let done = || Event::record(&dev.stream, call.op(), false);
        for step in 0..n - 1 {
            if step > 0 {
                group.await_step(call, previous)?;
            }
            let range = chunk(1 + step);
            if !range.is_empty() {
                self.fetch(if step == 0 { self.first } else { self.peer }, &range, scratch)?;
                if let Some(source) = self.source {
                    self.fetch(source, &range, self.at(self.own, &range))?;
                }
                let last = step == n - 2;
                self.add(&range, scratch, factor.filter(|_| last))?;
            }
            group.send_step(call, next, done()?)?;
        }
        for step in 0..n - 1 {
            group.await_step(call, previous)?;
            let range = chunk(step);
            if !range.is_empty() {
                self.fetch(self.peer, &range, self.at(self.own, &range))?;
            }
            if step < n - 2 {
                group.send_step(call, next, done()?)?;
            }
        }
        group.send_step(call, previous, done()?)?;
        group.await_step(call, next)
    }

    fn at(&self, spot: Spot, range: &Range<usize>) -> Spot {
        Spot { address: spot.address + (range.start * self.request.dtype.size()) as u64, ..spot }
    }

    /// Copies a chunk of a buffer to this device.
    fn fetch(&self, from: Spot, range: &Range<usize>, to: Spot) -> Result<()> {
        let (from, bytes) = (self.at(from, range), range.len() * self.request.dtype.size());
        crate::copy::peer::copy(self.group.dev, to.address, to.device, from.address, from.device, bytes)
    }

    /// Adds what has arrived to the own chunk; with a factor, multiplies the sum.
    fn add(&self, range: &Range<usize>, arrived: Spot, factor: Option<f64>) -> Result<()> {
        let dtype = self.request.dtype;
        let slice =
            |spot: Spot, write| KernelArg::Slice { address: spot.address, bytes: range.len() * dtype.size(), write };
        let value = |bytes: &[u8]| KernelArg::Value(ValueBytes::new(bytes));
        let mut args = vec![slice(self.at(self.own, range), true), slice(arrived, false)];
        args.push(value(&(range.len() as u64).to_ne_bytes()));
        let entry = match (dtype, factor) {
            (DType::F64, None) => entry_of(&ADD_F64),
            (DType::F64, Some(factor)) => {
                args.push(value(&factor.to_ne_bytes()));
                entry_of(&ADD_SCALE_F64)
            }
            (_, None) => entry_of(&ADD_F32),
            (_, Some(factor)) => {
                args.push(value(&(factor as f32).to_ne_bytes()));
                entry_of(&ADD_SCALE_F32)
            }
        };
        direct::launch(self.group.dev, "all_reduce", entry, direct::blocks(range.len() * dtype.size()), &args)
    }
}

fn entry_of<S: Signature>(kernel: &Kernel<S>) -> Entry {
    Entry { module: kernel.module, name: kernel.name, host: kernel.host }
}
