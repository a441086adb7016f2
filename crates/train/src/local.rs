//! [`LocalOptimizer`]: the step of an optimizer on buffers of one device, for models that no
//! [`DataParallel`](super::DataParallel) holds. Invariant: the norm has the same bits on all members of the group that
//! it is taken over.

use crate::Parameter;
#[cfg(feature = "checkpoints")]
use crate::checkpoint::{Checkpoint, Cut, named};
#[cfg(feature = "checkpoints")]
use crate::optim::KINDS;
use crate::optim::Optimizer;
use crate::runtime::{CHUNK, DeviceInternals, ErrorInternals, OpSite, norm, segments::Segment};
use crate::update::{self, Kept, Moments, Rule};
use gpu_pool::{AsView, AsViewMut, Device, DeviceBuffer, DeviceView, DeviceViewMut, Error, Group, Result};
use std::ops::Range;

const OP: &str = "LocalOptimizer";
const RULE: usize = size_of::<Rule>() / size_of::<u32>();

/// Parameters that one [`Optimizer`] updates: for [`LocalOptimizer::new`].
#[derive(Clone, Debug)]
pub struct ParameterGroup {
    optimizer: Optimizer,
    sizes: Vec<usize>,
    replicated: bool,
}

impl ParameterGroup {
    /// Parameters of these numbers of elements. [`Optimizer::sharded`] and [`Optimizer::bucket_bytes`] do nothing here.
    pub fn new(optimizer: Optimizer, sizes: &[usize]) -> Self {
        ParameterGroup { optimizer, sizes: sizes.into(), replicated: false }
    }

    /// All devices of the norm's group have the same parameters and gradients, such as the bias of a
    /// [`RowLinear`](crate::RowLinear). The norm counts those of rank 0.
    #[must_use]
    pub fn replicated(self) -> Self {
        ParameterGroup { replicated: true, ..self }
    }
}

/// An optimizer of parameters on one device: it clips by the global norm, and updates, in kernels of the
/// [`Optimizer`]'s formulas. Each gradient is a buffer of its own. Keep it beside the parameters: in a
/// [`Stage`](crate::Stage), or in a [`PerDevice`](gpu_pool::PerDevice).
///
/// The page "Data parallel" of the guide has an example.
///
/// **Groups.** Each has rates and decay of its own. All have the same [`clip`](Optimizer::clip), since the norm is that
/// of all gradients.
///
/// **Speed.** A step is one launch for each parameter, and with a clip two. A
/// [`ShardedOptimizer`](crate::ShardedOptimizer) takes gradients in one buffer. For many small parameters,
/// [capture](Device::capture) the step, and call [`prepare`](Self::prepare) before each launch of the graph.
///
/// **Failures.** A step that fails may leave some parameters updated and others not, and so may a scope that fails
/// after a step. From then on `step` is refused, until a state is loaded (feature `checkpoints`).
pub struct LocalOptimizer<T: Parameter = f32> {
    groups: Vec<Members>,
    own: Vec<Own>,
    sums: DeviceBuffer<f64>,
    /// The sums of squares of parameters that no other device has. Those of the others follow.
    alone: usize,
    norm: DeviceBuffer<f32>,
    graph_rules: DeviceBuffer<u32>,
    steps: u64,
    failed: bool,
    /// The place of the gang of the last step; 0: it has no step that may be under way.
    gang: u64,
    of: std::marker::PhantomData<fn() -> T>,
}

struct Members {
    optimizer: Optimizer,
    parameters: Range<usize>,
}

struct Own {
    len: usize,
    kept: Kept,
    slot: Range<usize>,
}

