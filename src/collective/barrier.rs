//! Kernels that meet by themselves: a start and an end barrier over flags in each other's memory, or the flags in the
//! data, or behind the data.
//! No event and no second meeting of the host: one launch is the whole collective.
//!
//! Such a kernel spins until its peers' kernels run, so all of them must get to run:
//!
//! * none is launched before all members have arrived and match (the board), and from the commit on each member
//!   launches;
//! * meanwhile nobody in the process is in a driver call that waits for kernels (the [launch
//!   gate](crate::sync::LaunchGate): the member that commits opens it for all, each closes it for itself when it has
//!   launched);
//! * on each device they run one at a time, in the order in which all members agree (the gang's), whatever their
//!   streams;
//! * grids are small enough to be resident as a whole; and those of devices that share a GPU, all together;
//! * a device that shares its GPU submits nothing between its launch and its peers' ([`Window`]): streams share
//!   hardware queues, and a kernel that is behind something that waits for its peer's never runs.
//!
//! If a member fails nevertheless, the gang's abort ends the others' kernels. Devices count their meetings pair by
//! pair; a member that has missed one makes up for it when the gang has drained ([`make_up`]).

use super::{
    DType, Group, ReduceOp,
    board::{Area, Lent, Notice, Payload},
    brief::Brief,
    kernels::{self, Combine, Meet},
    launch,
    plan::{Shape, Side},
    request::Request,
    signals::Signals,
};
use crate::{
    Device,
    driver::{Address, gate},
    error::{Error, Result, Site},
    memory::{block::BlockRef, stream::StreamCore},
    stall::StallTimer,
    sync::CommitWord,
    thread::worker::Worker,
};
use smallvec::SmallVec;
use std::{
    borrow::Cow,
    cell::{Cell, RefCell},
    iter,
    sync::Arc,
};

/// What a device thread knows of its spinning kernels.
#[derive(Default)]
pub(crate) struct Spinning {
    /// The last one: its stream and number.
    last: RefCell<Option<(Arc<StreamCore>, u64)>>,
    /// Meetings that were committed, and for which nothing was launched.
    missed: RefCell<Vec<Missed>>,
    /// Within [`Device::blocking`](crate::Device::blocking).
    blocked: Cell<u32>,
}

impl Spinning {
    /// Meetings that are not made up for.
    #[cfg(test)]
    pub(crate) fn missed(&self) -> usize {
        self.missed.borrow().iter().map(|missed| missed.times).sum()
    }

    /// Until the guard goes, this thread must not wait for others' launches.
    pub(crate) fn block(&self) -> Blocked<'_> {
        self.blocked.set(self.blocked.get() + 1);
        Blocked(&self.blocked)
    }
}

pub(crate) struct Blocked<'s>(&'s Cell<u32>);

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// What the members have told each other.
#[allow(
    clippy::large_enum_variant,
    reason = "it lives on the stack for the length of one call, and a box is an allocation"
)]
pub(super) enum Met {
    Briefly(SmallVec<[Brief; 8]>),
    InFull(SmallVec<[Arc<Notice>; 8]>),
}

impl Met {
    /// Meets the others, whose kernels wait for this member's: the launch gate is open when they have met, if
    /// `commits`. All members tell as much, `in_full` or in short.
    pub(super) fn of(
        group: &Group<'_>,
        request: &Request,
        scratch: Option<&Area>,
        in_full: bool,
        commits: bool,
    ) -> Result<Met> {
        match Brief::of(request, group.in_short()) {
            Some(own) if !in_full => group.meet_briefly(own, &request.call, commits).map(Met::Briefly),
            _ => {
                let inbox = scratch.map(|area| (area.address, area.bytes.len()));
                let lent = Lent { inbox, ..request.lend(None) };
                group.meet(request.call.clone(), Payload::Memory(lent), commits).map(Met::InFull)
            }
        }
    }

    /// What was asked for, or what all say together.
    pub(super) fn shape<'r>(&self, group: &Group<'_>, request: &'r Request) -> Result<Cow<'r, Shape>> {
        match (&request.shape, self) {
            (Some(shape), _) => Ok(Cow::Borrowed(shape)),
            (None, Met::InFull(notices)) => group.shape(notices).map(Cow::Owned),
            (None, Met::Briefly(_)) => unreachable!("a brief is of a shape that is known"),
        }
    }

    pub(super) fn factor(&self, member: usize) -> f64 {
        match self {
            Met::Briefly(all) => all[member].factor(),
            Met::InFull(_) => self.exposed(member).factor,
        }
    }

    pub(super) fn address(&self, member: usize, side: Side) -> Address {
        match self {
            Met::Briefly(all) => all[member].address(side),
            Met::InFull(_) => self.exposed(member).area(side).address,
        }
    }

    /// All that a member has told of its memory.
    ///
    /// # Panics
    /// When they have met in short.
    pub(super) fn exposed(&self, member: usize) -> &Lent {
        match self {
            Met::Briefly(_) => unreachable!("who needs more meets in full"),
            Met::InFull(all) => exposed(&all[member]),
        }
    }
}

/// A member's memory, from a meeting about memory.
pub(super) fn exposed(notice: &Notice) -> &Lent {
    match &notice.payload {
        Payload::Memory(lent) => lent,
        _ => unreachable!("the meeting compared the operations"),
    }
}

/// One launch of a window that is open, for this member.
pub(crate) struct Window {
    /// The device shares its GPU, and so may share a hardware queue with a peer.
    shares: bool,
}

impl Drop for Window {
    fn drop(&mut self) {
        gate::launches().close(1);
        if self.shares {
            // Until all that is to be launched has been: what comes next must not get in front of a peer's launch. That
            // is also true of a launch that waits for room in a queue, with the context's lock held.
            drop(gate::launches().block());
        }
    }
}

