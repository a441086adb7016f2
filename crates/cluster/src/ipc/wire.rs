//! The frames of the socket, and the identities of processes, users and elements. No I/O but `/proc` and random bytes.

use crate::wire::{hash, no_descriptor};
use gpu_pool::Result;
use hmac::digest::CtOutput;
use sha2::Sha256;
use std::{fs, io};

/// Random bytes that cannot be guessed.
pub(super) type Key = [u8; 32];

/// The first bytes of each frame: the protocol and its version.
const MAGIC: [u8; 8] = *b"gpupipc1";
/// The begin of each socket's name.
pub(super) const NAME: &str = "gpu-pool-ipc.";
/// Longest name of a socket: the system's limit for abstract names is 107 bytes.
pub(super) const LONGEST_NAME: usize = 100;
/// The importer's last word: the memory is unmapped there.
pub(super) const RELEASED: u8 = b'R';

/// From the importer: which export it wants.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Request {
    magic: [u8; 8],
    pub id: u64,
    pub key: Key,
}

impl Request {
    pub fn new(id: u64, key: Key) -> Self {
        Request { magic: MAGIC, id, key }
    }

    pub fn is_valid(&self) -> bool {
        self.magic == MAGIC
    }
}

/// The exporter's answer. The memory's descriptor goes with an answer of `status` [`Reply::GRANTED`].
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Reply {
    magic: [u8; 8],
    pub status: u32,
    /// Whether the importer has the memory alone, and may write.
    pub exclusive: u32,
    pub bytes: u64,
    pub chunk: u64,
    pub element: u64,
    pub proof: Key,
}

impl Reply {
    pub const GRANTED: u32 = 0;
    pub const STALE: u32 = 1;
    pub const FORGED: u32 = 2;
    pub const USED: u32 = 3;
    pub const WITHDRAWN: u32 = 4;

    pub fn without_memory(status: u32) -> Self {
        Reply { magic: MAGIC, status, ..bytemuck::Zeroable::zeroed() }
    }

    pub fn is_valid(&self) -> bool {
        self.magic == MAGIC
    }

    pub fn refused(&self) -> Option<&'static str> {
        match self.status {
            Reply::GRANTED => None,
            Reply::STALE => Some("the exporter has dropped the buffer, or this export has ended long ago"),
            Reply::FORGED => Some("the key is wrong: this is not what `export` has made"),
            Reply::USED => Some("it was imported already: an export is good for one import, so export once more"),
            Reply::WITHDRAWN => Some("the exporter has withdrawn it"),
            _ => Some("the exporter refuses it for a reason that this version does not know"),
        }
    }
}

pub(super) fn same(a: &Key, b: &Key) -> bool {
    let output = |key: &Key| CtOutput::<Sha256>::new((*key).into());
    output(a) == output(b)
}

/// Whether a process of user `peer` may have memory of a process of user `own`.
pub(super) fn may_have(peer: u32, own: u32) -> bool {
    peer == own
}

/// A number for an element type, from its name and size.
pub(super) fn element<T>() -> u64 {
    hash(&format!("{} {}", size_of::<T>(), std::any::type_name::<T>()))
}

pub(super) fn random(op: &'static str) -> Result<Key> {
    crate::greet::random().map_err(|why| cluster_error!(op, "no random bytes: {why}"))
}

/// A process of this host. Its start time tells it from a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Process {
    pub pid: u32,
    /// In clock ticks since the host has started.
    pub start: u64,
}

impl Process {
    pub fn own() -> Option<Process> {
        Process::of(std::process::id()).ok()?
    }

    pub fn of(pid: u32) -> io::Result<Option<Process>> {
        match fs::read_to_string(format!("/proc/{pid}/stat")) {
            Err(why) if no_descriptor(&why) => Err(why),
            stat => Ok(stat.ok().and_then(|stat| start(&stat)).map(|start| Process { pid, start })),
        }
    }

    /// Not if it has surely ended.
    pub fn is_alive(self) -> bool {
        Process::of(self.pid).map_or(true, |found| found == Some(self))
    }
}

/// The start time in a text of `/proc/<pid>/stat`; `None` if the process has ended, also if it is a zombie.
fn start(stat: &str) -> Option<u64> {
    // The second field, the program's name, may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

#[cfg(test)]
#[path = "../../tests/unit/ipc/wire_tests.rs"]
mod tests;
