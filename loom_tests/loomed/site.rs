//! `src/sync/site.rs` under `cfg(loom)`: the environment names one site, which is weakened.

use crate::sync::shim::atomic::{Ordering, fence};

/// The ordering of the site `name`, weakened if it is the mutant.
pub fn ord(name: &'static str, order: Ordering) -> Ordering {
    match mutant().and_then(|m| m.strip_prefix(name)) {
        Some("") => Ordering::Relaxed,
        Some("=acquire") => Ordering::Acquire,
        Some("=release") => Ordering::Release,
        _ => order,
    }
}

/// A fence with a name; omitted if it is the mutant.
pub fn fence_at(name: &'static str, order: Ordering) {
    if mutant() != Some(name) {
        fence(order);
    }
}

/// Whether the wrong logic named `name` must run.
pub fn flag(name: &'static str) -> bool {
    mutant() == Some(name)
}

fn mutant() -> Option<&'static str> {
    use std::sync::OnceLock;
    // A std type on purpose, invisible to loom: the value is set before the process starts and never changes.
    static MUTANT: OnceLock<Option<String>> = OnceLock::new();
    MUTANT.get_or_init(|| crate::variables::text("GPU_POOL_MUTANT").expect("a name")).as_deref()
}
