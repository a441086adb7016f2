//! [`MemoryClasses`]: the small blocks of a snapshot, counted by size class.

use super::{BlockInfo, BlockState};
use crate::memory::Bytes;
use std::collections::BTreeMap;

/// The number of blocks of each size class, from [`MemorySnapshot::classes`](crate::memory::MemorySnapshot::classes).
/// The `Display` form is a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryClasses {
    /// By size. Large blocks have no class, so they are not listed.
    pub classes: Vec<ClassStats>,
}

/// The blocks of one size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of one block.
    pub bytes: u64,
    /// Blocks in use.
    pub live: usize,
    /// Free blocks that any stream may have without a wait.
    pub free: usize,
    /// Freed blocks that queued work still uses.
    pub pending: usize,
}

impl MemoryClasses {
    pub(crate) fn of(blocks: &[BlockInfo]) -> Self {
        let mut classes = BTreeMap::<u64, ClassStats>::new();
        for block in blocks {
            let Some(bytes) = block.class else { continue };
            let class = classes.entry(bytes).or_insert(ClassStats { bytes, ..ClassStats::default() });
            match block.state {
                BlockState::Live => class.live += 1,
                BlockState::Free => class.free += 1,
                BlockState::Pending => class.pending += 1,
            }
        }
        MemoryClasses { classes: classes.into_values().collect() }
    }
}

display_as!(MemoryClasses, |self, f| {
    write!(f, "     block     live     free  pending")?;
    for ClassStats { bytes, live, free, pending } in &self.classes {
        write!(f, "\n{:>10} {live:>8} {free:>8} {pending:>8}", Bytes(*bytes))?;
    }
    Ok(())
});

#[cfg(test)]
#[path = "../../../tests/unit/memory/insight/classes_tests.rs"]
mod tests;
