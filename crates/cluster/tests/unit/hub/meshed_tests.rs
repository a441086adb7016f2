//! With a mesh: which collectives of a failed scope the hub keeps, and which it drops.

use super::{Hub, Limits, Out};
use crate::wire::{Arrive, Entry, ToHost, ToHub};
use std::time::Duration;

/// Three processes in one scope.
fn hub() -> Hub {
    let hour = Duration::from_secs(3600);
    let mut hub = Hub::new(Limits { size: 3, heartbeat_timeout: hour, connect_timeout: hour });
    hub.mesh();
    for host in 0..3 {
        hub.joined(host);
        let entry = Entry::Unnamed { nth: 1, failed: None };
        hub.frame(host, ToHub::Begin { scope: 1, entry, deadline: hour, site: String::new() });
    }
    hub
}

/// Arrives at the collective of processes 0 and 1.
fn arrives(hub: &mut Hub, host: usize) -> Out {
    let (members, call, site, note) = ([(0, 0), (1, 0)].into(), "sum".into(), "".into(), vec![]);
    let (arrival, scope, number, device, known, behind, proxied) = (1, 1, 1, 0, None, None, false);
    hub.frame(
        host,
        ToHub::Arrive(Arrive { arrival, scope, members, number, device, known, behind, proxied, call, site, note }),
    )
}

fn fails(hub: &mut Hub) -> Out {
    hub.frame(2, ToHub::Fail { scope: 1, device: None, cause: "a test".to_owned() })
}

fn dropped(out: &Out) -> Vec<usize> {
    out.iter().filter(|(_, frame)| matches!(frame, ToHost::Dropped { .. })).map(|(host, _)| *host).collect()
}

#[test]
fn an_arrival_before_its_process_hears_counts() {
    let mut hub = hub();
    arrives(&mut hub, 0);
    assert_eq!(dropped(&fails(&mut hub)), [0; 0]);
    let commits = arrives(&mut hub, 1);
    assert_eq!(commits.iter().filter(|(_, frame)| matches!(frame, ToHost::Commit { .. })).count(), 2);
}

#[test]
fn who_hears_ends_or_leaves_arrives_no_more() {
    for last in [ToHub::Heard { scope: 1 }, ToHub::End { scope: 1 }, ToHub::Bye] {
        let mut hub = hub();
        arrives(&mut hub, 0);
        fails(&mut hub);
        // It may have left without a word about the scope: its last frames can be cut off.
        assert_eq!(dropped(&hub.frame(1, last.clone())), [0], "{last:?}");
        let late = if last == ToHub::Bye { [0; 0].to_vec() } else { vec![1] };
        assert!(last == ToHub::End { scope: 1 } || dropped(&arrives(&mut hub, 1)) == late, "{last:?}");
    }
}
