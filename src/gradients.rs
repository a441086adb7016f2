//! Gradient exchange: gradients live in buckets, and buckets are reduced on their own stream during the backward pass.
//!
//! Users and `gpu-pool-train` call [`GradientExchange`]. Nothing below this room knows of gradients: a bucket is an
//! [`all_reduce`](Device::all_reduce) of a group. Invariant: all members start the same buckets in the same order.

pub(crate) mod access;
pub(crate) mod difference;
mod earlier_sum;
mod element;
mod exchanged;
pub(crate) mod home;
pub(crate) mod kernels;
pub(crate) mod layout;
pub(crate) mod parts;
mod readiness;
mod replicas;
mod settings;
mod start;
mod step;

use self::{difference::Difference, kernels::Segment};

pub use element::Gradient;
pub use exchanged::Exchanged;
pub(crate) use home::Home;
pub use settings::{GradientExchangeBuilder, Wire};

use crate::{
    Device, DeviceBuffer, DeviceCopy, Event, Group, ReduceOp, Stream,
    collective::{PendingReduce, Registered},
    error::Result,
    fabric::Origin,
    gang::Gang,
};
use earlier_sum::EarlierSum;
use layout::{Layout, Unit};
use readiness::Readiness;
use settings::Settings;
use smallvec::SmallVec;
use start::{Scratch, Sums};
use std::sync::Arc;

