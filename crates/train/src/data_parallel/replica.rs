//! One device's part: its model, its gradients, and the optimizer's memory; the passes and the update of a step.
//!
//! Invariant: `dirty` holds from the first launch of an update until all of it is launched, so a failure within it is
//! found; `updated_in` finds that of a scope which fails when its update is launched.

use super::{Gradients, Model, captured::Captured, parts, together::Together};
use crate::Parameter;
use crate::optim::Optimizer;
use crate::runtime::{Call, DeviceInternals, ErrorInternals, ExchangeInternals, GroupInternals, OpSite, shard_of};
use crate::update::{self, Kept, Moments, Rule};
use gpu_pool::{
    AsView, Device, DeviceBuffer, DeviceView, Error, Group, PinnedBuffer, ReduceOp, Result, Shard,
    gradients::GradientExchange,
};
use smallvec::SmallVec;
use std::ops::Range;

const FIRST_BUCKET: usize = 1 << 20;

/// The pieces of a batch: rows of all processes, and what the sum over these rows is divided by.
///
/// The divisor is at least the rows, so no sum on the way exceeds the largest mean of a piece. It grows by factors of
/// two (so the held sum is not rounded), and is the number of rows at the last piece: then gradients are the mean.
#[derive(Clone, Copy, Debug)]
struct Held {
    rows: f64,
    divisor: f64,
}

impl Held {
    fn and(held: Option<Held>, rows: usize, last: bool) -> Held {
        let more = rows as f64;
        let Some(held) = held else { return Held { rows: more, divisor: more } };
        let (rows, mut divisor) = (held.rows + more, held.divisor);
        while divisor < rows {
            divisor *= 2.0;
        }
        Held { rows, divisor: if last { rows } else { divisor } }
    }
}

#[derive(Debug)]
pub(super) struct Outcome {
    pub steps: u64,
    pub unused: Option<Vec<usize>>,
    /// The step whose gradients were not finite, and their norm.
    pub not_finite: Option<(u64, f32)>,
}

/// Where the elements of a parameter's gradient lie: the bucket, and elements of it.
#[cfg(feature = "checkpoints")]
pub(super) type Place = (usize, Range<usize>);

/// A device, the first device of its group, and where the gradients lie.
#[cfg(feature = "checkpoints")]
pub(super) struct Placed {
    pub ordinal: usize,
    pub first: usize,
    pub places: Vec<Place>,
    /// Whether the group has members of other processes, and whether the device has its rank 0.
    pub spans: bool,
    pub leads: bool,
}

/// The optimizer's memory for this device's part of a bucket.
pub(super) struct State {
    pub part: Range<usize>,
    pub kept: Kept,
}

pub(super) struct Replica<M, T: Parameter> {
    pub model: M,
    pub exchange: GradientExchange<T>,
    pub sizes: Box<[usize]>,
    pub state: Vec<State>,
    /// Sums of squares, and where those of each bucket are.
    pub(super) sums: DeviceBuffer<f64>,
    pub(super) slots: Vec<Range<usize>>,
    pub(super) norm: DeviceBuffer<f32>,
    /// Where one kernel ends a step with sharded state; in a graph it also adds up.
    pub(super) together: Option<Together>,
    seen: [PinnedBuffer<f32>; 2],
    /// The last steps whose norms were not read yet.
    pending: SmallVec<[u64; 2]>,
    /// `norm` is not finite, or old: a graph changes no parameter then, so `norm` must be zero before the next launch.
    pub(super) halts: bool,
    pub captured: Option<Captured>,
    pub steps: u64,
    /// Updates that were launched: which of `seen` is the next.
    updates: u64,
    /// Steps that have come to their end, also if one before was not finite.
    calls: u64,
    pub(super) dirty: bool,
    pub(super) updated_in: u64,
    /// The pieces that were accumulated, and the one of this pass.
    held: Option<Held>,
    scale: f32,
    #[cfg(feature = "checkpoints")]
    pub sharded: bool,
}

