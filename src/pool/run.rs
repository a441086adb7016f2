//! Running closures on a pool's devices: on all of them or on some, with parts of the caller's data or without.
//!
//! Programs call these methods. Each runs one scope (`scope.rs`).

use crate::{
    Device, GpuPool, Parts, Shard,
    error::{Error, Result, op_site::OpSite},
    parts::rows_mut,
    scope::{Begin, as_it_is, by_its_text, members, run, run_beside, shard},
};
use parking_lot::Mutex;
use std::{fmt, panic::Location};

impl GpuPool {
    /// Runs `f` on every device of the process-wide pool. See the [type's documentation](GpuPool).
    ///
    /// # Errors
    /// The first failure of any device; [`Error::NestedScope`] on a device thread; the first time, the errors of
    /// [`Builder::build`](crate::Builder::build).
    #[track_caller]
    pub fn scope<F, R>(f: F) -> Result<Vec<R>>
    where
        F: Fn(&Device, Shard) -> Result<R> + Sync,
        R: Send,
    {
        run(&Self::global_for("scope")?.shared, "scope", None, f, as_it_is)
    }

    /// [`scope`](Self::scope) with the caller's own error type.
    ///
    /// # Errors
    /// The error of the first closure that fails; `E::from` of this crate's errors.
    #[track_caller]
    pub fn try_scope<F, R, E>(f: F) -> Result<Vec<R>, E>
    where
        F: Fn(&Device, Shard) -> Result<R, E> + Sync,
        R: Send,
        E: From<Error> + fmt::Display + Send,
    {
        run(&Self::global_for("try_scope")?.shared, "try_scope", None, f, by_its_text)
    }

    /// Runs `f` on every device of this pool, with its shard, and returns the results in device order.
    ///
    /// When it returns, all work that the closures have submitted is complete.
    ///
    /// # Errors
    /// The first failure: the error of a closure, [`Error::Panicked`], [`Error::DeviceLost`] and others. Also
    /// [`Error::NestedScope`] on a device thread, [`Error::Closed`], [`Error::Forked`], and [`Error::Timeout`] if the
    /// devices were busy with other scopes that made no progress until the deadline.
    #[track_caller]
    pub fn run<F, R>(&self, f: F) -> Result<Vec<R>>
    where
        F: Fn(&Device, Shard) -> Result<R> + Sync,
        R: Send,
    {
        run(&self.shared, "run", None, f, as_it_is)
    }

    /// [`run`](Self::run) for pools in a cluster of which several threads run scopes at once: the n-th scope of a name
    /// in this process belongs to the n-th of that name in all processes, and all processes begin them in one order. So
    /// their collectives find each other whichever thread comes first. It begins when all processes have called it.
    ///
    /// (Scopes of [`run`](Self::run) find each other by the order of their first
    /// [`Device::world`](crate::Device::world).) Without a cluster it is `run`.
    ///
    /// # Errors
    /// As [`run`](Self::run). In a cluster also [`Error::HostTimeout`] if a process does not call it,
    /// [`Error::AbortedByHost`] and [`Error::HostLost`].
    #[track_caller]
    pub fn run_named<F, R>(&self, name: &str, f: F) -> Result<Vec<R>>
    where
        F: Fn(&Device, Shard) -> Result<R> + Sync,
        R: Send,
    {
        run_beside(&self.shared, None, f, as_it_is, |_| {}, Begin::named("run_named", Location::caller(), name))
    }

    /// [`run`](Self::run) with the caller's own error type. Peers of the device that failed get the error's text, in
    /// [`Error::Aborted`]. The text is made once, after the abort: only a peer that reads the text waits for it.
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
    /// The error of the first closure that fails; `E::from` of this crate's errors, as for [`run`](Self::run).
    #[track_caller]
    pub fn try_run<F, R, E>(&self, f: F) -> Result<Vec<R>, E>
    where
        F: Fn(&Device, Shard) -> Result<R, E> + Sync,
        R: Send,
        E: From<Error> + fmt::Display + Send,
    {
        run(&self.shared, "try_run", None, f, by_its_text)
    }

    /// Runs `f` on some of the devices only: ordinals in the pool, in the order of their ranks. Gangs that share no
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
    /// [`Error::InvalidArgument`] for an empty list, a repeated ordinal or an ordinal that the pool does not have; else
    /// as [`run`](Self::run).
    #[track_caller]
    pub fn run_on<F, R>(&self, devices: &[usize], f: F) -> Result<Vec<R>>
    where
        F: Fn(&Device, Shard) -> Result<R> + Sync,
        R: Send,
    {
        let members = members(&self.shared, "run_on", devices)?;
        run(&self.shared, "run_on", Some(members), f, as_it_is)
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
        self.run_parts("run_mut", None, rows_mut(out, width), |dev, shard, rows| f(dev, shard, rows))
    }

    /// Runs `f` on every device, each with its own part of `parts`. Parts are rows of slices, items of vectors, rows of
    /// unified memory, and tuples of these. See [`Parts`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the parts cannot be split by devices; else as [`run`](Self::run).
    #[track_caller]
    pub fn run_with<P, F, R>(&self, parts: P, f: F) -> Result<Vec<R>>
    where
        P: Parts,
        F: Fn(&Device, Shard, P::Part) -> Result<R> + Sync,
        R: Send,
    {
        self.run_parts("run_with", None, parts, f)
    }

    /// [`run_with`](Self::run_with) on some of the devices only, as in [`run_on`](Self::run_on): each of these devices
    /// gets one part.
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
        let here = OpSite::here(op);
        let parts = parts.split(&shards)?;
        drop(here);
        let parts: Vec<_> = parts.into_iter().map(|part| Mutex::new(Some(part))).collect();
        if parts.len() != count {
            return Err(Error::invalid(op, format_args!("{} parts for {count} devices", parts.len())));
        }
        let own = |dev: &Device, shard: Shard| {
            let part = parts[dev.rank()].lock().take().expect("a closure runs once per device");
            f(dev, shard, part)
        };
        run(&self.shared, op, members, own, as_it_is)
    }
}
