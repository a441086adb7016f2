//! Messages between processes and the hub, as values and as bounded frames.
//!
//! A frame is four bytes of length, little-endian, and a value in the format of the `postcard` crate. No value of a
//! peer makes a process allocate more than a frame.

use crate::traits::OUTBOX;
use gpu_pool::{Error, error::WorldCall};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fmt::{self, Write as _},
    io::{self, ErrorKind, Read, Write},
    num::NonZeroU64,
    sync::Arc,
    time::Duration,
};

/// The longest frame. Frames carry headlines; data goes over the transport.
pub(super) const MOST: usize = 64 << 10;

/// The longest value of the key-value store.
pub(super) const MOST_VALUE: usize = 32 << 10;

/// The longest text: a call, a place in a program, a cause. Longer ones are cut.
pub(super) const MOST_TEXT: usize = 2 << 10;

/// The most members of a group: each takes at most 10 bytes of a frame.
pub(super) const MOST_MEMBERS: usize = 4096;

/// The version of the protocol. Both sides must have the same.
pub(super) const VERSION: u16 = 7;

pub(crate) fn hash(text: &str) -> u64 {
    // FNV-1a.
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

pub(crate) fn shortened(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let end = (0..=most).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    format!("{}.. (hash {:016x})", &text[..end], hash(text))
}

/// Of the hosts of a collective, in ascending order: the number of its arrival, and its note.
pub(crate) type Notes = Vec<(u64, Vec<u8>)>;

/// A device: its process and its ordinal there.
pub(crate) type Member = (u32, u32);

/// From a process to the hub. A process numbers its scopes and arrivals itself, each number once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) enum ToHub {
    /// A value of the table.
    Set { key: String, value: Vec<u8> },
    /// `waits`: the process does nothing else until the value comes.
    Get { key: String, waits: bool },
    /// The process announces a scope.
    Begin { scope: u64, entry: Entry, deadline: Duration, site: String },
    /// All its members are at a collective.
    Arrive(Arrive),
    /// The process has failed a scope.
    Fail { scope: u64, device: Option<u32>, cause: String },
    /// The process leaves the scope: the last that it says of it, also if the scope has failed.
    End { scope: u64 },
    /// The process knows that the scope has failed. It will not arrive there again.
    Heard { scope: u64 },
    /// The progress numbers of its scopes.
    Beat { progress: Vec<(u64, u64)> },
    /// Asks for rank 0's clock. Its server answers, and the hub does not see it. `sent` comes back.
    Clock { sent: Duration },
    /// The process leaves the cluster.
    Bye,
}

/// A message of a process of one machine to all of them (`near.rs`). Ticks and the end are rank 0's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) enum Record {
    Frame(ToHub),
    /// The process has arrived as at its last arrival, with the next numbers and this note.
    Next {
        note: Vec<u8>,
    },
    Tick(Duration),
    Over(Failure),
}

impl Record {
    /// The shorter record for this one, if it is the arrival that follows the process's last one.
    pub(crate) fn short(&self, last: Option<&Arrive>) -> Option<Record> {
        let Record::Frame(ToHub::Arrive(arrive)) = self else { return None };
        last.filter(|last| last.precedes(arrive)).map(|_| Record::Next { note: arrive.note.clone() })
    }

    /// Whether it may fail a scope in which a process waits for nothing. Others are heard of with the next tick.
    pub(super) fn is_urgent(&self) -> bool {
        match self {
            Record::Frame(ToHub::Begin { entry, .. }) => matches!(entry, Entry::Unnamed { failed: Some(_), .. }),
            Record::Frame(frame) => matches!(frame, ToHub::Fail { .. } | ToHub::Bye),
            Record::Next { .. } => false,
            Record::Tick(_) | Record::Over(_) => true,
        }
    }
}

/// How a scope finds its counterparts: [`Entry`](crate::traits::Entry). `failed`: a device, and the cause.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) enum Entry {
    Named(String),
    Unnamed { nth: u64, failed: Option<(u32, String)> },
}

/// All members of a process have arrived at a collective.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) struct Arrive {
    pub arrival: u64,
    pub scope: u64,
    pub members: Arc<[Member]>,
    pub number: u64,
    pub device: u32,
    /// The hub's number of the scope, once the process knows it: then the others are told of the arrival, too
    /// ([`mesh`](super::mesh)).
    pub known: Option<NonZeroU64>,
    /// An arrival of the process that it has taken as committed without the hub's word. The hub commits that one first.
    pub behind: Option<NonZeroU64>,
    /// The members may be in other collectives meanwhile, but in no other proxied one.
    pub proxied: bool,
    pub call: Arc<str>,
    pub site: Arc<str>,
    pub note: Vec<u8>,
}

impl Arrive {
    /// Becomes the arrival that follows this one, if the process does the same once more. Returns it with a note.
    pub fn advance(&mut self, note: Vec<u8>) -> Arrive {
        (self.arrival, self.number) = (self.arrival.wrapping_add(1), self.number.wrapping_add(1));
        Arrive { note, ..self.without_note() }
    }

    /// Whether the other one equals this one after [`advance`](Self::advance), except for its note.
    fn precedes(&self, other: &Arrive) -> bool {
        let Arrive { arrival, scope, members, number, device, known, behind, proxied, call, site, .. } = other;
        (arrival.wrapping_sub(1), *scope, number.wrapping_sub(1)) == (self.arrival, self.scope, self.number)
            && (device, known, behind, proxied) == (&self.device, &self.known, &self.behind, &self.proxied)
            && (members, call, site) == (&self.members, &self.call, &self.site)
    }

    /// Whether these two make one collective.
    pub fn is_alike(&self, other: &Arrive) -> bool {
        (&self.call, self.proxied) == (&other.call, other.proxied)
    }

