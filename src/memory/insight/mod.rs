//! A memory pool as users see it: the holders of memory, its events, and the reasons of failed requests.
//!
//! [`out_of_memory`] and [`leak`] are reports, [`snapshot`] is the whole pool as a value, [`ledger`] is what the owner
//! records. Only the owner's thread allocates and takes frees, so a ledger needs no lock.

pub(crate) mod classes;
pub(crate) mod leak;
pub(crate) mod ledger;
#[cfg(feature = "insight")]
pub(crate) mod memory_viz;
pub(crate) mod snapshot;

pub(crate) use self::{
    leak::Leak,
    site::CallSite,
    snapshot::{BlockInfo, BlockState},
};
use self::{
    site::Holder,
    snapshot::{EventKind, MemoryEvent, MemorySnapshot},
};

// Errors use them, too, so they live in a lower room.
pub(crate) use crate::error::{out_of_memory, out_of_memory::HOW_TO_RECORD, site, units};
