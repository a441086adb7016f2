//! Vector clocks: the operations that are known to be complete before the next operation of a stream or host thread.
//!
//! There is one component per stream; it counts the stream's operations. A host thread has a clock but no component,
//! because its actions are never pending. A clock may be *pending*: its stream waits for a flag whose raise has not
//! been submitted yet. A clock that joins it also joins the [`FlagWait`], and gets the knowledge of the raise later.

use gpu_pool::extend::driver::Address;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;

/// The number of a stream in clocks. It is never reused, not even by another checker of the process.
pub(super) type Component = u64;

#[derive(Clone, Default)]
pub(super) struct Clock {
    counts: SmallVec<[(Component, u64); 4]>,
    waits: SmallVec<[Arc<FlagWait>; 1]>,
}

/// A stream's wait for a flag whose write was not known when the wait was submitted.
pub(super) struct FlagWait {
    pub address: Address,
    pub value: u64,
    /// The clock of the operation that raised the flag. Only used under the checker's lock.
    raised: Mutex<Option<Clock>>,
}

impl FlagWait {
    pub fn new(address: Address, value: u64) -> Arc<FlagWait> {
        Arc::new(FlagWait { address, value, raised: Mutex::new(None) })
    }

    /// Gives the knowledge of `by` to every clock with this wait. `by` is without it, so there are no cycles.
    pub fn raise(&self, by: Clock) {
        *self.raised.lock() = Some(by);
    }

    pub fn lower(&self) {
        *self.raised.lock() = None;
    }
}

impl Clock {
    pub fn covers(&self, component: Component, count: u64) -> bool {
        let known = self.counts.binary_search_by_key(&component, |&(c, _)| c).map_or(0, |at| self.counts[at].1);
        known >= count
            || self.waits.iter().any(|m| m.raised.lock().as_ref().is_some_and(|by| by.covers(component, count)))
    }

    pub fn is_pending(&self) -> bool {
        self.waits.iter().any(|wait| wait.raised.lock().as_ref().is_none_or(Clock::is_pending))
    }

    pub fn set(&mut self, component: Component, count: u64) {
        match self.counts.binary_search_by_key(&component, |&(c, _)| c) {
            Ok(at) => self.counts[at].1 = self.counts[at].1.max(count),
            Err(at) => self.counts.insert(at, (component, count)),
        }
    }

    /// Returns whether any of the knowledge was new.
    pub fn join(&mut self, other: &Clock) -> bool {
        self.join_counts(other) | self.join_waits(other)
    }

    fn join_waits(&mut self, other: &Clock) -> bool {
        let before = self.waits.len();
        for wait in &other.waits {
            if !self.waits.iter().any(|m| Arc::ptr_eq(m, wait)) {
                self.waits.push(wait.clone());
            }
        }
        self.waits.len() > before
    }

    fn join_counts(&mut self, other: &Clock) -> bool {
        // Mostly both have the same components: then one pass over both is enough, and no component moves.
        let same = self.counts.len() == other.counts.len()
            && self.counts.iter().zip(&other.counts).all(|(mine, theirs)| mine.0 == theirs.0);
        let mut news = false;
        if same {
            for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
                news |= theirs.1 > mine.1;
                mine.1 = mine.1.max(theirs.1);
            }
            return news;
        }
        let mut merged = SmallVec::with_capacity(self.counts.len() + other.counts.len());
        let (mut mine, mut theirs) = (self.counts.iter().peekable(), other.counts.iter().peekable());
        loop {
            match (mine.peek(), theirs.peek()) {
                (Some(&&(a, n)), Some(&&(b, m))) if a == b => {
                    news |= m > n;
                    merged.push((a, n.max(m)));
                    mine.next();
                    theirs.next();
                }
                (Some(&&(a, n)), Some(&&(b, _))) if a < b => {
                    merged.push((a, n));
                    mine.next();
                }
                (_, Some(&&theirs_next)) => {
                    news = true;
                    merged.push(theirs_next);
                    theirs.next();
                }
                (Some(&&mine_next), None) => {
                    merged.push(mine_next);
                    mine.next();
                }
                (None, None) => break,
            }
        }
        self.counts = merged;
        news
    }

    /// Replaces each wait whose flag has been raised by the clock of the raise.
    pub fn flatten(&mut self) {
        while let Some(at) = self.waits.iter().position(|wait| wait.raised.lock().is_some()) {
            let wait = self.waits.swap_remove(at);
            let by = wait.raised.lock().clone();
            if let Some(by) = by {
                self.join(&by);
            }
        }
    }

    pub fn has_waits_of(&self, other: &Clock) -> bool {
        other.waits.iter().all(|wait| self.waits.iter().any(|own| Arc::ptr_eq(own, wait)))
    }

    pub fn add_wait(&mut self, wait: Arc<FlagWait>) {
        self.waits.push(wait);
    }

    /// The waits that are left after [`flatten`](Self::flatten).
    pub fn waits(&self) -> &[Arc<FlagWait>] {
        &self.waits
    }

    /// Keeps the knowledge that both clocks have for certain, and the flag waits of either. So the result may later
    /// know too much, but never too little: the checker then misses a race rather than reporting a false one.
    pub fn meet(&mut self, other: &Clock) {
        self.counts.retain(|(component, count)| {
            let theirs = other.counts.binary_search_by_key(component, |&(c, _)| c).map_or(0, |at| other.counts[at].1);
            *count = theirs.min(*count);
            *count > 0
        });
        self.join_waits(other);
    }

    pub fn retain(&mut self, keep: impl Fn(Component) -> bool) {
        self.counts.retain(|(component, _)| keep(*component));
    }
}

#[cfg(test)]
#[path = "../../tests/unit/check/clock_tests.rs"]
mod tests;
