//! Collectives in graphs.
//!
//! While a graph is captured its collectives meet on the host, as ever: members that do not all capture the same calls
//! learn it there, and all know by which number they have met, which is how they know each other's graphs again. What
//! is captured:
//!
//! * Where kernels meet on the devices, the kernel. It counts its epochs on the device, so it can run any number of
//!   times. A launch of the graph is one meeting of the host for all its collectives ([`Group::launch`]), and from then
//!   on as one of them.
//! * Elsewhere, nothing: the graph is cut there, and a launch carries the collective out between two parts of the
//!   graph, as if it were called then ([`Captured`]). Members must still launch the same graph: the calls say which one
//!   they are of.
//!
//! Where sums are the host's ([`Algorithm::Host`](crate::Algorithm::Host)), such a launch waits for the device.

use super::{
    Group,
    barrier::{self, Missed},
    board::Payload,
    brief::Brief,
    call::{Call, LAUNCH, Origin},
    choose::choose,
    kernels::Meet,
    request::Request,
};
use crate::{
    error::{Error, Result, Site},
    memory::block::BlockRef,
    token::recording::Recording,
};

/// The meetings of kernels in a graph, all of one group.
pub(crate) struct Meetings {
    origin: Origin,
    /// The last one. They differ in nothing.
    meet: Meet,
    /// Collectives, and kernels of theirs.
    count: usize,
    kernels: usize,
}

/// A collective between two parts of a graph. It keeps this member's memory.
pub(crate) struct Captured(Request);

impl Captured {
    /// This member's memory.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &BlockRef> {
        self.0.source.iter().chain(&self.0.destination).map(|area| &area.block)
    }
}

impl Group<'_> {
    /// Puts a collective into a graph.
    #[track_caller]
    pub(super) fn capture(&self, recording: &Recording, mut request: Request) -> Result<()> {
        request.call.origin = Origin::CAPTURE;
        let captured = match self.count() {
            // It meets nobody, and is an operation like others.
            1 => self.carry(&request, self.limits()),
            _ => self.capture_meeting(recording, request),
        };
        // A graph that lacks an operation is none, whatever the closure makes of the error.
        captured.inspect_err(|error| recording.fail(error))
    }

    #[track_caller]
    fn capture_meeting(&self, recording: &Recording, mut request: Request) -> Result<()> {
        let (dev, name) = (self.dev, request.call.op());
        let mut access = self.access(&request)?;
        if !recording.is_of(self.ordinals()) {
            return Err(recording.refuse(request.call.site, name, "all collectives of a graph are of one group"));
        }
        let number = self.next_number();
        let origin = Origin::graph(dev.session.gang.place(), number);
        let case = self.case(&request, self.limits());
        if let Some((meet, more)) = self.capture_by(&request, &case, choose(&case).0, &mut access)? {
            access.submitted();
            recording.meets(|before| match before {
                Some(Meetings { origin, meet, count, kernels }) => {
                    Meetings { origin: origin.then(number), meet, count: count + 1, kernels: kernels + more }
                }
                None => Meetings { origin, meet, count: 1, kernels: more },
            });
            return Ok(());
        }
        let notices = self.meet(request.call.clone(), Payload::Memory(request.lend(None)), false)?;
        if request.shape.is_none() {
            self.shape(&notices)?;
        }
        request.call.origin = origin;
        recording.cut(&dev.worker.handle, Captured(request))
    }

    /// Carries a captured collective out.
    #[track_caller]
    pub(crate) fn replay(&self, Captured(request): &Captured) -> Result<()> {
        self.carry(request, self.limits())
    }

    /// One meeting for all collectives of a part of a graph, and the launch of it. `launch` makes the call; `note`
    /// notes it, whatever has come of it: it counts as launched. `blocks` are what it touches.
    pub(crate) fn launch<'b>(
        &self,
        meetings: &Meetings,
        site: Site,
        launch: impl FnOnce() -> Result<()>,
        note: impl FnOnce(),
        blocks: impl Iterator<Item = &'b BlockRef>,
    ) -> Result<()> {
        let (dev, place) = (self.dev, self.dev.session.gang.place());
        let Some(signals) = dev.worker.shared.signals.get() else {
            return Err(Error::invalid_at(site, LAUNCH, "kernels that meet were captured where none can"));
        };
        barrier::prepare(dev, LAUNCH, site)?;
        signals.launches_in(dev.index(), place);
        let (origin, count) = (meetings.origin, meetings.count);
        let (own, call) =
            (Brief::of_launch(origin, count, site, self.in_short()), Call { origin, count, ..Call::at(LAUNCH, site) });
        let missed = Missed { meet: Meet { place, ..meetings.meet }, times: meetings.kernels };
        let (_, window) = barrier::commit_by(self, missed, std::iter::empty(), || self.meet_briefly(own, &call, true))?;
        let launched = launch();
        drop(window);
        note();
        barrier::end(dev, missed, &launched);
        launched.inspect_err(|cause| self.fail_on(blocks, cause))
    }
}
