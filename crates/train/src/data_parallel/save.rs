//! Checkpoints of [`DataParallel`]: the whole state of each group, for any number of devices.
//!
//! Tensors: `parameters.0`, `first.0` (the first moment), `second.0`, `master.0` (the copy in `f32`) and so on; with
//! several groups after `group0.`. Invariant: everything is compared with the model, and with what the other processes
//! have found, before anything is written.

use super::parts::place;
use super::replica::{Place, Placed, Replica};
use super::{DataParallel, Model, replica_of};
use crate::runtime::{Call, ErrorInternals, ExchangeInternals, GroupInternals, OpSite, Origin, PerDeviceInternals};
use crate::{Parameter, checkpoint::Checkpoint, optim::KINDS};
use gpu_pool::{Device, Error, Result, error::Site};
use std::hash::{DefaultHasher, Hasher};
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::{ops::Range, path::Path, sync::OnceLock, thread, time::Duration};

/// Notes: the number of steps, and of tensors that are the model's.
const STEPS: &str = "gpu_pool.steps";
const TENSORS: &str = "gpu_pool.tensors";

/// A process's report on its part in `save`; a text follows after `FAILED`.
const BUSY: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;
const LOOK: Duration = Duration::from_millis(20);

/// A device's part of the state of its group.
struct Own<T> {
    /// None unless it is the group's first device.
    parameters: Option<Vec<Vec<T>>>,
    parts: Vec<Part>,
}

struct Part {
    elements: Range<usize>,
    values: [Option<Vec<f32>>; 3],
}

struct Found<T> {
    steps: u64,
    groups: Vec<OfGroup<T>>,
}

struct OfGroup<T> {
    /// After a NaN, groups of a cluster may have made other numbers of steps.
    steps: u64,
    parameters: Vec<Vec<T>>,
    state: [Vec<Vec<f32>>; 3],
}

impl<T: Parameter> OfGroup<T> {
    fn checksum(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.parameters.iter().for_each(|x| hasher.write(bytemuck::cast_slice(x)));
        self.state.iter().flatten().for_each(|x| hasher.write(bytemuck::cast_slice(x)));
        hasher.finish()
    }
}

