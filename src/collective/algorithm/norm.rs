//! A sum, the addition of a residual and a norm of the rows in one kernel: by data that are their own flags
//! (`kernels/norm_inbox.cu`), which touches no peer's memory but the inboxes in the signal pads; or, for many rows, by
//! one that reads the rows of all members where they are (`kernels/norm_pull.cu`).
//!
//! [`call`] asks for it; where it does not fit, that is three calls. Invariant: the choice depends only on values that
//! all members have in common. All ways give the same bits.

pub(crate) mod call;

use super::{About, Algorithm, Matched, Member, Needs, inbox::most_whole};
use crate::collective::{Arguments, Entry, Part, Request, case::Case, eights, kernels::value, lone_pad::OwnKernel};
use crate::driver::{LaunchDims, RawFunction};
use crate::error::Result;
use crate::fabric::{
    BLOCKS, DType, DeviceBarrier, Limits, PadLayout, Side,
    types::{self, Algorithm as Wish},
};
use crate::kernel::builtin::{NORM_INBOX, NORM_PULL};

/// Packs of 16 bytes that a thread has of a row: `KEPT` of `kernels/rows.cuh`.
const KEPT: usize = 4;
/// Most threads of a block, unless a row has more.
const MOST_THREADS: u32 = 512;
/// More blocks than this are not worth a pack less for each thread. 16 rows of 16384 in `f32` take 8.3 us with 64
/// blocks, and 8.7 with 128.
const MOST_SPLIT: u32 = 64;

/// Threads of a row of so many elements of `size` bytes: a warp, or as many as keep the row in registers. By the width
/// alone, also for the kernels of norms without a collective.
pub fn threads_of_row(size: usize, cols: usize) -> u32 {
    cols.div_ceil(16 / size * KEPT).next_power_of_two().clamp(32, 1024) as u32
}

/// The rows of one call, as all its members see them alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rows {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    pub threads: u32,
    pub eps: f32,
    /// Else the RMS norm.
    pub layer: bool,
}

/// How the data go. The first three are `enum Way` of `norm_inbox.cu`; `norm_pull.cu` ignores the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Way {
    OneTrip,
    ToAll,
    ByOwners,
    Pull,
}

/// The struct `Plan` of the kernels.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Plan {
    rows: u64,
    cols: u32,
    eps: f32,
    way: u32,
    layer: u32,
    packs: u32,
    split: u32,
}

/// The kernel for some rows: which one, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NormKernel {
    rows: Rows,
    way: Way,
    /// Rows of a block at once.
    together: u32,
    /// How many times as many threads a row has as the kernels of the norms give it.
    spread: u32,
    /// Blocks of a row.
    split: u32,
    pub(crate) blocks: u32,
    wide: bool,
    /// Two members: they have kernels of their own.
    two: bool,
}

/// This member's memory beside the sum's, which is `x` and `y`. All addresses are multiples of 16, on all
/// members; the mean's and the bias' parts are empty for an RMS norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormMemory {
    pub residual: Part,
    pub gamma: Part,
    pub beta: Part,
    pub mean: Part,
    pub rstd: Part,
}

/// Most bytes of rows that go everything to everyone. Up to four members send as much as an inbox takes: 512 KB take
/// 9.9 us on four H200s, as three calls 14.7.
fn most_in_one_trip(members: usize) -> usize {
    if members > 4 { most_whole(members) } else { usize::MAX }
}

/// Bytes of rows from which on members read each other's where they are. Two H200s, bf16 rows of 4096, in graphs: 2 MB
/// take 11.0 us in one trip and 12.8 by reads; 8 MB 38.9 through slots and 31.7 by reads. Four: 1 MB takes 15.2 us by
/// reads and 26.6 through slots. More: not measured.
fn pulled(members: usize) -> usize {
    match members {
        0..=2 => 2 << 20,
        3..=4 => 512 << 10,
        _ => 16 << 20,
    }
}

