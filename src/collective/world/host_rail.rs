//! What one rail does between processes, in the memory of the hosts: after the commit, and without a look at the gang.
//!
//! [`sums`](super::sums) and [`moves`](super::moves) make a [`HostRail`] before the member arrives: all memory is there
//! by then. Its messages go through a [`HostTransport`](super::super::transport::HostTransport).

use super::{
    super::{
        kernels,
        transport::{HostTransport, Message, Tag},
    },
    cut::{Ranges, total},
    trip::Trip,
};
use crate::{
    error::Result,
    fabric::types::{DType, ReduceOp},
    memory::PinnedBuffer,
};
use std::{ops::Range, sync::Arc};

/// Bytes that have come from a process, by its index in the group.
pub(super) type Arrived = Vec<(usize, PinnedBuffer<u8>)>;

/// A member's rail.
pub(super) struct HostRail<'t, 'g, 'd> {
    trip: &'t Trip<'g, 'd>,
    transport: Arc<dyn HostTransport>,
    /// Memory for what is going to arrive, in the order of the messages.
    room: Vec<PinnedBuffer<u8>>,
}

impl<'t, 'g, 'd> HostRail<'t, 'g, 'd> {
    pub fn new(trip: &'t Trip<'g, 'd>, transport: Arc<dyn HostTransport>) -> Self {
        HostRail { trip, transport, room: Vec::new() }
    }

    /// All other processes of the group, by their index.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.trip.across.hosts.len(), self.trip.across.me);
        (1..n).map(move |k| (me + k) % n)
    }

    /// Takes memory for the parts of other processes that this one is going to sum up. Returns memory for the sum.
    #[track_caller]
    pub fn room_for_sum(&mut self, own: &Ranges, size: usize) -> Result<PinnedBuffer<u8>> {
        for _ in self.others() {
            for range in own {
                self.room.push(self.trip.pinned(range.len() * size)?);
            }
        }
        self.trip.pinned(total(own) * size)
    }

    /// Takes memory for what other processes are going to send: so many bytes each, by process.
    #[track_caller]
    pub fn room_for(&mut self, lens: &[usize]) -> Result<()> {
        for host in self.others().filter(|&host| lens[host] > 0) {
            self.room.push(self.trip.pinned(lens[host])?);
        }
        Ok(())
    }

    fn exchange(&mut self, sends: Vec<Message>, receives: Vec<(usize, usize)>, tag: Tag) -> Result<Arrived> {
        let mut room = self.room.drain(..receives.len()).collect::<Vec<_>>().into_iter();
        let hosts = &self.trip.across.hosts;
        let receive = |&(host, len): &(usize, usize)| {
            let into = room.next().expect("room was made for every message");
            Message::Receive { from: hosts[host].host, tag, into, len }
        };
        let messages = receives.iter().map(receive).chain(sends).collect();
        let done = self.transport.exchange(messages, &|| self.trip.lost())?;
        let arrived = done.into_iter().zip(receives).filter_map(|(message, (host, _))| match message {
            Message::Receive { into, .. } => Some((host, into)),
            Message::Send { .. } => None,
        });
        Ok(arrived.collect())
    }

    fn tag(&self, number: u64, phase: u32) -> Tag {
        Tag { number, phase, rail: self.trip.across.here as u32 }
    }

    /// Every process sends each other one the elements of `slice` that it owns; the own ones are combined in the order
    /// of processes. `staged` is the slice; `sum` gets the own ranges, one behind the other.
    pub fn sum(
        &mut self,
        number: u64,
        (staged, slice): (&Arc<PinnedBuffer<u8>>, &Range<usize>),
        owned: &[Ranges],
        (dtype, op): (DType, ReduceOp),
        sum: &mut PinnedBuffer<u8>,
    ) -> Result<()> {
        let (size, me, tag) = (dtype.size(), self.trip.across.me, self.tag(number, 0));
        let place = |range: &Range<usize>| (range.start - slice.start) * size..(range.end - slice.start) * size;
        let mut sends = Vec::new();
        let mut receives = Vec::new();
        for host in self.others() {
            let to = self.trip.across.hosts[host].host;
            let send = |range| Message::Send { to, tag, bytes: staged.clone(), range: place(range) };
            sends.extend(owned[host].iter().map(send));
            receives.extend(owned[me].iter().map(|range| (host, range.len() * size)));
        }
        let mut arrived = self.exchange(sends, receives, tag)?;
        // By process, and within one by range.
        arrived.sort_by_key(|(host, _)| *host);
        let (own, mut start) = (&owned[me], 0);
        let pointer = |buffer: &PinnedBuffer<u8>| Ok::<_, crate::Error>(buffer.as_slice()?.as_ptr().cast_mut());
        for (at, range) in own.iter().enumerate() {
            let mut sources = Vec::with_capacity(self.trip.across.hosts.len());
            let mut theirs = arrived.iter().skip(at).step_by(own.len());
            for host in 0..self.trip.across.hosts.len() {
                sources.push(match host == me {
                    true => pointer(staged)?.wrapping_add(place(range).start),
                    false => pointer(&theirs.next().expect("one of each other process").1)?,
                });
            }
            let to = sum.as_mut_slice()?[start..].as_mut_ptr();
            // SAFETY: each source has the elements of this range, in page-locked memory that is aligned for them, at
            // multiples of their size. All copies to it are over, and `sum` is this call's alone.
            unsafe { kernels::fold_on_host(dtype, op, range.len(), &sources, to, &[], self.trip.members()) };
            start += range.len() * size;
        }
        Ok(())
    }

    /// Every process sends its `own` bytes to all others, and gets theirs: so many of each.
    pub fn fill(&mut self, number: u64, own: &Arc<PinnedBuffer<u8>>, lens: &[usize]) -> Result<Arrived> {
        let (tag, len) = (self.tag(number, 1), lens[self.trip.across.me]);
        let send = |host: usize| {
            let to = self.trip.across.hosts[host].host;
            Message::Send { to, tag, bytes: own.clone(), range: 0..len }
        };
        let sends = if len == 0 { Vec::new() } else { self.others().map(send).collect() };
        let receives = self.others().filter(|&host| lens[host] > 0).map(|host| (host, lens[host])).collect();
        self.exchange(sends, receives, tag)
    }
}
