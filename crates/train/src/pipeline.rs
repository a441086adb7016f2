//! [`Pipeline`]: a model cut into stages on several devices, which work on the micro-batches of a batch in the order
//! of a [`PipelineSchedule`].
//!
//! It runs [`execute`] in a scope for each step. Invariant: the groups of a pipeline have as many members as its
//! schedule has ranks, and the members of a group have made the same one. Both are checked when the stages are made,
//! since the user's closure makes the groups.

mod execute;
#[cfg(feature = "checkpoints")]
mod save;
mod stage;

pub use stage::{Stage, StageContext};

use crate::runtime::{DeviceInternals, ErrorInternals, GroupInternals, GroupKey, OpSite, PerDeviceInternals};
use crate::schedule::PipelineSchedule;
use execute::{Input, Output, Part};
use gpu_pool::{Device, Error, GpuPool, Group, PerDevice, Result, error::Site};
use std::{any::Any, panic::Location};

type Team = Box<dyn for<'d> Fn(&'d Device) -> Result<Group<'d>> + Send + Sync>;

struct Stages<S> {
    group: GroupKey,
    own: Vec<(usize, S)>,
}

/// A model in stages on the devices of a pool, and the order in which they work.
///
/// The model is the user's: a [`Stage`] knows its forward and backward pass. The pipeline calls the stages in the order
/// of a [`PipelineSchedule`], moves activations and gradients between devices, and keeps the values for the backward
/// passes. It is one-sided: a stage passes its result on and goes on, so no order of sends can deadlock.
///
/// The page "Pipelines" of the guide has an example.
///
/// # Errors and panics
///
/// The first error or panic of a stage, or of a closure, ends the step on all devices, and the step returns it; in
/// other processes it is [`Error::AbortedByHost`], which names it. Then the stages hold unspecified values and each
/// call is [`Error::Poisoned`], until [`reset`](Self::reset) makes new ones or [`clear_poison`](Self::clear_poison)
/// accepts them. The pool works on.
///
/// # Memory
///
/// At any time rank `r` keeps the saved values of [`PipelineSchedule::in_flight`] micro-batches. GPipe's number grows
/// with the micro-batches, that of 1F1B does not. See [`limit_in_flight`](Self::limit_in_flight). A
/// [`forward`](Self::forward) has no such bound: a fast first stage may be all micro-batches ahead of the last one.
///
/// # Streams
///
/// Stages run on the main stream of their device. Copies between devices run on a stream of their own.
pub struct Pipeline<S: Stage + 'static> {
    stages: PerDevice<Stages<S>>,
    schedule: PipelineSchedule,
    forward: PipelineSchedule,
    team: Team,
}

