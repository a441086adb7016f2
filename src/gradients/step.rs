//! A step: gradients become ready, buckets start, and the step ends. Invariant: after a failure only `reset` works.

use super::layout::{Layout, Unit};
use super::{Exchanged, GradientExchange, buckets, difference::mismatch, element::Gradient, first_layout, retire};
use crate::{
    Device, DeviceBuffer, Group,
    error::{Error, Result, Site, op_site::OpSite},
    fabric::Call,
};
use smallvec::SmallVec;
use std::sync::Arc;

struct Report {
    step: u64,
    used: Vec<bool>,
    /// The order of readiness, while it is needed.
    order: Option<Vec<usize>>,
    site: Site,
}

impl Report {
    fn to_bytes(&self) -> Vec<u8> {
        let (order, known) = (self.order.iter().flatten(), u64::from(self.order.is_some()));
        let numbers = [self.step, self.used.len() as u64].into_iter();
        let numbers = numbers.chain(self.used.iter().map(|&used| used.into())).chain([known]);
        numbers.chain(order.map(|&at| at as u64)).flat_map(u64::to_le_bytes).collect()
    }

    /// None if the bytes are no report.
    fn of_bytes(bytes: &[u8], site: Site) -> Option<Report> {
        let mut numbers = bytes.chunks(8).map(|eight| Some(u64::from_le_bytes(eight.try_into().ok()?)));
        let mut next = || numbers.next()?;
        let (step, len) = (next()?, next()? as usize);
        let used: Vec<bool> = (0..len.min(bytes.len())).map(|_| next().map(|used| used == 1)).collect::<Option<_>>()?;
        let known = next()? == 1;
        let order: Vec<usize> = std::iter::from_fn(next).map(|at| at as usize).collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        let fits = if known { sorted.into_iter().eq(0..len) } else { order.is_empty() };
        fits.then(|| Report { step, used, order: known.then_some(order), site })
    }
}

#[track_caller]
pub(super) fn failed(op: &'static str) -> Error {
    Error::invalid(op, "a step has failed; all members call `reset` before the next one")
}

impl<T: Gradient> GradientExchange<T> {
    pub(super) fn here<'d>(&self, dev: &'d Device, op: &'static str) -> Result<Group<'d>> {
        self.home.here(dev, op)
    }

    pub(super) fn check(&mut self, dev: &Device, op: &'static str) -> Result<()> {
        self.here(dev, op)?;
        // A gradient that a capture made ready would be exchanged before any launch of the graph has written it.
        dev.not_in_graph(op)?;
        // A failed gang does not finish the step.
        dev.check().inspect_err(|_| self.broken = true)?;
        // Nor does a step continue if a scope that did a part of it has failed since.
        self.broken = self.is_broken();
        fail_if!(self.broken, failed(op));
        Ok(())
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken || self.begun.iter().any(|gang| gang.is_aborted())
    }

    fn note(&mut self, dev: &Device) {
        let gang = &dev.session.gang;
        if !self.begun.iter().any(|known| Arc::ptr_eq(known, gang)) {
            // In this order: a settled gang cannot fail any more.
            self.begun.retain(|known| !known.is_settled() || known.is_aborted());
            self.begun.push(gang.clone());
        }
    }

    /// A gradient is ready: work submitted so far writes it. Starts its bucket, and later ones waiting, when complete.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such gradient, it was ready already in this step, it comes after
    /// [`finish_bucket`](Self::finish_bucket), or in a capture; else those of [`Device::all_reduce`].
    #[track_caller]
    pub fn ready(&mut self, dev: &Device, gradient: usize) -> Result<()> {
        let _here = OpSite::here("ready");
        self.check(dev, "ready")?;
        self.readiness.ready("ready", gradient, &self.layout)?;
        self.note(dev);
        // Without an exchange a later step must still wait for the writes of a stream that the library does not order.
        if !self.sync && dev.is_ordered() {
            return Ok(());
        }
        let bucket = self.layout.extents[gradient].bucket;
        // An event now: later the stream will have more work than the bucket needs.
        let late = self.sync && self.readiness.is_complete(bucket) && self.readiness.is_behind(bucket);
        if late || !dev.is_ordered() {
            let written = dev.record().inspect_err(|_| self.broken = true)?;
            self.written[bucket].push(written);
        }
        if !self.sync {
            return Ok(());
        }
        while let Some(next) = self.readiness.start_next(false) {
            self.start(dev, next).inspect_err(|_| self.broken = true)?;
        }
        Ok(())
    }

