//! Testing multi-GPU code without a GPU.

mod fault_plan;

pub use fault_plan::FaultPlan;
