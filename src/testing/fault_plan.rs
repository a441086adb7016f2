//! What is to go wrong, and when.

/// A list of faults.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {}
