//! Ways to spread the training of one model over several devices.
//!
//! Users call this module. It may use every room below it, and no room below may use it. So far it holds
//! [`Pipeline`], which runs a model in stages, and [`Schedule`]: the order in which its devices work. A schedule is
//! plain data and touches no device.

mod pipeline;
mod schedule;

pub use pipeline::{At, Hop, Pipeline, Stage};
pub use schedule::{Action, Blocked, Costs, MAX_ACTIONS, Peer, Schedule, ScheduleError, Span, Step, Timeline, Work};
