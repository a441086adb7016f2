//! Models of one process's threads in a cluster (`crates/cluster/src/world.rs`): the thread that reads the hub's
//! frames, threads that begin scopes, and devices that meet. Nobody waits for ever, launches are in the hub's order,
//! and each failure is told.
//!
//! The hub's decisions are the frames of each model; `hub_search.rs` searches through the decisions themselves.

use super::{
    flag,
    shim::{self, Condvar, Mutex},
    support::{Watched, bite, check_within, spawn},
};
use crate::{
    mutant::{Rule, broken},
    runtime::processes::Place,
    traits::{Arrival, Entry, Transport, Window, World, WorldScope},
    wire::{self, Failure, Record, ToHost, ToHub},
    world::{Local, Members, Near},
};
use gpu_pool::{Error, Result};
use std::{panic::Location, sync::Arc, time::Duration};

/// One process, and what it has told the hub.
struct Host {
    world: Members,
    told: Arc<(Mutex<Vec<ToHub>>, Condvar)>,
    /// The last launch. Only the device whose turn it is may touch it: two at once are a race.
    launched: Watched<u64>,
}

impl Host {
    /// `breaks`: whether the connection breaks at this frame.
    fn new(breaks: fn(&ToHub) -> bool) -> shim::Arc<Host> {
        let told = Arc::new((Mutex::new(Vec::new()), Condvar::new()));
        let to_hub = told.clone();
        let local = Local::new(
            0,
            Box::new(move |frame| {
                if breaks(&frame) {
                    return Err(Failure::lost(0, "the connection to it broke"));
                }
                to_hub.0.lock().push(frame);
                to_hub.1.notify_all();
                Ok(())
            }),
        );
        let transport = Transport::None(Error::custom("no transport"));
        let (devices, _ends) = (vec![2, 2], Box::new(()));
        let world = Members { local, host: 0, devices, transport, clock: Box::new(|| None), _ends };
        shim::Arc::new(Host { world, told, launched: Watched::new(0) })
    }

    fn begin(&self, name: &str, ordered: bool) -> Result<(Arc<dyn WorldScope>, Window)> {
        let entry = if ordered { Entry::Named(name) } else { Entry::Unnamed { nth: 1, failed: None } };
        self.world.begin(entry, Duration::MAX, Arc::new(|| 0), Location::caller())
    }

    /// A collective of the devices with this ordinal, of both processes.
    fn sum(&self, scope: &dyn WorldScope, device: usize) -> Result<u64> {
        let members = [Place { host: 0, device }, Place { host: 1, device }];
        let (place, call, site, note) = (members[0], "sum", Location::caller(), Vec::new());
        let (leads, proxied) = (true, false);
        let commit = scope.meet(Arrival { members: &members, number: 1, place, call, site, leads, proxied, note })?;
        assert_eq!(self.launched.get() + 1, commit.numbers[0], "in the hub's order");
        self.launched.set(commit.numbers[0]);
        Ok(commit.numbers[0])
    }

    /// The reader's part: waits for so many frames of the process.
    fn told(&self, count: usize) -> Vec<ToHub> {
        let mut told = self.told.0.lock();
        while told.len() < count {
            self.told.1.wait(&mut told);
        }
        told.clone()
    }

    /// The reader's part: the hub commits what this device has arrived at.
    fn commit(&self, told: &[ToHub], device: u32, number: u64) {
        let arrival = told.iter().find_map(|frame| match frame {
            ToHub::Arrive(arrive) if arrive.device == device => Some(arrive.arrival),
            _ => None,
        });
        let arrival = arrival.expect("the device has arrived");
        self.world.local.take(ToHost::Commit { arrival, known: 1, notes: vec![(number, Vec::new())], more: false });
    }

    fn fails(&self, host: u32) {
        let failure = Failure::Aborted { host, device: None, cause: "a test".to_owned() };
        self.world.local.take(ToHost::Failed { scope: 1, failure });
    }
}

fn never(_: &ToHub) -> bool {
    false
}

/// Two devices meet the other process. Whoever arrives first, both launch in the hub's order, one after the other.
#[test]
fn launches_are_in_the_hubs_order() {
    check_within(2, || {
        let rule = flag("model.world.turns_at_once").then_some(Rule::C3);
        broken(rule, || {
            let host = Host::new(never);
            let (scope, _window) = host.begin("a", false).unwrap();
            let devices = [0, 1].map(|device| {
                let scope = scope.clone();
                spawn(&host, move |host| host.sum(&*scope, device).unwrap())
            });
            let told = host.told(3);
            host.commit(&told, 1, 1);
            host.commit(&told, 0, 2);
            assert_eq!(devices.map(|device| device.join().unwrap()), [2, 1]);
        });
    });
}

/// One device has its commit and one waits when the scope fails: the first launches, and the other has the failure.
#[test]
fn a_failure_ends_the_wait_of_who_has_no_commit() {
    check_within(2, || {
        let host = Host::new(never);
        let (scope, _window) = host.begin("a", false).unwrap();
        let devices = [0, 1].map(|device| {
            let scope = scope.clone();
            spawn(&host, move |host| host.sum(&*scope, device))
        });
        let told = host.told(3);
        host.commit(&told, 0, 1);
        host.fails(1);
        let [first, second] = devices.map(|device| device.join().unwrap());
        assert_eq!(first.unwrap(), 1, "what the hub commits is carried out");
        assert!(matches!(second, Err(Error::AbortedByHost { host: 1, .. })), "{second:?}");
        assert!(matches!(scope.end(), Err(Error::AbortedByHost { host: 1, .. })));
    });
}

