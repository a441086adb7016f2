//! Ways to spread the training of one model over several devices.
//!
//! Users call this module. It may use every room below it, and no room below may use it.
//!
//! * [`DataParallel`]: a replica of a model on each device, and one [`Optimizer`].
//! * [`Schedule`]: the order in which the devices of a pipeline work. A schedule is plain data and touches no device.

mod data_parallel;
mod optim;
mod schedule;

pub use data_parallel::{DataParallel, Gradients, Model};
pub use optim::{LearningRate, Optimizer};
pub use schedule::{Action, Blocked, Costs, MAX_ACTIONS, Peer, Schedule, ScheduleError, Span, Step, Timeline, Work};
