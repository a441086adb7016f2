#![doc = include_str!("../README.md")]

pub mod check;
mod explore;
pub mod faulty;
mod observer;
pub mod prelude;
#[cfg(test)]
#[path = "../tests/unit/texts.rs"]
pub(crate) mod texts;
pub mod topology;
mod twins;

pub use check::Check;
pub use explore::{Cause, Explored, Explorer, Failure, explore};
pub use faulty::{BadFaultPlan, FaultOp, FaultPlan, FaultRule, Injected, InjectedFault};
#[doc(hidden)]
pub use gpu_pool::extend::lab::{FailPoint, count_meetings_from};
pub use observer::install;
#[doc(hidden)]
pub use observer::watching;
pub use topology::Topology;
pub use twins::{TwinInput, TwinInputs, twins};
