//! The layout that the host and the device kernels of collectives share: sizes of grids, the memory of a signal pad,
//! and the structs that are passed to a kernel as they are. Plain data. Invariant: every number and every field here is
//! the one in `kernels/meet.cuh`, `inbox.cuh` and `route.cuh` (`collective/kernels/tests.rs` compares them).
#![allow(missing_docs, reason = "only the crates above see it, through `extend`")]

use crate::driver::Address;

/// Most devices that a kernel on a GPU can name.
pub const MOST: usize = 16;
/// Most blocks of a kernel that waits for its peers' kernels.
pub(crate) const BLOCKS: u32 = 128;
/// Most blocks of an LL kernel that waits for its peers while the next kernel is on the device already.
pub(crate) const FEW: u32 = 32;
/// Most threads of a block. A block of a kernel that waits for its peers has more than [`MOST`].
pub(crate) const THREADS: u32 = 512;
/// Most blocks of a kernel that goes through page-locked memory of the host.
pub(crate) const STAGED_BLOCKS: usize = 64;
/// Slots that each of these blocks has on a stage.
pub(crate) const STAGED_SLOTS: usize = 4;
/// Bytes of the counters of a stage: three steps for each block and each device, every counter on a line of its own.
pub(crate) const STAGED_COUNTS: usize = 3 * STAGED_BLOCKS * MOST * 64;
/// The blocks that have a word in `step` of the signal pad.
pub(crate) const RING_BLOCKS: usize = STAGED_BLOCKS;

/// Bytes at the begin of a signal pad that only its own device writes: addresses, epochs, the ticket, the sizes.
pub(crate) const HEADER: usize = 256;
/// Bytes of the barriers' flags, which follow the header.
pub(crate) const FLAGS: usize = 2 * BLOCKS as usize * MOST * 4 + 3 * BLOCKS as usize * MOST * 8;

/// Most bytes that one device sends in all in one LL all-reduce: all its data to every peer, with the same number of
/// bytes of flags. On 2 and 4 H200s it beats slices with barriers at every size up to this one (`benches/results`).
pub(crate) const LL_BYTES: usize = 768 << 10;

/// Most bytes that one device sends to one peer by the LL algorithm. Above, the eager algorithm is faster: 512 KB
/// between two H200s take 7.2 us instead of 9.0; 256 KB on 4 take 9.5 us instead of 10.2.
pub(crate) const fn ll_bytes_per_peer(devices: usize) -> usize {
    if devices > 2 { 128 << 10 } else { 256 << 10 }
}

/// As [`LL_BYTES`], in the host's memory. This is the room; the algorithms `ll` and `ll_two_shot` use less of it.
pub(crate) const LL_BYTES_THROUGH_HOST: usize = 112 << 10;

/// Packets of each sender and parity in a pool of so many devices, where each device sends up to `bytes` bytes in all.
const fn packets(devices: usize, bytes: usize) -> usize {
    let (most, cap) = (bytes / (8 * (devices - 1)), ll_bytes_per_peer(devices) / 8);
    if most < cap { most / 512 * 512 } else { cap }
}

/// Most bytes that one device sends to one peer by the eager algorithm, into a slot at the peer. Larger pools have
/// smaller slots, so that a signal pad stays within 8 MB.
pub(crate) const fn eager_bytes(devices: usize) -> usize {
    if devices > 4 { (2 << 20) / (devices - 1) } else { 1 << 20 }
}

/// Slots of a block and a sender in an inbox.
pub(crate) const INBOX_SLOTS: usize = 4;
/// The byte that an inbox is full of when nothing has arrived.
pub(crate) const EMPTY: u8 = 0xff;

/// Most bytes from one device to one peer in one trip as data that are flags: 4 MB of an inbox, for any pool.
pub(crate) const fn inbox_bytes(devices: usize) -> usize {
    let each = (2 << 20) / (devices - 1);
    each - each % (16 << 10)
}

/// Bytes of a slot, for data that go piece by piece. An inbox has 16 MB for them, for any number of devices.
const fn inbox_slot(devices: usize) -> usize {
    let each = (32 << 10) / (devices - 1);
    each - each % 512
}

/// The part of a signal pad that depends on the number of devices. A pad is the header, the flags, the packets, the
/// slots of eager sends, and the inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PadLayout {
    pub packets: usize,
    /// Bytes of the slot for eager sends; 0: there is none.
    pub slot: usize,
    /// Bytes of the room in the inbox; 0: there is no inbox.
    pub inbox: usize,
    /// Bytes of a slot of the inbox. Each sender has [`INBOX_SLOTS`] for each block.
    pub inbox_slot: usize,
}

impl PadLayout {
    /// In the devices' memory, for a pool whose devices can access each other's memory.
    pub(crate) const fn direct(devices: usize) -> PadLayout {
        let (each, packets) = (eager_bytes(devices), packets(devices, LL_BYTES));
        let (inbox, inbox_slot) = (inbox_bytes(devices), inbox_slot(devices));
        PadLayout { packets, slot: each - each % (16 << 10), inbox, inbox_slot }
    }

    /// In the host's memory: packets only.
    pub(crate) const fn through_host(devices: usize) -> PadLayout {
        PadLayout { packets: packets(devices, LL_BYTES_THROUGH_HOST), slot: 0, inbox: 0, inbox_slot: 0 }
    }

