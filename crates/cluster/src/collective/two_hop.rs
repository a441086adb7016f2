//! all_to_all over rails between devices, and with it gather and scatter: data for another process hops inside the
//! sender's one first, to the member that stands on the receiver's rail.
//!
//! ```text
//! inside   all_to_all: to the member on the receiver's rail; to members of this process at once
//! rail     all that this member has collected goes to the other processes
//! inside   all_to_all, in a process with more members than rails: from the rails to the members beside them
//! ```
//!
//! Pieces that take the same steps keep the order of their senders, then of their receivers, on both sides.

use super::cut::{Amount, place};
use super::hierarchical::{HierarchicalCall, part};
use super::relay::Relay;
use crate::runtime::{Area, Counts, Request, Shape};
use crate::traits::{DeviceTransport, RailMessage};
use gpu_pool::Result;
use std::{ops::Range, sync::Arc};

/// One process's view of all pieces. Members are named by rank, and by local index where they are this process's.
struct TwoHopAllToAll<'t, 'g, 'd> {
    hier: &'t HierarchicalCall<'g, 'd>,
    amount: Amount<'t>,
    size: usize,
    /// By rank: the process, and the local index there.
    seats: Vec<(usize, usize)>,
}

impl TwoHopAllToAll<'_, '_, '_> {
    fn is_here(&self, rank: usize) -> bool {
        self.seats[rank].0 == self.hier.across.me
    }

    fn bytes(&self, from: usize, to: usize) -> usize {
        (self.amount)(from, to) * self.size
    }

    /// The local index of the member of process `host` that has the piece on its way from one process to another.
    fn relay(&self, host: usize, from: usize, to: usize) -> usize {
        let rail_map = &self.hier.rail_map;
        rail_map.all[rail_map.between(self.seats[from], self.seats[to])].members[host]
    }

    /// Which member of this process gets the piece from one of its members first.
    fn first(&self, from: usize, to: usize) -> usize {
        if self.is_here(to) { self.seats[to].1 } else { self.relay(self.hier.across.me, from, to) }
    }

    fn own(&self) -> &[usize] {
        &self.hier.across.hosts[self.hier.across.me].ranks
    }

    fn members(&self) -> Range<usize> {
        0..self.hier.members()
    }

    /// Pieces from members of this process that member `at` gets first.
    fn collected(&self, at: usize) -> Vec<(usize, usize)> {
        let all = self.own().iter().flat_map(|&from| self.members().map(move |to| (from, to)));
        all.filter(|&(from, to)| self.first(from, to) == at).collect()
    }

    /// Pieces from other processes for `to` that come to member `at` of this one.
    fn landed(&self, at: usize, to: usize) -> Vec<(usize, usize)> {
        let afar = self.members().filter(|&from| !self.is_here(from)).map(|from| (from, to));
        afar.filter(|&(from, to)| self.relay(self.hier.across.me, from, to) == at).collect()
    }

    fn total(&self, pieces: &[(usize, usize)]) -> usize {
        pieces.iter().map(|&(from, to)| self.bytes(from, to)).sum()
    }

    /// Each of these pieces with its range, when they lie one behind the other.
    fn laid_out(&self, pieces: &[(usize, usize)]) -> Vec<((usize, usize), Range<usize>)> {
        let mut end = 0;
        let lay = |&(from, to): &(usize, usize)| {
            let start = end;
            end += self.bytes(from, to);
            ((from, to), start..end)
        };
        pieces.iter().map(lay).collect()
    }

    /// An all_to_all of this process's members. `amount`: elements that one sends to another.
    fn inside(&self, request: &Request, amount: impl Fn(usize, usize) -> usize, areas: [&Area; 2]) -> Result<()> {
        let all = || 0..self.own().len();
        let send = all().map(|a| Counts::By(all().map(|b| amount(a, b)).collect())).collect();
        let receive = all().map(|b| Counts::By(all().map(|a| amount(a, b)).collect())).collect();
        self.hier.inside(request.dtype, None, Shape::AllToAll { send, receive }, areas)
    }
}

