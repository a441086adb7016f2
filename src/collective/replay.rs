//! Collectives in graphs.
//!
//! During a capture collectives meet on the host as always, and so know that graphs belong together. A capture holds:
//!
//! * Where kernels can wait for each other on the devices: the kernel. It counts its epochs on the device. A launch of
//!   the graph is one meeting of the host threads for all its collectives ([`Meetings::launch`]).
//! * Elsewhere: nothing. The graph is cut there, and a launch carries the collective out between two parts of the
//!   graph, as if it were called then ([`Captured`]). Members must still launch the same graph.

use super::execute::{self, execute};
use super::{Descriptors, LaunchWindow, Meeting, Request, algorithm::Algorithm, case::Case, choose::choose};
use crate::{
    error::{Error, Result, Site},
    fabric::{Call, CompactDescriptor, DeviceBarrier, Origin, Payload, SkippedBarrier, call::LAUNCH},
    memory::BlockRef,
    token::recording::Recording,
};

/// The collectives of a graph whose kernels wait for each other. All are of one group.
pub(crate) struct Meetings {
    origin: Origin,
    barrier: DeviceBarrier,
    count: usize,
    kernels: usize,
}

impl Meetings {
    /// Calls `note` in any case: the part counts as launched. `blocks` are the memory that it touches.
    pub(crate) fn launch<'b>(
        &self,
        meeting: Meeting<'_>,
        site: Site,
        launch: impl FnOnce() -> Result<()>,
        note: impl FnOnce(),
        blocks: impl Iterator<Item = &'b BlockRef> + Clone,
    ) -> Result<()> {
        let (dev, place) = (meeting.dev, meeting.dev.session.gang.place());
        let Some(pad) = dev.worker.shared.signals.get() else {
            return Err(Error::invalid_at(site, LAUNCH, "kernels that meet were captured where none can"));
        };
        dev.worker.barrier_state.prepare(LAUNCH, site, &dev.stream)?;
        pad.launches_in(dev.index(), place);
        let (origin, count) = (self.origin, self.count);
        let own = CompactDescriptor::of_barrier(&Call { origin, count, ..Call::at(LAUNCH, site) }, meeting.packed());
        let call = Call { origin, count, ..Call::at(LAUNCH, site) };
        let barrier = DeviceBarrier { place, ..self.barrier };
        let owed = SkippedBarrier { barrier, times: self.kernels };
        let number = meeting.next_number();
        meeting
            .meet_compact(own, &call, true)
            .inspect_err(|_| meeting.skip_launch(number, owed, blocks.clone().cloned()))?;
        let window = LaunchWindow::of(dev);
        let launched = launch();
        drop(window);
        note();
        dev.worker.barrier_state.launched(&dev.stream, owed, &launched);
        launched.inspect_err(|cause| execute::fail_on(dev, blocks, cause))
    }
}

/// This member's memory is kept by it.
pub(crate) struct Captured(Request);

impl Captured {
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &BlockRef> {
        self.0.areas().map(|area| &area.block)
    }

    #[track_caller]
    pub(crate) fn replay(&self, meeting: Meeting<'_>) -> Result<()> {
        execute(meeting, &self.0, meeting.limits(), None)
    }
}

/// Puts a collective into a graph: by a `given` algorithm, whose kernels wait for each other, or by the right one.
#[track_caller]
pub(super) fn capture(
    meeting: Meeting<'_>,
    recording: &Recording,
    mut request: Request,
    given: Option<&dyn Algorithm>,
) -> Result<()> {
    request.call.origin = Origin::CAPTURE;
    let captured = match meeting.count() {
        // It has no peers, and is an operation like others.
        1 => execute(meeting, &request, meeting.limits(), given),
        _ => capture_meeting(meeting, recording, request, given),
    };
    // A graph that lacks an operation is no graph, also if the closure drops the error.
    captured.inspect_err(|error| recording.fail(error))
}

#[track_caller]
fn capture_meeting(
    meeting: Meeting<'_>,
    recording: &Recording,
    mut request: Request,
    given: Option<&dyn Algorithm>,
) -> Result<()> {
    let (dev, name) = (meeting.dev, request.call.op);
    let mut access = execute::access(dev, &request)?;
    if !recording.is_of(meeting.ordinals()) {
        return Err(recording.refuse(request.call.site, name, "all collectives of a graph are of one group"));
    }
    let number = meeting.next_number();
    let origin = Origin::graph(dev.session.gang.place(), number);
    let case = Case::of(&meeting, &request, meeting.limits());
    let algorithm = given.unwrap_or_else(|| choose(&case).0);
    if let Some((barrier, more)) = execute::capture(meeting, &request, &case, algorithm, &mut access)? {
        access.submitted();
        recording.meets(|before| match before {
            Some(Meetings { origin, barrier, count, kernels }) => {
                Meetings { origin: origin.then(number), barrier, count: count + 1, kernels: kernels + more }
            }
            None => Meetings { origin, barrier, count: 1, kernels: more },
        });
        return Ok(());
    }
    let met = meeting.meet(request.call.clone(), Payload::Memory(request.expose(None)), false)?;
    Descriptors::Full(met).shape(&meeting, &request)?;
    request.call.origin = origin;
    let captured = Captured(request);
    captured.blocks().for_each(|block| block.name_in_graph());
    recording.cut(&dev.worker.handle, captured)
}
