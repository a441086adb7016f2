//! A collective by the host: copy engines bring members' data down to page-locked memory, the device threads add up
//! there, each one slice of every piece (as BytePS's "Summation Service",
//! <https://www.usenix.org/conference/osdi20/presentation/jiang>), and copy engines bring the results up again.
//!
//! `choose` picks it for more members than a kernel can name, and if a user asks for it. [`staging`](super::staging)
//! plans each member's part, which is done piece by piece through stages with two slots:
//!
//! ```text
//! own stream    down 0 |           down 1 | up 0 | down 2      | up 1 | ..
//! host                 | all here: fold 0 | all folded: fold 1 | ..
//! ```
//!
//! To fold, the host waits until its own piece is down, and tells the others, which then read it. Meanwhile the next
//! one comes down. Data that are only moved need no wait of the host: streams wait for each other's events.
//!
//! A slot may be used again: a member tells its peers that its piece `j + 1` is down after its fold of piece `j`. The
//! message's event covers its copies of piece `j` from the peers' stages. Piece `j + 2` comes down after these events.

use super::{Algorithm, Case, Matched, MeetBy, Member, Needs, Scratch, Staging};
use crate::{
    Event,
    collective::kernels,
    driver::{Address, Driver, DriverResult, FailPoint, RawStream},
    error::{Error, Result},
    fabric::{GRAIN, MOST, Side, Tiling, tiling, types},
};
use smallvec::SmallVec;
use std::{ptr, time::Duration};

pub(crate) struct HostReduce;

/// The pieces then stay in the host's cache while the threads add up.
const SLOT: usize = 2 << 20;
const SLOTS: usize = 2;
/// Least bytes of all lanes of a piece: a smaller piece is not worth the meetings of the hosts.
const LEAST: usize = 128 << 10;
/// Pieces, if they have at least that: the least number for which copies both ways and the fold run at once.
const PIECES: usize = 3;

const TICK: Duration = Duration::from_millis(20);

impl Algorithm for HostReduce {
    about!("host_reduce", Host, "host threads");

    fn fits(&self, case: &Case<'_>) -> Option<&'static str> {
        let meets = case.meets_in_host() || case.machine.virtual_time;
        (!case.machine.software && case.members > MOST && !meets)
            .then_some("more members than a kernel can name, or add up")
    }

    fn asked_for(&self, case: &Case<'_>) -> Option<&'static str> {
        let can = case.members > 1 && !case.machine.virtual_time;
        (can && case.wants(types::Algorithm::Host)).then_some("asked for")
    }

    fn needs(&self, case: &Case<'_>) -> Needs {
        Needs { meeting: MeetBy::Host, scratch: Scratch::Host(SLOTS * slot(case)) }
    }

    fn blocks(&self, _: &Case<'_>) -> u32 {
        0
    }

    fn packs(&self) -> bool {
        false
    }

    /// The host waits for the current stream's earlier work, and until the last fold; the last copies are asynchronous.
    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        Pieces::new(member, matched).run()
    }
}

fn slot(case: &Case<'_>) -> usize {
    let n = case.members;
    let wanted = case.shape.map_or(SLOT, |shape| {
        let plan = shape.hosted(n, 0, GRAIN / case.dtype.size());
        plan.most.saturating_mul(plan.lanes * case.dtype.size())
    });
    // The shape of all_to_all_v is not known yet. At least a grain for each lane, and room to round up to one.
    let wanted = wanted.min(SLOT) + n * GRAIN;
    wanted.min(SLOT.max(n * GRAIN)).next_multiple_of(GRAIN)
}

/// Cuts lanes of up to `most` bytes into pieces. A slot has a piece of each lane.
fn cut(most: usize, lanes: usize, slot: usize) -> Tiling {
    Tiling::new(most, 1, PIECES, LEAST / lanes, tiling::share(slot, lanes))
}

struct Pieces<'g> {
    member: &'g Member<'g>,
    plan: Staging,
    stages: SmallVec<[Address; 8]>,
    slot: usize,
    cut: Tiling,
    factors: SmallVec<[f64; 8]>,
}

impl<'g> Pieces<'g> {
    fn new(member: &'g Member<'g>, matched: &Matched<'_>) -> Self {
        let (n, request) = (member.count(), member.request);
        let plan = matched.shape.hosted(n, member.rank, request.grain());
        let (stages, room) = matched.stages(n);
        let slot = room / SLOTS;
        let cut = cut(plan.most * request.dtype.size(), plan.lanes, slot);
        Pieces { member, plan, stages, slot, cut, factors: member.factors(matched) }
    }

