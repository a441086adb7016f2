//! What a graph consists of: graphs of the driver, and collectives between them.

use crate::token::recording::Touched;
use crate::{
    Device,
    collective::{
        Group,
        replay::{Captured, Meetings},
    },
    driver::RawGraph,
    error::{Error, Result, Site},
    memory::{handle::DeviceHandle, stream::StreamCore},
};
use smallvec::SmallVec;
use std::{cell::RefCell, sync::Arc};

/// A part of a graph. All that was captured is one, but where a collective has cut it.
pub(crate) enum Part {
    Segment(Segment),
    Collective(Captured),
}

impl Part {
    /// Whether it names memory that nobody looks at any more.
    pub(super) fn is_stale(&self) -> bool {
        match self {
            Part::Segment(segment) => segment.touched.iter().any(|touched| touched.block.is_retired()),
            Part::Collective(captured) => captured.blocks().any(|block| block.is_retired()),
        }
    }
}

/// What one call of the driver launches.
pub(crate) struct Segment {
    pub(super) exec: Exec,
    touched: Vec<Touched>,
    /// Of kernels that meet their peers'.
    meetings: Option<Meetings>,
}

impl Segment {
    pub(crate) fn new(
        raw: RawGraph,
        handle: &Arc<DeviceHandle>,
        touched: Vec<Touched>,
        meetings: Option<Meetings>,
    ) -> Self {
        let exec = Exec { raw, handle: handle.clone(), launches: RefCell::default() };
        Segment { exec, touched, meetings }
    }

    /// Launches it on the device's current stream, as one operation. `group` is that of its meetings.
    pub(super) fn launch(&self, dev: &Device, name: &'static str, site: Site, group: Option<&Group<'_>>) -> Result<()> {
        if dev.ordered {
            for Touched { block, bytes, access } in &self.touched {
                block.hazards.order(name, &dev.stream, bytes, *access)?;
            }
        }
        let launch = || {
            let handle = &dev.worker.handle;
            // SAFETY: the graph keeps the memory of its operations, which are ordered here and noted below as one. That
            // of peers, for kernels which meet theirs, is kept by the peers' graphs, of which each is launched as this
            // one is.
            handle.check(name, unsafe { handle.driver.graph_launch(self.exec.raw, dev.stream.raw) })
        };
        match (&self.meetings, group) {
            (None, _) => {
                launch()?;
                self.note(dev);
                Ok(())
            }
            (Some(meetings), Some(group)) => {
                let blocks = self.touched.iter().map(|touched| &touched.block);
                group.launch(meetings, site, launch, || self.note(dev), blocks)
            }
            (Some(_), None) => Err(Error::invalid_at(site, name, "its collectives have no group here")),
        }
    }

    fn note(&self, dev: &Device) {
        let sequence = dev.stream.submit();
        for Touched { block, bytes, access } in &self.touched {
            block.hazards.note(&dev.stream, sequence, bytes.clone(), *access);
        }
        self.exec.launched(&dev.stream, sequence);
    }
}

/// The driver's graph, and its launches that may be in flight.
pub(crate) struct Exec {
    raw: RawGraph,
    handle: Arc<DeviceHandle>,
    launches: RefCell<Launches>,
}

/// The last launch on each stream.
type Launches = SmallVec<[(Arc<StreamCore>, u64); 2]>;

impl Exec {
    /// Whether all launches are known to be over.
    pub(crate) fn is_over(&self) -> bool {
        self.launches.borrow().iter().all(|(stream, sequence)| stream.has_completed(*sequence))
    }

    fn launched(&self, stream: &Arc<StreamCore>, sequence: u64) {
        let mut launches = self.launches.borrow_mut();
        launches.retain(|(other, sequence)| other.id != stream.id && !other.is_over(*sequence));
        launches.push((stream.clone(), sequence));
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        if !self.is_over() {
            event!(warn, device = self.handle.device, "a graph still in flight was leaked");
            return;
        }
        // SAFETY: a graph of this device, whose launches are over and whose last owner goes.
        if let Err(fault) = unsafe { self.handle.driver.graph_destroy(self.raw) } {
            event!(debug, device = self.handle.device, %fault, "a graph could not be destroyed");
        }
    }
}
