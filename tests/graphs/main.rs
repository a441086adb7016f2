//! Graphs: what is captured runs when it is launched, as often as it is, ordered like any other operation; its memory
//! is its own as long as it lives; and what cannot be captured is refused without harm.

#[path = "../support/mod.rs"]
mod support;

#[cfg(feature = "blas")]
mod blas;
mod launches;
mod lives;
mod other_devices;
mod refusals;
mod rig;
mod software;
