//! Virtual time: what programs take on machines that are described, not there.
//!
//! The times that are expected here are worked out by hand from the machine's numbers; they are exact, since virtual
//! time has nothing to do with the speed of this computer.

mod all_reduce;
mod by_hand;
mod hosts;
mod machines;
#[path = "../../../../../examples/predict/hosts/model.rs"]
mod model;
mod pools;
#[path = "../../../../../examples/predict/ring.rs"]
mod ring;
#[path = "../../../../../examples/predict/hosts/run.rs"]
mod run;
