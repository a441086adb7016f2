//! Flags: words in memory that streams write and wait for.
//!
//! Any recorded write that satisfies a wait may have ended it. So the waiting stream learns only what the clocks of all
//! these writes have in common. A write that the waiting stream knows to be overwritten does not count. If no write is
//! left, the flag will be raised later, and the stream's clock is pending until then.

use super::clock::{Clock, Component, FlagWait};
use gpu_pool::extend::driver::Address;
use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
};

/// For each word. The oldest are dropped first; at worst a wait for an old value learns a little too much. If the host
/// reads the word, all writes after the value that it has seen are kept, because it may rely on that value.
const KEPT: usize = 64;

#[derive(Default)]
struct Word {
    writes: VecDeque<Write>,
    polled: bool,
    waiting: Vec<Arc<FlagWait>>,
}

struct Write {
    /// `None` for a write that is no flag write: it overwrites the word and satisfies no wait.
    value: Option<u64>,
    component: Component,
    count: u64,
    clock: Clock,
}

#[derive(Default)]
pub(super) struct Flags(BTreeMap<Address, Word>);

fn satisfies(have: u64, want: u64) -> bool {
    have.wrapping_sub(want).cast_signed() >= 0
}

impl Flags {
    /// The knowledge that a wait surely gets from the writes so far. `known`: the operations that complete before it.
    pub fn acquire(&self, address: Address, value: u64, known: impl Fn(Component, u64) -> bool) -> Option<Clock> {
        let writes = &self.0.get(&address)?.writes;
        let past: Vec<&Write> = writes.iter().filter(|write| known(write.component, write.count)).collect();
        let overwritten = |write: &Write| {
            let by = |later: &&Write| {
                (later.component, later.count) != (write.component, write.count)
                    && later.clock.covers(write.component, write.count)
            };
            past.iter().any(by)
        };
        let ends = |write: &&Write| write.value.is_some_and(|have| satisfies(have, value)) && !overwritten(write);
        let candidates: Vec<&Write> = writes.iter().filter(ends).collect();
        // A candidate that comes after another candidate has all knowledge of that one, so only the first ones matter.
        let first = |write: &&&Write| {
            let after = |other: &&Write| {
                (other.component, other.count) != (write.component, write.count)
                    && write.clock.covers(other.component, other.count)
            };
            !candidates.iter().any(after)
        };
        let mut firsts = candidates.iter().filter(first);
        let mut common = firsts.next()?.clock.clone();
        firsts.for_each(|write| common.meet(&write.clock));
        Some(common)
    }

    /// The knowledge of a host thread that reads `value`: the clock of the last write with a value up to `value`.
    pub fn seen(&mut self, address: Address, value: u64) -> Option<Clock> {
        let word = self.0.get_mut(&address)?;
        let told = |write: &Write| write.value.is_some_and(|have| satisfies(value, have));
        let at = word.writes.iter().rposition(told);
        if let Some(at) = at {
            word.writes.drain(..at);
        }
        // The write of this value was dropped, if the host has never read the word before.
        let forgotten = at.is_none() && !word.polled && word.writes.len() == KEPT;
        word.polled = true;
        word.writes.front().filter(|_| at.is_some() || forgotten).map(|write| write.clock.clone())
    }

    pub fn wait(&mut self, wait: &Arc<FlagWait>) {
        self.0.entry(wait.address).or_default().waiting.push(wait.clone());
    }

    pub fn ended_by(&self, address: Address, value: u64) -> Vec<Arc<FlagWait>> {
        let waiting = self.0.get(&address).map_or(&[][..], |word| &word.waiting[..]);
        waiting.iter().filter(|wait| satisfies(value, wait.value)).cloned().collect()
    }

    pub fn end(&mut self, waits: &[Arc<FlagWait>]) {
        for wait in waits {
            if let Some(word) = self.0.get_mut(&wait.address) {
                word.waiting.retain(|other| !Arc::ptr_eq(wait, other));
            }
        }
    }

    pub fn write(&mut self, address: Address, value: u64, component: Component, count: u64, clock: Clock) {
        self.0.entry(address).or_default().push(Write { value: Some(value), component, count, clock });
    }

    pub fn overwrite(&mut self, range: &Range<Address>, component: Component, count: u64, clock: &Clock) {
        for (_, word) in self.0.range_mut(range.start.saturating_sub(7)..range.end) {
            word.push(Write { value: None, component, count, clock: clock.clone() });
        }
    }

    /// Records that the host writes over flags: earlier writes that it knows to be complete count no more.
    pub fn host_writes(&mut self, range: &Range<Address>, host: &Clock) {
        for (_, word) in self.0.range_mut(range.start.saturating_sub(7)..range.end) {
            word.writes.retain(|write| !host.covers(write.component, write.count));
        }
    }

    pub fn forget(&mut self, range: &Range<Address>) {
        let words: Vec<Address> = self.0.range(range.clone()).map(|(address, _)| *address).collect();
        words.iter().for_each(|address| drop(self.0.remove(address)));
    }

    pub fn each(&mut self, mut each: impl FnMut(Component, &mut Clock)) {
        let writes = self.0.values_mut().flat_map(|word| &mut word.writes);
        writes.for_each(|write| each(write.component, &mut write.clock));
    }
}

impl Word {
    fn push(&mut self, write: Write) {
        if self.writes.len() >= KEPT && !self.polled {
            self.writes.pop_front();
        }
        self.writes.push_back(write);
    }
}

#[cfg(test)]
#[path = "../../tests/unit/check/flags_tests.rs"]
mod tests;