impl<S: Stage + 'static> Pipeline<S> {
    /// A pipeline over all devices of the pool. `build` makes stage `stage` on its device; a device may have several.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the schedule is for another number of devices; those of
    /// [`GpuPool::per_device`]; those of `build`.
    #[track_caller]
    pub fn new(
        pool: &GpuPool,
        schedule: PipelineSchedule,
        build: impl Fn(&Device, usize) -> Result<S> + Sync,
    ) -> Result<Self> {
        let _here = OpSite::here("Pipeline::new");
        Self::new_in(pool, |dev| Ok(dev.everyone()), schedule, build)
    }

    /// Several pipelines side by side, each in a group of devices: data parallel times pipeline parallel. `group` makes
    /// a device's group. A group has one member for each rank of the schedule; each device of the pool is in one group.
    ///
    /// With `|dev| dev.world()` one pipeline spans all processes of a cluster (`gpu-pool-cluster`), whose devices are
    /// its ranks in their order. Each process makes the same calls. The values between stages then cross processes,
    /// which a [`Transfer`](gpu_pool::collective::Transfer) of your own must be able to do. The closures of
    /// [`step`](Self::step) run where their stages are: `input` in the process of the first stage, `loss` in that of
    /// the last one.
    ///
    /// Each pipeline works on micro-batches of its own. Afterwards [`each`](Self::each) can sum the gradients over
    /// the pipelines, by collectives of the groups of devices that have the same stages.
    ///
    /// The page "Pipelines" of the guide has an example.
    ///
    /// # Errors
    /// As [`new`](Self::new) and `group`; [`Error::InvalidArgument`] if members of a group made different ones.
    #[track_caller]
    pub fn new_in(
        pool: &GpuPool,
        group: impl for<'d> Fn(&'d Device) -> Result<Group<'d>> + Send + Sync + 'static,
        schedule: PipelineSchedule,
        build: impl Fn(&Device, usize) -> Result<S> + Sync,
    ) -> Result<Self> {
        let _here = OpSite::here("Pipeline::new_in");
        let make = |dev: &Device, _| Stages::of(dev, &group, &schedule, &build);
        let stages = PerDevice::made(pool, make)?;
        Ok(Pipeline { stages, forward: schedule.forward_only(), schedule, team: Box::new(group) })
    }

    /// Warns (by a `tracing` event, immediately) of each rank that will keep more than `limit` micro-batches for its
    /// backward passes, by [`PipelineSchedule::in_flight`].
    #[must_use]
    pub fn limit_in_flight(self, limit: usize) -> Self {
        for rank in 0..self.schedule.ranks() {
            let in_flight = self.schedule.in_flight(rank);
            if in_flight > limit {
                let text = "a rank of the pipeline keeps more micro-batches than the limit";
                gpu_pool::event!(warn, "pipeline_over_limit", rank, in_flight, limit, "{text}");
            }
        }
        self
    }

    /// The schedule.
    pub fn schedule(&self) -> &PipelineSchedule {
        &self.schedule
    }

    /// One training step: all forward and backward passes of one batch. The gradients stay in the stages.
    ///
    /// `input` makes micro-batch `micro` on the device of stage 0. `loss` gets the output of the last stage, on that
    /// stage's device, and returns the gradient of it and a value, such as the loss. The result has the values in the
    /// order of the micro-batches; those of several pipelines one after the other, in the order of the devices of their
    /// first ranks. In a pipeline of several processes, the one with the last stage gets them, and the others get none.
    ///
    /// A value that is NaN (an `f32` or `f64`) is an error after the step: the step has come to its end, the stages are
    /// not poisoned, and hold the gradients. To get NaNs as values, return them in a tuple or a type of your own. Of
    /// several processes only the one with the last stage learns of it: exchange the losses before an update.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a schedule without backward passes, a stage that does not [split its backward
    /// pass](Stage::backward_input) in a schedule that does, a stage that returns no gradient where one is needed, and
    /// a NaN value; [`Error::Poisoned`]; [`Error::Timeout`] if a stage does not come; the stages' and closures' errors.
    #[track_caller]
    pub fn step<R: Send + 'static>(
        &mut self,
        input: impl Fn(&Device, usize) -> Result<S::Activation> + Sync,
        loss: impl Fn(&Device, usize, S::Activation) -> Result<(S::Activation, R)> + Sync,
    ) -> Result<Vec<R>> {
        const OP: &str = "Pipeline::step";
        let site = Location::caller();
        if !self.schedule.is_training() {
            let why = "the schedule has no backward passes; `forward` is for such ones";
            return self.stages.refuse(Error::invalid(OP, why));
        }
        let schedule = &self.schedule;
        let losses = self.run(site, OP, schedule, &input, &|dev, micro, y| {
            loss(dev, micro, y).map(|(dy, value)| (Some(dy), value))
        })?;
        match losses.iter().position(|loss| is_nan(loss)) {
            Some(at) => {
                let micros = schedule.micros();
                let which = if losses.len() > micros { format!(" of pipeline {}", at / micros) } else { String::new() };
                Err(Error::invalid(OP, format_args!("the loss of micro-batch {}{which} is NaN", at % micros)))
            }
            None => Ok(losses),
        }
    }

    /// The forward passes alone: for inference. Nothing is kept for backward passes. `output` gets the output of the
    /// last stage for each micro-batch.
    ///
    /// # Errors
    /// [`Error::Poisoned`]; [`Error::Timeout`] if a stage does not come; the stages' and the closures' own errors.
    #[track_caller]
    pub fn forward<R: Send>(
        &mut self,
        input: impl Fn(&Device, usize) -> Result<S::Activation> + Sync,
        output: impl Fn(&Device, usize, S::Activation) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let site = Location::caller();
        self.run(site, "Pipeline::forward", &self.forward, &input, &|dev, micro, y| {
            output(dev, micro, y).map(|value| (None, value))
        })
    }

    #[track_caller]
    fn run<R: Send>(
        &self,
        site: Site,
        op: &'static str,
        schedule: &PipelineSchedule,
        input: Input<'_, S::Activation>,
        output: Output<'_, S::Activation, R>,
    ) -> Result<Vec<R>> {
        let mut all = self.scope(op, |group, stages| {
            let first = group.place(0);
            let part = Part { call: (op, site), schedule, group, stages };
            Ok((first, execute::run(part, input, output)?))
        })?;
        all.sort_by_key(|(first, _)| *first);
        Ok(all.into_iter().flat_map(|(_, values)| values).collect())
    }

    /// Calls `f` for every stage, on its device: to update its weights, to save or to read them. Collectives are
    /// allowed. Returns the results in the order of the stages; those of several pipelines one after the other.
    ///
    /// # Errors
    /// [`Error::Poisoned`]; those of `f`.
    #[track_caller]
    pub fn each<R: Send>(&mut self, f: impl Fn(&Device, usize, &mut S) -> Result<R> + Sync) -> Result<Vec<R>> {
        let mut all = self.scope("Pipeline::each", |group, stages| {
            let (dev, first) = (group.device(), group.place(0));
            let each = stages.iter_mut().map(|(number, stage)| Ok(((first, *number), f(dev, *number, stage)?)));
            OpSite::outside(|| each.collect::<Result<Vec<_>>>())
        })?;
        let mut all: Vec<_> = all.drain(..).flatten().collect();
        all.sort_by_key(|(place, _)| *place);
        Ok(all.into_iter().map(|(_, result)| result).collect())
    }

    #[track_caller]
    fn scope<R: Send>(
        &self,
        op: &'static str,
        f: impl Fn(&Group<'_>, &mut [(usize, S)]) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        let state = &self.stages;
        let body = |dev: &Device| {
            let stages = &mut *state.borrow_mut(dev)?;
            let group = dev.group_by(&stages.group)?;
            f(&group.expect("a pipeline runs on the devices that it was made on"), &mut stages.own)
        };
        let _here = OpSite::here(op);
        state.run_scope(op, body)
    }

    /// Makes all stages anew, also after a failed step. Errors: as [`new`](Self::new).
    #[track_caller]
    pub fn reset(&mut self, build: impl Fn(&Device, usize) -> Result<S> + Sync) -> Result<()> {
        let _here = OpSite::here("Pipeline::reset");
        let (team, schedule) = (&self.team, &self.schedule);
        self.stages.fill("reset", |dev, _| Stages::of(dev, team, schedule, &build))
    }

    /// Accepts the stages as they are after a failed step. Their gradients are unspecified, and so are their weights if
    /// an update has failed. Errors: as [`GpuPool::run`].
    #[track_caller]
    pub fn clear_poison(&mut self) -> Result<()> {
        let _here = OpSite::here("Pipeline::clear_poison");
        self.stages.clear_poison()
    }
}

