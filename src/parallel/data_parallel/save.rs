//! Checkpoints of [`DataParallel`]: the whole state of each group, whatever devices it is spread over.
//!
//! Users call `save` and `load`. Tensors: `parameters.0`, `first.0` (the first moment), `second.0`, `master.0` (the
//! copy in `f32`) and so on; with several groups of devices after `group0.`. Invariant: everything is compared with the
//! model before anything is written.

use super::{
    super::{checkpoint::Checkpoint, optim::Needs},
    DataParallel, Model,
    replica::{Place, Placed, Replica, State},
};
use crate::{
    Device, DeviceBuffer, Parameter, PerDevice,
    error::{Error, Result},
};
use std::{ops::Range, panic::Location, path::Path};

/// Notes: the number of steps, and of tensors that are the model's.
const STEPS: &str = "gpu_pool.steps";
const TENSORS: &str = "gpu_pool.tensors";

/// The optimizer's memory of one kind: its name in checkpoints, and its place.
type Kind = (&'static str, fn(&mut State) -> &mut Option<DeviceBuffer<f32>>);
const KINDS: [Kind; 3] =
    [("first", |state| &mut state.first), ("second", |state| &mut state.second), ("master", |state| &mut state.master)];

/// The parameters of a checkpoint, and their state of each kind.
type Found<T> = (Vec<Vec<T>>, [Vec<Vec<f32>>; 3]);

/// What a device has of the state of its group.
struct Own<T> {
    /// None unless it is the group's first device.
    parameters: Option<Vec<Vec<T>>>,
    /// By bucket.
    parts: Vec<Part>,
}

/// Elements of a bucket, and their values of each kind.
struct Part {
    elements: Range<usize>,
    values: [Option<Vec<f32>>; 3],
}

impl<M: Model<T>, T: Parameter> DataParallel<M, T> {
    /// Writes parameters, moments and the number of steps to a file: [`checkpoint`](Self::checkpoint) and
    /// [`Checkpoint::save`].
    ///
    /// # Errors
    /// Those of both.
    #[track_caller]
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.checkpoint()?.save(path)
    }

    /// Reads what [`save`](Self::save) has written, into a model of the same sizes and an optimizer of the same kind:
    /// [`Checkpoint::load`] and [`restore`](Self::restore).
    ///
    /// # Errors
    /// Those of both.
    #[track_caller]
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.replace_by(Checkpoint::load(path).and_then(|checkpoint| self.look_up(&checkpoint)))
    }

    /// Parameters, moments and the number of steps, so that training goes on from there with the same bits. It does not
    /// depend on the number of devices, nor on whether the state is [sharded](crate::parallel::Optimizer::sharded).
    /// Not in it: the optimizer's settings, which the program has, and gradients that were accumulated.
    ///
    /// It has room for more: the epoch, the order of the data, other parts of a model.
    ///
    /// # Errors
    /// [`Error::NotFinite`] as of [`step`](Self::step); [`Error::Poisoned`]; those of
    /// [`GpuPool::run`](crate::GpuPool::run).
    #[track_caller]
    pub fn checkpoint(&mut self) -> Result<Checkpoint> {
        let site = Location::caller();
        let all = self.on_each(|dev, _, replica| {
            let outcome = replica.settle()?;
            let own = own(dev, replica).map_err(|error| error.called_at(site))?;
            Ok((outcome, own))
        })?;
        let (outcomes, all): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        self.conclude("DataParallel::checkpoint", site, &outcomes)?;
        let mut checkpoint = Checkpoint::new();
        checkpoint.note(STEPS, self.steps);
        for (group, places) in self.groups.places.iter().enumerate() {
            let prefix = self.groups.prefix(group);
            let members = || self.groups.of.iter().zip(&all).filter(|(of, _)| **of == group).map(|(_, own)| own);
            let parameters = members().find_map(|own| own.parameters.as_ref()).expect("a group has a first device");
            for (i, (x, (bucket, place))) in parameters.iter().zip(places).enumerate() {
                checkpoint.insert(&format!("{prefix}parameters.{i}"), &[x.len()], x)?;
                for (kind, (name, _)) in KINDS.iter().enumerate() {
                    let mut whole = vec![0.0f32; place.len()];
                    let mut any = false;
                    for own in members() {
                        let Some(Part { elements: part, values }) = own.parts.get(*bucket) else { continue };
                        let Some(values) = &values[kind] else { continue };
                        any = true;
                        let both = common(place, part);
                        whole[shifted(&both, place.start)].copy_from_slice(&values[shifted(&both, part.start)]);
                    }
                    if any {
                        checkpoint.insert(&format!("{prefix}{name}.{i}"), &[whole.len()], &whole)?;
                    }
                }
            }
        }
        checkpoint.note(TENSORS, checkpoint.names().count());
        Ok(checkpoint)
    }

    /// Takes over the state of a [`checkpoint`](Self::checkpoint), and clears a failure
    /// ([`Error::Poisoned`]). For the parameters alone, for example with another optimizer, upload
    /// [`Checkpoint::tensor`] in [`each`](Self::each).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] before anything has changed: another number of parameters or groups, other sizes or
    /// types, moments of another kind of optimizer. If one process fails, all do, with its cause. Those of
    /// [`GpuPool::run`](crate::GpuPool::run), after which the model is poisoned.
    #[track_caller]
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.replace_by(self.look_up(checkpoint))
    }

    /// Takes over what was found, or fails with the error: in a scope, so that other processes hear of it.
    #[track_caller]
    fn replace_by(&mut self, found: Result<(Vec<Found<T>>, u64)>) -> Result<()> {
        let (site, groups, found) = (Location::caller(), &self.groups.clone(), found.as_ref());
        let accept = |replicas: &PerDevice<_>, dev: &Device| match found {
            Ok(_) => replicas.accept(dev).map_err(|error| error.called_at(site)),
            Err(error) => Err(error.clone()),
        };
        let all = self.on_each_after(accept, |dev, _, replica| {
            let (found, steps) = found.map_err(Error::clone)?;
            let (parameters, state) = &found[groups.group_of(dev.index())];
            replace(dev, replica, parameters, state, *steps).map_err(|error| error.called_at(site))?;
            Ok(*steps)
        })?;
        self.steps = all.into_iter().next().unwrap_or(self.steps);
        Ok(())
    }

    /// What this model needs of a checkpoint, by group; and its number of steps.
    #[track_caller]
    fn look_up(&self, checkpoint: &Checkpoint) -> Result<(Vec<Found<T>>, u64)> {
        let steps = checkpoint.noted(STEPS).and_then(|steps| steps.parse::<u64>().ok());
        let Some(steps) = steps else { return Err(foreign("it has no number of steps")) };
        let needs = self.optimizer.needs();
        let kinds = [needs != Needs::Nothing, needs == Needs::Two, size_of::<T>() < size_of::<f32>()];
        let mut found = Vec::with_capacity(self.groups.places.len());
        let mut tensors = 0;
        for (group, places) in self.groups.places.iter().enumerate() {
            let prefix = self.groups.prefix(group);
            let mut parameters = Vec::with_capacity(places.len());
            let mut state = [Vec::new(), Vec::new(), Vec::new()];
            for (i, (_, place)) in places.iter().enumerate() {
                parameters.push(read::<T>(checkpoint, &format!("{prefix}parameters.{i}"), place.len())?);
                for (kind, (name, _)) in KINDS.iter().enumerate().filter(|(kind, _)| kinds[*kind]) {
                    state[kind].push(read::<f32>(checkpoint, &format!("{prefix}{name}.{i}"), place.len())?);
                }
            }
            tensors += parameters.len() + state.iter().map(Vec::len).sum::<usize>();
            found.push((parameters, state));
        }
        // More than that is of another kind of optimizer, or of more groups or parameters.
        if checkpoint.noted(TENSORS) != Some(tensors.to_string().as_str()) {
            let saved = checkpoint.noted(TENSORS).unwrap_or("an unknown number of");
            let why = "it is of another model, another kind of optimizer, or more groups";
            return Err(foreign(format_args!(
                "it has {saved} tensors of a model, and this model has {tensors}: {why}"
            )));
        }
        Ok((found, steps))
    }
}

