use crate::{GpuPool, memory::stream::StreamCore};
use std::{sync::mpsc, time::Duration};

const TIMEOUT: Duration = Duration::from_secs(300);

/// A wait takes the event behind its operation, and does not see what the stream does afterwards.
#[test]
fn a_wait_covers_no_more_than_was_recorded() {
    let pool = GpuPool::builder().host(2).build().unwrap();
    let [giver, taker] = [0, 1].map(|device| StreamCore::new(&pool.shared.handles[device], "test").unwrap());
    let work = |stream: &StreamCore, f: Box<dyn FnOnce() + Send>| {
        stream.handle.driver.launch_host(stream.raw, f).unwrap();
        stream.submit()
    };
    let (open, gate) = mpsc::channel::<()>();
    let first = work(&giver, Box::new(|| {}));
    giver.record_early("test").unwrap();
    giver.record_early("test").unwrap();
    assert_eq!(giver.early.0.lock().len(), 1, "nothing new, no event");
    let later = work(&giver, Box::new(move || gate.recv().unwrap()));
    giver.record_early("test").unwrap();
    assert_eq!(giver.early.find(first).map(|(covered, _)| covered), Some(first));
    assert_eq!(giver.early.find(later).map(|(covered, _)| covered), Some(later));
    assert!(giver.early.find(later + 1).is_none());

    taker.wait_for("test", &giver, first).unwrap();
    assert!(!taker.comes_after(&giver, later));
    work(&taker, Box::new(|| {}));
    // With an event that was recorded only now, this would wait for the gate.
    taker.wait_idle("test", TIMEOUT, || false).unwrap();
    assert!(!giver.is_over(later));
    open.send(()).unwrap();
    giver.wait_idle("test", TIMEOUT, || false).unwrap();
    // Events of work that is over go when the next one is recorded.
    work(&giver, Box::new(|| {}));
    giver.record_early("test").unwrap();
    assert_eq!(giver.early.0.lock().len(), 1);
    giver.wait_idle("test", TIMEOUT, || false).unwrap();
}
