//! The thread that keeps the deadlines of jobs. It runs only while there are some. User code does not delay it.

use super::{Rank, core::Core};
use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

impl Core {
    /// Wakes the thread that keeps deadlines, or starts it.
    pub fn keep(self: &Arc<Self>) {
        self.keeper.notify();
        let mut state = self.lock();
        if state.deadlines.is_empty() || mem::replace(&mut state.keeper, true) {
            return;
        }
        drop(state);
        let core = Arc::downgrade(self);
        let keep = move || {
            while let Some(core) = core.upgrade() {
                let mut state = core.lock();
                let Some((&(deadline, rank), &limit)) = state.deadlines.first_key_value() else {
                    state.keeper = false;
                    return;
                };
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    state.deadlines.remove(&(deadline, rank));
                    state.keeper = false;
                    drop(state);
                    // The job's end may run a drop of the user, which takes its time: a successor keeps the others.
                    core.keep();
                    core.expire(rank, limit);
                    // Without a successor this thread goes on.
                    if mem::replace(&mut core.lock().keeper, true) {
                        return;
                    }
                    continue;
                }
                drop(state);
                let other = || core.lock().deadlines.first_key_value().is_none_or(|(first, _)| first.1 != rank);
                core.keeper.wait_until(Some(left.min(Duration::from_millis(100))), || other().then_some(()));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("gpu-pool:jobs".to_owned()).spawn(keep) {
            self.lock().keeper = false;
            event!(
                error, "job_deadlines_unwatched", %error,
                "no thread could be started that keeps the deadlines of jobs"
            );
        }
    }

    fn expire(self: &Arc<Self>, rank: Rank, waited: Duration) {
        let error = match self.place(rank) {
            Some(place) => self.shared.timeout("job", waited, vec![place]),
            None => self.shared.timeout_of_all("job", waited),
        };
        self.cancel(rank, error, true);
    }
}
