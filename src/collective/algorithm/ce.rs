//! Collectives that only move data, by copy engines: they leave the processors to other work.
//!
//! `choose` picks it for devices without access to each other's memory, and for sizes at which engines are faster than
//! kernels. Copies to other devices are on the member's stream, so that no event stands between them and the peers'
//! events. A kernel on a stream beside it makes copies within the own memory: an engine would be slower.

use super::{super::launch, Algorithm, Case, Matched, Member, Needs};
use crate::{
    collective::{Combination, Job, RemotePtr},
    error::Result,
    fabric::{DType, ReduceOp, types},
    memory::StreamCore,
};
use smallvec::SmallVec;
use std::sync::Arc;

pub(crate) struct Ce;

/// Most bytes that a member relays at once.
const PIECE: usize = 4 << 20;
const LITTLE: usize = 64 << 10;

impl Algorithm for Ce {
    about!("ce", Copies, "events");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        copies(case)
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        (case.wants(types::Algorithm::Copies) && case.nameable()).then_some("asked for")
    }

    fn needs(&self, _: &Case<'_>) -> Needs {
        Needs::EVENTS
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let work = matched.shape.copies(member.count(), member.rank, member.request.grain());
        member.carry_out(matched, &work, |job| copy_all(member, job))
    }
}

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

fn copy_all(member: &Member<'_>, job: &Job) -> Result<()> {
    let (request, own) = (member.request, member.index());
    let bytes = match job {
        Job::Combine { len, .. } => len * request.dtype.size(),
        Job::Pairs(pairs) => pairs.iter().map(|(.., bytes)| *bytes).max().unwrap_or(0),
    };
    let ends_here = match job {
        Job::Combine { destinations, .. } => destinations.iter().any(|to| to.device == own),
        Job::Pairs(pairs) => pairs.iter().any(|(_, to, bytes)| to.device == own && *bytes > 0),
    };
    // A group of one has nothing to overlap, and a capture may hold its call.
    let side: SmallVec<[Arc<StreamCore>; 1]> = match bytes > LITTLE && member.count() > 1 && ends_here {
        true => member.engines()?.into_iter().take(1).collect(),
        false => SmallVec::new(),
    };
    let moves = Moves { member, side: side.first().unwrap_or(member.stream) };
    member.fork_join(&side, || match job {
        Job::Pairs(pairs) => {
            let (here, others): (Vec<_>, Vec<_>) = pairs.iter().partition(|(from, to, _)| from.device == to.device);
            others.into_iter().chain(here).try_for_each(|&(from, to, bytes)| moves.send(from, to, bytes))
        }
        Job::Combine { sources, destinations, factors, .. } if factors.is_empty() => {
            moves.relay(bytes, sources[0], destinations)
        }
        // A group of one, with a factor.
        Job::Combine { len, sources, destinations, factors } => {
            let combination = Combination { len: *len, sources, destinations, factors };
            combination.submit(member, (request.dtype, request.reduce), launch::blocks(bytes))
        }
    })
}

struct Moves<'g> {
    member: &'g Member<'g>,
    /// The stream of what ends on this device: moves within its own memory, and copies from a peer.
    side: &'g Arc<StreamCore>,
}

impl Moves<'_> {
    fn send(&self, from: RemotePtr, to: RemotePtr, bytes: usize) -> Result<()> {
        if from.device != to.device {
            return self.copy(self.member.stream, to, from, bytes);
        }
        let here = Combination { len: bytes, sources: &[from], destinations: &[to], factors: &[] };
        let side = self.member.on(self.side);
        here.submit(&side, (DType::U8, ReduceOp::Sum), launch::blocks(bytes))
    }

    /// Copies one member's data to all destinations. Data of another device come here first, and go on from here.
    fn relay(&self, bytes: usize, source: RemotePtr, destinations: &[RemotePtr]) -> Result<()> {
        let own = self.member.index();
        let here = destinations.iter().find(|to| to.device == own).copied();
        let Some(here) = here.filter(|_| source.device != own) else {
            return destinations.iter().try_for_each(|&to| self.send(source, to, bytes));
        };
        for start in (0..bytes).step_by(PIECE) {
            let at = |ptr: RemotePtr| ptr.offset(start);
            let len = PIECE.min(bytes - start);
            self.copy(self.side, at(here), at(source), len)?;
            self.member.stream.wait_for(self.member.name(), self.side, self.side.submit())?;
            let others = destinations.iter().filter(|to| to.address != here.address);
            others.copied().try_for_each(|to| self.copy(self.member.stream, at(to), at(here), len))?;
        }
        Ok(())
    }

    fn copy(&self, stream: &Arc<StreamCore>, to: RemotePtr, from: RemotePtr, bytes: usize) -> Result<()> {
        match to.address == from.address {
            true => Ok(()),
            false => self.member.copy(stream, to, from, bytes),
        }
    }
}
