//! One operation on device memory: checked, ordered, submitted, recorded in the hazards.
//!
//! Collectives, launches and device methods that touch memory begin an [`Op`]. This file may use memory and the driver.
//!
//! Invariant: no driver call touches device memory before the stream waits for conflicting uses of that memory.

use super::{
    Device,
    recording::{Recording, Touched},
};
use crate::driver::{Driver, DriverResult, RawStream};
use crate::error::{Error, OpGuard, Result, Site, op_site::OpSite};
use crate::memory::{
    Access, BlockRef, DeviceCopy, DeviceView, DeviceViewMut, Reserved, Turns,
    backing::ChunkKind,
    calls::{Entry, Kind},
};
use crate::timeline::{Category, Route, Slice, nvtx};
use smallvec::SmallVec;
use std::{mem, ops::Range, panic::Location, rc::Rc};

/// An operation that is being prepared. Its steps:
///
/// 1. `Device::op`: checks that the gang has not failed, and counts the device's progress.
/// 2. [`touch`](Self::touch): checks that the memory belongs to this device (or may be a peer's), and makes the stream
///    wait for conflicting uses.
/// 3. [`submit`](Self::submit): makes the driver call, then records the uses under the operation's number. If a graph
///    names the memory, this step excludes launches (`memory::turn`).
///
/// If a step fails, nothing was submitted and nothing is recorded. (A stream that waits without need is harmless.)
///
/// An `Op` takes views, not [`AsView`](crate::AsView): making a view runs the caller's code, which may do anything. So
/// all views are made before the operation begins.
///
/// While the device captures a graph, streams do not wait, and the uses become the graph's: their order is known only
/// when the graph is launched. Only an operation that begins with `Device::op_in_graph` can be captured.
pub struct Op<'d> {
    pub(crate) dev: &'d Device,
    pub(crate) name: &'static str,
    pub(crate) site: Site,
    touched: SmallVec<[Touched; 4]>,
    /// How many of them are reserved: the first ones.
    reserved: usize,
    /// In the flight recorder.
    entry: Entry<'d>,
    /// Bytes of the largest memory that it uses.
    bytes: usize,
    /// When it began, if a trace is written.
    begun: Option<u64>,
    route: Option<Route>,
    _range: nvtx::Range,
    /// For reports: until the operation ends, the thread's driver calls belong to this call of the program.
    _here: OpGuard,
}

impl Drop for Op<'_> {
    fn drop(&mut self) {
        if let Some(begun) = self.begun {
            self.trace(begun);
        }
        drop(Reserved::taken(self.dev.index(), self.touched.iter().take(self.reserved).map(Touched::parts)));
    }
}

/// The memory that a kernel argument names.
pub(crate) struct Touch {
    pub(crate) block: BlockRef,
    pub(crate) bytes: Range<usize>,
    pub(crate) access: Access,
    /// The argument was named through `peer()`, so the memory may be another device's.
    pub(crate) foreign: bool,
}