/// Which devices make up which group, and where the gradients of each group lie: a bucket, and elements of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Groups {
    /// By device of the model: its ordinal, and below its group.
    ordinals: Vec<usize>,
    of: Vec<usize>,
    places: Vec<Vec<Place>>,
}

impl Groups {
    /// Devices with one first device are a group.
    pub fn new(all: Vec<Placed>) -> Self {
        let mut groups = Groups::default();
        let mut firsts = Vec::new();
        for Placed { ordinal, first, places } in all {
            let group = firsts.iter().position(|known| *known == first).unwrap_or_else(|| {
                firsts.push(first);
                groups.places.push(places);
                firsts.len() - 1
            });
            groups.ordinals.push(ordinal);
            groups.of.push(group);
        }
        groups
    }

    fn group_of(&self, ordinal: usize) -> usize {
        let device = self.ordinals.iter().position(|known| *known == ordinal);
        self.of[device.expect("a device of the model")]
    }

    fn prefix(&self, group: usize) -> String {
        if self.places.len() == 1 { String::new() } else { format!("group{group}.") }
    }
}

#[track_caller]
fn foreign(why: impl std::fmt::Display) -> Error {
    Error::invalid("DataParallel::restore", format_args!("a foreign checkpoint: {why}"))
}

#[track_caller]
fn read<T: Parameter>(checkpoint: &Checkpoint, name: &str, len: usize) -> Result<Vec<T>> {
    let x = match checkpoint.tensor::<T>(name) {
        Ok(x) => x,
        Err(Error::InvalidArgument { why, .. }) => return Err(foreign(why)),
        Err(error) => return Err(error),
    };
    match x.len() == len {
        true => Ok(x),
        false => Err(foreign(format_args!("`{name}` has {} elements, and the model's has {len}", x.len()))),
    }
}

fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// The range counted from `start`; an empty one is empty anywhere.
fn shifted(range: &Range<usize>, start: usize) -> Range<usize> {
    if range.is_empty() { 0..0 } else { range.start - start..range.end - start }
}

#[track_caller]
fn own<M: Model<T>, T: Parameter>(dev: &Device, replica: &mut Replica<M, T>) -> Result<Own<T>> {
    let group = replica.exchange.group(dev, "checkpoint")?;
    // Each process writes all.
    let (first, gathers) = (group.here().rank() == 0, replica.sharded && group.spans_processes());
    let mut own = Own { parameters: None, parts: Vec::new() };
    if first {
        let mut parameters = Vec::with_capacity(replica.sizes.len());
        for parameter in replica.model.parameters() {
            parameters.push(dev.download(parameter)?);
        }
        own.parameters = Some(parameters);
    }
    for (bucket, state) in replica.state.iter_mut().enumerate() {
        // All members have the same, unless each has a part.
        let mut values = [None, None, None];
        if gathers {
            let counts = replica.exchange.counts(bucket);
            let mut whole = dev.zeros::<f32>(counts.iter().sum())?;
            for (value, (_, memory)) in values.iter_mut().zip(KINDS) {
                let Some(memory) = memory(state) else { continue };
                group.all_gather_v(memory, &mut whole, &counts)?;
                if first {
                    *value = Some(dev.download(&whole)?);
                }
            }
            own.parts.push(Part { elements: 0..whole.len(), values });
            continue;
        }
        if first || replica.sharded {
            for (value, (_, memory)) in values.iter_mut().zip(KINDS) {
                if let Some(memory) = memory(state) {
                    *value = Some(dev.download(memory)?);
                }
            }
        }
        own.parts.push(Part { elements: state.part.clone(), values });
    }
    Ok(own)
}

#[track_caller]
fn replace<M: Model<T>, T: Parameter>(
    dev: &Device,
    replica: &mut Replica<M, T>,
    parameters: &[Vec<T>],
    state: &[Vec<Vec<f32>>; 3],
    steps: u64,
) -> Result<()> {
    let places: Vec<_> = (0..replica.sizes.len()).map(|i| replica.exchange.place(i)).collect();
    for (own, x) in replica.model.parameters().into_iter().zip(parameters) {
        dev.upload_into(x, own)?;
    }
    for (bucket, own) in replica.state.iter_mut().enumerate() {
        for ((_, memory), whole) in KINDS.iter().zip(state) {
            let part = own.part.clone();
            let Some(memory) = memory(own) else { continue };
            let mut values = vec![0.0; part.len()];
            for ((_, place), x) in places.iter().zip(whole).filter(|((at, _), _)| *at == bucket) {
                let both = common(place, &part);
                values[shifted(&both, part.start)].copy_from_slice(&x[shifted(&both, place.start)]);
            }
            dev.upload_into(&values, memory)?;
        }
    }
    replica.begin_at(dev, steps)
}
