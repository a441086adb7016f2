//! The hub's clock, and its tables: neither a member's deadline nor an announced size has a part in them.

use super::{Hub, Limits, MOST_WORDS, Out, WORDS};
use crate::wire::{Entry, Failure, ToHost, ToHub};
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
const BEAT: Duration = Duration::from_millis(100);
const HOUR: Duration = Duration::from_secs(3600);

/// All processes in one scope, with these deadlines.
fn hub(heartbeat_timeout: Duration, deadlines: &[Duration]) -> Hub {
    let mut hub = Hub::new(Limits { size: deadlines.len(), heartbeat_timeout, connect_timeout: HOUR });
    for (host, &deadline) in deadlines.iter().enumerate() {
        hub.joined(host);
        let entry = Entry::Unnamed { nth: 1, failed: None };
        hub.frame(host, ToHub::Begin { scope: 1, entry, deadline, site: String::new() });
    }
    hub
}

fn lost(out: Out) -> Option<Failure> {
    out.into_iter().find_map(|(_, frame)| match frame {
        ToHost::Over { failure } => Some(failure),
        _ => None,
    })
}

fn late(out: Out) -> Option<Failure> {
    out.into_iter().find_map(|(_, frame)| match frame {
        ToHost::Failed { failure, .. } => Some(failure),
        _ => None,
    })
}

/// The time until the hub misses process 2, which is stopped. The others beat.
fn found_after(deadlines: &[Duration; 3]) -> Duration {
    let mut hub = hub(SECOND, deadlines);
    let found = (1..1000).find(|&tick| {
        for host in 0..2 {
            hub.frame(host, ToHub::Beat { progress: vec![(1, u64::from(tick))] });
        }
        matches!(lost(hub.tick(BEAT * tick)), Some(Failure::Lost { host: 2, .. }))
    });
    BEAT * found.expect("it is stopped")
}

/// Once a deadline of 20 ms in any process made this 20 s.
#[test]
fn a_short_deadline_does_not_slow_the_clock() {
    assert_eq!(found_after(&[HOUR; 3]), SECOND);
    for short in 0..3 {
        let mut deadlines = [HOUR; 3];
        deadlines[short] = Duration::from_millis(20);
        assert_eq!(found_after(&deadlines), SECOND, "of process {short}");
    }
}

/// The hub has stood still for a minute: what others have sent meanwhile may be read after its next tick.
#[test]
fn nobody_is_late_while_the_hub_stands_still() {
    let mut hub = hub(HOUR, &[Duration::from_millis(20), SECOND]);
    assert_eq!(late(hub.tick(BEAT)), None);
    hub.frame(0, ToHub::End { scope: 1 });
    for after in 1..4 {
        assert_eq!(late(hub.tick(60 * SECOND + BEAT * after)), None);
    }
    let found = late(hub.tick(60 * SECOND + BEAT * 4));
    assert!(matches!(&found, Some(Failure::Timeout { missing, .. }) if *missing == [1]), "{found:?}");
}

/// The others hear nothing while this process is stopped, and end their connections: it is to blame, and no other.
#[test]
fn a_hub_that_was_stopped_says_so() {
    for ticks_first in [false, true] {
        let mut hub = hub(SECOND, &[HOUR, HOUR, HOUR]);
        hub.tick(BEAT);
        let wakes = BEAT + 3 * SECOND;
        if ticks_first {
            hub.tick(wakes);
        }
        let found = lost(hub.lost_at(wakes + BEAT / 10, 2, "its connection has ended"));
        assert!(matches!(&found, Some(Failure::Lost { host: 0, why }) if why.contains("stopped for 3")), "{found:?}");
    }
    let mut hub = hub(SECOND, &[HOUR, HOUR]);
    hub.tick(BEAT);
    (1..5).for_each(|beats| drop(hub.tick(3 * SECOND + BEAT * beats)));
    let found = lost(hub.lost_at(3 * SECOND + BEAT * 5, 1, "its connection has ended"));
    assert!(matches!(&found, Some(Failure::Lost { host: 1, .. })), "long after it woke: {found:?}");
}

/// Once 60,000 names of scopes were 11 MB for ever.
#[test]
fn names_of_scopes_that_are_over_take_no_room() {
    let mut hub = Hub::new(Limits { size: 2, heartbeat_timeout: HOUR, connect_timeout: HOUR });
    (0..2).for_each(|host| drop(hub.joined(host)));
    let mut scopes = 0;
    for name in 0..1000 {
        for _ in 0..2 {
            scopes += 1;
            for host in 0..2 {
                let entry = Entry::Named(format!("evaluation {name}"));
                hub.frame(host, ToHub::Begin { scope: scopes, entry, deadline: HOUR, site: String::new() });
            }
            (0..2).for_each(|host| drop(hub.frame(host, ToHub::End { scope: scopes })));
        }
    }
    assert!(hub.over.is_none() && hub.names.is_empty() && hub.hosts.values().all(|host| host.calls.is_empty()));
}

/// Tables for processes that may never come would be of gigabytes.
#[test]
fn tables_grow_with_those_that_have_joined() {
    let size = u32::MAX as usize;
    let mut hub = Hub::new(Limits { size, heartbeat_timeout: HOUR, connect_timeout: SECOND });
    hub.joined(7);
    let entry = Entry::Unnamed { nth: 1, failed: None };
    hub.frame(7, ToHub::Begin { scope: 1, entry, deadline: HOUR, site: String::new() });
    assert_eq!((hub.hosts.len(), hub.scopes[&1].parts.len()), (1, 1));
    assert!(hub.refuses(7, size).is_some() && hub.refuses(size, size).is_some() && hub.refuses(8, size).is_none());
    let found = (1..100).find_map(|tick| lost(hub.tick(BEAT * tick)));
    let Some(Failure::Timeout { missing, .. }) = found else { panic!("{found:?}") };
    let absent: Vec<u32> = (0..4097).filter(|host| *host != 7).collect();
    assert_eq!(missing, absent, "as many as a frame takes");
}

/// Once a process that had left was missed, because another one's last words had not come.
#[test]
fn last_words_hold_nobody_and_are_few() {
    let mut hub = Hub::new(Limits { size: 3, heartbeat_timeout: HOUR, connect_timeout: HOUR });
    (0..3).for_each(|host| drop(hub.joined(host)));
    for failure in 0..1000 {
        let key = format!("{WORDS}1/{failure}");
        assert_eq!(hub.frame(0, ToHub::Get { key: key.clone(), waits: false }), []);
        let told = hub.frame(1, ToHub::Set { key: key.clone(), value: vec![7] });
        assert_eq!(told, [(0, ToHost::Value { key, value: vec![7] })]);
    }
    assert_eq!((hub.values.len(), hub.asked.len()), (MOST_WORDS, 0));
    for failure in 0..1000 {
        hub.frame(0, ToHub::Get { key: format!("{WORDS}2/{failure}"), waits: false });
    }
    assert_eq!((hub.values.len(), hub.asked.len()), (0, MOST_WORDS));
    assert_eq!(lost(hub.frame(1, ToHub::Bye)), None);
    let others = ToHub::Set { key: format!("{WORDS}2/7"), value: vec![7] };
    assert!(matches!(lost(hub.frame(0, others)), Some(Failure::Lost { host: 0, .. })));
}
