//! The internal interface for the crates of this workspace above this one: `gpu-pool-train`, `gpu-pool-cluster`,
//! `gpu-pool-lab`.
//!
//! **Exempt from semver.** Everything here may change in any release; the crates of one version belong together.
//!
//! Who calls it: those three crates. It re-exports types of lower rooms, and gives methods on [`Device`](crate::Device),
//! [`Group`](crate::Group) and buffers that are no part of the public face, as traits. One module for each crate above.

pub mod cluster;
pub mod lab;
pub mod train;

/// The events of this workspace's crates ([`event!`](crate::event)).
pub mod log {
    pub use crate::{
        contain::contain,
        log::{has_subscriber, is_wanted, write},
    };
    pub use tracing;
}
