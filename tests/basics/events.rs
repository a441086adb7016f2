//! Events: waits across streams and devices, times, and handles on any thread.

use crate::{
    on_both,
    support::{self, failure, slow_add, slow_copy},
};
use gpu_pool::{Error, Event};
use parking_lot::Mutex;
use std::{sync::Arc, thread, time::Duration};

on_both! {
    1: fn a_stream_waits_for_an_event(gpus) {
        static_assertions::assert_impl_all!(Event: Clone, Send, Sync);
        gpus.run(1, |dev| {
            let (a, b) = (dev.stream()?, dev.stream()?);
            let (mut x, mut y, mut busy) = (dev.zeros::<u32>(100)?, dev.zeros::<u32>(100)?, dev.zeros::<u32>(1)?);
            dev.synchronize()?;
            let (a, b) = (dev.on(&a), dev.on(&b));
            // SAFETY: the two streams are ordered by the events, and what is downloaded by `synchronize`.
            let (a, b) = unsafe { (a.unordered(), b.unordered()) };
            for round in 1..4 {
                // The write has not begun when the read is asked for.
                slow_add(&a, &mut busy, 1, 20_000)?;
                slow_add(&a, &mut x, 1, 0)?;
                let done = a.record()?;
                b.wait(&done)?;
                slow_copy(&b, &x, &mut y, 0)?;
                b.synchronize()?;
                assert!(done.is_complete()?);
                assert_eq!(dev.download(&y)?, [round; 100]);
                // The other way, so that the next write does not overtake the read.
                a.wait(&b.record()?)?;
            }
            Ok(())
        });
    }

    /// The second `synchronize` once returned at once: the stamp was no operation that it knew of.
    1: fn a_time_stamp_behind_a_synchronised_stream_is_waited_for(gpus) {
        gpus.run(1, |dev| {
            let mut x = dev.zeros::<u32>(1)?;
            for _ in 0..50 {
                let start = dev.record_timed()?;
                slow_add(dev, &mut x, 1, 0)?;
                dev.synchronize()?;
                let end = dev.record_timed()?;
                dev.synchronize()?;
                assert!(end.is_complete()?);
                end.elapsed_since(&start)?;
            }
            Ok(())
        });
    }

    2: fn devices_wait_for_each_others_events(gpus) {
        let n = gpus.up_to(4);
        let pool = gpus.pool(n);
        // A chain: each device starts when the one before has ended.
        let passed: Vec<Mutex<Option<Event>>> = (0..n).map(|_| Mutex::new(None)).collect();
        pool.run(|dev, _| {
            let mut own = dev.zeros::<u32>(1)?;
            if dev.rank() > 0 {
                support::until("the device before has recorded", || {
                    passed[dev.rank() - 1].lock().is_some() || dev.check().is_err()
                })?;
                let before = passed[dev.rank() - 1].lock().clone().ok_or_else(|| Error::custom("aborted"))?;
                assert_eq!(before.device(), dev.rank() - 1);
                dev.wait(&before)?;
                dev.wait(&before.clone())?;
            }
            // The later, the faster: without the waits they would end in the other order.
            slow_add(dev, &mut own, 1, 30_000 * (n - dev.rank()) as u32)?;
            let event = dev.record()?;
            *passed[dev.rank()].lock() = Some(event.clone());
            dev.synchronize()?;
            // All before have passed, too.
            for before in &passed[..=dev.rank()] {
                assert!(before.lock().as_ref().unwrap().is_complete()?);
            }
            Ok(())
        })
        .unwrap();
        // On any thread, after the scope.
        let all: Vec<Event> = passed.into_iter().map(|e| e.into_inner().unwrap()).collect();
        thread::spawn(move || assert!(all.iter().all(|e| e.is_complete().unwrap()))).join().unwrap();
    }

    2: fn an_event_orders_work_that_the_library_is_told_not_to_order(gpus) {
        let pool = gpus.pool(2);
        if pool.report().peer(1, 0).route != gpu_pool::collective::Route::Direct {
            println!("skipped: no direct route from device 1 to device 0");
            return;
        }
        let seen = pool.run(|dev, _| {
            let (mut x, mut busy) = (dev.zeros::<u32>(1000)?, dev.zeros::<u32>(1)?);
            dev.synchronize()?;
            // SAFETY: device 1 reads behind the event that follows the write, and device 0 does nothing to it
            // afterwards.
            let raw = unsafe { dev.unordered() };
            if dev.rank() == 0 {
                slow_add(&raw, &mut busy, 1, 30_000)?;
                slow_add(&raw, &mut x, 5, 0)?;
            }
            let lent = dev.exchange((Arc::new(x), dev.record()?))?;
            let mut here = dev.zeros::<u32>(1000)?;
            if dev.rank() == 1 {
                raw.wait(&lent[0].1)?;
                raw.copy(&lent[0].0.peer(), &mut here)?;
            }
            let seen = dev.download(&here)?;
            dev.barrier()?;
            Ok(seen)
        });
        assert_eq!(seen.unwrap()[1], [5; 1000]);
    }

    1: fn time_on_the_device(gpus) {
        gpus.run(1, |dev| {
            let mut x = dev.zeros::<u32>(100)?;
            let start = dev.record_timed()?;
            slow_add(dev, &mut x, 1, 20_000)?;
            let end = dev.record_timed()?;
            dev.synchronize()?;
            // The kernel takes that long by itself; how much longer is nobody's business here.
            assert!(end.elapsed_since(&start)? >= Duration::from_millis(19), "{:?}", end.elapsed_since(&start)?);
            assert!(start.elapsed_since(&start)? == Duration::ZERO);
            let error = failure(start.elapsed_since(&end));
            let Error::InvalidArgument { op: "Event::elapsed_since", why, .. } = &error else { panic!("{error}") };
            assert!(why.contains("recorded before"), "{why}");
            let untimed = dev.record()?;
            for error in [failure(end.elapsed_since(&untimed)), failure(untimed.elapsed_since(&start))] {
                assert!(matches!(error, Error::InvalidArgument { op: "Event::elapsed_since", .. }), "{error}");
            }
            Ok(())
        });
    }

    2: fn times_of_two_devices_cannot_be_compared(gpus) {
        let pool = gpus.pool(2);
        let events = pool.run(|dev, _| dev.record_timed()).unwrap();
        let error = failure(events[0].elapsed_since(&events[1]));
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }

    1: fn an_event_is_not_complete_before_its_work(gpus) {
        gpus.run(1, |dev| {
            let mut x = dev.zeros::<u32>(100)?;
            let empty = dev.record()?;
            dev.synchronize()?;
            // The host may be slow to ask; then the kernel takes longer.
            for micros in [20_000, 200_000, 2_000_000] {
                slow_add(dev, &mut x, 1, micros)?;
                let event = dev.record()?;
                let early = event.is_complete()?;
                assert!(empty.is_complete()?);
                dev.synchronize()?;
                assert!(event.is_complete()?);
                if !early {
                    return Ok(());
                }
            }
            Err(Error::custom("the event was complete before its work"))
        });
    }

    1: fn events_of_another_pool_are_refused(gpus) {
        let (one, two) = (gpus.pool(1), gpus.pool(1));
        let event = one.run(|dev, _| dev.record()).unwrap().remove(0);
        let line = std::panic::Location::caller().line() + 1;
        let error = failure(two.run(|dev, _| dev.wait(&event)));
        assert!(matches!(error, Error::WrongPool { op: "wait", device: 0, site } if site.line() == line), "{error}");
        // It is still good where it belongs, and after its pool.
        one.run(|dev, _| dev.wait(&event)).unwrap();
        drop(one);
        assert!(event.is_complete().unwrap());
    }

    1: fn thousands_of_events(gpus) {
        let pool = gpus.pool(gpus.up_to(2));
        let kept = pool
            .run(|dev, _| {
                let stream = dev.stream()?;
                let mut kept = Vec::new();
                for i in 0..2000 {
                    let event = dev.on(&stream).record()?;
                    dev.wait(&event)?;
                    if i % 10 == 0 {
                        kept.push(event);
                    }
                }
                Ok(kept)
            })
            .unwrap();
        thread::scope(|s| {
            for events in kept {
                s.spawn(move || assert!(events.iter().all(|e| e.is_complete().unwrap())));
            }
        });
    }
}
