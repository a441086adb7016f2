//! Several processes as one: on one host, one for each GPU; or on many hosts.
//!
//! One address space ends at one process. Beyond it this crate runs on existing engines: NCCL between GPUs, MPI
//! between hosts' memories, shared memory between software GPUs of one host.
//!
//! This room implements the traits of `collective/transport.rs`, and may use every room but `testing`.

mod transport;
