//! Gradient exchange: buckets that are reduced on a stream of their own while the backward pass goes on.
//!
//! [`layout`] says which gradient lies where, [`access`] gives it to the backward pass, [`marks`] how far a [`step`]
//! is, [`start`] sends a bucket on its way, by [`kernels`] for the types of [`element`]; [`settings`] is what members
//! agree on, and [`together`] what they do besides. Nothing below this floor knows of gradients: a bucket is an
//! [`all_reduce`](Device::all_reduce) of a group.

mod access;
mod element;
mod exchanged;
mod kernels;
mod layout;
mod marks;
mod settings;
mod start;
mod step;
mod together;

pub use element::Gradient;
pub use exchanged::Exchanged;
pub use settings::{GradientExchangeBuilder, Wire};

use crate::{
    Device, DeviceBuffer, DeviceCopy, Event, Group, ReduceOp, Stream,
    error::{Error, Result},
    fabric::call::Origin,
    gang::Gang,
    memory::handle::DeviceHandle,
};
use layout::{Layout, Unit};
use marks::Marks;
use settings::Settings;
use smallvec::SmallVec;
use start::{Scratch, Sums};
use std::sync::Arc;

/// One device's part in the exchange of gradients, step after step: keep it in a [`PerDevice`](crate::PerDevice).
///
/// Gradients live in buckets, one behind the other, so nothing is flattened: [`grad_mut`](Self::grad_mut) is where the
/// backward pass writes. When the last gradient of a bucket is [`ready`](Self::ready), the bucket is reduced on a
/// stream of its own, beside the rest of the backward pass; [`finish`](Self::finish) makes the current stream wait for
/// all of them. No call waits for the devices (but where sums are the host's,
/// [`Algorithm::Host`](crate::Algorithm::Host)); `ready`, where it starts a bucket, and `finish` meet the other
/// members' hosts.
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
/// **Types.** `f32`, or another by [`of`](GradientExchangeBuilder::of): `f64`, `half::f16`, `half::bf16`, each as it is
/// or on a narrower [wire](GradientExchangeBuilder::wire). Half types are added up in `f32` and rounded once.
///
/// **Groups.** The members are the gang, or those of a [`Group`] by [`build_in`](GradientExchangeBuilder::build_in):
/// then "all members" is that group here, and "rank 0" its first. A device may have several exchanges, say one for each
/// dimension of a grid, or two of one group. Then all devices must start the buckets of all exchanges in one order, as
/// with all collectives, and [`finish`](Self::finish) and [`join`](Self::join) in one order, too: finish a step of the
/// one before the other's first `ready`, or make gradients ready in the same order everywhere. Exchanges know each
/// other: members that use two of one group in different orders get [`Error::Mismatch`] (`"exchange"`, or `"group"` if
/// the groups differ), and nothing is mixed up. Where no two devices see it, in a ring of groups, they wait for each
/// other until the [deadline](crate::Builder::timeout).
///
/// **The same weights.** [`broadcast_parameters`](Self::broadcast_parameters) gives all members those of one, as DDP
/// does at the start; [`verify_parameters`](Self::verify_parameters) finds out whether they still are the same.
///
/// **Unused parameters** are no error: a gradient that a member does not make ready counts as zero, and
/// [`Exchanged::unused`] names those that nobody had. A member without rows says [`nothing`](Self::nothing). (DDP's
/// "Expected to have finished reduction in the prior iteration" is its best known error.)
///
/// **Uneven batches.** `Avg` gives every member the same weight. Where each has the mean of its own rows, and not as
/// many rows as the others, that is biased towards the rows of small shards: use [`ReduceOp::Scaled`] and
/// [`set_weight`](Self::set_weight) with its rows / all rows. Where members have different numbers of batches,
/// [`join`](Self::join) tells before each step who still has one.
///
/// **Order.** All members start buckets in the order of their numbers, so it does not matter in which order gradients
/// become ready where; a bucket that is complete waits for those before it. After the first step buckets follow the
/// order that rank 0 has had ([`ready_order`](GradientExchangeBuilder::ready_order)).
///
/// **Accumulation.** With [`set_sync(false)`](Self::set_sync) the same calls exchange nothing, and gradients stay;
/// [`holds`](Self::holds) says whether to add to one or to write it. Nothing adds by itself, as autograd does for DDP:
/// what is written over is lost.
///
/// **Graphs.** `ready`, `finish` and `reset` are refused in a [capture](Device::capture), which changes nothing of the
/// step. A graph may write gradients, and they are made ready behind its launch; but it writes where they were when it
/// was captured, and after the first step they move ([`Exchanged::moved`]). A graph that names memory which gradients
/// have left (also by a [`reset`](Self::reset), or when the exchange is dropped) is [`Error::GraphInvalidated`] at its
/// next launch, and nothing of it runs. Capture after the first step that was exchanged, or build with
/// [`ready_order(false)`](GradientExchangeBuilder::ready_order). Memory that is [lent](Self::lend) after a capture is
/// not what the graph writes to.
///
/// **Your own buffers.** [`ready_from`](Self::ready_from) takes a buffer in place of the bucket's memory, and
/// [`take`](Self::take) gives it back with the result. A bucket with such gradients is packed and unpacked by one
/// kernel each (for up to 64 of them), not by one for each gradient. That they are given away, not borrowed, is why
/// nobody can change them meanwhile.
///
/// **Bits.** With [`Wire::Same`] a gradient has the bits that [`Device::all_reduce`] of its bucket gives, and all
/// members have the same, in every run. (Around a ring, as large buckets go, sums are added up in another order from
/// place to place and depend on the bucket; [`ReduceOrder::Rank`](crate::ReduceOrder) ends that.) Norms are sums in
/// `f64` in a fixed order.
///
/// **Failures.** What fails in a step ends it: until [`reset`](Self::reset), which all members call, everything is
/// [`Error::InvalidArgument`]. That includes a scope that fails between the first `ready` of a step and its end, also
/// for members whose part had returned; [`clear_poison`](crate::PerDevice::clear_poison) alone does not mend it. Wrong
/// calls that touch nothing (a gradient that is not there, or ready twice) leave the step as it is.
pub struct GradientExchange<T: Gradient = f32> {
    /// Which exchange it is, as all members know it.
    id: Origin,
    settings: Settings,
    sizes: Box<[usize]>,
    layout: Layout,
    marks: Marks,
    /// The buckets. Each has memory of its own: what is noted of its uses is not mixed up with that of others, and so
    /// the backward pass never waits for a bucket that it does not touch.
    memory: Vec<DeviceBuffer<T>>,
    /// Gradients that lie elsewhere.
    lent: Vec<Option<DeviceBuffer<T>>>,
    scratch: Scratch,
    sums: Option<Sums<T>>,
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
    /// Those of them that exchanged: also without [`find_unused`](GradientExchangeBuilder::find_unused) as many on all
    /// members.
    exchanges: u64,
    unused: Vec<usize>,
    device: Arc<DeviceHandle>,
    /// Ordinals in the pool, by rank.
    members: Box<[usize]>,
}

