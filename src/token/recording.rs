//! What is known while a device captures: its stream, what was touched, what was refused.

use crate::graph::part::{Part, Segment};
use crate::{
    collective::replay::{Captured, Meetings},
    error::{Error, Result, Site},
    fabric::descriptor::Area,
    memory::{block::BlockRef, handle::DeviceHandle, hazard::Access, stream::StreamCore},
};
use smallvec::SmallVec;
use std::{
    cell::{Cell, OnceCell, RefCell},
    collections::HashMap,
    ops::Range,
    rc::Rc,
    sync::Arc,
};

/// Of more parts of one block, one stands for all: more waiting, never less.
const PARTS: usize = 8;

/// A capture.
pub(crate) struct Recording {
    /// Known to nobody else: who waits for a stream that captures breaks the capture.
    pub(crate) stream: Arc<StreamCore>,
    /// What came before the last cut.
    parts: RefCell<Vec<Part>>,
    /// Of the part that is being captured: what was touched, how many operations, and which of them meet.
    touched: RefCell<Touches>,
    pending: Cell<usize>,
    meetings: Cell<Option<Meetings>>,
    /// Ordinals of the group that meets, by rank.
    members: OnceCell<Box<[usize]>>,
    operations: Cell<usize>,
    /// Where peers' kernels send what this member is to add up: of all that are captured, one after the other.
    pub(crate) inbox: RefCell<Option<Area>>,
    /// Why there will be no graph.
    failed: RefCell<Option<Error>>,
}

/// Memory that a graph names, the bytes of it, and how.
pub(crate) struct Touched {
    pub(crate) block: BlockRef,
    pub(crate) bytes: Range<usize>,
    pub(crate) access: Access,
}

impl Recording {
    /// From now on the stream of the recording captures.
    pub(crate) fn begin(handle: &Arc<DeviceHandle>) -> Result<Rc<Self>> {
        let stream = StreamCore::new(handle, "capture")?;
        handle.check("capture", handle.driver.capture_begin(stream.raw))?;
        let (parts, touched, pending, meetings, members, operations, inbox, failed) = Default::default();
        Ok(Rc::new(Recording { stream, parts, touched, pending, meetings, members, operations, inbox, failed }))
    }

    /// An operation that no graph can hold, and so the end of this one.
    pub(crate) fn refuse(&self, site: Site, op: &'static str, why: &str) -> Error {
        let error = Error::invalid_at(site, op, format_args!("it cannot be captured: {why}"));
        self.fail(&error);
        error
    }

    /// There will be no graph, whatever the closure makes of it.
    pub(crate) fn fail(&self, error: &Error) {
        self.failed.borrow_mut().get_or_insert_with(|| error.clone());
    }

    pub(crate) fn verdict(&self) -> Result<()> {
        self.failed.borrow().clone().map_or(Ok(()), Err)
    }

    /// Notes what an operation touches that was captured.
    pub(crate) fn note(&self, touched: impl Iterator<Item = Touched>) {
        self.count();
        self.pending.set(self.pending.get() + 1);
        let mut all = self.touched.borrow_mut();
        touched.for_each(|one| all.add(one));
    }

    fn count(&self) {
        self.operations.set(self.operations.get() + 1);
    }

    pub(crate) fn operations(&self) -> usize {
        self.operations.get()
    }

    /// Whether the graph's collectives are of the group of these ordinals: the first one says it.
    pub(crate) fn is_of(&self, ordinals: &[usize]) -> bool {
        **self.members.get_or_init(|| ordinals.into()) == *ordinals
    }

    /// The group of the graph's collectives, if it has any.
    pub(crate) fn members(&self) -> Option<&[usize]> {
        self.members.get().map(|members| &**members)
    }

    /// A kernel was captured that meets its peers'.
    pub(crate) fn meets(&self, with: impl FnOnce(Option<Meetings>) -> Meetings) {
        self.meetings.set(Some(with(self.meetings.take())));
    }

    /// A collective that no graph of the driver's can hold comes between two parts.
    pub(crate) fn cut(&self, handle: &Arc<DeviceHandle>, collective: Captured) -> Result<()> {
        if self.pending.get() > 0 {
            let segment = self.end_segment(handle)?;
            self.parts.borrow_mut().push(Part::Segment(segment));
            handle.check("capture", handle.driver.capture_begin(self.stream.raw))?;
        }
        self.parts.borrow_mut().push(Part::Collective(collective));
        self.count();
        Ok(())
    }

    /// Ends the capture: all parts in their order.
    pub(crate) fn end(&self, handle: &Arc<DeviceHandle>) -> Result<Vec<Part>> {
        let empty = self.pending.get() == 0;
        let last = self.end_segment(handle)?;
        let mut parts = self.parts.take();
        if !empty || parts.is_empty() {
            parts.push(Part::Segment(last));
        }
        Ok(parts)
    }

    fn end_segment(&self, handle: &Arc<DeviceHandle>) -> Result<Segment> {
        self.pending.set(0);
        let raw = handle.check("capture", handle.driver.capture_end(self.stream.raw))?;
        Ok(Segment::new(raw, handle, self.take(), self.meetings.take()))
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

/// Blocks in the order in which they were touched first, with the parts of them.
#[derive(Default)]
struct Touches {
    blocks: Vec<(BlockRef, Parts)>,
    /// By address, which is a block's own as long as it is held here.
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

/// Adds a part. One that is within another, of the same kind or written, says nothing new.
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
mod tests {
    use super::*;
    use Access::{Read, Write};
    use proptest::prelude::*;

    #[test]
    fn parts_that_say_nothing_new_are_left_out() {
        let mut parts = Parts::new();
        for (bytes, access) in [(0..8, Read), (2..4, Read), (0..8, Read), (4..6, Write), (4..6, Read)] {
            add(&mut parts, bytes, access);
        }
        assert_eq!(parts[..], [(0..8, Read), (4..6, Write)]);
        add(&mut parts, 0..8, Write);
        assert_eq!(parts[..], [(0..8, Write)]);
    }

    proptest! {
        /// However much is left out or put together: every byte that was touched is, in at least the same way.
        #[test]
        fn nothing_is_forgotten(all in prop::collection::vec((0usize..60, 1usize..10, any::<bool>()), 0..60)) {
            let mut parts = Parts::new();
            for &(start, len, write) in &all {
                add(&mut parts, start..start + len, if write { Write } else { Read });
            }
            prop_assert!(parts.len() <= PARTS);
            for (start, len, write) in all {
                for byte in start..start + len {
                    let held = |(bytes, how): &(Range<usize>, Access)| bytes.contains(&byte) && (!write || *how == Write);
                    prop_assert!(parts.iter().any(held));
                }
            }
        }
    }
}
