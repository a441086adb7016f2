//! Starts that go wrong: each wait ends within its limit, with the cause.

use super::*;
use crate::{
    TransportChoice,
    connect::{ClusterBuilder, Ends, machine},
    greet::Not,
    runtime::WallClock,
    wire::{ToHost, ToHub},
};
use gpu_pool::GpuPool;
use std::{
    io::{ErrorKind, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

const LONG: Duration = Duration::from_secs(60);
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);

fn rounds() -> usize {
    if std::env::var("GPU_POOL_LONG").is_ok_and(|long| long == "1") { 30 } else { 3 }
}

fn server(size: usize) -> Server {
    let limits = Limits { size, heartbeat_timeout: LONG, connect_timeout: LONG };
    Server::start((Ipv4Addr::LOCALHOST, 0).into(), limits, b"x".to_vec()).unwrap()
}

fn client(at: SocketAddr, host: usize, size: usize, connect_timeout: Duration) -> Result<Client> {
    Client::connect(at, host, size, b"x", LONG, connect_timeout)
}

/// A client of what does this.
fn client_of(rank_0: impl FnOnce(TcpListener) + Send, connect_timeout: Duration) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    thread::scope(|s| {
        s.spawn(move || rank_0(listener));
        client(at, 1, 2, connect_timeout).map(drop)
    })
}

fn welcome(listener: &TcpListener) -> TcpStream {
    let stream = listener.accept().unwrap().0;
    let join =
        |_, _, welcome: &mut dyn FnMut() -> std::io::Result<()>| welcome().map_err(|e| Not::Stranger(e.to_string()));
    greet::greet(&stream, greet::GREETING, b"x", join).unwrap();
    stream
}

fn text(result: Result<impl Sized>) -> String {
    match result.map(drop).unwrap_err() {
        Error::Cluster { op: "connect" | "transport" | "listen", why } => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn silent_strangers_crowd_nobody_out() {
    for _ in 0..rounds() {
        let server = server(2);
        let strangers: Vec<_> = (0..200).map(|_| TcpStream::connect(server.address).unwrap()).collect();
        let start = Instant::now();
        let here = client(server.address, 1, 2, LONG).unwrap();
        here.local.set("a", b"b").unwrap();
        assert_eq!(here.local.get("a").unwrap(), b"b");
        assert!(start.elapsed() < LONG / 6, "{:?} beside {}", start.elapsed(), strangers.len());
    }
}

/// Rank 0 is stopped between `listen` and `accept`, for longer than a greeting may take.
#[test]
fn a_slow_rank_0_is_waited_for() {
    let slow = |listener: TcpListener| {
        thread::sleep(Duration::from_secs(4));
        drop(welcome(&listener));
    };
    client_of(slow, LONG).unwrap();
}

#[test]
fn a_connection_that_ends_early_is_tried_again() {
    let busy = |listener: TcpListener| {
        (0..3).for_each(|_| drop(listener.accept().unwrap()));
        drop(welcome(&listener));
    };
    client_of(busy, LONG).unwrap();
}

#[test]
fn no_answer_is_told_with_the_time() {
    let (end, ends) = mpsc::channel::<()>();
    let silent = move |listener: TcpListener| {
        let _ = ends.recv();
        drop(listener);
    };
    thread::scope(|s| {
        s.spawn(move || {
            thread::sleep(HEARTBEAT_TIMEOUT);
            drop(end);
        });
        let why = text(client_of(silent, Duration::from_millis(200)));
        assert!(why.contains("given no answer for 200ms"), "{why}");
    });
}

/// Another secret, or another size: the others need not wait for that rank. Who comes later is told, too.
#[test]
fn a_refused_rank_is_told_to_all() {
    for _ in 0..rounds() {
        for (secret, size, says) in [(&b"y"[..], 3, "secret"), (b"x", 2, "one of 2 processes, rank 0 as one of 3")] {
            let server = server(3);
            let here = client(server.address, 0, 3, LONG).unwrap();
            assert!(Client::connect(server.address, 1, size, secret, LONG, LONG).is_err());
            let late = client(server.address, 2, 3, LONG).unwrap();
            for told in [here.local.get("never"), late.local.get("never")] {
                let why = text(told);
                assert!(why.contains("rank 1") && why.contains(says), "{why}");
            }
        }
    }
}

/// Once all are here, nobody can be refused at their expense.
#[test]
fn a_stranger_ends_no_complete_cluster() {
    let server = server(1);
    let here = client(server.address, 0, 1, LONG).unwrap();
    assert!(Client::connect(server.address, 0, 1, b"y", LONG, LONG).is_err());
    assert!(text(client(server.address, 0, 1, LONG)).contains("rank 0 already"));
    here.local.set("a", b"b").unwrap();
    assert_eq!(here.local.get("a").unwrap(), b"b");
}

/// The fastest of five trips counts: the first one's answer is late, and tells another time. Then rank 0 is silent.
#[test]
fn the_clock_of_rank_0_is_that_of_the_fastest_trip() {
    let (ahead, late) = (Duration::from_secs(3600), Duration::from_millis(100));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|s| {
        s.spawn(move || {
            let mut stream = welcome(&listener);
            stream.set_read_timeout(None).unwrap();
            let mut questions = 0;
            while let Ok(frame) = wire::read::<ToHub>(&mut stream, wire::MOST) {
                let ToHub::Clock { sent } = frame else { continue };
                questions += 1;
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                let (wall, pause) = if questions == 1 { (now, late) } else { (now + ahead, Duration::ZERO) };
                thread::sleep(pause);
                if questions <= 5 {
                    wire::write(&mut stream, &ToHost::Clock { sent, wall }).unwrap();
                }
            }
        });
        let here = client(address, 1, 2, LONG).unwrap();
        let WallClock { at, wall, error } = here.clock.ask().unwrap();
        assert!(error < late / 2, "{error:?}");
        let found = wall.duration_since(SystemTime::now() - at.elapsed()).unwrap();
        assert!(found.abs_diff(ahead) < ahead / 2, "{found:?}");
        assert!(here.clock.ask().is_none());
    });
}

/// A bit of a frame's length is flipped: what follows becomes a part of that frame.
#[test]
fn bytes_that_are_no_frame_are_no_sign_of_life() {
    for _ in 0..rounds() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        thread::scope(|s| {
            s.spawn(move || {
                let mut stream = welcome(&listener);
                stream.set_write_timeout(None).unwrap();
                let mut beat = wire::frame(&ToHost::Beat).unwrap();
                beat[1] ^= 0x80;
                while stream.write_all(&beat).is_ok() {
                    beat = wire::frame(&ToHost::Beat).unwrap();
                    thread::sleep(Duration::from_millis(5));
                }
            });
            let start = Instant::now();
            let here = Client::connect(at, 1, 2, b"x", HEARTBEAT_TIMEOUT, LONG).unwrap();
            let error = here.local.get("never").unwrap_err();
            assert!(matches!(&error, Error::HostLost { host: 0, why, .. } if why.contains("said nothing")), "{error}");
            assert!(start.elapsed() < LONG / 6, "{:?}", start.elapsed());
        });
    }
}

