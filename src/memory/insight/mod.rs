//! A memory pool as users see it: the holders of memory, its events, and the reasons of failed requests.
//!
//! * [`out_of_memory`], [`leak`]: two reports, written for logs.
//! * [`snapshot`]: the whole pool as a value; `memory_viz` writes it for PyTorch's memory viewer.
//! * [`ledger`]: what the owner records: live blocks exactly, events in a ring.
//!
//! Only the owner's thread allocates and takes frees, so a ledger needs no lock. With recording off it costs the owner
//! one branch.

pub(crate) mod classes;
pub(crate) mod leak;
// The cache uses only some of its methods.
#[allow(dead_code)]
pub(crate) mod ledger;
#[cfg(feature = "insight")]
pub(crate) mod memory_viz;
pub(crate) mod snapshot;

// Errors use them, too, so they live in a lower room.
pub(crate) use crate::error::{out_of_memory, out_of_memory::HOW_TO_RECORD, site, units};
