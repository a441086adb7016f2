//! One operation on device memory: checked, ordered, submitted, noted.

use crate::{
    device::Device,
    driver::{Driver, DriverResult, RawStream, check::OpGuard},
    error::{Error, Result, Site},
    kernel::Touch,
    memory::{
        DeviceCopy, DeviceView, DeviceViewMut,
        block::{BlockRef, ChunkKind},
        hazard::Access,
    },
    token::recording::{Recording, Touched},
};
use smallvec::SmallVec;
use std::{ops::Range, panic::Location, rc::Rc};

/// An operation being prepared. Every access of device memory by the library goes through one:
///
/// 1. [`Device::op`]: the gang has not failed, the device is not lost; the device's progress counts up.
/// 2. [`touch`](Self::touch): the memory is this device's (or may be a peer's), and the stream waits for conflicting
///    uses.
/// 3. [`submit`](Self::submit): the driver call; then the uses are noted under the operation's number.
///
/// If a step fails, nothing was submitted and nothing is noted (a stream that waits for no reason is harmless).
///
/// It knows views, not [`AsView`](crate::AsView): a view is asked of the caller's code, which may do anything, so all
/// views are taken before the operation begins.
///
/// While the device captures a graph, nothing is waited for, and the uses are the graph's: their order is known when
/// that is launched. Only what begins with [`Device::op_in_graph`] can be captured.
pub(crate) struct Op<'d> {
    pub(crate) dev: &'d Device,
    pub(crate) name: &'static str,
    pub(crate) site: Site,
    touched: SmallVec<[Touched; 4]>,
    /// For reports: what the thread does meanwhile belongs to this call.
    _here: Option<OpGuard>,
}

impl Device {
    /// Begins an operation.
    #[track_caller]
    pub(crate) fn op(&self, name: &'static str) -> Result<Op<'_>> {
        self.not_in_graph(name)?;
        self.begin(name)
    }

    /// Begins an operation that a graph can hold.
    #[track_caller]
    pub(crate) fn op_in_graph(&self, name: &'static str) -> Result<Op<'_>> {
        match &self.recording {
            Some(recording) if recording.stream.id != self.stream.id => {
                Err(recording.refuse(Location::caller(), name, "the capture has a stream of its own"))
            }
            _ => self.begin(name),
        }
    }

    /// For what a graph cannot hold: refuses it while the device captures.
    #[track_caller]
    pub(crate) fn not_in_graph(&self, op: &'static str) -> Result<()> {
        self.not_in_graph_at(Location::caller(), op)
    }

    /// The same for a call whose place is known.
    pub(crate) fn not_in_graph_at(&self, site: Site, op: &'static str) -> Result<()> {
        let refuse = |recording: &Rc<Recording>| {
            let why = "a graph holds kernels, fills, matrix products, copies of device memory and collectives, nothing that waits";
            Err(recording.refuse(site, op, why))
        };
        self.recording.as_ref().map_or(Ok(()), refuse)
    }

    #[track_caller]
    fn begin(&self, name: &'static str) -> Result<Op<'_>> {
        self.session.gang.check()?;
        self.worker.progress();
        let site = Location::caller();
        Ok(Op { dev: self, name, site, touched: SmallVec::new(), _here: self.worker.handle.enter(name, site) })
    }
}

impl Op<'_> {
    /// Announces an access. `foreign`: the memory may be another device's of the same pool.
    pub(crate) fn touch(&mut self, block: &BlockRef, bytes: Range<usize>, access: Access, foreign: bool) -> Result<()> {
        let (dev, op, site) = (self.dev, self.name, self.site);
        if block.handle.pool != dev.worker.handle.pool {
            return Err(Error::WrongPool { op, device: dev.index(), site });
        }
        if let Some(home) = block.device().filter(|&home| home != dev.index() && !foreign) {
            return Err(Error::WrongDevice { op, buffer: home, device: dev.index(), site });
        }
        match &dev.recording {
            // Nothing would keep its slice from being borrowed when the graph is launched.
            Some(recording) if block.kind != ChunkKind::Device => {
                return Err(recording.refuse(site, op, "a graph is for device memory, and this is the host's as well"));
            }
            Some(_) => {}
            None if dev.ordered => block.hazards.order(op, &dev.stream, &bytes, access)?,
            None => {}
        }
        self.touched.push(Touched { block: block.clone(), bytes, access });
        Ok(())
    }

    /// Announces that memory of the library's own is written. Who orders his streams himself does not know of it, so it
    /// is ordered for him.
    pub(crate) fn scratch(&mut self, block: &BlockRef, bytes: Range<usize>) -> Result<()> {
        if self.dev.recording.is_none() && !self.dev.ordered {
            block.hazards.order(self.name, &self.dev.stream, &bytes, Access::Write)?;
        }
        self.touch(block, bytes, Access::Write, false)
    }

    /// Announces that memory of this device is read.
    pub(crate) fn reads<T: DeviceCopy>(&mut self, view: &DeviceView<'_, T>) -> Result<()> {
        self.touch(view.block, view.bytes(), Access::Read, false)
    }

    /// Announces that memory of this device is written.
    pub(crate) fn writes<T: DeviceCopy>(&mut self, view: &DeviceViewMut<'_, T>) -> Result<()> {
        self.touch(view.block, view.bytes(), Access::Write, false)
    }

    /// Announces a kernel argument.
    pub(crate) fn argument(&mut self, touch: &Touch) -> Result<()> {
        self.touch(&touch.block, touch.bytes.clone(), touch.access, touch.foreign)
    }

    /// Makes the driver call and notes the uses.
    pub(crate) fn submit(self, call: impl FnOnce(&dyn Driver, RawStream) -> DriverResult) -> Result<()> {
        let dev = self.dev;
        let called = call(&*dev.worker.handle.driver, dev.stream.raw);
        let done = dev.worker.handle.check(self.name, called);
        self.done(&done);
        if done.is_ok() {
            self.submitted();
        }
        done
    }

    /// Notes the uses of work that was submitted to the device's current stream by other means.
    pub(crate) fn submitted(self) {
        let stream = &self.dev.stream;
        if let Some(recording) = &self.dev.recording {
            return recording.note(self.touched.into_iter());
        }
        let sequence = stream.submit();
        for Touched { block, bytes, access } in self.touched {
            block.hazards.note(stream, sequence, bytes, access);
        }
    }

    /// What came of the driver's part: a graph that lacks an operation is none.
    pub(crate) fn done(&self, done: &Result<()>) {
        if let (Err(error), Some(recording)) = (done, &self.dev.recording) {
            recording.fail(error);
        }
    }

    /// `Err(InvalidArgument)` unless both lengths agree.
    pub(crate) fn same_len(&self, a: usize, b: usize) -> Result<()> {
        if a == b { Ok(()) } else { Err(Error::invalid_at(self.site, self.name, format_args!("{a} and {b} elements"))) }
    }
}
