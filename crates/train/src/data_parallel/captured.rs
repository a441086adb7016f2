//! A step as a graph, which is captured once and launched often. [`DataParallel`](super::DataParallel) calls it on each
//! replica; the rest of a step is that of [`replica`](super::replica).
//!
//! Invariant: a launch changes no parameter if the gradients of the step before were not finite. So the host may read a
//! norm after it has launched the next step.

use super::{
    Gradients, Model, parts,
    replica::{Outcome, Replica},
};
use crate::runtime::{
    CHUNK, DeviceInternals, ErrorInternals, ExchangeInternals, GraphInternals, GroupInternals, OpSite,
};
use crate::{Optimizer, Parameter, update::Rule};
use gpu_pool::{AsView, Device, DeviceBuffer, Error, Graph, Result, Shard};

const OP: &str = "DataParallel::launch_steps";
pub(super) const NONE: &str = "no step was captured, or the capture has failed: `capture_step` comes first";

pub(super) struct Captured {
    graph: Graph,
    rows: usize,
    /// The numbers of the next step.
    rule: DeviceBuffer<u32>,
    /// Where the graph has the parameters.
    parameters: Vec<u64>,
    unused: Vec<usize>,
}

impl<M: Model<T>, T: Parameter> Replica<M, T> {
    /// An inner error is the same on all members, and none of them has captured anything.
    #[track_caller]
    pub fn capture(
        &mut self,
        dev: &Device,
        shard: Shard,
        rows: usize,
        f: &impl Fn(&Device, Shard, &mut M, &mut Gradients<'_, T>) -> Result<()>,
    ) -> Result<Result<Outcome>> {
        const OP: &str = "DataParallel::capture_step";
        let group = self.exchange.group(dev, OP)?;
        if group.spans_processes() || group.count() != dev.everyone().count() {
            return Ok(Err(Error::invalid(OP, "a model in several groups, or in several processes")));
        }
        self.captured = None;
        self.prepare(dev)?;
        let rule = dev.zeros(size_of::<Rule>() / size_of::<u32>())?;
        let mut given = vec![false; self.sizes.len()];
        let call = OpSite { op: OP, site: OpSite::place() };
        let (graph, ()) = dev.capture(|dev| {
            let _here = call.enter();
            if !shard.range(rows).is_empty() {
                let scale = (1.0 / rows as f64) as f32;
                let mut gradients = Gradients::new(dev, &mut self.exchange, scale, Some(&mut given));
                OpSite::outside(|| f(dev, shard, &mut self.model, &mut gradients))?;
                invalid_if!(!given.contains(&true), OP, "the closure gave no gradient");
            }
            for i in (0..given.len()).filter(|i| !given[*i]) {
                dev.fill(&mut self.exchange.grad_mut(i)?, T::zeroed())?;
            }
            if self.together.is_none() {
                self.empty_sums(dev)?;
                for bucket in 0..self.exchange.buckets() {
                    parts::sum(&self.exchange, dev, bucket)?;
                    self.sum_squares(dev, bucket)?;
                }
                self.halt(dev)?;
            }
            self.launch(dev, Rule::nothing(), Some(rule.view()))
        })?;
        let all = dev.exchange(given)?;
        let unused = (0..self.sizes.len()).filter(|i| all.iter().all(|given| !given[*i])).collect();
        let parameters = self.addresses();
        self.captured = Some(Captured { graph, rows, rule, parameters, unused });
        Ok(Ok(self.outcome()))
    }

    /// Makes `steps` steps, and calls `fill` with the number of each before it. All members stop at the same step if
    /// its norm is not finite. An inner error is the same on all members, and none of them has launched anything.
    pub fn launch_steps(
        &mut self,
        dev: &Device,
        shard: Shard,
        (steps, optimizer): (usize, &Optimizer),
        fill: &impl Fn(&Device, Shard, &mut M, usize) -> Result<()>,
    ) -> Result<Result<Outcome>> {
        for step in 0..steps {
            let outcome = self.settle(dev, 1)?;
            if outcome.not_finite.is_some() {
                return Ok(Ok(outcome));
            }
            if step == 0
                && let Some(refused) = dev.exchange(self.check_launch(dev).err())?.into_iter().flatten().next()
            {
                return Ok(Err(refused));
            }
            let rows = self.captured.as_ref().map_or(0, |captured| captured.rows);
            if !shard.range(rows).is_empty() {
                OpSite::outside(|| fill(dev, shard.clone(), &mut self.model, step))?;
            }
            self.check_launch(dev)?;
            if step == 0 {
                // A step since the capture may have had other parameters.
                self.prepare(dev)?;
                // All members meet: before that a failure has changed nothing.
                dev.exchange(())?;
            }
            if self.halts {
                dev.fill(&mut self.norm, 0.0)?;
            }
            let rule = self.rule(optimizer);
            let captured = self.captured.as_mut().expect("it was checked");
            dev.upload_into(bytemuck::cast_slice(&[rule]), &mut captured.rule)?;
            (self.dirty, self.updated_in) = (true, dev.gang());
            dev.launch_graph(&captured.graph)?;
            self.launched(dev)?;
        }
        // The scope waits for the devices in any case.
        let outcome = self.settle(dev, 0)?;
        let unused = self.captured.as_ref().filter(|_| steps > 0).map(|captured| captured.unused.clone());
        Ok(Ok(Outcome { unused, ..outcome }))
    }

    #[track_caller]
    fn check_launch(&mut self, dev: &Device) -> Result<()> {
        let addresses = self.addresses();
        let Some(captured) = &self.captured else { return Err(Error::invalid(OP, NONE)) };
        let moved = "parameters have moved since the capture: capture the step again";
        invalid_if!(addresses != captured.parameters, OP, "{moved}");
        captured.graph.check(dev, OP)
    }

    fn addresses(&mut self) -> Vec<u64> {
        self.model.parameters().iter().map(|parameter| parameter.view().address()).collect()
    }

    /// Adds NaN to the sums if the last norm was not finite.
    fn halt(&mut self, dev: &Device) -> Result<()> {
        let own = (0..self.exchange.buckets()).map(|bucket| (bucket, self.exchange.part(bucket)));
        let Some((bucket, part)) = own.into_iter().find(|(_, part)| !part.is_empty()) else { return Ok(()) };
        let at = self.slots[bucket].start + part.start / CHUNK;
        let last = dev.cast::<f64, _>(&self.norm)?;
        dev.axpy(0.0, &last, &mut self.sums.slice_mut(at..at + 1))
    }
}
