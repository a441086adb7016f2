//! The memory of all devices at once.

use super::GpuPool;
use crate::{
    error::{Error, Result, op_site::OpSite},
    memory::{LeakReport, MemorySnapshot, MemoryStats},
};

impl GpuPool {
    /// Counts of each device's memory pool at the end of its last scope. Any thread may call it at any time, even while
    /// scopes run: it does not wait. [`Device::stats`](crate::Device::stats) has the present counts.
    pub fn memory_stats(&self) -> Vec<MemoryStats> {
        // Those that the owner's thread has published last.
        let published = self.shared.owners.iter().map(|owner| owner.get().map(|owner| owner.mirror.read()));
        published.map(|words| words.map_or_else(MemoryStats::default, MemoryStats::from_words)).collect()
    }

    /// The memory of every device, as from [`Device::memory_snapshot`](crate::Device::memory_snapshot).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    #[track_caller]
    pub fn memory_snapshots(&self) -> Result<Vec<MemorySnapshot>> {
        let _here = OpSite::here("memory_snapshots");
        self.run(|dev, _| Ok(dev.memory_snapshot()))
    }

    /// Gives all free memory back to the drivers, and free page-locked memory, too. Returns the number of bytes. See
    /// [`Device::trim`](crate::Device::trim).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    #[track_caller]
    pub fn trim(&self) -> Result<u64> {
        let _here = OpSite::here("trim");
        let devices = self.run(|dev, _| dev.trim())?;
        Ok(devices.iter().sum::<u64>() + self.shared.pinned.trim())
    }

    /// The buffers that are live now, by device and by their places in the program, if the pool
    /// [records](crate::Builder::record_memory) (the default in builds with debug assertions). If buffers outlive the
    /// pool, [`close`](Self::close) writes this report to the log as a warning.
    ///
    /// ```
    /// let pool = gpu_pool::GpuPool::builder().host(1).record_memory(true).build()?;
    /// let kept = pool.run(|dev, _| dev.zeros::<u8>(1 << 20))?;
    /// println!("{}", pool.leaks()?); // 1.0 MiB in 1 buffer still live: zeros at src/main.rs:4:35
    /// assert_eq!(pool.leaks()?.bytes(), 1 << 20);
    /// drop(kept);
    /// assert!(pool.leaks()?.is_empty());
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the pool does not record; as [`run`](Self::run).
    #[track_caller]
    pub fn leaks(&self) -> Result<LeakReport> {
        if !self.shared.memory.records() {
            return Err(Error::invalid("leaks", "this pool does not record its memory (`Builder::record_memory`)"));
        }
        let _here = OpSite::here("leaks");
        let leaks = self.run(|dev, _| Ok(dev.worker.cache.borrow_mut().leaks()))?;
        Ok(LeakReport { leaks: leaks.into_iter().flatten().collect() })
    }
}
