//! Memory settings of a pool: the builder collects them, and each cache of the pool keeps them.

use crate::{
    contain::Contained,
    memory::{BackingChoice, OutOfMemoryReport, numa::Node},
};
use std::{sync::Arc, time::Duration};

/// How much memory a pool may take from a device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemoryLimit {
    Bytes(u64),
    Percent(f64),
}

impl MemoryLimit {
    pub(crate) fn of(self, total: u64) -> u64 {
        match self {
            MemoryLimit::Bytes(bytes) => bytes,
            MemoryLimit::Percent(percent) => (total as f64 * percent / 100.0) as u64,
        }
    }
}

/// Most attempts that the out-of-memory callback may ask for.
pub(crate) const ATTEMPTS: usize = 16;

/// It returns whether to try again.
#[derive(Clone)]
pub(crate) struct OnOutOfMemory(pub(crate) Contained<Arc<Callback>>);

type Callback = dyn Fn(&OutOfMemoryReport) -> bool + Send + Sync;

debug_as!(OnOutOfMemory, |self| "a callback");

#[derive(Clone, Debug, Default)]
pub(crate) struct Settings {
    pub(crate) limit: Option<MemoryLimit>,
    /// Most bytes to take, as a multiple of the highest use so far. Beyond it free memory is moved instead.
    pub(crate) slack: Option<f64>,
    pub(crate) node: Option<Node>,
    pub(crate) reserve: Option<u64>,
    pub(crate) deadline: Duration,
    pub(crate) choice: BackingChoice,
    pub(crate) on_out_of_memory: Option<OnOutOfMemory>,
    pub(crate) record: Option<bool>,
    pub(crate) audit: bool,
    /// Each has a lane of its own in the remote free list.
    pub(crate) devices: usize,
}

impl Settings {
    pub(crate) fn records(&self) -> bool {
        self.record.unwrap_or(cfg!(debug_assertions))
    }
}
