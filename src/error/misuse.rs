//! The checker's report of a mistake, as plain data, and its text.

use super::Site;
use std::{fmt, ops::Range};

/// The kind of a mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Two unordered accesses of the same bytes, one of them a write.
    Race,
    /// An operation uses memory that was freed, or that belongs to no live buffer.
    UseAfterFree,
    /// Memory is freed while an operation on it may still run.
    FreeInUse,
    /// The next buffer uses the memory of a dropped buffer before the last operations on that one are complete.
    EarlyReuse,
    /// The host accesses page-locked or managed memory without a wait for a device's operation on it.
    HostAccess,
    /// An operation reads bytes that were never written.
    UninitializedRead,
    /// A wait for an event that was never recorded: in CUDA such a wait does nothing.
    UnrecordedEvent,
    /// A kernel wrote to an argument that it declares as read-only.
    WrongDeclaration,
    /// Bytes behind the end of a buffer were written. The audit of memory finds this afterwards.
    OutOfBounds,
}

/// One operation in a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// The operation of the public API, like `copy` or `all_reduce`; or the driver's call if there is none.
    pub op: &'static str,
    /// Details: a kernel's name, a copy's direction; may be empty.
    pub detail: String,
    /// The call in the user's code, if known.
    pub site: Option<Site>,
    /// The device of its stream; `None` for accesses of the host.
    pub device: Option<usize>,
    /// The stream's number on its device, in order of creation.
    pub stream: Option<usize>,
    /// Whether the operation writes.
    pub write: bool,
}

/// The memory in a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The device that owns it; `None` for page-locked and managed memory.
    pub device: Option<usize>,
    /// Size in bytes.
    pub bytes: usize,
    /// The operation that allocated it, and its call site.
    pub by: Option<(&'static str, Site)>,
    /// `None` while it is live; else the operation that freed it and its call site, if known.
    pub freed: Option<Option<(&'static str, Site)>>,
}

/// A mistake, with the operations and the memory that it concerns. `Display` writes it as a text for people.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The kind of the mistake.
    pub kind: Kind,
    /// The refused operation. If the raise of a flag was refused because two operations still conflict: the later of
    /// the two. For a write out of bounds: the operation that found it, since the writer is not known.
    pub now: Operation,
    /// The earlier operation that it conflicts with.
    pub before: Option<Operation>,
    /// The bytes, relative to the start of the allocation; addresses if no allocation is known.
    pub bytes: Range<usize>,
    /// The memory.
    pub allocation: Option<Allocation>,
    /// The missing part, as text.
    pub missing: String,
}

impl Report {
    /// What the checker did at the operation `op`.
    pub(super) fn found_at(&self, op: &str) -> String {
        match self.kind {
            Kind::OutOfBounds => format!("the checker has found a mistake at {op}"),
            _ => format!("{op} was refused by the checker"),
        }
    }
}

struct Where<'a>(&'a Operation);

display_as!(Where<'_>, |self, f| match (self.0.stream, self.0.device) {
    (Some(stream), Some(device)) => write!(f, "stream {stream} of device {device}"),
    (None, Some(device)) => write!(f, "device {device}"),
    _ => f.write_str("the host"),
});

/// Writes the operation as a phrase: `launch (`saxpy`, writes)`.
struct What<'a>(&'a Operation, Kind);

display_as!(What<'_>, |self, f| {
    let Operation { op, detail, write, .. } = self.0;
    let comma = if detail.is_empty() { "" } else { ", " };
    let verb = match self.1 {
        Kind::UnrecordedEvent => "waits",
        Kind::FreeInUse if self.0.device.is_none() => "frees",
        _ if *write => "writes",
        _ => "reads",
    };
    write!(f, "{op} ({detail}{comma}{verb})")
});

fn word(operation: &Operation) -> String {
    if operation.detail.starts_with('`') { operation.detail.clone() } else { format!("`{}`", operation.op) }
}

/// The edge that would have ordered the two operations.
pub fn edge(kind: Kind, now: &Operation, before: &Operation) -> String {
    let (last, at, op) = (word(before), Where(before), now.op);
    if now.device.is_none() {
        return format!(
            "the calling thread never waited for {last} on {at}: wait for that stream, or for an event recorded on it \
             after {last}, before the {op}"
        );
    }
    let who = Where(now);
    let new = if kind == Kind::EarlyReuse { ", which used the memory for the buffer that had it before" } else { "" };
    format!(
        "{who} never waited for {last} on {at}{new}: record an event on {at} after it, and make {who} wait for it \
         before the {op}"
    )
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            Kind::Race => "race",
            Kind::UseAfterFree => "use after free",
            Kind::FreeInUse => "memory freed while it is in use",
            Kind::EarlyReuse => "memory reused too early",
            Kind::HostAccess => "the host touches what a device may still be using",
            Kind::UninitializedRead => "read of bytes that nobody has written",
            Kind::UnrecordedEvent => "wait for an event that was never recorded",
            Kind::WrongDeclaration => "write through an argument that is declared as read",
            Kind::OutOfBounds => "write out of bounds",
        })?;
        if !self.bytes.is_empty() {
            let Range { start, end } = self.bytes;
            match &self.allocation {
                Some(Allocation { bytes, device, .. }) => {
                    let colon = if matches!(self.kind, Kind::Race | Kind::UseAfterFree) { " on" } else { ":" };
                    write!(f, "{colon} bytes {start}..{end} of a buffer of {bytes} bytes ")?;
                    match device {
                        Some(device) => write!(f, "on device {device}")?,
                        None => f.write_str("in host memory that devices see")?,
                    }
                }
                None if self.kind == Kind::WrongDeclaration => write!(f, ": bytes {start}..{end} of it")?,
                None => write!(f, ": {} bytes at {start:#x}", end - start)?,
            }
        }
        let now = (self.kind != Kind::OutOfBounds).then_some(&self.now);
        let operations = [("now:    ", now), ("before: ", self.before.as_ref())];
        let lines = operations.map(|(label, operation)| {
            operation
                .map(|operation| (format!("{label}{} on {}", What(operation, self.kind), Where(operation)), operation))
        });
        let width = lines.iter().flatten().map(|(line, _)| line.len()).max().unwrap_or(0);
        for (line, operation) in lines.iter().flatten() {
            match operation.site {
                Some(site) => write!(f, "\n  {line:width$}  at {site}")?,
                None => write!(f, "\n  {line}")?,
            }
        }
        if let Some(Allocation { by, freed, .. }) = &self.allocation {
            match by {
                Some((op, site)) => write!(f, "\n  buffer: allocated by {op} at {site}")?,
                None => f.write_str("\n  buffer: allocated by a call of the driver")?,
            }
            match freed {
                Some(Some((op, site))) => write!(f, "; freed by {op} at {site}")?,
                Some(None) => f.write_str("; freed since")?,
                None => {}
            }
        }
        write!(f, "\n  missing: {}", self.missing)
    }
}

#[cfg(test)]
#[path = "../../tests/unit/error/misuse_tests.rs"]
mod tests;
