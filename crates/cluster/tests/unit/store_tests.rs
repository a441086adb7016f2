//! What processes tell each other while a cluster connects. Ported from PyTorch's `test/distributed/test_store.py`, as
//! far as this store has the operation; each test names its model.

use super::*;
use std::{net::TcpListener, thread};

const LONG: Duration = Duration::from_secs(60);

fn client(at: SocketAddr, host: usize, size: usize) -> Client {
    Client::connect(at, host, size, b"x", LONG, LONG).unwrap()
}

/// A server, and the controls of its processes.
fn controls(size: usize) -> (Server, Vec<Client>, Vec<Control>) {
    let limits = Limits { size, heartbeat_timeout: LONG, connect_timeout: LONG };
    let server = Server::start((Ipv4Addr::LOCALHOST, 0).into(), limits, b"x".to_vec()).unwrap();
    let clients: Vec<_> = (0..size).map(|host| client(server.address, host, size)).collect();
    let devices: Arc<[usize]> = vec![1; size].into();
    let control =
        |(host, client): (usize, &Client)| Control { local: client.local.clone(), host, devices: devices.clone() };
    let controls = clients.iter().enumerate().map(control).collect();
    (server, clients, controls)
}

/// `StoreTestBase.test_set_get`, and `RendezvousFileTest.test_nominal` ("cross check with get").
#[test]
fn each_process_gets_what_any_has_set() {
    let (_server, _clients, controls) = controls(2);
    let values: [(&str, &[u8]); 5] =
        [("key0", b"value0"), ("-key3", b"7"), ("", b"no name"), ("no value", b""), ("ä/\n\0", &[0, 255, 10])];
    for (at, (key, value)) in values.into_iter().enumerate() {
        controls[at % 2].local.set(key, value).unwrap();
    }
    for (key, value) in values {
        assert!(controls.iter().all(|control| control.local.get(key).unwrap() == value), "{key:?}");
    }
}

/// `StoreTestBase.test_simple_wait` and `TestMultiThreadedWait.test_wait`: who asks too early waits; several threads
/// may.
#[test]
fn who_asks_early_waits() {
    let (_server, _clients, controls) = controls(2);
    thread::scope(|s| {
        let waiting: Vec<_> = (0..8)
            .map(|at| {
                let control = &controls[at % 2];
                s.spawn(move || control.local.get(["good", "other"][at / 4]).unwrap())
            })
            .collect();
        controls[1].local.set("bad", b"").unwrap();
        controls[0].local.set("good", b"1").unwrap();
        controls[1].local.set("other", b"2").unwrap();
        let got: Vec<_> = waiting.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(got, [b"1", b"1", b"1", b"1", b"2", b"2", b"2", b"2"]);
    });
}

/// `TCPStoreTest.test_multi_worker_with_fixed_world_size`.
#[test]
fn five_workers() {
    let (_server, _clients, controls) = controls(5);
    controls[0].local.set("key", b"value").unwrap();
    for control in &controls {
        assert_eq!(control.local.get("key").unwrap(), b"value");
        control.local.set(&format!("new_key{}", control.host), &[control.host as u8]).unwrap();
    }
    for host in 0..5u8 {
        assert_eq!(controls[0].local.get(&format!("new_key{host}")).unwrap(), [host]);
    }
    let all: [&[u8]; 5] = [&[], &[1], &[2; 2], &[3; 3], &[4; 4]];
    thread::scope(|s| {
        for control in &controls {
            s.spawn(move || assert_eq!(control.gather("all", all[control.host]).unwrap(), all));
        }
    });
}

/// `TCPStoreTest.test_address_already_in_use`: also if it is no hub that listens there.
#[test]
fn an_address_in_use_is_named() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = other.local_addr().unwrap();
    let limits = Limits { size: 1, heartbeat_timeout: LONG, connect_timeout: LONG };
    let error = Server::start(at, limits, b"x".to_vec()).map(drop).unwrap_err().to_string();
    assert!(error.contains(&format!("cannot listen at {at}")), "{error}");
}

/// `RendezvousTCPTest.test_dns_timeout`: a machine that nobody knows.
#[test]
fn a_machine_that_nobody_knows_is_named() {
    let cluster = Cluster::tcp("no..name:29600", 1, 2, "x").unwrap().connect_timeout(Duration::from_millis(10));
    let error = cluster.join(1, None, |_| unreachable!("it has connected")).map(drop).unwrap_err();
    assert!(matches!(error, Error::Cluster { op: "connect", .. }), "{error:?}");
    assert!(error.to_string().contains("no..name"), "{error}");
}

/// A value that is too long is refused here; the cluster goes on.
#[test]
fn values_have_a_limit() {
    let (_server, _clients, controls) = controls(1);
    let error = controls[0].local.set("long", &vec![0; wire::MOST_VALUE + 1]).unwrap_err();
    assert!(matches!(error, Error::Cluster { .. }), "{error:?}");
    let most = vec![3; wire::MOST_VALUE];
    controls[0].local.set("long", &most).unwrap();
    assert_eq!(controls[0].local.get("long").unwrap(), most);
}

/// Rank 0 goes while others wait for a value.
#[test]
fn without_rank_0_a_wait_ends() {
    let (server, _clients, controls) = controls(2);
    thread::scope(|s| {
        let waiting = s.spawn(|| controls[1].local.get("never"));
        drop(server);
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::HostLost { host: 0, .. }), "{error:?}");
    });
    assert!(matches!(controls[1].check(), Err(Error::HostLost { host: 0, .. })));
    assert!(matches!(controls[1].local.set("a", b""), Err(Error::HostLost { host: 0, .. })));
}
