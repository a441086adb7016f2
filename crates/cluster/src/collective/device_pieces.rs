//! A collective over rails between devices, in pieces: while one piece is on its rail, the steps inside the process
//! work on others. [`pieces`](super::pieces) does the same in the memory of the hosts.
//!
//! ```text
//! member's stream   before 0 | before 1 | ..      | after 0 | after 1 | ..
//! rail's stream                   rail 0 | rail 1 | ..
//! ```
//!
//! `before` and `after` are the steps inside the process, which [`sums`](super::sums) and [`moves`](super::moves) do.
//! All steps before are submitted before the member arrives, and there is one meeting for all pieces; then all rails
//! are submitted in one turn, and then the steps after. Events join the two streams, each recorded right behind its
//! piece: one that is recorded later would wait for the pieces behind it, too.
//!
//! **Bits.** A piece has the elements of all members at the same places. Inside, a reduce_scatter adds up in the order
//! of ranks wherever an element lies, and so do this device's kernels in the order of processes: cuts change no bit. A
//! sum of the transport's own has the order that it has chosen for the size of a piece; between two processes there is
//! only one order.
//!
//! **Why no kernel waits for ever.** Kernels of the steps inside wait for those of the other members of this process;
//! kernels of the rails for those of the same rail of other processes. On each device both are submitted in one order,
//! which is the same in all processes: all steps before, all rails, all steps after. So each kernel waits for earlier
//! ones only, or for its peers, which are always submitted: steps inside in the launch window of their own meeting,
//! rails in the turn of the commit (rules C1 and C3 of `docs/src/design/cluster.md`). Only room remains: a kernel that
//! waits must not keep the multiprocessors from one that it waits for. So:
//!
//! * The steps inside take few blocks (`GroupInternals::run_overlapped`), and the rails run beside them only where the
//!   device has room for these and for the most blocks of the transport's kernels, at once
//!   ([`DeviceTransport::overlaps`]). Else the same calls go to the member's own stream, one after the other.
//! * Where devices share a GPU, and so its hardware queues, a rail's second call may be in front of another rail's
//!   first one, here the one and elsewhere the other. So nothing is cut there, in all processes.
//!
//! [`DeviceTransport::overlaps`]: crate::traits::DeviceTransport::overlaps

use super::{cut::Cut, device_rail::DeviceRail, hierarchical::HierarchicalCall, relay::Relay};
use crate::{
    internals::*,
    runtime::{
        collective::{Area, Payload, Shape},
        record, wait_for,
    },
    traits::{DeviceTransport, Overlap},
};
use gpu_pool::{DType, Event, ReduceOp, Result};
/// The most pieces: then all but a sixteenth of the first and the last step is hidden, at best.
pub const MOST: usize = 16;

/// The steps inside the process, before and after the rail: the operation, and the shapes for a piece.
pub(super) struct Inside<'a> {
    pub dtype: DType,
    pub reduce: Option<ReduceOp>,
    pub before: &'a dyn Fn(&Cut<'_>) -> Shape,
    pub after: &'a dyn Fn(&Cut<'_>) -> Shape,
}

/// The pieces of a buffer, and whether rails run beside the steps inside. All members of all processes cut alike: where
/// any process has steps inside that could overlap.
pub(super) fn cuts<'c>(
    hier: &HierarchicalCall<'_, '_>,
    transport: &dyn DeviceTransport,
    whole: &Cut<'c>,
    inside: &Inside<'_>,
) -> (Vec<Cut<'c>>, bool) {
    let several = hier.across.hosts.iter().any(|host| host.ranks.len() > 1);
    let Some(Overlap { piece, blocks }) = transport.overlaps().filter(|_| several && hier.rail_map.direct) else {
        return (vec![*whole], false);
    };
    let size = inside.dtype.size();
    let slice = whole.len.div_ceil(hier.rail_map.all.len()) * size;
    let cuts = whole.pieces(piece.max(slice.div_ceil(MOST)) / size);
    let overlapped = cuts.len() > 1 && hier.here.count() > 1 && has_room(hier, &cuts[0], inside, blocks);
    (cuts, overlapped)
}

/// Whether the kernels of a step inside that wait for each other, and so many blocks, fit on each device at once.
fn has_room(hier: &HierarchicalCall<'_, '_>, cut: &Cut<'_>, inside: &Inside<'_>, blocks: u32) -> bool {
    let most = |shape: Shape, reduce: Option<ReduceOp>| {
        hier.here.waiting_blocks((inside.dtype, reduce.unwrap_or(ReduceOp::Sum)), &shape)
    };
    let inside = most((inside.before)(cut), inside.reduce).max(most((inside.after)(cut), None));
    inside.saturating_add(blocks) <= hier.group.device().multiprocessors()
}

pub(super) struct DevicePieces<'t, 'g, 'd> {
    relay: &'t Relay<'t, 'g, 'd>,
    inside: &'t Inside<'t>,
    rails: Vec<DeviceRail<'t, 'g, 'd>>,
    /// By piece: what the rail leaves for the step behind it.
    left: Vec<Area>,
}

impl<'t, 'g, 'd> DevicePieces<'t, 'g, 'd> {
    pub fn new(relay: &'t Relay<'t, 'g, 'd>, inside: &'t Inside<'t>) -> Self {
        DevicePieces { relay, inside, rails: Vec::new(), left: Vec::new() }
    }

    /// Adds a piece: submits the step before its rail, from memory of the member to memory of the rail. The rail leaves
    /// `left` for the step behind it.
    #[track_caller]
    pub fn add(
        &mut self,
        cut: &Cut<'_>,
        mut rail: DeviceRail<'t, 'g, 'd>,
        before: [&Area; 2],
        left: &Area,
    ) -> Result<()> {
        let (hier, inside) = (self.relay.hier, self.inside);
        hier.inside(inside.dtype, inside.reduce, (inside.before)(cut), before)?;
        if self.relay.has_side_stream() {
            rail.staged = Some(record(hier.group.device().core(), hier.call.op)?);
        }
        self.rails.push(rail);
        self.left.push(left.clone());
        Ok(())
    }

    /// All members of all processes meet, and their rails carry all pieces out, one after the other. The step behind a
    /// rail begins when its piece is through. `to`: where the piece goes.
    #[track_caller]
    pub fn carry_out(self, cuts: &[Cut<'_>], to: impl Fn(&Cut<'_>) -> Area) -> Result<()> {
        let (hier, inside) = (self.relay.hier, self.inside);
        let carried = self.execute()?;
        for ((cut, left), carried) in cuts.iter().zip(&self.left).zip(&carried) {
            if let Some(carried) = carried {
                wait_for(hier.group.device().core(), hier.call.op, carried)?;
            }
            hier.inside(inside.dtype, None, (inside.after)(cut), [left, &to(cut)])?;
        }
        Ok(())
    }

    /// Returns an event behind each piece that runs beside other work.
    #[track_caller]
    fn execute(&self) -> Result<Vec<Option<Event>>> {
        let hier = self.relay.hier;
        let _here = hier.op()?;
        let (_, commit) = hier.meet(Payload::Nothing, |_| Vec::new())?;
        let carried = self.rails.iter().map(DeviceRail::submit).collect::<Result<_>>();
        drop(commit.window);
        hier.done(carried)
    }
}