/// The failure of another process is told once, whether it comes before the question or after it.
#[test]
fn a_failure_elsewhere_is_told_once() {
    check_within(3, || {
        let host = Host::new(never);
        let (scope, _window) = host.begin("a", false).unwrap();
        let times = Arc::new(Mutex::new(0));
        let told = times.clone();
        let asking = spawn(&host, move |_| {
            scope.when_failed(Box::new(move |error| {
                assert!(matches!(error, Error::AbortedByHost { host: 1, .. }));
                *told.lock() += 1;
            }));
            scope
        });
        host.fails(1);
        host.fails(1);
        let _scope = asking.join().unwrap();
        assert_eq!(*times.lock(), 1);
    });
}

/// The scope whose turn it is fails before its thread has taken the turn. The next one's turn comes nevertheless.
#[test]
fn a_scope_that_has_failed_gives_its_turn_away() {
    check_within(2, || {
        let host = Host::new(never);
        let threads = ["a", "b"].map(|name| spawn(&host, move |host| host.begin(name, true).map(drop)));
        let told = host.told(2);
        let of = |name: &str| {
            let found = told.iter().find_map(|frame| match frame {
                ToHub::Begin { scope, entry: wire::Entry::Named(known), .. } if known == name => Some(*scope),
                _ => None,
            });
            found.expect("it was announced")
        };
        let failure = Failure::Aborted { host: 1, device: None, cause: "a test".to_owned() };
        host.world.local.take(ToHost::Begun { scope: of("a"), known: 1 });
        host.world.local.take(ToHost::Begun { scope: of("b"), known: 2 });
        host.world.local.take(ToHost::Failed { scope: of("a"), failure });
        let [a, b] = threads.map(|thread| thread.join().unwrap());
        assert!(a.is_ok() || matches!(a, Err(Error::AbortedByHost { host: 1, .. })), "{a:?}");
        b.unwrap();
    });
}

/// Scopes are announced in the order of their numbers: the hub tells their calls apart by it.
#[test]
fn scopes_are_announced_in_their_order() {
    check_within(3, || {
        let host = Host::new(never);
        let threads = [(); 2].map(|()| spawn(&host, |host| host.begin("a", false).map(|(scope, _)| scope).unwrap()));
        let _scopes = threads.map(|thread| thread.join().unwrap());
        let announced: Vec<_> =
            host.told(2).iter().map(|frame| matches!(frame, ToHub::Begin { scope: 1, .. })).collect();
        assert_eq!(announced, [true, false]);
    });
}

/// The connection breaks while one device waits and another sends: both have the loss, and so has a new scope.
#[test]
fn a_broken_connection_ends_every_wait() {
    check_within(2, || {
        let host = Host::new(|frame| matches!(frame, ToHub::Arrive(arrive) if arrive.device == 1));
        let (scope, _window) = host.begin("a", false).unwrap();
        let waiting = scope.clone();
        let waiting = spawn(&host, move |host| host.sum(&*waiting, 0));
        let sending = host.sum(&*scope, 1);
        for error in [waiting.join().unwrap(), sending, host.begin("b", true).map(|_| 0)] {
            assert!(matches!(error, Err(Error::HostLost { host: 0, .. })), "{error:?}");
        }
    });
}

/// A journal: the first reader takes the frames that follow from it.
#[derive(Default)]
struct Journal {
    frames: Mutex<Vec<ToHost>>,
    arrived: (Mutex<bool>, Condvar),
}

impl Near for Journal {
    fn append(&self, record: Record) -> Result<(), Record> {
        *self.arrived.0.lock() = matches!(record, Record::Frame(ToHub::Arrive(_)));
        self.arrived.1.notify_all();
        Ok(())
    }

    fn read(&self, _must: bool, take: &mut dyn FnMut(ToHost)) {
        let mut frames = self.frames.lock();
        frames.drain(..).for_each(take);
    }

    fn change(&self, _looking: isize, _waiting: isize) {}
}

/// A device waits, and either it or the thread that is woken reads of the commit.
#[test]
fn a_commit_in_the_journal_ends_a_wait() {
    check_within(3, || {
        let host = Host::new(never);
        let journal = Arc::new(Journal::default());
        host.world.local.meet_near(journal.clone());
        let (scope, _window) = host.begin("a", false).unwrap();
        let device = spawn(&host, move |host| {
            let sum = host.sum(&*scope, 0).unwrap();
            drop(scope);
            sum
        });
        let mut arrived = journal.arrived.0.lock();
        while !*arrived {
            journal.arrived.1.wait(&mut arrived);
        }
        drop(arrived);
        journal.frames.lock().push(ToHost::Commit { arrival: 1, known: 1, notes: vec![(1, Vec::new())], more: false });
        host.world.local.look(&*journal, true);
        assert_eq!(device.join().unwrap(), 1);
    });
}

/// The reader ends the cluster while a device is about to wait.
#[test]
fn the_end_of_the_cluster_ends_a_wait() {
    check_within(3, || {
        let host = Host::new(never);
        let (scope, _window) = host.begin("a", false).unwrap();
        let device = spawn(&host, move |host| host.sum(&*scope, 0));
        host.world.local.end_cluster(Failure::lost(1, "killed"));
        let error = device.join().unwrap();
        assert!(matches!(error, Err(Error::HostLost { host: 1, .. })), "{error:?}");
    });
}

#[test]
fn teeth() {
    bite("world");
}
