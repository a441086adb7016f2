//! Scopes, state on devices, buffers, copies, events and cudarc's side: what every program uses, on software GPUs and on
//! real ones.

#[path = "../support/mod.rs"]
mod support;

mod buffers;
mod copies;
mod events;
#[cfg(feature = "cuda")]
mod interop;
mod per_device;
mod scope;
