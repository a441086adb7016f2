//! How bytes travel.
//!
//! * [`host`]: between the caller's pageable memory and a device, through page-locked pieces.
//! * [`peer`]: between devices, directly or staged through the host.
//! * [`route`]: which pairs of devices may copy directly, as probed when the pool is built.

pub(crate) mod host;
pub(crate) mod peer;
pub(crate) mod route;
