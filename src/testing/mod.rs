//! Testing multi-GPU code without a GPU.

mod fault_plan;

pub use fault_plan::{BadFaultPlan, FaultOp, FaultPlan, FaultRule, Fired, Injected};
pub(crate) use fault_plan::{Release, Verdict};
