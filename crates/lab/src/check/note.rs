//! The record of an operation, for reports and for deferred judgements.

use super::{Allocation, OpSite, Operation, clock::Clock, heap::Owned, shadow::Access};
use gpu_pool::error::Site;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Call {
    pub name: &'static str,
    pub what: &'static str,
    pub kernel: Option<&'static str>,
}

impl Call {
    pub const fn new(name: &'static str, what: &'static str) -> Self {
        Call { name, what, kernel: None }
    }

    /// The call as a report shows it: by the operation of the public API that the thread is in, if any.
    pub fn operation(
        self,
        place: Option<OpSite>,
        device: Option<usize>,
        stream: Option<usize>,
        write: bool,
    ) -> Operation {
        let detail = match (self.kernel, place) {
            (Some(kernel), _) => format!("`{kernel}`"),
            (None, Some(place)) if place.op != self.name => self.what.to_owned(),
            _ => String::new(),
        };
        let (op, site) = place.map_or((self.name, None), |place| (place.op, Some(place.site)));
        Operation { op, detail, site, device, stream, write }
    }
}

#[derive(Default)]
pub(super) struct Note {
    pub call: Call,
    pub place: Option<OpSite>,
    pub device: usize,
    pub stream: usize,
    /// Its clock, if the clock was pending: the operation that it waits for may be submitted later.
    pub pending: Option<Clock>,
}

impl Note {
    pub fn operation(&self, write: bool) -> Operation {
        self.call.operation(self.place, Some(self.device), Some(self.stream), write)
    }

    pub fn is_pending(&self) -> bool {
        self.pending.as_ref().is_some_and(Clock::is_pending)
    }

    pub fn follows(&self, other: &Access) -> bool {
        self.pending.as_ref().is_some_and(|clock| clock.covers(other.component, other.count))
    }
}

fn of(place: OpSite) -> (&'static str, Site) {
    (place.op, place.site)
}

pub(super) fn allocation(owned: &Owned) -> Allocation {
    let bytes = (owned.range.end - owned.range.start) as usize;
    let freed = owned.freed().map(|place| place.map(of));
    Allocation { device: owned.device, bytes, by: owned.by.map(of), freed }
}
