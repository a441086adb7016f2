//! What every program uses: scopes, state on devices, buffers, copies, events, and cudarc beside them.

#[path = "../support/mod.rs"]
mod support;

mod adopted;
mod buffers;
mod cancel;
mod copies;
#[cfg(feature = "dlpack")]
mod dlpack;
mod events;
#[cfg(feature = "cuda")]
mod interop;
mod per_device;
mod scope;
mod share;
#[cfg(feature = "insight")]
mod trace;
