//! Processes that do not find each other: another secret, version or size, a port that is taken, a connection that says
//! nothing, a process that does not come. Each one has a typed error, or the others come together in spite of it.

use crate::fleet::{Fleet, free_port, say};
use gpu_pool::{Builder, Error};
use gpu_pool_cluster::{Cluster, prelude::*};
use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// Comes together with the others, for no longer than so many milliseconds.
pub fn child(builder: Builder, connect_timeout: &str) -> Result<(), Error> {
    let start = Instant::now();
    let cluster = Cluster::from_env()?.connect_timeout(Duration::from_millis(connect_timeout.parse().unwrap()));
    let met = builder.cluster(cluster).build().and_then(|pool| {
        pool.run(|dev, _| dev.world()?.barrier())?;
        Ok(pool)
    });
    match met {
        Ok(pool) => {
            say(format!("met after {:?}", start.elapsed()));
            pool.close()
        }
        Err(error) => {
            match &error {
                Error::Cluster { op, why } => say(format!("error {op}: {why}")),
                Error::HostTimeout { missing, .. } => say(format!("error missing {missing:?}")),
                Error::HostLost { host, why, .. } => say(format!("error lost {host}: {why}")),
                other => say(format!("error other {other:?}")),
            }
            Err(error)
        }
    }
}

/// Every process fails, with an error that has these words.
#[track_caller]
fn fails(mut fleet: Fleet, words: &[&[&str]]) {
    for (rank, words) in words.iter().enumerate() {
        let (_, error) = fleet.until(rank, "error ");
        for word in *words {
            assert!(error.contains(word), "process {rank}: `{word}` is not in `{error}`");
        }
        assert!(!fleet.ends(rank), "process {rank} has ended with 0");
    }
}

/// For those that wait for the limit's end.
const SHORT: &str = "join 5000";
/// For those that end before it: on a busy machine processes come together late.
const LONG: &str = "join 60000";

#[test]
fn another_secret() {
    let other = |rank: usize, process: &mut Command| {
        process.env("GPU_POOL_SECRET", ["a secret", "a secret", "another secret"][rank]);
    };
    let fleet = Fleet::start_with(LONG, &[1, 1, 1], free_port(), other);
    let told = &["connect: a process was refused: rank 2: the secrets differ (GPU_POOL_SECRET)"][..];
    fails(fleet, &[told, told, &["connect: ", "GPU_POOL_SECRET"]]);
}

#[test]
fn another_size() {
    let other = |rank: usize, process: &mut Command| {
        if rank == 1 {
            process.env("GPU_POOL_SIZE", "3");
        }
    };
    let fleet = Fleet::start_with(LONG, &[1, 1], free_port(), other);
    let told = &["rank 1 was started as one of 3 processes, rank 0 as one of 2"][..];
    fails(fleet, &[told, told]);
}

#[test]
fn a_rank_that_another_process_has() {
    let same = |rank: usize, process: &mut Command| {
        process.env("GPU_POOL_RANK", rank.min(1).to_string());
    };
    let mut fleet = Fleet::start_with(LONG, &[1, 1, 1], free_port(), same);
    assert!(fleet.until(0, "error ").1.contains("another process has rank 1 already"));
    let errors = [1, 2].map(|rank| fleet.until(rank, "error ").1);
    assert!(errors.iter().any(|error| error.contains("another process has rank 1 already")), "{errors:?}");
}

#[test]
fn a_port_that_is_taken() {
    // It listens, and says nothing.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let fleet = Fleet::start_with(SHORT, &[1, 1], taken.local_addr().unwrap().port(), |_, _| {});
    fails(fleet, &[&["listen: ", "rank 0 cannot listen"], &["has given no answer for"]]);
}

#[test]
fn a_process_that_does_not_come() {
    let elsewhere = |rank: usize, process: &mut Command| {
        if rank == 1 {
            process.env("GPU_POOL_PORT", free_port().to_string());
        }
    };
    let fleet = Fleet::start_with(SHORT, &[1, 1], free_port(), elsewhere);
    fails(fleet, &[&["missing [1]"], &["rank 0 did not listen"]]);
}

/// A process's first word, and rank 0's answer, of another version of the protocol. Their layouts are the same in all.
fn of_version(version: u8, bytes: usize) -> Vec<u8> {
    let body = [&b"gpu-pool"[..], &[version], &vec![7; bytes]].concat();
    [&(body.len() as u32).to_le_bytes()[..], &body].concat()
}

#[test]
fn another_version_of_rank_0() {
    let rank_0 = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = rank_0.local_addr().unwrap().port();
    thread::spawn(move || {
        for connection in rank_0.incoming().flatten() {
            let mut connection: TcpStream = connection;
            let _ = connection.read_exact(&mut vec![0; of_version(1, 32).len()]);
            let _ = connection.write_all(&of_version(99, 64));
            thread::sleep(Duration::from_secs(1));
        }
    });
    // The other process finds the port taken, and is of no interest.
    let mut fleet = Fleet::start_with(LONG, &[1, 1], port, |_, _| {});
    let (_, error) = fleet.until(1, "error ");
    assert!(error.contains("rank 0 speaks version 99 of the protocol, rank 1 version 7"), "{error}");
    assert!(!fleet.ends(1));
}

/// Connections that say nothing, nonsense, or another version's words keep nobody from coming together.
#[test]
fn half_open_connections_and_strangers() {
    let port = free_port();
    let held = thread::spawn(move || {
        let start = Instant::now();
        let mut open = Vec::new();
        while open.len() < 30 && start.elapsed() < Duration::from_secs(20) {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                Ok(mut stream) => {
                    let _ = match open.len() % 3 {
                        0 => Ok(()),
                        1 => stream.write_all(&of_version(99, 32)),
                        _ => stream.write_all(b"GET / HTTP/1.1\r\n\r\n"),
                    };
                    open.push(stream);
                }
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
        open
    });
    let said = Fleet::start_with(LONG, &[1, 2, 1], port, |_, _| {}).said();
    assert!(said.iter().all(|said| matches!(&said[..], [line] if line.starts_with("met after"))), "{said:?}");
    println!("{said:?}, beside {} strangers", held.join().unwrap().len());
}
