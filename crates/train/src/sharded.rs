//! [`ShardedOptimizer`]: the step of an optimizer whose state is divided among devices, on gradients in one buffer.
//!
//! [`step`] does the work, where kernels meet by [one kernel](kernels); here are the numbers of each step.

pub(crate) mod kernels;
mod step;

use crate::Parameter;
use crate::optim::{KINDS, Optimizer};
use crate::runtime::{DeviceInternals, ErrorInternals, OpSite};
use gpu_pool::{AsViewMut, Device, DeviceView, DeviceViewMut, Error, Group, ReduceOp, Result};
use smallvec::SmallVec;
use std::{
    hash::{DefaultHasher, Hasher},
    ops::Range,
};
use step::{ShardedStep, Terms};

/// One device's part of an optimizer whose state is divided among the devices of a group (ZeRO-1: Rajbhandari et al.,
/// 2020). A [`step`](Self::step) takes each device's own gradients. It adds them up, clips them by their global norm if
/// the [`Optimizer`] says so, updates the parameters, and gives all devices the new ones. Keep it in a
/// [`PerDevice`](gpu_pool::PerDevice), or make it in the scope that trains.
///
/// The page "Data parallel" of the guide has an example.
///
/// **Memory.** Each of `N` devices keeps the moments, and the copies in `f32` of half types, of one `N`-th of the
/// parameters. Gradients of all parameters are in one buffer of [`len`](Self::len) elements, in order, each at its
/// [`place`](Self::place). Between them are a few elements that must be zero: they count in the norm. A step leaves
/// unspecified numbers in the buffer, but zeros there. Parameters are one buffer each. Everything begins at a multiple
/// of 16 bytes, as whole buffers do.
///
/// **Speed.** Where the kernels of GPUs can wait for each other, a step is one kernel of each device. With one
/// parameter it writes to the others' parameters; with several, a second one copies the others' parameters to their
/// places, so one large buffer for all parameters is best. Elsewhere (software GPUs, no peer access, under a checker,
/// an [`Algorithm`](gpu_pool::collective::Algorithm) other than `Auto`, more than 64 parameters in a device's part) a
/// step is three collectives, and kernels between them. `{:?}` says which it is.
///
/// **Several processes.** With one GPU each, on one host, up to 256 MiB of gradients go by one kernel, too, unless a
/// process asks for NCCL alone. It works in memory that the processes lend each other, so the gradients are copied
/// there before, and the parameters from there behind: each device has a further buffer of [`len`](Self::len) elements.
/// It is the driver's own memory: it counts neither in [`MemoryStats`](gpu_pool::memory::MemoryStats) nor against
/// [`Builder::memory_limit`](gpu_pool::Builder::memory_limit). Where a process has not so much, and for more gradients,
/// several devices of a process and several hosts, a step is the three collectives.
///
/// **Bits.** They are the same both ways, and on all devices: those of a reduce-scatter in the order of ranks, the norm
/// in a fixed order, the update, and an all-gather. The norm's order does not depend on the number of devices.
/// Parameters are moved as they are, also NaNs. Between processes one kernel has these bits, and the three collectives
/// have their own: NCCL adds up more than two in an order of its own, and divides `f16` before it adds.
///
/// **Graphs.** A step can be [captured](Device::capture). Its numbers (rate, corrections of Adam) are then in the
/// device's memory: call [`prepare`](Self::prepare) before each launch.
///
/// **Failures.** A step that fails may leave some devices' parts updated and others not, and so may a scope that fails
/// after a step, since steps do not wait. From then on `step` and [`prepare`](Self::prepare) are refused until
/// [`set_state`](Self::set_state). A device that had already left the scope is not refused itself: its step fails
/// because the others refuse.
pub struct ShardedOptimizer<T: Parameter = f32> {
    optimizer: Optimizer,
    own: ShardedStep<T>,
    steps: u64,
    failed: bool,
    /// The place of the gang of the last step; 0: it has no step that may be under way.
    gang: u64,
}

