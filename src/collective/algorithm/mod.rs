//! The algorithms of collectives: one file each, behind one trait. A file says when its algorithm fits, what it needs,
//! how many blocks its kernels have, and what a member submits.
//!
//! [`choose`](super::choose) picks a row of [`TABLE`]. [`execute`](super::execute) does what all algorithms need:
//! access to memory, scratch, the meeting, the commit, the failure. A new algorithm is a file, a row in the table, and
//! a line in the test that forces each (`choose_tests.rs`).
//!
//! Invariant: everything but [`Algorithm::submit`] is pure, so all members come to the same answers.
//!
//! | file | how data move and are added up | how members wait for each other |
//! |---|---|---|
//! | [`ll`] | one kernel; everything to everyone | flags in the data |
//! | [`ll_two_shot`] | two kernels; parts to owners, sums to all | flags in the data |
//! | [`eager`] | one kernel; everything to everyone | one flag per block, behind the data |
//! | [`fused`] | one kernel: reads, adds up, writes | flags before and after |
//! | [`fused_events`] | the kernel of `fused` | events |
//! | [`ring`] | one kernel, which writes to its successor | one counter per block |
//! | [`ring_ce`] | copy engines around the same ring, and kernels that add | events |
//! | [`exchange`] | one kernel, which writes to all peers | one counter per block |
//! | [`exchange_ce`] | copy engines between all, and kernels that add | events |
//! | [`ce`] | copy engines; nothing is added up | events |
//! | [`shm`] | one kernel over the host's memory | flags in the host's memory |
//! | [`shm_events`] | the steps of `shm` as ordinary kernels | events |
//! | [`host_reduce`] | copy engines, and the device threads add up | host threads, events |

pub(super) mod ce;
pub(super) mod eager;
pub(super) mod exchange;
pub(super) mod exchange_ce;
pub(super) mod fused;
pub(super) mod fused_events;
pub(super) mod host_reduce;
pub(super) mod ll;
pub(super) mod ll_two_shot;
pub(super) mod ring;
pub(super) mod ring_ce;
pub(super) mod ring_cut;
pub(super) mod shm;
pub(super) mod shm_events;

use super::{
    Group, ReduceOp,
    barrier::Met,
    board::{Area, Lent},
    choose::Case,
    kernels::Meet,
    plan::{Shape, Side, Work},
    request::{Job, RemotePtr, Request},
    signals::Signals,
    tuner::Limits,
    types,
};
use crate::{Event, driver::Address, error::Result, fabric::tiling::Tiling, memory::stream::StreamCore, mutation::Bug};
use smallvec::SmallVec;
use std::{cell::Cell, sync::Arc};

/// One way to carry collectives out.
pub(crate) trait Algorithm: Sync {
    fn about(&self) -> About;

    /// The public algorithm that it belongs to.
    fn group(&self, _case: &Case<'_>) -> types::Algorithm {
        self.about().group
    }

