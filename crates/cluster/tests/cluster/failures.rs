//! A process that is lost, late or wrong: every other one has a typed error that names it, its pool still does local
//! work, and its `main` ends with a code that is not zero.

use crate::{
    fleet::{Fleet, HEARTBEAT_TIMEOUT, free_port, pool, say},
    gradients,
    support::{cases, until},
};
use gpu_pool::{Builder, Device, Error, GpuPool, Group, ReduceOp};
use std::{fs, process, thread, time::Duration};

/// Devices of the processes.
const SHAPE: [usize; 3] = [2, 1, 2];

/// What a process does, and on which one.
pub fn child(builder: Builder, what: &str, more: &[&str]) -> Result<(), Error> {
    let chosen = |rank: usize| more.first().is_some_and(|text| *text == rank.to_string());
    let builder = if what == "late" { builder.timeout(Duration::from_secs(1)) } else { builder };
    let pool = pool(builder).inspect_err(|error| say(told(error)))?;
    if what == "left" && chosen(1) && own(&pool)? == 1 {
        return pool.close();
    }
    let found = pool.run(|dev, _| {
        let world = dev.world()?;
        let (host, device) = world.place(world.rank());
        let me = (host, device) == (1, 0);
        // A signal may come between the pieces of a large buffer.
        let mut x = dev.upload(&vec![1.0f32; if what == "forever" { 600_000 } else { 50_000 }])?;
        world.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.synchronize()?;
        if device == 0 {
            say(format!("ready {host} {}", process::id()));
        }
        match what {
            "forever" => loop {
                world.all_reduce(&mut x, ReduceOp::Max)?;
            },
            "training" => loop {
                let mut exchange = gradients::exchange::<f32>(dev, ReduceOp::Avg)?;
                gradients::pass(dev, &mut exchange, |x| x)?;
                exchange.finish(dev)?;
            },
            "dropped" => gradients::pass(dev, &mut gradients::exchange::<f32>(dev, ReduceOp::Avg)?, |x| x)?,
            "travelling" if me => {
                gradients::pass(dev, &mut gradients::exchange::<f32>(dev, ReduceOp::Avg)?, |x| x)?;
                return Err(Error::custom("a closure has had enough"));
            }
            "travelling" => {
                let mut exchange = gradients::exchange::<f32>(dev, ReduceOp::Avg)?;
                gradients::pass(dev, &mut exchange, |x| x)?;
                exchange.finish(dev)?;
            }
            "exit" if me => process::exit(0),
            "slow" if me => thread::sleep(HEARTBEAT_TIMEOUT * 3 / 2),
            "late" if me => thread::sleep(Duration::from_secs(3)),
            "memory" if me => drop(dev.zeros::<f32>(1 << 44)?),
            "error" if me => return Err(Error::custom("a closure has had enough")),
            "rude" if me => return Err(Error::custom(Rude)),
            "panic" if me => panic!("a closure has panicked"),
            "skips" if me => return Ok(()),
            "mismatch" if me => world.all_reduce(&mut dev.zeros::<f32>(11)?, ReduceOp::Sum)?,
            "crossed" => crossed(dev, &world, host == 1)?,
            _ => {}
        }
        world.all_reduce(&mut x, ReduceOp::Sum)?;
        world.barrier()
    });
    match &found {
        Ok(_) => say("fine"),
        Err(error) => say(told(error)),
    }
    let proxies = || {
        let threads = fs::read_dir("/proc/self/task").expect("this is Linux").flatten();
        let names = threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
        names.filter(|name| name.trim() == "gpu-pool:carry").count()
    };
    // A thread is on the system's list until shortly after its join.
    let _ = until("proxies end", || proxies() == 0);
    say(format!("proxies left {}", proxies()));
    let local = pool.run(|dev, _| {
        let mut x = dev.upload(&[dev.rank() as f32 + 1.0])?;
        dev.all_reduce(&mut x, ReduceOp::Sum)?;
        dev.download(&x)
    })?;
    let n = pool.device_count() as f32;
    say(format!("local work {}", local.iter().all(|x| *x == [n * (n + 1.0) / 2.0])));
    // A late process may miss some deadlines more.
    let mut again = pool.run(|dev, _| dev.world()?.barrier());
    for _ in 0..20 {
        again = again.or_else(|_| pool.run(|dev, _| dev.world()?.barrier()));
    }
    match again {
        Ok(_) => say("cluster works"),
        Err(error) => say(format!("cluster is over: {error}")),
    }
    found?;
    pool.close()
}

/// An error that cannot be shown.
#[derive(Debug)]
struct Rude;

impl std::fmt::Display for Rude {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("a panic in Display")
    }
}

impl std::error::Error for Rude {}

/// The number of this process.
fn own(pool: &GpuPool) -> Result<usize, Error> {
    Ok(pool.run(|dev, _| dev.world().map(|world| world.place(world.rank()).0))?[0])
}