/// The state of a [`ShardedOptimizer`], of all devices: for checkpoints. It does not depend on the number of devices.
/// The numbers are in the order of the gradients: those of a parameter are at its [`place`](ShardedOptimizer::place).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardedState {
    /// Steps that were done.
    pub steps: u64,
    /// The first moments; empty without.
    pub first: Vec<f32>,
    /// The second moments; empty without.
    pub second: Vec<f32>,
    /// The parameters in `f32`, if their type is narrower; else empty.
    pub master: Vec<f32>,
}

impl<T: Parameter> ShardedOptimizer<T> {
    /// Makes this device's part, for parameters with these numbers of elements. All devices of the group call it.
    /// `reduce` is [`Sum`](ReduceOp::Sum) or [`Avg`](ReduceOp::Avg), of the devices' gradients. [`Optimizer::sharded`]
    /// and [`Optimizer::bucket_bytes`] have no meaning here.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a wrong optimizer or operation, and in a capture; [`Error::Mismatch`] on all
    /// devices when they differ in type, sizes, operation or optimizer; [`Error::OutOfMemory`], [`Error::Aborted`],
    /// [`Error::Timeout`], the driver's.
    #[track_caller]
    pub fn new(group: &Group<'_>, optimizer: Optimizer, reduce: ReduceOp, sizes: &[usize]) -> Result<Self> {
        let _here = OpSite::here("ShardedOptimizer::new");
        optimizer.check()?;
        let (dtype, site) = (T::DTYPE, OpSite::place());
        let terms = Terms { dtype, sizes: sizes.into(), reduce, optimizer: format!("{optimizer:?}"), site };
        let own = ShardedStep::new(group, terms, optimizer.keeps::<T>(), optimizer.clip.is_some())?;
        Ok(ShardedOptimizer { optimizer, own, steps: 0, failed: false, gang: 0 })
    }

    /// The same by three collectives and the kernels between them, also where one kernel could do it: for comparisons
    /// of the two, in `benches` and tests. All devices of the group do the same.
    #[doc(hidden)]
    pub fn by_calls(mut self) -> Self {
        self.own.use_calls();
        self
    }

    /// Elements of the buffer of all gradients.
    pub fn len(&self) -> usize {
        self.own.len()
    }

    /// Whether the parameters have no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the gradient of a parameter lies.
    ///
    /// # Panics
    /// When there is no such parameter.
    #[track_caller]
    pub fn place(&self, parameter: usize) -> Range<usize> {
        self.own.place(parameter).unwrap_or_else(|| panic!("there is no parameter {parameter}"))
    }

    /// The elements whose state this device keeps. The parts of all devices, by rank, are all elements without a gap.
    pub fn part(&self) -> Range<usize> {
        self.own.part()
    }

    /// Steps that were done, with those of a state that was set.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The optimizer.
    pub fn optimizer(&self) -> Optimizer {
        self.optimizer
    }

    /// Changes the learning rate from the next step on, before schedule and warm-up. All devices do the same.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rate that is negative or not finite.
    #[track_caller]
    pub fn set_rate(&mut self, rate: f64) -> Result<()> {
        let _here = OpSite::here("set_rate");
        self.optimizer.set_rate(rate)
    }

