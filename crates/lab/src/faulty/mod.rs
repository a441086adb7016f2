//! Fault injection: a layer around a driver that fails as a plan says.
//!
//! # Contract
//!
//! * If no rule fires, a wrapped device behaves like the wrapped driver; `as_any` and `checker` are those of the
//!   wrapped driver.
//! * Calls are counted and judged in their order ([`FaultPlan`]). A failing call is not made, except for frees,
//!   destructions and waits: memory is freed, and running work is waited for, before the fault is reported.
//! * A sticky fault stays: all later calls on the device report it, and so do calls on other devices that use its
//!   events. Work that was submitted before runs to its end in the wrapped driver, so no memory dangles. A failing
//!   launch is accepted, and the next call reports it, as in CUDA.
//! * A stuck stream waits for a word in page-locked memory. [`FaultPlan::release`]
//!   and the drop of the device write the word.
//! * A lying peer reports success. Lies concern only direct copies and kernels' slices.
//!
//! `plan` has the rules; `device` is the layer, `common` the state that the devices of one [`wrap`] share. No code here
//! depends on the kind of the wrapped driver.

mod calls;
mod common;
mod device;
mod lie;
mod plan;
mod stuck;

pub use plan::{BadFaultPlan, FaultOp, FaultPlan, FaultRule, Injected, InjectedFault};

use gpu_pool::extend::driver::DriverRef;
use std::sync::Arc;

/// Puts a plan around these devices, which are of one backend. Rules name a device by its index in `drivers`.
pub fn wrap(drivers: Vec<DriverRef>, plan: &FaultPlan) -> Vec<DriverRef> {
    let common = Arc::new(common::Common::new(&drivers));
    let wrapped = drivers.into_iter().enumerate();
    wrapped.map(|(index, inner)| Arc::new(device::Faulty::new(inner, index, plan, &common)) as DriverRef).collect()
}
