//! How bytes travel: the procedures of copies. The methods of `Device` are in [`device`](crate::device).
//!
//! * [`host`]: between the caller's pageable memory and a device, through page-locked pieces.
//! * [`peer`]: between devices, directly or staged through the host.

pub(crate) mod host;
pub(crate) mod peer;