crate::sync::device_thread_only! { [T: Gradient] GradientExchange<T> }

impl GradientExchange {
    /// Settings to begin with; for other types than `f32` they go on with [`of`](GradientExchangeBuilder::of).
    pub fn builder() -> GradientExchangeBuilder {
        GradientExchangeBuilder::new()
    }
}

impl<T: Gradient> GradientExchange<T> {
    #[track_caller]
    fn new(group: &Group<'_>, id: Origin, settings: Settings, sizes: &[usize]) -> Result<Self> {
        let weight = match settings.reduce {
            ReduceOp::Scaled(weight) => weight,
            _ => 1.0,
        };
        let layout = first_layout::<T>(&settings, sizes)?;
        let dev = &*group.device().in_order();
        let mut exchange = GradientExchange {
            id,
            marks: Marks::new(&layout),
            memory: buckets(dev, &layout)?,
            device: dev.worker.handle.clone(),
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
            exchanges: 0,
            unused: Vec::new(),
            members: group.ordinals().into(),
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
        self.scratch = Scratch::new(dev, self.settings.wire, T::DTYPE, self.layout.largest())?;
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

    /// What its meetings are for: members that are in another exchange, or not in the same exchange of it, do not
    /// match.
    fn origin(&self) -> Origin {
        self.id.in_step(self.exchanges)
    }

    /// The members, on the stream of `dev`.
    #[track_caller]
    fn group<'d>(&self, dev: &'d Device, op: &'static str) -> Result<Group<'d>> {
        match dev.group_of(&self.members) {
            Some(group) => Ok(group),
            None => {
                let (members, present) = (&self.members, dev.session.gang.members());
                let why = format_args!("it was made by devices {members:?}, and this gang is of {present:?}");
                Err(Error::invalid(op, why))
            }
        }
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
}

/// The layout before any order is known.
#[track_caller]
fn first_layout<T>(settings: &Settings, sizes: &[usize]) -> Result<Layout> {
    let order: Vec<usize> = (0..sizes.len()).rev().collect();
    Layout::new(Unit::of::<T>(), sizes, &order, settings.bucket_sizes())
}

/// Zeros for all buckets.
#[track_caller]
fn buckets<T: DeviceCopy>(dev: &Device, layout: &Layout) -> Result<Vec<DeviceBuffer<T>>> {
    let mut memory = Vec::with_capacity(layout.buckets.len());
    for bucket in &layout.buckets {
        memory.push(dev.zeros(bucket.len)?);
    }
    Ok(memory)
}

/// Nobody looks at this memory any more; graphs that were captured with it are not to be launched as if somebody did.
fn retire<T: DeviceCopy>(memory: &DeviceBuffer<T>) {
    memory.block.retire();
}

impl<T: Gradient> Drop for GradientExchange<T> {
    fn drop(&mut self) {
        self.memory.iter().chain(self.lent.iter().flatten()).for_each(retire);
        if let Some(sums) = &self.sums {
            retire(&sums.norm);
        }
    }
}

impl<T: Gradient> std::fmt::Debug for GradientExchange<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GradientExchange")
            .field("gradients", &self.len())
            .field("buckets", &self.buckets())
            .field("device", &self.device.device)
            .finish_non_exhaustive()
    }
}
