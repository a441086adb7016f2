//! One process, several GPUs, **one host thread per GPU**. Each device has a thread of its own that lives as long as the
//! pool, owns the context and a memory pool that knows its device. A closure runs on all devices at once over its shard of
//! borrowed data; the threads exchange gradients through lock-free ring buffers and cross-device events. Where there is no
//! GPU the same code runs on software GPUs, so multi-GPU code can be written and tested on a laptop.
//!
//! ```
//! use gpu_pool::{GpuPool, ReduceOp};
//!
//! let batch: Vec<f32> = (0..1000).map(|i| i as f32).collect();
//! let sums: Vec<Vec<f32>> = GpuPool::scope(|dev, shard| {
//!     let x = dev.upload(shard.of(&batch))?;           // this GPU's part of the borrowed batch
//!     let mut s = dev.sum(&x)?;                        // one element, on this GPU's stream
//!     dev.all_reduce(&mut s, ReduceOp::Sum)?;          // ring buffers + cross-device events
//!     dev.download(&s)                                 // waits for this stream only
//! })?;                                                 // results in device order
//! assert!(sums.iter().all(|s| s[0] == 499_500.0));
//! # Ok::<(), gpu_pool::Error>(())
//! ```
//!
//! # Where to begin
//!
//! | | |
//! |---|---|
//! | A pool | [`GpuPool::scope`] on the process-wide pool, which [`Builder::build_global`] sets up; [`GpuPool::builder`] for one of your own, then [`run`](GpuPool::run), [`run_on`](GpuPool::run_on), [`run_mut`](GpuPool::run_mut), [`run_with`](GpuPool::run_with), [`try_run`](GpuPool::try_run) |
//! | Its settings | [`Builder`], with the table of environment variables |
//! | Parts of the data | [`Shard`], [`Parts`] |
//! | A device | [`Device`]: the right to use it, only on its thread |
//! | Memory | [`DeviceBuffer`], [`DeviceView`], [`PinnedBuffer`], [`UnifiedBuffer`]; [`Device::upload`], [`Device::download`], [`Device::copy`] |
//! | What holds the memory | [`Device::stats`], [`Device::memory_snapshot`], [`GpuPool::leaks`], [`OutOfMemoryReport`] |
//! | State between scopes | [`PerDevice`] |
//! | Streams and events | [`Device::stream`], [`Device::on`], [`Event`] |
//! | Kernels | [`kernel!`], [`Module`], [`Device::launch`] |
//! | Collectives | [`Device::all_reduce`] and its like, [`Group`], [`Device::send`], [`Device::recv`], [`Algorithm`] |
//! | Gradients | [`GradientExchange`] |
//! | Graphs | [`Device::capture`], [`Device::launch_graph`], [`Graph`] |
//! | Errors | [`Error`], one for each thing that the caller can do about it |
//! | Tests of your own code | [`testing`]: all orders of operations, and planned faults; [`Builder::check`]: races and overruns |
//! | Machines that are not there | [`topology`]: a pool in virtual time |
//! | The drivers below | [`driver`] |
//!
//! # Features
//!
//! `cuda` (default): NVIDIA GPUs; the driver is found at run time, and nothing is linked. `blas` (default): matrix products.
//! `insight` (default): snapshots of memory as JSON. `nvrtc`: kernels in CUDA C++ are compiled when the pool is built.
//! `topology-files`: machines from TOML files.
#![cfg_attr(docsrs, feature(doc_cfg))]
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
mod here;
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
    UnifiedRows, UnifiedRowsMut,
};
pub use parts::{EachMut, Parts, RowsMut, each_mut, rows_mut};
pub use per_device::{PerDevice, Ref, RefMut};
pub use pool::{GpuPool, collectives::Explanation};
pub use report::PoolReport;
pub use shard::Shard;
pub use stream::Stream;
pub use topology::Topology;

// The loom models drive private parts of `sync` and `runtime`.
#[cfg(all(test, loom))]
#[path = "../loom_tests/mod.rs"]
mod models;

/// The README's examples are tests. It is no part of the documentation: its links are those of the repository.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub mod readme {}