/// Two groups of the same devices, by the processes in different orders.
fn crossed(dev: &Device, world: &Group<'_>, other_way: bool) -> Result<(), Error> {
    let all: Vec<usize> = (0..world.count()).collect();
    let turned: Vec<usize> = (0..world.count()).rev().collect();
    let (first, second) = if other_way { (&turned, &all) } else { (&all, &turned) };
    let mut x = dev.zeros::<f32>(10)?;
    world.group(first)?.all_reduce(&mut x, ReduceOp::Sum)?;
    world.group(second)?.all_reduce(&mut x, ReduceOp::Sum)
}

/// The error, in few words, for the test.
fn told(error: &Error) -> String {
    match error {
        Error::HostLost { host, why, .. } => format!("error lost {host}: {why}"),
        Error::AbortedByHost { host, device, cause } => format!("error aborted by {host} {device:?}: {cause}"),
        Error::WorldMismatch { what, a, b } => format!("error mismatch {what} {} {}: {error}", a.host, b.host),
        Error::HostTimeout { missing, .. } => format!("error late {missing:?}: {error}"),
        Error::Cluster { op, why } => format!("error cluster {op}: {why}"),
        Error::Custom { .. } | Error::Panicked { .. } | Error::OutOfMemory { .. } => format!("error own: {error}"),
        other => format!("error other {other:?}"),
    }
}

/// Every process but `gone` says an error that begins so, does local work, and fails. `over`: the cluster is.
#[track_caller]
fn survivors(mut fleet: Fleet, gone: Option<usize>, over: bool, expected: impl Fn(usize) -> String) {
    let all = (0..SHAPE.len()).filter(|rank| Some(*rank) != gone);
    for rank in all {
        let expected = expected(rank);
        let (_, error) = fleet.until(rank, "error ");
        assert!(error.starts_with(&expected), "process {rank}: `{error}`, not `{expected}`");
        assert_eq!(fleet.until(rank, "proxies left ").1, "0");
        assert_eq!(fleet.until(rank, "local work ").1, "true");
        let (_, cluster) = fleet.until(rank, "cluster ");
        assert!(cluster.starts_with(if over { "is over" } else { "works" }), "process {rank}: {cluster}");
        assert!(!fleet.ends(rank), "process {rank} has ended with 0");
    }
}

/// Two times of three the processes meet as those of several machines do.
fn start(what: &str, round: usize) -> Fleet {
    Fleet::start_with(what, &SHAPE, free_port(), |_, process| {
        process.env("GPU_POOL_MEETING", ["auto", "mesh", "hub"][round % 3]);
    })
}

/// A signal in mid-collective. The survivors' times until they knew.
fn lost_by(what: &str, signal: i32, victim: usize, why: &str) {
    for round in 0..cases(3, 30) {
        let mut fleet = start(what, round);
        (0..SHAPE.len()).for_each(|rank| drop(fleet.until(rank, "ready")));
        let start = std::time::Instant::now();
        fleet.signal(victim, signal);
        let others = (0..SHAPE.len()).filter(|rank| *rank != victim);
        let times: Vec<_> = others.map(|rank| fleet.until(rank, "error ").0 - start).collect();
        println!("signal {signal} to process {victim}: known after {times:?}");
        survivors(fleet, Some(victim), true, |_| format!("lost {victim}: {why}"));
    }
}

#[test]
fn a_process_is_killed() {
    lost_by("forever", libc::SIGKILL, 1, "its connection");
    lost_by("forever", libc::SIGKILL, 0, "");
}

/// While buckets of gradients travel.
#[test]
fn a_process_is_killed_in_mid_step() {
    lost_by("training", libc::SIGKILL, 2, "its connection");
    lost_by("training", libc::SIGKILL, 0, "");
}

/// An exchange is dropped in mid-step: its buckets arrive, and nobody minds.
#[test]
fn an_exchange_is_dropped_in_mid_step() {
    for said in Fleet::start("dropped", &SHAPE).said() {
        assert!(said.iter().any(|line| line == "fine"), "{said:?}");
        assert!(said.iter().any(|line| line == "cluster works"), "{said:?}");
    }
}

#[test]
fn a_process_is_stopped() {
    lost_by("forever", libc::SIGSTOP, 2, "it has said nothing for 2s");
}

