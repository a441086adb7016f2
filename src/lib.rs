//! Several GPUs, **one host thread for each GPU**, in one process or in several that work as one.
//!
//! Each GPU has a thread of its own for as long as the pool lives. The thread owns the GPU's context and its memory
//! pool. A closure runs on all GPUs in parallel, each over its [`Shard`] of borrowed data. The threads meet in
//! lock-free ring buffers; data goes from GPU to GPU, ordered by events or by flags that come with it. Where there is
//! no GPU, the same code runs on software GPUs.
//!
//! ```
//! use gpu_pool::{GpuPool, ReduceOp};
//!
//! let batch: Vec<f32> = (0..1000).map(|i| i as f32).collect();
//! let sums: Vec<Vec<f32>> = GpuPool::scope(|dev, shard| {
//!     let x = dev.upload(shard.of(&batch))?;           // this GPU's part of the borrowed batch
//!     let mut s = dev.sum(&x)?;                        // one element, on this GPU's stream
//!     dev.all_reduce(&mut s, ReduceOp::Sum)?;          // with all other GPUs
//!     dev.download(&s)                                 // waits for this stream only
//! })?;                                                 // results in device order
//! assert!(sums.iter().all(|s| s[0] == 499_500.0));
//! # Ok::<(), gpu_pool::Error>(())
//! ```
//!
//! This page is a map. The guide, the measurements and the design are a book in `docs/` of the repository
//! (`.ci/book.sh` builds it into `target/book`).
//!
//! # The crate by task
//!
//! | to | see |
//! |---|---|
//! | build a pool, and run closures on its devices | [`GpuPool`], [`Builder`], [`Backend`], [`PoolReport`] |
//! | make the process-wide pool | [`GpuPool::scope`], [`GpuPool::global`], [`Builder::build_global`] |
//! | work on a device | [`Device`]: memory, copies, streams, operations, collectives |
//! | end a scope from another thread | [`GpuPool::run_until`], [`CancelToken`] |
//! | split data over the devices | [`Shard`], [`Parts`], [`rows_mut`], [`each_mut`] |
//! | keep state on its device between closures | [`PerDevice`] |
//! | have memory on a device | [`DeviceBuffer`], [`DeviceView`], [`DeviceViewMut`], [`DeviceCopy`] |
//! | have memory on the host that copies need not wait for | [`PinnedBuffer`] |
//! | have one address on the host and all devices | [`memory::UnifiedBuffer`] |
//! | see who holds memory | [`memory`]: statistics, snapshots, leaks, reports when it is out |
//! | use several streams, and measure times | [`Stream`], [`OnStream`], [`Event`] |
//! | launch kernels of your own | [`kernel!`], [`mod@kernel`], [`Module`], [`LaunchDims`], [`Device::launch`] |
//! | multiply matrices | [`Device::gemm`], [`Matrix`], [`MatrixMut`] |
//! | combine data of all devices, or of some | [`Device::all_reduce`] and its neighbours, [`Group`], [`ReduceOp`] |
//! | know or choose how that is done | [`GpuPool::explain`], [`collective`]: algorithms, orders of sums |
//! | exchange gradients beside the backward pass | [`gradients`]: [`GradientExchange`](gradients::GradientExchange) |
//! | give independent jobs from any thread to whichever device is free | [`GpuPool::jobs`], [`jobs`] |
//! | give out work to the CPU and devices, in the order of its data | [`GpuPool::tasks`], [`tasks::Value`] |
//! | train a model on all devices | the crate `gpu-pool-train`: `DataParallel`, `Optimizer`, `Pipeline` |
//! | launch many operations as one | [`Device::capture`], [`Graph`] |
//! | work as several processes, on one host or many | the crate `gpu-pool-cluster`, [`Device::world`] |
//! | give values to another device, or process | [`Device::give`], [`Device::take`], [`Transfer`](collective::Transfer) |
//! | share memory with another process | the crate `gpu-pool-cluster` |
//! | call cuBLAS or cudarc with these buffers | [`Device::cuda`], [`interop::Cuda`], [`Device::blocking`] |
//! | test without GPUs: races, orders, faults, virtual time | the crate `gpu-pool-lab` |
//! | have counters for Prometheus and others | [`GpuPool::publish_metrics`] |
//! | know what can go wrong | [`Error`] |
//!
//! Every setting of [`Builder`] has an environment variable where that makes sense; its documentation lists them.
//!
//! # What keeps it safe
//!
//! * `&Device` is the right to use a device. It cannot leave its thread, so there is no "current device" to get wrong.
//! * Each block of memory knows its last uses. Operations on the same memory wait for each other on the GPU, over
//!   streams and devices. No safe program can write a data race.
//! * No operation in flight points at borrowed host memory once its call has returned.
//! * Collectives meet on the host first. Calls that do not match are [`Error::Mismatch`], with both places in the
//!   program, and no buffer is touched.
//! * The first failure ends the others' waits: they get [`Error::Aborted`], the scope returns the cause, and the pool
//!   works again. Every wait has a deadline that means "no progress".
//! * `unsafe` are only launches of your own kernels, uninitialised memory, [`Device::unordered`], and addresses.
//!
//! # Features
//!
//! | feature | default | |
//! |---|---|---|
//! | `cuda` | yes | NVIDIA GPUs. The driver is found at run time; nothing is linked. |
//! | `blas` | yes | [`Device::gemm`]: cuBLAS on GPUs, the `gemm` crate on software GPUs. |
//! | `insight` | yes | Files for viewers: [`memory::MemorySnapshot::memory_viz`], [`tasks::TaskTrace`]. |
//! | `tasks` | yes | [`GpuPool::tasks`]: tasks on the CPU (by rayon) and on devices. |
//! | `dlpack` | no | [`Device::from_dlpack`], [`Device::to_dlpack`]: tensors of numpy, torch and others. |
//! | `nvtx` | no | Ranges of scopes, operations and waits for Nsight Systems, if libnvToolsExt is found. |
//! | `metrics` | no | [`GpuPool::publish_metrics`]: counters and gauges for Prometheus and others. |
//! | `signals` | no | `SIGUSR1` writes a flight record: [`Builder::flight_record_on_signal`]. |
//! | `nvrtc` | no | [`Module::cuda`]: CUDA C++ that is compiled when the pool is built. |
//!
//! GPUs need Linux and an NVIDIA driver of version 535 or newer.
#![cfg_attr(docsrs, feature(doc_cfg))]
// `cargo loom-lint` checks that the modelled code goes through `sync::shim`; the rest may use what it likes.
#![cfg_attr(not(any(test, loom)), deny(clippy::disallowed_methods))]
#![cfg_attr(loom, allow(clippy::disallowed_types, clippy::disallowed_methods))]

