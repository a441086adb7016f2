//! What is only moved, by copies: for devices without access to each other's memory, and for sizes at which copy engines are faster
//! than kernels; they leave the processors to others, too. What is added up goes by an [`exchange`](super::exchange).
//!
//! Copies to others are on a stream of their own, beside what a member moves within its own memory: that is a kernel's, since an
//! engine would be the slower, and has others' to move.

use super::{
    DType, Group, ReduceOp, direct,
    exchange::join,
    kernels::Meet,
    run::{Job, Request, Spot},
};
use crate::{Device, copy::peer, device::OnStream, error::Result};

/// Bytes of what is handed on at once, at most.
const PIECE: usize = 4 << 20;
/// As much as is worth another stream.
const LITTLE: usize = 64 << 10;

/// Submits a member's part to the current stream.
pub(super) fn submit(group: &Group<'_>, request: &Request, job: &Job) -> Result<()> {
    let (dev, name) = (group.dev, request.call.op());
    let bytes = match job {
        Job::Combine { len, .. } => len * request.dtype.size(),
        Job::Pairs(pairs) => pairs.iter().map(|(.., bytes)| *bytes).max().unwrap_or(0),
    };
    // A member by itself has nothing for an engine, and may capture it.
    let streams = match bytes > LITTLE && group.count() > 1 {
        true => dev.worker.engines()?,
        false => [dev.stream.clone(), dev.stream.clone()],
    };
    for stream in &streams {
        stream.wait_for(name, &dev.stream, dev.stream.submit())?;
    }
    let [send, fetch] = streams.each_ref().map(|stream| dev.at(stream.clone()));
    let moves = Moves { dev, name, fetch, send };
    let done = match job {
        Job::Pairs(pairs) => pairs.iter().try_for_each(|&(from, to, bytes)| moves.send(from, to, bytes)),
        Job::Combine { sources, destinations, factors, .. } if factors.is_empty() => {
            moves.hand_on(bytes, sources[0], destinations)
        }
        // Of one member, by a factor.
        Job::Combine { len, sources, destinations, factors } => {
            let what = (request.dtype, request.reduce);
            let combination = direct::Combination { name, what, len: *len, sources, destinations, factors };
            combination.submit(dev, Meet::NONE, direct::blocks(bytes))
        }
    };
    // Also after a failure: what was submitted to the other streams belongs to the caller's operation.
    let joined = streams.iter().map(|stream| join(dev, name, stream)).fold(Ok(()), Result::and);
    done.and(joined)
}

struct Moves<'g> {
    /// On the current stream.
    dev: &'g Device,
    name: &'static str,
    fetch: OnStream<'g>,
    send: OnStream<'g>,
}

impl Moves<'_> {
    fn send(&self, from: Spot, to: Spot, bytes: usize) -> Result<()> {
        if from.device != to.device {
            return copy(&self.send, to, from, bytes);
        }
        let (what, blocks) = ((DType::U8, ReduceOp::Sum), direct::blocks(bytes));
        let here = direct::Combination {
            name: self.name,
            what,
            len: bytes,
            sources: &[from],
            destinations: &[to],
            factors: &[],
        };
        here.submit(self.dev, Meet::NONE, blocks)
    }

    /// What one member has, to all destinations.
    fn hand_on(&self, bytes: usize, source: Spot, destinations: &[Spot]) -> Result<()> {
        let own = self.dev.index();
        let here = destinations.iter().find(|to| to.device == own).copied();
        let Some(here) = here.filter(|_| source.device != own) else {
            return destinations.iter().try_for_each(|&to| self.send(source, to, bytes));
        };
        // Another's: it comes here, and goes on from here.
        for start in (0..bytes).step_by(PIECE) {
            let at = |spot: Spot| Spot { address: spot.address + start as u64, ..spot };
            let len = PIECE.min(bytes - start);
            copy(&self.fetch, at(here), at(source), len)?;
            self.send.stream.wait_for(self.name, &self.fetch.stream, self.fetch.stream.submit())?;
            // (Managed memory is at home everywhere, so the device does not tell whose it is.)
            let others = destinations.iter().filter(|to| to.address != here.address);
            others.copied().try_for_each(|to| copy(&self.send, at(to), at(here), len))?;
        }
        Ok(())
    }
}

/// On the device's current stream.
fn copy(dev: &Device, to: Spot, from: Spot, bytes: usize) -> Result<()> {
    match to.address == from.address {
        true => Ok(()),
        false => peer::copy(dev, to.address, to.device, from.address, from.device, bytes),
    }
}
