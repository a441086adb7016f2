//! A collective by the host. Copy engines bring the members' data down to page-locked memory. The device threads add up
//! there, each its own slice of every piece. Copy engines bring the results up again. No kernel runs. It works like a
//! parameter server (BytePS, <https://www.usenix.org/conference/osdi20/presentation/jiang>: its "Summation Service") in
//! which every device thread is a server.
//!
//! [`staging`](crate::fabric::staging) has the plan of each member. It is carried out piece by piece, through stages
//! with two slots:
//!
//! ```text
//! own stream    down 0 |           down 1 | up 0 | down 2      | up 1 | ..
//! host                 | all here: fold 0 | all folded: fold 1 | ..
//! ```
//!
//! A member that folds waits on the host until its own piece is down. Then it tells the others, and from then on they
//! read the piece. While it folds, the next piece comes down. Data that are only moved need no wait on the host:
//! streams wait for each other's events.
//!
//! Invariant: a slot is overwritten only when no member uses it any more. A member sends the step for its piece `j + 1`
//! after its fold of piece `j`, and the event of that step covers its copies of piece `j` out of the peers' stages.
//! Piece `j + 2` comes down after all members have sent these steps, and after their events.

use super::{
    super::{choose::Case, kernels},
    Algorithm, Matched, Meeting, Member, Needs, Scratch,
};
use crate::fabric::{
    layout::MOST,
    plan::{GRAIN, Side},
    staging::Staging,
    types,
};
use crate::{
    Event,
    driver::{Address, Driver, DriverResult, RawStream},
    error::{Error, Result},
    mutation::Bug,
};
use smallvec::SmallVec;
use std::{ptr, time::Duration};

pub(crate) struct HostReduce;

/// Bytes of a slot: pieces that the threads have in the host's cache.
const SLOT: usize = 2 << 20;
const SLOTS: usize = 2;
/// Bytes of all lanes below which a piece is not worth the meetings of the hosts, and how many pieces there are above
/// that: the least for which copies both ways and the fold are under way at once.
const LEAST: usize = 128 << 10;
const PIECES: usize = 3;
/// Lanes begin with a line of the cache, so that no two threads write into one.
const LINE: usize = GRAIN;

/// How often a wait for the device looks whether it should end.
const TICK: Duration = Duration::from_millis(20);

impl Algorithm for HostReduce {
    fn name(&self) -> &'static str {
        "host_reduce"
    }

    fn group(&self, _: &Case<'_>) -> types::Algorithm {
        types::Algorithm::Host
    }

    fn waits_by(&self) -> &'static str {
        "host threads"
    }

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
        Needs { meeting: Meeting::Host, scratch: Scratch::Host(SLOTS * slot(case)) }
    }

    fn blocks(&self, _: &Case<'_>) -> u32 {
        0
    }

    fn packs(&self) -> bool {
        false
    }

    /// The host waits for the device, and with it for all earlier work of the current stream, until the last fold; the
    /// last copies are asynchronous.
    fn submit(&self, member: &Member<'_>, matched: &Matched<'_>) -> Result<()> {
        Pieces::new(member, matched).run()
    }
}

/// Bytes of a slot of a member's stage.
fn slot(case: &Case<'_>) -> usize {
    let n = case.members;
    let wanted = case.shape.map_or(SLOT, |shape| {
        let plan = shape.hosted(n, 0, GRAIN / case.dtype.size());
        plan.most.saturating_mul(plan.lanes * case.dtype.size())
    });
    // Of all_to_all_v the shape is not known yet. At least a line for each lane, and room to round up to one.
    let wanted = wanted.min(SLOT) + n * LINE;
    wanted.min(SLOT.max(n * LINE)).next_multiple_of(LINE)
}

