//! The algorithms of collectives, behind one trait: one file each. It says when its algorithm fits, what it needs, how
//! many blocks its kernels have, and what a member submits. [`choose`](super::choose) picks a row of its table;
//! [`execute`](super::execute) does what all algorithms need. A new algorithm is a file, a row in the table, and a line
//! in the test that forces each (`choose_tests.rs`).
//!
//! Invariant: everything but [`Algorithm::submit`] is pure, so all members come to the same answers.
//!
//! | file | how data move and are added up | how members wait for each other |
//! |---|---|---|
//! | [`inbox`] | one kernel; everything to everyone | by the data |
//! | [`slots`] | one kernel; parts to owners, sums to all, piece by piece | by the data |
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
//!
//! [`norm`] and [`above`] are no rows of the table, since they do more than a collective. Operations of higher crates
//! ask for them.

/// [`Algorithm::about`]: the name, the public algorithm, and how members wait for each other.
macro_rules! about {
    ($name:expr, $group:ident, $waits_by:literal) => {
        fn about(&self) -> $crate::collective::algorithm::About {
            let group = $crate::fabric::types::Algorithm::$group;
            $crate::collective::algorithm::About { name: $name, group, waits_by: $waits_by }
        }
    };
}

pub(crate) mod above;
pub(crate) mod ce;
pub(crate) mod eager;
pub(crate) mod exchange;
pub(crate) mod exchange_ce;
pub(crate) mod fused;
pub(crate) mod fused_events;
pub(crate) mod host_reduce;
pub(crate) mod inbox;
pub(crate) mod ll;
pub(crate) mod ll_two_shot;
mod member;
pub(crate) mod norm;
pub(crate) mod ring;
pub(crate) mod ring_ce;
pub(crate) mod shm;
pub(crate) mod shm_events;
pub(crate) mod slots;
mod staging;

pub(crate) use self::norm::{NormKernel, Rows};
use self::{
    exchange_ce::Slice,
    staging::{Staging, cutting},
};

use super::case::Case;
use crate::{error::Result, fabric::types};
use smallvec::SmallVec;

pub(crate) use member::{Matched, Member};
pub(super) use member::{dims, launch};

/// One way to carry collectives out.
pub(crate) trait Algorithm: Sync {
    fn about(&self) -> About;

    fn group(&self, _case: &Case<'_>) -> types::Algorithm {
        self.about().group
    }

    fn name(&self) -> &'static str {
        self.about().name
    }

    fn waits_by(&self) -> &'static str {
        self.about().waits_by
    }

    /// The reason to choose it for this case. None if it cannot, or if another row of the table is better.
    fn fits(&self, case: &Case<'_>) -> Option<&'static str>;

    /// The reason to choose it if the user asks for it ([`Case::wants`]): before [`fits`](Self::fits).
    fn asked_for(&self, _case: &Case<'_>) -> Option<&'static str> {
        None
    }

    fn needs(&self, _case: &Case<'_>) -> Needs {
        Needs::ONE_KERNEL
    }

    /// Blocks of the kernel that carries the case out, or of the one that adds up what copy engines have brought.
    fn blocks(&self, case: &Case<'_>) -> u32 {
        super::launch::blocks(case.largest())
    }

    /// Whether `all_reduce_many` may pack small buffers into one. It may not if the bits depend on the place in the
    /// buffer, nor if a user asks for this algorithm so that no kernel runs.
    fn packs(&self) -> bool {
        true
    }

    /// Submits this member's part to its stream. The members have committed, so a failure fails the gang.
    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()>;
}

impl std::fmt::Debug for dyn Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

pub(crate) struct About {
    pub name: &'static str,
    pub group: types::Algorithm,
    /// How the devices wait for each other, in the words of [`Explanation::meets`](crate::collective::Explanation).
    pub waits_by: &'static str,
}

pub(crate) struct Needs {
    pub meeting: MeetBy,
    pub scratch: Scratch,
}

/// How members meet before anything is submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MeetBy {
    /// The host threads meet. Each member gives an event: after it, peers may touch the member's memory.
    Events,
    /// The host threads meet. The algorithm itself orders the devices later.
    Host,
    /// The host threads meet, and the launch gate is open afterwards, because the members' kernels wait for each other.
    Kernels {
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
        Needs { meeting: MeetBy::Kernels { launches: 1, in_full: false }, scratch: Scratch::None };
    pub(crate) const EVENTS: Needs = Needs { meeting: MeetBy::Events, scratch: Scratch::None };
}
