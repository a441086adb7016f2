//! candle's tensors on several devices with [`gpu_pool`]: one thread for each GPU, in one process.
//!
//! candle has no collectives, and its devices do not know each other. This crate lets its models train data parallel,
//! compute tensor parallel, and serve as jobs of a pool. On software GPUs tensors are candle's CPU tensors.
//!
//! | to | see |
//! |---|---|
//! | have candle's device, and use this crate's operations on it | [`candle_device`], [`enter`] |
//! | use tensors as buffers, and buffers as tensors | [`to_buffer`], [`to_tensor`], [`adopt`] |
//! | train on all devices | [`DataParallel`] |
//! | divide layers | [`ColumnParallel`], [`RowParallel`], [`VocabularyEmbedding`], [`vocabulary_cross_entropy`] |
//! | read parts of weights from a file, and save them | [`Parts`] |
//! | serve a model | [`jobs_with`](gpu_pool::GpuPool::jobs_with), whose state it is |
//! | have collectives of your own | [`all_reduce`], [`all_gather`], [`broadcast`], [`sum_forward`], [`sum_backward`] |
//! | sum, add and norm in one call | [`RowParallel::forward_norm`], [`all_reduce_norm`] |
//!
//! The guide's page "With candle" has programs.
//!
//! # Threads
//! Operations belong to the device whose token [`enter`] has lent to the calling thread. On another thread, or outside
//! of the closure, they are [`Error::NoDevice`]. A tensor of another GPU is an error of candle's or
//! [`Error::Invalid`]; software GPUs' tensors are all candle's CPU tensors, and do not tell.
//!
//! # Features
//! `cuda`: NVIDIA GPUs. candle compiles its kernels with nvcc then.

#[macro_use(debug_as, fail_if, invalid_if)]
extern crate gpu_pool;

mod book;
pub mod collective;
mod data_parallel;
mod device;
mod error;
mod memory;
mod parts;
pub mod tensor_parallel;

pub use collective::{all_gather, all_reduce, all_reduce_norm, broadcast, sum_backward, sum_forward};
pub use data_parallel::DataParallel;
pub use device::{candle_device, enter};
pub use error::{Error, Result};
pub use memory::{Number, adopt, to_buffer, to_tensor};
pub use parts::{Part, PartBuilder, Parts};
pub use tensor_parallel::{ColumnParallel, RowParallel, VocabularyEmbedding, vocabulary_cross_entropy};
