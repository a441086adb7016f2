//! A `tracing` subscriber is the user's code: when it panics, members are not kept waiting.

use super::rig::{audited, poke};
use crate::support::{Gpus, failure, in_a_process, task};
use gpu_pool::Error;
use std::sync::{
    Barrier,
    atomic::{AtomicUsize, Ordering::Relaxed},
};
use tracing::{Event, Metadata, Subscriber, span};

static EVENTS: AtomicUsize = AtomicUsize::new(0);

/// Panics at every event, and at the ends of spans.
struct Panics;

impl Subscriber for Panics {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &Event<'_>) {
        EVENTS.fetch_add(1, Relaxed);
        panic!("the subscriber panics");
    }
    fn enter(&self, _: &span::Id) {
        panic!("the subscriber panics at a begin");
    }
    fn exit(&self, _: &span::Id) {
        panic!("the subscriber panics at an end");
    }
}

#[test]
fn a_subscriber_that_panics_keeps_nobody_waiting() {
    in_a_process("audit::subscriber::child", "panics");
}

/// The process whose subscriber panics.
#[test]
fn child() {
    if task().is_none() {
        return;
    }
    tracing::subscriber::set_global_default(Panics).unwrap();
    let pool = audited(Gpus::software(), 2);
    for _ in 0..3 {
        let before = EVENTS.load(Relaxed);
        // The audit finds it after the closure has ended, and says so. The other member waits for this one's streams.
        // A failure that came first would refuse the write, and keep the buffer from being looked at in this scope.
        let written = Barrier::new(2);
        let error = failure(pool.run(|dev, _| {
            if dev.rank() == 0 {
                written.wait();
                return Err(Error::custom("the other waits"));
            }
            let mut x = dev.zeros::<u8>(1000)?;
            let poked = poke(dev, &mut x, 1000, 7);
            drop(x);
            written.wait();
            poked
        }));
        assert!(matches!(error, Error::Misuse { .. } | Error::Custom(_)), "{error}");
        assert!(EVENTS.load(Relaxed) > before, "the subscriber was not called");
        assert_eq!(pool.run(|dev, _| dev.exchange(dev.rank())).unwrap(), [[0, 1], [0, 1]]);
    }
    // Jobs run in spans. The queue takes further ones.
    let jobs = pool.jobs().build().unwrap();
    for _ in 0..3 {
        jobs.submit(|_| Ok(())).unwrap().wait().unwrap();
        jobs.job().gpus(2).submit(|_, _| Ok(())).unwrap().wait().unwrap();
    }
    jobs.close().unwrap();
    // Nor do drops panic: of a pool, and of buffers behind it.
    let mut buffers = pool.run(|dev, _| dev.zeros::<u8>(1000)).unwrap();
    pool.run_mut(&mut buffers, 1, |dev, _, x| poke(dev, &mut x[0], 1000, 7)).unwrap();
    let _ = pool.close();
    drop(buffers);
}
