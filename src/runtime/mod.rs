//! The device threads: how work reaches them, in which order, and how a gang fails as one.
//!
//! * [`job`]: a closure borrowed from the caller's frame runs on device threads; the caller always waits.
//! * [`dispatch`]: queues of device threads and the one process-wide order in which gangs enter them.
//! * [`gang`]: the devices that run one scope: abort, cause, commit, recovery.
//! * [`worker`]: the device thread itself and what it owns.
//!
//! `job`, `dispatch` and `gang` are generic over what a device thread owns, so that `loom_tests/` drive this very code
//! with `()` in its place.

#[cfg_attr(loom, deny(clippy::disallowed_types, clippy::disallowed_methods))]
pub(crate) mod dispatch;
#[cfg_attr(loom, deny(clippy::disallowed_types, clippy::disallowed_methods))]
pub(crate) mod gang;
#[cfg_attr(loom, deny(clippy::disallowed_types, clippy::disallowed_methods))]
pub(crate) mod job;
pub(crate) mod presence;
pub(crate) mod turn;
pub(crate) mod wait;
pub(crate) mod worker;