fn none() -> Result<(Transport, Ends)> {
    Ok((Transport::None(Error::Cluster { op: "transport", why: "a test".to_owned() }), Box::new(())))
}

fn tcp(port: u16, rank: usize, size: usize) -> Cluster {
    let cluster = Cluster::tcp(&format!("127.0.0.1:{port}"), rank, size, "x").unwrap();
    cluster.heartbeat_timeout(HEARTBEAT_TIMEOUT).connect_timeout(LONG).transport(TransportChoice::SharedMemory)
}

fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// All have connected, and one is busy with a library that does not load. The others wait for its values, or for its
/// end.
#[test]
fn a_process_that_hangs_in_its_start_is_named() {
    for round in 0..rounds() {
        let connect_timeout = Duration::from_secs(1);
        let (port, start) = (port(), Instant::now());
        let (end, ends) = mpsc::channel::<()>();
        let mut ends = Some(ends);
        thread::scope(|s| {
            let mut threads = Vec::new();
            for rank in 0..3 {
                let hangs = if rank == 1 { ends.take() } else { None };
                threads.push(s.spawn(move || {
                    let joined = tcp(port, rank, 3).connect_timeout(connect_timeout).join(1, None, |control| {
                        hangs.map(|ends| ends.recv());
                        if round % 2 == 0 {
                            control.gather("a", b"")?;
                        }
                        none()
                    });
                    joined.map(drop).unwrap_err()
                }));
            }
            let hung = threads.remove(1);
            for thread in threads {
                let error = thread.join().unwrap();
                let named =
                    matches!(&error, Error::HostTimeout { op, missing, .. } if op == "build" && *missing == [1]);
                assert!(named, "{error:?}");
            }
            assert!(start.elapsed() < connect_timeout + LONG / 6, "{:?}", start.elapsed());
            drop(end);
            let error = hung.join().unwrap();
            assert!(matches!(error, Error::HostTimeout { .. } | Error::HostLost { .. }), "{error:?}");
        });
    }
}

/// A process that takes part in the start, by hand.
struct ByHand {
    stream: TcpStream,
}

