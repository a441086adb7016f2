//! The pool: one host thread per GPU, and scopes that run on all of them.

pub(crate) mod collectives;
mod memory;
mod per_device;
pub(crate) mod report;

use crate::{
    Builder, Device, DeviceCopy, Parts, PerDevice, PinnedBuffer, PoolReport, Shard, UnifiedBuffer,
    driver::{
        check,
        host::{self, Trace},
    },
    error::{Error, Result},
    gang::dispatch::Entry,
    memory::pinned::Locality,
    panics,
    parts::rows_mut,
    scope::{as_it_is, by_its_text, check_pid, members, run, shard},
    thread::worker::{Shared, on_device_thread},
};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::{fmt, panic::Location, sync::Arc};

pub(crate) static GLOBAL: OnceCell<GpuPool> = OnceCell::new();

/// GPUs, each with a host thread of its own that lives as long as the pool.
///
/// A closure runs on every device at once, on that device's thread, and may borrow from the caller; results come back
/// in device order. Scopes may be started from any number of threads; they take turns.
///
/// ```
/// use gpu_pool::{GpuPool, ReduceOp};
///
/// let batch: Vec<f32> = (0..1000).map(|i| i as f32).collect();
/// let sums: Vec<Vec<f32>> = GpuPool::scope(|dev, shard| {
///     let x = dev.upload(shard.of(&batch))?;           // this GPU's part of the borrowed batch
///     let mut s = dev.sum(&x)?;                        // one element, on this GPU's stream
///     dev.all_reduce(&mut s, ReduceOp::Sum)?;          // ring buffers + cross-device events
///     dev.download(&s)                                 // waits for this stream only
/// })?;                                                 // results in device order
/// assert!(sums.iter().all(|s| s[0] == 499_500.0));
/// # Ok::<(), gpu_pool::Error>(())
/// ```
///
/// One closure serves all devices at once, so it cannot change what it captures:
///
/// ```compile_fail,E0594
/// # use gpu_pool::GpuPool;
/// let mut n = 0;
/// GpuPool::scope(|_, _| { n += 1; Ok(()) }); // return a value instead, or use `run_mut`
/// ```
///
/// # When something fails
///
/// The first member that panics, returns an error or loses its device fails the whole gang: the others get
/// [`Error::Aborted`] from whatever they do next, and the scope returns the cause. The pool works again afterwards.
/// Buffers written in the failed scope have unspecified contents.
///
/// A closure that has started is always waited for, whatever it does: it may hold borrows. A caller must not hold a
/// lock that the closure takes; that cannot be detected.
pub struct GpuPool {
    pub(crate) shared: Arc<Shared>,
}

