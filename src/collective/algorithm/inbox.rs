//! Sums of floats in one trip, as data that are their own flags: everything to everyone. No word that is sent has the
//! value that an empty inbox is full of, so a receiver polls the data themselves (`kernels/inbox.cuh`).
//!
//! `choose` picks it for sums of floats that are not large: half the bytes of [`ll`]'s packets, and no flag behind the
//! data as in [`eager`](super::eager). [`slots`](super::slots) has no limit. Never touches a peer's user buffer.
//!
//! Invariant: a room of the inbox is written again at least two calls later, when it is empty; each call waits for data
//! of all its peers. The rest of a failed call is removed before the member meets again (`collective/barrier.rs`).

use super::{Algorithm, Case, Matched, Member, ll};
use crate::{
    collective::{Entry, kernels::typed_float, launch},
    error::Result,
    fabric::{BLOCKS, DType, Limits, Side, limits::traffic::most_in_one_trip, types},
    kernel::builtin,
};

pub(crate) struct Inbox;

/// Bytes of a block: a unit of 16 for each thread, so that all are on their way at once.
const PER_BLOCK: usize = 512 * 16;

/// Most bytes to one peer, where inboxes have room. More than two members: by a model, not measured.
pub(crate) fn most_whole(members: usize) -> usize {
    if members > 2 { most_in_one_trip(members) } else { usize::MAX }
}

impl Algorithm for Inbox {
    about!("inbox", Inbox, "data");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        let most = if case.whole { most_whole(case.members) } else { usize::MAX };
        (case.auto() && can(case, most)).then_some("a sum of floats, not large: data that are their own flags")
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        (case.wants(types::Algorithm::Inbox) && can(case, usize::MAX)).then_some("asked for; it fits into an inbox")
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        blocks(case.packets.unwrap_or(0), case.limits)
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let packets = ll::packets(member, matched);
        let blocks = blocks(ll::bytes(member, &packets), member.limits);
        let entry = entry(member.request.dtype).expect("chosen for floats");
        ll::trip(member, matched, &packets, Side::Source, entry, blocks)
    }
}

/// Whether it adds up floats, of at most `most` bytes for each peer, and members have room for them. (What sends
/// nothing waits for no peer, so the devices would not count the meeting.)
fn can(case: &Case<'_>, most: usize) -> bool {
    let Some((room, _)) = case.inboxes() else { return false };
    let fits = case.packets.is_some_and(|each| each > 0 && each <= most.min(room));
    fits && case.sums() && entry(case.dtype).is_some()
}

pub(in super::super) fn blocks(bytes: usize, limits: &Limits) -> u32 {
    launch::blocks_of(bytes, PER_BLOCK, limits.of_one_trip(BLOCKS))
}

/// The kernel of one trip, if there is one for the type. Launched with [`Push::args`](ll::Push::args).
pub(in super::super) fn entry(dtype: DType) -> Option<Entry> {
    let name = typed_float!(dtype, "inbox")?;
    Some(Entry { module: &builtin::INBOX, name, host: None })
}
