//! A step: gradients become ready, buckets start, and the step ends.

use super::{GradientExchange, buckets, first_layout, layout::Layout, marks::Marks};
use crate::{
    Device, DeviceBuffer,
    error::{Error, Result, Site},
    memory::{AsView, DeviceView},
};
use smallvec::SmallVec;
use std::{panic::Location, sync::Arc};

/// What a step has left, from [`GradientExchange::finish`].
#[derive(Debug)]
pub struct Exchanged<'a> {
    exchange: &'a GradientExchange,
    exchanged: bool,
}

impl<'a> Exchanged<'a> {
    /// The root of the sum of the squares of all gradients, as exchanged: one number on the device, with the same bits on all
    /// members. The host has not waited for it. None unless [asked for](super::GradientExchangeBuilder::norm), or when
    /// nothing was exchanged.
    pub fn norm(&self) -> Option<DeviceView<'a, f32>> {
        self.exchange.sums.as_ref().filter(|_| self.exchanged).map(|sums| sums.norm.view())
    }

    /// Gradients that no member had since the last exchange; they are zeros. Empty without
    /// [`find_unused`](super::GradientExchangeBuilder::find_unused), or when nothing was exchanged.
    pub fn unused(&self) -> &'a [usize] {
        if self.exchanged { &self.exchange.unused } else { &[] }
    }

    /// A gradient of all members, as of [`GradientExchange::grad`]: here, too, so that one kernel can read it and the
    /// [norm](Self::norm).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such gradient.
    ///
    /// Clipping, without a copy and without a wait of the host:
    ///
    /// ```
    /// use gpu_pool::{GpuPool, GradientExchange, LaunchDims, Module, kernel};
    /// # static MODULE: Module = Module::ptx("");
    /// kernel! {
    ///     static UPDATE: "clipped_sgd" in MODULE, fn(w: &mut [f32], g: &[f32], norm: &[f32], n: u64, rate: f32, max: f32) |_| {
    ///         let factor = rate * (max / norm[0]).min(1.0);
    ///         w.iter_mut().zip(g).for_each(|(w, g)| *w -= factor * g);
    ///     }
    /// }
    ///
    /// let pool = GpuPool::builder().host(2).module(&MODULE).build()?;
    /// let found = pool.run(|dev, _| {
    ///     let mut gradients = GradientExchange::builder().norm(true).build(dev, &[4])?;
    ///     let mut w = dev.zeros::<f32>(4)?;
    ///     dev.fill(&mut gradients.grad_mut(0)?, 10.0)?;
    ///     gradients.ready(dev, 0)?;
    ///     let step = gradients.finish(dev)?;
    ///     let (g, norm) = (step.grad(0)?, step.norm().expect("asked for"));
    ///     // SAFETY: the kernel reads one number of `norm` and writes within `w`.
    ///     unsafe { dev.launch(&UPDATE, LaunchDims::cover(4), (&mut w, &g, &norm, 4u64, 1.0f32, 1.0f32))? };
    ///     dev.download(&w)
    /// })?;
    /// assert_eq!(found, [[-0.5; 4]; 2]);
    /// # Ok::<(), gpu_pool::Error>(())
    /// ```
    pub fn grad(&self, gradient: usize) -> Result<DeviceView<'a, f32>> {
        self.exchange.grad(gradient)
    }

    /// Whether gradients have moved to other places at the end of this step, which happens at most once (and
    /// again after a [`reset`](GradientExchange::reset)): with [`ready_order`](super::GradientExchangeBuilder::ready_order), at the
    /// end of the first that was exchanged and of which rank 0 had a part. A graph that was
    /// captured before writes to where nobody looks any more; capture it anew.
    pub fn moved(&self) -> bool {
        self.exchanged && self.exchange.moved
    }

    /// Whether gradients were exchanged: not while [`set_sync(false)`](GradientExchange::set_sync) holds.
    pub fn was_exchanged(&self) -> bool {
        self.exchanged
    }
}

/// What members tell each other at the end of a step.
struct Report {
    step: u64,
    used: Vec<bool>,
    /// In which order gradients were ready, while that matters.
    order: Option<Vec<usize>>,
    site: Site,
}

impl GradientExchange {
    /// Whether a step of this exchange can go on, on this device.
    #[track_caller]
    fn check(&mut self, dev: &Device, op: &'static str) -> Result<()> {
        let here = &self.device;
        if here.pool != dev.worker.link.pool {
            return Err(Error::WrongPool { op, device: dev.index(), site: Location::caller() });
        }
        if here.device != dev.index() {
            let (buffer, device) = (here.device, dev.index());
            return Err(Error::WrongDevice { op, buffer, device, site: Location::caller() });
        }
        let members = dev.session.gang.members();
        if *self.members != *members {
            let why =
                format_args!("it was made by a gang of devices {:?}, and this one is of {members:?}", self.members);
            return Err(Error::invalid(op, why));
        }
        // Marked ready by a capture, a gradient would be exchanged before any launch of the graph has written it.
        dev.not_in_graph(op)?;
        // A gang that has failed does not finish the step.
        dev.check().inspect_err(|_| self.broken = true)?;
        // Nor does a step go on of which a part was done in a scope that has failed since.
        self.broken |= self.begun.iter().any(|gang| gang.is_aborted());
        match self.broken {
            true => Err(Error::invalid(op, "a step has failed; all members call `reset` before the next one")),
            false => Ok(()),
        }
    }

