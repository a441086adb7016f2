//! How a pool's memory is to be managed.

use super::Builder;
use crate::memory::{
    BackingChoice, OutOfMemoryReport,
    cache::{MemoryLimit, OnOutOfMemory, Settings},
};
use std::sync::Arc;

impl Builder {
    /// The most that the pool may take from each device, in bytes. It takes memory in pieces of 2 MiB or more.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory.limit = Some(MemoryLimit::Bytes(bytes));
        self
    }

    /// The most that the pool may take from each device, in per cent of what the device has.
    ///
    /// ```
    /// # use gpu_pool::{Error, GpuPool};
    /// let pool = GpuPool::builder().host(2).software_memory(64 << 20).memory_limit_percent(50.0).build()?;
    /// let refused = pool.run(|dev, _| dev.zeros::<u8>(33 << 20).map(drop));
    /// assert!(matches!(refused, Err(Error::OutOfMemory { .. })));
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Panics
    /// When it is not a number from 0 to 100.
    #[track_caller]
    pub fn memory_limit_percent(mut self, percent: f64) -> Self {
        assert!((0.0..=100.0).contains(&percent), "{percent} per cent of a device's memory");
        self.memory.limit = Some(MemoryLimit::Percent(percent));
        self
    }

    /// Bytes to take from each device when the pool is built, so that the first allocations cost no driver calls.
    pub fn memory_reserve(mut self, bytes: u64) -> Self {
        self.memory.reserve = Some(bytes);
        self
    }

    /// Where devices' memory comes from (default: virtual memory where there is any that works).
    pub fn memory_backing(mut self, choice: BackingChoice) -> Self {
        self.memory.choice = choice;
        self
    }

    /// Called on the device's thread when its memory is used up and everything else has been tried; `true` asks for another
    /// attempt. For caches of your own: drop their buffers there, on whatever device they are.
    ///
    /// ```
    /// # use gpu_pool::{DeviceBuffer, GpuPool};
    /// # use parking_lot::Mutex;
    /// # use std::sync::Arc;
    /// let cached: Arc<Mutex<Vec<DeviceBuffer<u8>>>> = Arc::default();
    /// let cache = cached.clone();
    /// let pool = GpuPool::builder().host(1).memory_limit(8 << 20).on_out_of_memory(move |report| {
    ///     eprintln!("{report}");
    ///     !std::mem::take(&mut *cache.lock()).is_empty() // dropped, so try again
    /// }).build()?;
    /// pool.run(|dev, _| {
    ///     cached.lock().push(dev.zeros(6 << 20)?);
    ///     dev.zeros::<u8>(6 << 20).map(drop)
    /// })?;
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn on_out_of_memory(mut self, again: impl Fn(&OutOfMemoryReport) -> bool + Send + Sync + 'static) -> Self {
        self.memory.on_out_of_memory = Some(OnOutOfMemory(Arc::new(again)));
        self
    }

    /// Whether the memory pools keep account of who holds what, by places in the program, and of what happened: for
    /// [`Device::memory_snapshot`](crate::Device::memory_snapshot), for the report of an out-of-memory, and for that of leaks
    /// at [`close`](GpuPool::close). Default: in builds with debug assertions.
    pub fn record_memory(mut self, record: bool) -> Self {
        self.memory.record = Some(record);
        self
    }

    /// All of these settings as they were in another pool.
    pub(crate) fn memory(mut self, settings: Settings) -> Self {
        self.memory = settings;
        self
    }
}
