//! Tests of what is known of a stream without a driver call: by words, and by events where there are no words.

use super::{EVENTS, LastSeen, MILESTONE, Milestones};
use crate::lab::prelude::*;
use crate::lab::{Check, FaultPlan};
use crate::{
    AsViewMut, Builder, Device, Error, GpuPool,
    driver::host::{self, HostConfig},
    memory::stream::StreamCore,
};
use std::{
    sync::{Arc, mpsc},
    time::Duration,
};

impl StreamCore {
    fn publish_now(&self) {
        if self.handle.stepped {
            return;
        }
        let told = match &self.milestones {
            Milestones::Word { published, .. } => published.get(),
            Milestones::Events(events) => events.lock().back().map_or(0, |&(_, covered)| covered),
        };
        let submitted = self.submitted.get();
        if submitted > told && self.completed.get() < submitted {
            self.set_milestone();
        }
    }
}

fn one() -> Builder {
    GpuPool::builder().host(1)
}

/// Software GPUs without stream memory operations.
fn without_words() -> GpuPool {
    let gpu = HostConfig { stream_values: false, ..HostConfig::default() };
    GpuPool::builder().with_drivers(host::machine(&[gpu])).unwrap()
}

fn run(pool: &GpuPool, f: impl Fn(&Device) + Sync) {
    pool.run(|dev, _| {
        f(dev);
        Ok(())
    })
    .unwrap();
}

/// Submits `count` operations. Returns the number of the last one.
fn submit(dev: &Device, stream: &StreamCore, count: u64) -> u64 {
    for _ in 0..count {
        dev.worker.handle.driver.launch_host(stream.raw, Box::new(|| {})).unwrap();
        stream.submit();
    }
    stream.submitted()
}

/// Waits below the library, which learns nothing.
fn finish(stream: &StreamCore) {
    let driver = stream.handle.unwatched();
    assert!(driver.stream_wait_idle(stream.raw, Duration::from_secs(60)).unwrap());
}

fn fresh(dev: &Device) -> Arc<StreamCore> {
    StreamCore::new(&dev.worker.handle, "test").unwrap()
}

fn word(stream: &StreamCore) -> Option<u64> {
    match &stream.milestones {
        Milestones::Word { word, .. } => Some(word.address),
        Milestones::Events(_) => None,
    }
}

/// A poll must not cost a `cudaEventQuery`, which takes a microsecond (harrism/cuda_event_benchmark): here a query
/// loses the device.
#[test]
fn completion_is_known_without_an_event() {
    let plan: FaultPlan = "*:event-query:*:lost; *:event-create:*:lost; *:stream-query:*:lost".parse().unwrap();
    let plan = plan.paused();
    let pool = one().faults(plan.clone()).build().unwrap();
    plan.resume();
    run(&pool, |dev| {
        let stream = fresh(dev);
        submit(dev, &stream, MILESTONE - 1);
        finish(&stream);
        assert!(!stream.has_completed(1), "no milestone has been submitted");
        let mut waits = [LastSeen::default(), LastSeen::default()];
        for wait in &mut waits {
            wait.has_advanced(&stream);
        }
        submit(dev, &stream, 2 * MILESTONE);
        finish(&stream);
        for wait in &mut waits {
            assert!(wait.has_advanced(&stream) && !wait.has_advanced(&stream), "one wait takes nothing from another");
        }
        assert!(stream.has_completed(2 * MILESTONE) && !stream.has_completed(2 * MILESTONE + 1));
        assert_eq!(stream.poll(), 2 * MILESTONE);
    });
    assert!(plan.fired().is_empty(), "{:?}", plan.fired());
}

#[test]
fn work_without_a_milestone_is_published_on_demand() {
    for pool in [one().build().unwrap(), without_words()] {
        run(&pool, |dev| {
            let stream = fresh(dev);
            let last = submit(dev, &stream, 3);
            stream.publish_now();
            stream.publish_now();
            finish(&stream);
            assert_eq!(stream.poll(), last);
            assert!(stream.has_completed(last));
        });
    }
}

#[test]
fn nothing_is_over_before_it_is() {
    for pool in [one().build().unwrap(), without_words()] {
        run(&pool, |dev| {
            let (open, gate) = mpsc::channel::<()>();
            let stream = fresh(dev);
            let before = submit(dev, &stream, MILESTONE);
            dev.worker.handle.driver.launch_host(stream.raw, Box::new(move || gate.recv().unwrap())).unwrap();
            let held = stream.submit();
            let last = submit(dev, &stream, 3 * MILESTONE);
            assert!(stream.poll() < held && !stream.has_completed(held) && !stream.has_completed(last));
            open.send(()).unwrap();
            finish(&stream);
            assert!(stream.poll() >= last - last % MILESTONE && stream.has_completed(before));
        });
    }
}