    /// Notes that the step has something of this scope.
    fn note(&mut self, dev: &Device) {
        let gang = &dev.session.gang;
        if !self.begun.iter().any(|known| Arc::ptr_eq(known, gang)) {
            // In this order: once all its members have ended, a gang fails no more.
            self.begun.retain(|known| !known.is_recovered() || known.is_aborted());
            self.begun.push(gang.clone());
        }
    }

    /// A gradient is there: written by what was submitted so far. Starts its bucket, and those behind it that waited, when
    /// they are complete.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such gradient, it was ready already in this step, it comes after
    /// [`finish_bucket`](Self::finish_bucket), or in a capture; else those of [`Device::all_reduce`].
    #[track_caller]
    pub fn ready(&mut self, dev: &Device, gradient: usize) -> Result<()> {
        self.check(dev, "ready")?;
        self.marks.ready("ready", gradient, &self.layout)?;
        self.note(dev);
        // Without exchange, whoever goes without the library's ordering is to be waited for all the same, in a later step.
        if !self.sync && dev.is_ordered() {
            return Ok(());
        }
        let bucket = self.layout.places[gradient].bucket;
        // Later the stream has more to do than what the bucket needs.
        let late = self.sync && self.marks.is_complete(bucket) && self.marks.is_behind(bucket);
        if late || !dev.is_ordered() {
            let written = dev.record().inspect_err(|_| self.broken = true)?;
            self.written[bucket].push(written);
        }
        if !self.sync {
            return Ok(());
        }
        while let Some(next) = self.marks.start_next(false) {
            self.start(dev, next).inspect_err(|_| self.broken = true)?;
        }
        Ok(())
    }

    /// [`lend`](Self::lend) and [`ready`](Self::ready) at once.
    ///
    /// # Errors
    /// Those of both. The buffer is dropped if it could not be lent.
    #[track_caller]
    pub fn ready_from(&mut self, dev: &Device, gradient: usize, memory: DeviceBuffer<f32>) -> Result<()> {
        self.check(dev, "ready_from")?;
        self.lend(gradient, memory)?;
        self.ready(dev, gradient)
    }

    /// This member has no gradient in this step, say for want of rows: all of its gradients that are not ready count as zero, but
    /// for those that it [`holds`](Self::holds): these count with what they hold. Without it a [`finish`](Self::finish) for which
    /// nothing was ready is an error, since it mostly is one.
    pub fn nothing(&mut self) {
        self.marks.nothing();
    }

