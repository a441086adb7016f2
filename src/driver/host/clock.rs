//! Virtual time without prices: every operation starts when it is ready and takes no time.

use std::{collections::HashMap, thread::ThreadId};

/// Virtual time since the machine was made, in picoseconds.
pub(super) type Time = u64;

/// Where memory is: `Host` is page-locked or managed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Host,
    Device(usize),
}

/// An operation, as far as it has a price.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code)]
pub(super) enum Cost {
    Copy {
        from: Side,
        to: Side,
        bytes: usize,
    },
    Fill {
        bytes: usize,
    },
    Kernel {
        name: &'static str,
        dims: crate::driver::LaunchDims,
        read: usize,
        written: usize,
    },
    #[cfg_attr(not(feature = "blas"), allow(dead_code))]
    Gemm {
        m: usize,
        n: usize,
        k: usize,
    },
    HostFunction,
    WaitEvent,
    Stamp,
    WriteValue,
    WaitValue,
}

/// What a host thread does that costs host time but is no operation of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostCall {
    Record,
    Wake,
    Query,
}

/// The clocks of a machine.
pub(super) struct VirtualClock {
    threads: HashMap<ThreadId, Time>,
}

impl VirtualClock {
    pub fn new(_topology: Option<&crate::topology::Topology>, _devices: usize) -> Self {
        VirtualClock { threads: HashMap::new() }
    }

    pub fn submit(&mut self, thread: ThreadId, _device: usize, _cost: &Cost) -> Time {
        self.now(thread)
    }

    pub fn call(&mut self, _thread: ThreadId, _call: HostCall) {}

    pub fn raise(&mut self, thread: ThreadId, time: Time) {
        let now = self.threads.entry(thread).or_default();
        *now = time.max(*now);
    }

    pub fn now(&self, thread: ThreadId) -> Time {
        self.threads.get(&thread).copied().unwrap_or(0)
    }

    pub fn start(&self, _device: usize, _cost: &Cost, ready: Time) -> Time {
        ready
    }

    pub fn book(&mut self, _device: usize, _cost: &Cost, ready: Time) -> (Time, Time) {
        (ready, ready)
    }
}
