//! Gradient exchange: buckets that are reduced on a stream of their own while the backward pass goes on.
//!
//! [`layout`] says which gradient lies where, [`marks`] how far a step is, [`start`] sends a bucket on its way, by
//! [`kernels`]; [`settings`] is what members agree on. Nothing below this floor knows of gradients: a bucket is an
//! [`all_reduce`](Device::all_reduce).

mod kernels;
mod layout;
mod marks;
mod settings;
mod start;
mod step;

pub use settings::{GradientExchangeBuilder, Wire};
pub use step::Exchanged;

use crate::{
    Device, DeviceBuffer, DeviceCopy, Event, ReduceOp, Stream,
    error::{Error, Result},
    memory::{AsView, DeviceView, DeviceViewMut, link::Link},
    runtime::gang::Gang,
};
use layout::Layout;
use marks::{Mark, Marks};
use settings::{Settings, check_weight};
use smallvec::SmallVec;
use start::{Scratch, Sums};
use std::{marker::PhantomData, panic::Location, sync::Arc};

/// One device's part in the exchange of gradients, step after step: keep it in a [`PerDevice`](crate::PerDevice).
///
/// Gradients live in buckets, one behind the other, so nothing is flattened: [`grad_mut`](Self::grad_mut) is where the backward
/// pass writes. When the last gradient of a bucket is [`ready`](Self::ready), the bucket is reduced on a stream of its own,
/// beside the rest of the backward pass; [`finish`](Self::finish) makes the current stream wait for all of them. No call waits
/// for the devices; `ready`, where it starts a bucket, and `finish` meet the other members' hosts.
///
/// ```
/// # use gpu_pool::{GpuPool, GradientExchange};
/// let pool = GpuPool::builder().host(2).build()?;
/// let mut state = pool.per_device(|dev, _| GradientExchange::builder().norm(true).build(dev, &[3, 1]))?;
/// let found = state.run(|dev, shard, gradients| {
///     // The backward pass: the last layer first.
///     dev.fill(&mut gradients.grad_mut(1)?, 4.0)?;
///     gradients.ready(dev, 1)?;
///     dev.fill(&mut gradients.grad_mut(0)?, 2.0 * shard.index() as f32)?;
///     gradients.ready(dev, 0)?;
///     let step = gradients.finish(dev)?;
///     let norm = dev.download(&step.norm().expect("asked for"))?;
///     Ok((dev.download(&gradients.grad(0)?)?, norm))
/// })?;
/// assert_eq!(found, vec![(vec![1.0; 3], vec![19f32.sqrt()]); 2]);
/// # Ok::<(), gpu_pool::Error>(())
/// ```
///
/// **What it does not do.** Only `f32` is exchanged, and always by the whole gang that built it. Weights are not broadcast at the
/// start, as DDP does: begin with the same ones, or [`broadcast`](Device::broadcast) them.
///
/// **Unused parameters** are no error: a gradient that a member does not make ready counts as zero, and
/// [`Exchanged::unused`] names those that nobody had. A member without rows says [`nothing`](Self::nothing). (DDP's "Expected to
/// have finished reduction in the prior iteration" is its best known error.)
///
/// **Uneven batches.** `Avg` gives every member the same weight. Where each has the mean of its own rows, and not as many rows as
/// the others, that is biased towards the rows of small shards: use [`ReduceOp::Scaled`] and
/// [`set_weight`](Self::set_weight) with its rows / all rows.
///
/// **Order.** All members start buckets in the order of their numbers, so it does not matter in which order gradients become
/// ready where; a bucket that is complete waits for those before it. After the first step buckets follow the order that rank 0
/// has had ([`ready_order`](GradientExchangeBuilder::ready_order)).
///
/// **Accumulation.** With [`set_sync(false)`](Self::set_sync) the same calls exchange nothing, and gradients stay;
/// [`holds`](Self::holds) says whether to add to one or to write it. Nothing adds by itself, as autograd does for DDP: what is
/// written over is lost.
///
/// **Graphs.** `ready`, `finish` and `reset` are refused in a [capture](Device::capture), which changes nothing of the step. A graph
/// may write gradients, and they are made ready behind its launch; but it writes where they were when it was captured, and after
/// the first step they move ([`Exchanged::moved`]): a graph from before then writes to where nobody looks. Capture after the
/// first step that was exchanged, or build with [`ready_order(false)`](GradientExchangeBuilder::ready_order); likewise after
/// [`reset`](Self::reset).
///
/// **Your own buffers.** [`ready_from`](Self::ready_from) takes a buffer in place of the bucket's memory, and
/// [`take`](Self::take) gives it back with the result. A bucket with such gradients is packed and unpacked by one kernel each (for
/// up to 64 of them), not by one for each gradient. That they are given away, not borrowed, is why nobody can change them meanwhile.
///
/// **Bits.** With [`Wire::Same`] a gradient has the bits that [`Device::all_reduce`] of its bucket gives, and all members have
/// the same, in every run. (Around a ring, as large buckets go, sums are added up in another order from place to place and depend on the
/// bucket; [`ReduceOrder::Rank`](crate::ReduceOrder) ends that.) Norms are sums in `f64` in a fixed order.
///
/// **Failures.** What fails in a step ends it: until [`reset`](Self::reset), which all members call, everything is
/// [`Error::InvalidArgument`]. That includes a scope that fails between the first `ready` of a step and its end, also for
/// members whose part had returned; [`clear_poison`](crate::PerDevice::clear_poison) alone does not mend it. Wrong calls that touch
/// nothing (a gradient that is not there, or ready twice) leave the step as it is.
pub struct GradientExchange {
    settings: Settings,
    sizes: Box<[usize]>,
    layout: Layout,
    marks: Marks,
    /// The buckets. Each has memory of its own: what is noted of its uses is not mixed up with that of others, and so the
    /// backward pass never waits for a bucket that it does not touch.
    memory: Vec<DeviceBuffer<f32>>,
    /// Gradients that lie elsewhere.
    lent: Vec<Option<DeviceBuffer<f32>>>,
    scratch: Scratch,
    sums: Option<Sums>,
    /// One for each priority.
    streams: Vec<(i32, Stream)>,
    /// By bucket: where its last gradient was written, if it had to wait; where each was, if nothing is noted of that.
    written: Vec<SmallVec<[Event; 1]>>,
    /// By bucket: where it is reduced.
    reduced: Vec<Option<Event>>,
    normed: Option<Event>,
    weight: f64,
    sync: bool,
    /// All buckets were started.
    closed: bool,
    /// Gangs in which something of this step was done, as far as they may have failed.
    begun: SmallVec<[Arc<Gang>; 1]>,
    /// Whether the last step has moved gradients to other places.
    moved: bool,
    /// The order of the buckets is final.
    ordered: bool,
    broken: bool,
    steps: u64,
    unused: Vec<usize>,
    device: Arc<Link>,
    /// The gang's, by rank.
    members: Box<[usize]>,
}

