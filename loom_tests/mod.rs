//! The loom models of `src/sync`, `src/gang` and `src/cluster/world.rs`. The crate includes these files, so that the
//! tested code can be private.
//!
//! `cargo loom` runs all of them, `cargo loom ring` those with `ring` in their path. No other build compiles them.
//! `sites.rs` compares the table of mutants with the source; it is the unit test of `src/sync/site.rs`.

mod broadcast_slot;
mod byte_ring;
mod commit;
mod dispatch;
mod event_count;
mod gang;
mod gate;
mod inbox;
mod inbox_words;
mod job;
mod latch;
mod launch_gate;
mod memory_handles;
mod memory_returns;
mod publication;
mod ring;
mod sequence;
mod support;
mod turnstile;
// Without the feature the rest can be checked nevertheless; `cargo loom` has it.
#[cfg(feature = "cluster")]
mod world;
