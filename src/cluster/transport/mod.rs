//! How payload gets from process to process: the traits of `fabric/transport.rs`.
//!
//! Between GPUs by NCCL; between the hosts' memories by MPI, or by shared memory on one host. Libraries are opened at
//! run time. One conformance suite holds for the transports of the hosts' memory.

#[cfg(all(test, target_os = "linux", not(loom)))]
mod conformance;
#[cfg(any(all(target_os = "linux", not(loom)), all(feature = "mpi", target_os = "macos")))]
mod host;
#[cfg(all(feature = "mpi", any(target_os = "linux", target_os = "macos")))]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
// loom has no memory that two processes map.
#[cfg(all(target_os = "linux", not(loom)))]
pub(crate) mod shm;