#[macro_use]
mod macros;
mod contain;
#[macro_use]
mod log;

// The unit tests of this crate run under the laboratory. Its crate would observe another instance of this one, so they
// compile its source. A package cannot have files of `crates`; it has those that the links in `tests/lab` lead to.
#[cfg(test)]
extern crate self as gpu_pool;
#[cfg(test)]
#[allow(dead_code, unused_imports, reason = "the tests need a part of it")]
#[path = "../tests/lab/src/lib.rs"]
mod lab;

// First: rustdoc shows the methods of `Device` in the order of the modules.
mod device;
mod ops;

#[cfg(doctest)]
#[path = "../tests/unit/book.rs"]
mod book;
mod builder;
#[cfg(feature = "insight")]
mod chrome_trace;
pub mod collective;
mod copy;
#[cfg(feature = "dlpack")]
pub mod dlpack;
pub(crate) mod driver;
pub mod error;
#[doc(hidden)]
pub mod extend;
mod fabric;
mod gang;
pub mod gradients;
mod graph;
mod here;
#[cfg(feature = "cuda")]
pub mod interop;
pub mod jobs;
pub mod kernel;
pub mod memory;
#[cfg(feature = "metrics")]
mod metrics;
mod panics;
pub mod parts;
pub mod per_device;
mod pool;
mod scope;
mod shard;
mod stall;
pub(crate) mod sync;
#[cfg(feature = "tasks")]
pub mod tasks;
mod thread;
mod timeline;
mod token;
mod variables;

pub use self::{
    builder::{Backend, Builder},
    collective::{DType, Element, Group, ReduceOp},
    driver::{DeviceInfo, LaunchDims, module::Module},
    error::{Error, Result},
    gang::cancel::CancelToken,
    graph::Graph,
    kernel::Kernel,
    memory::{
        AsView, AsViewMut, DeviceBuffer, DeviceCopy, DeviceView, DeviceViewMut, PinnedBuffer, event::Event,
        stream::Stream,
    },
    parts::{Parts, each_mut, rows_mut},
    per_device::PerDevice,
    pool::{GpuPool, report::PoolReport, run::DeviceRun, run::Run},
    shard::Shard,
    thread::flight_record::FlightRecord,
    token::{Device, OnStream},
};
/// The crate of `Pod`, which elements of buffers implement.
pub use bytemuck;
/// The version of cudarc whose types this crate's functions take and return.
#[cfg(feature = "cuda")]
pub use cudarc;
/// The crate of the element types [`f16`](half::f16) and [`bf16`](half::bf16).
pub use half;
#[cfg(feature = "blas")]
pub use ops::{Matrix, MatrixMut};

/// Software GPUs: the order of their operations.
pub mod host {
    pub use crate::driver::host::{ExecutionOrder, Step, Trace, What};
}

/// Traces of pools as files: see [`Builder::trace`].
#[cfg(feature = "insight")]
pub mod trace {
    pub use crate::timeline::merge::merge;
}

// The loom models drive private parts of `sync`.
#[cfg(all(test, loom))]
#[path = "../loom_tests/mod.rs"]
mod models;