impl<M: Model<T>, T: Parameter> DataParallel<M, T> {
    /// Writes parameters, moments and the number of steps to a file: [`checkpoint`](Self::checkpoint) and
    /// [`Checkpoint::save`].
    ///
    /// All processes of a cluster call it. The one with rank 0 of a group writes, state in parts too, which is gathered
    /// first. The others wait for it: when it returns, the file is there. Errors: those of both;
    /// [`Error::AbortedByHost`] when another process could not write the file.
    #[track_caller]
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let _here = OpSite::here("DataParallel::save");
        let (path, site) = (path.as_ref(), Location::caller());
        let call = OpSite::current();
        let checkpoint = self.checkpoint()?;
        if !self.groups.spans {
            return checkpoint.save(path);
        }
        let written = OnceLock::new();
        let write = || match catch_unwind(AssertUnwindSafe(|| OpSite::revisit(call, || checkpoint.save(path)))) {
            Ok(result) => drop(written.set(result)),
            Err(_) => drop(written.set(Err(Error::custom("the thread that writes a checkpoint has panicked")))),
        };
        let told = thread::scope(|scope| {
            match self.groups.leads {
                // On a thread of its own: a file takes longer than the others' deadline, so they hear that it goes on.
                true => {
                    let thread = thread::Builder::new().name("gpu-pool:save".into());
                    if let Err(error) = thread.spawn_scoped(scope, write) {
                        let (op, device, why) = ("DataParallel::save", None, error.to_string());
                        let _ = written.set(Err(Error::NoThread { op, device, why, site }));
                    }
                }
                false => drop(written.set(Ok(()))),
            }
            self.on_each(|dev, _, replica| {
                let group = replica.exchange.group(dev, "save")?;
                loop {
                    let own = match written.get() {
                        None => vec![BUSY],
                        Some(Ok(())) => vec![DONE],
                        Some(Err(error)) => [&[FAILED], error.to_string().as_bytes()].concat(),
                    };
                    let all = group.exchange_bytes(&Call::at("save", site), own)?;
                    if let Some(rank) = all.iter().position(|told| told.first() == Some(&FAILED)) {
                        let cause = String::from_utf8_lossy(&all[rank][1..]).into_owned();
                        return Ok(Some(Error::AbortedByHost { host: group.place(rank).0, device: None, cause }));
                    }
                    if all.iter().all(|told| told[..] == [DONE]) {
                        return Ok(None);
                    }
                    thread::sleep(LOOK);
                }
            })
        });
        written.into_inner().unwrap_or(Ok(()))?;
        told?.into_iter().flatten().next().map_or(Ok(()), Err)
    }

    /// Reads a file of [`save`](Self::save), into a model of the same sizes and an optimizer of the same kind:
    /// [`Checkpoint::load`] and [`restore`](Self::restore). Each process of a cluster reads the file. Errors: those of
    /// both.
    #[track_caller]
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let _here = OpSite::here("DataParallel::load");
        let site = Location::caller();
        let found = Checkpoint::load(path).and_then(|checkpoint| self.find(&checkpoint));
        self.take_over(found, site)
    }

    /// Parameters, moments and the number of steps, so that training goes on from there with the same bits. It does not
    /// depend on the number of devices, nor on whether the state is [sharded](crate::Optimizer::sharded).
    /// Not in it: the optimizer's settings, which the program has, and gradients that were accumulated.
    ///
    /// It has room for more: the epoch, the order of the data, other parts of a model.
    ///
    /// # Errors
    /// [`Error::NotFinite`] as of [`step`](Self::step); [`Error::Poisoned`]; those of
    /// [`GpuPool::run`](gpu_pool::GpuPool::run).
    #[track_caller]
    pub fn checkpoint(&mut self) -> Result<Checkpoint> {
        let (site, _here) = (Location::caller(), OpSite::here("DataParallel::checkpoint"));
        let all = self.on_each(|dev, _, replica| {
            let outcome = replica.settle(dev, 0)?;
            let own = own(dev, replica)?;
            Ok((outcome, own))
        })?;
        let (outcomes, all): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        self.conclude("DataParallel::checkpoint", site, &outcomes)?;
        let mut checkpoint = Checkpoint::new();
        checkpoint.note(STEPS, self.steps);
        for (group, places) in self.groups.places.iter().enumerate() {
            let prefix = self.groups.prefix(group);
            if self.groups.places.len() > 1 {
                let device = self.groups.of.iter().position(|of| *of == group).expect("a group has a device");
                checkpoint.note(&format!("{STEPS}.{group}"), outcomes[device].steps);
            }
            let members = || self.groups.of.iter().zip(&all).filter(|(of, _)| **of == group).map(|(_, own)| own);
            let parameters = members().find_map(|own| own.parameters.as_ref()).expect("a group has a first device");
            for (i, (x, (bucket, place))) in parameters.iter().zip(places).enumerate() {
                checkpoint.insert(&format!("{prefix}parameters.{i}"), &[x.len()], x)?;
                for (kind, name) in KINDS.iter().enumerate() {
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

    /// Takes over the state of a [`checkpoint`](Self::checkpoint), and clears a failure ([`Error::Poisoned`]). For the
    /// parameters alone, for example with another optimizer, upload [`Checkpoint::tensor`] in [`each`](Self::each).
    ///
    /// All processes of a cluster call it, or [`load`](Self::load). They compare the number of steps and a checksum of
    /// the state that is taken over.
    ///
    /// # Errors
    /// Before anything has changed: [`Error::InvalidArgument`] for another number of parameters or groups, other sizes
    /// or types, moments of another kind of optimizer, more than 2^53 steps; [`Error::WorldMismatch`] on all processes
    /// of a group that have different checkpoints, or if another one has none that it can take over. Those of
    /// [`GpuPool::run`](gpu_pool::GpuPool::run), after which the model is poisoned.
    #[track_caller]
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let _here = OpSite::here("DataParallel::restore");
        let found = self.find(checkpoint);
        self.take_over(found, Location::caller())
    }

    fn find(&self, checkpoint: &Checkpoint) -> Result<Found<T>> {
        let steps = checkpoint.noted(STEPS).and_then(|steps| steps.parse::<u64>().ok());
        let Some(steps) = steps else { return Err(foreign("it has no number of steps")) };
        self.optimizer.check_step(steps)?;
        let kinds = self.optimizer.keeps::<T>();
        let mut found = Vec::with_capacity(self.groups.places.len());
        let mut tensors = 0;
        for (group, places) in self.groups.places.iter().enumerate() {
            let prefix = self.groups.prefix(group);
            let mut parameters = Vec::with_capacity(places.len());
            let mut state = [Vec::new(), Vec::new(), Vec::new()];
            for (i, (_, place)) in places.iter().enumerate() {
                parameters.push(read::<T>(checkpoint, &format!("{prefix}parameters.{i}"), place.len())?);
                for (kind, name) in KINDS.iter().enumerate().filter(|(kind, _)| kinds[*kind]) {
                    state[kind].push(read::<f32>(checkpoint, &format!("{prefix}{name}.{i}"), place.len())?);
                }
            }
            tensors += parameters.len() + state.iter().map(Vec::len).sum::<usize>();
            let own = checkpoint.noted(&format!("{STEPS}.{group}")).map(str::parse::<u64>);
            let Ok(steps) = own.unwrap_or(Ok(steps)) else { return Err(foreign("a number of steps is none")) };
            self.optimizer.check_step(steps)?;
            found.push(OfGroup { steps, parameters, state });
        }
        // More than that is of another kind of optimizer, or of more groups or parameters.
        if checkpoint.noted(TENSORS) != Some(tensors.to_string().as_str()) {
            let saved = checkpoint.noted(TENSORS).unwrap_or("an unknown number of");
            let why = "it is of another model, another kind of optimizer, or more groups";
            return Err(foreign(format_args!(
                "it has {saved} tensors of a model, and this model has {tensors}: {why}"
            )));
        }
        Ok(Found { steps, groups: found })
    }

    /// Writes the checkpoint into the replicas if all processes have found the same one; else even the poison stays.
    fn take_over(&mut self, found: Result<Found<T>>, site: Site) -> Result<()> {
        let groups = &self.groups.clone();
        let terms: Vec<String> = match &found {
            _ if !groups.spans => Vec::new(),
            Ok(Found { groups, .. }) => {
                let terms = |own: &OfGroup<T>| format!("load(step {}, checksum {:016x})", own.steps, own.checksum());
                groups.iter().map(terms).collect()
            }
            Err(error) => vec![format!("load, which failed: {error}"); groups.places.len()],
        };
        let found = match found {
            Err(error) if !groups.spans => return Err(error),
            found => found,
        };
        let refused = self.replicas.accepting(self.devices.as_deref(), |dev, _, replica| {
            let (at, replica) = (groups.group_of(dev.index()), replica_of(replica));
            if groups.spans {
                let group = replica.exchange.group(dev, "load")?;
                let differs = match group.agree(Origin::default(), "load", site, &terms[at]) {
                    Err(error @ Error::WorldMismatch { .. }) => Some(error),
                    agreed => agreed.map(|()| None)?,
                };
                // Another group of this process may differ.
                if dev.exchange(differs.is_some() || found.is_err())?.iter().any(|refused| *refused) {
                    return Ok((differs, false));
                }
            }
            let Ok(Found { groups, .. }) = &found else { return Ok((None, false)) };
            let OfGroup { steps, parameters, state } = &groups[at];
            replace(dev, replica, parameters, state, *steps)?;
            Ok((None, true))
        })?;
        let found = found?;
        refused.into_iter().flatten().next().map_or(Ok(()), Err)?;
        (self.steps, self.held) = (found.steps, false);
        Ok(())
    }
}

/// Which devices make up which group, and where the gradients of each group lie: a bucket, and elements of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Groups {
    /// By device of the model: its ordinal, and below its group.
    ordinals: Vec<usize>,
    of: Vec<usize>,
    places: Vec<Vec<Place>>,
    spans: bool,
    leads: bool,
}

impl Groups {
    /// Devices with one first device are a group.
    pub fn new(all: Vec<Placed>) -> Self {
        let mut groups = Groups::default();
        let mut firsts = Vec::new();
        for Placed { ordinal, first, places, spans, leads } in all {
            groups.spans |= spans;
            groups.leads |= leads;
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

fn shifted(range: &Range<usize>, start: usize) -> Range<usize> {
    if range.is_empty() { 0..0 } else { range.start - start..range.end - start }
}

fn own<M: Model<T>, T: Parameter>(dev: &Device, replica: &mut Replica<M, T>) -> Result<Own<T>> {
    let group = replica.exchange.group(dev, "checkpoint")?;
    // Each process has all: `checkpoint` gives it to the user.
    let (first, gathers) = (group.here().rank() == 0, replica.sharded && group.spans_processes());
    let mut own = Own { parameters: None, parts: Vec::new() };
    if first {
        let mut parameters = Vec::with_capacity(replica.sizes.len());
        for parameter in replica.model.parameters() {
            parameters.push(dev.download(parameter)?);
        }
        own.parameters = Some(parameters);
    }
    for (bucket, state) in replica.state.iter().enumerate() {
        // All members have the same, unless each has a part.
        let mut values = [None, None, None];
        if gathers {
            let counts = replica.exchange.counts(bucket);
            let mut whole = dev.zeros::<f32>(counts.iter().sum())?;
            for (value, memory) in values.iter_mut().zip(&state.kept) {
                let Some(memory) = memory else { continue };
                group.all_gather_v(memory, &mut whole, &counts)?;
                if first {
                    *value = Some(dev.download(&whole)?);
                }
            }
            own.parts.push(Part { elements: 0..whole.len(), values });
            continue;
        }
        if first || replica.sharded {
            for (value, memory) in values.iter_mut().zip(&state.kept) {
                if let Some(memory) = memory {
                    *value = Some(dev.download(memory)?);
                }
            }
        }
        own.parts.push(Part { elements: state.part.clone(), values });
    }
    Ok(own)
}

fn replace<M: Model<T>, T: Parameter>(
    dev: &Device,
    replica: &mut Replica<M, T>,
    parameters: &[Vec<T>],
    state: &[Vec<Vec<f32>>; 3],
    steps: u64,
) -> Result<()> {
    let places: Vec<_> = (0..replica.sizes.len()).map(|i| place(&replica.exchange, i)).collect();
    for (own, x) in replica.model.parameters().into_iter().zip(parameters) {
        dev.upload_into(x, own)?;
    }
    for (bucket, own) in replica.state.iter_mut().enumerate() {
        let part = own.part.clone();
        for (memory, whole) in own.kept.iter_mut().zip(state) {
            let Some(memory) = memory else { continue };
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
