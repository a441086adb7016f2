//! Parcels: messages of one device to one other, by `send` and `recv` or by `give` and `take`. Each device has one box,
//! an MPSC [`Inbox`]. Invariant: a receiver takes one sender's parcels under one label in the order of their sends.
#![allow(missing_docs, reason = "only the crates above see it, through `extend`")]

use super::Call;
use crate::{DeviceBuffer, contain::Contained, memory::Handover, sync::Inbox};
use std::{any::Any, sync::Arc};

/// A receiver's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Label {
    Message,
    Value(u64),
    Internal(u64),
}

display_as!(Label, |self, f| match self {
    Label::Message => f.write_str("message"),
    Label::Value(tag) | Label::Internal(tag) => write!(f, "value with tag {tag}"),
});

/// The contents of a parcel. Messages are elements, values are values.
pub(crate) enum Contents {
    /// Data in the sender's memory: a copy, or a buffer that the sender has given up.
    Elements(DeviceBuffer<u8>),
    /// A value that is not taken is dropped by the library.
    Value(Contained<Box<dyn Any + Send>>),
}

pub(crate) struct Parcel {
    pub(crate) gang: u64,
    pub(crate) from: usize,
    /// Ranks in the gang of the group that it was sent in.
    pub(crate) group: Arc<[usize]>,
    pub(crate) label: Label,
    pub(crate) call: Call,
    pub(crate) contents: Contents,
    pub(crate) told: Option<Box<Handover>>,
}

pub(crate) struct ParcelBox {
    boxes: Arc<[Inbox<Parcel>]>,
    own: usize,
    /// Parcels that were taken out of the box before they were asked for, in the order of arrival.
    waiting: Vec<Parcel>,
}

impl ParcelBox {
    pub(crate) fn all(count: usize) -> impl Iterator<Item = ParcelBox> {
        let boxes: Arc<[Inbox<Parcel>]> = (0..count).map(|_| Inbox::new()).collect();
        (0..count).map(move |own| ParcelBox { boxes: boxes.clone(), own, waiting: Vec::new() })
    }

    pub(crate) fn send(&self, to: usize, parcel: Parcel) {
        self.boxes[to].push(parcel);
    }

    /// The oldest parcel with this label from a device that was sent in this gang and group.
    pub(crate) fn take(&mut self, gang: u64, from: usize, group: &[usize], label: Label) -> Option<Parcel> {
        self.waiting.extend(self.boxes[self.own].take());
        let fits = |parcel: &Parcel| {
            parcel.label == label && parcel.gang == gang && parcel.from == from && *parcel.group == *group
        };
        self.waiting.iter().position(fits).map(|at| self.waiting.remove(at))
    }

    pub(super) fn leftovers(&mut self, upto: u64) -> Vec<Parcel> {
        self.waiting.extend(self.boxes[self.own].take());
        let (old, new) = std::mem::take(&mut self.waiting).into_iter().partition(|parcel| parcel.gang <= upto);
        self.waiting = new;
        old
    }
}
