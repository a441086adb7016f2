use super::*;

/// A program that creates a stream for every task must not pay for all streams that ever existed.
#[test]
fn streams_that_are_gone_are_forgotten() {
    let mut state = State::new(1);
    let host = state.host_enters();
    state.stream_created((0, 0));
    for raw in 1..2000 {
        state.stream_created((0, raw));
        let stream = state.hear((0, raw), host).unwrap();
        stream.count += 1;
        stream.clock.set(stream.component, stream.count);
        let clock = stream.clock.clone();
        state.learn(host, &clock);
        state.recorded(host, (0, 0), (0, raw));
        state.hear((0, 0), host);
        state.stream_destroyed((0, raw));
    }
    assert!(state.host(host).clock.len() <= RETIRED && state.streams[&(0, 0)].clock.len() <= RETIRED);
    assert!(state.events[&(0, 0)].record.as_ref().unwrap().len() <= RETIRED && state.retired.len() <= RETIRED);
}

#[test]
fn threads_come_and_go() {
    let mut state = State::new(1);
    let ids: Vec<_> = (0..3).map(|_| state.host_enters()).collect();
    assert_eq!(ids, [0, 1, 2]);
    let mut clock = Clock::default();
    clock.set(7, 7);
    state.learn(1, &clock);
    assert!(state.host(1).clock.covers(7, 7) && !state.host(0).clock.covers(7, 7));
    state.host_leaves(1);
    assert_eq!(state.host_enters(), 1);
    assert!(!state.host(1).clock.covers(7, 7), "the seat is another's now");
}