impl<T: Parameter> LocalOptimizer<T> {
    /// Makes the state for these groups of parameters, on this device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a wrong optimizer, for groups with different clips, and in a capture;
    /// [`Error::OutOfMemory`], [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn new(dev: &Device, groups: &[ParameterGroup]) -> Result<Self> {
        let _here = OpSite::here("LocalOptimizer::new");
        dev.not_in_graph(OP)?;
        let (mut members, mut own) = (Vec::with_capacity(groups.len()), Vec::new());
        for ParameterGroup { optimizer, sizes, .. } in groups {
            optimizer.check()?;
            let same_clip = optimizer.clip == groups[0].optimizer.clip;
            invalid_if!(!same_clip, OP, "groups with different clips: the norm is that of all gradients");
            members.push(Members { optimizer: *optimizer, parameters: own.len()..own.len() + sizes.len() });
            for &len in sizes {
                own.push(Own { len, kept: update::kept(dev, optimizer.keeps::<T>(), len)?, slot: 0..0 });
            }
        }
        let (mut sums, mut alone) = (0, 0);
        for replicated in [false, true] {
            alone = if replicated { sums } else { alone };
            let some = members.iter().zip(groups).filter(|(_, group)| group.replicated == replicated);
            for parameter in some.flat_map(|(members, _)| members.parameters.clone()) {
                let start = sums;
                sums += own[parameter].len.div_ceil(CHUNK);
                own[parameter].slot = start..sums;
            }
        }
        Ok(LocalOptimizer {
            sums: dev.zeros(sums)?,
            alone,
            norm: dev.zeros(1)?,
            graph_rules: dev.upload(bytemuck::cast_slice(&vec![Rule::nothing(); members.len()]))?,
            groups: members,
            own,
            steps: 0,
            failed: false,
            gang: 0,
            of: std::marker::PhantomData,
        })
    }

    /// Steps that were done, with those of a state that was loaded.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Changes the learning rate of a group from the next step on, before schedule and warm-up.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rate that is negative or not finite, and a group that is not there.
    #[track_caller]
    pub fn set_rate(&mut self, group: usize, rate: f64) -> Result<()> {
        let _here = OpSite::here("set_rate");
        let groups = self.groups.len();
        invalid_if!(group >= groups, "set_rate", "group {group} of {groups}");
        self.groups[group].optimizer.set_rate(rate)
    }

    /// One step: gradients and parameters of all groups, in their order. The norm is that of this device's gradients.
    /// Later work of the current stream has the new parameters. It does not wait for the device.
    ///
    /// Returns the norm before clipping: one number on the device. None without [`clip`](Optimizer::clip).
    /// (`clip(f32::MAX.into())` computes the norm and changes nothing.) If the norm is not finite, the step changes
    /// nothing but the number of [steps](Self::steps), which the next one's corrections and schedules follow.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other lengths than at the start, memory that begins at no multiple of 16 bytes,
    /// and after a failure; [`Error::WrongDevice`], [`Error::WrongPool`], [`Error::Aborted`], the driver's.
    #[track_caller]
    pub fn step<G: AsView<Elem = T>, V: AsViewMut<Elem = T>>(
        &mut self,
        dev: &Device,
        grads: &[G],
        weights: &mut [V],
    ) -> Result<Option<DeviceView<'_, f32>>> {
        let _here = OpSite::here("step");
        let alone = dev.group_of(&[dev.index()]).expect("a device is in its scope");
        self.step_in(&alone, grads, weights)
    }

    /// [`step`](Self::step) with the norm of the gradients of all devices of the group: stages of one pipeline, or
    /// parts of layers. All of them call it if their optimizers clip. The norm has the same bits on all. Errors: as
    /// [`step`](Self::step), and those of [`Group::all_gather`].
    #[track_caller]
    pub fn step_in<G: AsView<Elem = T>, V: AsViewMut<Elem = T>>(
        &mut self,
        group: &Group<'_>,
        grads: &[G],
        weights: &mut [V],
    ) -> Result<Option<DeviceView<'_, f32>>> {
        let _here = OpSite::here("step_in");
        let dev = group.device();
        self.check(dev, "step_in")?;
        let grads: Vec<DeviceView<'_, T>> = grads.iter().map(AsView::view).collect();
        let weights: Vec<DeviceViewMut<'_, T>> = weights.iter_mut().map(AsViewMut::view_mut).collect();
        self.fits(&grads, &weights)?;
        let captures = dev.captures();
        if !captures {
            self.gang = dev.gang();
        }
        self.run(group, &grads, &weights).inspect_err(|_| self.failed |= !captures)?;
        self.steps += u64::from(!captures);
        Ok(self.clips().then(|| self.norm.view()))
    }

    /// Writes the numbers of the next step to the device, for a graph with one step, and counts the step. Call it
    /// before each launch, on the stream of the launch. (A launch before the first call changes no parameter.)
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in a capture and after a failure; those of [`Device::upload_into`].
    #[track_caller]
    pub fn prepare(&mut self, dev: &Device) -> Result<()> {
        let _here = OpSite::here("prepare");
        dev.not_in_graph("prepare")?;
        self.check(dev, "prepare")?;
        let rules: Vec<Rule> = self.groups.iter().map(|group| group.optimizer.rule(self.steps)).collect();
        dev.upload_into(bytemuck::cast_slice(&rules), &mut self.graph_rules)?;
        self.gang = dev.gang();
        self.steps += 1;
        Ok(())
    }

    fn clips(&self) -> bool {
        self.groups.first().is_some_and(|group| group.optimizer.clip.is_some())
    }

    fn check(&mut self, dev: &Device, op: &'static str) -> Result<()> {
        self.failed |= dev.has_failed(self.gang);
        invalid_if!(self.failed, op, "a step, or a scope with steps, has failed: parameters may be half updated");
        self.groups.iter().try_for_each(|group| group.optimizer.check_step(self.steps))
    }

    #[track_caller]
    fn fits(&self, grads: &[DeviceView<'_, T>], weights: &[DeviceViewMut<'_, T>]) -> Result<()> {
        let (count, g, w) = (self.own.len(), grads.len(), weights.len());
        invalid_if!((g, w) != (count, count), OP, "{g} gradients and {w} parameters of {count}");
        for (i, ((own, g), w)) in self.own.iter().zip(grads).zip(weights).enumerate() {
            let (len, of_g, of_w, address) = (own.len, g.len(), w.len(), g.address() | w.address());
            invalid_if!((of_g, of_w) != (len, len), OP, "gradient and parameter {i} of {of_g} and {of_w}, not {len}");
            let aligned = address.is_multiple_of(16);
            invalid_if!(!aligned, OP, "gradient or parameter {i} begins at no multiple of 16 bytes");
        }
        Ok(())
    }

    fn run(&mut self, group: &Group<'_>, grads: &[DeviceView<'_, T>], weights: &[DeviceViewMut<'_, T>]) -> Result<()> {
        let dev = group.device();
        if self.clips() {
            let counted = if group.rank() == 0 { self.sums.len() } else { self.alone };
            for (own, g) in self.own.iter().zip(grads).filter(|(own, _)| own.len > 0 && own.slot.end <= counted) {
                update::squares(dev, g, &self.sums.slice(own.slot.clone()))?;
            }
            match group.count() {
                1 => norm::<T>(dev, &self.sums.view(), &self.norm.view())?,
                count => {
                    let mut all = dev.zeros::<f64>(count)?;
                    group.all_gather(&dev.sum(&self.sums.slice(..counted))?, &mut all)?;
                    norm::<T>(dev, &all.view(), &self.norm.view())?;
                }
            }
        }
        for (k, Members { optimizer, parameters }) in self.groups.iter().enumerate() {
            let later = dev.captures().then(|| self.graph_rules.slice(k * RULE..(k + 1) * RULE));
            let rule = (optimizer.rule(self.steps), later.as_ref());
            for i in parameters.clone().filter(|&i| self.own[i].len > 0) {
                let Own { len, kept, .. } = &self.own[i];
                let moments = Moments::of(0, kept);
                let all = Segment { start: 0, len: *len, memory: Some(weights[i].view()) };
                update::update(dev, &grads[i], &moments, &self.norm.view(), &[all], rule)?;
            }
        }
        Ok(())
    }
}

