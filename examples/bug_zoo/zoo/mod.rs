//! The exhibits: for the example, which shows them, and for `crates/lab/tests/bug_zoo.rs`, which checks each of them.
//!
//! * `exhibit`: an exhibit, and the outcomes that count as caught
//! * `ground`: the devices that a program runs on
//! * `bare`: devices without this crate's ordering, like the CUDA driver API
//! * the other files: the programs, by kind of mistake

pub mod bare;
mod collectives;
pub mod exhibit;
pub mod ground;
mod host_memory;
mod lifetime;
mod machine;
mod order;
mod waits;

use exhibit::Exhibit;

/// The names that each file of exhibits needs.
mod prelude {
    pub(super) use super::{
        exhibit::{Caught, Exhibit, OnCuda, Outcome, Program, Refusal, Seen, Thread, exhibits},
        ground::Ground,
    };
}

/// All exhibits, in the order of the tour.
pub fn all() -> Vec<&'static Exhibit> {
    [
        order::EXHIBITS,
        lifetime::EXHIBITS,
        host_memory::EXHIBITS,
        collectives::EXHIBITS,
        waits::EXHIBITS,
        machine::EXHIBITS,
    ]
    .into_iter()
    .flatten()
    .collect()
}
