//! A device's thread at its jobs: a visit takes them one after the other, lands the work of earlier ones, and ends when
//! another entry waits for the thread.

use super::{
    Placed, Running,
    core::{Core, Posts},
};
use crate::error::{Error, Result, Site};
use crate::gang::{Gang, Visit};
use crate::scope::{
    flight::{self, Flight},
    gang_with,
};
use crate::thread::worker::Worker;
use std::time::{Duration, Instant};
use std::{collections::VecDeque, rc::Rc, sync::Arc};

/// A visit begins so many jobs at most: then pools that share the GPU have their turn.
const MOST: usize = 64;
/// How often a device thread looks at work in flight while it has nothing else to do.
const LOOK: [Duration; 2] = [Duration::from_micros(20), Duration::from_millis(1)];
/// How long a visit without a job waits for the next one: a submission to a visit costs less than a new visit.
const LINGER: Duration = Duration::from_micros(20);

pub(super) struct Flying {
    placed: Placed,
    flight: Flight,
}

impl Visit<Rc<Worker>> for Core {
    fn visit(self: Arc<Self>, worker: &Rc<Worker>, _rank: usize, place: u64, others: &dyn Fn() -> bool) {
        let device = worker.handle.device;
        let again = self.jobs(worker, place, others);
        let rested = crate::panics::catch(device, || flight::rest(worker)).and_then(|rest| rest);
        // No job is to blame. The next scope reports it, or the end of the pool.
        if let Err(error) = rested
            && !worker.handle.is_lost()
        {
            worker.defer_error(error);
        }
        self.look_for_loss(device, None);
        if again.is_some() {
            // With a place of its own, behind all that waits.
            self.post(Posts::visit(device));
        }
    }
}

impl Core {
    fn take(self: &Arc<Self>, device: usize, gang: impl FnOnce(Site) -> Arc<Gang>) -> Option<(Placed, Arc<Gang>)> {
        let mut state = self.lock();
        let placed = state.assigned[device].take()?;
        let gang = gang(placed.job.packet().site);
        let packet = placed.job.packet().clone();
        let (rank, gang_of, place) = (placed.rank, gang.clone(), device);
        state.running.push(Running { rank, gang: gang_of, place, packet, cancelled: false, waits: None });
        Some((placed, gang))
    }

    /// The jobs of a visit. When it returns, none of them is in flight. Returns whether a further visit has to come.
    fn jobs(self: &Arc<Self>, worker: &Rc<Worker>, place: u64, others: &dyn Fn() -> bool) -> Option<()> {
        let (device, shared) = (worker.handle.device, &self.shared);
        let (mut flying, mut began) = (VecDeque::new(), 0);
        let waker = shared.queues[device].waker();
        // On software GPUs whose operations go on only when all threads are blocked, this thread blocks.
        let blocks = worker.handle.stepped || worker.handle.in_virtual_time();
        let in_use = worker.cache.borrow_mut().stats().in_use;
        let mut state = self.lock();
        state.table.set_resident(device, in_use);
        drop(state);
        self.look_for_loss(device, None);
        loop {
            if shared.gate.is_closed() {
                self.fail_queued(&Error::Closed);
            }
            self.land(worker, &mut flying);
            if began > 0 && (began >= MOST || others()) {
                self.land_all(worker, &mut flying);
                return self.leave(device, true);
            }
            let seen = self.given[device].get();
            let gang = |site| {
                let gang = gang_with(shared, [device].into(), self.wakers[device].clone(), site);
                gang.enter_at(place);
                Arc::new(gang)
            };
            if let Some((placed, gang)) = self.take(device, gang) {
                began += 1;
                if !self.run(worker, placed, &gang, &mut flying) {
                    // No gang may have this place after one that has failed.
                    self.land_all(worker, &mut flying);
                    return self.leave(device, true);
                }
            } else if flying.is_empty() {
                let news = || (self.given[device].get() != seen || others()).then_some(());
                if !blocks && began > 0 {
                    waker.wait_lingering(Some(LINGER), LINGER, news);
                }
                if self.given[device].get() == seen && self.leave(device, false).is_none() {
                    return None;
                }
            } else if blocks {
                self.land_first(worker, &mut flying);
            } else {
                self.wait(worker, &mut flying, || self.given[device].get() != seen || began > 0 && others());
            }
        }
    }

