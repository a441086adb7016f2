//! What tests of failures between messages need of the hub.

use super::{Error, Hub, VecDeque};

impl Hub {
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
