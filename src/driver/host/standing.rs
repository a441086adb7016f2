//! How far a stream is, and how far that is which it waits for.
//!
//! Who waits for a stream has patience as long as it gets on. A stream also gets on when another one does that it is
//! queued behind: the stream of an event, those that take their turns at an engine or use the same memory, and all that
//! have a worker while it has none. A kernel that spins, or a wait for a word, does not tell whom it waits for: that
//! may be any stream of the machine.

use super::{
    event::Progress,
    op::{Operand, Work},
    sched::Core,
    slab::Key,
    stream::State,
};
use smallvec::SmallVec;

/// What a stream is waiting for at a moment, itself first, with how much of it is done.
#[derive(Debug, Default)]
pub(crate) struct Standing(SmallVec<[(Behind, u64); 4]>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behind {
    /// The operations of a stream.
    Stream(Key),
    /// Those of an engine, by device.
    Engine(usize, usize),
    /// Those of the whole machine.
    Machine,
}

impl Standing {
    /// Whether anything has been done of what the stream waited for then and waits for now.
    pub(crate) fn has_advanced_since(&self, before: &Standing) -> bool {
        self.0.iter().any(|(what, now)| before.0.iter().any(|(other, then)| other == what && now > then))
    }
}

impl Core {
    /// Follows a stream to what keeps it from going on.
    pub fn standing(&self, mut key: Key) -> Standing {
        let mut standing = Standing::default();
        while let Some(stream) = self.streams.get(key) {
            let known = (Behind::Stream(key), stream.completed);
            // Streams that wait for each other: a deadlock, which is found elsewhere.
            if standing.0.contains(&known) {
                break;
            }
            standing.0.push(known);
            let Some(op) = stream.queue.front().filter(|_| stream.state != State::Active) else { break };
            let machine = (Behind::Machine, self.completions);
            match op.work {
                Work::WaitEvent(record) if matches!(self.progress(record), Progress::Pending) => key = record.stream,
                Work::WaitValue { .. } => return standing.and(machine),
                _ if stream.state == State::Ready || stream.tried.is_some() => return standing.and(machine),
                _ => match self.engine(stream.device, op.engine) {
                    Some((index, completed)) => {
                        return standing.and((Behind::Engine(stream.device, index), completed));
                    }
                    // It is parked for the memory that it names.
                    None => match self.user_of(&op.work) {
                        Some(other) => key = other,
                        None => break,
                    },
                },
            }
        }
        standing
    }

    /// A stream whose running operation excludes this work.
    fn user_of(&self, work: &Work) -> Option<Key> {
        let mut found = None;
        work.operands(&mut |Operand { address, bytes, write }| {
            if let Ok(place) = self.memory.resolve(address, bytes)
                && bytes > 0
            {
                found = found.or(self.active.user(place.block.at(place.offset) as usize, bytes, write));
            }
        });
        found
    }
}

impl Standing {
    fn and(mut self, last: (Behind, u64)) -> Self {
        self.0.push(last);
        self
    }
}