impl GpuPool {
    /// Settings for a pool.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The process-wide pool; built with the defaults if it is not there.
    ///
    /// # Errors
    /// As [`Builder::build`].
    #[track_caller]
    pub fn global() -> Result<&'static GpuPool> {
        // A device closure that comes here would wait for a pool that may be waiting for it.
        if GLOBAL.get().is_none() && on_device_thread() {
            return Err(Error::NestedScope { op: "global" });
        }
        let site = Location::caller();
        GLOBAL.get_or_try_init(|| GpuPool::builder().build().map_err(|error| error.called_at(site)))
    }

    /// Runs `f` on every device of the process-wide pool; see the [type's docs](GpuPool).
    ///
    /// # Errors
    /// The first failure of any device; [`Error::NestedScope`] on a device thread; as [`Builder::build`] the first
    /// time.
    #[track_caller]
    pub fn scope<F, R>(f: F) -> Result<Vec<R>>
    where
        F: Fn(&Device, Shard) -> Result<R> + Sync,
        R: Send,
    {
        Self::global()?.run(f)
    }

    /// [`scope`](Self::scope) with the caller's own error type.
    ///
    /// # Errors
    /// What the first failing closure returned; `E::from` of this crate's errors.
    #[track_caller]
    pub fn try_scope<F, R, E>(f: F) -> Result<Vec<R>, E>
    where
        F: Fn(&Device, Shard) -> Result<R, E> + Sync,
        R: Send,
        E: From<Error> + fmt::Display + Send,
    {
        Self::global()?.try_run(f)
    }

    /// Runs `f` on every device of this pool, with its shard, and returns the results in device order.
    ///
    /// When it returns, all work that the closures asked for has completed.
    ///
    /// # Errors
    /// The first failure: the error that a closure returned, [`Error::Panicked`], [`Error::DeviceLost`], ...
    /// [`Error::NestedScope`] on a device thread, [`Error::Closed`], [`Error::Forked`], and [`Error::Timeout`] when the
    /// devices were busy with other scopes that made no progress for the deadline.
    #[track_caller]
    pub fn run<F, R>(&self, f: F) -> Result<Vec<R>>
    where
        F: Fn(&Device, Shard) -> Result<R> + Sync,
        R: Send,
    {
        run(&self.shared, None, f, as_it_is)
    }

    /// [`run`](Self::run) with the caller's own error type. Peers of the device that failed learn the error's text, in
    /// [`Error::Aborted`]. The text is asked for once, behind the abort: only who looks at it waits for it.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let failed: anyhow::Result<Vec<()>> = pool.try_run(|dev, _| {
    ///     anyhow::ensure!(dev.index() == 0, "device {} has had enough", dev.index());
    ///     Ok(())
    /// });
    /// assert_eq!(failed.unwrap_err().to_string(), "device 1 has had enough");
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// What the first failing closure returned; `E::from` of this crate's errors, as [`run`](Self::run) has them.
    #[track_caller]
    pub fn try_run<F, R, E>(&self, f: F) -> Result<Vec<R>, E>
    where
        F: Fn(&Device, Shard) -> Result<R, E> + Sync,
        R: Send,
        E: From<Error> + fmt::Display + Send,
    {
        run(&self.shared, None, f, by_its_text)
    }

    /// Runs `f` on some of the devices only (ordinals in the pool, in the order of their ranks). Gangs that share no
    /// device run at the same time.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(4).build()?;
    /// let who = pool.run_on(&[3, 1], |dev, shard| Ok((dev.index(), dev.rank(), shard.count())))?;
    /// assert_eq!(who, [(3, 0, 2), (1, 1, 2)]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty list, an ordinal twice or one that is not there; else as
    /// [`run`](Self::run).
    #[track_caller]
    pub fn run_on<F, R>(&self, devices: &[usize], f: F) -> Result<Vec<R>>
    where
        F: Fn(&Device, Shard) -> Result<R> + Sync,
        R: Send,
    {
        let members = members(&self.shared, "run_on", devices)?;
        run(&self.shared, Some(members), f, as_it_is)
    }

    /// Runs `f` on every device, each with its own rows (of `width` items) of `out`.
    ///
    /// ```
    /// # use gpu_pool::GpuPool;
    /// let pool = GpuPool::builder().host(2).build()?;
    /// let x: Vec<f32> = (0..10).map(|i| i as f32).collect();
    /// let mut y = vec![0.0f32; 10];
    /// pool.run_mut(&mut y, 1, |dev, shard, rows| {
    ///     let mut d = dev.upload(shard.of(&x))?;
    ///     dev.scale(&mut d, 2.0)?;
    ///     dev.download_into(&d, rows)
    /// })?;
    /// assert_eq!(y[9], 18.0);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `width` is 0 or does not divide the length; else as [`run`](Self::run).
    #[track_caller]
    pub fn run_mut<T, F, R>(&self, out: &mut [T], width: usize, f: F) -> Result<Vec<R>>
    where
        T: Send,
        F: Fn(&Device, Shard, &mut [T]) -> Result<R> + Sync,
        R: Send,
    {
        self.run_with(rows_mut(out, width), |dev, shard, rows| f(dev, shard, rows))
    }

    /// Runs `f` on every device, each with its own part of `parts`: rows of slices, items of vectors, rows of unified
    /// memory, and tuples of these. See [`Parts`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the parts cannot be split so; else as [`run`](Self::run).
    #[track_caller]
    pub fn run_with<P, F, R>(&self, parts: P, f: F) -> Result<Vec<R>>
    where
        P: Parts,
        F: Fn(&Device, Shard, P::Part) -> Result<R> + Sync,
        R: Send,
    {
        self.run_parts("run_with", None, parts, f)
    }

    /// [`run_with`](Self::run_with) on some of the devices only, as [`run_on`](Self::run_on): one part for each of
    /// these.
    ///
    /// ```
    /// # use gpu_pool::{GpuPool, rows_mut};
    /// let pool = GpuPool::builder().host(4).build()?;
    /// let mut y = [1.0f32; 6];
    /// pool.run_on_with(&[3, 1], rows_mut(&mut y, 1), |dev, _, rows| {
    ///     let mut d = dev.upload(rows)?;
    ///     dev.scale(&mut d, dev.index() as f32)?;
    ///     dev.download_into(&d, rows)
    /// })?;
    /// assert_eq!(y, [3.0, 3.0, 3.0, 1.0, 1.0, 1.0]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`run_on`](Self::run_on) and [`run_with`](Self::run_with).
    #[track_caller]
    pub fn run_on_with<P, F, R>(&self, devices: &[usize], parts: P, f: F) -> Result<Vec<R>>
    where
        P: Parts,
        F: Fn(&Device, Shard, P::Part) -> Result<R> + Sync,
        R: Send,
    {
        let members = members(&self.shared, "run_on_with", devices)?;
        self.run_parts("run_on_with", Some(members), parts, f)
    }

    #[track_caller]
    fn run_parts<P, F, R>(&self, op: &'static str, members: Option<&[usize]>, parts: P, f: F) -> Result<Vec<R>>
    where
        P: Parts,
        F: Fn(&Device, Shard, P::Part) -> Result<R> + Sync,
        R: Send,
    {
        let count = members.map_or(self.devices(), <[usize]>::len);
        let shards: Vec<Shard> = (0..count).map(|rank| shard(&self.shared, rank, members)).collect();
        let parts: Vec<_> = parts.split(&shards)?.into_iter().map(|part| Mutex::new(Some(part))).collect();
        if parts.len() != count {
            return Err(Error::invalid(op, format_args!("{} parts for {count} devices", parts.len())));
        }
        let own = |dev: &Device, shard: Shard| {
            let part = parts[dev.rank()].lock().take().expect("a closure runs once per device");
            f(dev, shard, part)
        };
        run(&self.shared, members, own, as_it_is)
    }

    /// State that lives on its device's thread, one `T` per device, made by `f`. See [`PerDevice`].
    ///
    /// # Errors
    /// As [`run`](Self::run).
    #[track_caller]
    pub fn per_device<T, F>(&self, f: F) -> Result<PerDevice<T>>
    where
        T: 'static,
        F: Fn(&Device, Shard) -> Result<T> + Sync,
    {
        PerDevice::create(&self.shared, f)
    }

    /// `len` zeros in page-locked host memory, which every device of this pool copies from and to without waiting.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], the driver's.
    #[track_caller]
    pub fn pinned<T: DeviceCopy>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        self.check_open()?;
        self.shared.pinned.buffer("pinned", len, Locality::CallingThread)
    }

    /// `len` zeros in managed memory: one address on the host and on every device. See [`UnifiedBuffer`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::InvalidArgument`] where a device and the host cannot touch managed memory at
    /// the same time, the driver's.
    #[track_caller]
    pub fn unified<T: DeviceCopy>(&self, len: usize) -> Result<UnifiedBuffer<T>> {
        self.check_open()?;
        if let Some(i) = (0..self.devices()).find(|&i| !self.shared.handles[i].driver.info().concurrent_managed) {
            let why = format!("device {i} cannot share managed memory with the host while it works");
            return Err(Error::invalid("unified", why));
        }
        let _here = self.shared.handles[0].enter("unified", Location::caller());
        UnifiedBuffer::new(&self.shared.handles[0], len, self.shared.deadline)
    }

    /// How many devices the pool has.
    pub fn devices(&self) -> usize {
        self.shared.devices()
    }

    /// What the devices are and how they reach each other, as found when the pool was built.
    pub fn report(&self) -> PoolReport {
        PoolReport {
            devices: self.shared.handles.iter().map(|handle| handle.driver.info().clone()).collect(),
            lost: self.shared.handles.iter().map(|handle| handle.is_lost()).collect(),
            peers: self.shared.peers.get().cloned().unwrap_or_default(),
            collectives: self.shared.limits().describe(self.devices()),
        }
    }

    /// What the pool's software GPUs have done so far, where they run one operation at a time
    /// ([`Schedule`](crate::driver::host::Schedule)); `None` otherwise.
    pub fn trace(&self) -> Option<Trace> {
        host::trace(&self.shared.handles[0].driver)
    }

    /// A new pool of the devices that are not lost. Ordinals are given anew, in the old order; the old pool should be
    /// dropped.
    ///
    /// Software GPUs are lost one by one. With CUDA that is for the driver to say: seen with driver 580 on two H200s of
    /// a virtual machine, a kernel that traps on one GPU takes every context of the process with it, also without peer
    /// access; then all devices report [`Error::DeviceLost`], none survives, and only a new process helps.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when none is left; as [`Builder::build`].
    #[track_caller]
    pub fn survivors(&self) -> Result<GpuPool> {
        let alive: Vec<usize> = (0..self.devices()).filter(|&i| !self.shared.handles[i].is_lost()).collect();
        let handles = || alive.iter().map(|&i| &self.shared.handles[i]);
        let mut drivers: Vec<_> = handles().map(|handle| handle.unwatched().clone()).collect();
        if handles().any(|handle| handle.watch().is_some()) {
            // A checker of its own, whose reports have the new pool's ordinals.
            drivers = check::wrap(drivers);
        }
        if drivers.is_empty() {
            return Err(Error::NoDevice { reason: "every device of the pool is lost".to_owned() });
        }
        let mut builder = Builder::default().timeout(self.shared.deadline).tune(self.shared.tune);
        builder = builder.algorithm(self.shared.algorithm).reduce_order(self.shared.reduce_order);
        builder = builder.memory(self.shared.memory.clone());
        if self.shared.staged {
            builder = builder.without_peer_access();
        }
        if let Some(weights) = &self.shared.weights {
            builder = builder.weights(&alive.iter().map(|&i| weights[i]).collect::<Vec<_>>());
        }
        let own = self.shared.modules.iter().skip(crate::kernel::builtin::MODULES.len());
        own.fold(builder, |builder, module| builder.module(module)).with_drivers(drivers)
    }

    /// Waits for scopes under way, then for the device threads to end. Afterwards buffers can still be dropped, nothing
    /// else. Dropping the pool does the same, but cannot say what went wrong.
    ///
    /// # Errors
    /// [`Error::NestedScope`] on a device thread, [`Error::Forked`], [`Error::Panicked`] when a device thread panicked
    /// outside of any scope by a mistake of this crate (drops of users' values may panic: that is no error),
    /// [`Error::Misuse`] when the checker has refused to give memory back that is in use, or has found that something
    /// was written out of bounds ([`Check::Memory`](crate::Check::Memory)).
    pub fn close(self) -> Result<()> {
        if on_device_thread() {
            return Err(Error::NestedScope { op: "close" });
        }
        self.check_pid()?;
        stop(&self.shared)
    }

    fn check_open(&self) -> Result<()> {
        self.check_pid()?;
        if self.shared.gate.is_closed() { Err(Error::Closed) } else { Ok(()) }
    }

    fn check_pid(&self) -> Result<()> {
        check_pid(&self.shared)
    }
}