    /// [`lend`](Self::lend) and [`ready`](Self::ready) in one call.
    ///
    /// # Errors
    /// Those of both. The buffer is dropped if it could not be lent.
    #[track_caller]
    pub fn ready_from(&mut self, dev: &Device, gradient: usize, memory: DeviceBuffer<T>) -> Result<()> {
        let _here = OpSite::here("ready_from");
        self.check(dev, "ready_from")?;
        self.lend(gradient, memory)?;
        self.ready(dev, gradient)
    }

    /// This member has no gradient in this step, for example because it has no rows. All of its gradients that are not
    /// ready count as zero; but those that it [`holds`](Self::holds) count with their values. Without this call a
    /// [`finish`](Self::finish) with no ready gradient is an error, since that is usually a mistake.
    pub fn nothing(&mut self) {
        self.readiness.nothing();
    }

    fn close(&mut self, dev: &Device) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        while let Some(next) = self.readiness.start_next(true) {
            self.start(dev, next)?;
        }
        self.readiness.close();
        self.closed = true;
        self.start_norm(dev)
    }

    /// Declares that no further gradient becomes ready: starts all buckets that are left, and makes the current stream
    /// wait for this bucket only. So the optimizer can begin with the first bucket while others are being exchanged.
    /// Returns the bucket's gradients. [`finish`](Self::finish) is still needed.
    ///
    /// Where buckets go between processes through the memory of the hosts, the call waits for this bucket and those
    /// before it, and all members of a process call it with the same buckets in one order.
    ///
    /// # Errors
    /// Those of [`finish`](Self::finish); [`Error::InvalidArgument`] for a missing bucket, and without exchange.
    #[track_caller]
    pub fn finish_bucket(&mut self, dev: &Device, bucket: usize) -> Result<&[usize]> {
        let _here = OpSite::here("finish_bucket");
        self.check_end(dev, "finish_bucket")?;
        invalid_if!(bucket >= self.buckets(), "finish_bucket", "bucket {bucket} of {}", self.buckets());
        invalid_if!(!self.sync, "finish_bucket", "this step exchanges nothing (`set_sync`)");
        self.close(dev).inspect_err(|_| self.broken = true)?;
        self.land(dev, bucket).inspect_err(|_| self.broken = true)?;
        // `finish` waits for it, too: it may be on another stream.
        if let Some(reduced) = self.reduced[bucket].clone() {
            dev.wait(&reduced).inspect_err(|_| self.broken = true)?;
            self.readiness.over(bucket, &self.layout);
        }
        Ok(self.bucket(bucket))
    }

    #[track_caller]
    fn check_end(&mut self, dev: &Device, op: &'static str) -> Result<()> {
        self.check(dev, op)?;
        let begun = self.readiness.has_begun() || self.is_empty();
        invalid_if!(!begun, op, "no gradient was ready since the last step; who has none says `nothing`");
        Ok(())
    }

    /// Ends the step. Gradients that are neither ready nor [held](Self::holds) count as zero, all buckets are started,
    /// and later work of the current stream waits for them. All members call it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when nothing was ready since the last step, nor said to be
    /// [`nothing`](Self::nothing); [`Error::Mismatch`] when members are not in the same step, or in another exchange of
    /// theirs; else those of [`Device::all_reduce`].
    #[track_caller]
    pub fn finish(&mut self, dev: &Device) -> Result<Exchanged<'_, T>> {
        let _here = OpSite::here("finish");
        self.check_end(dev, "finish")?;
        if !self.sync {
            self.keep(dev).inspect_err(|_| self.broken = true)?;
            self.readiness.end(true, &self.layout);
            // Counted, too, so that members that leave out different exchanges are detected at the next one.
            self.steps += 1;
            return Ok(Exchanged { exchange: self, exchanged: false });
        }
        // Others depend on these calls: a failure ends the step.
        self.close(dev).inspect_err(|_| self.broken = true)?;
        self.land(dev, self.buckets()).inspect_err(|_| self.broken = true)?;
        self.start_norm(dev).inspect_err(|_| self.broken = true)?;
        self.wait(dev).inspect_err(|_| self.broken = true)?;
        self.moved = false;
        self.meet(dev).inspect_err(|_| self.broken = true)?;
        self.readiness.end(false, &self.layout);
        self.earlier_sums.iter_mut().for_each(|sum| sum.holds = false);
        self.begun.clear();
        (self.closed, self.steps, self.exchanges) = (false, self.steps + 1, self.exchanges + 1);
        Ok(Exchanged { exchange: self, exchanged: true })
    }

    fn wait(&mut self, dev: &Device) -> Result<()> {
        // The last event of each stream covers those before it.
        let mut waited: SmallVec<[i32; 4]> = SmallVec::new();
        for bucket in (0..self.buckets()).rev() {
            let priority = self.settings.priority(bucket);
            if let Some(reduced) = self.reduced[bucket].take().filter(|_| !waited.contains(&priority)) {
                if !dev.stream.comes_after(&reduced.0.stream, reduced.0.covered) {
                    dev.wait(&reduced)?;
                }
                waited.push(priority);
            }
        }
        self.normed.take().map_or(Ok(()), |normed| dev.wait(&normed))
    }

    /// Learns which gradients no member had, and after the first step the order of the buckets.
    #[track_caller]
    fn meet(&mut self, dev: &Device) -> Result<()> {
        let site = OpSite::place();
        if self.ordered && !self.settings.find_unused {
            return Ok(());
        }
        let used = self.readiness.used().to_vec();
        // A member without gradients has seen no order.
        let seen = !self.ordered && used.iter().any(|used| *used);
        let order = seen.then(|| self.readiness.order((0..self.len()).rev()));
        let group = self.group(dev, "finish")?;
        let report = Report { step: self.steps, used, order, site };
        let all = match group.spans_processes() {
            false => group.exchange_from(self.origin(), Arc::new(report))?,
            true => {
                let call = Call::new("finish").from(self.origin());
                let all = group.exchange_bytes(&call, report.to_bytes())?;
                let all = all.iter().map(|bytes| Report::of_bytes(bytes, site).map(Arc::new));
                all.collect::<Option<_>>()
                    .ok_or_else(|| Error::invalid_at(site, "finish", "another process has sent no report"))?
            }
        };
        let other_step = |&rank: &usize| all[rank].step != all[0].step;
        // Different lengths mean different exchanges; the meeting itself tells exchanges apart only by a hash.
        let other_list = |&rank: &usize| all[rank].used.len() != all[0].used.len();
        let found = (1..all.len()).find(other_list).map(|rank| ("exchange", rank));
        if let Some((what, rank)) = found.or_else(|| Some(("step", (1..all.len()).find(other_step)?))) {
            let call = |report: &Report| match what {
                "step" => format!("finish of step {}", report.step),
                _ => format!("finish of {} gradients", report.used.len()),
            };
            let (first, other) = (&all[0], &all[rank]);
            return Err(mismatch(&group, rank, (what, call(first), call(other)), [first.site, other.site]));
        }
        self.unused.clear();
        let nobodys = |gradient: &usize| all.iter().all(|report| !report.used[*gradient]);
        self.unused.extend((0..self.sizes.len()).filter(|gradient| self.settings.find_unused && nobodys(gradient)));
        match &all[0].order {
            Some(order) if !self.ordered => {
                self.ordered = true;
                self.reorder(dev, order)
            }
            _ => Ok(()),
        }
    }

    fn reorder(&mut self, dev: &Device, order: &[usize]) -> Result<()> {
        let layout = Layout::new(Unit::of::<T>(), &self.sizes, order, self.settings.bucket_sizes())?;
        if layout == self.layout {
            return Ok(());
        }
        let dev = &*dev.in_order();
        let mut memory = buckets(dev, &layout, self.registers(dev)?)?;
        for (old, new) in self.layout.extents.iter().zip(&layout.extents).filter(|(old, _)| old.len > 0) {
            let from = self.memory[old.bucket].slice(old.range());
            dev.copy(&from, &mut memory[new.bucket].slice_mut(new.range()))?;
        }
        self.memory.iter().for_each(retire);
        (self.layout, self.memory, self.moved) = (layout, memory, true);
        self.allocate_scratch(dev)
    }

    /// Starts again after a failure: no gradient is ready or held, all are zero, buckets are as at the start, and steps
    /// exchange ([`set_sync(true)`](Self::set_sync)). All members call it, in a scope that has not failed. Lent memory
    /// stays, with its contents, and so does the [weight](Self::set_weight). A member that calls it without the others
    /// gets an [`Error::Mismatch`] at its next exchange, if there was one before.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in a capture; [`Error::Aborted`], [`Error::OutOfMemory`], the driver's.
    #[track_caller]
    pub fn reset(&mut self, dev: &Device) -> Result<()> {
        let _here = OpSite::here("reset");
        dev.not_in_graph("reset")?;
        dev.check()?;
        self.broken = true;
        let dev = &*dev.in_order();
        let layout = first_layout::<T>(&self.settings, &self.sizes)?;
        if layout != self.layout {
            let memory = buckets(dev, &layout, self.registers(dev)?)?;
            self.memory.iter().for_each(retire);
            self.memory = memory;
            self.layout = layout;
        } else {
            for bucket in &mut self.memory {
                dev.fill(bucket, T::zeroed())?;
            }
        }
        self.allocate_scratch(dev)?;
        (self.sync, self.closed, self.steps, self.exchanges) = (true, false, 0, 0);
        self.ordered = !self.settings.ready_order;
        self.unused.clear();
        self.begun.clear();
        (self.broken, self.moved) = (false, false);
        Ok(())
    }
}
