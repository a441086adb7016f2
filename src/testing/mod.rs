#![doc = include_str!("../../docs/testing.md")]

mod explore;
mod fault_plan;

pub use explore::{Explored, Explorer, Failure, Why, explore};
pub use fault_plan::{BadFaultPlan, FaultOp, FaultPlan, FaultRule, Fired, Injected};
pub(crate) use fault_plan::{Release, Verdict};