impl NormKernel {
    /// None where it does not fit. `inbox` is the layout of the pads of devices whose kernels meet. Pads of processes
    /// have no slots, and processes know no addresses of each other: there only one trip fits.
    pub(in super::super) fn of(
        rows: Rows,
        members: usize,
        inbox: PadLayout,
        limits: &Limits,
        wish: Wish,
    ) -> Option<NormKernel> {
        let (size, threads) = (rows.dtype.size(), rows.threads);
        let wide = threads > MOST_THREADS;
        let typed = match rows.dtype {
            DType::F32 => threads <= 1024,
            DType::F16 | DType::BF16 => !wide,
            _ => false,
        };
        let row = rows.cols.checked_mul(size)?;
        let fits = row.is_multiple_of(16) && row <= KEPT * 16 * threads as usize && rows.rows > 0 && inbox.inbox > 0;
        let free = matches!(wish, Wish::Auto | Wish::Inbox | Wish::Direct);
        if !typed || !fits || !free {
            return None;
        }
        let way = match rows.rows.checked_mul(row)? {
            _ if wish == Wish::Direct => Way::Pull,
            bytes if bytes <= inbox.inbox.min(most_in_one_trip(members)) => Way::OneTrip,
            bytes if bytes >= pulled(members) && wish == Wish::Auto => Way::Pull,
            _ if members == 2 => Way::ToAll,
            _ if wish == Wish::Auto => return None,
            _ => Way::ByOwners,
        };
        if way != Way::OneTrip && inbox.inbox_slot == 0 {
            return None;
        }
        let owners = way == Way::ByOwners || (way == Way::Pull && members > 2);
        let groups = if owners { rows.rows.div_ceil(members) } else { rows.rows };
        let most = if way == Way::OneTrip { limits.of_one_trip(BLOCKS) } else { limits.blocks(BLOCKS) };
        let together = groups.div_ceil(most as usize).next_power_of_two().min((MOST_THREADS / threads).max(1) as usize);
        let blocks = groups.div_ceil(together).min(most as usize) as u32;
        let (together, two) = (together as u32, members == 2);
        // Few rows: the time is that of one thread's instructions and waits, so more threads have fewer packs. (1024
        // rows of four members, by reads, with half as many packs take 60 us instead of 56.)
        let packs = (row.div_ceil(16) as u32).div_ceil(threads).next_power_of_two();
        let spreads = way == Way::OneTrip || (way == Way::Pull && !two && together == 1);
        // Long ones also get more blocks, with one pack or two for each thread.
        let (all, room) = (threads * packs / MOST_THREADS, 1 << (MOST_SPLIT / blocks).max(1).ilog2());
        let split = all.min(room.max(all / 2));
        let split = if way == Way::OneTrip && all > 2 && blocks * split <= most { split } else { 1 };
        let spread = if spreads { packs.min((MOST_THREADS * split / (threads * together)).max(1)) } else { 1 };
        Some(NormKernel { rows, way, together, spread, split, blocks: blocks * split, wide: wide && split == 1, two })
    }

    pub(in super::super) fn entry(&self) -> Entry {
        let (module, names) = match self.way {
            Way::Pull => (&NORM_PULL, ["norm_pull_wide_f32", "norm_pull_f32", "norm_pull_f16", "norm_pull_bf16"]),
            _ if self.two => {
                (&NORM_INBOX, ["norm_inbox_wide_f32", "norm_inbox_f32", "norm_inbox_f16", "norm_inbox_bf16"])
            }
            _ => (
                &NORM_INBOX,
                ["norm_inbox_many_wide_f32", "norm_inbox_many_f32", "norm_inbox_many_f16", "norm_inbox_many_bf16"],
            ),
        };
        let name = match self.rows.dtype {
            DType::F32 if self.wide => names[0],
            DType::F32 => names[1],
            DType::F16 => names[2],
            _ => names[3],
        };
        Entry { module, name, host: None }
    }

    pub(in super::super) fn dims(&self) -> LaunchDims {
        let block = (self.rows.threads * self.spread / self.split, self.together, 1);
        LaunchDims { grid: (self.blocks, 1, 1), block, shared_bytes: 0 }
    }