/// One device's part in the exchange of gradients, step after step. Keep it in a [`PerDevice`](crate::PerDevice).
///
/// Gradients live in buckets, one behind the other, so nothing is flattened: the backward pass writes to
/// [`grad_mut`](Self::grad_mut). When the last gradient of a bucket is [`ready`](Self::ready), the bucket is reduced on
/// a stream of its own, during the rest of the backward pass. [`finish`](Self::finish) makes the current stream wait
/// for all buckets. No call waits for the devices, except where the host computes the sums
/// ([`Algorithm::Host`](crate::collective::Algorithm::Host)), and between processes (below). `ready` (if it starts a
/// bucket) and `finish` meet the other members' host threads.
///
/// The page "Gradients" of the guide has an example.
///
/// **Types.** `f32`, or another type by [`of`](GradientExchangeBuilder::of): `f64`, `half::f16`, `half::bf16`, each as
/// it is or on a narrower [wire](GradientExchangeBuilder::wire). Half types are summed in `f32` and rounded once.
///
/// **Groups.** The members are the gang, or a [`Group`] by [`build_in`](GradientExchangeBuilder::build_in). "All
/// members" then means that group, and "rank 0" its first member. A device may have several exchanges, for example one
/// for each dimension of a grid, or two in one group. Then all devices must start the buckets of all exchanges in one
/// order, as with all collectives, and call [`finish`](Self::finish) and [`join`](Self::join) in one order: finish a
/// step of one exchange before the first `ready` of the other, or make gradients ready in the same order everywhere.
/// Members that use two exchanges of one group in different orders get [`Error::Mismatch`](crate::Error::Mismatch)
/// (`"exchange"`, or `"group"` if the groups differ), and no data is mixed up. In a ring of groups no two devices can
/// see the difference: they wait for each other until the [deadline](crate::Builder::timeout).
///
/// **Several processes.** The group may be [`Device::world`]. Buckets travel between processes beside the backward
/// pass: over NCCL in the order of the streams; over MPI and shared memory by a thread for each device, which waits for
/// the other processes in place of `ready`. Then `finish` waits on the host until all buckets have come, and an error
/// between processes appears there, or in an earlier call.
///
/// **Equal weights.** [`broadcast_parameters`](Self::broadcast_parameters) gives all members the parameters of one
/// member, as DDP does at the start. [`verify_parameters`](Self::verify_parameters) checks that they are still equal.
///
/// **Unused parameters** are no error. A gradient that a member does not make ready counts as zero;
/// [`Exchanged::unused`] names the gradients that no member had. A member without rows calls
/// [`nothing`](Self::nothing). (DDP's "Expected to have finished reduction in the prior iteration" is its best known
/// error.)
///
/// **Uneven batches.** `Avg` gives every member the same weight. If each member has the mean of its own rows, and
/// members have different numbers of rows, that is biased towards the rows of small shards: use [`ReduceOp::Scaled`]
/// and [`set_weight`](Self::set_weight) with the member's rows / all rows. If members have different numbers of
/// batches, [`join`](Self::join) tells before each step how many members still have one.
///
/// **Order.** All members start buckets in the order of their numbers, so gradients may become ready in any order on
/// any member; a complete bucket waits for those before it. After the first step the buckets follow the order of
/// readiness on rank 0 ([`ready_order`](GradientExchangeBuilder::ready_order)).
///
/// **Accumulation.** With [`set_sync(false)`](Self::set_sync) the same calls exchange nothing, and gradients stay.
/// [`holds`](Self::holds) tells whether to add to a gradient or to write it. Nothing is added automatically, as
/// autograd does for DDP: a gradient that is written over is lost. Half types are different, since sums in them stop
/// growing: the end of such a step adds their gradients up in `f32`, in memory apart (4 bytes for each element, from
/// the first such step on), and leaves zeros. So the next step may write or add, and the sum is rounded once, before it
/// is exchanged. Gradients in [lent](Self::lend) memory stay there.
///
/// **Graphs.** `ready`, `finish` and `reset` are refused in a [capture](Device::capture); the step stays as it is. A
/// graph may write gradients, which are made ready after its launch. But it writes to the addresses at the time of the
/// capture, and gradients move after the first step ([`Exchanged::moved`]). A graph that names memory which gradients
/// have left (also by a [`reset`](Self::reset), or when the exchange is dropped) returns
/// [`Error::GraphInvalidated`](crate::Error::GraphInvalidated) at its next launch, and none of it runs. So capture
/// after the first step that was exchanged, or build with [`ready_order(false)`](GradientExchangeBuilder::ready_order).
/// If memory is [lent](Self::lend) after a capture, the graph does not write to it.
///
/// **Your own buffers.** [`ready_from`](Self::ready_from) takes a buffer in place of the bucket's memory, and
/// [`take`](Self::take) gives it back with the result. One kernel packs all such gradients of a bucket (up to 64 of
/// them), and one unpacks them. The buffer is given away, not borrowed, so no code can change it meanwhile.
///
/// **Bits.** With [`Wire::Same`] a gradient has the bits of [`Device::all_reduce`] of its bucket. All members have the
/// same bits, in every run. (Around a ring, as large buckets go, the order of additions depends on the position in the
/// bucket; [`ReduceOrder::Rank`](crate::collective::ReduceOrder) avoids that.) Norms are `f64` sums in a fixed order.
///
/// **Failures.** A failure in a step ends the step: every call returns
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) until all members call [`reset`](Self::reset). That
/// includes a scope that fails between the first `ready` of a step and its end, also for members whose closure had
/// returned; [`clear_poison`](crate::PerDevice::clear_poison) alone does not repair it. Wrong calls that touch nothing
/// (an unknown gradient, or one that is ready twice) leave the step as it is.
pub struct GradientExchange<T: Gradient = f32> {
    id: Origin,
    settings: Settings,
    sizes: Box<[usize]>,
    layout: Layout,
    readiness: Readiness,
    /// The buckets. Each has memory of its own, so that uses of one bucket are not noted for another, and the backward
    /// pass never waits for a bucket that it does not touch.
    memory: Vec<DeviceBuffer<T>>,
    lent: Vec<Option<DeviceBuffer<T>>>,
    /// By bucket: sums of steps that exchanged nothing, in half types.
    earlier_sums: Vec<EarlierSum>,
    /// The factor of a step's gradients in these sums.
    piece: f32,
    scratch: Scratch,
    sums: Option<Sums<T>>,
    /// Of the memory that is exchanged with other processes, if the pool's builder asked for it.
    registered: Vec<Registered>,
    streams: Vec<(i32, Stream)>,
    /// By bucket: events behind the writes of its gradients. One event if the bucket had to wait for earlier ones; one
    /// per gradient if the library does not order the writer's stream.
    written: Vec<SmallVec<[Event; 1]>>,
    reduced: Vec<Option<Event>>,
    /// By bucket: on its way between processes.
    travelling: Vec<Option<Box<dyn PendingReduce>>>,
    normed: Option<Event>,
    weight: f64,
    sync: bool,
    closed: bool,
    /// Gangs in which parts of this step were done, and which may have failed.
    begun: SmallVec<[Arc<Gang>; 1]>,
    moved: bool,
    ordered: bool,
    broken: bool,
    steps: u64,
    /// Equal on all members, also without [`find_unused`](GradientExchangeBuilder::find_unused).
    exchanges: u64,
    unused: Vec<usize>,
    home: Home,
    rank: usize,
}

crate::sync::device_thread_only! { [T: Gradient] GradientExchange<T> }

impl GradientExchange {
    /// Default settings. For other types than `f32` continue with [`of`](GradientExchangeBuilder::of).
    pub fn builder() -> GradientExchangeBuilder {
        GradientExchangeBuilder::new()
    }
}

