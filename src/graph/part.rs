//! The parts of a graph: graphs of the driver, and the collectives between them that the driver cannot capture.

use crate::collective::{
    Group,
    replay::{Captured, Meetings},
};
use crate::error::{Error, Result, Site, op_site::OpSite};
use crate::memory::{BlockRef, History, Reserved, Turns, UsesOf};
use crate::token::recording::{Recorded, Touched};
use crate::{Device, thread::graph_exec::GraphExec};
/// A part of a graph. A graph that no collective cuts has one part.
pub(super) enum Part {
    Segment(Segment),
    Collective(Box<Captured>),
}

impl Part {
    pub(super) fn new(recorded: Recorded) -> Self {
        match recorded {
            Recorded::Segment { exec, touched, meetings } => {
                let meetings = meetings.map(|meetings| *meetings.downcast().expect("collectives note their meetings"));
                Part::Segment(Segment { exec, touched, meetings })
            }
            Recorded::Collective(captured) => {
                Part::Collective(captured.downcast().expect("collectives note what they capture"))
            }
        }
    }

    /// Whether the part names memory whose owner does not look at it any more.
    pub(super) fn is_stale(&self) -> bool {
        match self {
            Part::Segment(segment) => segment.touched.iter().any(|touched| touched.block.is_retired()),
            Part::Collective(captured) => captured.blocks().any(|block| block.is_retired()),
        }
    }
}

pub(super) struct Segment {
    pub(super) exec: GraphExec,
    touched: Vec<Touched>,
    meetings: Option<Meetings>,
}

impl Segment {
    /// Launches it on the device's current stream, as one operation. `group`: whose kernels meet.
    pub(super) fn launch(&self, dev: &Device, name: &'static str, site: Site, group: Option<&Group<'_>>) -> Result<()> {
        let launch = || {
            let handle = &dev.worker.handle;
            // SAFETY: the graph keeps the memory of its operations. They are ordered above and recorded below as one
            // operation. Kernels that meet peers' kernels touch peers' memory: the peers' graphs keep it, and each peer
            // launches its graph together with this one.
            handle.check(name, unsafe { handle.driver.graph_launch(self.exec.raw, dev.stream.raw) })
        };
        match (&self.meetings, group) {
            (None, _) => {
                let _turns = dev.ordered.then(|| Turns::take(self.touched.iter().map(|touched| &*touched.block)));
                if dev.ordered {
                    self.uses(dev).try_for_each(|(block, bytes, access)| {
                        block.hazards.lock().order_launch(name, &dev.stream, bytes, access)
                    })?;
                }
                launch()?;
                self.note(dev);
                Ok(())
            }
            (Some(meetings), Some(group)) => {
                let call = OpSite { op: name, site };
                let reserve = || Reserved::take_by(History::order_launch, call, &dev.stream, self.uses(dev));
                let _reserved = dev.ordered.then(reserve).transpose()?;
                let blocks = self.touched.iter().map(|touched| &touched.block);
                meetings.launch(group.meeting(), site, launch, || self.note(dev), blocks)
            }
            (Some(_), None) => Err(Error::invalid_at(site, name, "its collectives have no group here")),
        }
    }

    fn note(&self, dev: &Device) {
        let sequence = dev.stream.submit();
        for (block, bytes, access) in self.uses(dev) {
            block.hazards.note(&dev.stream, sequence, bytes.clone(), access);
        }
        self.exec.launched(&dev.stream, sequence);
    }

    /// Of a launch on the device's current stream: that of the capture was another one.
    fn uses<'s>(&'s self, dev: &'s Device) -> impl UsesOf<'s> {
        let on = |(block, bytes, access): (&'s BlockRef, _, _)| (block, bytes, block.access_on(&dev.stream, access));
        self.touched.iter().map(Touched::parts).map(on)
    }
}
