//! all_to_all over several processes, gather and scatter: everything that moves other elements to each member.
//!
//! All members stage what they send, and show each other the memory. A relay sends the elements for a member of another
//! process: by the member with the same local index. So a rail has one sender and one receiver. Between devices the
//! elements go by [`two_hop`].

use super::cut::{Amount, place};
use super::hierarchical::{Carrier, HierarchicalCall, part};
use super::message_route::CancelOn;
use super::two_hop;
use crate::internals::*;
use crate::runtime::{Contained, Counts, Payload, Request, Shape, value_of};
use crate::traits::{Message, Tag};
use crate::wire::decode;
use gpu_pool::{Error, PinnedBuffer, Result};
use std::sync::Arc;

pub(super) fn by_shape(hier: &HierarchicalCall<'_, '_>, request: &Request, shape: &Shape) -> Result<()> {
    let of = |counts: &Counts, member: usize| counts.part(member).len();
    match shape {
        Shape::Gather { counts, root } => flow(hier, request, &|a, b| if b == *root { of(counts, a) } else { 0 }),
        Shape::Scatter { counts, root } => flow(hier, request, &|a, b| if a == *root { of(counts, b) } else { 0 }),
        Shape::AllToAll { send, .. } => flow(hier, request, &|a, b| of(&send[a], b)),
        _ => unreachable!("sums and copies to all are elsewhere"),
    }
}

/// `all_to_all_v`: each member knows its own counts only.
pub(super) fn by_counts(hier: &HierarchicalCall<'_, '_>, request: &Request) -> Result<()> {
    let (n, own) = (hier.members(), request.counts.as_ref().expect("all_to_all_v says how much"));
    let row = |counts: &Counts| (0..n).map(|k| counts.part(k).len()).collect::<Vec<_>>();
    let own = postcard::to_stdvec(&(row(&own.0), row(&own.1), hier.call.site.to_string())).expect("numbers and text");
    let told = hier.group.exchange_bytes(hier.call, own)?;
    // Of each member: how much it sends to all, and receives from all, and its call site.
    let all: Vec<(Vec<usize>, Vec<usize>, String)> =
        told.iter().map(|bytes| decode(bytes).unwrap_or_default()).collect();
    if let Some(rank) = (0..n).find(|&rank| all[rank].0.len() != n || all[rank].1.len() != n) {
        let sent = all[rank].0.len() + all[rank].1.len();
        let why = format_args!("member {rank} has sent {sent} counts of {n} members");
        return Err(Error::invalid_at(hier.call.site, hier.call.op, why));
    }
    let pairs = || (0..n).flat_map(|a| (0..n).map(move |b| (a, b)));
    // Every member finds this pair, and nothing has begun.
    if let Some((a, b)) = pairs().find(|&(a, b)| all[a].0[b] != all[b].1[a]) {
        let place = |rank: usize, call: String| hier.across.places[rank].call(call, all[rank].2.clone());
        return Err(Error::WorldMismatch {
            what: "counts",
            a: place(a, format!("all_to_all_v({} elements for member {b})", all[a].0[b])),
            b: place(b, format!("all_to_all_v({} elements from member {a})", all[b].1[a])),
        });
    }
    flow(hier, request, &|a, b| all[a].0[b])
}

fn flow(hier: &HierarchicalCall<'_, '_>, request: &Request, amount: Amount<'_>) -> Result<()> {
    let (across, size, n, me) = (hier.across, request.dtype.size(), hier.members(), hier.group.rank());
    let transport = match hier.carrier()? {
        Carrier::Host(transport) => transport,
        Carrier::Device(transport) => return two_hop::flow(hier, request, amount, transport),
    };
    let (hosts, own) = (&across.hosts, &across.hosts[across.me].ranks);
    let sends_any = (0..n).any(|to| amount(me, to) > 0);
    let staged = match request.source.as_ref().filter(|_| sends_any) {
        Some(source) => hier.stage(source)?,
        None => Arc::new(hier.pinned(1)?),
    };
    // Memory for all that arrives, before this member does.
    let from_afar = (1..hosts.len()).map(|k| (across.me + k) % hosts.len());
    let senders = from_afar.flat_map(|host| hosts[host].ranks.iter().map(move |&rank| (host, rank)));
    let senders: Vec<(usize, usize)> = senders.filter(|&(_, rank)| amount(rank, me) > 0).collect();
    let room = senders.iter().map(|&(_, rank)| hier.pinned(amount(rank, me) * size)).collect::<Result<Vec<_>>>()?;

    let (told, commit) = hier.meet(Payload::Value(Contained::new(Box::new(staged))), |_| Vec::new())?;
    let stages: Vec<Arc<PinnedBuffer<u8>>> = told.iter().map(|told| value_of(told)).collect();
    let numbers = commit.numbers;
    drop(commit.window);
    let tag = |host: usize, to: usize| Tag { number: numbers[host], phase: 0, rail: across.places[to].device as u32 };
    let receive = |((host, rank), into): ((usize, usize), PinnedBuffer<u8>)| {
        let len = amount(rank, me) * size;
        Message::Receive { from: hosts[host].host, tag: tag(host, me), into, len }
    };
    let mut messages: Vec<Message> = senders.iter().copied().zip(room).map(receive).collect();
    for (host, members) in hosts.iter().enumerate().filter(|(host, _)| *host != across.me) {
        // The members of that process that this one relays for.
        for &to in members.ranks.iter().skip(across.here).step_by(own.len()) {
            for (stage, &from) in stages.iter().zip(own) {
                let range = place(amount, from, to, size);
                if !range.is_empty() {
                    messages.push(Message::Send {
                        to: hosts[host].host,
                        tag: tag(across.me, to),
                        bytes: stage.clone(),
                        range,
                    });
                }
            }
        }
    }
    let done = hier.done(transport.exchange(messages, &CancelOn::of(hier).check()))?;
    let Some(destination) = &request.destination else { return Ok(()) };
    let mut starts = vec![0; n + 1];
    (0..n).for_each(|from| starts[from + 1] = starts[from] + amount(from, me) * size);
    let to = |from: usize| part(destination, starts[from]..starts[from + 1]);
    for (message, (_, rank)) in done.iter().zip(senders) {
        if let Message::Receive { into, len, .. } = message {
            hier.upload(into, 0..*len, &to(rank))?;
        }
    }
    for (stage, &from) in stages.iter().zip(own) {
        if amount(from, me) > 0 {
            hier.upload(stage, place(amount, from, me, size), &to(from))?;
        }
    }
    Ok(())
}
