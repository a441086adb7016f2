//! The same parts by copies, with the arithmetic in local memory: for devices without access to each other's memory, and
//! for machines on which copies are faster. What crosses devices goes by copy engines, or through the host.
//!
//! A part is done piece by piece, so that the scratch stays small: fetch what others have of a piece, combine it with the
//! own, send the result round.

use super::{
    DType, Group, direct,
    kernels::Meet,
    plan::{Side, Work},
    run::{Job, Request, Spot},
};
use crate::{DeviceBuffer, copy::peer, error::Result};
use smallvec::SmallVec;

/// Bytes of each source that are in scratch at once.
const PIECE: usize = 4 << 20;

/// Scratch that a part needs, if it needs any: room for a piece of each source and of the result.
pub(super) fn scratch(group: &Group<'_>, work: &Work, dtype: DType) -> Result<Option<DeviceBuffer<u8>>> {
    let Work::Combine { len, sources, destinations } = work else { return Ok(None) };
    let local = |member: usize| member == group.rank;
    let all_local = sources.iter().all(|place| local(place.member));
    let ends_here = destinations.iter().any(|place| local(place.member) && place.side == Side::Destination);
    if work.is_empty() || all_local && (sources.len() == 1 || ends_here) {
        return Ok(None);
    }
    let piece = (len * dtype.size()).min(PIECE).next_multiple_of(256);
    group.dev.allocate::<u8>("collective", piece * (sources.len() + 1)).map(Some)
}

/// Submits a member's part to the current stream.
pub(super) fn submit(
    group: &Group<'_>,
    request: &Request,
    job: &Job,
    scratch: Option<&DeviceBuffer<u8>>,
) -> Result<()> {
    let dev = group.dev;
    let copy = |to: Spot, from: Spot, bytes: usize| match to.address == from.address {
        true => Ok(()),
        false => peer::copy(dev, to.address, to.device, from.address, from.device, bytes),
    };
    let (len, sources, destinations, factors) = match job {
        Job::Pairs(pairs) => return pairs.iter().try_for_each(|&(from, to, bytes)| copy(to, from, bytes)),
        Job::Combine { len, sources, destinations, factors } => (*len, sources, destinations, factors),
    };
    let own = dev.index();
    let size = request.dtype.size();
    let room = (len * size).min(PIECE).next_multiple_of(256) as u64;
    let spare = |k: usize| {
        let scratch = scratch.expect("taken for what is not local");
        Spot { device: own, address: scratch.address() + k as u64 * room }
    };
    // A piece begins at whole elements, and where memory is moved in one go.
    let step = PIECE / size;
    for start in (0..len).step_by(step) {
        let part = step.min(len - start);
        let at = |spot: &Spot| Spot { address: spot.address + (start * size) as u64, ..*spot };
        let mut here: SmallVec<[Spot; 8]> = SmallVec::new();
        for (k, source) in sources.iter().map(at).enumerate() {
            here.push(if source.device == own { source } else { spare(k) });
            copy(here[k], source, part * size)?;
        }
        let result = match destinations.iter().find(|to| to.device == own) {
            Some(to) => at(to),
            None if here.len() == 1 && factors.is_empty() => here[0],
            None => spare(sources.len()),
        };
        let (name, what) = (request.call.op(), (request.dtype, request.reduce));
        let here = direct::Combination { name, what, len: part, sources: &here, destinations: &[result], factors };
        here.submit(dev, Meet::NONE, direct::blocks(part * size))?;
        destinations.iter().map(at).try_for_each(|to| copy(to, result, part * size))?;
    }
    Ok(())
}
