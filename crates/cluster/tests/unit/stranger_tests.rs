//! Peers that greet as they should and misbehave afterwards: half-open connections, garbage, frames of future versions;
//! and a process that is lost while the cluster connects.

use super::*;
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
};

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(1);

/// Frames that no process sends: a kind of the future, a body that is too short, one that is too long, a length
/// beyond all limits.
const STRANGE: [&[u8]; 5] =
    [&[1, 0, 0, 0, 99], &[0, 0, 0, 0], &[2, 0, 0, 0, 0, 9], &[4, 0, 0, 0, 6, 6, 6, 6], &[255, 255, 255, 255]];

/// A hub that welcomes a process and then does this.
fn process_of(hub: impl FnOnce(TcpStream) + Send, heartbeat_timeout: Duration, test: impl FnOnce(&Client)) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    thread::scope(|s| {
        s.spawn(move || {
            let stream = listener.accept().unwrap().0;
            greet::greet(&stream, greet::GREETING, b"x", |_, _, welcome| {
                welcome().map_err(|e| greet::Not::Stranger(e.to_string()))
            })
            .unwrap();
            stream.set_read_timeout(None).unwrap();
            hub(stream);
        });
        test(&Client::connect(at, 1, 2, b"x", heartbeat_timeout, LONG).unwrap());
    });
}

/// Reads until the other side ends the connection.
fn listen(mut stream: TcpStream) {
    while stream.read(&mut [0; 1024]).is_ok_and(|read| read > 0) {}
}

/// Rank 1 is welcomed and then does this; what rank 0 learns.
fn hub_against(process: impl FnOnce(&TcpStream), heartbeat_timeout: Duration) -> String {
    let limits = Limits { size: 2, heartbeat_timeout, connect_timeout: LONG };
    let server = Server::start((Ipv4Addr::LOCALHOST, 0).into(), limits, b"x".to_vec()).unwrap();
    let here = Client::connect(server.address, 0, 2, b"x", heartbeat_timeout, LONG).unwrap();
    let stream = TcpStream::connect(server.address).unwrap();
    greet::introduce(&stream, b"x", 1, 2, Instant::now() + LONG).unwrap();
    process(&stream);
    match here.local.get("never").unwrap_err() {
        Error::HostLost { host: 1, why, .. } => why,
        other => panic!("{other}"),
    }
}

#[test]
fn a_hub_that_sends_garbage_is_lost() {
    for bytes in STRANGE {
        process_of(
            |mut stream| {
                stream.write_all(bytes).unwrap();
                listen(stream);
            },
            LONG,
            |client| {
                let error = client.local.get("a").unwrap_err();
                let nonsense =
                    matches!(&error, Error::HostLost { host: 0, why, .. } if why.contains("it has sent nonsense"));
                assert!(nonsense, "{bytes:?}: {error:?}");
            },
        );
    }
}

/// Well-formed frames that make no sense here.
#[test]
fn a_commit_of_nothing_is_nonsense() {
    process_of(
        |mut stream| {
            let commit = |arrival| wire::ToHost::Commit { arrival, known: 1, notes: Vec::new(), more: false };
            // A scope that ended meanwhile is no mistake, an arrival that never was is one.
            wire::write(&mut stream, &wire::ToHost::Ended { scope: 7 }).unwrap();
            wire::write(&mut stream, &wire::ToHost::Value { key: "a".to_owned(), value: vec![1] }).unwrap();
            assert_eq!(stream.read(&mut [0; 1]).unwrap(), 1);
            wire::write(&mut stream, &commit(7)).unwrap();
            listen(stream);
        },
        LONG,
        |client| {
            assert_eq!(client.local.get("a").unwrap(), [1]);
            let error = client.local.get("b").unwrap_err();
            assert!(matches!(&error, Error::HostLost { host: 0, why, .. } if why.contains("nonsense")), "{error:?}");
        },
    );
}

#[test]
fn a_process_that_sends_garbage_is_lost_to_all() {
    for bytes in STRANGE {
        let why = hub_against(|mut stream| stream.write_all(bytes).unwrap(), LONG);
        assert!(why.contains("it has sent nonsense"), "{bytes:?}: {why}");
    }
}

/// The machine is gone without a word, so no packet ends the connection: also in the middle of a frame.
#[test]
fn half_open_connections_are_lost_by_silence() {
    thread::scope(|s| {
        for part in [&[][..], &[9, 0, 0, 0, 1]] {
            s.spawn(move || {
                let why = hub_against(|mut stream| stream.write_all(part).unwrap(), SHORT);
                assert!(why.contains("it has said nothing for 1s"), "{why}");
            });
            let hub = move |mut stream: TcpStream| {
                stream.write_all(part).unwrap();
                listen(stream);
            };
            s.spawn(move || {
                process_of(hub, SHORT, |client| {
                    let error = client.local.get("a").unwrap_err();
                    let silent = "it has said nothing for 1s";
                    assert!(matches!(&error, Error::HostLost { host: 0, why, .. } if why == silent), "{error:?}");
                });
            });
        }
    });
}

/// A process is lost after its welcome, before it has told its devices.
#[test]
fn who_is_lost_while_the_cluster_connects_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    drop(listener);
    let cluster = Cluster::tcp(&at.to_string(), 0, 2, "x").unwrap().heartbeat_timeout(LONG);
    thread::scope(|s| {
        s.spawn(|| {
            let stream = loop {
                match TcpStream::connect(at) {
                    // Before rank 0 listens, a connection may be to its own port.
                    Ok(stream) if stream.local_addr().unwrap() != at => break stream,
                    _ => thread::sleep(Duration::from_millis(1)),
                }
            };
            greet::introduce(&stream, b"x", 1, 2, Instant::now() + LONG).unwrap();
        });
        let error = cluster.join(1, None, |_| unreachable!("one has not told its devices")).map(drop).unwrap_err();
        assert!(matches!(error, Error::HostLost { host: 1, .. }), "{error:?}");
    });
}