/// The bytes of a lane that make a piece, and how many pieces there are.
fn cut(most: usize, lanes: usize, slot: usize) -> (usize, usize) {
    let room = slot / lanes / LINE * LINE;
    let least = (LEAST / lanes).next_multiple_of(LINE).min(room);
    let chunk = most.div_ceil(PIECES).next_multiple_of(LINE).clamp(least, room);
    (chunk, most.div_ceil(chunk))
}

struct Pieces<'g> {
    member: &'g Member<'g>,
    plan: Staging,
    /// By rank.
    stages: SmallVec<[Address; 8]>,
    slot: usize,
    chunk: usize,
    steps: usize,
    /// By rank, if there are any.
    factors: SmallVec<[f64; 8]>,
}

impl<'g> Pieces<'g> {
    fn new(member: &'g Member<'g>, matched: &Matched<'_>) -> Self {
        let (n, request) = (member.count(), member.request);
        let plan = matched.shape.hosted(n, member.rank, request.grain());
        // Of one size, in whole lines.
        let slot = (0..n).map(|peer| matched.stage(peer).bytes.len() / SLOTS).min().unwrap_or(0);
        let (chunk, steps) = cut(plan.most * request.dtype.size(), plan.lanes, slot);
        let stages = (0..n).map(|peer| matched.stage(peer).address).collect();
        Pieces { member, plan, stages, slot, chunk, steps, factors: member.factors(matched) }
    }

    fn run(&self) -> Result<()> {
        if self.steps == 0 {
            return Ok(());
        }
        let mut down = self.down(0)?;
        for j in 0..self.steps {
            if self.plan.fold.is_some() {
                self.wait(&down)?;
            }
            self.member.barrier_by_events()?;
            if j + 1 < self.steps {
                down = self.down(j + 1)?;
            }
            self.fold(j)?;
            if self.plan.two {
                self.meet_hosts(&down)?;
            }
            self.up(j)?;
        }
        // The exit rule: the others' last copies out of this member's stage.
        self.member.barrier_by_events()
    }

    /// All members' hosts have got here; streams do not wait for anything. (A step comes with an event, and so does
    /// this one.)
    fn meet_hosts(&self, any: &Event) -> Result<()> {
        let (member, executor) = (self.member, self.member.executor);
        member.others().try_for_each(|peer| executor.send_step(peer, any.clone()))?;
        member.others().try_for_each(|peer| executor.take_step(peer).map(drop))
    }

    /// The host waits for its device: until the gang fails, or nothing completes for as long as the pool waits for
    /// anything.
    fn wait(&self, event: &Event) -> Result<()> {
        let (name, handle, executor) = (self.member.name(), self.member.handle, self.member.executor);
        if handle.injected(Bug::FoldedEarly) {
            return Ok(());
        }
        let passed = || handle.check(name, handle.driver.event_wait(event.0.raw, TICK));
        let limit = self.member.deadline;
        let waited = self.member.stream.wait_while_advancing(name, limit, passed, || executor.is_aborted());
        // A peer's failure is the reason, not the deadline.
        waited.map_err(|e| if matches!(e, Error::Timeout { .. }) { executor.aborted().unwrap_or(e) } else { e })
    }

    /// Where piece `j` of what begins at an element of an own buffer lies, and its bytes.
    fn own(&self, side: Side, start: usize, len: usize, j: usize) -> (Address, usize) {
        let size = self.member.request.dtype.size();
        let bytes = (len * size).saturating_sub(j * self.chunk).min(self.chunk);
        if bytes == 0 {
            return (0, 0);
        }
        let area = self.member.request.area(side).expect("a member has the buffers that its part is done on");
        (area.address + (start * size + j * self.chunk) as u64, bytes)
    }

    /// Where piece `j` is in a lane of a member's stage.
    fn lane(&self, member: usize, lane: usize, j: usize) -> *mut u8 {
        let address = self.stages[member] as usize + j % SLOTS * self.slot + lane * self.chunk;
        ptr::with_exposed_provenance_mut(address)
    }

