//! The checker's report of a mistake, as plain data, and its text.
//!
//! An observer fills it in. A driver's `Fault` and [`Error::Misuse`](super::Error::Misuse) carry it to the user.

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
pub struct Deed {
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
    pub now: Deed,
    /// The earlier operation that it conflicts with.
    pub before: Option<Deed>,
    /// The bytes, relative to the start of the allocation; addresses if no allocation is known.
    pub bytes: Range<usize>,
    /// The memory.
    pub allocation: Option<Allocation>,
    /// The missing part, as text.
    pub missing: String,
}

/// Writes the stream's name.
struct Where<'a>(&'a Deed);

impl fmt::Display for Where<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.stream, self.0.device) {
            (Some(stream), Some(device)) => write!(f, "stream {stream} of device {device}"),
            (None, Some(device)) => write!(f, "device {device}"),
            _ => f.write_str("the host"),
        }
    }
}

/// Writes the operation as a phrase: `launch (`saxpy`, writes)`.
struct What<'a>(&'a Deed, Kind);

impl fmt::Display for What<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Deed { op, detail, write, .. } = self.0;
        let comma = if detail.is_empty() { "" } else { ", " };
        let verb = match self.1 {
            Kind::UnrecordedEvent => "waits",
            Kind::FreeInUse if self.0.device.is_none() => "frees",
            _ if *write => "writes",
            _ => "reads",
        };
        write!(f, "{op} ({detail}{comma}{verb})")
    }
}

/// The operation in a word, for the middle of a sentence.
fn word(deed: &Deed) -> String {
    if deed.detail.starts_with('`') { deed.detail.clone() } else { format!("`{}`", deed.op) }
}

