//! Scopes without names that fail before they have joined: random programs of two and three processes, against the rule
//! that scopes of different places are never paired.

use super::super::{Entry, Limits, Out, ToHub};
use super::*;
use proptest::prelude::*;
use std::{collections::VecDeque, time::Duration};

const HOUR: Duration = Duration::from_secs(3600);

fn hub(size: usize) -> Hub {
    let mut hub = Hub::new(Limits { size, heartbeat_timeout: HOUR, connect_timeout: HOUR });
    (0..size).for_each(|host| drop(hub.joined(host)));
    hub
}

fn begin(hub: &mut Hub, host: usize, scope: u64, (site, nth): (&str, u64), failed: Option<&str>) -> Out {
    let failed = failed.map(|cause| (0, cause.to_owned()));
    let entry = Entry::Unnamed { nth, failed };
    hub.frame(host, ToHub::Begin { scope, entry, deadline: HOUR, site: site.to_owned() })
}

/// What a process does in a step of a program that all processes run.
#[derive(Clone, Debug)]
struct Step {
    place: u8,
    /// The scope needs other processes, where it does not fail before that.
    world: bool,
    /// Processes whose scope fails before that, as bits.
    fails: u8,
    /// A process that runs a scope of its own before this step, which fails or not.
    alone: Option<(usize, bool)>,
}

/// One scope of one process: its step, if it is of all of them.
#[derive(Clone, Debug)]
struct Begun {
    step: Option<usize>,
    place: (String, u64),
    fails: bool,
}

/// The scopes that the hub hears of from a process, in its order.
fn told(program: &[Step], host: usize) -> VecDeque<Begun> {
    let mut counts = BTreeMap::<String, u64>::new();
    let mut count = |site: String| {
        let nth = counts.entry(site.clone()).or_default();
        *nth += 1;
        (site, *nth)
    };
    let mut told = VecDeque::new();
    for (number, step) in program.iter().enumerate() {
        if let Some((_, fails)) = step.alone.filter(|(who, _)| *who == host) {
            let place = count(format!("host {host}"));
            told.extend(fails.then_some(Begun { step: None, place, fails }));
        }
        let (place, fails) = (count(step.place.to_string()), step.fails >> host & 1 == 1);
        told.extend((fails || step.world).then_some(Begun { step: Some(number), place, fails }));
    }
    told
}

fn step(size: usize) -> impl Strategy<Value = Step> {
    let alone = proptest::option::weighted(0.3, (0..size, any::<bool>()));
    let fails = prop_oneof![2 => Just(0u8), 1 => 0..1u8 << size];
    (0..3u8, proptest::bool::weighted(0.7), fails, alone).prop_map(|(place, world, fails, alone)| Step {
        place,
        world,
        fails,
        alone,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Each scope that needs others meets the very same step of all of them, or fails because one of them has failed in
    /// that step, whatever else fails and whoever comes first.
    #[test]
    fn the_same_steps_find_each_other(
        (size, program, order) in (2..4usize).prop_flat_map(|size| (
            Just(size),
            proptest::collection::vec(step(size), 1..12),
            proptest::collection::vec(0..size, 200),
        ))
    ) {
        let mut hub = hub(size);
        let mut todo: Vec<_> = (0..size).map(|host| told(&program, host)).collect();
        let mut last = vec![0u64; size];
        // The scope that a process waits for, and what became of those of each step.
        let mut waits: Vec<Option<(u64, usize)>> = vec![None; size];
        let mut results = vec![BTreeMap::new(); size];
        // By chance at first, and then until nothing moves.
        for host in order.into_iter().chain((0..200).map(|round| round % size)) {
            if waits[host].is_some() {
                continue;
            }
            let Some(begun) = todo[host].pop_front() else { continue };
            last[host] += 1;
            let (id, place) = (last[host], (begun.place.0.as_str(), begun.place.1));
            if !begun.fails {
                waits[host] = begun.step.map(|step| (id, step));
            }
            let mut out = begin(&mut hub, host, id, place, begun.fails.then_some("early"));
            out.extend(hub.frame(host, ToHub::End { scope: id }));
            for (to, frame) in out {
                let (scope, result) = match frame {
                    ToHost::Ended { scope } => (scope, None),
                    ToHost::Failed { scope, failure: Failure::Aborted { host, .. } } => (scope, Some(host)),
                    other => return Err(TestCaseError::fail(format!("{other:?}"))),
                };
                if let Some((_, step)) = waits[to].take_if(|(waits, _)| *waits == scope) {
                    results[to].insert(step, result);
                }
            }
        }
        prop_assert_eq!(&waits, &vec![None; size], "somebody waits for ever");
        for (number, step) in program.iter().enumerate().filter(|(_, step)| step.world) {
            for host in (0..size).filter(|host| step.fails >> host & 1 == 0) {
                match results[host].get(&number) {
                    Some(None) => prop_assert_eq!(step.fails, 0, "step {} met others", number),
                    Some(Some(by)) => prop_assert!(step.fails >> by & 1 == 1, "step {} by {}", number, by),
                    None => prop_assert!(false, "step {} of host {}", number, host),
                }
            }
        }
    }
}

/// Where the places do not say which scopes belong together, nobody meets by chance.
#[test]
fn what_cannot_be_known_is_a_mismatch_until_two_scopes_are_the_same() {
    let failed = |out: Out| -> Vec<(usize, u64, bool)> {
        let one = |(host, frame)| match frame {
            ToHost::Failed { scope, failure } => (host, scope, matches!(failure, Failure::Mismatch { .. })),
            other => panic!("{other:?}"),
        };
        out.into_iter().map(one).collect()
    };
    let mut hub = hub(2);
    // Without a failure the order decides, wherever the scopes are begun.
    assert!(begin(&mut hub, 0, 1, ("a", 1), None).is_empty());
    assert!(begin(&mut hub, 1, 1, ("b", 1), None).is_empty());
    // Its own process is told, nobody else.
    assert_eq!(failed(begin(&mut hub, 0, 2, ("a", 2), Some("early"))), [(0, 2, false)]);
    for scope in 3..5 {
        assert!(begin(&mut hub, 0, scope, ("a", scope), None).is_empty());
        let out = begin(&mut hub, 1, scope - 1, ("b", scope - 1), None);
        assert_eq!(failed(out), [(0, scope, true), (1, scope - 1, true)]);
    }
    assert!(begin(&mut hub, 0, 5, ("c", 1), None).is_empty());
    assert!(begin(&mut hub, 1, 4, ("c", 1), None).is_empty());
    assert!(begin(&mut hub, 0, 6, ("a", 5), None).is_empty());
    assert!(begin(&mut hub, 1, 5, ("b", 4), None).is_empty());
}

/// Scopes that fail in one process alone for ever take no memory for ever.
#[test]
fn what_nobody_comes_to_is_forgotten() {
    let mut hub = hub(2);
    for scope in 1..2000 {
        begin(&mut hub, 0, scope, ("a", scope), Some("early"));
        hub.frame(0, ToHub::End { scope });
    }
    assert_eq!((hub.scopes.len(), hub.unnamed.early.len()), (MOST, MOST));
    // The other process has it too: nobody is waited for.
    let kept = hub.last_scope;
    begin(&mut hub, 1, 1, ("a", kept), Some("early"));
    hub.frame(1, ToHub::End { scope: 1 });
    assert_eq!((hub.scopes.len(), hub.unnamed.early.len()), (MOST - 1, MOST - 1));
}
