//! The interface for `gpu-pool-cluster`: several processes.

pub use super::{ErrorInternals, OpGuard, OpSite, contain, silence_panics};
pub use crate::{
    builder::environment::parse_duration,
    contain::Contained,
    fabric::{
        call::{Call, Origin},
        parcels::Label,
        processes,
    },
    gang::{Alarm, Gang, Outside},
    here::device as device_here,
    stall::StallTimer,
    timeline::WallClock,
    token::op::Op,
};

pub mod variables {
    pub use crate::variables::{NotText, os, text};
}

pub mod driver {
    pub use crate::driver::{Address, Driver, DriverRef, DriverResult, Fault, FaultKind, RawStream, host::in_process};
    #[cfg(feature = "cuda")]
    pub use crate::driver::{cuda, gate::blocking};
}

pub mod memory {
    pub use crate::memory::{
        backing::Region,
        block::{Block, BlockRef, fits_blocks},
        handle::{DeviceHandle, Handover},
        hazard::{Access, Lending},
        stream::StreamCore,
    };
}

pub mod collective {
    pub use crate::{
        collective::{
            across::{AcrossProcesses, Hierarchy, Incoming, Outgoing, PendingReduce, Registration},
            kernels::{Part, fold_on_host},
            lone_pad::{LonePad, SetUp, Trip},
            ops::between,
            point::area,
            request::Request,
            values::value_of,
        },
        fabric::{
            descriptor::{Area, Descriptor, Payload},
            layout::MOST,
            membership::{Across, HostMembers},
            plan::{Counts, Shape, Side, slice},
            tiling::GRAIN,
        },
    };
}

pub mod sync {
    pub use crate::sync::{Flag, Gate, Sequence, byte_ring, journal, load_word, shim, site, store_word};
}

#[cfg(target_os = "linux")]
use self::memory::Lending;
use self::{
    collective::{Across, Descriptor, Part, Payload, Request, Shape},
    driver::Address,
    memory::{BlockRef, DeviceHandle, StreamCore},
    processes::{Connect, ProcessScope, Processes},
};
use crate::{
    Builder, DType, Device, DeviceBuffer, DeviceCopy, Event, Group, OnStream, PinnedBuffer, ReduceOp, Result,
    collective::{Combine, Machine, MeetBy, ReduceOrder, case::Case, choose::choose, kernels, launch, meeting},
    fabric::{DeviceBarrier, limits::multiprocessors},
    memory::{Locality, calls::Entry},
};
use smallvec::SmallVec;
#[cfg(target_os = "linux")]
use std::os::fd::{BorrowedFd, OwnedFd};
use std::{sync::Arc, time::Duration};

internals! {
    trait BuilderInternals [] () for Builder {
        /// The pool is this process's part of what `connect` connects it to.
        fn connect[](self: Self, connect: Arc<dyn Connect>) -> Self = {
            let mut builder = self;
            builder.cluster = Some(connect);
            builder
        };
    }
}

