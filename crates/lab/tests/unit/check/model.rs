//! Tests the account against a model without clocks: a graph of all operations, searched anew for every question.

use super::{
    Kind,
    judge::Operand,
    note::Call,
    shadow::Manner,
    state::{Key, State},
};
use gpu_pool::extend::driver::{Address, FaultKind};
use proptest::prelude::*;

/// First address of the memory. It is written once at the start, so that no read is refused as unwritten.
const BASE: Address = 4096;
const BYTES: usize = 24;
const STREAMS: [Key; 5] = [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3)];
const EVENTS: usize = 3;
const HOSTS: usize = 3;

#[derive(Clone, Debug)]
enum Step {
    /// An operation: host thread, stream, and its operands (first byte, number of bytes, manner).
    Operation(usize, usize, Vec<(usize, usize, Manner)>),
    Record {
        host: usize,
        event: usize,
        stream: usize,
    },
    StreamWaits {
        host: usize,
        stream: usize,
        event: usize,
    },
    HostWaitsForEvent {
        host: usize,
        event: usize,
    },
    HostWaitsForStream {
        host: usize,
        stream: usize,
    },
    HandOver {
        from: usize,
        to: usize,
    },
    HostTouches(usize, usize, usize, bool),
}

fn step() -> impl Strategy<Value = Step> {
    let (host, stream, event) = (0..HOSTS, 0..STREAMS.len(), 0..EVENTS);
    let manner = prop_oneof![
        4 => Just(Manner::READ), 4 => Just(Manner::WRITE), 1 => Just(Manner::RAISE), 1 => Just(Manner::AWAIT)
    ];
    let bytes = (0..BYTES, 1..9_usize, manner);
    prop_oneof![
        8 => (host.clone(), stream.clone(), prop::collection::vec(bytes, 1..4))
            .prop_map(|(h, s, o)| Step::Operation(h, s, o)),
        3 => (host.clone(), event.clone(), stream.clone())
            .prop_map(|(host, event, stream)| Step::Record { host, event, stream }),
        3 => (host.clone(), stream.clone(), event.clone())
            .prop_map(|(host, stream, event)| Step::StreamWaits { host, stream, event }),
        1 => (host.clone(), event).prop_map(|(host, event)| Step::HostWaitsForEvent { host, event }),
        1 => (host.clone(), stream).prop_map(|(host, stream)| Step::HostWaitsForStream { host, stream }),
        1 => (host.clone(), host.clone()).prop_map(|(from, to)| Step::HandOver { from, to }),
        1 => (host, 0..BYTES, 1..9_usize, any::<bool>())
            .prop_map(|(h, at, n, write)| Step::HostTouches(h, at, n, write)),
    ]
}

/// The operations, each with its direct predecessors.
#[derive(Default)]
struct Graph {
    before: Vec<Vec<usize>>,
    /// The accesses of each operation.
    accesses: Vec<Vec<(usize, usize, Manner)>>,
    stream_last: [Option<usize>; STREAMS.len()],
    host_last: [Option<usize>; HOSTS],
    records: [Option<usize>; EVENTS],
}

impl Graph {
    fn add(&mut self, before: impl IntoIterator<Item = Option<usize>>, accesses: Vec<(usize, usize, Manner)>) -> usize {
        self.before.push(before.into_iter().flatten().collect());
        self.accesses.push(accesses);
        self.before.len() - 1
    }

    /// These operations and everything that comes before any of them.
    fn past(&self, of: impl IntoIterator<Item = Option<usize>>) -> Vec<bool> {
        let mut past = vec![false; self.before.len()];
        let mut open: Vec<usize> = of.into_iter().flatten().collect();
        while let Some(node) = open.pop() {
            if !std::mem::replace(&mut past[node], true) {
                open.extend(&self.before[node]);
            }
        }
        past
    }

    /// Whether an operation outside the past conflicts with one of these accesses.
    fn races(&self, past: &[bool], accesses: &[(usize, usize, Manner)]) -> bool {
        let touches = |byte: usize, (at, n, _): &(usize, usize, Manner)| (*at..at + n).contains(&byte);
        (0..BYTES + 16).any(|byte| {
            accesses.iter().filter(|mine| touches(byte, mine)).any(|mine| {
                self.accesses.iter().zip(past).filter(|(_, past)| !**past).any(|(theirs, _)| {
                    theirs.iter().any(|other| {
                        touches(byte, other) && {
                            let both_flags = mine.2.flag && other.2.flag;
                            (mine.2.write || other.2.write) && !both_flags
                        }
                    })
                })
            })
        })
    }
}

