//! The programs of the search, and the rule that each finds broken.

use super::{
    Broken, Op,
    Op::{Carry, Fail, Meet, Stuck},
    Program, Search, Way,
};
use crate::mutant::Rule;

const BOTH: Op = Meet(&[0, 1]);
/// Two groups, of the first devices and of the second ones.
const CROSSING: Program = Program {
    hosts: &[&[&[("a", &[&[BOTH], &[BOTH]])]], &[&[("a", &[&[BOTH], &[BOTH]])]]],
    kills: 0,
    ticks: 0,
    middle: false,
    some: None,
    succeeds: &["a"],
};
/// A device fails while another's collective is being agreed on; the next scope is in order.
const FAILING: Program = Program {
    hosts: &[&[&[("a", &[&[BOTH], &[Fail]]), ("b", &[&[BOTH]])]], &[&[("a", &[&[BOTH]]), ("b", &[&[BOTH]])]]],
    succeeds: &["b"],
    ..CROSSING
};
/// A process fails a scope in which two others meet.
const ELSEWHERE: Program = Program {
    hosts: &[&[&[("a", &[&[Fail]])]], &[&[("a", &[&[Meet(&[1, 2])]])]], &[&[("a", &[&[Meet(&[1, 2])]])]]],
    succeeds: &[],
    ..CROSSING
};
/// Two scopes at once, begun by two threads.
const TWO_SCOPES: Program = Program {
    hosts: &[&[&[("a", &[&[BOTH]])], &[("b", &[&[BOTH]])]], &[&[("a", &[&[BOTH]])], &[("b", &[&[BOTH]])]]],
    succeeds: &["a", "b"],
    ..CROSSING
};
/// A name again and again, and the first scope of it fails in a process that is ahead.
const AGAIN: Program = Program {
    hosts: &[
        &[&[("a", &[&[Fail]]), ("a", &[&[BOTH]]), ("b", &[&[BOTH]])]],
        &[&[("a", &[&[BOTH]]), ("a", &[&[BOTH]]), ("b", &[&[BOTH]])]],
    ],
    succeeds: &["b"],
    ..CROSSING
};
const LOSS: Program =
    Program { hosts: &[&[&[("a", &[&[BOTH]])]], &[&[("a", &[&[BOTH]])]]], kills: 1, succeeds: &["a"], ..CROSSING };
const LATE: Program = Program {
    hosts: &[&[&[("a", &[&[BOTH]]), ("b", &[&[BOTH]])]], &[&[("a", &[&[Stuck]]), ("b", &[&[BOTH]])]]],
    ticks: 6,
    succeeds: &[],
    ..CROSSING
};
/// A process comes about when the other one's deadline is over.
const SLOW: Program = Program { ticks: 5, succeeds: &[], kills: 0, ..LOSS };

/// Two processes meet once more while the hub waits for the third one's first arrival.
const BEHIND: Program = Program {
    hosts: &[
        &[&[("a", &[&[Meet(&[0, 1, 2])], &[BOTH]])]],
        &[&[("a", &[&[Meet(&[0, 1, 2])], &[BOTH]])]],
        &[&[("a", &[&[Meet(&[0, 1, 2])]])]],
    ],
    middle: true,
    some: Some(30_000),
    ..CROSSING
};

/// A scope without a name fails before it joins, and the next one of its process is begun at the same place.
const EARLY: Program = Program {
    hosts: &[&[&[("!a1", &[]), ("-a2", &[&[BOTH]])]], &[&[("-a1", &[&[BOTH]]), ("-a2", &[&[BOTH]])]]],
    succeeds: &["-a2"],
    ..CROSSING
};
/// One that fails and is of its process alone.
const ALONE: Program = Program {
    hosts: &[&[&[("!x1", &[]), ("-a1", &[&[BOTH]])]], &[&[("-a1", &[&[BOTH]]), ("!y1", &[])]]],
    succeeds: &["-a1"],
    ..CROSSING
};

