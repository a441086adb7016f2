//! The loom models of `src/sync` and `src/gang`. The crate includes these files, so that the tested code can be
//! private. `cluster.rs` has those of `crates/cluster`.
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
mod history;
mod inbox;
mod inbox_words;
mod job;
mod journal;
mod latch;
mod launch_gate;
mod memory_handles;
mod memory_returns;
mod one_shot;
mod publication;
mod ring;
mod sequence;
mod support;
mod turnstile;

use crate::sync::{shim, site::tests::table};
