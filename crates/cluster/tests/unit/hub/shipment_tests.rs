//! Shipments of one device on their way: they hold nobody, whatever the order in which they are taken.

use super::{Hub, Limits, Out};
use crate::{
    traits::OUTBOX,
    wire::{Arrive, Entry, Failure, Member, ToHost, ToHub},
};
use std::{sync::Arc, time::Duration};

const DEADLINE: Duration = Duration::from_secs(4);

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

/// A process comes to shipment `number` from device 0 of process 0 to device 0 of process 1.
fn comes(hub: &mut Hub, host: usize, number: u64) -> Out {
    let members: Arc<[Member]> = [(0, OUTBOX as u32), (1, 0)].into();
    let (device, call, site, note) = (members[host].1, "a value".into(), "".into(), vec![]);
    let (arrival, scope, known, behind, proxied) = (number, 1, None, None, false);
    let arrive = Arrive { arrival, scope, members, number, device, known, behind, proxied, call, site, note };
    hub.frame(host, ToHub::Arrive(arrive))
}

fn commits(out: &Out) -> usize {
    out.iter().filter(|(_, frame)| matches!(frame, ToHost::Commit { .. })).count()
}

/// The receiver waits for a later one than the sender has sent. Once that was taken for a circle.
#[test]
fn are_taken_in_any_order() {
    let mut hub = hub();
    assert_eq!(comes(&mut hub, 0, 1), []);
    assert_eq!(comes(&mut hub, 1, 2), []);
    assert_eq!(commits(&comes(&mut hub, 0, 2)), 2);
    assert_eq!(commits(&comes(&mut hub, 1, 1)), 2);
}

/// One that is on its way does not excuse its sender for another one that does not come.
#[test]
fn excuse_nobody() {
    let mut hub = hub();
    comes(&mut hub, 0, 1);
    comes(&mut hub, 1, 2);
    let late = (1..20).flat_map(|second| hub.tick(Duration::from_secs(second))).find_map(|(_, frame)| match frame {
        ToHost::Failed { failure, .. } => Some(failure),
        _ => None,
    });
    assert!(matches!(&late, Some(Failure::Timeout { missing, .. }) if *missing == [0]), "{late:?}");
}