/// Of two devices of process 0 and one of process 1.
const BUCKET: Op = Carry(&[(0, 0), (0, 1), (1, 0)], 1);
/// A bucket travels beside a collective.
const PROXIED: Program = Program {
    hosts: &[&[&[("a", &[&[BOTH], &[], &[BUCKET], &[BUCKET]])]], &[&[("a", &[&[BOTH], &[BUCKET]])]]],
    ..CROSSING
};
/// One of the proxy threads fails before it comes to the meeting; the next scope is in order.
const GIVEN_UP: Program = Program {
    hosts: &[
        &[&[("a", &[&[], &[], &[BUCKET], &[Fail]]), ("b", &[&[BOTH]])]],
        &[&[("a", &[&[], &[BUCKET]]), ("b", &[&[BOTH]])]],
    ],
    succeeds: &["b"],
    ..CROSSING
};
/// A process is lost while buckets travel.
const LOST_PROXY: Program = Program { kills: 1, ..PROXIED };

const PROGRAMS: [(&str, Program); 13] = [
    ("slow", SLOW),
    ("proxied", PROXIED),
    ("given up", GIVEN_UP),
    ("lost proxy", LOST_PROXY),
    ("early", EARLY),
    ("alone", ALONE),
    ("crossing", CROSSING),
    ("failing", FAILING),
    ("elsewhere", ELSEWHERE),
    ("two scopes", TWO_SCOPES),
    ("again", AGAIN),
    ("loss", LOSS),
    ("late", LATE),
];

const WAYS: [Way; 3] = [Way::Hub, Way::Journal, Way::Mesh];

#[test]
fn every_order_ends_well() {
    let all = PROGRAMS.into_iter().flat_map(|program| WAYS.map(|way| (program, way)));
    for ((name, program), way) in all.chain([(("behind", BEHIND), Way::Mesh)]) {
        // Words of processes to each other come in far more orders, and only between beginning and end.
        let many = way == Way::Mesh && program.kills as u32 + program.ticks > 0;
        let (middle, some) = (program.middle || many, program.some.or(many.then_some(30_000)));
        let program = Program { middle, some, ..program };
        let states = Search { program, way, mutant: None }.run().unwrap_or_else(|why| panic!("{name}, {way:?}: {why}"));
        println!("{name}, {way:?}: {states} states");
        assert!(states > 50, "{name}: too few states to mean anything");
    }
}

/// A search that always passes proves little.
#[test]
fn each_broken_rule_is_found() {
    for (rule, program) in [
        (Broken::LooksAtItsGang, FAILING),
        (Broken::Rule(Rule::C2Decides), FAILING),
        (Broken::Rule(Rule::C2Forgets), ELSEWHERE),
        (Broken::Rule(Rule::C3), CROSSING),
        (Broken::ClosesEarly, CROSSING),
        (Broken::Rule(Rule::C5), TWO_SCOPES),
        (Broken::Rule(Rule::CountsAgain), AGAIN),
        (Broken::Rule(Rule::C6), LOSS),
        (Broken::Rule(Rule::C7), FAILING),
        (Broken::Rule(Rule::EarlyFailure), EARLY),
        (Broken::Rule(Rule::EarlyPlace), ALONE),
        (Broken::Rule(Rule::Proxied), PROXIED),
        (Broken::Rule(Rule::LastArrives), PROXIED),
        (Broken::FailsSilently, GIVEN_UP),
        (Broken::Rule(Rule::DropsAtOnce), FAILING),
        (Broken::Rule(Rule::LeavesEarly), FAILING),
        (Broken::Rule(Rule::Hurries), CROSSING),
        (Broken::Rule(Rule::Overtakes), BEHIND),
        (Broken::OwnPlace, CROSSING),
        (Broken::OwnClock, SLOW),
    ] {
        let ways = match rule {
            Broken::OwnPlace | Broken::OwnClock => &[Way::Journal][..],
            Broken::Rule(Rule::DropsAtOnce | Rule::Overtakes | Rule::Hurries | Rule::LeavesEarly) => &[Way::Mesh],
            // With a mesh `LeavesEarly` breaks this rule.
            Broken::Rule(Rule::C2Decides) => &[Way::Hub, Way::Journal],
            _ => &WAYS,
        };
        for &way in ways {
            let program = Program { some: None, ..program };
            let found = Search { program, way, mutant: Some(rule) }.run();
            assert!(found.as_ref().is_err_and(|why| !why.contains("too many")), "{rule:?}, {way:?}: {found:?}");
        }
    }
}
