//! What tests of failures do to the hub, and ask it.

use super::{Error, Hub, VecDeque, lost};

impl Hub {
    /// As if the host's process had been killed.
    pub fn lose(&self, host: usize) {
        let mut state = self.state.lock();
        state.lost = Some(host);
        let tells: Vec<_> = state.scopes.values_mut().flat_map(|scope| scope.tells.drain(..)).collect();
        drop(state);
        tells.into_iter().for_each(|(_, tell)| tell(lost(host)));
        self.changed.notify_all();
    }

    /// As if a further process had failed all scopes.
    pub fn abort(&self) {
        let keys: Vec<_> = self.state.lock().scopes.keys().cloned().collect();
        let error = Error::AbortedByHost { host: self.devices.len(), device: None, cause: "a test".to_owned() };
        keys.iter().for_each(|key| self.fail(key, usize::MAX, error.clone()));
    }

    /// Whether every message has been received.
    pub fn is_empty(&self) -> bool {
        self.state.lock().mail.values().all(VecDeque::is_empty)
    }
}
