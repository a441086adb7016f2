//! [`DataParallel`]: one replica of a model on each device, the batch split over them, gradients exchanged beside the
//! backward pass, and one optimizer.
//!
//! Invariant: all replicas of a group have the same bits after each step that succeeded; after one that failed they are
//! poisoned until [`DataParallel::clear_poison`] has compared them.

mod captured;
mod model;
mod parts;
mod replica;
#[cfg(feature = "checkpoints")]
mod save;
mod together;

pub use model::{Gradients, Model};

use crate::runtime::{Call, DeviceInternals, ErrorInternals, ExchangeInternals, OpSite, PerDeviceInternals};
use crate::{Optimizer, Parameter};
use gpu_pool::{Device, Error, GpuPool, Group, PerDevice, Result, Shard, error::Site};
use replica::{Outcome, Replica};
use std::panic::Location;

const HELD: &str = "`accumulate` has left gradients, which only a `step` counts";

/// A model on every device of a pool, or on some of them: PyTorch's `DistributedDataParallel`.
///
/// A step splits the batch over the devices. Each runs the forward and backward pass of its rows; the gradients are
/// added up over all devices, in buckets, while the backward pass goes on; and every device takes the same step of the
/// [`Optimizer`]. The replicas begin with the same bits (the first device's) and keep them.
///
/// The page "Data parallel" of the guide has an example.
///
/// **Rows.** [`Gradients::scale`] is one over the rows of the whole batch. A closure that multiplies each row's loss by
/// it gives the mean over the batch, however the rows are split. A device without rows does not run the closure. Of
/// several processes each has rows of its own, also 0 of them.
///
/// **Types.** Parameters of `f32`, or of `f16` or `bf16` by `impl Model<bf16> for ..`; one type for each model. Half
/// types have a copy in `f32`, which the optimizer updates. Gradients have the type of the parameters, are
/// summed in `f32`, and rounded once; those that are [accumulated](Self::accumulate), too.
///
/// **Order.** List the parameters in the order in which the forward pass uses them: buckets are exchanged from the last
/// to the first.
///
/// **NaN.** See [`step`](Self::step).
///
/// **Failures.** If a closure fails, the error comes from `step`, no parameter of any replica has changed, and the
/// model returns [`Error::Poisoned`] until [`clear_poison`](Self::clear_poison). If the update itself fails,
/// `clear_poison` says so, and [`load`](Self::load) of the last checkpoint is the way on.
///
/// It may be used from one thread at a time, as `&mut self` says, and be sent to others.
pub struct DataParallel<M: Model<T>, T: Parameter = f32> {
    replicas: PerDevice<Option<Replica<M, T>>>,
    devices: Option<Vec<usize>>,
    optimizer: Optimizer,
    steps: u64,
    unused: Vec<usize>,
    captured: bool,
    /// Whether gradients of earlier passes wait for a step.
    held: bool,
    #[cfg(feature = "checkpoints")]
    groups: save::Groups,
}

impl<M: Model<T>, T: Parameter> DataParallel<M, T> {
    /// A replica on every device: `build` makes one, and all get the parameters of the first device's.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an optimizer with wrong settings, and for a model without parameters;
    /// [`Error::Mismatch`] if the parameters differ in number or size; those of `build`; [`Error::OutOfMemory`].
    #[track_caller]
    pub fn new(pool: &GpuPool, optimizer: Optimizer, build: impl Fn(&Device) -> Result<M> + Sync) -> Result<Self> {
        let _here = OpSite::here("DataParallel::new");
        Self::make(pool, None, |dev| Ok(dev.everyone()), optimizer, build)
    }

    /// [`new`](Self::new) on the devices with these ordinals in the pool only. The others have no part in it. Errors:
    /// those of `new`; [`Error::InvalidArgument`] for devices that are not in the pool or named twice.
    #[track_caller]
    pub fn new_on(
        pool: &GpuPool,
        devices: &[usize],
        optimizer: Optimizer,
        build: impl Fn(&Device) -> Result<M> + Sync,
    ) -> Result<Self> {
        let _here = OpSite::here("DataParallel::new_on");
        let inside = |device: &usize| *device < pool.device_count();
        invalid_if!(devices.is_empty(), "DataParallel::new_on", "no devices");
        invalid_if!(!devices.iter().all(inside), "DataParallel::new_on", "{devices:?} are not all in the pool");
        Self::make(pool, Some(devices), |dev| dev.group(devices), optimizer, build)
    }

