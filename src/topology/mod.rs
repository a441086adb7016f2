//! Machines that need not be there: links, engines and what they cost.

/// How a machine is built.
#[derive(Clone, Debug)]
pub struct Topology {}