pub(super) fn flow(
    hier: &HierarchicalCall<'_, '_>,
    request: &Request,
    amount: Amount<'_>,
    transport: Arc<dyn DeviceTransport>,
) -> Result<()> {
    let (across, me, here, size) = (hier.across, hier.group.rank(), hier.across.here, request.dtype.size());
    // The senders' memory is not registered, so the receivers' must not be.
    if let Some(into) = request.destination.as_ref().filter(|area| hier.is_registered(area)) {
        let aside = hier.scratch(into.bytes.len())?;
        let request = Request { destination: Some(aside.clone()), ..request.clone() };
        return flow(hier, &request, amount, transport).and_then(|()| hier.copy(&aside, into));
    }
    let mut seats = vec![(0, 0); hier.members()];
    for (host, of) in across.hosts.iter().enumerate() {
        of.ranks.iter().enumerate().for_each(|(index, &rank)| seats[rank] = (host, index));
    }
    let calls = TwoHopAllToAll { hier, amount, size, seats };
    let own = calls.own();
    let relay = Relay::new(hier, transport, false)?;
    // Where in the destination the piece of each member goes.
    let destined = calls.laid_out(&calls.members().map(|from| (from, me)).collect::<Vec<_>>());
    let destination = |from: usize| request.destination.as_ref().map(|area| part(area, destined[from].1.clone()));
    let put = |pieces: &[((usize, usize), Range<usize>)], area: &Area| {
        let mine = pieces.iter().filter(|((_, to), range)| *to == me && !range.is_empty());
        mine.map(|((from, _), range)| (from, range)).try_for_each(|(&from, range)| {
            destination(from).map_or(Ok(()), |to| hier.copy(&part(area, range.clone()), &to))
        })
    };

    let pieces = calls.collected(here);
    let alone = own.len() == 1;
    let packed = match request.source.as_ref().filter(|source| alone && !hier.is_registered(source)) {
        // They lie as they go.
        Some(source) => source.clone(),
        None => hier.scratch(calls.members().map(|to| calls.bytes(me, to)).sum())?,
    };
    let mut end = 0;
    for first in 0..own.len() {
        for to in calls.members().filter(|&to| calls.first(me, to) == first) {
            let from = place(amount, me, to, size);
            let next = end + from.len();
            if let Some(source) = request.source.as_ref().filter(|source| source.address != packed.address) {
                hier.copy(&part(source, from), &part(&packed, end..next))?;
            }
            end = next;
        }
    }
    let collected = if alone { packed.clone() } else { hier.scratch(calls.total(&pieces))? };
    if !alone {
        let sent = |a: usize, b: usize| {
            let all = calls.members().filter(|&to| calls.first(own[a], to) == b);
            all.map(|to| amount(own[a], to)).sum()
        };
        calls.inside(request, sent, [&packed, &collected])?;
    }
    let collected_at = calls.laid_out(&pieces);

    let to_all = own.len() == hier.rail_map.all.len();
    let landing: Vec<_> = own.iter().flat_map(|&to| calls.landed(here, to)).collect();
    let landed_at = calls.laid_out(&landing);
    let landed = match request.destination.as_ref().filter(|_| to_all) {
        Some(into) => into.clone(),
        None => hier.scratch(if to_all { 0 } else { calls.total(&landing) })?,
    };
    let mut messages = Vec::new();
    for ((_, to), range) in collected_at.iter().filter(|((_, to), range)| !calls.is_here(*to) && !range.is_empty()) {
        let (to, at) = (across.places[*to].host, collected.address + range.start as u64);
        messages.push(RailMessage::send(to, at, range.len()));
    }
    let mut arriving: Vec<_> = landed_at.iter().filter(|(_, range)| !range.is_empty()).collect();
    arriving.sort_by_key(|((from, to), _)| (*from, *to));
    for ((from, to), range) in arriving {
        let own = destination(*from).filter(|_| to_all);
        let at = own.map_or(landed.address + range.start as u64, |into| into.address);
        debug_assert!(!to_all || *to == me);
        messages.push(RailMessage::receive(across.places[*from].host, at, range.len()));
    }
    relay.exchange(messages, &[&collected], &[&landed])?;

    if !to_all {
        let sent = |a: usize, b: usize| calls.total(&calls.landed(a, own[b])) / size;
        let lists: Vec<_> = (0..own.len()).flat_map(|at| calls.landed(at, me)).collect();
        let arrived = hier.scratch(calls.total(&lists))?;
        calls.inside(request, sent, [&landed, &arrived])?;
        put(&calls.laid_out(&lists), &arrived)?;
    }
    put(&collected_at, &collected)
}
