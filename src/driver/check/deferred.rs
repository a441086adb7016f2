//! Judgements that wait for a flag to be raised: whether two operations are ordered, or bytes were written, may depend
//! on who raises a flag that one of them waits for.

use super::{Report, heap::Heap, judge, shadow::Access};
use crate::driver::Address;
use std::{ops::Range, sync::Arc};

/// Deferred judgements that are kept; a program with more of them has waits that the host ends, unseen.
pub(super) const KEPT: usize = 4096;

/// A judgement to be made.
pub(super) enum Deferred {
    /// Two accesses that nothing orders so far. `before` was submitted first.
    Conflict { before: Access, after: Access, range: Range<Address> },
    /// Bytes that were read, and that nobody has written so far.
    Unwritten { reader: Access, range: Range<Address> },
}

impl Deferred {
    /// Whether there is still a flag to be raised.
    pub fn is_pending(&self) -> bool {
        match self {
            Deferred::Conflict { before, after, .. } => before.note.is_pending() || after.note.is_pending(),
            Deferred::Unwritten { reader, .. } => reader.note.is_pending(),
        }
    }

    /// The report, if the judgement can be made and is bad.
    pub fn judge(&self, heap: &Heap) -> Option<Arc<Report>> {
        if self.is_pending() {
            return None;
        }
        match self {
            Deferred::Conflict { before, after, range } => {
                let ordered = after.note.follows(before) || before.note.follows(after);
                (!ordered)
                    .then(|| judge::unordered(after.note.deed(after.manner.write), after.owner.as_ref(), before, range))
            }
            Deferred::Unwritten { reader, range } => {
                let gap = heap.unwritten(range)?;
                Some(judge::unwritten(reader.note.deed(false), reader.owner.as_ref(), &gap))
            }
        }
    }

    /// Calls `each` with the accesses that it is about.
    pub fn each(&self, mut each: impl FnMut(&Access)) {
        match self {
            Deferred::Conflict { before, after, .. } => {
                each(before);
                each(after);
            }
            Deferred::Unwritten { reader, .. } => each(reader),
        }
    }
}
