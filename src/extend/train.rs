//! The interface for `gpu-pool-train`: operations, optimizers, models over several devices.

#[cfg(feature = "insight")]
pub use crate::chrome_trace::{ChromeTrace, Row};
use crate::{
    Device, DeviceBuffer, DeviceCopy, DeviceView, DeviceViewMut, Element, Error, GpuPool, Graph, Group, Kernel,
    LaunchDims, Module, OnStream, PerDevice, ReduceOp, Result, Shard,
    collective::Transfer,
    error::{OpGuard, Site, op_site::OpSite},
    gradients::{Gradient, GradientExchange},
    kernel::{Args, Float, Signature},
    scope,
};
pub use crate::{
    collective::{
        across::PendingReduce,
        algorithm::{
            above::{Addresses, MeetingKernel},
            norm::call::{NormSaved, RowNorm, check_eps, sum_and_norm},
            norm::threads_of_row,
        },
        kernels::{code, eights},
        world::GroupKey,
    },
    driver::{HostArg, HostKernel, KernelArg},
    fabric::{
        call::{Call, Origin},
        descriptor::Area,
        layout::DeviceBarrier,
        parcels::Label,
    },
    gang::{Gang, LastCall},
    gradients::{
        difference::{Difference, mismatch},
        home::Home,
        kernels::{norm, segments, unpack},
        layout::{Bucket, Extent, Layout, Unit},
        parts::{CHUNK, part_of},
    },
    kernel::{builtin::pairwise, real::Real},
    memory::hazard::Access,
    ops::{as_type, as_type_mut, fours_of_packs, lanes, rows_of, same_len, tiles},
    shard::balanced,
};
use smallvec::SmallVec;
use std::{marker::PhantomData, ops::Range};

/// As `kernels/build.py` packs it. It is not given to a pool's builder: a device loads it at its first launch.
pub const fn module(ptx: &'static [u8], cubins: &'static [(u32, &'static [u8])]) -> Module {
    Module::own(ptx, cubins)
}

/// [`LaunchDims::cover`] for kernels with a grid-stride loop, which take any number of elements.
pub fn stride(threads: usize) -> LaunchDims {
    LaunchDims::stride(threads)
}

/// The first steps of an operation on a [`Device`]: the base of the traits that give it operations.
pub trait Operations {
    fn device(&self) -> &Device;

    /// Until the guard is dropped, errors and reports attribute this thread's work to the user's call of `op`.
    #[track_caller]
    fn enter(&self, op: &'static str) -> OpGuard {
        OpSite::here(op)
    }

    /// `len` elements with unspecified contents: old bytes of this process's earlier buffers, or of none.
    #[track_caller]
    fn allocate<T: DeviceCopy>(&self, op: &'static str, len: usize) -> Result<DeviceBuffer<T>> {
        self.device().allocate(op, len)
    }

    ///
    /// # Safety
    /// As for [`Device::launch`].
    #[track_caller]
    unsafe fn launch<S: Signature, A: Args<S>>(&self, kernel: &Kernel<S>, dims: LaunchDims, args: A) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.device().launch(kernel, dims, args) }
    }

    fn everyone(&self) -> Group<'_> {
        self.device().everyone()
    }
}

impl Operations for Device {
    fn device(&self) -> &Device {
        self
    }
}

