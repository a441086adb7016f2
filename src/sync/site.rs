//! Named ordering sites: each acquire, release and fence in `sync/` has a name, and each name has a test.
//!
//! In a normal build the functions are identities, which the compiler removes. Under loom the environment variable
//! `GPU_POOL_MUTANT` names one site to weaken, and `loom_tests/` demands that the protocol's model then fails:
//!
//! | mutant | effect |
//! |---|---|
//! | `site` at [`ord`] | `Relaxed` |
//! | `site=acquire`, `site=release` at [`ord`] with `AcqRel` | that half only |
//! | `site` at [`fence_at`] | no fence |
//! | `site` at [`flag`] | the wrong logic beside the right one |
//!
//! If no model fails without an ordering, the ordering is not needed or not tested; neither may stay. Relaxed
//! operations have no name, since they cannot be weakened. `loom_tests/sites.rs` compares the list with the source.

#[cfg(not(loom))]
use super::shim::atomic::{Ordering, fence};

/// The ordering of the site `name`.
#[cfg(not(loom))]
#[inline(always)]
pub const fn ord(name: &'static str, order: Ordering) -> Ordering {
    let _ = name;
    order
}

/// A fence with a name.
#[cfg(not(loom))]
#[inline(always)]
pub fn fence_at(name: &'static str, order: Ordering) {
    let _ = name;
    fence(order);
}

/// Whether the wrong logic named `name` must run: never outside loom.
#[cfg(not(loom))]
#[inline(always)]
pub const fn flag(name: &'static str) -> bool {
    let _ = name;
    false
}

#[cfg(loom)]
#[path = "../../loom_tests/loomed/site.rs"]
mod weakened;
#[cfg(loom)]
pub use weakened::{fence_at, flag, ord};

// Miri has no files.
#[cfg(all(test, not(miri)))]
#[path = "../../loom_tests/sites.rs"]
pub(crate) mod tests;