    pub(crate) fn about(&self) -> About {
        match self.way {
            Way::Pull => About { name: "norm_pull", group: types::Algorithm::Direct, waits_by: "flags" },
            _ => About { name: "norm_inbox", group: types::Algorithm::Inbox, waits_by: "data" },
        }
    }

    pub(crate) fn reason(&self) -> &'static str {
        match self.way {
            Way::Pull => "one kernel for sum, residual and norm: it reads the rows of all members where they are",
            Way::OneTrip => "one kernel for sum, residual and norm: everything to everyone in one trip",
            Way::ToAll => "one kernel for sum, residual and norm: everything to the other one, through slots",
            Way::ByOwners => {
                "one kernel for sum, residual and norm: rows to their owners and sums to all, through slots"
            }
        }
    }
}

/// A member's part in a call that one kernel carries out.
#[derive(Clone, Copy, Debug)]
pub struct NormCall {
    pub(crate) kernel: NormKernel,
    pub(crate) function: RawFunction,
    pub(crate) memory: NormMemory,
}

impl Algorithm for NormCall {
    fn about(&self) -> About {
        self.kernel.about()
    }

    fn fits(&self, _: &Case<'_>) -> Option<&'static str> {
        Some(self.kernel.reason())
    }

    fn needs(&self, _: &Case<'_>) -> Needs {
        Needs::ONE_KERNEL
    }

    fn blocks(&self, _: &Case<'_>) -> u32 {
        self.kernel.blocks
    }

    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        let args = match self.kernel.way {
            Way::Pull => self.pull_args(member, matched),
            _ => self.inbox_args(member.barrier, member.request),
        };
        member.launch_as(&self.kernel.entry(), self.kernel.dims(), &args)?;
        member.launched.set(member.launched.get() + 1);
        Ok(())
    }
}

impl NormCall {
    fn plan(&self) -> Plan {
        let NormKernel { rows, way, spread, split, .. } = self.kernel;
        Plan {
            rows: rows.rows as u64,
            cols: rows.cols as u32,
            eps: rows.eps,
            way: way as u32,
            layer: u32::from(rows.layer),
            packs: KEPT as u32 / spread,
            split,
        }
    }

    /// For members of several processes, which go all ways but [`Way::Pull`].
    fn own(&self, request: &Request) -> OwnKernel {
        let args = self.inbox_args(DeviceBarrier::NONE, request);
        OwnKernel { name: self.kernel.entry().name, function: self.function, dims: self.kernel.dims(), args }
    }

    /// For all ways but [`Way::Pull`].
    fn inbox_args(&self, meet: DeviceBarrier, request: &Request) -> Arguments {
        let NormMemory { residual, gamma, beta, mean, rstd } = self.memory;
        let [x, y] = [Side::Source, Side::Destination].map(|side| {
            let area = request.area(side).expect("all members have rows");
            Part { address: area.address, bytes: area.bytes.len() }
        });
        let [x, gamma, beta] = [x, gamma, beta].map(|part| part.slice(false));
        let [residual, y, mean, rstd] = [residual, y, mean, rstd].map(|part| part.slice(true));
        let head = [value(meet), value(self.plan())];
        head.into_iter().chain([x, residual, gamma, beta, y, mean, rstd]).collect()
    }

    fn pull_args(&self, member: &Member<'_>, matched: &Matched<'_>) -> Arguments {
        let NormMemory { residual, gamma, beta, mean, rstd } = self.memory;
        let of_all = |side| eights(&matched.addresses(member.count(), side));
        let [gamma, beta] = [gamma, beta].map(|part| part.slice(false));
        let [residual, mean, rstd] = [residual, mean, rstd].map(|part| part.slice(true));
        let head = [value(member.barrier), value(self.plan())];
        let mut args: Arguments = head.into_iter().chain([residual, gamma, beta, mean, rstd]).collect();
        args.extend(of_all(Side::Source));
        args.extend(of_all(Side::Destination));
        args
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/collective/algorithm/norm_tests.rs"]
mod tests;