    fn name(&self) -> &'static str {
        self.about().name
    }

    fn waits_by(&self) -> &'static str {
        self.about().waits_by
    }

    /// The reason to choose it for this case. None if it cannot carry the case out, or if another row of the table is
    /// better.
    fn fits(&self, case: &Case<'_>) -> Option<&'static str>;

    /// The reason to choose it if the user has asked for an algorithm ([`Case::wants`]). `choose` looks here before it
    /// looks at [`fits`](Self::fits).
    fn asked_for(&self, _case: &Case<'_>) -> Option<&'static str> {
        None
    }

    /// Scratch, kernels, and the kind of meeting.
    fn needs(&self, case: &Case<'_>) -> Needs;

    /// Blocks of the kernel that carries the case out, or of the one that adds up what copy engines have brought.
    fn blocks(&self, case: &Case<'_>) -> u32;

    /// Whether `all_reduce_many` may pack small buffers into one. It may not if the bits depend on the place in the
    /// buffer, nor if a user asks for this algorithm so that no kernel runs.
    fn packs(&self) -> bool {
        true
    }

    /// Submits this member's part to its current stream. The members have met and committed, so a failure here fails
    /// the gang.
    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()>;
}

impl std::fmt::Debug for dyn Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The constants of an algorithm.
pub(crate) struct About {
    /// The name of its file, for logs and tests.
    pub name: &'static str,
    /// The public algorithm that it belongs to.
    pub group: types::Algorithm,
    /// How the devices wait for each other, in the words of [`Explanation::meets`](crate::Explanation).
    pub waits_by: &'static str,
}

/// All algorithms. The first one that fits carries a collective out.
pub(crate) static TABLE: [&dyn Algorithm; 13] = [
    &ring_ce::RingCe,
    &host_reduce::HostReduce,
    &exchange_ce::ExchangeCe,
    &ce::Ce,
    &ring::Ring,
    &exchange::Exchange,
    &ll::Ll,
    &ll_two_shot::LlTwoShot,
    &eager::Eager,
    &fused::Fused,
    &shm::Shm,
    &fused_events::FusedEvents,
    &shm_events::ShmEvents,
];

/// What an algorithm needs before its members meet.
pub(crate) struct Needs {
    pub meeting: Meeting,
    pub scratch: Scratch,
}

/// How members meet before anything is submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// The host threads meet. Each member gives an event: after it, peers may touch the member's memory.
    Events,
    /// The host threads meet. The algorithm itself orders the devices later.
    Host,
    /// The host threads meet, and the launch gate is open afterwards, because the members' kernels wait for each other.
    Kernels {
        /// Kernels of each member.
        launches: usize,
        /// Whether members tell each other more than a compact descriptor holds.
        in_full: bool,
    },
}

/// Memory that peers fill or read.
pub(crate) enum Scratch {
    None,
    /// On the device. The sizes are in bytes; the first one for which there is memory is taken.
    Device(Sizes),
    /// As `Device`, but the algorithm can do without if there is no memory for any size.
    Optional(Sizes),
    /// Bytes of page-locked memory.
    Host(usize),
}

pub(crate) type Sizes = SmallVec<[usize; 8]>;

impl Scratch {
    /// [`Scratch::Device`], or none when the best size is 0.
    pub(crate) fn device(sizes: impl Iterator<Item = usize>) -> Scratch {
        let sizes: Sizes = sizes.collect();
        if sizes.first().is_none_or(|&bytes| bytes == 0) { Scratch::None } else { Scratch::Device(sizes) }
    }
}

impl Needs {
    /// One kernel that waits for its peers' kernels, and no scratch.
    pub(crate) const ONE_KERNEL: Needs =
        Needs { meeting: Meeting::Kernels { launches: 1, in_full: false }, scratch: Scratch::None };
    /// Events, and no scratch.
    pub(crate) const EVENTS: Needs = Needs { meeting: Meeting::Events, scratch: Scratch::None };
}

/// One member's own part in a collective that is committed.
pub(crate) struct Member<'a> {
    pub group: &'a Group<'a>,
    pub request: &'a Request,
    pub limits: &'a Limits,
    /// The own scratch, if the algorithm needs any and there was memory.
    pub scratch: Option<&'a Area>,
    /// Where the own kernels wait for the peers' kernels. [`Meet::NONE`] where events order them.
    pub barrier: Meet,
    /// Own kernels launched so far that wait for peers' kernels. After a failure the gang makes up for missing ones.
    pub launched: Cell<usize>,
}

/// The result of the meeting: the shape that all members have agreed on, and the memory that each exposes.
pub(crate) struct Matched<'a> {
    pub(super) met: &'a Met,
    pub shape: &'a Shape,
}

impl Matched<'_> {
    fn exposed(&self, member: usize) -> &Lent {
        self.met.exposed(member)
    }

    /// Address and bytes of a member's scratch, to which its peers write.
    fn scratch(&self, member: usize) -> Option<(Address, usize)> {
        self.exposed(member).inbox
    }

    /// [`scratch`](Self::scratch) for an algorithm that cannot do without.
    fn room(&self, member: usize) -> (Address, usize) {
        self.scratch(member).expect("every member has scratch")
    }

    /// The smallest scratch of any member.
    fn least_room(&self, members: usize) -> usize {
        (0..members).map(|member| self.scratch(member).map_or(0, |(_, bytes)| bytes)).min().unwrap_or(0)
    }

    /// The address of each member's page-locked memory, by rank, and the bytes of the smallest. Their sizes differ only
    /// for `all_to_all_v`: its shape is not known when members take memory.
    fn stages(&self, members: usize) -> (SmallVec<[Address; 8]>, usize) {
        let all = || (0..members).map(|member| self.exposed(member).stage.as_ref().expect("every member has a stage"));
        (all().map(|stage| stage.address).collect(), all().map(|stage| stage.bytes.len()).min().unwrap_or(0))
    }

    /// The address of a member's buffer. A kernel does not need to know which device owns it.
    fn address(&self, member: usize, side: Side) -> Address {
        self.met.address(member, side)
    }
}

