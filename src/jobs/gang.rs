//! A job on several devices: an entry in the queue of each of them, as a scope.

use super::{Job, Packet, Placed, Rank, core::Core, placement::Devices, state::State};
use crate::gang::{Gang, Visit};
use crate::{driver::observe::Token, error::Error, memory::Handover, scope::flight, thread::worker::Worker};
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::{rc::Rc, sync::Arc};

pub(super) struct GangJob {
    core: Arc<Core>,
    pub gang: Arc<Gang>,
    pub devices: Devices,
    packet: Arc<Packet>,
    rank: Rank,
    placed: Mutex<Option<Placed>>,
    /// Set by the first member to come. False if the job is cancelled by then, or a device is lost: then others get it.
    begins: OnceCell<bool>,
    known: Mutex<Option<Box<Token>>>,
    ended: Mutex<Vec<Option<Box<Handover>>>>,
}

impl GangJob {
    pub fn new(core: &Arc<Core>, gang: Arc<Gang>, placed: Placed, devices: Devices) -> Self {
        let packet = placed.job.packet().clone();
        let (rank, placed) = (placed.rank, Mutex::new(Some(placed)));
        let (core, begins) = (core.clone(), OnceCell::new());
        GangJob { core, gang, devices, packet, rank, placed, begins, known: Mutex::default(), ended: Mutex::default() }
    }

    /// It has not begun, and never will: its entries in the devices' queues do nothing.
    pub fn withdraw(&self, state: &mut State) -> Option<Job> {
        let Placed { rank, need, job } = self.placed.lock().take()?;
        for &device in &self.devices {
            state.table.thread_is_free(device);
            state.table.over(device, need.bytes);
        }
        state.meter.ended(&self.devices, false);
        state.forget(rank, &job);
        Some(job)
    }

    /// Decides whether it begins.
    fn begin(&self) -> bool {
        let is_lost = |device: &usize| self.core.shared.handles[*device].is_lost();
        let mut state = self.core.lock();
        let own = state.running.iter_mut().find(|running| Arc::ptr_eq(&running.gang, &self.gang));
        let Some(own) = own.filter(|_| self.gang.cause().is_none() && !self.devices.iter().any(is_lost)) else {
            return false;
        };
        own.waits = None;
        true
    }
}

impl Visit<Rc<Worker>> for GangJob {
    fn visit(self: Arc<Self>, worker: &Rc<Worker>, rank: usize, place: u64, _others: &dyn Fn() -> bool) {
        // One decision for all: a closure may wait for its peers by other means than this crate's.
        let begins = *self.begins.get_or_init(|| self.begin());
        if begins {
            // Each member may come first. All of them bring the same place.
            self.gang.enter_at(place);
            worker.handle.take_over(self.packet.known());
            let _slice = super::stats::slice(worker, &self.packet);
            super::stats::in_span(&self.packet, self.rank.seq, worker.handle.device, || {
                flight::join(worker, &self.gang, rank, &self.known, |dev| self.packet.work.run(dev));
            });
        }
        let mut ended = self.ended.lock();
        ended.push(worker.handle.hand_over());
        if ended.len() < self.devices.len() {
            return;
        }
        for known in ended.drain(..) {
            worker.handle.take_over(known.as_deref());
        }
        drop(ended);
        let mut how = self.gang.cause().map_or(Ok(()), |(_, cause)| Err(cause));
        let core = &self.core;
        for &device in &self.devices {
            core.look_for_loss(device, how.as_ref().err());
        }
        let mut state = core.lock();
        // Under the lock: until here it could be withdrawn, from here on it is over, or back in the queue.
        let Some(placed) = self.placed.lock().take() else { return };
        self.devices.iter().for_each(|&device| state.table.thread_is_free(device));
        let job = if begins || how.is_err() {
            core.account(&mut state, placed, &self.devices, &mut how)
        } else {
            how = Err(if state.ended { Error::Closed } else { state.loss.clone().unwrap_or(Error::Closed) });
            core.move_on(&mut state, placed, &self.devices)
        };
        let posts = core.start(&mut state);
        drop(state);
        core.post(posts);
        if let Some(job) = job {
            core.tell(worker, job, self.devices[0], how);
        }
    }
}
