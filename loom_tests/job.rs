//! Models of `gang::job`: a scope does not return before every member is done, also if the caller unwinds, and a
//! withdrawn entry never uses the body. The "frame" is a cell that the bodies read and the caller overwrites after the
//! scope: a body that still runs then is a race for loom. The crate's own code runs; only the device threads belong to
//! the model.

use super::support::{Watched, bite, check};
use crate::{
    gang::job::{Ticket, Waiting},
    sync::{
        EventCount,
        shim::{Arc, thread},
    },
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The data that the bodies borrow. In a std `Arc`, so that the memory outlives the mutants.
struct Frame {
    borrowed: Watched<usize>,
    results: [Watched<usize>; 2],
}

impl Frame {
    fn new() -> std::sync::Arc<Self> {
        let cell = || Watched::new(0);
        std::sync::Arc::new(Frame { borrowed: cell(), results: [cell(), cell()] })
    }
}

fn device(ticket: Arc<Ticket<()>>, rank: usize) -> thread::JoinHandle<bool> {
    thread::spawn(move || ticket.run(&(), rank))
}

/// If the caller unwinds in the middle of the scope, the drop of `Waiting` waits.
fn scope(unwinds: bool) {
    let frame = Frame::new();
    frame.borrowed.set(5);
    let mut devices = Vec::new();
    let inside = catch_unwind(AssertUnwindSafe(|| {
        let body = |_: &(), rank: usize| frame.results[rank].set(frame.borrowed.get() + rank);
        let waiting = Waiting::new(&body, 2, Arc::new(EventCount::new()));
        devices.extend((0..2).map(|rank| device(waiting.ticket(), rank)));
        if unwinds {
            resume_unwind(Box::new("the caller"));
        }
        assert!(waiting.wait(None, std::time::Duration::ZERO));
    }));
    assert_eq!(inside.is_err(), unwinds);
    // The scope is over: only the caller uses the frame.
    frame.borrowed.set(0);
    assert_eq!((frame.results[0].get(), frame.results[1].get()), (5, 6));
    devices.into_iter().for_each(|d| assert!(d.join().unwrap()));
}

#[test]
fn the_caller_waits_for_all_members() {
    check(|| scope(false));
}

#[test]
fn the_caller_waits_also_when_it_unwinds() {
    check(|| scope(true));
}

/// The caller withdraws entries that have not started, and returns when the others are done. A device thread ignores an
/// entry that it finds afterwards.
#[test]
fn a_withdrawn_entry_never_touches_the_body() {
    check(|| {
        let frame = Frame::new();
        let body = {
            // A clone: the body's own memory outlives the scope, so that a mutant's late call is an error, not a crash.
            let frame = frame.clone();
            move |_: &(), rank: usize| frame.results[rank].set(frame.borrowed.get() + 1)
        };
        let waiting = Waiting::new(&body, 2, Arc::new(EventCount::new()));
        let devices = [device(waiting.ticket(), 0), device(waiting.ticket(), 1)];
        let withdrawn = waiting.withdraw(1);
        drop(waiting);
        frame.borrowed.set(7);
        assert_eq!(frame.results[1].get() == 0, withdrawn);
        assert_eq!(devices.map(|d| d.join().unwrap()), [true, !withdrawn]);
    });
}

#[test]
fn teeth() {
    bite("job");
}