/// The edge that would have ordered the two operations.
pub fn edge(kind: Kind, now: &Deed, before: &Deed) -> String {
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
        let deeds = [("now:    ", now), ("before: ", self.before.as_ref())];
        let lines = deeds.map(|(label, deed)| {
            deed.map(|deed| (format!("{label}{} on {}", What(deed, self.kind), Where(deed)), deed))
        });
        let width = lines.iter().flatten().map(|(line, _)| line.len()).max().unwrap_or(0);
        for (line, deed) in lines.iter().flatten() {
            match deed.site {
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
mod tests {
    use super::*;
    use std::panic::Location;

    fn here() -> (Site, String) {
        let site = Location::caller();
        (site, site.to_string())
    }

    fn deed(op: &'static str, detail: &str, stream: Option<(usize, usize)>, write: bool, site: Option<Site>) -> Deed {
        let (device, stream) = stream.unzip();
        Deed { op, detail: detail.into(), site, device, stream, write }
    }

    fn report(kind: Kind, now: Deed, before: Option<Deed>, allocation: Option<Allocation>) -> Report {
        let missing = before.as_ref().map_or_else(|| "something".into(), |before| edge(kind, &now, before));
        Report { kind, now, before, bytes: 0..4096, allocation, missing }
    }

    #[test]
    fn a_race_names_both_operations_and_the_missing_edge() {
        let (site, at) = here();
        let buffer = Allocation { device: Some(0), bytes: 8192, by: Some(("zeros", site)), freed: None };
        let now = deed("copy", "peer copy", Some((1, 1)), false, Some(site));
        let before = deed("launch", "`saxpy`", Some((0, 0)), true, Some(site));
        assert_eq!(
            report(Kind::Race, now, Some(before), Some(buffer)).to_string(),
            format!(
                "race on bytes 0..4096 of a buffer of 8192 bytes on device 0\n  \
                   now:    copy (peer copy, reads) on stream 1 of device 1  at {at}\n  \
                   before: launch (`saxpy`, writes) on stream 0 of device 0 at {at}\n  \
                   buffer: allocated by zeros at {at}\n  \
                   missing: stream 1 of device 1 never waited for `saxpy` on stream 0 of device 0: record an event on \
                   stream 0 of device 0 after it, and make stream 1 of device 1 wait for it before the copy"
            )
            .replace("device 0 at", "device 0  at")
            .replace("device 1  at", "device 1   at")
        );
    }

    #[test]
    fn without_places_the_drivers_calls_are_named() {
        let now = deed("mem_free", "", None, true, None);
        let before = deed("fill_u8", "", Some((2, 0)), true, None);
        let buffer = Allocation { device: Some(2), bytes: 4096, by: None, freed: None };
        assert_eq!(
            report(Kind::FreeInUse, now, Some(before), Some(buffer)).to_string(),
            "memory freed while it is in use: bytes 0..4096 of a buffer of 4096 bytes on device 2\n  \
               now:    mem_free (frees) on the host\n  \
               before: fill_u8 (writes) on stream 0 of device 2\n  \
               buffer: allocated by a call of the driver\n  \
               missing: the calling thread never waited for `fill_u8` on stream 0 of device 2: wait for that stream, \
               or for an event recorded on it after `fill_u8`, before the mem_free"
        );
    }

    #[test]
    fn reuse_tells_of_the_old_buffer() {
        let (site, at) = here();
        let old =
            Allocation { device: Some(0), bytes: 4096, by: Some(("upload", site)), freed: Some(Some(("drop", site))) };
        let now = deed("zeros", "fill", Some((0, 1)), true, Some(site));
        let before = deed("sum", "", Some((0, 0)), false, Some(site));
        let text = report(Kind::EarlyReuse, now, Some(before), Some(old)).to_string();
        assert!(
            text.starts_with("memory reused too early: bytes 0..4096 of a buffer of 4096 bytes on device 0\n"),
            "{text}"
        );
        assert!(text.contains(&format!("\n  buffer: allocated by upload at {at}; freed by drop at {at}\n")), "{text}");
        assert!(text.contains("which used the memory for the buffer that had it before: record an event"), "{text}");
    }

    #[test]
    fn each_kind_begins_with_what_it_is() {
        let buffer = |freed| Allocation { device: None, bytes: 9000, by: None, freed };
        let stream = deed("copy_to_host", "", Some((0, 3)), true, None);
        for (kind, freed, starts) in [
            (Kind::Race, None, "race on bytes 0..4096 of a buffer of 9000 bytes in host memory that devices see\n"),
            (
                Kind::UseAfterFree,
                Some(None),
                "use after free on bytes 0..4096 of a buffer of 9000 bytes in host memory",
            ),
            (Kind::FreeInUse, None, "memory freed while it is in use: bytes 0..4096 of"),
            (Kind::EarlyReuse, Some(None), "memory reused too early: bytes 0..4096 of"),
            (Kind::HostAccess, None, "the host touches what a device may still be using: bytes 0..4096 of"),
            (Kind::UninitializedRead, None, "read of bytes that nobody has written: bytes 0..4096 of"),
            (Kind::WrongDeclaration, None, "write through an argument that is declared as read: bytes 0..4096 of"),
            (
                Kind::OutOfBounds,
                Some(None),
                "write out of bounds: bytes 0..4096 of a buffer of 9000 bytes in host memory",
            ),
        ] {
            let text = report(kind, stream.clone(), Some(stream.clone()), Some(buffer(freed))).to_string();
            assert!(text.starts_with(starts), "{text}");
            assert_eq!(text.contains("; freed since\n"), freed.is_some(), "{text}");
        }
        let mut event = report(Kind::UnrecordedEvent, stream, None, None);
        assert!(event.to_string().contains(": 4096 bytes at 0x0\n"), "an address where no allocation is known");
        event.bytes = 0..0;
        let text = event.to_string();
        assert!(text.starts_with("wait for an event that was never recorded\n  now:"), "{text}");
        assert!(text.ends_with("\n  missing: something"), "{text}");
    }
}
