//! A meeting: the members of one process come together for one call. [`descriptors`] tells all members what this one
//! calls and compares, by the messages of [`exchange`]; [`commit`] is the point from which on all members carry the
//! call out, or none does. A meeting knows no algorithm.

pub(super) mod commit;
pub(super) mod descriptors;
mod exchange;

use crate::fabric::{Call, Limits, Membership, SignalPad};
use crate::{Device, error::Error, sync::CommitWord};
use std::{rc::Rc, sync::Arc};

pub(crate) use descriptors::Descriptors;
pub(super) use exchange::absent;
pub(crate) use exchange::note_call;

/// One member's side of the meetings of a group of one process.
#[derive(Clone, Copy)]
pub(crate) struct Meeting<'g> {
    pub(crate) dev: &'g Device,
    pub(super) membership: &'g Membership,
    pub(crate) rank: usize,
}

impl<'g> Meeting<'g> {
    pub(super) fn count(&self) -> usize {
        self.membership.ranks.len()
    }

    pub(super) fn ordinals(&self) -> &'g [usize] {
        &self.membership.ordinals
    }

    fn ranks(&self) -> &'g Arc<[usize]> {
        &self.membership.ranks
    }

    /// Each member begins with the one after it.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (n, me) = (self.count(), self.rank);
        (1..n).map(move |k| (me + k) % n)
    }

    /// Ordinals of the members, packed, and their number. Only small pools have kernels that wait for each other.
    pub(super) fn packed(&self) -> (u64, u8) {
        self.membership.packed.expect("kernels wait for each other in small pools only")
    }

    /// Whether the group is the whole gang, with the same ranks.
    fn is_everyone(&self) -> bool {
        self.membership.word.is_none()
    }

    fn word(&self) -> &'g CommitWord {
        self.membership.word.as_deref().unwrap_or(self.dev.session.gang.word())
    }

    pub(super) fn next_number(&self) -> u64 {
        self.membership.calls.get() + 1
    }

    pub(crate) fn limits(&self) -> &'g Limits {
        &self.dev.worker.shared.limits
    }

    pub(super) fn pad(&self) -> Option<&'g SignalPad> {
        self.dev.worker.shared.signals.get().map(|pad| &**pad)
    }

    pub(super) fn mismatch(&self, what: &'static str, (a, one): (usize, &Call), (b, other): (usize, &Call)) -> Error {
        let [a, b] = [a, b].map(|member| self.ordinals()[member]);
        let ([a_call, b_call], a_site, b_site) = ([one, other].map(Call::to_string), one.site, other.site);
        Error::Mismatch { what, a, a_call, a_site, b, b_call, b_site }
    }
}

pub(super) fn membership(dev: &Device, ranks: &[usize]) -> Rc<Membership> {
    let are_direct = |ordinals: &[usize]| dev.worker.shared.are_direct(ordinals);
    dev.session.groups.look_up(&dev.session.gang, ranks, are_direct)
}

pub(super) fn everyone(dev: &Device) -> Rc<Membership> {
    let known = dev.session.groups.everyone();
    known.unwrap_or_else(|| membership(dev, &(0..dev.count()).collect::<Vec<_>>()))
}