    /// [`new`](Self::new) in groups: `group` gives each device its own one, in which the batch is split, parameters are
    /// equal, and gradients are added up. Groups do not overlap. So data parallel is one axis of a grid: here two
    /// models, each on two devices.
    ///
    /// # Errors
    /// Those of `new` and of `group`, which every device of the pool calls; for some devices see
    /// [`new_on`](Self::new_on).
    #[track_caller]
    pub fn new_in(
        pool: &GpuPool,
        group: impl for<'d> Fn(&'d Device) -> Result<Group<'d>> + Sync,
        optimizer: Optimizer,
        build: impl Fn(&Device) -> Result<M> + Sync,
    ) -> Result<Self> {
        let _here = OpSite::here("DataParallel::new_in");
        Self::make(pool, None, |dev| OpSite::outside(|| group(dev)), optimizer, build)
    }

    fn make(
        pool: &GpuPool,
        devices: Option<&[usize]>,
        group: impl for<'d> Fn(&'d Device) -> Result<Group<'d>> + Sync,
        optimizer: Optimizer,
        build: impl Fn(&Device) -> Result<M> + Sync,
    ) -> Result<Self> {
        let replicas = PerDevice::made(pool, |dev, _| {
            // Not before: other processes hear of what fails in a scope.
            optimizer.check()?;
            if devices.is_some_and(|devices| !devices.contains(&dev.index())) {
                return Ok(None);
            }
            let group = group(dev)?;
            let model = OpSite::outside(|| build(dev))?;
            Replica::new(&group, &optimizer, model).map(Some)
        })?;
        let devices = devices.map(Vec::from);
        #[cfg_attr(not(feature = "checkpoints"), expect(unused_mut, reason = "only checkpoints look at it again"))]
        let mut model = DataParallel {
            replicas,
            devices,
            optimizer,
            steps: 0,
            unused: Vec::new(),
            captured: false,
            held: false,
            #[cfg(feature = "checkpoints")]
            groups: Default::default(),
        };
        #[cfg(feature = "checkpoints")]
        {
            model.groups = save::Groups::new(model.on_each(|dev, _, replica| replica.places(dev))?);
        }
        Ok(model)
    }

    /// One step on a batch of `rows` rows: `f` does the forward and backward pass of its shard, which is never empty,
    /// and gives its gradients to [`Gradients`]; then all replicas are updated. Returns the results of the devices that
    /// had rows, in their order. A gradient that no device has given counts as zero; [`unused`](Self::unused) names it.
    ///
    /// A step is a scope, which ends when its devices are idle; [`launch_steps`](Self::launch_steps) has many in one.
    ///
    /// # Errors
    /// * [`Error::NotFinite`]: the gradients of the step *before* this one had a NaN or an infinity (so had its loss,
    ///   as a rule). Neither that step nor this one has changed a parameter or a moment, and the model can be used:
    ///   with other data, or a smaller rate. The next call reports it: `step`, [`launch_steps`](Self::launch_steps),
    ///   [`verify`](Self::verify) or [`save`](Self::save). (Of a model in several groups, those whose gradients were
    ///   finite have made the step before, and it counts in all of them. In a cluster each group is by itself.)
    /// * [`Error::InvalidArgument`]: 0 rows, in all processes together; a schedule that has raised the rate beyond
    ///   `f32`; a closure that gave no gradient at all; parameters that have other sizes than at the start.
    /// * [`Error::Poisoned`] after a failed step: see [`clear_poison`](Self::clear_poison).
    /// * Those of `f`, and of [`GpuPool::run`].
    #[track_caller]
    pub fn step<R: Send>(
        &mut self,
        rows: usize,
        f: impl Fn(&Device, Shard, &mut M, &mut Gradients<'_, T>) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        const OP: &str = "DataParallel::step";
        let (site, _here) = (Location::caller(), OpSite::here(OP));
        let optimizer = self.optimizer;
        if let Err(error) = optimizer.check_step(self.steps) {
            return self.replicas.refuse(error);
        }
        let update = |dev: &Device, replica: &mut Replica<M, T>| replica.update(dev, &optimizer);
        let all = self.passes(&Call::at(OP, site), (rows, true), &f, update)?;
        let (results, outcomes): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        self.held = false;
        self.conclude(OP, site, &outcomes)?;
        Ok(results.into_iter().flatten().collect())
    }

    /// Gradients of one more piece of the batch, without an exchange or an update: the next [`step`](Self::step) counts
    /// them, too, with the weight of their rows. (DDP's `no_sync`.) Up to rounding it makes the same step for all
    /// pieces and all their orders: a sum on the way never exceeds the largest mean of a piece.
    ///
    /// Gradients of half types are added up in `f32`: 4 bytes for each element, from the first call on.
    ///
    /// Errors: as of [`step`](Self::step).
    #[track_caller]
    pub fn accumulate<R: Send>(
        &mut self,
        rows: usize,
        f: impl Fn(&Device, Shard, &mut M, &mut Gradients<'_, T>) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        const OP: &str = "DataParallel::accumulate";
        let (site, _here) = (Location::caller(), OpSite::here(OP));
        let hold = |dev: &Device, replica: &mut Replica<M, T>| replica.exchange.finish(dev).map(drop);
        let all = self.passes(&Call::at(OP, site), (rows, false), &f, hold)?;
        self.held = true;
        Ok(all.into_iter().filter_map(|(result, ())| result).collect())
    }

    /// Captures a step on `rows` rows as a [graph](Device::capture) of each device, for [`launch_steps`]: the passes of
    /// `f`, the sums of the gradients, and the update. Nothing runs yet, and no parameter changes. A launch is one call
    /// of the driver where kernels meet on the GPUs: the fastest way for fixed shapes. A later capture replaces it.
    ///
    /// `f` is as for [`step`](Self::step), with the rules of captures: it reads rows from buffers that the model keeps,
    /// and leaves results there. Host numbers stay as they are now: factors, seeds of [`dropout`](crate::prelude). Make
    /// one `step` with it before: the first matrix product loads cuBLAS, which a graph cannot hold.
    ///
    /// A captured step has the bits of a called one. In a graph sums come after the whole backward pass, not beside it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 rows, after [`accumulate`](Self::accumulate), and for a model in several groups
    /// or processes; these leave the model as it was. Those of `f`, and of [`GpuPool::run`]; [`Error::InvalidArgument`]
    /// for a closure that gave no gradient, and for calls that a capture refuses: then the model is
    /// [`Error::Poisoned`], as after a `step`.
    ///
    /// [`launch_steps`]: Self::launch_steps
    #[track_caller]
    pub fn capture_step(
        &mut self,
        rows: usize,
        f: impl Fn(&Device, Shard, &mut M, &mut Gradients<'_, T>) -> Result<()> + Sync,
    ) -> Result<()> {
        const OP: &str = "DataParallel::capture_step";
        let (site, _here) = (Location::caller(), OpSite::here(OP));
        let why = if rows == 0 { "a batch of 0 rows" } else { HELD };
        if rows == 0 || self.held {
            return self.replicas.refuse(Error::invalid(OP, why));
        }
        self.captured = false;
        let outcomes = self.on_each(|dev, shard, replica| replica.capture(dev, shard, rows, &f))?;
        let outcomes = outcomes.into_iter().collect::<Result<Vec<_>>>()?;
        self.captured = true;
        self.conclude(OP, site, &outcomes)
    }

    /// Makes `count` steps, each by a launch of the step that was [captured](Self::capture_step), in one scope. Before
    /// each, `fill` gets the number of the step, from 0, and writes its rows *into* the model's buffers: the graph
    /// never sees a buffer that takes their place. On a device without rows it is not called. It may be mixed with
    /// other calls, also with [`step`](Self::step).
    ///
    /// The call ends when the devices have made all steps, as every scope does: so many steps in a call are faster than
    /// a call for each. Within it, host threads are at most two steps ahead.
    ///
    /// # Errors
    /// * [`Error::NotFinite`]: the gradients of a step of this call, or of the step before, had a NaN or an infinity.
    ///   Neither that step nor a later one has changed a parameter or a moment: [`steps`](Self::steps) tells how many
    ///   count. But `fill` and the passes may have run for the next step, too, and have written to other buffers.
    /// * Nothing was done, and the model is as it was: [`Error::InvalidArgument`] without a captured step, after
    ///   [`accumulate`](Self::accumulate), when a parameter is at another place than at the capture, and for a schedule
    ///   that will raise the rate beyond `f32`; [`Error::GraphInvalidated`] on more than one device, after any scope
    ///   has failed on one of them. Capture the step again.
    /// * Those of `fill`, and of [`GpuPool::run`]; [`Error::InvalidArgument`] when `fill` has put a parameter
    ///   elsewhere. Then the model is [`Error::Poisoned`], and [`clear_poison`](Self::clear_poison) helps if no step
    ///   was launched: if the first `fill` has failed.
    #[track_caller]
    pub fn launch_steps(
        &mut self,
        count: usize,
        fill: impl Fn(&Device, Shard, &mut M, usize) -> Result<()> + Sync,
    ) -> Result<()> {
        const OP: &str = "DataParallel::launch_steps";
        let (site, _here) = (Location::caller(), OpSite::here(OP));
        let optimizer = self.optimizer;
        invalid_if!(!self.captured, OP, "{}", captured::NONE);
        invalid_if!(self.held, OP, "{HELD}");
        optimizer.check_steps(self.steps..self.steps.saturating_add(count as u64))?;
        let f = |dev: &Device, shard: Shard, replica: &mut Replica<M, T>| {
            replica.launch_steps(dev, shard, (count, &optimizer), &fill)
        };
        let outcomes = self.on_each(f)?.into_iter().collect::<Result<Vec<_>>>()?;
        self.conclude(OP, site, &outcomes)
    }

    /// `sync`: it is the last pass before the exchange.
    fn passes<R: Send, E: Send>(
        &mut self,
        call: &Call,
        (rows, sync): (usize, bool),
        f: &(impl Fn(&Device, Shard, &mut M, &mut Gradients<'_, T>) -> Result<R> + Sync),
        end: impl Fn(&Device, &mut Replica<M, T>) -> Result<E> + Sync,
    ) -> Result<Vec<(Option<R>, E)>> {
        let all = self.on_each(|dev, shard, replica| {
            if !replica.begin(dev, call, rows, sync)? {
                return Ok(None);
            }
            let result = replica.pass(dev, shard, rows, f)?;
            Ok(Some((result, end(dev, replica)?)))
        })?;
        // Not in the scope: no device has failed, so the model stays as it was.
        let none = || Error::invalid_at(call.site, call.op, "a batch of 0 rows");
        all.into_iter().collect::<Option<_>>().ok_or_else(none)
    }

    /// A forward pass: `f` has the rows of its shard, which is never empty, and returns their results; all results come
    /// in the order of the rows. (PyTorch's `DataParallel`: scatter, apply, gather.) With 0 rows it returns none. Of
    /// several groups ([`new_in`](Self::new_in)), which each have all rows, one comes after the other.
    /// Errors: those of `f`, and of [`GpuPool::run`].
    #[track_caller]
    pub fn forward<R: Send>(
        &mut self,
        rows: usize,
        f: impl Fn(&Device, Shard, &mut M) -> Result<Vec<R>> + Sync,
    ) -> Result<Vec<R>> {
        let _here = OpSite::here("DataParallel::forward");
        let mut parts = self.on_each(|dev, shard, replica| {
            let place = (replica.exchange.group(dev, "forward")?.place(0), shard.index());
            match shard.range(rows).is_empty() {
                true => Ok((place, Vec::new())),
                false => Ok((place, OpSite::outside(|| f(dev, shard, &mut replica.model))?)),
            }
        })?;
        parts.sort_by_key(|(place, _)| *place);
        Ok(parts.into_iter().flat_map(|(_, results)| results).collect())
    }

    /// Runs `f` on every replica, in the order of the devices. An `f` that writes parameters writes the same bits on
    /// all devices; [`verify`](Self::verify) checks that. Errors: those of `f`, and of [`GpuPool::run`].
    #[track_caller]
    pub fn each<R: Send>(&mut self, f: impl Fn(&Device, &mut M) -> Result<R> + Sync) -> Result<Vec<R>> {
        let _here = OpSite::here("DataParallel::each");
        self.on_each(|dev, _, replica| OpSite::outside(|| f(dev, &mut replica.model)))
    }

    /// Checks that all replicas have the same bits, and that the gradients of the last step were finite. It downloads
    /// all parameters and waits.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with the first parameter that differs; [`Error::NotFinite`]; those of [`GpuPool::run`].
    #[track_caller]
    pub fn verify(&mut self) -> Result<()> {
        let (site, _here) = (Location::caller(), OpSite::here("DataParallel::verify"));
        let outcomes = self.on_each(|dev, _, replica| {
            let outcome = replica.settle(dev, 0)?;
            replica.compare(dev)?;
            Ok(outcome)
        })?;
        self.conclude("DataParallel::verify", site, &outcomes)
    }

    /// Makes the model usable again after a failed step, if that step has changed nothing, which is so if the closure
    /// of a `step` has failed (in a cluster, of a model in several groups: before the devices of another group have
    /// made their step): compares all replicas, and forgets the gradients of the step and those that
    /// [`accumulate`](Self::accumulate) has left.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if an update was under way when the step failed: then [`load`](Self::load) a
    /// checkpoint, or make a new model. [`Error::Mismatch`] if replicas differ. The model stays poisoned then. Those of
    /// [`GpuPool::run`].
    #[track_caller]
    pub fn clear_poison(&mut self) -> Result<()> {
        let (site, _here) = (Location::caller(), OpSite::here("DataParallel::clear_poison"));
        let recover =
            |dev: &Device, _, replica: &mut Option<Replica<M, T>>| Ok((replica_of(replica).recover(dev)?, true));
        let outcomes = self.replicas.accepting(self.devices.as_deref(), recover)?;
        self.held = false;
        self.conclude("DataParallel::clear_poison", site, &outcomes)
    }

    /// Steps that have changed the parameters, since the model was made, also before a checkpoint that was loaded.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The optimizer.
    pub fn optimizer(&self) -> Optimizer {
        self.optimizer
    }

    /// Changes the learning rate from the next step on, before schedule and warm-up.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rate that is negative or not finite.
    #[track_caller]
    pub fn set_rate(&mut self, rate: f64) -> Result<()> {
        let _here = OpSite::here("DataParallel::set_rate");
        self.optimizer.set_rate(rate)
    }

    /// Parameters whose gradients no device has given in the last step. (Of a model in several groups: in the first.)
    pub fn unused(&self) -> &[usize] {
        &self.unused
    }

    /// The norm of the gradients of the last step, before clipping, of each device's group: of their mean over all
    /// rows, those of [`accumulate`](Self::accumulate) among them. **Waits** for that step. None before the first one.
    /// Errors: those of [`GpuPool::run`].
    #[track_caller]
    pub fn gradient_norms(&mut self) -> Result<Option<Vec<f32>>> {
        let _here = OpSite::here("DataParallel::gradient_norms");
        let norms = self.on_each(|_, _, replica| replica.last_norm())?;
        Ok(norms.into_iter().collect())
    }

    fn on_each<R: Send>(
        &mut self,
        f: impl Fn(&Device, Shard, &mut Replica<M, T>) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let f = |dev: &Device, shard: Shard, replica: &mut Option<Replica<M, T>>| {
            let replica = replica_of(replica);
            let shard = replica.shard(dev, shard)?;
            f(dev, shard, replica)
        };
        self.replicas.each(self.devices.as_deref(), f)
    }

    /// Takes over what a scope that has succeeded has found.
    fn conclude(&mut self, op: &'static str, site: Site, outcomes: &[Outcome]) -> Result<()> {
        let Some(first) = outcomes.first() else { return Ok(()) };
        self.steps = first.steps;
        if let Some(unused) = &first.unused {
            self.unused.clone_from(unused);
        }
        let not_finite = outcomes.iter().find_map(|outcome| outcome.not_finite);
        not_finite.map_or(Ok(()), |(step, norm)| Err(Error::NotFinite { op, step, norm, site }))
    }
}

fn replica_of<M: Model<T>, T: Parameter>(replica: &mut Option<Replica<M, T>>) -> &mut Replica<M, T> {
    replica.as_mut().expect("the devices of the model have replicas")
}

debug_as! {
    DataParallel<M, T> [M: Model<T>, T: Parameter], |self|
    model = std::any::type_name::<M>(), optimizer = self.optimizer, steps = self.steps, ..
}