impl Member<'_> {
    fn name(&self) -> &'static str {
        self.request.call.op()
    }

    /// The signals of the pool. They exist, since the algorithm was chosen because kernels can wait for each other.
    fn signals(&self) -> &Signals {
        self.group.dev.worker.shared.signals.get().expect("chosen since kernels can meet")
    }

    /// The members' factors by rank; empty unless the operation is `Scaled`.
    fn factors(&self, matched: &Matched<'_>) -> SmallVec<[f64; 8]> {
        match self.request.reduce {
            ReduceOp::Scaled(_) => (0..self.group.count()).map(|member| matched.met.factor(member)).collect(),
            _ => SmallVec::new(),
        }
    }

    /// The address of a member's buffer, and the device that owns it.
    fn remote(&self, matched: &Matched<'_>, member: usize, side: Side) -> RemotePtr {
        let area = matched.exposed(member).area(side);
        // Managed memory has no owner: every device may use it as its own.
        let device = area.block.device().unwrap_or(self.group.dev.index());
        RemotePtr { device, address: area.address }
    }

    /// Later work of the current stream comes after the work that a peer submitted before its call.
    fn wait_for_start(&self, matched: &Matched<'_>, peer: usize) -> Result<()> {
        let dev = self.group.dev;
        if dev.worker.handle.injected(Bug::StartSkipped) {
            return Ok(());
        }
        let ready = matched.exposed(peer).ready.as_ref().expect("there are several members");
        self.wait_on(&dev.stream, ready)
    }

    /// Later work of `stream` comes after `event`.
    fn wait_on(&self, stream: &StreamCore, event: &Event) -> Result<()> {
        stream.wait_event(self.name(), event.0.raw, &event.0.stream, event.0.covered)
    }

    /// An event behind all work that the current stream has.
    fn record(&self) -> Result<Event> {
        Event::record(&self.group.dev.stream, self.name(), false)
    }

    /// Submits `work` after the starts of all peers whose memory this member may touch. Later work of this member comes
    /// after the ends of all peers that may touch its memory: the exit rule.
    fn ordered_by_events(&self, matched: &Matched<'_>, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let (group, call, me) = (self.group, &self.request.call, self.group.rank);
        let touched = || group.others().filter(|&peer| matched.shape.touches(me, peer));
        touched().try_for_each(|peer| self.wait_for_start(matched, peer))?;
        work()?;
        let done = touched().next().is_some().then(|| self.record()).transpose()?;
        for peer in touched() {
            group.send_step(call, peer, done.clone().expect("recorded for them"))?;
        }
        group.others().filter(|&peer| matched.shape.touches(peer, me)).try_for_each(|peer| group.await_step(call, peer))
    }

    /// Carries out this member's work by `submit`, [ordered by events](Self::ordered_by_events).
    fn carry_out(&self, matched: &Matched<'_>, work: &Work, submit: impl FnOnce(&Job) -> Result<()>) -> Result<()> {
        self.ordered_by_events(matched, || {
            if work.is_empty() {
                return Ok(());
            }
            let at = |rank, side| self.remote(matched, rank, side);
            submit(&self.request.job(work, at, self.factors(matched)))
        })
    }

    /// Runs `work`, which submits to `streams`: after the earlier work of the current stream, and before its later
    /// work.
    fn fork_join(&self, streams: &[Arc<StreamCore>], work: impl FnOnce() -> Result<()>) -> Result<()> {
        let (own, name) = (&self.group.dev.stream, self.name());
        streams.iter().try_for_each(|stream| stream.wait_for(name, own, own.submit()))?;
        let done = work();
        // Also after a failure: the work that was submitted to the other streams belongs to the caller's operation.
        let joined = streams.iter().map(|stream| {
            own.wait_for(name, stream, stream.submit()).or_else(|error| {
                // No event orders that work, so it must be over now.
                stream.wait_idle(name, self.group.dev.worker.shared.deadline, || false)?;
                Err(error)
            })
        });
        joined.fold(done, Result::and)
    }

    /// Later work of every member comes after the earlier work of all members.
    fn barrier_by_events(&self) -> Result<()> {
        let (group, call) = (self.group, &self.request.call);
        let done = self.record()?;
        group.others().try_for_each(|peer| group.send_step(call, peer, done.clone()))?;
        group.others().try_for_each(|peer| group.await_step(call, peer))
    }

    /// The address of an element of an own buffer. 0 if `len` is 0: there may be no buffer then.
    fn own(&self, side: Side, start: usize, len: usize) -> Address {
        if len == 0 {
            return 0;
        }
        let area = self.request.area(side).expect("a member has the buffers that its part is done on");
        area.address + (start * self.request.dtype.size()) as u64
    }

    /// Address and bytes of tile `j` of `len` elements of an own buffer, from element `start` on. Both are 0 if nothing
    /// is left of them for this tile.
    fn tile(&self, cut: &Tiling, side: Side, start: usize, len: usize, j: usize) -> (Address, usize) {
        let range = cut.range(j, len * self.request.dtype.size());
        if range.is_empty() {
            return (0, 0);
        }
        (self.own(side, start, len) + range.start as u64, range.len())
    }
}
