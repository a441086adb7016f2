//! Processes of one cluster, started as a launcher would: this test program again, with `GPU_POOL_RANK` and so on.
//!
//! A test starts a [`Fleet`]; each process finds its task in [`child`], and tells by [`say`] what it has found. The
//! test program has the tasks: `crate::run`.
//!
//! A task is `<devices> <what> <more>..`. Devices are a number of software GPUs, or `cuda2`: two devices on one GPU,
//! which is that of the process's local rank; with more processes than GPUs some have the same one. Processes on GPUs
//! need [`GPU_VARIABLES`].

use crate::support::{again, builder, cuda_devices, task};
use gpu_pool::{Builder, Error, GpuPool};
use gpu_pool_cluster::{Cluster, prelude::*};
use gpu_pool_lab::{Check, prelude::*};
use std::{
    fmt::Display,
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    process::{self, Child, Command, Stdio},
    sync::{
        Mutex,
        mpsc::{Receiver, Sender, channel},
    },
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

/// A process without a heartbeat for this long is lost.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(2);

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
    /// One process for each number of devices. Each runs the part of [`crate::run`] that `what` names.
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
            process
                .env("GPU_POOL_SILENCE", format!("{}ms", HEARTBEAT_TIMEOUT.as_millis()))
                .env("GPU_POOL_TRANSPORT", "shm");
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

/// A port that is free now, and another one for each call in this process. It lies below those that the system gives to
/// connections: a connection of a test beside could have such a port before rank 0 listens there.
pub fn free_port() -> u16 {
    static CALLS: Mutex<u32> = Mutex::new(0);
    let mut calls = CALLS.lock().unwrap();
    loop {
        *calls += 1;
        let port = 10_000 + (process::id() * 211 + *calls) % 20_000;
        if TcpListener::bind(("127.0.0.1", port as u16)).is_ok() {
            return port as u16;
        }
    }
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
    builder.cluster(Cluster::from_env()?.connect_timeout(GUARD)).build()
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
    crate::run(builder, what, &more)
}
