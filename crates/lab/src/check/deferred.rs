//! Judgements that must wait until a flag is raised. Whether two operations are ordered, or whether bytes were written,
//! may depend on the operation that raises a flag which one of them waits for.

use super::{Report, heap::Heap, judge, shadow::Access};
use gpu_pool::extend::driver::Address;
use std::{ops::Range, sync::Arc};

/// Most deferred judgements that are kept. A program with more has waits that the host ends by its own stores.
pub(super) const KEPT: usize = 4096;

pub(super) enum Deferred {
    /// Two accesses without a known order. `before` was submitted first.
    Conflict { before: Access, after: Access, range: Range<Address> },
    /// A read of bytes without a known write.
    Unwritten { reader: Access, range: Range<Address> },
}

impl Deferred {
    pub fn is_pending(&self) -> bool {
        match self {
            Deferred::Conflict { before, after, .. } => before.note.is_pending() || after.note.is_pending(),
            Deferred::Unwritten { reader, .. } => reader.note.is_pending(),
        }
    }

    pub fn judge(&self, heap: &Heap) -> Option<Arc<Report>> {
        if self.is_pending() {
            return None;
        }
        match self {
            Deferred::Conflict { before, after, range } => {
                let ordered = after.note.follows(before) || before.note.follows(after);
                (!ordered).then(|| {
                    judge::unordered(after.note.operation(after.manner.write), after.owner.as_ref(), before, range)
                })
            }
            Deferred::Unwritten { reader, range } => {
                let gap = heap.unwritten(range)?;
                Some(judge::unwritten(reader.note.operation(false), reader.owner.as_ref(), &gap))
            }
        }
    }

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
