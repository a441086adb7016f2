//! Random sets of messages against a model: each message comes once, with its bytes; one tag's in their order.

use super::Place;
use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use std::thread;

/// Number of processes that a set is for; with fewer, peers wrap.
const HOSTS: usize = 3;

#[derive(Clone, Debug)]
struct Entry {
    from: usize,
    to: usize,
    /// Which of the tags.
    tag: usize,
    len: usize,
}

/// Messages of one run. All processes have the same set.
#[derive(Clone, Debug)]
pub(super) struct Set {
    messages: Vec<Entry>,
    /// For each tag the calls that its messages are sent and received in: calls have no order.
    calls: Vec<(usize, usize)>,
}

/// Calls at once.
const CALLS: usize = 3;
const TAGS: usize = 12;

/// `edge`: lengths up to about twice this.
pub(super) fn sets(edge: usize) -> impl Strategy<Value = Set> {
    let len = prop_oneof![3 => 0..40usize, 2 => edge - 30..edge + 30, 1 => 0..2 * edge];
    let message = (0..HOSTS, 0..HOSTS, 0..TAGS, len).prop_map(|(from, to, tag, len)| Entry { from, to, tag, len });
    let (messages, calls) = (prop::collection::vec(message, 0..40), prop::collection::vec((0..CALLS, 0..CALLS), TAGS));
    (messages, calls).prop_map(|(messages, calls)| Set { messages, calls })
}

/// The same ones in each process.
pub(super) fn fixed_sets() -> Vec<Set> {
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[7; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let sets = sets(4096);
    (0..20).map(|_| sets.new_tree(&mut runner).expect("nothing is filtered").current()).collect()
}

impl Set {
    /// This process's part, in several calls at once.
    pub(super) fn carry_out(&self, place: &Place<'_>) {
        let here = |host: usize| host % place.size == place.rank;
        thread::scope(|s| {
            for call in 0..CALLS {
                s.spawn(move || {
                    let mut messages = Vec::new();
                    for Entry { from, to, tag, len } in &self.messages {
                        let (sent, received) = self.calls[*tag];
                        let tag = super::tag(800 + *tag as u64 / 4, *tag as u32 % 2, *tag as u32 / 2 % 2);
                        if here(*from) && sent == call {
                            messages.push(place.send(*to % place.size, tag, *len));
                        }
                        if here(*to) && received == call {
                            messages.push(place.receive(*from % place.size, tag, *len));
                        }
                    }
                    place.exchange(messages);
                });
            }
        });
        // Tags come again in the next set.
        place.meet(900);
    }
}
