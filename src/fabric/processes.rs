//! The door to other processes: `gpu-pool-cluster` implements the traits. Its protocol and transports are unknown here.
//!
//! A *host* is one process of the cluster, with its number; several may run on one machine. A *place* is a device of a
//! host. `collective/across.rs` has the part of the door that groups call.
#![allow(missing_docs, reason = "only the crates above see it, through `extend`")]

use crate::{
    driver::DriverRef,
    error::{Result, Site, WorldCall},
    gang::{Alarm, Gang, Outside},
    timeline::WallClock,
};
use std::{any::Any, fmt, sync::Arc, time::Duration};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    pub host: usize,
    pub device: usize,
}

impl Place {
    /// A call that this device has made, for [`Error::WorldMismatch`](crate::Error::WorldMismatch).
    pub fn call(self, call: String, site: String) -> Box<WorldCall> {
        Box::new(WorldCall { host: self.host, device: self.device, call, site })
    }
}

/// Connects a pool that is being built to the other processes.
pub trait Connect: Send + Sync + fmt::Debug {
    /// Returns when all processes have built their devices. `drivers`: this pool's. Errors:
    /// [`Error::Cluster`](crate::Error::Cluster), [`Error::HostLost`](crate::Error::HostLost),
    /// [`Error::Transport`](crate::Error::Transport).
    fn connect(&self, drivers: &[DriverRef]) -> Result<Arc<dyn Processes>>;
}

/// The processes of a pool's cluster.
pub trait Processes: Send + Sync + fmt::Debug {
    /// The number of this process.
    fn host(&self) -> usize;

    /// The number of devices of each process.
    fn devices(&self) -> &[usize];

    /// This process's part of a scope.
    fn scope(&self, scope: NewScope) -> Arc<dyn ProcessScope>;

    /// For a pool of one device: kernels that wait for other processes' kernels, and give up.
    fn alarm(&self) -> Option<Arc<dyn Alarm>> {
        None
    }

    /// Rank 0's clock now, asked for in half a second at most. None: it is not known.
    fn clock(&self) -> Option<WallClock>;

    /// Tells the other processes about a failure, which has this text in all of them. It does not wait.
    fn tell(&self, failure: &str, words: &str);

    /// `hear` is called when a process [tells](Self::tell) about a failure, or has told. The connection's reader calls
    /// it: it may write a file, no more.
    fn when_told(&self, host: usize, failure: &str, hear: Box<dyn FnOnce(&str) + Send>);

    /// The implementation for groups that span processes: a `Box<dyn AcrossProcesses>` (`collective/across.rs`).
    fn groups(&self) -> &(dyn Any + Send + Sync);
}

pub struct NewScope {
    /// It ends after so long without progress.
    pub deadline: Duration,
    /// Grows while the devices of the scope make progress.
    pub progress: Arc<dyn Fn() -> u64 + Send + Sync>,
    pub site: Site,
    /// Whether it is a scope without a name of all devices of the pool.
    pub counts: bool,
}

/// A gang's part in a scope of all processes. It joins them when it begins, if it has a name, or else at the first call
/// that needs other processes.
pub trait ProcessScope: Outside {
    /// Begins a scope with a name, and waits for its turn among the scopes of all processes. The scope enters the
    /// queues of its devices before the turn is dropped. Errors: those of the cluster.
    fn begin(&self, name: &str, gang: &Arc<Gang>) -> Result<Box<dyn Any>>;

    /// The gang joins the scope of all processes, if it has not. Errors: those of the cluster.
    fn join(&self, gang: &Arc<Gang>) -> Result<()>;

    /// Ends the scope, if the gang has joined one, when all messages are on their way. Errors: a failure elsewhere.
    fn end(&self) -> Result<()>;

    fn as_any(&self) -> &dyn Any;
}
