//! How payload gets from process to process: the traits of `collective/transport.rs`, over libraries that are opened at
//! run time.

#[cfg(feature = "nccl")]
#[allow(dead_code, reason = "the first users are on their way")]
pub(crate) mod nccl;