/// Opens the gate for the launches of collective `number` of a group and commits it; unless a peer has, or the gang has
/// failed. It fails when blocking calls keep the gate closed for as long as the pool waits for anything.
pub(super) fn commit(group: &Group<'_>, word: &CommitWord, number: u64) {
    let (gate, members, dev) = (gate::launches(), group.count(), group.dev);
    let mut stall = StallTimer::new(dev.worker.shared.deadline);
    while word.committed() < number && !word.is_aborted() {
        // Not asleep: a peer may open it meanwhile, and then a blocking call waits for this member's launch.
        if gate.try_open(members) {
            if word.lead(number) != Some(true) {
                gate.close(members);
            }
            return;
        }
        std::thread::yield_now();
        if stall.is_over() {
            // Before this member gives up: from here on nobody can commit it.
            let (device, op) = (dev.index(), "wait for blocking calls of the driver");
            let waited = stall.waited();
            dev.session.gang.poison(device, Error::Timeout { device, op, waited, missing: vec![device] });
        }
    }
}

/// Meetings that were committed, and for which this member has launched nothing.
#[derive(Clone, Copy)]
pub(super) struct Missed {
    pub meet: Meet,
    pub times: usize,
}

/// Before a meeting: this thread may wait for others' launches, and the current stream comes after the last kernel that
/// spins.
pub(super) fn prepare(dev: &Device, name: &'static str, site: Site) -> Result<()> {
    check_not_blocked(dev, name, site)?;
    if let Some((stream, last)) = &*dev.worker.spinning.last.borrow()
        && stream.id != dev.stream.id
    {
        dev.stream.wait_for(name, stream, *last)?;
    }
    Ok(())
}

pub(super) fn check_not_blocked(dev: &Device, name: &'static str, site: Site) -> Result<()> {
    if dev.worker.spinning.blocked.get() > 0 {
        return Err(Error::invalid_at(
            site,
            name,
            "a collective within `blocking` would wait for the closure that calls it",
        ));
    }
    Ok(())
}

/// A meeting that commits to a launch, which must come before the window is dropped. `blocks`: what peers' kernels
/// touch.
pub(super) fn commit_by<R>(
    group: &Group<'_>,
    missed: Missed,
    blocks: impl Iterator<Item = BlockRef>,
    meeting: impl FnOnce() -> Result<R>,
) -> Result<(R, Window)> {
    let number = group.next_number();
    match meeting() {
        Ok(met) => Ok((met, Window { shares: group.dev.worker.handle.sharers > 1 })),
        Err(error) => {
            // Committed by a peer, before it or this member has seen that the gang has failed.
            if group.word().committed() >= number {
                gate::launches().close(1);
                group.dev.worker.spinning.missed.borrow_mut().push(missed);
                // Peers' kernels that come yet may meet the one that makes up for this one.
                group.dev.worker.suspects.borrow_mut().extend(blocks);
            }
            Err(error)
        }
    }
}

/// After the window: what was submitted last spins; or, where that has failed, is missing.
pub(super) fn end(dev: &Device, missed: Missed, launched: &Result<()>) {
    let (stream, spinning) = (&dev.stream, &dev.worker.spinning);
    *spinning.last.borrow_mut() = Some((stream.clone(), stream.submitted()));
    if launched.is_err() {
        spinning.missed.borrow_mut().push(missed);
    }
}

/// The barrier of the members' kernels, in the gang at this place (0: in a graph).
pub(super) fn of(group: &Group<'_>, signals: &Signals, place: u64) -> Meet {
    let dev = group.dev;
    Meet {
        signals: signals.address(dev.index()),
        members: group.in_short().0,
        place,
        deadline: u64::try_from(dev.worker.shared.deadline.as_nanos()).unwrap_or(0),
        count: group.count() as u32,
        me: group.rank as u32,
        spare: 0,
    }
}

/// The device's gang has failed and drained: kernels that were never launched are launched now, only to be counted, and
/// give up at once.
pub(crate) fn make_up(worker: &Worker) -> Result<()> {
    let missed = worker.spinning.missed.take();
    let mut meets = missed.iter().flat_map(|missed| iter::repeat_n(missed.meet, missed.times));
    while let Some(meet) = meets.next() {
        if let Err(error) = count(worker, &worker.main, "recovery", meet) {
            let left = std::iter::once(meet).chain(meets).map(|meet| Missed { meet, times: 1 });
            *worker.spinning.missed.borrow_mut() = left.collect();
            return Err(error);
        }
        // What is not numbered is not waited for.
        worker.main.submit();
    }
    if missed.is_empty() { Ok(()) } else { worker.drain() }
}

/// The same at the beginning of a scope, for a gang that could not do it since it got stuck: when this device is
/// through with that one's work. (As long as it is not, the meetings wait.)
pub(crate) fn make_up_later(worker: &Worker) {
    if !worker.spinning.missed.borrow().is_empty()
        && worker.is_idle()
        && let Err(error) = make_up(worker)
    {
        event!(debug, device = worker.handle.device, %error, "meetings could not be made up");
    }
}

/// A kernel that meets its peers' and touches nothing.
pub(super) fn count(worker: &Worker, stream: &StreamCore, name: &'static str, meet: Meet) -> Result<()> {
    let none = Combine { n: 0, op: ReduceOp::Sum, factors: &[], sources: &[], destinations: &[], meet };
    launch::launch_on(worker, stream, name, kernels::combine(DType::U8), 1, &none.args(false))
}

#[cfg(test)]
#[path = "barrier_tests.rs"]
mod tests;