impl<M: Model<T>, T: Parameter> Replica<M, T> {
    pub fn new(group: &Group<'_>, optimizer: &Optimizer, mut model: M) -> Result<Self> {
        let dev = group.device();
        let mut parameters = model.parameters();
        let sizes: Box<[usize]> = parameters.iter().map(|parameter| parameter.len()).collect();
        invalid_if!(sizes.is_empty(), "DataParallel", "the model has no parameters");
        let bytes = optimizer.bucket_bytes;
        let exchange = GradientExchange::builder().of::<T>().reduce(ReduceOp::Sum).ready_order(false);
        let exchange = exchange.bucket_bytes(bytes).first_bucket_bytes(bytes.min(FIRST_BUCKET));
        let exchange = exchange.scatter(optimizer.sharded).build_in(group, &sizes)?;
        exchange.broadcast_parameters(dev, &mut parameters, 0)?;
        let mut state = Vec::with_capacity(exchange.buckets());
        let mut slots: Vec<Range<usize>> = Vec::with_capacity(exchange.buckets());
        for bucket in 0..exchange.buckets() {
            let part = exchange.part(bucket);
            state.push(State { kept: update::kept(dev, optimizer.keeps::<T>(), part.len())?, part });
            let start = slots.last().map_or(0, |slots| slots.end);
            slots.push(start..start + parts::chunks(&exchange, bucket));
        }
        Ok(Replica {
            sums: dev.zeros(slots.last().map_or(0, |slots| slots.end))?,
            norm: dev.zeros(1)?,
            together: Together::new(dev, &exchange)?,
            seen: [dev.pinned(1)?, dev.pinned(1)?],
            pending: SmallVec::new(),
            halts: false,
            captured: None,
            steps: 0,
            updates: 0,
            calls: 0,
            dirty: false,
            updated_in: 0,
            held: None,
            scale: 1.0,
            #[cfg(feature = "checkpoints")]
            sharded: optimizer.sharded,
            model,
            exchange,
            sizes,
            state,
            slots,
        })
    }

    pub fn shard(&self, dev: &Device, shard: Shard) -> Result<Shard> {
        // With a world, each process has rows of its own.
        let group = self.exchange.group(dev, "DataParallel")?.here();
        // The gang's shards may have weights.
        let is_gang = (group.rank(), group.count()) == (shard.index(), shard.count());
        Ok(if is_gang { shard } else { shard_of(group.rank(), group.count()) })
    }

    /// False if no process has rows: then nothing has begun, anywhere.
    pub fn begin(&mut self, dev: &Device, call: &Call, rows: usize, sync: bool) -> Result<bool> {
        self.exchange.set_sync(sync)?;
        let group = self.exchange.group(dev, call.op)?;
        let rows = if group.spans_processes() { group.sum_of_processes(call, rows)? } else { rows };
        if rows == 0 {
            return Ok(false);
        }
        let all = Held::and(self.held, rows, sync);
        let held = self.held.map_or(1.0, |held| held.divisor / all.divisor);
        self.exchange.weigh(dev, held, rows as f64 / all.divisor)?;
        let divisor = if size_of::<T>() < size_of::<f32>() { rows as f64 } else { all.divisor };
        (self.held, self.scale) = (Some(all), (1.0 / divisor) as f32);
        Ok(true)
    }