impl<T: Gradient> GradientExchange<T> {
    fn new(group: &Group<'_>, id: Origin, settings: Settings, sizes: &[usize]) -> Result<Self> {
        let weight = match settings.reduce {
            ReduceOp::Scaled(weight) => weight,
            _ => 1.0,
        };
        let layout = first_layout::<T>(&settings, sizes)?;
        let dev = &*group.device().in_order();
        let mut exchange = GradientExchange {
            id,
            readiness: Readiness::new(&layout),
            memory: buckets(dev, &layout, settings.register && group.registers())?,
            lent: sizes.iter().map(|_| None).collect(),
            earlier_sums: Vec::new(),
            piece: 1.0,
            scratch: Scratch::Same,
            sums: None,
            registered: Vec::new(),
            streams: Vec::new(),
            written: Vec::new(),
            reduced: Vec::new(),
            travelling: Vec::new(),
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
            home: Home::of(group),
            rank: group.rank(),
            sizes: sizes.into(),
            layout,
            settings,
        };
        exchange.allocate_scratch(dev)?;
        Ok(exchange)
    }

    /// Makes what depends on the layout, except the buckets' memory: nothing is ready then.
    fn allocate_scratch(&mut self, dev: &Device) -> Result<()> {
        self.readiness = Readiness::new(&self.layout);
        let register = self.registers(dev)?;
        self.scratch = Scratch::new(dev, self.settings.wire, T::DTYPE, self.layout.largest(), register)?;
        if register {
            let group = self.group(dev, "GradientExchange")?;
            // What was registered before leaves its registration when this is done.
            self.registered = match &self.scratch {
                Scratch::Same => self.memory.iter().map(|bucket| group.register(bucket)).collect::<Result<_>>()?,
                Scratch::F32(wire) => vec![group.register(wire)?],
                Scratch::F16(wire) => vec![group.register(wire)?],
                Scratch::Bf16(wire) => vec![group.register(wire)?],
            };
        }
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
        for bucket in 0..buckets.max(1) {
            let priority = self.settings.priority(bucket);
            if !self.streams.iter().any(|(at, _)| *at == priority) {
                self.streams.push((priority, dev.stream_with_priority(priority)?));
            }
        }
        self.written = vec![SmallVec::new(); buckets];
        self.reduced = vec![None; buckets];
        self.travelling = (0..buckets).map(|_| None).collect();
        self.earlier_sums = (0..buckets).map(|_| EarlierSum::default()).collect();
        self.normed = None;
        Ok(())
    }

    fn registers(&self, dev: &Device) -> Result<bool> {
        Ok(self.settings.register && self.group(dev, "GradientExchange")?.registers())
    }

    pub(crate) fn origin(&self) -> Origin {
        self.id.in_step(self.exchanges)
    }

    #[track_caller]
    pub(crate) fn group<'d>(&self, dev: &'d Device, op: &'static str) -> Result<Group<'d>> {
        self.home.group(dev, op)
    }

    /// Number of gradients.
    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Whether it has no gradients.
    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// Number of buckets.
    pub fn buckets(&self) -> usize {
        self.layout.buckets.len()
    }

    /// The gradients of a bucket, in memory order. It changes once, at the end of the first step.
    ///
    /// # Panics
    /// When there is no such bucket.
    #[track_caller]
    pub fn bucket(&self, bucket: usize) -> &[usize] {
        &self.layout.buckets[bucket].gradients
    }
}

/// The layout of the first step: sizes in reverse order.
fn first_layout<T>(settings: &Settings, sizes: &[usize]) -> Result<Layout> {
    let order: Vec<usize> = (0..sizes.len()).rev().collect();
    Layout::new(Unit::of::<T>(), sizes, &order, settings.bucket_sizes())
}

/// Zeroed memory for all buckets. `apart`: each in a chunk of its own.
fn buckets<T: DeviceCopy>(dev: &Device, layout: &Layout, apart: bool) -> Result<Vec<DeviceBuffer<T>>> {
    layout.buckets.iter().map(|bucket| zeros(dev, bucket.len, apart)).collect()
}

fn zeros<T: DeviceCopy>(dev: &Device, len: usize, apart: bool) -> Result<DeviceBuffer<T>> {
    if apart { dev.zeros_dedicated(len) } else { dev.zeros(len) }
}

/// Marks memory that the exchange has left: graphs that were captured with it must not be launched any more.
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

debug_as! {
    GradientExchange<T> [T: Gradient], |self|
    gradients = self.len(), buckets = self.buckets(), device = self.home.device.device, ..
}
