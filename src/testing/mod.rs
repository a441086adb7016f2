//! Testing multi-GPU code without a GPU.

mod explore;
mod fault_plan;

pub use explore::{Explored, Explorer, Failure, Why, explore};
pub use fault_plan::FaultPlan;