internals! {
    trait DeviceInternals [] () for Device {
        fn captures[](self: &Self) -> bool = self.recording.is_some();
        /// Whether the pool is one process's part of a cluster.
        fn in_cluster[](self: &Self) -> bool = self.worker.shared.world.is_some();
        /// The id of the scope's gang, which no other of the process has; never 0.
        fn gang[](self: &Self) -> u64 = self.session.gang.id;
        /// Whether the gang with this id has failed.
        fn has_failed[](self: &Self, gang: u64) -> bool = self.worker.failures.borrow().contains(&gang);
        fn everyone[](self: &Self) -> Group<'_>;
        fn group_of[](self: &Self, ordinals: &[usize]) -> Option<Group<'_>>;
        /// The group of this key, if its members of this process are in the gang.
        fn group_by[](self: &Self, key: &GroupKey) -> Result<Option<Group<'_>>>;
        fn allocate[T: DeviceCopy](self: &Self, op: &'static str, len: usize) -> Result<DeviceBuffer<T>>;
        fn not_in_graph[](self: &Self, op: &'static str) -> Result<()>;
        /// Whether the library orders this device's work.
        fn is_ordered[](self: &Self) -> bool;
        /// This device with the library's ordering.
        fn in_order[](self: &Self) -> OnStream<'_>;
        /// Records an event behind all that the stream has by now.
        fn record_early[](self: &Self, op: &'static str) -> Result<()> = self.stream.record_early(op);
        /// Loads an entry of a module now: later it might wait for kernels that wait for this device.
        fn load[](self: &Self, entry: (&'static Module, &'static str)) -> Result<()> =
            self.worker.function(entry.0, entry.1).map(drop);
        /// Until the guard is dropped, errors and reports attribute this thread's work to the call.
        fn enter[](self: &Self, call: LastCall) -> OpGuard = OpSite { op: call.0, site: call.1 }.enter();
    }
}

internals! {
    trait GraphInternals [] () for Graph {
        /// Fails where a launch by this device would fail now.
        fn check[](self: &Self, dev: &Device, op: &'static str) -> Result<()> = self.check(dev, op).map(drop);
    }
}

#[cfg(feature = "cuda")]
internals! {
    trait ModuleInternals [] () for Module {
        fn ptx_text[](self: &Self) -> String;
        fn parameters[](self: &Self, entry: &str) -> Vec<usize>;
    }
}

internals! {
    trait GroupInternals ['d] ('d) for Group<'d> {
        fn here[](self: &Self) -> Group<'d>;
        /// The identity of the group in any later scope.
        fn key[](self: &Self) -> GroupKey;
        fn ordinals[](self: &Self) -> &[usize];
        /// The ordinal of a member in its process.
        fn ordinal[](self: &Self, member: usize) -> usize;
        /// Whether members belong to other processes.
        fn spans_processes[](self: &Self) -> bool;
        fn exchange_bytes[](self: &Self, call: &Call, own: Vec<u8>) -> Result<Vec<Vec<u8>>>;
        /// The sum of a number of each process.
        fn sum_of_processes[](self: &Self, call: &Call, own: usize) -> Result<usize>;
        /// Compares a text of the processes.
        fn agree[](self: &Self, origin: Origin, op: &'static str, site: Site, text: &str) -> Result<()>;
        /// This group, for a token of the same device with another stream.
        fn on['v](self: &Self, via: &'v Device) -> Group<'v>;
        /// The same, whose collectives leave most of the multiprocessors to other work.
        fn beside['v](self: &Self, via: &'v Device) -> Group<'v>;
        /// Identifies something that all members make.
        fn new_exchange[](self: &Self) -> Origin;
        /// Whether kernels of crates above can wait for each other on the devices, and the builder named no algorithm.
        fn kernels_meet[](self: &Self) -> bool;
        fn exchange_from[V: Clone + Send + Sync + 'static](self: &Self, origin: Origin, value: V) -> Result<Vec<V>>;
        /// The result must be [ended](PendingReduce::end).
        fn begin_reduce_scatter[T: Element](
            self: &Self,
            origin: Origin,
            x: DeviceViewMut<'_, T>,
            counts: &[usize],
            op: ReduceOp,
            overlapped: bool,
        ) -> Result<Option<Box<dyn PendingReduce>>>;
        fn all_gather_from[T: Element](
            self: &Self,
            origin: Origin,
            x: DeviceViewMut<'_, T>,
            counts: &[usize],
        ) -> Result<()>;
        /// A sum by a kernel that touches what is in `extra`, too.
        fn sum_by_kernel[T: Element](
            self: &Self,
            call: Call,
            destination: DeviceViewMut<'_, T>,
            extra: Vec<(Area, Access)>,
            kernel: &dyn MeetingKernel,
        ) -> Result<()>;
        /// The same for parts. Without a source, the destinations are the sources.
        fn parts_by_kernel[T: Element](
            self: &Self,
            call: (Call, ReduceOp),
            counts: &[usize],
            source: Option<DeviceView<'_, T>>,
            destination: DeviceViewMut<'_, T>,
            extra: Vec<(Area, Access)>,
            kernel: &dyn MeetingKernel,
        ) -> Result<()>;
        /// Memory of so many elements of each member of several processes, by rank, if all can have it. They wait.
        fn lend[T: Element](self: &Self, call: &Call, len: usize) -> Result<Option<Vec<DeviceBuffer<T>>>>;
        /// A kernel in that memory: `len` elements, which are sources and destinations, and behind them the scratch.
        fn in_lent[T: Element](
            self: &Self,
            call: Call,
            lent: (&mut [DeviceBuffer<T>], usize),
            extra: Vec<(Area, Access)>,
            kernel: &dyn MeetingKernel,
        ) -> Result<()>;
        /// Gives a value to a member. A copy for another process runs on the token's stream.
        fn give_transfer[T: Transfer](self: &Self, call: LastCall, label: Label, value: T, to: usize) -> Result<()>;
        /// Takes it.
        fn take_transfer[T: Transfer](self: &Self, call: LastCall, label: Label, from: usize) -> Result<T>;
    }
}

/// The shard of a member among so many with equal weights.
pub fn shard_of(index: usize, count: usize) -> Shard {
    Shard::new(index, count, None)
}

internals! {
    trait PerDeviceInternals [T: 'static] (T) for PerDevice<T> {
        fn made[](, pool: &GpuPool, f: impl Fn(&Device, Shard) -> Result<T> + Sync) -> Result<Self> =
            PerDevice::made(&pool.shared, f);
        /// Runs `f` on all devices, or on some, each with its value.
        fn each[R: Send](
            self: &Self,
            devices: Option<&[usize]>,
            f: impl Fn(&Device, Shard, &mut T) -> Result<R> + Sync,
        ) -> Result<Vec<R>>;
        fn fill[](self: &Self, op: &'static str, f: impl Fn(&Device, Shard) -> Result<T> + Sync) -> Result<()>;
        /// [`clear_poison`](PerDevice::clear_poison) and [`each`](Self::each) in one scope: a value on whose device it
        /// does not begin keeps its poison, and so does one of which `f` says that it does not stand.
        fn accepting[R: Send](
            self: &Self,
            devices: Option<&[usize]>,
            f: impl Fn(&Device, Shard, &mut T) -> Result<(R, bool)> + Sync,
        ) -> Result<Vec<R>>;
        /// Runs a closure on all devices of the values' pool.
        fn run_scope[R: Send](
            self: &Self,
            op: &'static str,
            f: impl Fn(&Device) -> Result<R> + Sync,
        ) -> Result<Vec<R>> =
            crate::pool::run::Run::new(&self.shared, ()).scope(op, |dev, _| f(dev), scope::as_it_is);
        /// The end of a call that is refused before its scope. Where there are other processes, they have begun theirs,
        /// and would wait in it: so a scope fails here, too, which they hear of. It touches nothing.
        fn refuse[R](self: &Self, error: Error) -> Result<R> = {
            if self.shared.world.is_some() {
                let _ = self.run_scope("refuse", |_| Err::<(), _>(error.clone()));
            }
            Err(error)
        };
    }
}

internals! {
    trait ExchangeInternals [T: Gradient + Float<Acc = f32>] (T) for GradientExchange<T> {
        /// The group of the members, on the stream of `dev`.
        fn group['d](self: &Self, dev: &'d Device, op: &'static str) -> Result<Group<'d>>;
        /// The purpose of a meeting: members of another exchange, or in another step of this one, do not match.
        fn origin[](self: &Self) -> Origin;
        fn is_scattered[](self: &Self) -> bool;
        /// The memory of a bucket, in any state.
        fn memory[](self: &Self, bucket: usize) -> DeviceView<'_, T>;
        /// Elements of a bucket that are the part of a member.
        fn part_of[](self: &Self, bucket: usize, rank: usize) -> Range<usize>;
        /// The lengths of all members' parts of a bucket.
        fn counts[](self: &Self, bucket: usize) -> SmallVec<[usize; 8]>;
        fn layout[](self: &Self) -> &Layout;
        /// Whether the backward pass must add to a gradient: it holds a value where it lies.
        fn must_add[](self: &Self, gradient: usize) -> bool;
        /// Between steps: multiplies what is held, and the gradients of the steps to come.
        fn weigh[](self: &mut Self, dev: &Device, held: f64, piece: f64) -> Result<()>;
    }
}

pub use crate::{collective::point::area, gradients::access::exclusive};

/// The same memory in its own type, which the caller has found by its number.
pub fn in_type<T: DeviceCopy, U: DeviceCopy>(view: DeviceView<'_, T>) -> DeviceView<'_, U> {
    debug_assert_eq!(size_of::<T>(), size_of::<U>());
    DeviceView { block: view.block, address: view.address, len: view.len, of: PhantomData }
}
