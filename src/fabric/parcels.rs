//! Parcels: what one device sends to one other by `send` and `recv` (`collective/point.rs`).
//!
//! Every device has one box, an MPSC [`Inbox`], which all devices write to.
//!
//! Invariant: the parcels of one sender to one receiver are taken in the order in which they were sent.

use super::call::Call;
use crate::{DeviceBuffer, memory::handle::Handover, sync::Inbox};
use std::sync::Arc;

/// A message that is on its way: a copy of the sender's data, in the sender's memory.
pub(crate) struct Parcel {
    pub(crate) gang: u64,
    /// The sender's ordinal in the pool.
    pub(crate) from: usize,
    /// Ranks in the gang of the group that it was sent in.
    pub(crate) group: Arc<[usize]>,
    pub(crate) call: Call,
    pub(crate) contents: DeviceBuffer<u8>,
    pub(crate) told: Option<Box<Handover>>,
}

/// A device's own box, and the boxes of all devices for writing.
pub(crate) struct ParcelBox {
    boxes: Arc<[Inbox<Parcel>]>,
    own: usize,
    /// Parcels that were taken out of the box before their `recv`, in the order of arrival.
    waiting: Vec<Parcel>,
}

impl ParcelBox {
    /// The boxes of `count` devices.
    pub(crate) fn all(count: usize) -> impl Iterator<Item = ParcelBox> {
        let boxes: Arc<[Inbox<Parcel>]> = (0..count).map(|_| Inbox::new()).collect();
        (0..count).map(move |own| ParcelBox { boxes: boxes.clone(), own, waiting: Vec::new() })
    }

    /// Puts a parcel into a device's box.
    pub(crate) fn send(&self, to: usize, parcel: Parcel) {
        self.boxes[to].push(parcel);
    }

    /// The oldest parcel from a device that was sent in this gang and group.
    pub(crate) fn take(&mut self, gang: u64, from: usize, group: &[usize]) -> Option<Parcel> {
        self.waiting.extend(self.boxes[self.own].take());
        let fits = |parcel: &Parcel| parcel.gang == gang && parcel.from == from && *parcel.group == *group;
        self.waiting.iter().position(fits).map(|at| self.waiting.remove(at))
    }

    /// Takes out what gangs up to place `upto` have left.
    pub(super) fn leftovers(&mut self, upto: u64) -> Vec<Parcel> {
        self.waiting.extend(self.boxes[self.own].take());
        let (old, new) = std::mem::take(&mut self.waiting).into_iter().partition(|parcel| parcel.gang <= upto);
        self.waiting = new;
        old
    }
}