fn run(steps: Vec<Step>) -> (usize, usize) {
    let mut state = State::new(2);
    STREAMS.iter().for_each(|key| state.stream_created(*key));
    for event in 0..EVENTS as u64 {
        state.events.insert((0, 100 + event), Default::default());
    }
    let hosts: Vec<_> = (0..HOSTS).map(|_| state.host_enters()).collect();
    let mut graph = Graph::default();
    let (mut accepted, mut refused) = (0, 0);
    let operand = |&(at, bytes, manner): &(usize, usize, Manner)| Operand { address: BASE + at as u64, bytes, manner };
    for step in steps {
        match step {
            Step::Operation(host, stream, accesses) => {
                let operands: Vec<_> = accesses.iter().map(operand).collect();
                let mut forwarded = false;
                let forward = || {
                    forwarded = true;
                    Ok(())
                };
                let result = state.submit(hosts[host], STREAMS[stream], Call::new("op", ""), &operands, forward);
                let last = [graph.stream_last[stream], graph.host_last[host]];
                let races = graph.races(&graph.past(last), &accesses);
                assert_eq!(result.is_err(), races, "{accesses:?} on {stream}: {result:?}");
                assert_eq!(forwarded, !races, "a refused operation does not run");
                match result {
                    Ok(()) => {
                        accepted += 1;
                        graph.stream_last[stream] = Some(graph.add(last, accesses));
                    }
                    Err(fault) => {
                        refused += 1;
                        assert_eq!((fault.kind, fault.report.unwrap().kind), (FaultKind::Misuse, Kind::Race));
                    }
                }
            }
            Step::Record { host, event, stream } => {
                state.recorded(hosts[host], (0, 100 + event as u64), STREAMS[stream]);
                let node = graph.add([graph.stream_last[stream], graph.host_last[host]], vec![]);
                graph.stream_last[stream] = Some(node);
                graph.records[event] = Some(node);
            }
            Step::StreamWaits { host, stream, event } => {
                let key = STREAMS[stream];
                let awaited = state.awaited(key, 100 + event as u64, Call::default(), Some(key));
                assert_eq!(awaited.is_err(), graph.records[event].is_none());
                let Ok(Some((_, record, _))) = awaited else { continue };
                state.hear(key, hosts[host]).unwrap().clock.join(&record);
                let last = [graph.stream_last[stream], graph.host_last[host], graph.records[event]];
                graph.stream_last[stream] = Some(graph.add(last, vec![]));
            }
            Step::HostWaitsForEvent { host, event } => {
                let Some(record) = state.events[&(0, 100 + event as u64)].record.clone() else { continue };
                state.learn(hosts[host], &record);
                graph.host_last[host] = Some(graph.add([graph.host_last[host], graph.records[event]], vec![]));
            }
            Step::HostWaitsForStream { host, stream } => {
                let clock = state.streams[&STREAMS[stream]].clock.clone();
                state.learn(hosts[host], &clock);
                graph.host_last[host] = Some(graph.add([graph.host_last[host], graph.stream_last[stream]], vec![]));
            }
            Step::HandOver { from, to } => {
                let clock = state.host(hosts[from]).clock.clone();
                state.learn(hosts[to], &clock);
                graph.host_last[to] = Some(graph.add([graph.host_last[from], graph.host_last[to]], vec![]));
            }
            Step::HostTouches(host, at, n, write) => {
                let access = (at, n, if write { Manner::WRITE } else { Manner::READ });
                let races = graph.races(&graph.past([graph.host_last[host]]), &[access]);
                let result = state.host_access(hosts[host], operand(&access));
                assert_eq!(result.map_err(|report| report.kind).err(), races.then_some(Kind::HostAccess));
            }
        }
    }
    (accepted, refused)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn the_account_agrees_with_a_search_of_the_graph(steps in prop::collection::vec(step(), 1..60)) {
        run(steps);
    }
}

/// Some of the programs above are refused and some are accepted.
#[test]
fn the_model_sees_both_verdicts() {
    use proptest::{strategy::ValueTree, test_runner::TestRunner};
    let mut runner = TestRunner::deterministic();
    let (mut accepted, mut refused) = (0, 0);
    for _ in 0..100 {
        let steps = prop::collection::vec(step(), 60).new_tree(&mut runner).unwrap().current();
        let (good, bad) = run(steps);
        accepted += good;
        refused += bad;
    }
    assert!(accepted > 500 && refused > 500, "{accepted} accepted, {refused} refused");
}