    /// Starts what is left, in order.
    #[track_caller]
    fn close(&mut self, dev: &Device) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        while let Some(next) = self.marks.start_next(true) {
            self.start(dev, next)?;
        }
        self.marks.close();
        self.closed = true;
        self.start_norm(dev)
    }

    /// Nothing more gets ready: starts all buckets that are left, and makes the current stream wait for this one only. So the
    /// optimizer can begin with the first bucket while others are under way. Returns its gradients. [`finish`](Self::finish) is
    /// needed all the same.
    ///
    /// # Errors
    /// Those of [`finish`](Self::finish); [`Error::InvalidArgument`] for a bucket that is not there, and without exchange.
    #[track_caller]
    pub fn finish_bucket(&mut self, dev: &Device, bucket: usize) -> Result<&[usize]> {
        self.check_end(dev, "finish_bucket")?;
        if bucket >= self.buckets() {
            let why = format_args!("bucket {bucket} of {}", self.buckets());
            return Err(Error::invalid("finish_bucket", why));
        }
        if !self.sync {
            return Err(Error::invalid("finish_bucket", "this step exchanges nothing (`set_sync`)"));
        }
        // Not in a closure: errors name the caller's line.
        self.close(dev).inspect_err(|_| self.broken = true)?;
        if let Some(reduced) = self.reduced[bucket].take() {
            dev.wait(&reduced).inspect_err(|_| self.broken = true)?;
            self.marks.over(bucket, &self.layout);
        }
        Ok(self.bucket(bucket))
    }

    #[track_caller]
    fn check_end(&mut self, dev: &Device, op: &'static str) -> Result<()> {
        self.check(dev, op)?;
        match self.marks.has_begun() || self.is_empty() {
            true => Ok(()),
            false => Err(Error::invalid(op, "no gradient was ready since the last step; who has none says `nothing`")),
        }
    }

    /// Ends the step: what is neither ready nor [held](Self::holds) counts as zero, all buckets are started, and the current stream's later work waits for them.
    /// All members call it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when nothing was ready since the last step, nor said to be [`nothing`](Self::nothing);
    /// [`Error::Mismatch`] when members are not in the same step; else those of [`Device::all_reduce`].
    #[track_caller]
    pub fn finish(&mut self, dev: &Device) -> Result<Exchanged<'_>> {
        self.check_end(dev, "finish")?;
        if !self.sync {
            self.marks.end(true, &self.layout);
            // Counted too, so that members which leave out different exchanges find that at the next one.
            self.steps += 1;
            return Ok(Exchanged { exchange: self, exchanged: false });
        }
        // What other members count on: a failure ends the step. Not in a closure: errors name the caller's line.
        self.close(dev).inspect_err(|_| self.broken = true)?;
        self.wait(dev).inspect_err(|_| self.broken = true)?;
        self.moved = false;
        self.meet(dev).inspect_err(|_| self.broken = true)?;
        self.marks.end(false, &self.layout);
        self.begun.clear();
        (self.closed, self.steps) = (false, self.steps + 1);
        Ok(Exchanged { exchange: self, exchanged: true })
    }

    /// Makes the current stream wait for all buckets, and the norm.
    #[track_caller]
    fn wait(&mut self, dev: &Device) -> Result<()> {
        // The last of each stream stands for those before it.
        let mut waited: SmallVec<[i32; 4]> = SmallVec::new();
        for bucket in (0..self.buckets()).rev() {
            let priority = self.settings.priority(bucket);
            if let Some(reduced) = self.reduced[bucket].take().filter(|_| !waited.contains(&priority)) {
                dev.wait(&reduced)?;
                waited.push(priority);
            }
        }
        match self.normed.take() {
            Some(normed) => dev.wait(&normed),
            None => Ok(()),
        }
    }

    /// Learns what nobody had, and after the first step the order of the buckets.
    #[track_caller]
    fn meet(&mut self, dev: &Device) -> Result<()> {
        let site = Location::caller();
        if self.ordered && !self.settings.find_unused {
            return Ok(());
        }
        let used = self.marks.used().to_vec();
        // A member that had nothing has seen no order.
        let seen = !self.ordered && used.iter().any(|used| *used);
        let order = seen.then(|| self.marks.order((0..self.len()).rev()));
        let all = dev.exchange(Arc::new(Report { step: self.steps, used, order, site }))?;
        if let Some(rank) = (1..all.len()).find(|&rank| all[rank].step != all[0].step) {
            let call = |report: &Report| format!("finish of step {}", report.step);
            let (first, other) = (&all[0], &all[rank]);
            let (a, b) = (dev.session.gang.device(0), dev.session.gang.device(rank));
            let (a_call, b_call) = (call(first), call(other));
            return Err(Error::Mismatch { what: "step", a, a_call, a_site: first.site, b, b_call, b_site: other.site });
        }
        self.unused.clear();
        let nobodys = |gradient: &usize| all.iter().all(|report| !report.used[*gradient]);
        self.unused.extend((0..self.sizes.len()).filter(nobodys));
        match &all[0].order {
            Some(order) if !self.ordered => {
                self.ordered = true;
                self.reorder(dev, order)
            }
            _ => Ok(()),
        }
    }

    /// Buckets in another order, with what is in them.
    #[track_caller]
    fn reorder(&mut self, dev: &Device, order: &[usize]) -> Result<()> {
        let layout = Layout::new(&self.sizes, order, self.settings.first_bucket_bytes, self.settings.bucket_bytes)?;
        if layout == self.layout {
            return Ok(());
        }
        let dev = &*dev.in_order();
        let mut memory = buckets(dev, &layout)?;
        for (old, new) in self.layout.places.iter().zip(&layout.places).filter(|(old, _)| old.len > 0) {
            let from = self.memory[old.bucket].slice(old.range());
            dev.copy(&from, &mut memory[new.bucket].slice_mut(new.range()))?;
        }
        (self.layout, self.memory, self.moved) = (layout, memory, true);
        self.furnish(dev)
    }

    /// Begins anew after a failure: no gradient is ready or held, all are zero, buckets are as at the start, and steps exchange
    /// ([`set_sync(true)`](Self::set_sync)). All members call it, in a scope that has not failed. Memory that was lent stays, with
    /// whatever is in it, and so does the [weight](Self::set_weight).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in a capture; [`Error::Aborted`], [`Error::OutOfMemory`], the driver's.
    #[track_caller]
    pub fn reset(&mut self, dev: &Device) -> Result<()> {
        dev.not_in_graph("reset")?;
        dev.check()?;
        self.broken = true;
        let dev = &*dev.in_order();
        let layout = first_layout(&self.settings, &self.sizes)?;
        if layout != self.layout {
            self.memory = buckets(dev, &layout)?;
            self.layout = layout;
        } else {
            for bucket in &mut self.memory {
                dev.fill(bucket, 0.0)?;
            }
        }
        self.furnish(dev)?;
        self.marks = Marks::new(&self.layout);
        (self.sync, self.closed, self.steps) = (true, false, 0);
        self.ordered = !self.settings.ready_order;
        self.unused.clear();
        self.begun.clear();
        (self.broken, self.moved) = (false, false);
        Ok(())
    }
}