internals! {
    trait DeviceInternals [] () for Device {
        fn deadline[](self: &Self) -> Duration = self.worker.shared.deadline;
        fn is_software[](self: &Self) -> bool = self.worker.is_software();
        fn rank_order[](self: &Self) -> bool = self.worker.shared.reduce_order == ReduceOrder::Rank;
        fn multiprocessors[](self: &Self) -> u32 = multiprocessors(&self.worker.shared.handles);
        fn processes[](self: &Self) -> Option<&Arc<dyn Processes>> = self.worker.shared.world.as_ref();
        /// Its scope's part in a scope of all processes.
        fn process_scope[](self: &Self) -> Option<&Arc<dyn ProcessScope>> = self.session.world.as_ref();
        fn own_gang[](self: &Self) -> &Arc<Gang> = &self.session.gang;
        fn handle[](self: &Self) -> &Arc<DeviceHandle> = &self.worker.handle;
        fn core[](self: &Self) -> &Arc<StreamCore> = &self.stream;
        /// The stream of a device of the pool for messages to other processes. Threads take turns in commit order.
        fn proxy_stream[](self: &Self, device: usize) -> Result<Arc<StreamCore>> =
            self.worker.shared.proxy_stream(device);
        /// `Err` in a capture, and once its gang has failed.
        fn check_outside_graph[](self: &Self, op: &'static str) -> Result<()> = {
            self.not_in_graph(op)?;
            self.check()
        };
        /// `Err` in a capture, which fails: it holds no such call.
        fn refuse_capture[](self: &Self, call: &Call, why: &str) -> Result<()> =
            self.recording.as_ref().map_or(Ok(()), |recording| Err(recording.refuse(call.site, call.op, why)));
        /// Notes a call, for reports on a member that has left or makes no progress. It is not over before the drop.
        fn note_call[](self: &Self, call: &Call) -> Option<Entry<'_>> = meeting::note_call(self, call, &[]);
        /// This device with the library's ordering, even if it is unordered.
        fn in_order[](self: &Self) -> OnStream<'_>;
        fn op[](self: &Self, op: &'static str) -> Result<Op<'_>>;
        fn allocate[T: DeviceCopy](self: &Self, op: &'static str, len: usize) -> Result<DeviceBuffer<T>>;
        /// `len` zeros in a chunk of their own, which can be registered. Without such chunks they are pooled.
        fn zeros_dedicated[T: DeviceCopy](self: &Self, len: usize) -> Result<DeviceBuffer<T>>;
        /// Page-locked memory near the device, with unspecified contents.
        fn pinned_scratch[](self: &Self, op: &'static str, bytes: usize) -> Result<PinnedBuffer<u8>> =
            self.worker.shared.pinned.reused(op, bytes, Locality::Device(self.index()));
        /// On a stream: `into` = the combination of at most [`MOST`](collective::MOST) sources of `n` elements. The
        /// caller orders and notes the uses.
        fn combine[](
            self: &Self,
            on: (&StreamCore, &'static str),
            of: (DType, ReduceOp),
            n: usize,
            factors: &[f64],
            sources: &[Part],
            into: Part,
        ) -> Result<()> = {
            let combine = Combine { n, op: of.1, factors, sources, destinations: &[into], meet: DeviceBarrier::NONE };
            let (entry, args) = (kernels::combine(of.0), combine.args(self.is_software()));
            launch::launch_on(&self.worker, on.0, on.1, &entry, launch::blocks(into.bytes), &args)
        };
    }
}

/// Records an event on a stream. Errors: the driver's.
pub fn record(stream: &Arc<StreamCore>, op: &'static str) -> Result<Event> {
    Event::record(stream, op, false)
}

/// All later work of a stream waits for an event. Errors: the driver's.
pub fn wait_for(stream: &StreamCore, op: &'static str, event: &Event) -> Result<()> {
    stream.wait_event(op, event.0.raw, &event.0.stream, event.0.covered)
}

#[cfg(target_os = "linux")]
internals! {
    /// Memory of several processes.
    trait ForeignMemory [] () for Device {
        /// At least `bytes` zeros in a chunk of their own, with a descriptor by which other processes map it.
        fn apart[](
            self: &Self,
            op: &'static str,
            bytes: usize,
            lending: &Arc<Lending>,
        ) -> Result<(DeviceBuffer<u8>, OwnedFd)>;
        /// The memory of another process, `bytes` bytes with that process's contents.
        fn import_memory[](
            self: &Self,
            op: &'static str,
            bytes: usize,
            memory: BorrowedFd<'_>,
            lending: &Arc<Lending>,
        ) -> Result<DeviceBuffer<u8>> = {
            let block = self.worker.cache.borrow_mut().import(op, bytes, memory, lending)?;
            Ok(DeviceBuffer::new(block, bytes))
        };
    }
}

internals! {
    trait BufferInternals [T: DeviceCopy] (T) for DeviceBuffer<T> {
        fn block[](self: &Self) -> &BlockRef = &self.block;
        /// The first `len` elements of its memory, as another type.
        fn reinterpret[U: DeviceCopy](self: Self, len: usize) -> DeviceBuffer<U> = DeviceBuffer::new(self.block, len);
    }
}

internals! {
    trait PinnedInternals [T: DeviceCopy] (T) for PinnedBuffer<T> {
        fn block[](self: &Self) -> &BlockRef = &self.block;
        fn start[](self: &Self) -> usize = self.start;
        fn ptr[](self: &Self) -> *mut T;
        fn address[](self: &Self) -> Address;
        fn split_off[](self: &mut Self, at: usize) -> PinnedBuffer<T>;
    }
}

internals! {
    trait GroupInternals ['d] ('d) for Group<'d> {
        /// The members by process; none for a group of one process.
        fn across[](self: &Self) -> Option<&Across>;
        /// The members of this process, in the order of their ranks.
        fn here[](self: &Self) -> Group<'d>;
        /// Whether members belong to other processes.
        fn spans_processes[](self: &Self) -> bool;
        /// Carries a collective out, or captures it. Asynchronous on the current stream.
        fn run[](self: &Self, request: Request) -> Result<()>;
        /// The group on a token of the same device, whose collectives leave most of it to other work. Not for captures.
        fn beside['v](self: &Self, via: &'v Device) -> Group<'v>;
        /// Returns what each member tells, by rank.
        fn meet[](self: &Self, call: &Call, payload: Payload) -> Result<SmallVec<[Arc<Descriptor>; 8]>> =
            self.meeting().meet(call.clone(), payload, false);
        /// A collective's blocks that wait for each other, if it leaves most of the device to other work; 0 if none do.
        fn waiting_blocks[](self: &Self, of: (DType, ReduceOp), shape: &Shape) -> u32 = {
            let limits = self.meeting().limits().overlapping();
            let (machine, direct) = (Machine::of(&self.device().worker.shared), self.is_direct());
            let case = Case::new((machine, &limits), (self.count(), direct), of, Some(shape), false);
            let algorithm = choose(&case).0;
            match algorithm.needs(&case).meeting {
                MeetBy::Kernels { .. } => algorithm.blocks(&case),
                _ => 0,
            }
        };
        fn exchange_bytes[](self: &Self, call: &Call, own: Vec<u8>) -> Result<Vec<Vec<u8>>>;
    }
}
