//! Barrier, and exchanges of host values between processes: as bytes in the notes of a meeting, or, where they are too
//! long for that, by an all_gather of the devices.

use super::hierarchical::{HierarchicalCall, Noted};
use crate::internals::*;
use crate::runtime::{Call, Contained, Counts, OpSite, Payload, Shape, between, value_of};
use crate::wire::{decode, shortened};
use gpu_pool::{AsView, AsViewMut, DType, Error, Group, Result};

/// The longest text that [`agree`] tells as it is.
const MOST_TERMS: usize = 1500;

pub(super) fn barrier(group: &Group<'_>, call: &Call) -> Result<()> {
    let _here = OpSite { op: "barrier", site: call.site }.enter();
    HierarchicalCall::new(group, call, false)?.meet(Payload::Nothing, |_| Vec::new()).map(drop)
}

pub(super) fn exchange(group: &Group<'_>, call: &Call, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    let value = Payload::Value(Contained::new(Box::new(own)));
    let hier = HierarchicalCall::new(group, call, false)?;
    let across = hier.across;
    let (told, commit) =
        hier.meet(value, |told| Noted::of(&pack(told.iter().map(|told| value_of::<Vec<u8>>(told)))).write())?;
    let notes = commit.notes;
    drop(commit.window);
    let nonsense = || Error::invalid_at(call.site, call.op, "another process has sent what cannot be read");
    let notes = notes.iter().map(|note| Noted::read(note).ok_or_else(nonsense)).collect::<Result<Vec<_>>>()?;
    let mut values = vec![Vec::new(); group.count()];
    let mut take = |host: usize, bytes: &[u8]| -> Result<()> {
        let all: Vec<Vec<u8>> = decode(bytes).map_err(|_| nonsense())?;
        let ranks = &across.hosts[host].ranks;
        fail_if!(all.len() != ranks.len(), nonsense());
        ranks.iter().zip(all).for_each(|(&rank, value)| values[rank] = value);
        Ok(())
    };
    // The first member of each process sends what comes later, for all of them.
    let mut counts = vec![0; group.count()];
    for (host, note) in notes.iter().enumerate() {
        match note {
            Noted::Here(bytes) => take(host, bytes)?,
            Noted::Later(len) => counts[across.hosts[host].ranks[0]] = *len,
        }
    }
    if counts.iter().any(|&len| len > 0) {
        let own = match counts[group.rank()] {
            0 => Vec::new(),
            _ => pack(told.iter().map(|told| value_of::<Vec<u8>>(told))),
        };
        let (dev, total) = (group.device(), counts.iter().sum());
        let (from, mut to) = (dev.upload(&own)?, dev.allocate::<u8>(call.op, total)?);
        let counts = Counts::By(counts.into());
        let move_all = Call::at(call.op, call.site).elements(DType::U8, total);
        let shape = Shape::AllGather { counts: counts.clone(), in_place: false };
        group.run(between(move_all, None, shape, Some(from.view()), Some(to.view_mut())))?;
        let all = dev.download(&to)?;
        for (host, _) in notes.iter().enumerate().filter(|(_, note)| matches!(note, Noted::Later(_))) {
            take(host, &all[counts.part(across.hosts[host].ranks[0])])?;
        }
    }
    Ok(values)
}

/// `Err(WorldMismatch)` on all members unless the first members of all processes say the same.
pub(super) fn agree(group: &Group<'_>, call: &Call, text: &str) -> Result<()> {
    let note =
        postcard::to_stdvec(&(call.site.to_string(), shortened(text, MOST_TERMS))).expect("texts can be written");
    let hier = HierarchicalCall::new(group, call, false)?;
    let across = hier.across;
    let (_, commit) = hier.meet(Payload::Nothing, |_| note)?;
    // Of each process: the place of its call, and its text.
    let all: Vec<(String, String)> = commit.notes.iter().map(|note| decode(note).unwrap_or_default()).collect();
    match (1..all.len()).find(|&host| all[host].1 != all[0].1) {
        None => Ok(()),
        Some(host) => {
            let call = |host: usize| {
                let place = across.places[across.hosts[host].ranks[0]];
                place.call(all[host].1.clone(), all[host].0.clone())
            };
            Err(Error::WorldMismatch { what: "call", a: call(0), b: call(host) })
        }
    }
}

fn pack(values: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    postcard::to_stdvec(&values.collect::<Vec<_>>()).expect("bytes can be written")
}

#[cfg(test)]
#[path = "../../tests/unit/collective/values_tests.rs"]
mod tests;
