//! Virtual time: what programs take on machines that are described, not there.
//!
//! The times that are expected here are worked out by hand from the machine's numbers; they are exact, since virtual
//! time has nothing to do with the speed of this computer.

#[path = "virtual_time/all_reduce.rs"]
mod all_reduce;
#[path = "virtual_time/by_hand.rs"]
mod by_hand;
#[path = "virtual_time/machines.rs"]
mod machines;
#[path = "virtual_time/pools.rs"]
mod pools;
#[path = "../examples/predict/ring.rs"]
mod ring;
