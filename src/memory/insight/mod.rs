//! What people see of a memory pool: who holds what, what happened, and why there is no more.
//!
//! * [`out_of_memory`], [`leak`]: the two reports, for a log at three in the morning.
//! * [`snapshot`]: the whole pool as a value; `export` makes JSON of it, or a page (`viewer.html`).
//! * [`ledger`]: what the owner writes down while recording is on: live blocks exactly, events in a ring.
//!
//! The owner's thread is the only one that allocates and the only one that sorts freed blocks in, so a ledger needs no
//! lock; with recording off it costs the owner one branch.

pub(crate) mod classes;
#[cfg(feature = "insight")]
pub(crate) mod export;
pub(crate) mod leak;
// Its calls are the pool's.
#[allow(dead_code)]
pub(crate) mod ledger;
pub(crate) mod snapshot;

// Errors name them, too, so they lie below.
pub(crate) use crate::error::{out_of_memory, out_of_memory::HOW_TO_RECORD, site, units};
