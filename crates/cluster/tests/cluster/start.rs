//! Processes that are killed, stopped, or without a free file descriptor while the cluster starts: no other one waits
//! longer than its limit, and each is told who it was.

use crate::{
    fleet::{Fleet, HEARTBEAT_TIMEOUT, free_port, say},
    support::cases,
};
use gpu_pool::{Builder, Error};
use gpu_pool_cluster::{Cluster, prelude::*};
use std::{
    fs,
    time::{Duration, Instant},
};

/// Longer than a busy machine takes for a start.
const TIMEOUT: Duration = Duration::from_secs(8);

/// Builds, and meets the others until an error. `rank`: the process with so many free file descriptors.
pub fn child(builder: Builder, more: &[&str]) -> Result<(), Error> {
    let cluster = Cluster::from_env()?;
    if let [rank, free] = more
        && *rank == cluster.rank().to_string()
    {
        starve(free.parse().unwrap());
    }
    say("starts");
    let built = builder.cluster(cluster.connect_timeout(TIMEOUT)).build();
    let met: Result<Vec<()>, Error> = built.and_then(|pool| {
        say("met");
        if more.is_empty() {
            pool.run(|dev, _| {
                loop {
                    dev.world()?.barrier()?
                }
            })
        } else {
            pool.close().map(|()| vec![])
        }
    });
    let Err(error) = met else { return Ok(()) };
    match &error {
        Error::HostLost { host, why, .. } => say(format!("error lost {host}: {why}")),
        Error::HostTimeout { op, missing, .. } => say(format!("error missing {missing:?} in {op}")),
        other => say(format!("error other {other}")),
    }
    Err(error)
}

/// No more than so many files can be opened.
fn starve(free: u64) {
    let open = fs::read_dir("/proc/self/fd").unwrap().count() as u64 - 1;
    let limit = libc::rlimit { rlim_cur: open + free, rlim_max: open + free };
    // SAFETY: a call of the system with a valid pointer.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

/// Four at a time: they wait most of their time.
fn each<T: Copy + Sync>(all: &[T], run: impl Fn(T) + Sync) {
    for four in all.chunks(4) {
        std::thread::scope(|s| four.iter().for_each(|case| drop(s.spawn(|| run(*case)))));
    }
}

/// In the milliseconds of its start, here and there.
fn ends(signal: i32, victim: usize, words: &[&str]) {
    let rounds = Vec::from_iter(0..cases(3, 30));
    each(&rounds, |round| {
        let mut fleet = Fleet::start("start", &[1, 1, 1]);
        fleet.until(victim, "starts");
        std::thread::sleep(Duration::from_micros(round * 25_000 / cases(3, 30)));
        let start = Instant::now();
        fleet.signal(victim, signal);
        for rank in (0..3).filter(|rank| *rank != victim) {
            // On a busy machine a process may begin long after the victim has ended.
            let start = start.max(fleet.until(rank, "starts").0);
            let (at, error) = fleet.until(rank, "error ");
            println!("signal {signal} to {victim}: process {rank} after {:?}: {error}", at - start);
            assert!(words.iter().any(|word| error.contains(word)), "process {rank}: {error}");
            // It may have waited for the victim to come, and then for a sign of life.
            assert!(at - start < TIMEOUT + 2 * HEARTBEAT_TIMEOUT, "process {rank} after {:?}: {error}", at - start);
        }
    });
}

#[test]
fn a_process_is_killed_in_its_start() {
    ends(libc::SIGKILL, 1, &["lost 1: ", "missing [1] in connect"]);
}

#[test]
fn a_process_is_stopped_in_its_start() {
    ends(libc::SIGSTOP, 1, &["lost 1: ", "missing [1] in connect"]);
}

#[test]
fn the_first_process_is_killed_in_its_start() {
    ends(libc::SIGKILL, 0, &["lost 0: ", "rank 0 did not listen"]);
}

#[test]
fn the_first_process_is_stopped_in_its_start() {
    ends(libc::SIGSTOP, 0, &["lost 0: ", "rank 0 did not listen", "has given no answer for"]);
}

/// Wherever the descriptors end, that process says so, and the others name it.
#[test]
fn a_process_has_no_free_file_descriptor() {
    let all = Vec::from_iter(
        [1, 0].into_iter().flat_map(|victim| (0..26).step_by(cases(3, 1)).map(move |free| (victim, free))),
    );
    each(&all, |(victim, free): (usize, usize)| {
        let mut fleet = Fleet::start_with(&format!("start {victim} {free}"), &[1, 1, 1], free_port(), |_, _| {});
        // On a busy machine a process may begin late.
        let start = [0, 1, 2].map(|rank| fleet.until(rank, "starts").0).into_iter().max().unwrap();
        let said = [0, 1, 2].map(|rank| match fleet.ends(rank) {
            true => "met".to_owned(),
            false => fleet.until(rank, "error ").1,
        });
        println!("{victim} {free} after {:?}: {said:?}", start.elapsed());
        assert!(start.elapsed() < TIMEOUT + 2 * HEARTBEAT_TIMEOUT);
        if said.iter().all(|said| said == "met") {
            assert!(free > 0, "it had no descriptor");
            return;
        }
        assert!(said[victim].contains("os error 24") || said[victim].contains("descriptor"), "{said:?}");
        for rank in (0..3).filter(|rank| *rank != victim) {
            let named = match victim {
                0 => &["lost 0", "rank 0"][..],
                _ => &["lost 1", "rank 1 could not open it", "missing [1] in connect"],
            };
            assert!(named.iter().any(|name| said[rank].contains(name)), "{said:?}");
        }
    });
}
