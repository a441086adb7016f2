//! A device's notes while it captures a graph. Operations ([`Op`](super::op::Op)) and collectives fill a [`Recording`].
//! It keeps the notes of collectives unread, as `dyn Any`. Invariant: each byte that a captured operation touches is in
//! the notes, with at least that access.

use crate::{
    error::{Error, Result, Site},
    fabric::Area,
    memory::{Access, BlockRef, DeviceHandle, StreamCore},
    thread::graph_exec::GraphExec,
};
use smallvec::SmallVec;
use std::cell::{Cell, OnceCell, RefCell};
use std::{any::Any, collections::HashMap, ops::Range, rc::Rc, sync::Arc};

/// Above this number, one range that covers all of them replaces them: a launch may then wait longer than needed.
const PARTS: usize = 8;

pub(crate) struct Recording {
    /// The capture's own stream. No other code knows it: a wait for a stream that captures breaks the capture.
    pub(crate) stream: Arc<StreamCore>,
    parts: RefCell<Vec<Recorded>>,
    touched: RefCell<Touches>,
    pending: Cell<usize>,
    meetings: Cell<Option<Note>>,
    members: OnceCell<Box<[usize]>>,
    operations: Cell<usize>,
    /// Where peers' kernels send data for this member to reduce, in all captured collectives by turns.
    pub(crate) recv_scratch: RefCell<Option<Area>>,
    failed: RefCell<Option<Error>>,
}

/// The notes of collectives in a recording: `collective/replay.rs` knows the type.
type Note = Box<dyn Any>;

pub(crate) enum Recorded {
    /// A graph of the driver, with the memory that it touches.
    Segment {
        exec: GraphExec,
        touched: Vec<Touched>,
        meetings: Option<Note>,
    },
    Collective(Note),
}

pub(crate) struct Touched {
    pub(crate) block: BlockRef,
    pub(crate) bytes: Range<usize>,
    pub(crate) access: Access,
}

impl Touched {
    pub(crate) fn parts(&self) -> (&BlockRef, &Range<usize>, Access) {
        (&self.block, &self.bytes, self.access)
    }
}

impl Recording {
    pub(crate) fn begin(handle: &Arc<DeviceHandle>) -> Result<Rc<Self>> {
        let stream = StreamCore::new(handle, "capture")?;
        handle.check("capture", handle.driver.capture_begin(stream.raw))?;
        let (parts, touched, pending, meetings, members, operations, recv_scratch, failed) = Default::default();
        Ok(Rc::new(Recording { stream, parts, touched, pending, meetings, members, operations, recv_scratch, failed }))
    }

    /// The error for an operation that cannot be captured. The capture fails with it.
    pub(crate) fn refuse(&self, site: Site, op: &'static str, why: &str) -> Error {
        let error = Error::invalid_at(site, op, format_args!("it cannot be captured: {why}"));
        self.fail(&error);
        error
    }

    pub(crate) fn fail(&self, error: &Error) {
        self.failed.borrow_mut().get_or_insert_with(|| error.clone());
    }

    pub(crate) fn verdict(&self) -> Result<()> {
        self.failed.borrow().clone().map_or(Ok(()), Err)
    }

    pub(crate) fn note(&self, touched: impl Iterator<Item = Touched>) {
        self.count();
        self.pending.set(self.pending.get() + 1);
        let mut all = self.touched.borrow_mut();
        touched.for_each(|one| {
            // While the closure still borrows the memory: the next thread that borrows it must see this.
            one.block.name_in_graph();
            all.add(one);
        });
    }

    fn count(&self) {
        self.operations.set(self.operations.get() + 1);
    }

    pub(crate) fn operations(&self) -> usize {
        self.operations.get()
    }

    pub(crate) fn is_of(&self, ordinals: &[usize]) -> bool {
        **self.members.get_or_init(|| ordinals.into()) == *ordinals
    }

    pub(crate) fn members(&self) -> Option<&[usize]> {
        self.members.get().map(|members| &**members)
    }

    /// Notes a captured kernel that meets its peers': `with` makes the new note from the earlier one, of one type.
    pub(crate) fn meets<M: 'static>(&self, with: impl FnOnce(Option<M>) -> M) {
        let before = self.meetings.take().map(|note| *note.downcast().expect("one type notes all meetings"));
        self.meetings.set(Some(Box::new(with(before))));
    }

    /// Ends the current segment, if it has operations, and adds a collective that the driver cannot capture.
    pub(crate) fn cut(&self, handle: &Arc<DeviceHandle>, collective: impl Any) -> Result<()> {
        if self.pending.get() > 0 {
            let segment = self.end_segment(handle)?;
            self.parts.borrow_mut().push(segment);
            handle.check("capture", handle.driver.capture_begin(self.stream.raw))?;
        }
        self.parts.borrow_mut().push(Recorded::Collective(Box::new(collective)));
        self.count();
        Ok(())
    }

    pub(crate) fn end(&self, handle: &Arc<DeviceHandle>) -> Result<Vec<Recorded>> {
        let empty = self.pending.get() == 0;
        let last = self.end_segment(handle)?;
        let mut parts = self.parts.take();
        if !empty || parts.is_empty() {
            parts.push(last);
        }
        Ok(parts)
    }

    fn end_segment(&self, handle: &Arc<DeviceHandle>) -> Result<Recorded> {
        self.pending.set(0);
        let raw = handle.check("capture", handle.driver.capture_end(self.stream.raw))?;
        let exec = GraphExec::new(raw, handle);
        Ok(Recorded::Segment { exec, touched: self.take(), meetings: self.meetings.take() })
    }

    fn take(&self) -> Vec<Touched> {
        let blocks = std::mem::take(&mut *self.touched.borrow_mut()).blocks;
        let parts = |(block, parts): (BlockRef, Parts)| {
            parts.into_iter().map(move |(bytes, access)| Touched { block: block.clone(), bytes, access })
        };
        blocks.into_iter().flat_map(parts).collect()
    }
}

type Parts = SmallVec<[(Range<usize>, Access); 1]>;

#[derive(Default)]
struct Touches {
    blocks: Vec<(BlockRef, Parts)>,
    /// Positions in `blocks`, by address. While this value holds a block, no other block has its address.
    places: HashMap<u64, usize>,
}

impl Touches {
    fn add(&mut self, Touched { block, bytes, access }: Touched) {
        let place = *self.places.entry(block.address).or_insert_with(|| {
            self.blocks.push((block, Parts::new()));
            self.blocks.len() - 1
        });
        add(&mut self.blocks[place].1, bytes, access);
    }
}

/// Adds a range. A range that lies within a noted one adds nothing if the noted access is a write or the same.
fn add(parts: &mut Parts, bytes: Range<usize>, access: Access) {
    let implies = |(a, how): &(Range<usize>, Access), (b, other): &(Range<usize>, Access)| {
        a.start <= b.start && b.end <= a.end && (*how == Access::Write || how == other)
    };
    let new = (bytes, access);
    if parts.iter().any(|old| implies(old, &new)) {
        return;
    }
    parts.retain(|old| !implies(&new, old));
    parts.push(new);
    if parts.len() > PARTS {
        let hull = parts.iter().map(|(bytes, _)| bytes.start).min().zip(parts.iter().map(|(bytes, _)| bytes.end).max());
        let written = parts.iter().any(|(_, access)| *access == Access::Write);
        parts.clear();
        parts.extend(hull.map(|(start, end)| (start..end, if written { Access::Write } else { Access::Read })));
    }
}

#[cfg(test)]
#[path = "../../tests/unit/token/recording_tests.rs"]
mod tests;