    pub fn pass<R>(
        &mut self,
        dev: &Device,
        shard: Shard,
        rows: usize,
        f: &(impl Fn(&Device, Shard, &mut M, &mut Gradients<'_, T>) -> Result<R> + Sync),
    ) -> Result<Option<R>> {
        if shard.range(rows).is_empty() {
            self.exchange.nothing();
            return Ok(None);
        }
        let scale = self.scale;
        OpSite::outside(|| f(dev, shard, &mut self.model, &mut Gradients::new(dev, &mut self.exchange, scale, None)))
            .map(Some)
    }

    pub fn update(&mut self, dev: &Device, optimizer: &Optimizer) -> Result<Outcome> {
        self.empty_sums(dev)?;
        for bucket in 0..self.exchange.buckets() {
            // Later buckets are still being exchanged.
            self.exchange.finish_bucket(dev, bucket)?;
            self.sum_squares(dev, bucket)?;
        }
        // All members meet here: no closure has failed.
        let unused = self.exchange.finish(dev)?.unused().to_vec();
        self.held = None;
        let mut outcome = self.settle(dev, 0)?;
        outcome.unused = Some(unused);
        if outcome.not_finite.is_some() {
            self.calls += 1;
            return Ok(outcome);
        }
        self.prepare(dev)?;
        (self.dirty, self.updated_in) = (true, dev.gang());
        self.launch(dev, self.rule(optimizer), None)?;
        self.launched(dev)?;
        outcome.steps = self.steps;
        Ok(outcome)
    }

    /// Zeroes the sums if the other members' sums will be added to them.
    pub(super) fn empty_sums(&mut self, dev: &Device) -> Result<()> {
        let added = self.exchange.is_scattered() && self.together.is_none();
        if added { dev.fill(&mut self.sums, 0.0) } else { Ok(()) }
    }

    pub(super) fn sum_squares(&mut self, dev: &Device, bucket: usize) -> Result<()> {
        parts::sum_squares(&self.exchange, dev, bucket, &self.sums.slice(self.slots[bucket].clone()))
    }

    /// All members call it before a [`launch`](Self::launch), and before they capture one.
    #[track_caller]
    pub(super) fn prepare(&mut self, dev: &Device) -> Result<()> {
        let parameters = self.model.parameters();
        let (count, had) = (parameters.len(), self.sizes.len());
        invalid_if!(count != had, "DataParallel", "the model has {count} parameters, and had {had}");
        for (i, (len, had)) in parameters.iter().map(|parameter| parameter.len()).zip(&self.sizes).enumerate() {
            invalid_if!(len != *had, "DataParallel", "parameter {i} has {len} elements, and had {had}");
        }
        let moments = moments(&self.state);
        match &mut self.together {
            Some(together) => together.prepare(dev, &self.exchange, &moments, &parameters),
            None => Ok(()),
        }
    }

    pub(super) fn rule(&self, optimizer: &Optimizer) -> Rule {
        Rule { gather: self.exchange.is_scattered().into(), ..optimizer.rule(self.steps) }
    }

    /// Computes the norm and updates the parameters. `graph_rule`: the memory of a rule that counts in place of `rule`.
    pub(super) fn launch(&mut self, dev: &Device, rule: Rule, graph_rule: Option<DeviceView<'_, u32>>) -> Result<()> {
        let (mut parameters, moments) = (self.model.parameters(), moments(&self.state));
        let exchange = &mut self.exchange;
        if let Some(together) = &self.together {
            let numbers = (&mut self.sums, &self.norm);
            return together.update(dev, exchange, numbers, (&moments, rule, graph_rule), &mut parameters);
        }
        parts::norm_of(exchange, dev, &mut self.sums, &self.norm)?;
        for (bucket, moments) in moments.iter().enumerate() {
            let numbers = (moments, &self.norm.view());
            parts::update(exchange, dev, bucket, numbers, (rule, graph_rule.as_ref()), &mut parameters)?;
            parts::gather(exchange, dev, bucket, &mut parameters)?;
        }
        Ok(())
    }

    /// Notes a step that was launched, and fetches its norm.
    pub(super) fn launched(&mut self, dev: &Device) -> Result<()> {
        dev.download_pinned(&self.norm, &mut self.seen[(self.updates % 2) as usize])?;
        self.pending.push(self.steps);
        (self.halts, self.dirty) = (false, false);
        (self.steps, self.updates, self.calls) = (self.steps + 1, self.updates + 1, self.calls + 1);
        Ok(())
    }

    /// Waits for the norms of steps, the oldest first, until at most `left` are not read. It stops at a norm that is
    /// not finite: that step and the later ones have changed no parameter. The groups of a model tell each other, and a
    /// step that one of them has made counts in all, so their numbers of steps stay equal. (Not in a cluster, where
    /// processes may have different groups.)
    pub fn settle(&mut self, dev: &Device, left: usize) -> Result<Outcome> {
        let before = (self.pending.clone(), self.steps, self.halts);
        let mut outcome = self.settle_group(left)?;
        if dev.in_cluster() || self.exchange.group(dev, "DataParallel")?.count() == dev.everyone().count() {
            return Ok(outcome);
        }
        match dev.exchange((self.steps, outcome.not_finite)) {
            Ok(all) => {
                for (steps, not_finite) in all {
                    self.steps = self.steps.max(steps);
                    outcome.not_finite = outcome.not_finite.or(not_finite);
                }
                Ok(Outcome { steps: self.steps, ..outcome })
            }
            Err(error) => {
                // The other groups have not heard of it: the next call reads the norms again.
                (self.pending, self.steps, self.halts) = before;
                Err(error)
            }
        }
    }

    fn settle_group(&mut self, left: usize) -> Result<Outcome> {
        while self.pending.len() > left {
            let number = self.updates - self.pending.len() as u64;
            let norm = self.seen[(number % 2) as usize].as_slice()?[0];
            let step = self.pending.remove(0);
            if !norm.is_finite() {
                self.pending.clear();
                (self.steps, self.halts) = (step, true);
                return Ok(Outcome { not_finite: Some((step, norm)), ..self.outcome() });
            }
        }
        Ok(self.outcome())
    }

    pub fn outcome(&self) -> Outcome {
        Outcome { steps: self.steps, unused: None, not_finite: None }
    }

    pub fn last_norm(&self) -> Result<Option<f32>> {
        let Some(last) = self.updates.checked_sub(1) else { return Ok(None) };
        Ok(Some(self.seen[(last % 2) as usize].as_slice()?[0]))
    }

    pub fn compare(&mut self, dev: &Device) -> Result<()> {
        self.exchange.verify_parameters(dev, &self.model.parameters())
    }

    /// This device, the first one of its group in this process, and where the gradients lie.
    #[cfg(feature = "checkpoints")]
    pub fn places(&self, dev: &Device) -> Result<Placed> {
        let group = self.exchange.group(dev, "DataParallel")?;
        let (first, spans, leads) = (group.here().ordinal(0), group.spans_processes(), group.rank() == 0);
        let places = (0..self.sizes.len()).map(|i| parts::place(&self.exchange, i)).collect();
        Ok(Placed { ordinal: dev.index(), first, places, spans, leads })
    }

    /// Everything was replaced by the state after so many steps.
    #[cfg(feature = "checkpoints")]
    pub fn begin_at(&mut self, dev: &Device, steps: u64) -> Result<()> {
        self.exchange.reset(dev)?;
        (self.steps, self.updates, self.calls, self.halts) = (steps, 0, 0, true);
        self.pending.clear();
        (self.dirty, self.updated_in, self.held) = (false, 0, None);
        Ok(())
    }

    /// No member may have been within an update, or have launched one: kernels that wait for each other may have given
    /// up, and the parameters on all devices are then equal, but not those of the step.
    #[track_caller]
    pub fn recover(&mut self, dev: &Device) -> Result<Outcome> {
        self.exchange.reset(dev)?;
        let outcome = self.settle(dev, 0)?;
        self.held = None;
        let group = self.exchange.group(dev, "clear_poison")?;
        self.dirty |= dev.has_failed(self.updated_in);
        let state = [self.calls.to_le_bytes().to_vec(), vec![self.dirty.into()]].concat();
        let clean = [self.calls.to_le_bytes().to_vec(), vec![0]].concat();
        let all = group.exchange_bytes(&Call::new("clear_poison"), state)?;
        // Those of other groups may have other numbers of steps.
        let groups = dev.exchange(self.calls)?;
        if all.iter().any(|state| *state != clean) || groups.iter().any(|calls| *calls != self.calls) {
            let why = "an update was under way when the step failed: load a checkpoint, or make a new model";
            return Err(Error::invalid("DataParallel::clear_poison", why));
        }
        self.compare(dev)?;
        Ok(outcome)
    }
}

fn moments(state: &[State]) -> Vec<Moments<'_>> {
    state.iter().map(|state| Moments::of(state.part.start, &state.kept)).collect()
}
