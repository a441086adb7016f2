//! What the host knows: what it has waited for, each thread for itself.

use crate::rig::*;
use gpu_pool::extend::driver::{DriverRef, RawEvent, RawStream};
use gpu_pool_lab::{check::Kind, prelude::*};
use std::{sync::mpsc, thread, time::Duration};

/// Three ways to learn that something is over, and how much each tells.
#[test]
fn what_the_host_has_waited_for_is_over() {
    let wait_stream = |gpu: &DriverRef, s: RawStream, _: RawEvent| idle(gpu, s);
    let wait_event = |gpu: &DriverRef, _: RawStream, e: RawEvent| {
        assert!(gpu.event_wait(e, Duration::from_secs(300)).unwrap());
    };
    let ask_event = |gpu: &DriverRef, _: RawStream, e: RawEvent| {
        while !gpu.event_query(e).unwrap() {
            thread::yield_now();
        }
    };
    let ask_stream = |gpu: &DriverRef, s: RawStream, _: RawEvent| {
        while !gpu.stream_query(s).unwrap() {
            thread::yield_now();
        }
    };
    type Way = fn(&DriverRef, RawStream, RawEvent);
    let ways: [(Way, bool); 4] = [(wait_stream, true), (wait_event, false), (ask_event, false), (ask_stream, true)];
    for (wait, all) in ways {
        let gpu = &gpus(1)[0];
        let (x, y, s, t, e) = (memory(gpu), memory(gpu), stream(gpu), stream(gpu), event(gpu));
        fill(gpu, x, 1, s).unwrap();
        gpu.event_record(e, s).unwrap();
        fill(gpu, y, 1, s).unwrap();
        caught(fill(gpu, x, 2, t), Kind::Race);
        wait(gpu, s, e);
        fill(gpu, x, 2, t).unwrap();
        race_unless(all, fill(gpu, y, 2, t));
        idle(gpu, s);
        idle(gpu, t);
    }
}

/// A wait that ran out of time tells nothing.
#[test]
fn a_wait_in_vain_tells_nothing() {
    let gpu = &gpus(1)[0];
    let (x, s, t, e) = (memory(gpu), stream(gpu), stream(gpu), event(gpu));
    let (open, gate) = mpsc::channel::<()>();
    let hold = move || {
        let _ = gate.recv();
    };
    gpu.launch_host(s, Box::new(hold)).unwrap();
    fill(gpu, x, 1, s).unwrap();
    gpu.event_record(e, s).unwrap();
    assert!(!gpu.stream_wait_idle(s, Duration::ZERO).unwrap() && !gpu.stream_query(s).unwrap());
    assert!(!gpu.event_wait(e, Duration::ZERO).unwrap() && !gpu.event_query(e).unwrap());
    caught(fill(gpu, x, 2, t), Kind::Race);
    drop(open);
    idle(gpu, s);
    fill(gpu, x, 2, t).unwrap();
    idle(gpu, t);
}

/// What one thread has waited for, another does not know until it is told.
#[test]
fn threads_know_what_they_have_waited_for() {
    let gpu = &gpus(1)[0];
    let checker = gpu.checker().unwrap().0;
    for told in [false, true] {
        let (x, s, t) = (memory(gpu), stream(gpu), stream(gpu));
        fill(gpu, x, 1, s).unwrap();
        let token = thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                idle(gpu, s);
                fill(gpu, x, 2, stream(gpu)).unwrap();
                idle(gpu, s);
                checker.release()
            });
            waiter.join().unwrap()
        });
        if told {
            checker.acquire(&token);
            // The other thread's own operation is not among what it has waited for.
            assert_eq!(caught(fill(gpu, x, 3, t), Kind::Race).before.as_ref().unwrap().stream, Some(5));
        } else {
            assert_eq!(caught(fill(gpu, x, 3, t), Kind::Race).before.as_ref().unwrap().stream, Some(2));
        }
    }
}

/// A host function knows what comes before it, and may tell.
#[test]
fn a_host_function_comes_after_what_is_before_it() {
    let gpu = &gpus(1)[0];
    let checker = gpu.checker().unwrap().0.clone();
    let (x, s, t) = (memory(gpu), stream(gpu), stream(gpu));
    fill(gpu, x, 1, s).unwrap();
    let (tell, told) = mpsc::channel();
    let inside = checker.clone();
    gpu.launch_host(s, Box::new(move || tell.send(inside.release()).unwrap())).unwrap();
    let token = told.recv_timeout(Duration::from_secs(300)).unwrap();
    caught(fill(gpu, x, 2, t), Kind::Race);
    checker.acquire(&token);
    fill(gpu, x, 2, t).unwrap();
    idle(gpu, t);
    idle(gpu, s);
    // Its thread keeps nothing of that: a later function on another stream does not know of it.
    let (y, u) = (memory(gpu), stream(gpu));
    fill(gpu, y, 1, s).unwrap();
    let (tell, told) = mpsc::channel();
    for (stream, checker) in [(s, checker.clone()), (u, checker.clone())] {
        let (tell, done) = (tell.clone(), event(gpu));
        gpu.launch_host(stream, Box::new(move || tell.send(checker.release()).unwrap())).unwrap();
        gpu.event_record(done, stream).unwrap();
        while !thread::scope(|scope| scope.spawn(|| gpu.event_query(done).unwrap()).join().unwrap()) {
            thread::yield_now();
        }
    }
    let (_, of_another) = (told.recv().unwrap(), told.recv().unwrap());
    checker.acquire(&of_another);
    caught(fill(gpu, y, 2, t), Kind::Race);
}
