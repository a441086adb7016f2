//! The exhibits, and what they need: for the example that shows them, and for the test that holds them to their word.
//!
//! * `exhibit`: what an exhibit is, and what counts as caught
//! * `ground`: the devices that a program runs on
//! * `bare`: devices without this crate's order, like the CUDA driver API
//! * the rest: the programs, by what is wrong with them

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
