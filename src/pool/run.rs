//! Running closures on a pool's devices. A [`Run`] is the description of one scope (`scope.rs`); the short forms of
//! [`GpuPool`] are runs without options. A [`DeviceRun`] is a run on one device.

use crate::error::{Error, Result, op_site::OpSite};
use crate::scope::{Begin, as_it_is, by_its_text, members, run, shard};
use crate::{
    Device, GpuPool, Parts, Shard, gang::CancelToken, parts::rows_mut, sync::Returned, thread::worker::Shared,
};
use parking_lot::Mutex;
use std::{fmt, panic::Location, sync::Arc};

/// One run of a closure, with its options: on which devices, with which data, under which name.
///
/// [`GpuPool::on`], [`GpuPool::with`], [`GpuPool::named`] and [`PerDevice::on`](crate::PerDevice::on) begin it. The
/// options come in any order; `run` or `try_run` runs the closure.
///
/// ```
/// # use gpu_pool::{GpuPool, rows_mut};
/// let pool = GpuPool::builder().host(4).build()?;
/// let mut y = [1.0f32; 6];
/// pool.on(&[3, 1]).with(rows_mut(&mut y, 1)).named("scale").run(|dev, _, rows| {
///     let mut d = dev.upload(rows)?;
///     dev.scale(&mut d, dev.index() as f32)?;
///     dev.download_into(&d, rows)
/// })?;
/// assert_eq!(y, [3.0, 3.0, 3.0, 1.0, 1.0, 1.0]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[must_use = "`run` runs the closure"]
pub struct Run<'p, P = ()> {
    shared: &'p Arc<Shared>,
    devices: Option<&'p [usize]>,
    name: Option<&'p str>,
    until: Option<&'p CancelToken>,
    pub(super) parts: P,
}

impl<'p, P> Run<'p, P> {
    pub(crate) fn new(shared: &'p Arc<Shared>, parts: P) -> Self {
        Run { shared, devices: None, name: None, until: None, parts }
    }

    pub(super) fn parted<Q>(self, parts: Q) -> (Run<'p, Q>, P) {
        let Run { shared, devices, name, until, parts: old } = self;
        (Run { shared, devices, name, until, parts }, old)
    }

    /// Runs the scope. `tell` is that of [`run`].
    #[track_caller]
    pub(crate) fn scope<R: Send, E: From<Error> + Send>(
        self,
        op: &'static str,
        f: impl Fn(&Device, Shard) -> Result<R, E> + Sync,
        tell: impl Fn(&E, &dyn Fn(Error) -> bool) -> bool + Sync,
    ) -> Result<Vec<R>, E> {
        // No closure, in which the place would be this one.
        let devices = match self.devices {
            Some(devices) => Some(members(self.shared, op, devices)?),
            None => None,
        };
        let begin = Begin::at(op, Location::caller()).named(self.name).until(self.until);
        run(self.shared, devices, f, tell, |_| {}, begin)
    }
}