    /// One step: `grads` are this device's gradients, and `weights` its parameters, equal on all devices. All devices
    /// of the group call it. Later work of the current stream has the new parameters. It does not wait for the devices.
    ///
    /// Returns the norm of all gradients, before it is clipped: one number on the device, with the same bits on all.
    /// None if the optimizer does not [clip](Optimizer::clip). (`clip(f32::MAX.into())` computes the norm and changes
    /// nothing.) If the norm is not finite, the step changes nothing but the number of
    /// steps, which the next one's corrections and schedules follow; without clipping it is not computed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other lengths than at the start, memory that begins at no multiple of 16 bytes,
    /// and after a failure; [`Error::Mismatch`] when the devices are not in the same step; else those of
    /// [`Device::all_reduce`].
    #[track_caller]
    pub fn step<V: AsViewMut<Elem = T>>(
        &mut self,
        dev: &Device,
        grads: &mut impl AsViewMut<Elem = T>,
        weights: &mut [V],
    ) -> Result<Option<DeviceView<'_, f32>>> {
        let _here = OpSite::here("step");
        self.check(dev, "step")?;
        let rule = self.optimizer.rule(self.steps);
        let mut weights: SmallVec<[DeviceViewMut<'_, T>; 8]> = weights.iter_mut().map(|x| x.view_mut()).collect();
        let grads = grads.view_mut();
        self.own.check(&grads, &weights)?;
        let captures = dev.captures();
        if !captures {
            self.gang = dev.gang();
        }
        // A member that has failed may be behind the others.
        self.own.step(dev, (rule, self.steps), grads, &mut weights).inspect_err(|_| self.failed |= !captures)?;
        self.steps += u64::from(!captures);
        Ok(self.own.norm())
    }

    /// Writes the numbers of the next step to the device, for a graph with one step, and counts the step. Call it
    /// before each launch, on the stream of the launch. (A launch before the first call changes no parameter.)
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in a capture and after a failure; those of [`Device::upload_into`].
    #[track_caller]
    pub fn prepare(&mut self, dev: &Device) -> Result<()> {
        let _here = OpSite::here("prepare");
        self.check(dev, "prepare")?;
        self.own.set_later(dev, self.optimizer.rule(self.steps))?;
        self.gang = dev.gang();
        self.steps += 1;
        Ok(())
    }

    #[track_caller]
    fn check(&mut self, dev: &Device, op: &'static str) -> Result<()> {
        self.failed |= dev.has_failed(self.gang);
        let why = "a step, or a scope with steps, has failed; `set_state` before the next one";
        if self.failed { Err(Error::invalid(op, why)) } else { self.optimizer.check_step(self.steps) }
    }

    /// The state of all devices. All devices of the group call it, and it **waits**.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in a capture; those of [`Device::download`] and [`Device::all_gather`].
    #[track_caller]
    pub fn state(&self, dev: &Device) -> Result<ShardedState> {
        let _here = OpSite::here("state");
        let kept = |which| self.own.kept(dev, which);
        Ok(ShardedState { steps: self.steps, first: kept(0)?, second: kept(1)?, master: kept(2)? })
    }

    /// Goes on from a state, also of another number of devices, and after a failure. All devices of the group call it
    /// with the same state, and set their parameters themselves.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a state of other parameters, of another optimizer, or after more than 2^53 steps;
    /// [`Error::WorldMismatch`] before anything has changed, when another process sets another state; those of
    /// [`Device::upload_into`].
    #[track_caller]
    pub fn set_state(&mut self, dev: &Device, state: &ShardedState) -> Result<()> {
        let _here = OpSite::here("set_state");
        let all = [&state.first, &state.second, &state.master];
        // Before the checks: what one process refuses, all refuse.
        self.own.agree(dev, || {
            let mut hasher = DefaultHasher::new();
            for x in all {
                hasher.write_usize(x.len());
                hasher.write(bytemuck::cast_slice(x));
            }
            format!("set_state(step {}, checksum {:016x})", state.steps, hasher.finish())
        })?;
        for (which, all) in all.into_iter().enumerate() {
            let (len, wanted, kind) = (all.len(), self.own.kept_len(which), KINDS[which]);
            invalid_if!(len != wanted, "set_state", "{len} numbers ({kind}) where {wanted} are needed");
        }
        self.optimizer.check_step(state.steps)?;
        self.failed = true;
        for (which, all) in all.into_iter().enumerate() {
            self.own.set_kept(dev, which, all)?;
        }
        (self.steps, self.failed, self.gang) = (state.steps, false, 0);
        Ok(())
    }
}

debug_as! {
    ShardedOptimizer<T> [T: Parameter], |self|
    type = T::DTYPE, optimizer = self.optimizer, len = self.len(), part = self.part(), steps = self.steps,
    one_kernel = self.own.is_one_kernel(), ..
}
