//! Over real connections: who is refused, and who is lost. Torch's `test_store.py` and its rendezvous errors are the
//! model of some of these.

use super::*;
use crate::{
    runtime::processes::Place,
    traits::{Arrival, Entry, WorldScope},
};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    panic::Location,
    process::{Child, Command, Stdio},
    thread,
};

const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);

/// A port that nobody listens at, now.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn cluster(port: u16, rank: usize, size: usize, secret: &str) -> Cluster {
    let address = format!("127.0.0.1:{port}");
    Cluster::tcp(&address, rank, size, secret)
        .unwrap()
        .heartbeat_timeout(HEARTBEAT_TIMEOUT)
        .connect_timeout(Duration::from_secs(20))
}

fn none() -> Result<(Transport, Ends)> {
    Ok((Transport::None(Error::Cluster { op: "transport", why: "a test".to_owned() }), Box::new(())))
}

fn connect(cluster: &Cluster, devices: usize) -> Result<Arc<dyn World>> {
    cluster.join(devices, None, |_| none())
}

/// Processes of one device each, as threads.
fn worlds(size: usize) -> Vec<Arc<dyn World>> {
    let port = port();
    thread::scope(|s| {
        let threads: Vec<_> =
            (0..size).map(|rank| s.spawn(move || connect(&cluster(port, rank, size, "x"), 1).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn begin(world: &Arc<dyn World>, name: &str, deadline: Duration) -> Result<Arc<dyn WorldScope>> {
    world.begin(Entry::Named(name), deadline, Arc::new(|| 0), Location::caller()).map(|(scope, _)| scope)
}

fn meet(scope: &dyn WorldScope, host: usize, members: &[Place], number: u64, call: &str) -> Result<u64> {
    let place = Place { host, device: 0 };
    let site = Location::caller();
    let note = vec![host as u8];
    let commit = scope.meet(Arrival { members, number, place, call, site, leads: true, proxied: false, note })?;
    let expected: Vec<_> = members.iter().map(|place| vec![place.host as u8]).collect();
    assert_eq!(commit.notes, expected);
    Ok(commit.numbers[0])
}

const ALL: [Place; 2] = [Place { host: 0, device: 0 }, Place { host: 1, device: 0 }];
const LONG: Duration = Duration::from_secs(60);

fn each<R: Send>(worlds: &[Arc<dyn World>], f: impl Fn(usize, &Arc<dyn World>) -> R + Sync) -> Vec<R> {
    thread::scope(|s| {
        let f = &f;
        let threads: Vec<_> = worlds.iter().enumerate().map(|(host, world)| s.spawn(move || f(host, world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The links are measured by a pool of the process alone: it does not join twice.
#[test]
fn a_pool_that_measures_its_devices_joins_once() {
    let cluster = cluster(port(), 0, 1, "x");
    use crate::prelude::*;
    let pool = gpu_pool::GpuPool::builder().host(2).weights_measured().cluster(cluster).build().unwrap();
    let lens = pool.run(|dev, shard| dev.world()?.exchange_serde(&shard.range(1000).len())).unwrap();
    assert!(lens.iter().all(|lens| lens.iter().sum::<usize>() == 1000), "{lens:?}");
}

#[test]
fn processes_meet_and_a_failed_scope_leaves_the_next_one() {
    let worlds = worlds(2);
    let numbers = each(&worlds, |host, world| {
        let scope = begin(world, "a", LONG).unwrap();
        let numbers: Vec<_> = (1..20).map(|n| meet(&*scope, host, &ALL, n, "sum").unwrap()).collect();
        scope.end().unwrap();
        let error = begin(world, "a", LONG).and_then(|scope| match host {
            // The failure may come before this, so that the scope does not even begin here.
            0 => meet(&*scope, host, &ALL, 1, "sum").map(drop),
            _ => {
                scope.fail(Some(0), &Error::custom("the cause"));
                scope.end()
            }
        });
        assert!(
            matches!(&error, Err(Error::AbortedByHost { host: 1, device: Some(0), cause }) if cause == "the cause"),
            "{error:?}"
        );
        let scope = begin(world, "a", LONG).unwrap();
        meet(&*scope, host, &ALL, 1, "sum").unwrap();
        scope.end().unwrap();
        numbers
    });
    assert_eq!(numbers[0], numbers[1]);
}

#[test]
fn mistakes_are_found_at_once_and_name_both() {
    let worlds = worlds(2);
    let what = |errors: Vec<Result<u64>>, expected: &str| {
        for error in errors {
            let found =
                matches!(&error, Err(Error::WorldMismatch { what, a, b, .. }) if *what == expected && a.host != b.host);
            assert!(found, "{expected}: {error:?}");
        }
    };
    let calls = ["sum", "maximum"];
    what(each(&worlds, |host, world| meet(&*begin(world, "a", LONG)?, host, &ALL, 1, calls[host])), "call");
    // Two groups of the same devices, in different orders.
    let turned = [ALL[1], ALL[0]];
    let groups = [&ALL, &turned];
    what(each(&worlds, |host, world| meet(&*begin(world, "a", LONG)?, host, groups[host], 1, "sum")), "group");
    what(
        each(&worlds, |host, world| {
            let scope = begin(world, "a", LONG)?;
            if host == 0 { scope.end().map(|()| 0) } else { meet(&*scope, host, &ALL, 1, "sum") }
        }),
        "participation",
    );
}

#[test]
fn who_does_not_get_on_is_named_to_all() {
    let worlds = worlds(2);
    let errors = each(&worlds, |host, world| {
        let scope = begin(world, "a", Duration::from_millis(200))?;
        if host == 0 {
            return meet(&*scope, host, &ALL, 1, "sum");
        }
        let (tell, told) = std::sync::mpsc::channel();
        scope.when_failed(Box::new(move |error| tell.send(error).unwrap()));
        Err(told.recv().unwrap())
    });
    for error in errors {
        assert!(matches!(&error, Err(Error::HostTimeout { missing, .. }) if missing == &[1]), "{error:?}");
    }
}

#[track_caller]
fn refused(result: Result<Arc<dyn World>>, says: &str) {
    let error = result.map(drop).unwrap_err();
    assert!(matches!(error, Error::Cluster { .. }) && error.to_string().contains(says), "{error}, not {says}");
}

#[test]
fn who_does_not_belong_here_is_refused() {
    let port = port();
    let limits = Limits { size: 2, heartbeat_timeout: HEARTBEAT_TIMEOUT, connect_timeout: LONG };
    let server = Server::start(([127, 0, 0, 1], port).into(), limits, b"x".to_vec()).unwrap();
    let at = server.address;
    let one = Client::connect(at, 1, 2, b"x", HEARTBEAT_TIMEOUT, LONG).unwrap();
    let _rank_0 = Client::connect(at, 0, 2, b"x", HEARTBEAT_TIMEOUT, LONG).unwrap();
    refused(connect(&cluster(port, 1, 2, "y"), 1), "does not know this process's secret");
    refused(connect(&cluster(port, 1, 3, "x"), 1), "one of 3 processes");
    refused(connect(&cluster(port, 0, 2, "x"), 1), "cannot listen");
    let again = Client::connect(at, 1, 2, b"x", HEARTBEAT_TIMEOUT, LONG).map(drop).unwrap_err().to_string();
    assert!(again.contains("rank 1 already"), "{again}");
    let beyond = Client::connect(at, 2, 2, b"x", HEARTBEAT_TIMEOUT, LONG).map(drop).unwrap_err().to_string();
    assert!(beyond.contains("no rank 2"), "{beyond}");
    // Garbage, an oversized frame, and strangers who say nothing: the others get on.
    let silent: Vec<_> = (0..10).map(|_| TcpStream::connect(at).unwrap()).collect();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[255; 64], &[0; 64]] {
        let mut stranger = TcpStream::connect(at).unwrap();
        stranger.write_all(bytes).unwrap();
        assert!(!matches!(stranger.read(&mut [0; 1]), Ok(1)), "it was answered");
    }
    one.local.set("a", b"b").unwrap();
    assert_eq!(one.local.get("a").unwrap(), b"b");
    drop(silent);
}

#[test]
fn without_a_secret_only_on_loopback() {
    let open = Cluster::tcp("0.0.0.0:0", 0, 1, "").unwrap();
    refused(connect(&open, 1), "GPU_POOL_SECRET");
    assert_eq!(connect(&cluster(port(), 0, 1, ""), 3).unwrap().devices(), [3]);
}

#[test]
fn a_port_is_free_when_its_cluster_has_ended() {
    let port = port();
    (0..100).for_each(|_| drop(connect(&cluster(port, 0, 1, ""), 1).unwrap()));
}

#[test]
fn who_does_not_come_is_named() {
    // Rank 0 has to connect to itself within it.
    let alone = cluster(port(), 0, 2, "x").connect_timeout(Duration::from_secs(2));
    let error = connect(&alone, 1).map(drop).unwrap_err();
    assert!(matches!(&error, Error::HostTimeout { missing, .. } if missing == &[1]), "{error}");
    refused(connect(&cluster(port(), 1, 2, "x").connect_timeout(Duration::from_millis(100)), 1), "did not listen");
}

#[test]
fn a_name_that_nobody_knows_is_waited_for_and_told() {
    let unknown = Cluster::tcp("no-such-machine.invalid:29600", 1, 2, "x").unwrap();
    refused(
        connect(&unknown.connect_timeout(Duration::from_millis(150)), 1),
        "`no-such-machine.invalid` of rank 0's machine",
    );
}

#[test]
fn a_transport_that_one_cannot_open_is_an_error_of_all() {
    let port = port();
    let errors: Vec<_> = thread::scope(|s| {
        let open = |rank: usize| {
            let why = || Error::Cluster { op: "transport", why: "install it".to_owned() };
            cluster(port, rank, 2, "x").join(1, None, |_| if rank == 1 { Err(why()) } else { none() }).map(drop)
        };
        let threads: Vec<_> = (0..2).map(|rank| s.spawn(move || open(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap_err().to_string()).collect()
    });
    assert!(errors.iter().all(|error| error.contains("install it")), "{errors:?}");
    assert!(errors[0].contains("rank 1"), "{errors:?}");
}

/// How often a process is killed or stopped.
fn rounds() -> usize {
    if std::env::var("GPU_POOL_LONG").is_ok_and(|long| long == "1") { 30 } else { 3 }
}

struct Guarded(Child);

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The process that is killed or stopped.
#[test]
fn child() {
    let Ok(port) = std::env::var("GPU_POOL_TEST_TASK") else { return };
    let Ok(port) = port.parse() else { return };
    let world = connect(&cluster(port, 1, 2, "x"), 1).unwrap();
    let scope = begin(&world, "a", LONG).unwrap();
    let _ = (1..).try_for_each(|n| meet(&*scope, 1, &ALL, n, "sum").map(drop));
}

#[cfg(unix)]
#[test]
fn a_killed_and_a_stopped_process_are_lost() {
    for (signal, limit) in [(libc::SIGKILL, HEARTBEAT_TIMEOUT), (libc::SIGSTOP, HEARTBEAT_TIMEOUT * 2)] {
        for _ in 0..rounds() {
            let port = port();
            let name = concat!(module_path!(), "::child");
            let name = name.split_once("::").unwrap().1;
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([name, "--exact"]).env("GPU_POOL_TEST_TASK", port.to_string()).stdout(Stdio::null());
            let child = Guarded(command.spawn().unwrap());
            let world = connect(&cluster(port, 0, 2, "x"), 1).unwrap();
            let scope = begin(&world, "a", LONG).unwrap();
            (1..50).try_for_each(|n| meet(&*scope, 0, &ALL, n, "sum").map(drop)).unwrap();
            // SAFETY: the child is this process's own and has not been waited for.
            assert_eq!(unsafe { libc::kill(child.0.id() as i32, signal) }, 0);
            let start = Instant::now();
            let error = (50..).find_map(|n| meet(&*scope, 0, &ALL, n, "sum").err()).unwrap();
            assert!(matches!(error, Error::HostLost { host: 1, .. }), "{error}");
            println!("signal {signal}: known after {:?} of {limit:?}", start.elapsed());
            assert!(matches!(world.check(), Err(Error::HostLost { host: 1, .. })));
        }
    }
}

#[test]
fn who_leaves_is_missed_only_when_it_is_needed() {
    let mut worlds = worlds(2);
    let here = worlds.remove(0);
    drop(worlds);
    here.check().unwrap();
    let error = begin(&here, "a", LONG).map(drop).unwrap_err();
    assert!(matches!(&error, Error::HostLost { host: 1, why, .. } if why.contains("left")), "{error}");
}
