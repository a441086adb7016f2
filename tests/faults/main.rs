//! Everything that can go wrong: it is reported in words that name device and place, nobody hangs, and the pool goes
//! on.

#[path = "../support/mod.rs"]
mod support;

mod aborts;
mod closing;
mod deadlines;
#[cfg(feature = "insight")]
mod flight_record;
mod lost;
mod meetings;
mod memory;
// It calls all of the public face.
#[cfg(feature = "blas")]
mod places;
mod plan;
mod refusals;
mod rig;
#[cfg(target_os = "linux")]
mod threads;
#[cfg(feature = "blas")]
mod told;
mod unwinding;
