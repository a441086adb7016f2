//! The times of software GPUs: machines in virtual time, and their clocks.
//!
//! `gpu-pool-lab` has machines and clocks. `step` has streams' times, the clock those of shared resources and threads.

use super::HostConfig;
use crate::{
    driver::LaunchDims,
    error::{Result, Site},
};
use std::{any::Any, fmt, thread::ThreadId};

/// Virtual time since the machine was made, in picoseconds.
pub type Time = u64;

/// A machine whose operations take the time that its clock gives.
pub trait Machine: fmt::Debug + Send + Sync {
    /// The devices, with their memory sizes, names and peer rights.
    fn configs(&self) -> Vec<HostConfig>;

    /// Checks the machine.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) at `site` names the first mistake.
    fn validate(&self, site: Site) -> Result<()>;

    /// A clock at time 0, of a valid machine.
    fn clock(&self) -> Box<dyn Clock>;
}

/// The clock of one machine.
pub trait Clock: Send {
    /// A thread submits an operation. Adds the cost of the call to the thread's time, and returns the time at which the
    /// operation is in its stream.
    fn submit(&mut self, thread: ThreadId, cost: &Cost) -> Time;

    /// A thread makes another call.
    fn call(&mut self, thread: ThreadId, call: HostCall);

    /// A thread continues after something that ended at `time`.
    fn raise(&mut self, thread: ThreadId, time: Time);

    /// The thread's time; 0 before its first call.
    fn now(&self, thread: ThreadId) -> Time;

    /// The start of an operation of `device` if it were booked now. `ready` is the latest of its submission, the end of
    /// its predecessor in the stream, and the end of the work that it waits for.
    fn start(&self, device: usize, cost: &Cost, ready: Time) -> Time;

    /// Books engine and ports for an operation. Returns its start, equal to [`start`](Self::start), and its end.
    fn book(&mut self, device: usize, cost: &Cost, ready: Time) -> (Time, Time);

    /// Saves the state that the booking of a kernel on `device` changes.
    fn unbooked(&self, device: usize) -> Box<dyn Any + Send>;

    /// Undoes a booking: `before` is from [`unbooked`](Self::unbooked).
    fn restore(&mut self, before: Box<dyn Any + Send>);
}

/// The location of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Page-locked or managed memory.
    Host,
    /// Memory of this device.
    Device(usize),
}

/// The properties of an operation that determine its cost. The device of its stream is a separate argument.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are sizes")]
pub enum Cost {
    /// Any copy: up, down, within (from == to), peer.
    Copy { from: Side, to: Side, bytes: usize },
    /// A fill.
    Fill { bytes: usize },
    /// With the bytes of the arguments that it reads, and of the arguments that it writes.
    Kernel { name: &'static str, dims: LaunchDims, read: usize, written: usize },
    /// `count` products of matrices, whose elements have `size` bytes.
    Gemm { m: usize, n: usize, k: usize, count: usize, size: usize },
    /// A host function.
    HostFunction,
    /// The scheduler has raised `ready` to the time of the awaited record.
    WaitEvent,
    /// A timing event's record.
    Stamp,
    /// A write of a word.
    WriteValue,
    /// A wait for a word.
    WaitValue,
}

/// Calls that cost a host thread time but submit no operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostCall {
    /// Recording an event.
    Record,
    /// The end of a wait.
    Wake,
    /// A query of an event or a stream.
    Query,
}