    fn submit(&self, call: impl FnOnce(&dyn Driver, RawStream) -> DriverResult) -> Result<()> {
        let (handle, stream) = (self.member.handle, self.member.stream);
        handle.check(self.member.name(), call(&*handle.driver, stream.raw))
    }

    /// Piece `j` to the own stage; and what stays on the device. The event is of that.
    fn down(&self, j: usize) -> Result<Event> {
        for (lane, range) in &self.plan.puts {
            let (from, bytes) = self.own(Side::Source, range.start, range.len(), j);
            let to = self.lane(self.member.rank, *lane, j);
            if bytes > 0 {
                // SAFETY: this member's buffer, ordered before this by its `Op`; the lane is of its own stage, in a
                // slot that nobody uses any more (see above).
                self.submit(|driver, stream| unsafe { driver.copy_to_host(to, from, bytes, stream) })?;
            }
        }
        if let Some((from, to, len)) = self.plan.stays {
            let ((from, bytes), (to, _)) =
                (self.own(Side::Source, from, len, j), self.own(Side::Destination, to, len, j));
            if bytes > 0 {
                // SAFETY: this member's buffers, as above; a destination that is no source is borrowed exclusively.
                self.submit(|driver, stream| unsafe { driver.copy_within(to, from, bytes, stream) })?;
            }
        }
        self.member.record()
    }

    /// This member's slice of piece `j`, of all stages, into its own lane of its own stage.
    fn fold(&self, j: usize) -> Result<()> {
        let Some(fold) = &self.plan.fold else { return Ok(()) };
        let (me, name, dtype) = (self.member.rank, self.member.request.call.op(), self.member.request.dtype);
        let bytes = self.own(Side::Source, fold.source, fold.len, j).1;
        let sources: SmallVec<[*mut u8; 8]> = (0..self.member.count()).map(|member| self.lane(member, me, j)).collect();
        for (member, lane) in sources.iter().enumerate() {
            self.member.handle.host_access(name, lane.addr() as u64, bytes, member == me)?;
        }
        // SAFETY: page-locked memory that the members' descriptors keep, in lanes of whole lines. These are this
        // member's: their owners' copies into them are over (each has waited for its own before it told so), nobody
        // copies out of them before this member has told that it has folded, and nobody else folds them.
        unsafe {
            kernels::fold_on_host(
                dtype,
                self.member.request.reduce,
                bytes / dtype.size(),
                &sources,
                sources[me],
                &self.factors,
            )
        };
        Ok(())
    }

    /// Piece `j` from all stages to the own buffer.
    fn up(&self, j: usize) -> Result<()> {
        for &(member, lane, start, len) in &self.plan.pulls {
            let (to, bytes) = self.own(Side::Destination, start, len, j);
            let from = self.lane(member, lane, j);
            if bytes > 0 {
                // SAFETY: this member's buffer, as above; the lane is full: by a host that has told so, or by a copy
                // whose event this stream waits for. Its owner writes to it again behind an event of this stream.
                self.submit(|driver, stream| unsafe { driver.copy_to_device(to, from, bytes, stream) })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces fill whole lines, fit their slot, and cover everything.
    #[test]
    fn pieces_fit() {
        for lanes in [1, 2, 3, 7, 64] {
            for slot in [lanes * LINE, 3000 * LINE, SLOT] {
                for most in [0, 1, 127, 128, 129, 40_000, 100_003, 5 << 20] {
                    let (chunk, steps) = cut(most, lanes, slot);
                    assert!(chunk % LINE == 0 && chunk > 0 && chunk * lanes <= slot, "{lanes} {slot} {most}: {chunk}");
                    assert!(chunk * steps >= most && chunk * steps.saturating_sub(1) <= most);
                    assert!(steps <= PIECES || chunk == slot / lanes / LINE * LINE);
                    assert!(chunk * lanes <= LEAST + lanes * LINE || steps >= PIECES - 1);
                }
            }
        }
    }
}
