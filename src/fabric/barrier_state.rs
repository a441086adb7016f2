//! A device thread's record of its kernels that wait for peers' kernels: the last one, and the barriers that it owes.
//! `collective/barrier.rs` fills it and acts on it. Invariant: each pair of devices counts its barriers alike. So a
//! committed barrier for which this device launched no kernel stays noted ([`DeviceBarrierState::skip`]) until one is.

use super::{DeviceBarrier, FEW};
use crate::{
    contain::Finally,
    error::{Error, Result, Site},
    memory::StreamCore,
};
use std::{
    cell::{Cell, RefCell},
    iter,
    sync::Arc,
};

#[derive(Default)]
pub(crate) struct DeviceBarrierState {
    last: RefCell<Option<(Arc<StreamCore>, u64)>>,
    /// Whether the last one had more than [`FEW`] blocks: of those launched, and of those in graphs.
    many: [Cell<bool>; 2],
    pub(crate) skipped: RefCell<Vec<SkippedBarrier>>,
    /// Whether a failed gang may have left something in this device's inbox.
    spoiled: Cell<bool>,
    /// Nested calls of [`Device::blocking`](crate::Device::blocking) that are running.
    blocked: Cell<u32>,
}

#[derive(Clone, Copy)]
pub(crate) struct SkippedBarrier {
    pub barrier: DeviceBarrier,
    pub times: usize,
}

impl DeviceBarrierState {
    pub(crate) fn skip(&self, skipped: SkippedBarrier) {
        self.skipped.borrow_mut().push(skipped);
    }

    pub(crate) fn set_spoiled(&self, spoiled: bool) {
        self.spoiled.set(spoiled);
    }

    pub(crate) fn is_spoiled(&self) -> bool {
        self.spoiled.get()
    }

    /// Calls `launch` for each owed barrier; returns whether there were any. From the first error on they stay owed.
    pub(crate) fn resync<E>(&self, mut launch: impl FnMut(DeviceBarrier) -> Result<(), E>) -> Result<bool, E> {
        let skipped = self.skipped.take();
        let mut barriers = skipped.iter().flat_map(|skipped| iter::repeat_n(skipped.barrier, skipped.times));
        while let Some(barrier) = barriers.next() {
            if let Err(error) = launch(barrier) {
                let left = iter::once(barrier).chain(barriers).map(|barrier| SkippedBarrier { barrier, times: 1 });
                *self.skipped.borrow_mut() = left.collect();
                return Err(error);
            }
        }
        Ok(!skipped.is_empty())
    }

    /// Returns whether the kernel before this one may have had at most [`FEW`] blocks. Captured kernels are told apart.
    pub(crate) fn note_blocks(&self, captured: bool, blocks: u32) -> bool {
        !self.many[usize::from(captured)].replace(blocks > FEW)
    }

    /// The stream's last operation spins; if a launch has failed, its barrier was skipped.
    pub(crate) fn launched(&self, stream: &Arc<StreamCore>, skipped: SkippedBarrier, launched: &Result<()>) {
        *self.last.borrow_mut() = Some((stream.clone(), stream.submitted()));
        if launched.is_err() {
            self.skip(skipped);
        }
    }

    /// Before a meeting: checks that this thread may wait for others' launches, and makes the stream wait for the last
    /// kernel that spins.
    pub(crate) fn prepare(&self, name: &'static str, site: Site, stream: &Arc<StreamCore>) -> Result<()> {
        self.check_not_blocked(name, site)?;
        match &*self.last.borrow() {
            Some((other, last)) if other.id != stream.id => stream.wait_for(name, other, *last),
            _ => Ok(()),
        }
    }

    /// Until the guard is dropped, this thread must not wait for others' launches.
    pub(crate) fn block(&self) -> Finally<impl FnMut()> {
        self.blocked.set(self.blocked.get() + 1);
        Finally(|| self.blocked.set(self.blocked.get() - 1))
    }

    pub(crate) fn check_not_blocked(&self, name: &'static str, site: Site) -> Result<()> {
        if self.blocked.get() == 0 {
            return Ok(());
        }
        let why = "a collective within `blocking` would wait for the closure that calls it";
        Err(Error::invalid_at(site, name, why))
    }
}
