//! Kernels that meet by themselves: a start and an end barrier over flags in each other's memory, or the flags in the data.
//! No event and no second meeting of the host: one launch is the whole collective.
//!
//! Such a kernel spins until its peers' kernels run, so all of them must get to run:
//!
//! * none is launched before all members have arrived and match (the board), and from the commit on each member launches;
//! * meanwhile nobody in the process is in a driver call that waits for kernels (the [launch gate](crate::sync::LaunchGate):
//!   the member that commits opens it for all, each closes it for itself when it has launched);
//! * on each device they run one at a time, in the order in which all members agree (the gang's), whatever their streams;
//! * grids are small enough to be resident as a whole.
//!
//! If a member fails nevertheless, the gang's abort ends the others' kernels. Devices count their meetings pair by pair; a member
//! that has missed one makes up for it when the gang has drained ([`make_up`]).

use super::{
    DType, Group, ReduceOp,
    board::{Notice, Payload},
    brief::Brief,
    choose::Way,
    direct,
    kernels::{Combine, Meet, Part, Push},
    plan::{Shape, Side},
    run::{Request, Spot, lent},
    signals::Signals,
    staged,
};
use crate::{
    driver::{Address, gate},
    error::{Error, Result},
    op::Op,
    runtime::worker::Worker,
    stream::StreamCore,
    sync::CommitWord,
};
use smallvec::SmallVec;
use std::{
    borrow::Cow,
    cell::{Cell, RefCell},
    sync::Arc,
};

/// What a device thread knows of its spinning kernels.
#[derive(Default)]
pub(crate) struct Spinning {
    /// The last one: its stream and number.
    last: RefCell<Option<(Arc<StreamCore>, u64)>>,
    /// Meetings that were committed, and for which nothing was launched.
    missed: RefCell<Vec<Meet>>,
    /// Within [`Device::blocking`](crate::Device::blocking).
    blocked: Cell<u32>,
}

impl Spinning {
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
enum Met {
    Briefly(SmallVec<[Brief; 8]>),
    InFull(SmallVec<[Arc<Notice>; 8]>),
}

impl Met {
    fn factor(&self, member: usize) -> f64 {
        match self {
            Met::Briefly(all) => all[member].factor(),
            Met::InFull(all) => lent(&all[member]).factor,
        }
    }