impl ByHand {
    fn new(port: u16) -> ByHand {
        let stream = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                // Before rank 0 listens, a connection may be to its own port.
                Ok(stream) if stream.local_addr().unwrap().port() != port => break stream,
                _ => thread::sleep(Duration::from_millis(1)),
            }
        };
        greet::introduce(&stream, b"x", 1, 2, Instant::now() + LONG).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        ByHand { stream }
    }

    fn set(&mut self, key: &str, value: &[u8]) {
        wire::write(&mut self.stream, &ToHub::Set { key: key.to_owned(), value: value.to_vec() }).unwrap();
    }

    fn get(&mut self, wanted: &str) -> Vec<u8> {
        self.get_unless_over(wanted).unwrap()
    }

    /// None if rank 0 has closed the connection.
    fn get_unless_over(&mut self, wanted: &str) -> Option<Vec<u8>> {
        wire::write(&mut self.stream, &ToHub::Get { key: wanted.to_owned(), waits: true }).ok()?;
        loop {
            if let ToHost::Value { key, value } = wire::read(&mut self.stream, wire::MOST).ok()?
                && key == wanted
            {
                return Some(value);
            }
        }
    }
}

/// How a process ends in its start.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Killed,
    Stopped,
    /// It has no free file descriptor, say.
    Fails,
}

/// At each step of a start over shared memory the other process ends: of one with rings for data, and of one that opens
/// only the journal.
#[cfg(target_os = "linux")]
#[test]
fn who_ends_at_a_step_of_the_start_is_named() {
    let steps = || (0..5).map(|step| (step, true)).chain((1..4).map(|step| (step, false)));
    // They wait most of the time.
    let lanes = rounds().min(5);
    let ends = [End::Killed, End::Stopped, End::Fails];
    thread::scope(|s| {
        for lane in 0..lanes {
            s.spawn(move || {
                let rounds = (lane..rounds()).step_by(lanes);
                for (step, rings) in rounds.flat_map(|_| steps()) {
                    ends.into_iter().for_each(|end| ends_at_a_step(7 + lane as u8, step, rings, end));
                }
            });
        }
    });
}

/// `identity`: the byte of the other process's identity.
#[cfg(target_os = "linux")]
fn ends_at_a_step(identity: u8, step: usize, rings: bool, end: End) {
    let port = port();
    let (tell, told) = mpsc::channel();
    thread::scope(|s| {
        s.spawn(move || {
            let mut other = ByHand::new(port);
            let listener = crate::socket::listen(&format!("gpu-pool/{}", format!("{identity:02x}").repeat(16))).ok();
            for at in 0..step {
                match at {
                    0 => other.set("devices/1", &1u64.to_le_bytes()),
                    1 if rings => other.set("machine/1", &machine().unwrap()),
                    2 if rings => other.set("transport/1", b"SharedMemory"),
                    1 => {
                        let identity = other.get("near/0");
                        other.set("near/1", &identity);
                    }
                    _ => other.set(if rings { "shm/rings/1" } else { "shm/near/1" }, &[identity; 32]),
                }
            }
            // Rank 0 has the devices of all, and goes on.
            if step > 0 {
                other.get(if rings { "machine/0" } else { "near/0" });
            }
            thread::sleep(Duration::from_millis(20));
            let start = Instant::now();
            match end {
                End::Killed => drop(other.stream),
                End::Fails => {
                    other.set("opened/1", b"no file is free");
                    // When rank 0 has read why, it may end at once.
                    other.get_unless_over("opened/1");
                    let _ = wire::write(&mut other.stream, &ToHub::Bye);
                    thread::sleep(Duration::from_millis(20));
                }
                End::Stopped => {
                    let _ = std::io::copy(&mut other.stream, &mut std::io::sink())
                        .map_err(|e| assert_ne!(e.kind(), ErrorKind::TimedOut));
                }
            }
            tell.send(start).unwrap();
            drop(listener);
        });
        let error = match rings {
            true => GpuPool::builder().host(1).cluster(tcp(port, 0, 2)).build().map(drop).unwrap_err(),
            false => tcp(port, 0, 2).join(1, None, |_| none()).map(drop).unwrap_err(),
        };
        let found = Instant::now();
        let right = match &error {
            Error::HostLost { host: 1, .. } => end != End::Fails || step == 0,
            Error::Cluster { op: "transport", why } => end == End::Fails && why.contains("no file is free"),
            _ => false,
        };
        assert!(right, "step {step}, {rings}, {end:?}: {error:?}");
        let start = told.recv_timeout(LONG).unwrap();
        assert!(
            found.saturating_duration_since(start) < 3 * HEARTBEAT_TIMEOUT,
            "step {step}, {rings}, {end:?}: {:?}",
            start.elapsed()
        );
    });
}