impl Device {
    #[track_caller]
    pub(crate) fn op(&self, name: &'static str) -> Result<Op<'_>> {
        self.not_in_graph(name)?;
        self.op_in_graph(name)
    }

    /// Begins an operation that can be captured.
    #[track_caller]
    pub(crate) fn op_in_graph(&self, name: &'static str) -> Result<Op<'_>> {
        let (own, OpSite { op: name, site }) = (name, OpSite::outermost(name, Location::caller()));
        if let Some(recording) = self.recording.as_ref().filter(|recording| recording.stream.id != self.stream.id) {
            return Err(recording.refuse(site, name, "the capture has a stream of its own"));
        }
        // The driver may have ended a capture that has failed: then this would run, and no graph would have it.
        self.recording.as_ref().map_or(Ok(()), |recording| recording.verdict())?;
        self.session.gang.check()?;
        self.worker.handle.progress.advance();
        let entry = self.worker.calls.begin(Kind::Call, own, site, self.stream.id);
        let _here = OpSite { op: name, site }.enter();
        let (begun, _range) = (self.worker.handle.lane.start(), nvtx::range(name));
        let (dev, touched) = (self, SmallVec::new());
        Ok(Op { dev, name, site, touched, reserved: 0, entry, bytes: 0, begun, route: None, _range, _here })
    }

    #[track_caller]
    pub(crate) fn not_in_graph(&self, op: &'static str) -> Result<()> {
        self.not_in_graph_at(Location::caller(), op)
    }

    /// [`not_in_graph`](Self::not_in_graph) for a call whose place in the program is known.
    pub(crate) fn not_in_graph_at(&self, site: Site, op: &'static str) -> Result<()> {
        let refuse = |recording: &Rc<Recording>| {
            let why = "a graph holds kernels, fills, matrix products, copies of device memory and collectives, \
                       nothing that waits";
            Err(recording.refuse(site, op, why))
        };
        self.recording.as_ref().map_or(Ok(()), refuse)
    }
}

impl Op<'_> {
    /// Announces an access. `foreign`: the memory may belong to another device of the pool.
    #[track_caller]
    pub fn touch(&mut self, block: &BlockRef, bytes: Range<usize>, access: Access, foreign: bool) -> Result<()> {
        let (dev, op, site) = (self.dev, self.name, self.site);
        fail_if!(block.handle.pool != dev.worker.handle.pool, Error::wrong_pool(op, dev.index()));
        if let Some(home) = block.device().filter(|&home| home != dev.index() && !foreign) {
            return Err(Error::wrong_device(op, home, dev.index()));
        }
        let access = block.access_on(&dev.stream, access);
        match &dev.recording {
            // When the graph is launched, the program could hold a slice of this memory.
            Some(recording) if block.kind != ChunkKind::Device => {
                return Err(recording.refuse(site, op, "a graph is for device memory, and this is the host's as well"));
            }
            Some(_) => {}
            None if dev.ordered => block.hazards.lock().order(op, &dev.stream, &bytes, access)?,
            None => {}
        }
        self.bytes = self.bytes.max(bytes.len());
        self.touched.push(Touched { block: block.clone(), bytes, access });
        Ok(())
    }

    /// Announces a write to memory that the library has allocated for itself. A program that orders its streams itself
    /// does not know of this memory, so the library orders it even then.
    pub(crate) fn scratch(&mut self, block: &BlockRef, bytes: Range<usize>) -> Result<()> {
        if self.dev.recording.is_none() && !self.dev.ordered {
            block.hazards.lock().order(self.name, &self.dev.stream, &bytes, Access::Write)?;
        }
        self.touch(block, bytes, Access::Write, false)
    }

    /// Announces a read of this device's memory.
    pub fn reads<T: DeviceCopy>(&mut self, view: &DeviceView<'_, T>) -> Result<()> {
        self.touch(view.block, view.bytes(), Access::Read, false)
    }

    /// Announces a write to this device's memory.
    pub fn writes<T: DeviceCopy>(&mut self, view: &DeviceViewMut<'_, T>) -> Result<()> {
        self.touch(view.block, view.bytes(), Access::Write, false)
    }

    pub(crate) fn argument(&mut self, touch: &Touch) -> Result<()> {
        self.touch(&touch.block, touch.bytes.clone(), touch.access, touch.foreign)
    }

    /// Excludes conflicting operations of other devices until the operation ends, where a graph names the memory. For
    /// operations that wait before they have submitted, and so cannot take turns.
    #[track_caller]
    pub fn reserve(&mut self) -> Result<()> {
        let dev = self.dev;
        if dev.recording.is_some() || !dev.ordered || !self.touched.iter().any(|touched| touched.block.is_in_graph()) {
            return Ok(());
        }
        let call = OpSite { op: self.name, site: self.site };
        Reserved::take(call, &dev.stream, self.touched.iter().map(Touched::parts))?.leave();
        self.reserved = self.touched.len();
        Ok(())
    }

    /// Makes the driver call and records the uses.
    pub fn submit(self, call: impl FnOnce(&dyn Driver, RawStream) -> DriverResult) -> Result<()> {
        let dev = self.dev;
        let blocks: SmallVec<[BlockRef; 4]> = self.blocks_of_graphs().cloned().collect();
        let _turns = self.take_turns(&blocks)?;
        let called = call(&*dev.worker.handle.driver, dev.stream.raw);
        let done = dev.worker.handle.check(self.name, called);
        self.done(&done);
        if done.is_ok() {
            self.submitted();
        }
        done
    }

    /// Submits work by other code, which waits for no other host thread, and records the uses in any case.
    pub(crate) fn submit_by(self, work: impl FnOnce() -> Result<()>) -> Result<()> {
        let blocks: SmallVec<[BlockRef; 4]> = self.blocks_of_graphs().cloned().collect();
        let _turns = self.take_turns(&blocks)?;
        let done = work();
        self.done(&done);
        self.submitted();
        done
    }

    fn blocks_of_graphs(&self) -> impl Iterator<Item = &BlockRef> {
        let ordered = self.dev.recording.is_none() && self.dev.ordered;
        self.touched.iter().map(|touched| &touched.block).filter(move |block| ordered && block.is_in_graph())
    }

    /// While the turns are held, no graph that names the blocks is launched. It waits for launches since the begin.
    fn take_turns<'b>(&self, blocks: &'b [BlockRef]) -> Result<Turns<'b>> {
        let turns = Turns::take(blocks.iter().map(|block| &**block));
        for Touched { block, bytes, access } in &self.touched {
            if !blocks.is_empty() && block.is_in_graph() {
                block.hazards.lock().order(self.name, &self.dev.stream, bytes, *access)?;
            }
        }
        Ok(turns)
    }

    /// Records the uses of work that other code has submitted to the device's current stream.
    pub fn submitted(mut self) {
        let stream = &self.dev.stream;
        if let Some(recording) = &self.dev.recording {
            return recording.note(mem::take(&mut self.touched).into_iter());
        }
        let sequence = stream.submit();
        self.entry.submitted(sequence, self.touched.iter().map(|touched| touched.bytes.len()).max().unwrap_or(0));
        for (block, bytes, access) in self.touched.iter().map(Touched::parts) {
            block.hazards.note(stream, sequence, bytes.clone(), access);
        }
    }

    /// It is a collective, carried out like this.
    pub(crate) fn route_by(&mut self, route: impl FnOnce() -> Route) {
        self.route = self.begun.map(|_| route());
    }

    /// Ends the operation's slice in the timeline.
    #[cold]
    fn trace(&self, begun: u64) {
        let kind = if self.route.is_some() { Category::Collective } else { Category::Op };
        let mut slice = Slice::new(kind, self.name, Some(OpSite { op: self.name, site: self.site }), begun);
        slice.bytes = self.bytes;
        slice.route = self.route;
        self.dev.worker.handle.lane.end(slice);
        if let Ok(mut cache) = self.dev.worker.cache.try_borrow_mut() {
            cache.publish_stats();
        }
    }

    /// The memory is never freed: other code may use it at any time.
    pub fn keep(&self) {
        self.touched.iter().for_each(|touched| mem::forget(touched.block.clone()));
    }

    /// Takes the driver's result. A capture fails if one of its operations has failed.
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