    pub fn without_note(&self) -> Arrive {
        let (members, call, site) = (self.members.clone(), self.call.clone(), self.site.clone());
        Arrive { members, call, site, note: Vec::new(), ..*self }
    }
}

/// From the hub to a process, with the process's own numbers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) enum ToHost {
    /// A value that the process has asked for.
    Value { key: String, value: Vec<u8> },
    /// All processes have announced this ordered scope.
    Begun { scope: u64, known: u64 },
    /// The numbers and notes of all arrivals. With `more`, another frame has the next ones.
    Commit { arrival: u64, known: u64, notes: Notes, more: bool },
    /// In a scope that has failed: this collective is not committed.
    Dropped { arrival: u64 },
    /// All processes have left the scope.
    Ended { scope: u64 },
    /// The scope has failed, for all processes.
    Failed { scope: u64, failure: Failure },
    /// The cluster has ended.
    Over { failure: Failure },
    /// Rank 0's clock, since 1970.
    Clock { sent: Duration, wall: Duration },
    /// The hub is alive.
    Beat,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) enum Failure {
    /// A process has failed the scope.
    Aborted { host: u32, device: Option<u32>, cause: String },
    /// Processes have not come.
    Timeout { op: String, waited: Duration, missing: Vec<u32> },
    /// Two members have made different calls.
    Mismatch { kind: Kind, a: Box<Call>, b: Box<Call> },
    /// A process has ended, or is silent.
    Lost { host: u32, why: String },
    /// The processes cannot come together.
    Refused { why: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) enum Kind {
    Call,
    Group,
    Participation,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) struct Call {
    pub place: Member,
    pub call: String,
    pub site: String,
}

impl Call {
    fn told(self) -> Box<WorldCall> {
        let Call { place: (host, device), call, site } = self;
        Box::new(WorldCall { host: host as usize, device: device as usize % OUTBOX, call, site })
    }
}

impl Failure {
    pub(crate) fn lost(host: usize, why: impl Into<String>) -> Failure {
        Failure::Lost { host: host as u32, why: cut(why.into()) }
    }

    /// The user's error. `op`: the operation that finds a loss.
    pub(super) fn error(&self, op: &'static str) -> Error {
        match self.clone() {
            Failure::Aborted { host, device, cause } => {
                Error::AbortedByHost { host: host as usize, device: device.map(|device| device as usize), cause }
            }
            Failure::Timeout { op, waited, missing } => {
                Error::HostTimeout { op, waited, missing: missing.into_iter().map(|host| host as usize).collect() }
            }
            Failure::Mismatch { kind, a, b } => Error::WorldMismatch {
                what: match kind {
                    Kind::Call => "call",
                    Kind::Group => "group",
                    Kind::Participation => "participation",
                },
                a: a.told(),
                b: b.told(),
            },
            Failure::Lost { host, why } => Error::HostLost { host: host as usize, op, why },
            Failure::Refused { why } => Error::Cluster { op: "connect", why },
        }
    }
}

/// The error of a process without a free file descriptor, or of its machine.
pub(crate) fn no_descriptor(error: &io::Error) -> bool {
    // ENFILE and EMFILE, on Linux and macOS.
    matches!(error.raw_os_error(), Some(23 | 24))
}

pub(super) fn cut(mut text: String) -> String {
    if text.len() > MOST_TEXT {
        let end = (0..=MOST_TEXT).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

/// A text of a value, as [`cut`]. Most are short: they are written without growing.
pub(super) fn text(of: &dyn fmt::Display) -> String {
    let mut text = String::with_capacity(128);
    let _ = write!(text, "{of}");
    cut(text)
}

pub(super) fn frame(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut frame = Vec::with_capacity(256);
    frame_in(&mut frame, value).map(|()| frame)
}

/// A frame in place of what is there.
pub(super) fn frame_in(frame: &mut Vec<u8>, value: &impl Serialize) -> io::Result<()> {
    frame.clear();
    frame.extend([0; 4]);
    let written = postcard::to_extend(value, std::mem::take(frame));
    *frame = written.map_err(|e| io::Error::new(ErrorKind::InvalidInput, e))?;
    let len = frame.len() - 4;
    if len > MOST {
        return Err(io::Error::new(ErrorKind::InvalidInput, format!("a frame of {len} bytes; the limit is {MOST}")));
    }
    frame[..4].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(())
}

pub(super) fn write(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    to.write_all(&frame(value)?)
}

pub(super) fn read<T: DeserializeOwned>(from: &mut impl Read, most: usize) -> io::Result<T> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > most {
        return Err(io::Error::new(ErrorKind::InvalidData, format!("a frame of {len} bytes; the limit is {most}")));
    }
    let mut body = vec![0; len];
    from.read_exact(&mut body)?;
    decode(&body)
}

/// The body of the first frame of these bytes, and the bytes behind it. None: the frame is not complete.
pub(super) fn first_frame(bytes: &[u8]) -> io::Result<Option<(&[u8], &[u8])>> {
    let Some((len, rest)) = bytes.split_first_chunk() else { return Ok(None) };
    let len = u32::from_le_bytes(*len) as usize;
    fail_if!(len > MOST, ErrorKind::InvalidData.into());
    Ok(rest.split_at_checked(len))
}

/// The value of a frame's body, or of a note, which it must fill.
pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(io::Error::new(ErrorKind::InvalidData, format!("{} bytes too many", rest.len()))),
        Err(e) => Err(io::Error::new(ErrorKind::InvalidData, e)),
    }
}

#[cfg(test)]
#[path = "../tests/unit/wire_tests.rs"]
mod tests;
