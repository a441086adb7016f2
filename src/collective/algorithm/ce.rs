//! Collectives that only move data, by copy engines: they leave the processors to other work.
//!
//! `choose` picks it for devices without access to each other's memory, and for sizes at which engines are faster than
//! kernels. Sums go by [`exchange_ce`](super::exchange_ce).
//!
//! Copies to other devices are on a stream of their own. Copies within the own memory are made by a kernel beside them:
//! an engine would be slower, and has the other devices' data to move.

use super::{
    super::{
        DType, ReduceOp,
        kernels::Meet,
        launch::{self, Combination},
        request::{Job, RemotePtr},
    },
    About, Algorithm, Case, Matched, Member, Needs, types,
};
use crate::{Device, copy::peer, device::OnStream, error::Result};

pub(crate) struct Ce;

/// Most bytes that a member relays at once.
const PIECE: usize = 4 << 20;
/// Most bytes that are not worth another stream.
const LITTLE: usize = 64 << 10;

impl Algorithm for Ce {
    fn about(&self) -> About {
        About { name: "ce", group: types::Algorithm::Copies, waits_by: "events" }
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
        let work = matched.shape.copies(member.group.count(), member.group.rank, member.request.grain());
        member.carry_out(matched, &work, |job| copy_all(member, job))
    }
}

/// The reason to use copy engines, if there is one.
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

/// Submits this member's part to streams of the copy engines.
fn copy_all(member: &Member<'_>, job: &Job) -> Result<()> {
    let (group, request, name) = (member.group, member.request, member.name());
    let dev = group.dev;
    let bytes = match job {
        Job::Combine { len, .. } => len * request.dtype.size(),
        Job::Pairs(pairs) => pairs.iter().map(|(.., bytes)| *bytes).max().unwrap_or(0),
    };
    // A group of one has nothing for an engine, and a capture may hold its call.
    let streams = match bytes > LITTLE && group.count() > 1 {
        true => dev.worker.engines()?,
        false => [dev.stream.clone(), dev.stream.clone()],
    };
    let [send, fetch] = streams.each_ref().map(|stream| dev.at(stream.clone()));
    let moves = Moves { dev, name, fetch, send };
    member.fork_join(&streams, || match job {
        Job::Pairs(pairs) => pairs.iter().try_for_each(|&(from, to, bytes)| moves.send(from, to, bytes)),
        Job::Combine { sources, destinations, factors, .. } if factors.is_empty() => {
            moves.relay(bytes, sources[0], destinations)
        }
        // A group of one, with a factor.
        Job::Combine { len, sources, destinations, factors } => {
            let what = (request.dtype, request.reduce);
            let combination = Combination { name, what, len: *len, sources, destinations, factors };
            combination.submit(dev, Meet::NONE, launch::blocks(bytes))
        }
    })
}

struct Moves<'g> {
    /// On the current stream.
    dev: &'g Device,
    name: &'static str,
    fetch: OnStream<'g>,
    send: OnStream<'g>,
}

impl Moves<'_> {
    fn send(&self, from: RemotePtr, to: RemotePtr, bytes: usize) -> Result<()> {
        if from.device != to.device {
            return copy(&self.send, to, from, bytes);
        }
        let (what, blocks) = ((DType::U8, ReduceOp::Sum), launch::blocks(bytes));
        let here =
            Combination { name: self.name, what, len: bytes, sources: &[from], destinations: &[to], factors: &[] };
        here.submit(self.dev, Meet::NONE, blocks)
    }

    /// Copies one member's data to all destinations. If another device has the data, it comes here first, and goes on
    /// from here.
    fn relay(&self, bytes: usize, source: RemotePtr, destinations: &[RemotePtr]) -> Result<()> {
        let own = self.dev.index();
        let here = destinations.iter().find(|to| to.device == own).copied();
        let Some(here) = here.filter(|_| source.device != own) else {
            return destinations.iter().try_for_each(|&to| self.send(source, to, bytes));
        };
        for start in (0..bytes).step_by(PIECE) {
            let at = |ptr: RemotePtr| ptr.offset(start);
            let len = PIECE.min(bytes - start);
            copy(&self.fetch, at(here), at(source), len)?;
            self.send.stream.wait_for(self.name, &self.fetch.stream, self.fetch.stream.submit())?;
            // (Managed memory has no owner, so only the address tells which destination is here.)
            let others = destinations.iter().filter(|to| to.address != here.address);
            others.copied().try_for_each(|to| copy(&self.send, at(to), at(here), len))?;
        }
        Ok(())
    }
}

/// A copy on the device's current stream.
fn copy(dev: &Device, to: RemotePtr, from: RemotePtr, bytes: usize) -> Result<()> {
    match to.address == from.address {
        true => Ok(()),
        false => peer::copy(dev, to.address, to.device, from.address, from.device, bytes),
    }
}