    /// Ends a visit, unless the device has a job. With `always` another visit follows if there is any job.
    fn leave(&self, device: usize, always: bool) -> Option<()> {
        let mut state = self.lock();
        let more = state.assigned[device].is_some() || always && state.table.len() > 0;
        state.visiting[device] = more;
        more.then_some(())
    }

    /// Runs a job's closure. False if the job has failed: then its gang has, too.
    fn run(
        self: &Arc<Self>,
        worker: &Rc<Worker>,
        placed: Placed,
        gang: &Arc<Gang>,
        flying: &mut VecDeque<Flying>,
    ) -> bool {
        let device = worker.handle.device;
        worker.handle.take_over(placed.job.packet().known());
        let packet = placed.job.packet();
        let slice = super::stats::slice(worker, packet);
        let flown = super::stats::in_span(packet, placed.rank.seq, device, || {
            flight::fly(worker, gang, self.overlap > 0, |dev| packet.work.run(dev))
        });
        drop(slice);
        let (failed, error) = match flown {
            Ok(mut flight) => match flight.is_over() {
                Ok(false) => {
                    flying.push_back(Flying { placed, flight });
                    let mut state = self.lock();
                    state.table.thread_is_free(device);
                    let posts = self.start(&mut state);
                    drop(state);
                    self.post(posts);
                    return true;
                }
                how => flight.land(worker, how.map(drop)).map_or_else(|error| (true, Some(error)), |()| (false, None)),
            },
            Err(error) => (true, Some(error)),
        };
        self.finish(worker, placed, true, error.map_or(Ok(()), Err));
        !failed
    }

    /// A job is over: `thread` if its closure has ended only now.
    fn finish(self: &Arc<Self>, worker: &Rc<Worker>, placed: Placed, thread: bool, mut how: Result<()>) {
        let device = worker.handle.device;
        if let Err(error) = &how {
            self.look_for_loss(device, Some(error));
        }
        let mut state = self.lock();
        if thread {
            state.table.thread_is_free(device);
        }
        let job = self.account(&mut state, placed, &[device], &mut how);
        let posts = self.start(&mut state);
        drop(state);
        // First: other devices begin while this job's closure is dropped.
        self.post(posts);
        if let Some(job) = job {
            self.tell(worker, job, device, how);
        }
    }

    /// Lands the flights whose work is over.
    fn land(self: &Arc<Self>, worker: &Rc<Worker>, flying: &mut VecDeque<Flying>) {
        let mut i = 0;
        while i < flying.len() {
            match flying[i].flight.is_over() {
                Ok(false) => i += 1,
                how => {
                    let Flying { placed, flight } = flying.remove(i).expect("it is there");
                    let how = flight.land(worker, how.map(drop));
                    self.finish(worker, placed, false, how);
                }
            }
        }
    }

    fn land_first(self: &Arc<Self>, worker: &Rc<Worker>, flying: &mut VecDeque<Flying>) {
        if let Some(Flying { placed, flight }) = flying.pop_front() {
            let how = flight.wait(worker);
            let how = flight.land(worker, how);
            self.finish(worker, placed, false, how);
        }
    }

    fn land_all(self: &Arc<Self>, worker: &Rc<Worker>, flying: &mut VecDeque<Flying>) {
        while !flying.is_empty() {
            self.land_first(worker, flying);
        }
    }

    /// Waits until a flight is over, or until `news`. A flight without progress until the deadline fails.
    fn wait(self: &Arc<Self>, worker: &Rc<Worker>, flying: &mut VecDeque<Flying>, news: impl Fn() -> bool) {
        let waker = self.shared.queues[worker.handle.device].waker();
        let since = Instant::now();
        let mut tick = LOOK[0];
        loop {
            let over = flying.iter_mut().any(|flying| !matches!(flying.flight.is_over(), Ok(false)));
            if over || waker.wait_until(Some(tick), || news().then_some(())).is_some() {
                return;
            }
            tick = (since.elapsed() / 16).clamp(LOOK[0], LOOK[1]);
            if since.elapsed() > self.shared.deadline / 4 {
                // Only a blocking wait sees whether the stream makes progress.
                return self.land_first(worker, flying);
            }
        }
    }
}
