//! Collectives that threads carry beside the members: they keep no member from its own collectives, and a wrong order
//! among them, or between them and the members' own, is found.

use super::{Hub, Limits, Out};
use crate::{
    process::Process,
    wire::{Arrive, Entry, Failure, Kind, Member, ToHost, ToHub},
};
use std::time::Duration;

const DEADLINE: Duration = Duration::from_secs(4);
const ALL: [Member; 2] = [(0, 0), (1, 0)];
const TURNED: [Member; 2] = [(1, 0), (0, 0)];

/// Two processes in one scope.
fn hub() -> Hub {
    let hour = Duration::from_secs(3600);
    let mut hub = Hub::new(Limits { size: 2, heartbeat_timeout: hour, connect_timeout: hour });
    for host in 0..2 {
        hub.joined(host);
        let entry = Entry::Unnamed { nth: 1, failed: None };
        hub.frame(host, ToHub::Begin { scope: 1, entry, deadline: DEADLINE, site: String::new() });
    }
    hub
}

fn arrive(members: &[Member], number: u64, proxied: bool) -> Arrive {
    let (call, site, members) = ("a sum".into(), "".into(), members.into());
    let (arrival, scope, device, known, behind, note) = (0, 1, 0, None, None, vec![]);
    Arrive { arrival, scope, members, number, device, known, behind, proxied, call, site, note }
}

/// A process comes to collective `number` of a group.
fn comes(hub: &mut Hub, host: usize, members: &[Member], number: u64, proxied: bool) -> Out {
    let arrival = number + 10 * u64::from(members == TURNED);
    hub.frame(host, ToHub::Arrive(Arrive { arrival, ..arrive(members, number, proxied) }))
}

fn commits(out: &Out) -> usize {
    out.iter().filter(|(_, frame)| matches!(frame, ToHost::Commit { .. })).count()
}

fn failure(out: Out) -> Option<Failure> {
    out.into_iter().find_map(|(_, frame)| match frame {
        ToHost::Failed { failure, .. } => Some(failure),
        _ => None,
    })
}

/// Process 0 has two buckets on their way and waits in a sum; process 1 comes to the sum first.
#[test]
fn members_go_on_meanwhile() {
    let mut hub = hub();
    assert_eq!(comes(&mut hub, 0, &ALL, 1, true), []);
    assert_eq!(comes(&mut hub, 0, &ALL, 3, false), []);
    assert_eq!(commits(&comes(&mut hub, 1, &ALL, 3, false)), 2);
    assert_eq!(commits(&comes(&mut hub, 1, &ALL, 1, true)), 2);
    assert_eq!(comes(&mut hub, 0, &ALL, 2, true), []);
    assert_eq!(commits(&comes(&mut hub, 1, &ALL, 2, true)), 2);
}

/// The same number of a group, once beside and once not; and two groups in two orders.
#[test]
fn a_wrong_order_is_a_mismatch() {
    let mut one = hub();
    comes(&mut one, 0, &ALL, 1, true);
    let found = failure(comes(&mut one, 1, &ALL, 1, false));
    assert!(matches!(found, Some(Failure::Mismatch { kind: Kind::Call, .. })), "{found:?}");
    let mut two = hub();
    comes(&mut two, 0, &ALL, 1, true);
    let found = failure(comes(&mut two, 1, &TURNED, 1, true));
    assert!(matches!(found, Some(Failure::Mismatch { kind: Kind::Group, .. })), "{found:?}");
}

/// Each process waits for the other: one for its bucket, before it comes to the sum; the other one the other way round.
/// Neither excuses the other for ever.
#[test]
fn a_circle_through_members_ends_at_the_deadline() {
    let mut hub = hub();
    comes(&mut hub, 0, &ALL, 1, true);
    assert_eq!(comes(&mut hub, 1, &TURNED, 1, false), []);
    let late = (1..20).find_map(|second| failure(hub.tick(Duration::from_secs(second))));
    assert!(matches!(late, Some(Failure::Timeout { .. })), "{late:?}");
}

/// Process 1 is in a collective that waits for process 2, which gets on: so it is not late for the other one.
#[test]
fn who_waits_elsewhere_is_excused() {
    let hour = Duration::from_secs(3600);
    let mut hub = Hub::new(Limits { size: 3, heartbeat_timeout: hour, connect_timeout: hour });
    for host in 0..3 {
        hub.joined(host);
        let entry = Entry::Unnamed { nth: 1, failed: None };
        hub.frame(host, ToHub::Begin { scope: 1, entry, deadline: DEADLINE, site: String::new() });
    }
    comes(&mut hub, 0, &[(0, 0), (1, 0)], 1, false);
    comes(&mut hub, 1, &[(1, 0), (2, 0)], 1, true);
    for second in 1..20 {
        hub.frame(2, ToHub::Beat { progress: vec![(1, second)] });
        assert_eq!(failure(hub.tick(Duration::from_secs(second))), None);
    }
}

/// The hub hears of a process, and of the notes of its members, when the last of them has come, whichever that is.
#[test]
fn a_process_arrives_with_its_last_member() {
    let members: Vec<Member> = vec![(0, 0), (0, 1), (1, 0)];
    let mut process = Process::new(0);
    let (scope, _) = process.begin(Entry::Unnamed { nth: 1, failed: None }, DEADLINE, String::new());
    let key = (scope, members.as_slice().into(), 1);
    let of = |note: u8| Some(Arrive { note: vec![note], ..arrive(&members, 1, true) });
    assert_eq!(process.arrive(&key, of(2)), None);
    let all = Arrive { arrival: 1, note: vec![2, 1], ..arrive(&members, 1, true) };
    assert_eq!(process.arrive(&key, of(1)), Some(ToHub::Arrive(all)));
}