setters! { Run<'p, P> ['p, P];
    /// As [`GpuPool::on`].
    pub fn on(self, devices: &'p [usize]) { self.devices = Some(devices); }

    /// As [`GpuPool::named`].
    pub fn named(self, name: &'p str) { self.name = Some(name); }

    /// Ends the run when the token is cancelled: as [`GpuPool::run_until`].
    pub fn until(self, token: &'p CancelToken) { self.until = Some(token); }
}

impl<'p> Run<'p> {
    /// As [`GpuPool::with`].
    pub fn with<P: Parts>(self, parts: P) -> Run<'p, P> {
        self.parted(parts).0
    }

    /// Runs `f` on the devices, each with its shard. As [`GpuPool::run`].
    ///
    /// # Errors
    /// As [`GpuPool::run`]; [`Error::InvalidArgument`] for an empty list of devices, a repeated ordinal or an ordinal
    /// that the pool does not have. With a name, in a cluster, also [`Error::HostTimeout`] if a process does not call
    /// it, [`Error::AbortedByHost`] and [`Error::HostLost`].
    #[track_caller]
    pub fn run<R: Returned>(self, f: impl Fn(&Device, Shard) -> Result<R> + Sync) -> Result<Vec<R>> {
        self.scope("run", f, as_it_is)
    }

    /// [`run`](Self::run) with the caller's own error type. As [`GpuPool::try_run`].
    ///
    /// # Errors
    /// The error of the first closure that fails; `E::from` of this crate's errors.
    #[track_caller]
    pub fn try_run<R: Returned, E: From<Error> + fmt::Display + Send>(
        self,
        f: impl Fn(&Device, Shard) -> Result<R, E> + Sync,
    ) -> Result<Vec<R>, E> {
        self.scope("try_run", f, by_its_text)
    }
}

impl<P: Parts> Run<'_, P> {
    /// Runs `f` on the devices, each with its shard and its own part of the data.
    ///
    /// # Errors
    /// As without data; also [`Error::InvalidArgument`] when the data cannot be split by devices.
    #[track_caller]
    pub fn run<R: Returned>(self, f: impl Fn(&Device, Shard, P::Part) -> Result<R> + Sync) -> Result<Vec<R>> {
        self.split("run", f, as_it_is)
    }

    /// [`run`](Self::run) with the caller's own error type.
    ///
    /// # Errors
    /// The error of the first closure that fails; `E::from` of this crate's errors.
    #[track_caller]
    pub fn try_run<R: Returned, E: From<Error> + fmt::Display + Send>(
        self,
        f: impl Fn(&Device, Shard, P::Part) -> Result<R, E> + Sync,
    ) -> Result<Vec<R>, E> {
        self.split("try_run", f, by_its_text)
    }

    #[track_caller]
    fn split<R: Send, E: From<Error> + Send>(
        self,
        op: &'static str,
        f: impl Fn(&Device, Shard, P::Part) -> Result<R, E> + Sync,
        tell: impl Fn(&E, &dyn Fn(Error) -> bool) -> bool + Sync,
    ) -> Result<Vec<R>, E> {
        let (run, parts) = self.parted(());
        let (shared, devices) = (run.shared, run.devices);
        let devices = devices.map(|devices| members(shared, op, devices)).transpose()?;
        let count = devices.map_or(shared.device_count(), <[usize]>::len);
        let shards: Vec<Shard> = (0..count).map(|rank| shard(shared, rank, devices)).collect();
        let here = OpSite::here(op);
        let parts = parts.split(&shards)?;
        drop(here);
        let parts: Vec<_> = parts.into_iter().map(|part| Mutex::new(Some(part))).collect();
        if parts.len() != count {
            return Err(Error::invalid(op, format_args!("{} parts for {count} devices", parts.len())).into());
        }
        let own = |dev: &Device, shard: Shard| {
            let part = parts[dev.rank()].lock().take().expect("a closure runs once per device");
            f(dev, shard, part)
        };
        run.scope(op, own, tell)
    }
}

/// A run of a closure on one device: [`GpuPool::on_device`] begins it.
///
/// ```
/// let pool = gpu_pool::GpuPool::builder().host(2).build()?;
/// let batch = vec![1.0f32, 2.0, 3.0];
/// let (x, len) = pool.on_device(1).run(move |dev| Ok((dev.upload(&batch)?, batch.len())))?;
/// let sum = pool.on_device(1).run(move |dev| dev.download(&dev.sum(&x)?))?; // `x` is moved in
/// assert_eq!((&sum[..], len), (&[6.0][..], 3));
/// # Ok::<(), gpu_pool::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use = "`run` runs the closure"]
pub struct DeviceRun<'p> {
    pool: &'p GpuPool,
    device: usize,
}

impl DeviceRun<'_> {
    /// Runs `f` on the device, and returns its result. The closure is called once, so values may be moved in.
    ///
    /// # Errors
    /// As [`GpuPool::run`]; [`Error::InvalidArgument`] for an ordinal that the pool does not have.
    #[track_caller]
    pub fn run<R: Returned>(self, f: impl FnOnce(&Device) -> Result<R> + Send) -> Result<R> {
        self.once("run", f, as_it_is)
    }

    /// [`run`](Self::run) with the caller's own error type. As [`GpuPool::try_run`].
    ///
    /// # Errors
    /// The error of the closure; `E::from` of this crate's errors.
    #[track_caller]
    pub fn try_run<R: Returned, E: From<Error> + fmt::Display + Send>(
        self,
        f: impl FnOnce(&Device) -> Result<R, E> + Send,
    ) -> Result<R, E> {
        self.once("try_run", f, by_its_text)
    }

    #[track_caller]
    fn once<R: Send, E: From<Error> + Send>(
        self,
        op: &'static str,
        f: impl FnOnce(&Device) -> Result<R, E> + Send,
        tell: impl Fn(&E, &dyn Fn(Error) -> bool) -> bool + Sync,
    ) -> Result<R, E> {
        let f = Mutex::new(Some(f));
        let call = |dev: &Device, _| f.lock().take().expect("a closure runs once per device")(dev);
        let mut results = self.pool.on(&[self.device]).scope(op, call, tell)?;
        Ok(results.pop().expect("a scope of one device has one result"))
    }
}

