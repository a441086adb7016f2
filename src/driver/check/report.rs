//! What the checker says.

use crate::error::Site;
use std::{fmt, ops::Range};

/// What kind of mistake it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Two accesses of the same bytes, one of them a write, that nothing orders.
    Race,
    /// Memory is named that was freed, or that no live buffer holds.
    UseAfterFree,
    /// Memory is freed while an operation that was given it may still run.
    FreeInUse,
    /// Memory of a buffer that was dropped is used by the next one before its last operations are over.
    EarlyReuse,
    /// The host touches page-locked or managed memory without having waited for a device's operation on it.
    HostAccess,
    /// Bytes are read that nobody has written.
    UninitializedRead,
    /// An event is waited for that was never recorded: in CUDA such a wait does nothing.
    UnrecordedEvent,
    /// A kernel wrote through an argument that it declares as read.
    WrongDeclaration,
}

/// One operation, as far as it concerns a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deed {
    /// The operation of the public face, like `copy` or `all_reduce`; or the driver's call where there is none.
    pub op: &'static str,
    /// More of it: a kernel's name, which way a copy goes; may be empty.
    pub detail: String,
    /// Where it was called in the user's code, where that is known.
    pub site: Option<Site>,
    /// The device whose stream it was given to; none for the host's own accesses.
    pub device: Option<usize>,
    /// The stream by its place among the device's streams, in order of creation.
    pub stream: Option<usize>,
    /// Whether it writes.
    pub write: bool,
}

/// The memory that a report is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The device that it belongs to; none for page-locked and managed memory.
    pub device: Option<usize>,
    /// Bytes.
    pub bytes: usize,
    /// The operation that asked for it, and where.
    pub by: Option<(&'static str, Site)>,
    /// Whether it has been freed, and where if that is known.
    pub freed: Option<Option<(&'static str, Site)>>,
}

/// A mistake, and where to look for it. Its `Display` is meant for people.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// What kind of mistake.
    pub kind: Kind,
    /// The operation that was refused.
    pub now: Deed,
    /// The earlier one that it conflicts with.
    pub before: Option<Deed>,
    /// The bytes, relative to the start of the allocation.
    pub bytes: Range<usize>,
    /// The memory.
    pub allocation: Option<Allocation>,
    /// What is missing, in words.
    pub missing: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.missing)
    }
}