    fn address(&self, member: usize, side: Side) -> Address {
        match self {
            Met::Briefly(all) => all[member].address(side),
            Met::InFull(all) => {
                let lent = lent(&all[member]);
                let area = match side {
                    Side::Source => lent.source.as_ref().or(lent.destination.as_ref()),
                    Side::Destination => lent.destination.as_ref(),
                };
                area.expect("every member lends what its part is done on").address
            }
        }
    }
}

/// One launch of a window that is open, for this member.
struct Window;

impl Drop for Window {
    fn drop(&mut self) {
        gate::launches().close(1);
    }
}

/// Opens the gate for the launches of collective `number` of `members` and commits it; unless a peer has, or the gang has failed.
pub(super) fn commit(word: &CommitWord, number: u64, members: usize) {
    let gate = gate::launches();
    while word.committed() < number && !word.is_aborted() {
        // Not asleep: a peer may open it meanwhile, and then a blocking call waits for this member's launch.
        if gate.try_open(members) {
            if word.lead(number) != Some(true) {
                gate.close(members);
            }
            return;
        }
        std::thread::yield_now();
    }
}

/// Carries a collective out by one kernel on each member.
pub(super) fn run(group: &Group<'_>, request: &Request, way: Way, signals: &Signals, access: Op<'_>) -> Result<()> {
    let dev = group.dev;
    let name = request.call.op();
    let spinning = &dev.worker.spinning;
    if spinning.blocked.get() > 0 {
        return Err(Error::invalid(name, "a collective within `blocking` would wait for the closure that calls it"));
    }
    if let Some((stream, last)) = &*spinning.last.borrow()
        && stream.id != dev.stream.id
    {
        dev.stream.wait_for(name, stream, *last)?;
    }
    let meet = meet(group, signals);
    let number = group.next_number();
    let met = match Brief::of(request, group.in_short()) {
        Some(own) => group.meet_briefly(own, &request.call).map(Met::Briefly),
        None => group.meet(request.call.clone(), Payload::Memory(request.lend(None)), true).map(Met::InFull),
    };
    let met = match met {
        Err(error) => {
            // Committed by a peer, before it or this member has seen that the gang has failed.
            if group.word().committed() >= number {
                drop(Window);
                spinning.missed.borrow_mut().push(meet);
            }
            return Err(error);
        }
        Ok(met) => met,
    };
    // From here on the others count on this member's launch, whatever comes of it: each launches, and each pair counts.
    let window = Window;
    let shape = match (&request.shape, &met) {
        (Some(shape), _) => Ok(Cow::Borrowed(shape)),
        (None, Met::InFull(notices)) => group.shape(request, notices).map(Cow::Owned),
        (None, Met::Briefly(_)) => unreachable!("a brief is of a shape that is known"),
    };
    let shape = match shape {
        Ok(shape) => shape,
        // The others find the same, and nobody touches anything.
        Err(error) => {
            let counted = count(&dev.worker, &dev.stream, name, meet);
            drop(window);
            return Err(finish(group, request, meet, access, counted).err().unwrap_or(error));
        }
    };
    let (n, grain) = (group.count(), request.grain());
    let largest = shape.largest(n, grain) * request.dtype.size();
    let factors = (0..n).map(|member| met.factor(member));
    let launched = match way {
        // A push of nothing would wait for nobody, and so not be counted.
        Way::Push if largest > 0 => push(group, request, factors.collect(), meet),
        Way::Staged => {
            let factors: SmallVec<[f64; 8]> = factors.collect();
            let factors = if matches!(request.reduce, ReduceOp::Scaled(_)) { &factors[..] } else { &[] };
            staged::launch(group, request, &shape, factors, meet, signals)
        }
        _ => {
            // Whose memory it is does not matter to a kernel.
            let spot = |member, side| Spot { device: dev.index(), address: met.address(member, side) };
            let job = request.job(&shape.work(n, group.rank, grain), spot, factors);
            direct::submit(group, request, &job, meet, largest)
        }
    };
    drop(window);
    finish(group, request, meet, access, launched)
}

/// Notes what was launched; or that nothing was, and tells the gang.
fn finish(group: &Group<'_>, request: &Request, meet: Meet, access: Op<'_>, launched: Result<()>) -> Result<()> {
    let (stream, spinning) = (&group.dev.stream, &group.dev.worker.spinning);
    access.submitted();
    *spinning.last.borrow_mut() = Some((stream.clone(), stream.submitted()));
    launched.inspect_err(|cause| {
        spinning.missed.borrow_mut().push(meet);
        group.fail(request, cause);
    })
}

fn meet(group: &Group<'_>, signals: &Signals) -> Meet {
    let dev = group.dev;
    Meet {
        signals: signals.address(dev.index()),
        members: group.in_short().0,
        place: dev.session.gang.place(),
        deadline: u64::try_from(dev.worker.shared.deadline.as_nanos()).unwrap_or(0),
        count: group.count() as u32,
        me: group.rank as u32,
        spare: 0,
    }
}

/// An all-reduce whose data carries its flags.
fn push(group: &Group<'_>, request: &Request, factors: SmallVec<[f64; 8]>, meet: Meet) -> Result<()> {
    let Some(Shape::AllReduce { len }) = request.shape else { unreachable!("chosen for all_reduce") };
    let factors = if matches!(request.reduce, ReduceOp::Scaled(_)) { &factors[..] } else { &[] };
    let (dtype, op) = (request.dtype, request.reduce);
    let part = |side| {
        let address = request.area(side).expect("all_reduce has a buffer").address;
        Part { address, bytes: len * dtype.size() }
    };
    let (source, destination) = (part(Side::Source), part(Side::Destination));
    let push = Push { n: len, op, factors, source, destination, meet };
    let blocks = direct::blocks_of(len * dtype.size(), PUSH_PER_BLOCK);
    direct::launch(group.dev, request.call.op(), super::kernels::push(dtype), blocks, &push.args())
}

/// Bytes of a block of a push: one packet of 8 bytes for each thread, so that all are on their way at once.
const PUSH_PER_BLOCK: usize = 512 * 8;

/// The device's gang has failed and drained: kernels that were never launched are launched now, only to be counted, and give up
/// at once.
pub(crate) fn make_up(worker: &Worker) -> Result<()> {
    let missed = worker.spinning.missed.take();
    missed.iter().try_for_each(|meet| count(worker, &worker.main, "recovery", *meet))?;
    if missed.is_empty() { Ok(()) } else { worker.drain() }
}

/// A kernel that meets its peers' and touches nothing.
pub(super) fn count(worker: &Worker, stream: &StreamCore, name: &'static str, meet: Meet) -> Result<()> {
    let none = Combine { n: 0, op: ReduceOp::Sum, factors: &[], sources: &[], destinations: &[], meet };
    direct::launch_on(worker, stream, name, super::kernels::combine(DType::U8), 1, &none.args(false))
}
