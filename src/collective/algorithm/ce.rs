//! Moves by copy engines, for collectives that add nothing up ([`exchange_ce`](super::exchange_ce) is for sums).
//!
//! For devices without access to each other's memory, and for sizes at which copy engines are faster than kernels. They
//! leave the multiprocessors to other work.
//!
//! Copies to peers are on a stream of their own. They overlap with the moves within the member's own memory, which are
//! kernels: a copy engine would be slower, and has the peers' data to move.

use super::{
    super::{
        choose::Case,
        launch::{self, Combination},
        request::{Job, RemotePtr},
    },
    Algorithm, Matched, Member, Needs,
};
use crate::fabric::types::{self, DType, ReduceOp};
use crate::{error::Result, memory::stream::StreamCore};
use std::sync::Arc;

pub(crate) struct Ce;

/// Most bytes that are relayed at once.
const PIECE: usize = 4 << 20;
/// A part with at most this many bytes does not pay for another stream.
const LITTLE: usize = 64 << 10;

impl Algorithm for Ce {
    fn name(&self) -> &'static str {
        "ce"
    }

    fn group(&self, _: &Case<'_>) -> types::Algorithm {
        types::Algorithm::Copies
    }

    fn waits_by(&self) -> &'static str {
        "events"
    }

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        copies(case)
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        (case.wants(types::Algorithm::Copies) && case.nameable()).then_some("asked for")
    }

    fn needs(&self, _: &Case<'_>) -> Needs {
        Needs::EVENTS
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        launch::blocks(case.largest())
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let request = member.request;
        member.ordered_by_events(matched, || {
            let work = matched.shape.copies(member.count(), member.rank, request.grain());
            if work.is_empty() {
                return Ok(());
            }
            let at = |rank, side| member.remote(matched, rank, side);
            carry_out(member, &request.job(&work, at, member.factors(matched)))
        })
    }
}

/// The reason for copy engines, if they are right for this case.
pub(super) fn copies(case: &Case<'_>) -> Option<&'static str> {
    if case.machine.virtual_time {
        Some("virtual time is for copies; what kernels do with peers' memory is not modelled")
    } else if !case.direct && !case.meets_in_host() {
        Some("not all members have peer access")
    } else {
        (case.direct && case.engines() && !case.held()).then_some(
            "at this size copy engines that only write are faster than kernels, and leave the processors free",
        )
    }
}

/// Submits this member's part.
fn carry_out(member: &Member<'_>, job: &Job) -> Result<()> {
    let request = member.request;
    let bytes = match job {
        Job::Combine { len, .. } => len * request.dtype.size(),
        Job::Pairs(pairs) => pairs.iter().map(|(.., bytes)| *bytes).max().unwrap_or(0),
    };
    // A group of one copies on its own device, and may be capturing a graph. Copy engines would not help it.
    let streams = match bytes > LITTLE && member.count() > 1 {
        true => member.executor.engines()?,
        false => [member.stream.clone(), member.stream.clone()],
    };
    for stream in &streams {
        stream.wait_for(member.name(), member.stream, member.stream.submit())?;
    }
    let [send, fetch] = &streams;
    let moves = Moves { member, fetch, send };
    let done = match job {
        Job::Pairs(pairs) => pairs.iter().try_for_each(|&(from, to, bytes)| moves.send(from, to, bytes)),
        Job::Combine { sources, destinations, factors, .. } if factors.is_empty() => {
            moves.relay(bytes, sources[0], destinations)
        }
        // A sum of one member, with a factor.
        Job::Combine { len, sources, destinations, factors } => {
            let combination = Combination { len: *len, sources, destinations, factors };
            combination.submit(member, (request.dtype, request.reduce), launch::blocks(bytes))
        }
    };
    // Also after a failure: the work on the other streams belongs to the caller's operation.
    let joined = streams.iter().map(|stream| member.join(stream)).fold(Ok(()), Result::and);
    done.and(joined)
}

struct Moves<'g> {
    /// Its stream has the moves within the member's own memory.
    member: &'g Member<'g>,
    /// The stream of copies from a peer.
    fetch: &'g Arc<StreamCore>,
    /// The stream of copies to peers.
    send: &'g Arc<StreamCore>,
}

impl Moves<'_> {
    fn send(&self, from: RemotePtr, to: RemotePtr, bytes: usize) -> Result<()> {
        if from.device != to.device {
            return self.copy(self.send, to, from, bytes);
        }
        let here = Combination { len: bytes, sources: &[from], destinations: &[to], factors: &[] };
        here.submit(self.member, (DType::U8, ReduceOp::Sum), launch::blocks(bytes))
    }

    /// Copies one source to all destinations. A peer's source comes to this device first and is relayed from here.
    fn relay(&self, bytes: usize, source: RemotePtr, destinations: &[RemotePtr]) -> Result<()> {
        let own = self.member.index();
        let here = destinations.iter().find(|to| to.device == own).copied();
        let Some(here) = here.filter(|_| source.device != own) else {
            return destinations.iter().try_for_each(|&to| self.send(source, to, bytes));
        };
        for start in (0..bytes).step_by(PIECE) {
            let at = |ptr: RemotePtr| ptr.offset(start);
            let len = PIECE.min(bytes - start);
            self.copy(self.fetch, at(here), at(source), len)?;
            self.send.wait_for(self.member.name(), self.fetch, self.fetch.submit())?;
            // Compared by address: managed memory belongs to no device.
            let others = destinations.iter().filter(|to| to.address != here.address);
            others.copied().try_for_each(|to| self.copy(self.send, at(to), at(here), len))?;
        }
        Ok(())
    }

    /// Copies on one of the two streams, unless it is a copy onto itself.
    fn copy(&self, stream: &Arc<StreamCore>, to: RemotePtr, from: RemotePtr, bytes: usize) -> Result<()> {
        match to.address == from.address {
            true => Ok(()),
            false => self.member.executor.copy(stream, to, from, bytes),
        }
    }
}