/// The next stream of a word must not take an old number for its own.
#[test]
fn a_word_is_used_again_when_its_last_write_has_arrived() {
    let pool = one().build().unwrap();
    run(&pool, |dev| {
        let first = fresh(dev);
        let address = word(&first);
        submit(dev, &first, 5 * MILESTONE);
        finish(&first);
        drop(first);
        for _ in 0..3 {
            let next = fresh(dev);
            assert_eq!(word(&next), address);
            submit(dev, &next, 1);
            assert!(!next.has_completed(1) && next.poll() == 0);
            next.publish_now();
            finish(&next);
            assert!(next.has_completed(1) && !next.has_completed(2));
        }
        // A stream that is dropped while its last write is still queued.
        let (open, gate) = mpsc::channel::<()>();
        let busy = fresh(dev);
        assert_eq!(word(&busy), address);
        dev.worker.handle.driver.launch_host(busy.raw, Box::new(move || gate.recv().unwrap())).unwrap();
        busy.submit();
        submit(dev, &busy, MILESTONE);
        drop(busy);
        let other = fresh(dev);
        assert_ne!(word(&other), address);
        open.send(()).unwrap();
        until(|| word(&fresh(dev)) == address);
    });
}

fn until(done: impl Fn() -> bool) {
    while !done() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn without_words_there_are_events() {
    run(&without_words(), |dev| {
        let stream = fresh(dev);
        assert_eq!(word(&stream), None);
        submit(dev, &stream, 3 * MILESTONE);
        finish(&stream);
        assert!(!stream.has_completed(1), "that would be a call of the driver");
        assert_eq!(stream.poll(), 3 * MILESTONE);
        assert!(stream.has_completed(3 * MILESTONE));
        submit(dev, &stream, 5 * EVENTS as u64 * MILESTONE);
        let Milestones::Events(events) = &stream.milestones else { unreachable!() };
        assert!(events.lock().len() <= EVENTS);
    });
    // The same if a device has more streams than words.
    run(&one().build().unwrap(), |dev| {
        let streams: Vec<_> = (0..100).map(|_| fresh(dev)).collect();
        let words: std::collections::HashSet<_> = streams.iter().filter_map(|stream| word(stream)).collect();
        assert!((32..100).contains(&words.len()) && streams.iter().any(|stream| word(stream).is_none()));
        for stream in streams {
            submit(dev, &stream, MILESTONE);
            finish(&stream);
            assert_eq!(stream.poll(), MILESTONE);
        }
    });
}

/// A milestone is best effort, not part of the user's operation.
#[test]
fn a_milestone_that_fails_fails_nothing_else() {
    let plan: FaultPlan = "*:write-value:*:error; *:host-alloc:1:oom".parse().unwrap();
    let pool = one().faults(plan.clone()).build().unwrap();
    run(&pool, |dev| {
        let mut x = dev.zeros::<f32>(100).unwrap();
        (0..100).for_each(|_| dev.scale(&mut x, 1.0).unwrap());
        assert_eq!(dev.download(&x).unwrap(), [0.0; 100]);
        let stream = fresh(dev);
        submit(dev, &stream, MILESTONE);
        finish(&stream);
        assert_eq!(stream.poll(), 0);
    });
}

#[test]
fn a_lost_device_does_not_hang_who_asks() {
    let pool = one().build().unwrap();
    let lost = pool.run(|dev, _| {
        let stream = fresh(dev);
        submit(dev, &stream, MILESTONE);
        dev.worker.handle.driver.launch_host(stream.raw, Box::new(|| panic!("the device is lost"))).unwrap();
        let last = stream.submit();
        while dev.worker.handle.driver.bind().is_ok() {
            std::thread::yield_now();
        }
        assert!(!stream.has_completed(last) && stream.poll() <= MILESTONE);
        stream.publish_now();
        dev.zeros::<u8>(1).map(drop)
    });
    assert!(matches!(lost, Err(Error::DeviceLost { .. })), "{lost:?}");
}

/// A wait that a word makes unnecessary is an edge for the checker, too.
#[test]
fn a_checker_follows_words() {
    let pool = one().check(Check::Races).build().unwrap();
    let side_by_side = |asks: bool| {
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(100)?;
            while !dev.stream.submitted().is_multiple_of(MILESTONE) {
                dev.fill(&mut x, 1.0)?;
            }
            finish(&dev.stream);
            let side = dev.stream()?;
            if asks {
                return dev.on(&side).scale(&mut x.view_mut(), 2.0);
            }
            // Another call has polled, but not the thread that relies on it: that is a race, in whichever order they
            // run.
            dev.stream.poll();
            assert!(dev.stream.is_over(dev.stream.submitted()));
            // SAFETY: does not hold, since nothing orders it; the checker refuses it.
            let raw = unsafe { dev.unordered() };
            raw.on(&side).scale(&mut x, 2.0)
        })
    };
    side_by_side(true).unwrap();
    let race = side_by_side(false).unwrap_err();
    assert!(matches!(race, Error::Misuse { .. }), "{race}");
    pool.close().unwrap();
}

/// A thousand operations in flight, and many streams one after the other: the checker's record is exact for any number.
#[test]
fn a_checker_is_silent_about_long_queues() {
    let pool = one().check(Check::Races).build().unwrap();
    run(&pool, |dev| {
        for _ in 0..3 {
            let (open, gate) = mpsc::channel::<()>();
            let mut x = dev.zeros::<u32>(100).unwrap();
            dev.worker.handle.driver.launch_host(dev.stream.raw, Box::new(move || gate.recv().unwrap())).unwrap();
            (0..100 * MILESTONE as u32).for_each(|i| dev.fill(&mut x, i).unwrap());
            open.send(()).unwrap();
            let side = dev.stream().unwrap();
            dev.on(&side).fill(&mut x, 7).unwrap();
            assert_eq!(dev.on(&side).download(&x).unwrap(), [7; 100]);
            drop(fresh(dev));
        }
    });
    pool.close().unwrap();
}
