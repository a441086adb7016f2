//! Faults from a plan: a driver around a driver that fails when it is told to.
//!
//! # Contract
//!
//! * Without a rule that fires, a wrapped device does what the one inside does; `as_any` and `checker` are the inner
//!   one's.
//! * Calls are counted and judged in the order in which they come ([`FaultPlan`]). A call that is to fail is not made,
//!   but for frees, destructions and waits: memory is given back, and what runs is waited for, before the fault is
//!   reported.
//! * A sticky fault stays: all later calls on the device report it, and so do calls on other devices that concern its
//!   events. What was submitted before runs to its end inside, so nothing dangles. A launch that is to fail is
//!   accepted, and the next call reports it, as with CUDA.
//! * A stuck stream waits for a word in page-locked memory, which is written by
//!   [`FaultPlan::release`](crate::testing::FaultPlan::release) and by the drop of the device.
//! * A peer that lies says that all went well. Of a device's work only direct copies and kernels' slices are lied
//!   about.
//!
//! # Mechanism
//!
//! `plan` says what goes wrong, and when; [`testing`](crate::testing) shows it to users. `device` is the layer.
//! `common` is what the devices of one [`wrap`] know of each other: which are lost, and the owners of events and
//! memory. `stuck` holds streams back. `lie` has the bytes that a lying peer delivers. Nothing here knows which driver
//! is inside.

mod calls;
mod common;
mod device;
mod lie;
pub(crate) mod plan;
mod stuck;

use super::DriverRef;
use plan::FaultPlan;
use std::sync::Arc;

/// Puts a plan around these devices, which are of one backend. Rules name them by their place here.
pub fn wrap(drivers: Vec<DriverRef>, plan: &FaultPlan) -> Vec<DriverRef> {
    let common = Arc::new(common::Common::new(&drivers));
    let wrapped = drivers.into_iter().enumerate();
    wrapped.map(|(index, inner)| Arc::new(device::Faulty::new(inner, index, plan, &common)) as DriverRef).collect()
}
