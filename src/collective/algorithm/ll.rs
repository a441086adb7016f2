//! The LL ("low latency") algorithm: every 8 bytes carry 4 bytes of data and 4 of flag, so a receiver needs no barrier.
//!
//! `choose` picks it for small messages. Each member sends everything that a peer needs at once
//! ([`packets`](crate::fabric::packets)), by `kernels/push.cu`. It never touches a peer's user buffer. Without peer
//! access packets go through the host's memory.
//!
//! Invariant: a packet is overwritten two calls later at the earliest; each call waits for all peers' packets.

use super::{Algorithm, Case, Matched, Member};
use crate::{
    collective::{Arguments, Entry, KernelBarrier, Part, code, factors, kernels::value, launch},
    error::Result,
    fabric::{BLOCKS, DType, DeviceBarrier, Limits, Packets, ReduceOp, Route, Side, types},
    kernel::builtin,
};

pub(crate) struct Ll;

/// Bytes of a block: one packet of 8 bytes for each thread, so that all packets are on their way at once.
const PER_BLOCK: usize = 512 * 8;
/// A receiver polls all packets over the bus, so packets that take over 1 us are slower than data with one flag.
const THROUGH_HOST: usize = 64 << 10;

impl Algorithm for Ll {
    about!("ll", Direct, "packets");

    fn group(&self, case: &Case<'_>) -> types::Algorithm {
        if case.meets_in_host() { types::Algorithm::Staged } else { self.about().group }
    }

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        // A kernel that sends nothing waits for no peer, so the devices would not count the meeting.
        let each = case.packets.filter(|&each| each > 0)?;
        if case.meets_in_host() {
            return sent_through_host(case, each, THROUGH_HOST)
                .then_some("small, without peer access: data that carries its flags, through the host's memory");
        }
        match case.machine.barrier {
            KernelBarrier::OnDevices { ll, .. } if case.meets_on_devices() && each <= ll => {
                Some("small: data that carries its flags needs one trip and no barrier")
            }
            _ => None,
        }
    }

    fn blocks(&self, case: &Case<'_>) -> u32 {
        blocks(case.packets.unwrap_or(0), case.limits)
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let packets = packets(member, matched);
        let entry = entry(member.request.dtype);
        trip(member, matched, &packets, Side::Source, entry, blocks(bytes(member, &packets), member.limits))
    }
}

/// Whether `each` bytes to every peer have room in the host's memory, and are at most `most` bytes in all.
pub(super) fn sent_through_host(case: &Case<'_>, each: usize, most: usize) -> bool {
    let KernelBarrier::InHost { ll } = case.machine.barrier else { return false };
    each > 0 && each <= ll && each * (case.members - 1) <= most
}

pub(super) fn blocks(bytes: usize, limits: &Limits) -> u32 {
    launch::blocks_of(bytes, PER_BLOCK, limits.of_one_trip(BLOCKS))
}

pub(super) fn packets(member: &Member<'_>, matched: &Matched<'_>) -> Packets {
    let packets = matched.shape.packets(member.count(), member.rank);
    packets.expect("chosen for what packets can carry")
}

pub(super) fn bytes(member: &Member<'_>, packets: &Packets) -> usize {
    packets.each * member.request.dtype.size()
}

/// The packets of the own side `from`; received ones go to the own destination.
pub(super) fn trip(
    member: &Member<'_>,
    matched: &Matched<'_>,
    packets: &Packets,
    from: Side,
    entry: Entry,
    blocks: u32,
) -> Result<()> {
    let (request, size) = (member.request, member.request.dtype.size());
    // A member that only receives has no source, and one that only sends has no destination.
    let part = |side, start: usize| match request.area(side) {
        Some(area) => Part { address: area.address + (start * size) as u64, bytes: area.bytes.len() - start * size },
        None => Part { address: 0, bytes: 0 },
    };
    let (source, destination) = (part(from, packets.source), part(Side::Destination, packets.destination));
    let (op, factors, meet) = (request.reduce, &member.factors(matched), member.barrier);
    let push = Push { n: packets.each, op, route: packets.route, factors, source, destination, meet };
    member.launch(&entry, blocks, &push.args())?;
    member.launched.set(member.launched.get() + 1);
    Ok(())
}

/// The kernel, launched with [`Push::args`]. It has no host kernel: software GPUs gain nothing by it.
pub(in super::super) fn entry(dtype: DType) -> Entry {
    Entry { module: &builtin::PUSH, name: typed_name!(dtype, "push"), host: None }
}

/// Every sender's `n` elements for every receiver: by [`entry`] at most 8 bytes for each of a place's packets, by
/// [`eager`](super::eager) at most the bytes of a slot, by [`inbox`](super::inbox) at most those of a room; software
/// GPUs only by that. Every member launches the same grid. `n` is not 0 and there are at least two members.
pub(in super::super) struct Push<'a> {
    pub n: usize,
    pub op: ReduceOp,
    pub route: Route,
    pub factors: &'a [f64],
    pub source: Part,
    /// This device's own memory; may be the source, part for part.
    pub destination: Part,
    pub meet: DeviceBarrier,
}

impl Push<'_> {
    pub fn args(&self) -> Arguments {
        debug_assert!(self.meet.signals != 0);
        let (n, op, [low, high]) = (value(self.n as u64), value(code(self.op)), factors(self.factors));
        let parts = [self.source.slice(false), self.destination.slice(true)];
        [value(self.meet), n, op, value(self.route), low, high].into_iter().chain(parts).collect()
    }
}