impl GradientExchange {
    /// Settings to begin with.
    pub fn builder() -> GradientExchangeBuilder {
        GradientExchangeBuilder::new()
    }

    #[track_caller]
    fn new(dev: &Device, settings: Settings, sizes: &[usize]) -> Result<Self> {
        let weight = match settings.reduce {
            ReduceOp::Scaled(weight) => weight,
            _ => 1.0,
        };
        let layout = first_layout(&settings, sizes)?;
        let dev = &*dev.in_order();
        let mut exchange = GradientExchange {
            marks: Marks::new(&layout),
            memory: buckets(dev, &layout)?,
            device: dev.worker.link.clone(),
            lent: sizes.iter().map(|_| None).collect(),
            scratch: Scratch::Same,
            sums: None,
            streams: Vec::new(),
            written: Vec::new(),
            reduced: Vec::new(),
            normed: None,
            weight,
            sync: true,
            closed: false,
            begun: SmallVec::new(),
            moved: false,
            ordered: !settings.ready_order,
            broken: false,
            steps: 0,
            unused: Vec::new(),
            members: dev.session.gang.members().into(),
            sizes: sizes.into(),
            layout,
            settings,
        };
        exchange.furnish(dev)?;
        Ok(exchange)
    }

    /// Makes what goes with the layout, besides the buckets' own memory.
    #[track_caller]
    fn furnish(&mut self, dev: &Device) -> Result<()> {
        self.marks = Marks::new(&self.layout);
        self.scratch = Scratch::new(dev, self.settings.wire, self.layout.largest())?;
        if self.settings.norm {
            let mut end = 0;
            let slots: Vec<_> = (self.layout.buckets.iter())
                .map(|bucket| {
                    let start = end;
                    end += kernels::blocks(bucket.len);
                    start..end
                })
                .collect();
            let norm = match self.sums.take() {
                Some(sums) => sums.norm,
                None => dev.zeros(1)?,
            };
            self.sums = Some(Sums { partial: dev.zeros(end)?, slots, norm });
        }
        let buckets = self.layout.buckets.len();
        // The norm needs a stream also where there is no bucket.
        for bucket in 0..buckets.max(1) {
            let priority = self.settings.priority(bucket);
            if !self.streams.iter().any(|(at, _)| *at == priority) {
                self.streams.push((priority, dev.stream_with_priority(priority)?));
            }
        }
        self.written = vec![SmallVec::new(); buckets];
        self.reduced = vec![None; buckets];
        self.normed = None;
        Ok(())
    }

