//! [`Chunk`]: the exporter's record of memory that other processes may have. It is attached to the memory's region.

use super::server;
use super::wire::{Key, Reply};
use crate::runtime::{Access, Lending, Region};
use parking_lot::{Condvar, Mutex};
use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

pub(super) struct Chunk {
    pub memory: OwnedFd,
    pub bytes: u64,
    pub chunk: u64,
    pub element: u64,
    /// The last bytes of the memory: importers compare them.
    pub proof: Key,
    pub deadline: Duration,
    pub lending: Arc<Lending>,
    pub loans: Mutex<Loans>,
    pub changed: Condvar,
}

#[derive(Default)]
pub(super) struct Loans {
    pub held: Vec<u32>,
    /// Importers that have ended without a word. `wait_released` reports each of them once.
    pub lost: Vec<u32>,
}

/// An importer's share of a chunk: keeps the memory mapped.
pub(super) struct Loan {
    pub region: Arc<Region>,
    pub exclusive: bool,
}

impl Chunk {
    pub fn reply(&self, exclusive: bool) -> Reply {
        let mut reply = Reply::without_memory(Reply::GRANTED);
        reply.exclusive = u32::from(exclusive);
        (reply.bytes, reply.chunk, reply.element, reply.proof) = (self.bytes, self.chunk, self.element, self.proof);
        reply
    }

    /// Others may access the memory like this from now on: see [`Lending::lend`].
    pub fn lend(&self, access: Access) -> bool {
        let _loans = self.loans.lock();
        self.lending.lend(access)
    }

    pub fn begin(&self, importer: u32) {
        self.loans.lock().held.push(importer);
    }

    pub fn end(&self, importer: Option<u32>, lost: bool) {
        let mut loans = self.loans.lock();
        if let Some(at) = loans.held.iter().position(|held| Some(*held) == importer) {
            loans.held.swap_remove(at);
        }
        loans.lost.extend(importer.filter(|_| lost));
        self.lending.give_back();
        self.changed.notify_all();
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        server::forget();
    }
}

impl Loan {
    pub fn chunk(&self) -> Option<&Chunk> {
        self.region.attached()
    }

    pub fn end(self, importer: u32, lost: bool) {
        if let Some(chunk) = self.chunk() {
            chunk.end(Some(importer), lost);
        }
    }
}
