//! The progress of a stream and of the streams, engines and memory that it waits for.
//!
//! Waits with a deadline use it: the deadline measures missing progress, not time. A stream also makes progress when
//! its obstacle does: the stream of an event, the users of an engine or of a byte range, all streams that have a worker
//! while this one has none. The obstacle of a spinning kernel or a wait for a word may be any stream of the machine.

use super::{Core, Key, Operand, Progress, Work, stream::State};
use smallvec::SmallVec;

/// Each with its count of completed operations. The stream comes first.
#[derive(Debug, Default)]
pub(crate) struct Standing(SmallVec<[(Behind, u64); 4]>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behind {
    Stream(Key),
    Engine(usize, usize),
    Machine,
}

impl Standing {
    /// Whether any counter that both snapshots contain has grown.
    pub(crate) fn has_advanced_since(&self, before: &Standing) -> bool {
        self.0.iter().any(|(what, now)| before.0.iter().any(|(other, then)| other == what && now > then))
    }
}

impl Core {
    pub fn standing(&self, mut key: Key) -> Standing {
        let mut standing = Standing::default();
        while let Some(stream) = self.streams.get(key) {
            let known = (Behind::Stream(key), stream.completed);
            // Streams that wait for each other are a deadlock: `deadlock` finds it.
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
                    // It is parked because another operation uses its memory.
                    None => match self.user_of(&op.work) {
                        Some(other) => key = other,
                        None => break,
                    },
                },
            }
        }
        standing
    }

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
