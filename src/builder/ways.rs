//! The ways to a pool: its builder, the process-wide pool with its `scope`, and the survivors of another one.

use super::Builder;
use crate::error::{Error, Result, op_site::OpSite};
use crate::{
    Device, GpuPool, Shard, pool::run::Run, scope::as_it_is, sync::Returned, thread::worker::on_device_thread,
};
use once_cell::sync::OnceCell;
use std::panic::Location;

pub(super) static GLOBAL: OnceCell<GpuPool> = OnceCell::new();

/// The process-wide pool is never dropped. So its trace is brought up to date when a thread ends that has used it.
struct Flush;

impl Drop for Flush {
    fn drop(&mut self) {
        // A forked process has no thread that writes.
        if let Some(pool) = GLOBAL.get().filter(|pool| pool.shared.pid == std::process::id()) {
            pool.shared.timeline.flush();
        }
    }
}

thread_local! {
    static FLUSH: Flush = const { Flush };
}

impl GpuPool {
    /// Settings for a pool.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The process-wide pool. The first call builds it with the default settings.
    ///
    /// # Errors
    /// As [`Builder::build`].
    #[track_caller]
    pub fn global() -> Result<&'static GpuPool> {
        Self::global_for("global")
    }

    #[track_caller]
    fn global_for(op: &'static str) -> Result<&'static GpuPool> {
        let here = OpSite { op, site: Location::caller() };
        // A closure on a device thread would wait for a pool that may be waiting for the closure.
        fail_if!(GLOBAL.get().is_none() && on_device_thread(), Error::NestedScope { op, site: here.site });
        let _here = here.enter();
        let pool = GLOBAL.get_or_try_init(|| GpuPool::builder().build())?;
        let _ = FLUSH.try_with(|_| ());
        Ok(pool)
    }

    /// Runs `f` on every device of the process-wide pool. See the [type's documentation](GpuPool).
    ///
    /// # Errors
    /// The first failure of any device; [`Error::NestedScope`] on a device thread; the first time, the errors of
    /// [`Builder::build`](crate::Builder::build).
    #[track_caller]
    pub fn scope<R: Returned>(f: impl Fn(&Device, Shard) -> Result<R> + Sync) -> Result<Vec<R>> {
        Run::new(&Self::global_for("scope")?.shared, ()).scope("scope", f, as_it_is)
    }

    /// A new pool of the devices that are not lost. It numbers them from 0, in the old order. Drop the old pool. It has
    /// no trace, no flight record and no registered buckets.
    ///
    /// Software GPUs are lost one by one. With CUDA the driver decides. With driver 580 on two H200s of a virtual
    /// machine, a kernel that traps on one GPU destroys every context of the process, even without peer access. Then
    /// all devices report [`Error::DeviceLost`], no device survives, and only a new process helps.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when no device is left; else as [`Builder::build`].
    #[track_caller]
    pub fn survivors(&self) -> Result<GpuPool> {
        let _here = OpSite::here("survivors");
        let alive: Vec<usize> = (0..self.device_count()).filter(|&i| !self.shared.handles[i].is_lost()).collect();
        let handles = || alive.iter().map(|&i| &self.shared.handles[i]);
        let mut drivers: Vec<_> = handles().map(|handle| handle.unwatched().clone()).collect();
        if let Some(watch) = handles().find_map(|handle| handle.watch()) {
            // Its reports have the new ordinals.
            drivers = watch.checker.anew(drivers);
        }
        fail_if!(drivers.is_empty(), Error::NoDevice { reason: "every device of the pool is lost".to_owned() });
        let mut builder = Builder::default().timeout(self.shared.deadline);
        builder = builder.algorithm(self.shared.algorithm).reduce_order(self.shared.reduce_order);
        builder = builder.memory(self.shared.memory.clone());
        builder = builder.numa_affinity(self.shared.numa_affinity);
        if self.shared.staged {
            builder = builder.without_peer_access();
        }
        if let Some(weights) = &self.shared.weights {
            builder = builder.weights(&alive.iter().map(|&i| weights[i]).collect::<Vec<_>>());
        }
        let own = self.shared.modules.iter().skip(crate::kernel::builtin::MODULES.len());
        own.fold(builder, |builder, module| builder.module(module)).with_drivers(drivers)
    }
}