    /// How many gradients there are.
    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// How many buckets there are.
    pub fn buckets(&self) -> usize {
        self.layout.buckets.len()
    }

    /// The gradients of a bucket, in the order of their memory. Changes once, at the end of the first step.
    ///
    /// # Panics
    /// When there is no such bucket.
    #[track_caller]
    pub fn bucket(&self, bucket: usize) -> &[usize] {
        &self.layout.buckets[bucket].gradients
    }

    /// Where the backward pass writes a gradient, and adds to it in further steps if [`holds`](Self::holds).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such gradient, or it is being exchanged.
    pub fn grad_mut(&mut self, gradient: usize) -> Result<DeviceViewMut<'_, f32>> {
        self.marks.check_open("grad_mut", gradient)?;
        Ok(exclusive(self.view(gradient)))
    }

    /// Several at once: what a kernel that writes two gradients needs.
    ///
    /// # Errors
    /// As of [`grad_mut`](Self::grad_mut), and when one is named twice.
    pub fn grads_mut<const N: usize>(&mut self, gradients: [usize; N]) -> Result<[DeviceViewMut<'_, f32>; N]> {
        for (at, &gradient) in gradients.iter().enumerate() {
            self.marks.check_open("grads_mut", gradient)?;
            if gradients[..at].contains(&gradient) {
                return Err(Error::invalid("grads_mut", format_args!("gradient {gradient} is named twice")));
            }
        }
        Ok(gradients.map(|gradient| exclusive(self.view(gradient))))
    }

    /// A gradient: of all members behind [`finish`](Self::finish), this member's own before.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such gradient, or it is being exchanged.
    pub fn grad(&self, gradient: usize) -> Result<DeviceView<'_, f32>> {
        self.marks.check_there("grad", gradient)?;
        Ok(self.view(gradient))
    }

    fn view(&self, gradient: usize) -> DeviceView<'_, f32> {
        match &self.lent[gradient] {
            Some(lent) => lent.view(),
            None => self.memory[self.layout.places[gradient].bucket].slice(self.layout.places[gradient].range()),
        }
    }

    /// Whether a gradient has something from steps that exchanged nothing: then the backward pass adds to it.
    pub fn holds(&self, gradient: usize) -> bool {
        matches!(self.marks.check("holds", gradient), Ok(Mark::Held))
    }

    /// Gives a gradient a memory of the caller's until it is [taken](Self::take) back: [`grad_mut`](Self::grad_mut) and all else is about
    /// that, then. If it had one of that kind, that is dropped.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is no such gradient, it has another length, it is being exchanged, or it
    /// [`holds`](Self::holds) something, which would be lost: write into [`grad_mut`](Self::grad_mut), or exchange it first;
    /// [`Error::WrongDevice`], [`Error::WrongPool`].
    #[track_caller]
    pub fn lend(&mut self, gradient: usize, memory: DeviceBuffer<f32>) -> Result<()> {
        self.marks.check_open("lend", gradient)?;
        if self.holds(gradient) {
            let why = format_args!(
                "gradient {gradient} holds what earlier steps have left; add to it by `grad_mut`, or exchange it first"
            );
            return Err(Error::invalid("lend", why));
        }
        if memory.block.link.pool != self.device.pool {
            return Err(Error::WrongPool { op: "lend", device: self.device.device, site: Location::caller() });
        }
        let (len, wanted) = (memory.len(), self.sizes[gradient]);
        if len != wanted {
            let why = format_args!("{len} elements for gradient {gradient}, which has {wanted}");
            return Err(Error::invalid("lend", why));
        }
        if memory.device() != self.device.device {
            let (buffer, device) = (memory.device(), self.device.device);
            return Err(Error::WrongDevice { op: "lend", buffer, device, site: Location::caller() });
        }
        self.lent[gradient] = Some(memory);
        Ok(())
    }

    /// Gives a memory back that was [lent](Self::lend), with the gradient in it; the bucket's own takes its place. What the
    /// gradient held goes with it: it counts when it is lent and ready again.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there is none, or it is being exchanged.
    pub fn take(&mut self, gradient: usize) -> Result<DeviceBuffer<f32>> {
        self.marks.check_there("take", gradient)?;
        let lent = self.lent[gradient].take();
        if lent.is_some() {
            self.marks.forget(gradient);
        }
        lent.ok_or_else(|| Error::invalid("take", format_args!("gradient {gradient} has no memory of the caller's")))
    }

    /// This member's weight from the next step on, where gradients are [`Scaled`](crate::ReduceOp::Scaled): say the rows it has
    /// of the batch, as a part of all rows. A weight of 0 does not silence a gradient, since 0 times NaN is NaN: a member whose
    /// numbers are not to count says [`nothing`](Self::nothing), and makes none of them ready.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other operations, within a step, and for weights that are not finite.
    pub fn set_weight(&mut self, weight: f64) -> Result<()> {
        if !matches!(self.settings.reduce, ReduceOp::Scaled(_)) {
            return Err(Error::invalid("set_weight", "only what is `Scaled` has weights"));
        }
        self.between_steps("set_weight")?;
        check_weight("set_weight", weight)?;
        self.weight = weight;
        Ok(())
    }

    /// Whether steps from now on exchange what they have. If not, [`ready`](Self::ready) and [`finish`](Self::finish) only keep
    /// the books: gradients stay where they are, for the next step to add to, and what was ready counts as used when gradients
    /// are next exchanged. All members do the same. (DDP's `no_sync`.) If they do not, their numbers of steps differ, and the next
    /// meeting says so by a [`Error::Mismatch`]; with [`find_unused(false)`](GradientExchangeBuilder::find_unused) there is no such
    /// meeting after the first exchange, and nobody compares.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] within a step.
    pub fn set_sync(&mut self, sync: bool) -> Result<()> {
        self.between_steps("set_sync")?;
        self.sync = sync;
        Ok(())
    }

    fn between_steps(&self, op: &'static str) -> Result<()> {
        match self.marks.has_begun() {
            true => Err(Error::invalid(op, "within a step; `finish` ends it")),
            false => Ok(()),
        }
    }
}

/// The layout before any order is known.
fn first_layout(settings: &Settings, sizes: &[usize]) -> Result<Layout> {
    let order: Vec<usize> = (0..sizes.len()).rev().collect();
    Layout::new(sizes, &order, settings.first_bucket_bytes, settings.bucket_bytes)
}

/// Zeros for all buckets.
#[track_caller]
fn buckets(dev: &Device, layout: &Layout) -> Result<Vec<DeviceBuffer<f32>>> {
    let mut memory = Vec::with_capacity(layout.buckets.len());
    for bucket in &layout.buckets {
        memory.push(dev.zeros(bucket.len)?);
    }
    Ok(memory)
}

/// The exclusive borrow is the caller's.
fn exclusive<T: DeviceCopy>(view: DeviceView<'_, T>) -> DeviceViewMut<'_, T> {
    DeviceViewMut { block: view.block, address: view.address, len: view.len, of: PhantomData }
}

impl std::fmt::Debug for GradientExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GradientExchange")
            .field("gradients", &self.len())
            .field("buckets", &self.buckets())
            .field("device", &self.device.device)
            .finish_non_exhaustive()
    }
}