    /// In the device's memory, for sums of one trip and for kernels of crates above.
    pub(crate) const fn one_trip(devices: usize) -> PadLayout {
        PadLayout { slot: 0, inbox_slot: 0, ..PadLayout::direct(devices) }
    }

    pub(crate) const fn bytes(self, devices: usize) -> usize {
        let inbox = self.inbox(devices);
        inbox.start + inbox.bytes()
    }

    /// The inbox, within the signal pad. A new one is full of [`EMPTY`].
    pub(crate) const fn inbox(self, devices: usize) -> Inbox {
        let before = self.slots(devices) + (devices - 1) * 2 * self.slot;
        let whole = (devices - 1) * 2 * self.inbox;
        let slots = (devices - 1) * BLOCKS as usize * INBOX_SLOTS * self.inbox_slot;
        Inbox { start: HEADER + FLAGS + before, whole, slots }
    }

    /// Bytes from the first packet to the first slot. A device has no packets for itself.
    pub(crate) const fn slots(self, devices: usize) -> usize {
        (devices - 1) * 2 * self.packets * 16
    }

    /// The header of a new signal pad: the addresses of all devices' pads, of the abort word and of the report word.
    /// All other memory of a new pad is zero, but for the inbox.
    pub(crate) fn header(self, peers: &[u64], abort: u64, report: u64) -> Vec<u64> {
        let mut words = vec![0; HEADER / 8];
        words[..peers.len()].copy_from_slice(peers);
        words[MOST] = abort;
        words[MOST + 1] = report;
        // `ticket` is the lower half of this word, `packets` the upper one.
        words[MOST + 2 + MOST / 2] = (self.packets as u64) << 32;
        words[MOST + 3 + MOST / 2] = (self.slots(peers.len()) as u64) << 32 | self.slot as u64;
        let inbox = self.inbox(peers.len());
        let wholes = inbox.start - HEADER - FLAGS;
        words[MOST + 4 + MOST / 2] = (self.inbox as u64) << 32 | wholes as u64;
        words[MOST + 5 + MOST / 2] = (self.inbox_slot as u64) << 32 | (wholes + inbox.whole) as u64;
        words
    }
}

/// For single-trip messages one slot per sender and parity, then slots for pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inbox {
    /// The first byte, from the begin of the signal pad.
    pub start: usize,
    whole: usize,
    slots: usize,
}

impl Inbox {
    pub(crate) const fn bytes(self) -> usize {
        self.whole + self.slots
    }

    /// The two parts of a receiver's inbox that a sender writes: offset in the signal pad, and bytes.
    pub(crate) fn of_sender(self, devices: usize, sender: usize, receiver: usize) -> [(usize, usize); 2] {
        let place = if sender < receiver { sender } else { sender - 1 };
        let (whole, slots) = (self.whole / (devices - 1), self.slots / (devices - 1));
        [(self.start + place * whole, whole), (self.start + self.whole + place * slots, slots)]
    }
}

pub(crate) fn set_epochs(header: &mut [u64], epoch: u32) {
    header[MOST + 2..][..MOST / 2].fill(u64::from(epoch) << 32 | u64::from(epoch));
}

/// A device's report word, written by a kernel that gives up: its gang's place, and the device that it waited for.
pub(crate) fn reported(report: u64) -> Option<(u64, usize)> {
    (report & 0x80 != 0).then_some((report >> 8, (report & 0x7f) as usize))
}

/// The barrier that a kernel takes part in: the struct `Meet` of `kernels/meet.cuh`.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct DeviceBarrier {
    /// Address of the device's own signal pad; 0: there is no barrier, events order the kernel.
    pub signals: Address,
    /// The members' ordinals in rank order, 4 bits each; see `members()`.
    pub members: u64,
    /// The gang's place. The gang has failed when the abort word is `place` or more. 0 in a graph, which reads the
    /// place from the word beside the abort word.
    pub place: u64,
    /// The kernel gives up when it has waited at one point for so many nanoseconds; 0: never.
    pub deadline: u64,
    pub count: u32,
    pub me: u32,
    pub spare: u64,
}

impl DeviceBarrier {
    pub const NONE: DeviceBarrier =
        DeviceBarrier { signals: 0, members: 0, place: 0, deadline: 0, count: 0, me: 0, spare: 0 };

    /// Packs ordinals that are in rank order.
    pub(crate) fn members(ordinals: impl IntoIterator<Item = usize>) -> u64 {
        ordinals.into_iter().enumerate().fold(0, |all, (rank, ordinal)| {
            assert!(rank < MOST && ordinal < MOST, "a kernel can meet {MOST} devices");
            all | (ordinal as u64) << (4 * rank)
        })
    }
}

/// The senders and receivers of an LL or eager kernel, as bits by rank, and the strides of their buffers: the struct
/// `Route` of `kernels/route.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Route {
    pub senders: u16,
    pub receivers: u16,
    /// 1: each receiver adds up what arrives (then all members are senders). 0: it stores each part at its place.
    pub folds: u32,
    /// A sender's elements for rank `b` begin `b * out` elements after the begin of the source.
    pub out: u64,
    /// A receiver's elements from rank `a` begin `a * into` elements after the begin of the destination.
    pub into: u64,
}

#[cfg(test)]
#[path = "../../tests/unit/fabric/layout_tests.rs"]
mod tests;
