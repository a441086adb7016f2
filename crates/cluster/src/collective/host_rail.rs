//! One rail's work between processes, in the memory of the hosts: after the commit, and without a look at the gang. Any
//! thread can do it.
//!
//! [`pieces`](super::pieces) makes a [`HostRail`], and all memory, before the member arrives. Messages go through a
//! [`HostTransport`]: a [`Leg`] is one message to each other process and one
//! from each; legs of several pieces go in one exchange.

use super::{cut::Ranges, hierarchical::HierarchicalCall};
use crate::{
    runtime::collective::fold_on_host,
    traits::{HostTransport, Message, Tag, World},
};
use gpu_pool::{DType, PinnedBuffer, ReduceOp, Result};
use std::{ops::Range, sync::Arc};

/// Memory for one message of each process, by its index in the group; after the exchange, what has come.
pub(super) type Room = Vec<(usize, PinnedBuffer<u8>)>;

/// Messages that go, and memory for those that come.
pub(super) struct Leg {
    sends: Vec<Message>,
    receives: Room,
    tag: Tag,
}

pub(super) struct HostRail {
    transport: Arc<dyn HostTransport>,
    world: Arc<dyn World>,
    /// The numbers of the group's processes.
    hosts: Box<[usize]>,
    /// Which of them this is.
    me: usize,
    /// This member's local index.
    here: usize,
    /// Members of all processes.
    members: usize,
}

/// A member's slice in page-locked memory, and what of it each process owns.
#[derive(Clone, Copy)]
pub(super) struct Staged<'a> {
    pub bytes: &'a Arc<PinnedBuffer<u8>>,
    pub slice: &'a Range<usize>,
    pub owned: &'a [Ranges],
    pub size: usize,
}

impl Staged<'_> {
    /// Where elements of the slice lie.
    fn place(&self, range: &Range<usize>) -> Range<usize> {
        (range.start - self.slice.start) * self.size..(range.end - self.slice.start) * self.size
    }
}

impl HostRail {
    pub fn new(hier: &HierarchicalCall<'_, '_>, transport: Arc<dyn HostTransport>) -> Self {
        let across = hier.across;
        HostRail {
            transport,
            world: hier.link.world.clone(),
            hosts: across.hosts.iter().map(|host| host.host).collect(),
            me: across.me,
            here: across.here,
            members: hier.members(),
        }
    }

    /// All other processes of the group, by their index.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.hosts.len(), self.me);
        (1..n).map(move |k| (me + k) % n)
    }

    /// Memory for the parts of other processes that this one is going to sum up: of each process, one for each range.
    #[track_caller]
    pub fn room_for_sum(&self, hier: &HierarchicalCall<'_, '_>, own: &Ranges, size: usize) -> Result<Room> {
        let mut room = Vec::new();
        for host in self.others() {
            for range in own {
                room.push((host, hier.pinned(range.len() * size)?));
            }
        }
        Ok(room)
    }

    /// Memory for what other processes are going to send: so many bytes each, by process.
    #[track_caller]
    pub fn room_for(&self, hier: &HierarchicalCall<'_, '_>, lens: &[usize]) -> Result<Room> {
        let mut room = Vec::new();
        for host in self.others().filter(|&host| lens[host] > 0) {
            room.push((host, hier.pinned(lens[host])?));
        }
        Ok(room)
    }

    /// All legs at once. Returns what has come, by leg.
    pub fn exchange(&self, legs: impl IntoIterator<Item = Leg>) -> Result<Vec<Room>> {
        let hosts = &self.hosts;
        let (mut messages, mut sends, mut from) = (Vec::new(), Vec::new(), Vec::new());
        for leg in legs {
            from.push(leg.receives.iter().map(|(host, _)| *host).collect::<Vec<_>>());
            let receive = |(host, into): (usize, PinnedBuffer<u8>)| {
                let len = into.len();
                Message::Receive { from: hosts[host], tag: leg.tag, into, len }
            };
            messages.extend(leg.receives.into_iter().map(receive));
            sends.extend(leg.sends);
        }
        messages.extend(sends);
        let done = self.transport.exchange(messages, &|| self.world.check().err())?;
        let mut come = done.into_iter().filter_map(|done| match done {
            Message::Receive { into, .. } => Some(into),
            Message::Send { .. } => None,
        });
        Ok(from.into_iter().map(|from| from.into_iter().zip(come.by_ref()).collect()).collect())
    }

    fn tag(&self, number: u64, phase: u32) -> Tag {
        Tag { number, phase, rail: self.here as u32 }
    }

    /// Every process sends each other one the elements that it owns.
    pub fn parts(&self, number: u64, staged: Staged<'_>, room: Room) -> Leg {
        let tag = self.tag(number, 0);
        let of = |host: usize| {
            let to = self.hosts[host];
            let send = move |range| Message::Send { to, tag, bytes: staged.bytes.clone(), range: staged.place(range) };
            staged.owned[host].iter().map(send)
        };
        Leg { sends: self.others().flat_map(of).collect(), receives: room, tag }
    }

    /// Every process sends its `own` bytes, if it has any, to all others.
    pub fn own(&self, number: u64, own: &Arc<PinnedBuffer<u8>>, room: Room) -> Leg {
        let tag = self.tag(number, 1);
        let send = |host: usize| {
            let to = self.hosts[host];
            Message::Send { to, tag, bytes: own.clone(), range: 0..own.len() }
        };
        let sends = if own.is_empty() { Vec::new() } else { self.others().map(send).collect() };
        Leg { sends, receives: room, tag }
    }

    /// Combines this process's elements and those that have come, in the order of processes. `sum` gets the own ranges,
    /// one behind the other.
    pub fn fold(
        &self,
        staged: Staged<'_>,
        mut come: Room,
        (dtype, op): (DType, ReduceOp),
        sum: &mut PinnedBuffer<u8>,
    ) -> Result<()> {
        let (me, hosts) = (self.me, self.hosts.len());
        // By process, and within one by range.
        come.sort_by_key(|(host, _)| *host);
        let (own, mut start) = (&staged.owned[me], 0);
        let pointer = |buffer: &PinnedBuffer<u8>| Ok::<_, crate::Error>(buffer.as_slice()?.as_ptr().cast_mut());
        for (at, range) in own.iter().enumerate() {
            let mut sources = Vec::with_capacity(hosts);
            let mut theirs = come.iter().skip(at).step_by(own.len());
            for host in 0..hosts {
                sources.push(match host == me {
                    true => pointer(staged.bytes)?.wrapping_add(staged.place(range).start),
                    false => pointer(&theirs.next().expect("one of each other process").1)?,
                });
            }
            let to = sum.as_mut_slice()?[start..].as_mut_ptr();
            // SAFETY: each source has the elements of this range, in page-locked memory that is aligned for them, at
            // multiples of their size. All copies to it are over, and `sum` is this call's alone.
            unsafe { fold_on_host(dtype, op, range.len(), &sources, to, &[], self.members) };
            start += range.len() * staged.size;
        }
        Ok(())
    }
}
