//! Processes of one cluster, started as a launcher would: this test program again, with `GPU_POOL_RANK` and so on.
//!
//! A test starts a [`Fleet`]; each process finds its task in [`child`], and tells by [`say`] what it has found.
//!
//! A task is `<devices> <what> <more>..`. Devices are a number of software GPUs, or `cuda2`: two devices on one GPU,
//! which is that of the process's local rank; with more processes than GPUs some have the same one. Processes on GPUs
//! need [`GPU_VARIABLES`].

use crate::support::{again, builder, cuda_devices, task};
use gpu_pool::{Builder, Error, GpuPool, ReduceOp, cluster::Cluster};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use std::{
    fmt::Display,
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

/// Tells a hang from a slow machine, nothing else.
pub const GUARD: Duration = Duration::from_secs(60);

/// NCCL takes processes with these for hosts of their own, each with a further name (`NCCL_HOSTID`), so that they may
/// share a GPU.
pub const GPU_VARIABLES: [(&str, &str); 7] = [
    ("GPU_POOL_TRANSPORT", "nccl"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_SHM_DISABLE", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("NCCL_NET", "Socket"),
    ("NCCL_SOCKET_IFNAME", "lo"),
];

/// A process that says nothing for so long is lost.
pub const SILENCE: Duration = Duration::from_secs(2);

/// What a process has said, and when; `None` when it has closed its output.
struct Line {
    rank: usize,
    at: Instant,
    text: Option<String>,
}

/// Processes of one cluster. They do not outlive it.
pub struct Fleet {
    processes: Vec<Child>,
    lines: Receiver<Line>,
    said: Vec<Vec<(Instant, String)>>,
    open: Vec<bool>,
}

impl Fleet {
    /// One process for each number of devices. Each runs the part of [`child`] that `what` names.
    pub fn start(what: &str, devices: &[usize]) -> Fleet {
        Fleet::start_with(what, devices, free_port(), |_, _| {})
    }

    /// [`start`](Self::start) with a port of the caller's choice; `set` changes the process of a rank.
    pub fn start_with(what: &str, devices: &[usize], port: u16, set: impl Fn(usize, &mut Command)) -> Fleet {
        let tasks: Vec<_> = devices.iter().map(|devices| format!("{devices} {what}")).collect();
        Fleet::of(&tasks, port, set)
    }

    /// One process for each task.
    pub fn of(tasks: &[String], port: u16, set: impl Fn(usize, &mut Command)) -> Fleet {
        let size = tasks.len().to_string();
        let (tell, lines) = channel();
        let start = |(rank, task): (usize, &String)| {
            let mut process = again(&["fleet::child"], task);
            process.env("GPU_POOL_RANK", rank.to_string()).env("GPU_POOL_SIZE", &size);
            process.env("GPU_POOL_LOCAL_RANK", rank.to_string()).env("GPU_POOL_LOCAL_SIZE", &size);
            process.env("GPU_POOL_MASTER", "127.0.0.1").env("GPU_POOL_PORT", port.to_string());
            process.env("GPU_POOL_SILENCE", format!("{}ms", SILENCE.as_millis())).env("GPU_POOL_TRANSPORT", "shm");
            set(rank, &mut process);
            let mut child = process.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
            let (told, errors) = (tell.clone(), tell.clone());
            thread::spawn(move || forward(rank, out, &told, true));
            thread::spawn(move || forward(rank, err, &errors, false));
            child
        };
        let processes: Vec<_> = tasks.iter().enumerate().map(start).collect();
        Fleet { said: vec![Vec::new(); processes.len()], open: vec![true; processes.len()], processes, lines }
    }

    /// Takes the next line of any process in.
    #[track_caller]
    fn take(&mut self) {
        match self.lines.recv_timeout(GUARD) {
            Ok(Line { rank, at, text: Some(text) }) => self.said[rank].push((at, text)),
            Ok(Line { rank, .. }) => self.open[rank] = false,
            Err(_) => panic!("hung: nobody says anything for {GUARD:?}\n{}", self.log()),
        }
    }

    fn log(&self) -> String {
        let of = |(rank, lines): (usize, &Vec<(Instant, String)>)| {
            lines.iter().map(|(_, line)| format!("process {rank}: {line}\n")).collect::<String>()
        };
        self.said.iter().enumerate().map(of).collect()
    }

    /// Waits until the process has said something that begins so. Returns the rest, and when that was.
    #[track_caller]
    pub fn until(&mut self, rank: usize, begin: &str) -> (Instant, String) {
        loop {
            let found = self.said[rank].iter().find_map(|(at, line)| {
                let rest = line.strip_prefix("CHILD ")?.strip_prefix(begin)?;
                Some((*at, rest.trim().to_owned()))
            });
            if let Some(found) = found {
                return found;
            }
            assert!(self.open[rank], "process {rank} has ended without `{begin}`\n{}", self.log());
            self.take();
        }
    }

    /// Sends a process a signal.
    pub fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: the child is this process's own and has not been waited for.
        assert_eq!(unsafe { libc::kill(self.processes[rank].id() as i32, signal) }, 0);
    }

    /// Waits for the end of a process. Whether it has succeeded.
    #[track_caller]
    pub fn ends(&mut self, rank: usize) -> bool {
        while self.open[rank] {
            self.take();
        }
        let start = Instant::now();
        loop {
            match self.processes[rank].try_wait().unwrap() {
                Some(status) => return status.success(),
                None if start.elapsed() > GUARD => panic!("process {rank} does not end\n{}", self.log()),
                None => thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// What each process has said, in the order of ranks. All must succeed.
    #[track_caller]
    pub fn said(mut self) -> Vec<Vec<String>> {
        for rank in 0..self.processes.len() {
            assert!(self.ends(rank), "process {rank} has failed\n{}", self.log());
        }
        let said = |(_, line): &(Instant, String)| line.strip_prefix("CHILD ").map(str::to_owned);
        self.said.iter().map(|lines| lines.iter().filter_map(said).collect()).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// The system's choice; another program could take it before rank 0 does, which nobody has seen yet.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn forward(rank: usize, from: impl Read, to: &Sender<Line>, tells_the_end: bool) {
    for line in BufReader::new(from).lines().map_while(Result::ok) {
        // libtest writes the name of the test in front of the first line.
        let text = line.find("CHILD ").map_or(line.clone(), |at| line[at..].to_owned());
        let _ = to.send(Line { rank, at: Instant::now(), text: Some(text) });
    }
    if tells_the_end {
        let _ = to.send(Line { rank, at: Instant::now(), text: None });
    }
}

pub fn say(what: impl Display) {
    println!("CHILD {what}");
}

/// The pool of one process of a fleet.
pub fn pool(builder: Builder) -> Result<GpuPool, Error> {
    builder.cluster(Cluster::from_env()?.patience(GUARD)).build()
}

/// One process of a fleet. An error ends it as it ends a `main` that returns it.
#[test]
fn child() -> Result<(), Error> {
    let Some(task) = task() else { return Ok(()) };
    let mut words = task.split(' ');
    let devices = words.next().unwrap();
    let builder = match devices.strip_prefix("cuda") {
        Some(count) => {
            let gpu = Cluster::from_env()?.local_rank() % cuda_devices();
            // The checker orders kernels that are to meet their peers', so they would never wait for each other.
            let builder = GpuPool::builder().check(Check::Off).timeout(GUARD).cuda();
            builder.devices(&vec![gpu; count.parse().unwrap()]).share_gpus(true)
        }
        None => builder().timeout(GUARD).host(devices.parse().unwrap()),
    };
    let (what, more) = (words.next().unwrap(), words.collect::<Vec<_>>());
    match what {
        "sum" => sum(builder),
        "names" => names(builder),
        "early" => early(builder),
        _ => crate::run(builder, what, &more),
    }
}

fn sum(builder: Builder) -> Result<(), Error> {
    let pool = pool(builder)?;
    let found = pool.run(|dev, _| {
        let world = dev.world()?;
        let mut x = dev.upload(&(0..1001).map(|i| (i * (world.rank() + 1)) as f32).collect::<Vec<_>>())?;
        world.all_reduce(&mut x, ReduceOp::Sum)?;
        world.barrier()?;
        Ok((world.rank(), dev.download(&x)?))
    })?;
    for (rank, x) in found {
        say(format!("{rank}: {} {}", x[1], x[1000]));
    }
    pool.close()
}

#[test]
fn all_devices_of_all_processes_add_up() {
    for devices in [&[2, 2][..], &[1, 3], &[2, 1, 2]] {
        let ranks: usize = devices.iter().sum();
        let whole = (ranks * (ranks + 1) / 2) as f32;
        let said = Fleet::start("sum", devices).said().concat();
        let expected: Vec<_> = (0..ranks).map(|rank| format!("{rank}: {whole} {}", 1000.0 * whole)).collect();
        assert_eq!(said, expected);
    }
}

/// Process 0 begins a scope that the others do not begin, then one that they wait in.
fn names(builder: Builder) -> Result<(), Error> {
    let alone = Cluster::from_env()?.rank() == 0;
    let pool = pool(if alone { builder.timeout(Duration::from_secs(1)) } else { builder })?;
    if alone {
        say(pool.named("alone").run(|_, _| Ok(())).unwrap_err());
    }
    // What has failed leaves the cluster usable.
    say(format!("{:?}", pool.named("together").run(|dev, _| Ok(dev.world()?.rank()))?));
    pool.close()
}

/// Process 1 fails its third step before it has asked for the world, and a scope of its own; both go on.
fn early(builder: Builder) -> Result<(), Error> {
    let rank = Cluster::from_env()?.rank();
    let pool = pool(builder)?;
    for step in 0..5 {
        let found = pool.run(|dev, _| {
            if (rank, step) == (1, 2) {
                return Err(Error::custom("early"));
            }
            let mut x = dev.upload(&[step as f32])?;
            dev.world()?.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(dev.download(&x)?[0])
        });
        match found {
            Ok(sums) => say(format!("{step}: {}", sums[0])),
            Err(error) => say(format!("{step}: {error}")),
        }
        if (rank, step) == (1, 3) {
            pool.run(|_, _| Err::<(), _>(Error::custom("alone"))).unwrap_err();
        }
    }
    pool.close()
}

/// Once the next step of process 1 met the third step of process 0.
#[test]
fn a_scope_that_fails_before_its_first_world_leaves_the_next_ones_in_order() {
    let said = Fleet::start("early", &[1, 2]).said();
    for (rank, lines) in said.iter().enumerate() {
        assert_eq!(lines.len(), 5);
        for (step, line) in lines.iter().enumerate() {
            match step {
                2 => assert!(line.contains("early") && line.contains("host 1") == (rank == 0), "{line}"),
                _ => assert_eq!(*line, format!("{step}: {}", 3 * step)),
            }
        }
    }
}

/// Once the caller waited for ever for devices that had not been told of the scope.
#[test]
fn a_named_scope_that_others_do_not_begin_times_out() {
    let said = Fleet::start("names", &[2, 1]).said().concat();
    assert!(said[0].contains(r#""alone"; missing hosts: [1]"#), "{said:?}");
    assert_eq!(said[1..], ["[0, 1]", "[2]"]);
}
