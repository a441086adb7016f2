//! The algorithms: one file each, behind one trait. A file says when its algorithm fits, what it needs, how many blocks
//! its kernels have, and what a member submits.
//!
//! [`choose`](super::choose) picks one from [`TABLE`], and [`execute`](super::execute) does what all of them need:
//! access to memory, scratch, the meeting, the commit, the failure. An algorithm works on a [`Member`]. A new algorithm
//! is a file, a row in the table, and a line in the test that forces each (`choose_tests.rs`).
//!
//! | file | who adds up or moves | how members wait for each other |
//! |---|---|---|
//! | [`ll`] | one kernel; everything to everyone | flags in the data |
//! | [`ll_two_shot`] | two kernels; parts to owners, sums to all | flags in the data |
//! | [`eager`] | one kernel; everything to everyone | one flag per block, behind the data |
//! | [`fused`] | one kernel: reads, adds up, writes | flags before and after |
//! | [`fused_events`] | the same kernel | events |
//! | [`ring`] | one kernel, which writes to its successor | one counter per block |
//! | [`ring_ce`] | copy engines around the same ring, and kernels that add | events |
//! | [`exchange`] | one kernel, which writes to all peers | one counter per block |
//! | [`exchange_ce`] | copy engines between all, and kernels that add | events |
//! | [`ce`] | copy engines; nothing is added up | events |
//! | [`shm`] | one kernel over the host's memory | flags in the host's memory |
//! | [`shm_events`] | the same steps as ordinary kernels | events |
//! | [`host_reduce`] | copy engines, and the device threads add up | host threads, events |

pub(crate) mod ce;
pub(crate) mod eager;
pub(crate) mod exchange;
pub(crate) mod exchange_ce;
pub(crate) mod fused;
pub(crate) mod fused_events;
pub(crate) mod host_reduce;
pub(crate) mod ll;
pub(crate) mod ll_two_shot;
mod member;
pub(crate) mod ring;
pub(crate) mod ring_ce;
pub(crate) mod ring_cut;
pub(crate) mod shm;
pub(crate) mod shm_events;

use super::choose::Case;
use crate::{error::Result, fabric::types};
use smallvec::SmallVec;

pub(super) use member::{Executor, Matched, Member};

/// One way to carry collectives out. Everything but [`submit`](Self::submit) is pure, and all members get the same
/// answers.
pub(crate) trait Algorithm: Sync {
    /// The name of its file, for logs and tests.
    fn name(&self) -> &'static str;

    /// The public algorithm that it belongs to.
    fn group(&self, case: &Case<'_>) -> types::Algorithm;

    /// How the devices wait for each other, in the words of [`Explanation::meets`](crate::Explanation).
    fn waits_by(&self) -> &'static str;

    /// The reason for it, if it is right for this case. None if it cannot carry the case out, or another row of the
    /// table is better.
    fn fits(&self, case: &Case<'_>) -> Option<&'static str>;

    /// [`fits`](Self::fits) where the user has asked for an algorithm ([`Case::wants`]). It is asked first.
    fn asked_for(&self, _case: &Case<'_>) -> Option<&'static str> {
        None
    }

    /// Scratch, kernels, and the kind of meeting.
    fn needs(&self, case: &Case<'_>) -> Needs;

    /// Blocks of its kernel; with copy engines, of the kernel that adds up what has arrived.
    fn blocks(&self, case: &Case<'_>) -> u32;

    /// Whether small buffers may be packed into one. Not where the bits depend on the place in the buffer, and not
    /// where the user asked for the algorithm so that no kernels run.
    fn packs(&self) -> bool {
        true
    }

    /// Submits this member's part to its stream. The members have met and committed, so an error fails the gang.
    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()>;
}

impl std::fmt::Debug for dyn Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// All algorithms. Of those that fit, the first one carries a collective out.
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
    /// Each member tells by an event when its memory may be touched.
    Events,
    /// Only the host threads meet. The algorithm orders the devices itself.
    Host,
    /// The kernels of all members wait for each other. The launch gate is open when the members have met.
    Kernels {
        /// Number of kernels of each member.
        launches: usize,
        /// Whether the members need full descriptors.
        in_full: bool,
    },
}

/// Memory that peers fill or read.
pub(crate) enum Scratch {
    None,
    /// On the device: the first of these sizes in bytes for which there is memory.
    Device(Sizes),
    /// As [`Device`](Self::Device); the algorithm goes without where there is no memory for any.
    Optional(Sizes),
    /// So many bytes of page-locked memory.
    Host(usize),
}

pub(crate) type Sizes = SmallVec<[usize; 8]>;

impl Scratch {
    /// None when the best size is 0.
    pub(crate) fn device(sizes: impl Iterator<Item = usize>) -> Scratch {
        let sizes: Sizes = sizes.collect();
        if sizes.first().is_none_or(|&bytes| bytes == 0) { Scratch::None } else { Scratch::Device(sizes) }
    }
}

impl Needs {
    /// One kernel that waits for its peers', and no scratch.
    pub(crate) const ONE_KERNEL: Needs =
        Needs { meeting: Meeting::Kernels { launches: 1, in_full: false }, scratch: Scratch::None };
    /// Events, and no scratch.
    pub(crate) const EVENTS: Needs = Needs { meeting: Meeting::Events, scratch: Scratch::None };
}
