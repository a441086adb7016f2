//! Settings of a pool's memory.

use super::Builder;
use crate::{
    contain::Contained,
    memory::{BackingChoice, MemoryLimit, OnOutOfMemory, OutOfMemoryReport, cache::Settings},
};
use std::sync::Arc;

setters! { Builder;
    /// The most memory that the pool may take from each device, in bytes. It takes memory in pieces of 2 MiB or more.
    pub fn memory_limit(self, bytes: u64) { self.memory.limit = Some(MemoryLimit::Bytes(bytes)); }

    /// The most memory that the pool may take from each device, in per cent of the device's memory (0 to 100).
    pub fn memory_limit_percent(self, percent: f64) { self.memory.limit = Some(MemoryLimit::Percent(percent)); }

    /// Bytes to take from each device when the pool is built, so that the first allocations cost no driver calls.
    /// [`build`](Self::build) fails if this is more than the [limit](Self::memory_limit) allows or than a device has.
    pub fn memory_reserve(self, bytes: u64) { self.memory.reserve = Some(bytes); }

    /// The limit of fragmentation: how much memory the pool may take from each device, as a multiple of the largest
    /// amount that was ever in use (1.1: ten per cent more). Beyond it the pool defragments instead. By default it
    /// defragments only when the device has no more memory.
    ///
    /// A request larger than each free piece cannot be served from free pieces, so a pool takes more memory than is
    /// ever in use. With virtual memory ([`memory_backing`](Self::memory_backing)) the pool can remap free pieces to
    /// one range, 2 to 64 MiB at a time, without a copy. But each such move costs the driver calls of an unmap and a
    /// map, and the host waits for streams that still use the pieces. So set this if other programs need the memory,
    /// not for the fastest steps: by default a program that repeats its steps makes no driver call after the first.
    ///
    /// The pool may exceed the limit: if too little free memory can be moved, it takes more memory. Without virtual
    /// memory nothing can be moved. The page "The memory pool" of the guide has numbers.
    pub fn memory_slack(self, slack: f64) { self.memory.slack = Some(slack); }

    /// Where devices' memory comes from. Default: virtual memory, if it works.
    pub fn memory_backing(self, choice: BackingChoice) { self.backing = Some(choice); }

    /// A function that the pool calls when a device's memory is used up and everything else has been tried. It runs on
    /// the device's thread (for page-locked memory: on the thread that allocates). If it returns `true`, the pool tries
    /// again. Use it to drop the buffers of your own caches, of any device.
    pub fn on_out_of_memory(self, again: impl Fn(&OutOfMemoryReport) -> bool + Send + Sync + 'static) {
        self.memory.on_out_of_memory = Some(OnOutOfMemory(Contained::new(Arc::new(again))));
    }

    /// Whether the memory pools record live blocks by their places in the program, and events. Used by
    /// [`Device::memory_snapshot`](crate::Device::memory_snapshot), by out-of-memory reports, and by the leak report at
    /// [`close`](crate::GpuPool::close). Default: in builds with debug assertions.
    pub fn record_memory(self, record: bool) { self.memory.record = Some(record); }

    /// Takes all of these settings from another pool.
    pub(crate) fn memory(self, settings: Settings) { self.memory = settings; }
}
