//! Graphs: captured once, launched often.

use crate::rig::*;
use gpu_pool::extend::driver::{DriverRef, FaultKind, RawGraph};

/// `all[i] += 1` after `all[..half] = all[half..]`, of 2048 words.
fn shift_and_add(device: &DriverRef, all: &Mem, by: &Adder) -> RawGraph {
    let s = stream(device);
    device.capture_begin(s.raw).unwrap();
    // SAFETY: live memory of the case, which waits for the launches.
    unsafe { device.copy_within(all.raw, all.raw + 4096, 4096, s.raw) }.unwrap();
    by.add(&s, all.raw, 2048, 1);
    device.capture_end(s.raw).unwrap()
}

fn launch(graph: RawGraph, s: &Stream) {
    // SAFETY: as above.
    unsafe { s.of.graph_launch(graph, s.raw) }.unwrap();
}

pub fn a_graph_runs_when_it_is_launched_and_as_often(rig: &Rig) {
    let device = rig.one();
    let (s, all, by) = (stream(device), mem(device, 8192), adder(device));
    write(&all, bytemuck::cast_slice(&[7u32; 2048]));
    let graph = shift_and_add(device, &all, &by);
    s.wait();
    assert_eq!(read_words(&all), [7; 2048], "the capture has touched it");
    for round in 1..=1000u32 {
        launch(graph, &s);
        if round % 250 == 0 {
            s.wait();
            assert_eq!(read_words(&all), vec![7 + round; 2048]);
        }
    }
    // SAFETY: waited for above.
    unsafe { device.graph_destroy(graph) }.unwrap();
}

pub fn a_launch_follows_its_stream(rig: &Rig) {
    let device = rig.one();
    let (s, t, all, by) = (stream(device), stream(device), mem(device, 8192), adder(device));
    let (done, to) = (event(device, false), pinned(device, 8192));
    let graph = shift_and_add(device, &all, &by);
    // The first launch may allocate.
    s.fill(&all, 0);
    launch(graph, &s);
    s.wait();
    for round in 0..10 {
        let gate = s.gate();
        s.fill(&all, round);
        launch(graph, &s);
        done.record(&s);
        device.stream_wait_event(t.raw, done.raw).unwrap();
        t.down(&to, &all);
        assert!(!s.is_idle() && !t.is_idle());
        gate.open();
        t.wait();
        assert_eq!(to.words(), vec![round + 1; 2048]);
    }
    s.wait();
    // SAFETY: waited for above.
    unsafe { device.graph_destroy(graph) }.unwrap();
}

pub fn what_a_graph_cannot_hold_is_refused(rig: &Rig) {
    let device = rig.one();
    let (s, all, by) = (stream(device), mem(device, 8192), adder(device));
    let (past, elsewhere) = (event(device, false), stream(device));
    s.fill(&all, 1);
    past.record(&elsewhere);
    let graph = shift_and_add(device, &all, &by);
    device.capture_begin(s.raw).unwrap();
    let refused = [
        device.capture_begin(s.raw),
        device.event_record(past.raw, s.raw),
        device.stream_wait_event(s.raw, past.raw),
        device.launch_host(s.raw, Box::new(|| panic!("nobody calls it"))),
        // SAFETY: as above.
        unsafe { device.graph_launch(graph, s.raw) },
    ];
    for (i, refused) in refused.into_iter().enumerate() {
        assert_eq!(refused.unwrap_err().kind, FaultKind::Unsupported, "{i}");
    }
    by.add(&s, all.raw, 2048, 5);
    // What was refused has harmed neither the capture nor the stream.
    let other = device.capture_end(s.raw).unwrap();
    assert_eq!(device.capture_end(s.raw).unwrap_err().kind, FaultKind::InvalidArgument);
    launch(other, &s);
    launch(graph, &s);
    s.wait();
    assert_eq!(read_words(&all), [7; 2048]);
    // SAFETY: waited for above.
    unsafe { device.graph_destroy(graph).and(device.graph_destroy(other)) }.unwrap();
}

pub fn an_empty_graph_does_nothing(rig: &Rig) {
    let device = rig.one();
    let s = stream(device);
    device.capture_begin(s.raw).unwrap();
    let graph = device.capture_end(s.raw).unwrap();
    launch(graph, &s);
    s.wait();
    // SAFETY: waited for above.
    unsafe { device.graph_destroy(graph) }.unwrap();
}

/// As where a graph is cut: each capture is a graph of its own, and they can be launched by turns.
pub fn one_stream_captures_again_and_again(rig: &Rig) {
    let device = rig.one();
    let (c, s, all, by) = (stream(device), stream(device), mem(device, 8192), adder(device));
    write(&all, bytemuck::cast_slice(&[0u32; 2048]));
    let graphs: Vec<RawGraph> = (0..4)
        .map(|i| {
            device.capture_begin(c.raw).unwrap();
            by.add(&c, all.raw, 2048, 1 << (8 * i));
            device.capture_end(c.raw).unwrap()
        })
        .collect();
    for round in 1..=5u32 {
        graphs.iter().for_each(|&graph| launch(graph, &s));
        s.wait();
        assert_eq!(read_words(&all), [round * 0x0101_0101; 2048]);
    }
    // SAFETY: waited for above.
    graphs.into_iter().for_each(|graph| unsafe { device.graph_destroy(graph) }.unwrap());
}

/// Each device has its own, and copies between devices can be part of one.
pub fn a_graph_copies_between_devices(rig: &Rig) {
    let Some((a, b)) = rig.peers() else { return };
    a.enable_peer(&**b).unwrap();
    let (s, x, y) = (stream(a), mem(a, 4096), mem(b, 4096));
    let c = stream(a);
    a.capture_begin(c.raw).unwrap();
    // SAFETY: as above.
    unsafe { a.copy_peer(x.raw, &**a, y.raw, &**b, 4096, c.raw) }.unwrap();
    let graph = a.capture_end(c.raw).unwrap();
    for round in 1..5u32 {
        write(&y, bytemuck::cast_slice(&[round; 1024]));
        launch(graph, &s);
        s.wait();
        assert_eq!(read_words(&x), [round; 1024]);
    }
    // SAFETY: waited for above.
    unsafe { a.graph_destroy(graph) }.unwrap();
    a.disable_peer(&**b).unwrap();
}
