#![doc = include_str!("../README.md")]
// `cargo loom-lint` checks that the modelled code goes through `sync::shim`; the rest may use what it likes.
#![cfg_attr(loom, allow(clippy::disallowed_types, clippy::disallowed_methods))]

#[macro_use]
mod contain;

mod builder;
mod builtin;
mod collective;
mod copy;
mod device;
pub mod driver;
pub mod error;
mod event;
mod gradients;
mod graph;
#[cfg(feature = "cuda")]
mod interop;
mod kernel;
mod math;
mod memory;
mod op;
mod parts;
mod patience;
mod per_device;
mod plant;
mod pool;
mod probe;
mod report;
mod runtime;
mod scope;
mod shard;
mod stream;
pub mod sync;
pub mod testing;
pub mod topology;

pub use builder::{Backend, Builder};
pub use builtin::{CastTo, Float};
pub use collective::{Algorithm, DType, Element, Group, ReduceOp, ReduceOrder, Tune};
pub use copy::route::{PeerReport, Route};
pub use device::{Device, DeviceThreadOnly, OnStream};
pub use driver::{DeviceInfo, LaunchDims, check::Check, host::Schedule};
pub use error::{Error, Result, Site};
pub use event::Event;
pub use gradients::{Exchanged, Gradient, GradientExchange, GradientExchangeBuilder, Wire};
pub use graph::Graph;
#[cfg(feature = "cuda")]
pub use interop::{Cuda, CudaMut, CudaRef};
pub use kernel::{Arg, Args, HostAttempt, HostFn, Kernel, Module, Param, Scalar, Signature};
#[cfg(feature = "blas")]
pub use math::Matrix;
pub use memory::{
    AsView, AsViewMut, BackingChoice, BlockInfo, BlockState, CallSite, ChunkInfo, ClassStats, CopySource, DeviceBuffer,
    DeviceCopy, DeviceView, DeviceViewMut, EventKind, Holder, Leak, LeakReport, MemoryClasses, MemoryEvent,
    MemorySnapshot, MemoryStats, OutOfMemoryReport, PeerView, PendingOnStream, PinnedBuffer, UnifiedBuffer,
    UnifiedRows,
};
pub use parts::{EachMut, Parts, RowsMut, each_mut, rows_mut};
pub use per_device::{PerDevice, Ref, RefMut};
pub use pool::{GpuPool, collectives::Explanation};
pub use report::PoolReport;
pub use shard::Shard;
pub use stream::Stream;
pub use topology::Topology;

/// The protocols of `runtime`, for the models in `loom_tests/`.
#[cfg(loom)]
#[doc(hidden)]
pub mod model {
    pub use crate::runtime::{dispatch, gang, job};
}
