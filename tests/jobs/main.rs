//! Jobs: independent work from any thread, to whichever device is free.
//!
//! Sources of the ported tests: ceno #1403 (ownership, order and failures of proofs over several GPUs), lambda_vm #928
//! (hangs of the others after a panic), rust-fil-proofs #1478 (a lock poisoned by a panic), xmr-stak #2054 (one device
//! of eleven dies), sirius #1471 (queries on sets of devices), SP1 #2801 (a budget below the largest job).

#[path = "../support/mod.rs"]
mod support;

mod apart;
mod attacks;
mod basics;
mod beside;
mod failures;
mod waits;

/// Its drop panics.
#[derive(Debug)]
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("in a drop");
        }
    }
}