    fn run(&self) -> Result<()> {
        if self.cut.rounds == 0 {
            return Ok(());
        }
        let mut down = self.down(0)?;
        for j in 0..self.cut.rounds {
            if self.plan.fold.is_some() {
                self.wait(&down)?;
            }
            self.member.barrier_by_events()?;
            if j + 1 < self.cut.rounds {
                down = self.down(j + 1)?;
            }
            self.fold(j)?;
            if self.plan.two {
                self.meet_hosts(&down)?;
            }
            self.up(j)?;
        }
        self.member.barrier_by_events()
    }

    /// Waits until all members' hosts are here; streams do not wait. (A step carries an event: this one any.)
    fn meet_hosts(&self, any: &Event) -> Result<()> {
        let member = self.member;
        member.others().try_for_each(|peer| member.send_step(peer, any.clone()))?;
        member.others().try_for_each(|peer| member.take_step(peer).map(drop))
    }

    /// The host waits for its device: until the gang fails, or nothing completes on the stream for the pool's deadline.
    fn wait(&self, event: &Event) -> Result<()> {
        let (member, name, handle) = (self.member, self.member.name(), self.member.handle);
        if handle.injected(FailPoint::FoldedEarly) {
            return Ok(());
        }
        let passed = || handle.check(name, handle.driver.event_wait(event.0.raw, TICK));
        let limit = member.deadline();
        let waited = self.member.stream.wait_while_advancing(name, limit, passed, || member.gang().is_aborted());
        waited.map_err(|e| if matches!(e, Error::Timeout { .. }) { member.gang().aborted().unwrap_or(e) } else { e })
    }

    fn own(&self, side: Side, start: usize, len: usize, j: usize) -> (Address, usize) {
        self.member.tile(&self.cut, side, start, len, j)
    }

    fn lane(&self, member: usize, lane: usize, j: usize) -> *mut u8 {
        let address = self.stages[member] as usize + j % SLOTS * self.slot + lane * self.cut.tile;
        ptr::with_exposed_provenance_mut(address)
    }

    fn submit(&self, call: impl FnOnce(&dyn Driver, RawStream) -> DriverResult) -> Result<()> {
        let (handle, stream) = (self.member.handle, self.member.stream);
        handle.check(self.member.name(), call(&*handle.driver, stream.raw))
    }

    /// Copies piece `j` to the own stage, and elements that stay here to their place. The event is behind both.
    fn down(&self, j: usize) -> Result<Event> {
        for (lane, range) in &self.plan.puts {
            let (from, bytes) = self.own(Side::Source, range.start, range.len(), j);
            let to = self.lane(self.member.rank, *lane, j);
            if bytes > 0 {
                // SAFETY: this member's buffer, ordered before this by its `Op`; the lane is of its own stage, in a
                // slot that no member uses any more (see the module's head).
                self.submit(|driver, stream| unsafe { driver.copy_to_host(to, from, bytes, stream) })?;
            }
        }
        if let Some((from, to, len)) = self.plan.stays {
            let ((from, bytes), (to, _)) =
                (self.own(Side::Source, from, len, j), self.own(Side::Destination, to, len, j));
            if bytes > 0 {
                // SAFETY: this member's buffers, as above; a destination other than the source is borrowed exclusively.
                self.submit(|driver, stream| unsafe { driver.copy_within(to, from, bytes, stream) })?;
            }
        }
        self.member.record()
    }

    fn fold(&self, j: usize) -> Result<()> {
        let Some(fold) = &self.plan.fold else { return Ok(()) };
        let (me, count, request) = (self.member.rank, self.member.count(), self.member.request);
        let bytes = self.own(Side::Source, fold.source, fold.len, j).1;
        let sources: SmallVec<[*mut u8; 8]> = (0..count).map(|member| self.lane(member, me, j)).collect();
        for (member, lane) in sources.iter().enumerate() {
            self.member.handle.host_access(request.call.op, lane.addr() as u64, bytes, member == me)?;
        }
        let (dtype, op, n) = (request.dtype, request.reduce, bytes / request.dtype.size());
        // SAFETY: page-locked memory that the members' notices keep alive, in lanes of whole grains. Only this member
        // folds these lanes. Their owners' copies into them are over: each owner has waited for its own copy before it
        // told its peers. No member copies out of them before this member has told that it has folded.
        unsafe { kernels::fold_on_host(dtype, op, n, &sources, &sources[me..=me], &self.factors, count) };
        Ok(())
    }

    fn up(&self, j: usize) -> Result<()> {
        for &(member, lane, start, len) in &self.plan.pulls {
            let (to, bytes) = self.own(Side::Destination, start, len, j);
            let from = self.lane(member, lane, j);
            if bytes > 0 {
                // SAFETY: this member's buffer, as above. The lane is full. Its owner writes to it again only behind an
                // event of this stream.
                self.submit(|driver, stream| unsafe { driver.copy_to_device(to, from, bytes, stream) })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/collective/algorithm/host_reduce_tests.rs"]
mod tests;