#[cfg(feature = "checkpoints")]
impl<T: Parameter> LocalOptimizer<T> {
    /// Puts the state into a checkpoint, behind `name.`: the number of steps, and moments as `first.0` and so on.
    /// `cuts` says how the parameters lie on the devices of the group. All of them call it, each with a checkpoint of
    /// its own, and it **waits**: see [`Checkpoint::insert_part`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another number of cuts, or cuts of other lengths; those of
    /// [`Checkpoint::insert_part`].
    #[track_caller]
    pub fn save(&self, group: &Group<'_>, to: &mut Checkpoint, name: &str, cuts: &[Cut]) -> Result<()> {
        let _here = OpSite::here("LocalOptimizer::save");
        self.cut(cuts)?;
        to.note(&named(name, "steps"), self.steps);
        for (i, (own, cut)) in self.own.iter().zip(cuts).enumerate() {
            for (kind, x) in KINDS.iter().zip(&own.kept) {
                let Some(x) = x else { continue };
                to.insert_part(group, &named(name, &format!("{kind}.{i}")), cut, x)?;
            }
        }
        Ok(())
    }

    /// Goes on from the state that [`save`](Self::save) has put in, also with parts of other lengths, and after a
    /// failure. All devices of the group call it with the same checkpoint.
    ///
    /// # Errors
    /// As [`save`](Self::save); [`Error::InvalidArgument`] for a state of other parameters or of another kind of
    /// optimizer; those of [`Checkpoint::part`] and [`Device::upload_into`].
    #[track_caller]
    pub fn load(&mut self, group: &Group<'_>, from: &Checkpoint, name: &str, cuts: &[Cut]) -> Result<()> {
        let _here = OpSite::here("LocalOptimizer::load");
        self.cut(cuts)?;
        let steps = from.noted(&named(name, "steps")).and_then(|steps| steps.parse::<u64>().ok());
        let Some(steps) = steps else {
            return Err(Error::invalid(OP, format_args!("no number of steps for `{name}`")));
        };
        self.groups.iter().try_for_each(|group| group.optimizer.check_step(steps))?;
        let kept = |kind: usize, i: usize| self.own.get(i).is_some_and(|own| own.kept[kind].is_some());
        let foreign = from.names().find(|tensor| {
            let of = |kind: &&str| tensor.strip_prefix(&*named(name, &format!("{kind}."))).map(str::to_owned);
            let known = KINDS.iter().enumerate().find_map(|(at, kind)| Some((at, of(kind)?)));
            known.is_some_and(|(kind, i)| i.parse().is_ok_and(|i| !kept(kind, i)))
        });
        if let Some(foreign) = foreign {
            let why = format_args!("`{foreign}` is of more parameters, or of another kind of optimizer");
            return Err(Error::invalid(OP, why));
        }
        let (dev, mut parts) = (group.device(), Vec::with_capacity(self.own.len()));
        for (i, (own, cut)) in self.own.iter().zip(cuts).enumerate() {
            for (kind, x) in KINDS.iter().zip(&own.kept) {
                let x = x.as_ref().map(|_| from.part::<f32>(group, &named(name, &format!("{kind}.{i}")), cut));
                parts.push(x.transpose()?);
            }
        }
        self.failed = true;
        let memory = self.own.iter_mut().flat_map(|own| &mut own.kept);
        for (memory, part) in memory.zip(&parts) {
            if let (Some(memory), Some(part)) = (memory, part) {
                dev.upload_into(part, memory)?;
            }
        }
        (self.steps, self.failed, self.gang) = (steps, false, 0);
        Ok(())
    }

    #[track_caller]
    fn cut(&self, cuts: &[Cut]) -> Result<()> {
        let wanted = self.own.iter().map(|own| own.len);
        let fit = wanted.clone().eq(cuts.iter().map(Cut::len));
        invalid_if!(!fit, OP, "{cuts:?} for parameters of {:?}", wanted.collect::<Vec<_>>());
        Ok(())
    }
}

debug_as! {
    LocalOptimizer<T> [T: Parameter], |self|
    type = T::DTYPE,
    optimizers = self.groups.iter().map(|group| group.optimizer).collect::<Vec<_>>(),
    parameters = self.own.len(),
    steps = self.steps,
    ..
}