/// When it continues, it says that it was stopped itself.
#[test]
fn a_stopped_process_that_wakes_knows_it() {
    for victim in [0, 1] {
        for round in 0..cases(3, 30) {
            let mut fleet = start("forever", round);
            (0..SHAPE.len()).for_each(|rank| drop(fleet.until(rank, "ready")));
            fleet.signal(victim, libc::SIGSTOP);
            let others = (0..SHAPE.len()).filter(|rank| *rank != victim);
            others.for_each(|rank| assert!(fleet.until(rank, "error ").1.starts_with(&format!("lost {victim}: "))));
            fleet.signal(victim, libc::SIGCONT);
            let (_, error) = fleet.until(victim, "error ");
            let expected = format!("lost {victim}: this is that process, which was stopped");
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}

#[test]
fn the_first_process_is_stopped() {
    lost_by("forever", libc::SIGSTOP, 0, "");
}

#[test]
fn a_process_exits_within_a_scope() {
    for round in 0..cases(3, 30) {
        survivors(start("exit", round), Some(1), true, |_| "lost 1: its connection".to_owned());
    }
}

#[test]
fn a_process_leaves_before_the_others() {
    for round in 0..cases(3, 30) {
        survivors(start("left 1", round), Some(1), true, |_| "lost 1: it has left".to_owned());
    }
}

/// It beats, so it is not lost; and nobody has waited for the deadline.
#[test]
fn a_slow_process_is_waited_for() {
    for said in Fleet::start("slow", &SHAPE).said() {
        assert!(said.iter().any(|line| line == "fine"), "{said:?}");
    }
}

#[test]
fn a_process_that_makes_no_progress_is_named() {
    for round in 0..cases(3, 30) {
        survivors(start("late", round), None, false, |_| "late [1]".to_owned());
    }
}

/// The records of all processes name it, and that of the process that hangs has its last words (pytorch#196968).
#[test]
fn a_hang_is_recorded_by_all_processes() {
    let folder = std::env::temp_dir().join(format!("gpu-pool-records-{}", process::id()));
    fs::create_dir_all(&folder).unwrap();
    let fleet = Fleet::start_with("late", &SHAPE, free_port(), |_, process| {
        process.env("GPU_POOL_FLIGHT_RECORD", &folder);
    });
    survivors(fleet, None, false, |_| "late [1]".to_owned());
    let files: Vec<_> = fs::read_dir(&folder).unwrap().flatten().map(|file| file.path()).collect();
    for rank in 0..SHAPE.len() {
        // Process 1 may have found by itself, earlier, that it makes no progress.
        let start = format!("gpu-pool-process{rank}-");
        let is_own = |file: &&std::path::PathBuf| {
            let name = file.file_name().unwrap().to_string_lossy();
            name.starts_with(&start) && name.ends_with(".txt")
        };
        let own = files.iter().filter(is_own);
        let texts: Vec<_> = own.map(|file| fs::read_to_string(file).unwrap()).collect();
        let told = format!("(process {rank} of the cluster): no progress of other hosts");
        // There are others, of the barriers behind.
        let is_first = |text: &&String| text.contains(&told) && text.contains(" in all_reduce(");
        let text = texts.iter().find(is_first).unwrap_or_else(|| panic!("{rank}: {texts:?}"));
        assert!(text.contains("missing hosts: [1]"), "{text}");
        // The silence had lasted for a second, so the scope began before.
        let begins = text.lines().find(|line| line.starts_with("device 0 (software GPU)")).unwrap();
        assert!(begins.ends_with(" s ago:"), "{begins}");
        if rank == 1 {
            assert!(text.contains("device 0 runs the closure of "), "{text}");
            assert!(text.contains("its last call: synchronize at "), "{text}");
        } else {
            assert!(text.contains("device 0 is in all_reduce, 200000 bytes"), "{text}");
            let (_, words) = text.split_once("\nlast words of process 1:\n").unwrap_or_else(|| panic!("{text}"));
            assert!(words.contains(&told.replace(&format!("process {rank}"), "process 1")), "{text}");
            assert!(words.contains("device 0 runs the closure of "), "{text}");
        }
    }
    fs::remove_dir_all(folder).unwrap();
}

/// The failures of one process's own work: its peers name host and device, and the cluster goes on.
#[test]
fn a_failure_of_one_device_is_told_to_all() {
    for (what, cause) in [
        ("error", "had enough"),
        ("travelling", "had enough"),
        ("panic", "has panicked"),
        ("memory", "memory"),
        ("rude", "text panicked"),
    ] {
        for round in 0..cases(3, 30) {
            let mut fleet = start(what, round);
            for rank in [0, 2] {
                let (_, error) = fleet.until(rank, "error ");
                assert!(error.starts_with("aborted by 1 Some(0)") && error.contains(cause), "{error}");
            }
            survivors(fleet, None, false, |rank| if rank == 1 { "own".into() } else { "aborted by 1".into() });
        }
    }
}

#[test]
fn calls_that_differ_are_told_with_both_places() {
    for (what, kind) in [("mismatch", "call"), ("crossed", "group"), ("skips", "participation")] {
        for round in 0..cases(3, 30) {
            let mut fleet = start(what, round);
            for rank in 0..SHAPE.len() {
                let (_, error) = fleet.until(rank, "error ");
                assert!(error.matches("failures.rs:").count() == 2, "{error}");
                assert!(error.contains("host 1"), "{error}");
            }
            survivors(fleet, None, false, |_| format!("mismatch {kind}"));
        }
    }
}
