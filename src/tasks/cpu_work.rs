//! The tasks of the CPU, as software GPUs see them. The engine counts them, and the runners.
//!
//! A software GPU that runs one operation at a time takes no step while a task of the CPU runs, since the task may
//! still give devices work; and a deadlock is none while one runs.

use crate::driver::host::Attendee;
use parking_lot::Mutex;
use std::thread::ThreadId;

/// An [`Attendee`], blocked when no task of the CPU is ready or runs: how many are, and how many there were so far.
#[derive(Default)]
pub(super) struct CpuWork(Mutex<(usize, u64)>);

impl CpuWork {
    pub fn more(&self) {
        let mut state = self.0.lock();
        state.0 += 1;
        state.1 += 1;
    }

    pub fn less(&self) {
        let mut state = self.0.lock();
        state.0 = state.0.saturating_sub(1);
    }

    pub fn stop(&self) {
        self.0.lock().0 = 0;
    }
}

impl Attendee for CpuWork {
    fn blocked(&self) -> Option<u64> {
        let (tasks, stamp) = *self.0.lock();
        (tasks == 0).then_some(stamp)
    }

    fn is_running(&self) -> bool {
        self.0.lock().0 > 0
    }

    fn progress(&self) -> u64 {
        self.0.lock().1
    }
}

/// It is blocked exactly while the driver says so.
pub(super) struct WaitingThread(pub ThreadId);

impl Attendee for WaitingThread {
    fn thread(&self) -> Option<ThreadId> {
        Some(self.0)
    }

    fn blocked(&self) -> Option<u64> {
        None
    }

    fn progress(&self) -> u64 {
        0
    }
}
