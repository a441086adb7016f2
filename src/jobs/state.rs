//! What a queue's [core](super::core) knows under its lock.

use super::{Job, Meter, Packet, Placed, Rank, Table, core::Core, gang::GangJob};
use crate::{
    error::{BookedJob, Error},
    gang::Gang,
};
use std::time::{Duration, Instant};
use std::{collections::BTreeMap, sync::Arc, task::Waker};

pub(super) struct Running {
    pub rank: Rank,
    pub gang: Arc<Gang>,
    pub place: usize,
    pub packet: Arc<Packet>,
    /// It does not begin again, whatever its closure fails with.
    pub cancelled: bool,
    /// A gang that is in the queues of its devices, and has not begun.
    pub waits: Option<Arc<GangJob>>,
}

pub(super) struct State {
    pub table: Table<Job>,
    /// By device: the job that its thread takes next.
    pub assigned: Vec<Option<Placed>>,
    /// By device: a visit is under way, or in its queue.
    pub visiting: Vec<bool>,
    pub running: Vec<Running>,
    /// Jobs that are over, but whose answers are on their way.
    pub ending: usize,
    pub closed: bool,
    pub ended: bool,
    pub loss: Option<Error>,
    /// The wakers that wait for room, by the numbers of their tickets.
    pub room: BTreeMap<u64, Waker>,
    pub deadlines: BTreeMap<(Instant, Rank), Duration>,
    pub keeper: bool,
    pub meter: Meter,
}

/// One that waits for room in a queue, until a deadline. It has a number. Its drop takes its waker away.
pub(super) struct Ticket(pub Arc<Core>, pub u64, pub Option<Instant>);

impl Ticket {
    /// Whether it need not wait any more. Otherwise the last `waker` is woken when there is room.
    pub fn is_over(&self, waker: &Waker) -> bool {
        let (own, mut state) = (waker.clone(), self.0.lock());
        let room = state.closed || state.table.len() < self.0.bound;
        // Dropped without the lock: that is user code.
        let _old = if room { Some(own) } else { state.room.insert(self.1, own) };
        drop(state);
        room || self.2.is_some_and(|until| until <= Instant::now())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let _waker = self.0.lock().room.remove(&self.1);
    }
}

impl State {
    pub fn begun(&self) -> usize {
        self.assigned.iter().flatten().count() + self.running.len()
    }

    pub fn running(&self, rank: Rank) -> Option<&Running> {
        self.running.iter().find(|running| running.rank == rank)
    }

    /// Whether a closure runs, or work of one.
    pub fn is_at_work(&self) -> bool {
        self.running.iter().any(|running| running.waits.is_none())
    }

    pub fn booked(&self, device: usize) -> Vec<BookedJob> {
        let there = self.running.iter().filter(|running| running.gang.members().contains(&device));
        let booked = there.map(|Running { rank, packet, .. }| {
            let (name, bytes, site) = (packet.name().to_owned(), rank.bytes.0, packet.site);
            BookedJob { name, bytes, site }
        });
        booked.collect()
    }

    pub fn unassign(&mut self, device: usize) -> Option<Placed> {
        let placed = self.assigned[device].take()?;
        self.table.thread_is_free(device);
        self.table.over(device, placed.need.bytes);
        self.meter.ended(&[device], false);
        Some(placed)
    }

    pub fn ran(&mut self, rank: Rank) {
        if let Some(i) = self.running.iter().position(|running| running.rank == rank) {
            self.running.swap_remove(i);
        }
    }

    pub fn forget(&mut self, rank: Rank, job: &Job) {
        self.ran(rank);
        if let Some((deadline, _)) = job.packet().deadline() {
            self.deadlines.remove(&(deadline, rank));
        }
    }
}