debug_as!(Run<'_, P> [P], |self| devices = self.devices, name = self.name, ..);

impl GpuPool {
    /// Runs `f` on every device of this pool, with its shard, and returns the results in device order.
    ///
    /// When it returns, all work that the closures have submitted is complete.
    ///
    /// # Errors
    /// The first failure: the error of a closure, [`Error::Panicked`], [`Error::DeviceLost`] and others. Also
    /// [`Error::NestedScope`] on a device thread, [`Error::Closed`], [`Error::Forked`], and [`Error::Timeout`] if the
    /// devices were busy with other scopes that made no progress until the deadline.
    #[track_caller]
    pub fn run<R: Returned>(&self, f: impl Fn(&Device, Shard) -> Result<R> + Sync) -> Result<Vec<R>> {
        Run::new(&self.shared, ()).run(f)
    }

    /// [`run`](Self::run) until another thread cancels it. [`Run::until`] does the same with options.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`Error::Cancelled`] after [`CancelToken::cancel`], also before the call.
    #[track_caller]
    pub fn run_until<R: Returned>(
        &self,
        token: &CancelToken,
        f: impl Fn(&Device, Shard) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        Run::new(&self.shared, ()).until(token).scope("run_until", f, as_it_is)
    }

    /// [`run`](Self::run) with the caller's own error type. Peers of the device that failed get the error's text, in
    /// [`Error::Aborted`]. The text is made once, after the abort: only a peer that reads the text waits for it. The
    /// page "Pools" of the guide has an example.
    ///
    /// # Errors
    /// The error of the first closure that fails; `E::from` of this crate's errors, as for [`run`](Self::run).
    #[track_caller]
    pub fn try_run<R: Returned, E: From<Error> + fmt::Display + Send>(
        &self,
        f: impl Fn(&Device, Shard) -> Result<R, E> + Sync,
    ) -> Result<Vec<R>, E> {
        Run::new(&self.shared, ()).try_run(f)
    }

    /// A run on some of the devices only: ordinals in the pool, in the order of their ranks. Runs that share no device
    /// run at the same time. [`Run`] has the other options, and an example.
    pub fn on<'p>(&'p self, devices: &'p [usize]) -> Run<'p> {
        Run::new(&self.shared, ()).on(devices)
    }

    /// A run on one device, whose closure is called once and gives one result. See [`DeviceRun`].
    pub fn on_device(&self, device: usize) -> DeviceRun<'_> {
        DeviceRun { pool: self, device }
    }

    /// A run in which each device gets its own part of `parts`. Parts are rows of slices, items of vectors, rows of
    /// unified memory, and tuples of these. See [`Parts`].
    pub fn with<P: Parts>(&self, parts: P) -> Run<'_, P> {
        Run::new(&self.shared, parts)
    }

    /// A run with a name, for pools in a cluster of which several threads run scopes in parallel: the n-th scope of a
    /// name in this process belongs to the n-th of that name in all processes, and all begin them in one order. So
    /// their collectives find each other whichever thread comes first. It begins when all processes have called it.
    ///
    /// Scopes without a name find each other by the order of their first
    /// [`Device::world`](crate::Device::world). Without a cluster the name changes nothing.
    pub fn named<'p>(&'p self, name: &'p str) -> Run<'p> {
        Run::new(&self.shared, ()).named(name)
    }

    /// Runs `f` on every device, each with its own rows (of `width` items) of `out`. The page "Shards and parts" of the
    /// guide has an example.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `width` is 0 or does not divide the length; else as [`run`](Self::run).
    #[track_caller]
    pub fn run_mut<T: Send, R: Returned>(
        &self,
        out: &mut [T],
        width: usize,
        f: impl Fn(&Device, Shard, &mut [T]) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        Run::new(&self.shared, rows_mut(out, width)).split("run_mut", f, as_it_is)
    }
}
