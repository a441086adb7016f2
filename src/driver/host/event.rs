//! Events: an event's record is a position in a stream.
//!
//! A record captures how many operations have been submitted to its stream; its work is complete once that many have
//! completed. So a record that needs no time stamp costs the stream nothing, and a wait, which copies the record, is not
//! touched by a later re-record or by the event's end.

use super::slab::Key;
use crate::driver::Fault;
use std::time::Instant;

/// A point in the order of a stream's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// The device of the stream.
    pub device: usize,
    pub stream: Key,
    /// How many operations come before.
    pub seq: u64,
}

pub(super) struct Event {
    pub device: usize,
    pub timing: bool,
    /// The latest record.
    pub record: Option<Record>,
    /// When the latest record was reached, for timing events.
    pub stamp: Option<Instant>,
}

/// How far a record's work is.
pub(super) enum Progress {
    Pending,
    Done,
    /// It never will be: its device was lost first.
    Failed(Fault),
}