debug_as! {
    Pipeline<S> [S: Stage + 'static], |self|
    "Pipeline of {} stages on {} ranks, {} micro-batches",
    self.schedule.stages(), self.schedule.ranks(), self.schedule.micros()
}

impl<S> Stages<S> {
    /// Makes a member's stages. `Err` unless the group has a member for each rank, and is the same in this process.
    #[track_caller]
    fn of(
        dev: &Device,
        team: impl for<'d> Fn(&'d Device) -> Result<Group<'d>>,
        schedule: &PipelineSchedule,
        build: &impl Fn(&Device, usize) -> Result<S>,
    ) -> Result<Self> {
        let group = OpSite::outside(|| team(dev))?;
        let (members, ranks) = (group.count(), schedule.ranks());
        let needs = format!("{} stages on {ranks} devices", schedule.stages());
        invalid_if!(members != ranks, "Pipeline", "the schedule is for {needs}, and there are {members} devices");
        let key = group.key();
        let keys = dev.exchange((dev.index(), key.clone()))?;
        let mut others = keys.iter().filter(|(device, _)| group.here().ordinals().contains(device));
        if let Some((device, other)) = others.find(|(_, other)| *other != key) {
            let own = dev.index();
            let why = format!("the group of device {own} is {key}, and that of device {device} is {other}");
            return Err(Error::invalid("Pipeline", why));
        }
        let stages = schedule.stages_of(group.rank());
        let own = stages.map(|stage| Ok((stage, OpSite::outside(|| build(dev, stage))?)));
        Ok(Stages { group: key, own: own.collect::<Result<_>>()? })
    }
}

fn is_nan(value: &dyn Any) -> bool {
    value.downcast_ref::<f32>().is_some_and(|x| x.is_nan()) || value.downcast_ref::<f64>().is_some_and(|x| x.is_nan())
}