/// Waits for scopes under way, then ends the device threads.
fn stop(shared: &Arc<Shared>) -> Result<()> {
    if shared.gate.close() {
        shared.gate.wait_drained(None);
        shared.queues.iter().for_each(|queue| queue.post(Entry::Stop));
    }
    let threads = std::mem::take(&mut *shared.threads.lock());
    let mut ended = Ok(());
    for (device, thread) in threads.into_iter().enumerate() {
        ended = ended.and(thread.join().unwrap_or_else(|payload| Err(panics::of_thread(device, payload))));
    }
    shared.stages.lock().clear();
    ended = ended.and(shared.pinned.audit("close"));
    let refused = shared.handles.iter().find_map(|handle| {
        let report = handle.take_refused()?;
        let op = if report.kind == check::Kind::OutOfBounds { "close" } else { "free" };
        Some(handle.misuse(op, report))
    });
    refused.map_or(ended, Err)
}

impl Drop for GpuPool {
    fn drop(&mut self) {
        if std::process::id() != self.shared.pid {
            // After a fork there are no device threads to wait for, and the driver must not be called: leak it all.
            std::mem::forget(self.shared.clone());
            return;
        }
        if on_device_thread() {
            // A device thread cannot wait for itself (or for a scope that waits for it): another thread does.
            let shared = self.shared.clone();
            let name = "gpu-pool:close".to_owned();
            let started = std::thread::Builder::new().name(name).spawn(move || drop(stop(&shared)));
            if let Err(error) = started {
                event!(error, %error, "a pool that was dropped on a device thread could not be closed");
            }
            return;
        }
        if let Err(error) = stop(&self.shared) {
            event!(error, %error, "a pool did not end well");
        }
    }
}

impl fmt::Debug for GpuPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.shared.handles.iter().map(|handle| &handle.driver.info().name).collect();
        f.debug_struct("GpuPool").field("devices", &names).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;

    /// One of everything, small enough for Miri: `.ci/sanitize.sh` runs it there.
    #[test]
    fn a_whole_life() {
        let pool = GpuPool::builder().host(2).weights(&[3.0, 1.0]).build().unwrap();
        let batch = [1.0f32, 2.0, 3.0, 4.0];
        let found = pool.run(|dev, shard| {
            let mut x = dev.upload(shard.of(&batch))?;
            dev.scale(&mut x, 10.0)?;
            let mut sum = dev.sum(&x)?;
            dev.all_reduce(&mut sum, ReduceOp::Sum)?;
            Ok((dev.download(&x)?, dev.download(&sum)?))
        });
        assert_eq!(found.unwrap(), [(vec![10.0, 20.0, 30.0], vec![100.0]), (vec![40.0], vec![100.0])]);
        pool.close().unwrap();
    }
}
