//! All-reduces between two processes with a GPU each, against NCCL alone.
//!
//! This process starts two more, the hosts, which call all sides' all-reduces and take the time; a time is the slower
//! host's. In a turn each host makes one call that is not timed, then calls back to back and waits for its stream.
//!
//! * `cluster/<as_is or sockets>/all_reduce/f32/<bytes>`: microseconds per call, 1 KB to 1 GB (`--max BYTES`)
//! * `cluster/<as_is or sockets>/single/f32/<bytes>`: a call and the wait for it, one after the other
//!
//! Under `sockets` NCCL talks over the loopback interface, as between two machines. With one GPU both hosts share it,
//! under `sockets` only: then they take turns on it, and the times say nothing.
//!
//! The sides: `blocking` is NCCL as programs usually call it; `polled` is a communicator that is not blocking, whose
//! calls are polled until they are launched, as our transport does (`src/cluster/transport/nccl.rs`).

#[path = "../support/mod.rs"]
mod support;

mod host;
mod nccl;

use std::{env, fs, path::PathBuf, process::Command};

use support::{Bench, MICROSECONDS, Side, child::Process, gpus};

/// Tells a process that it is a host: `<number> <GPU> <largest size> <folder for NCCL's ids>`
const TASK: &str = "GPU_POOL_TEST_TASK";

/// What NCCL may use between the hosts.
const WAYS: [(&str, &[(&str, &str)]); 2] = [
    ("as_is", &[]),
    (
        "sockets",
        &[("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1"), ("NCCL_NET", "Socket"), ("NCCL_SOCKET_IFNAME", "lo")],
    ),
];

const MOST: usize = 1 << 30;

/// Single calls are measured up to this size.
const MOST_SINGLE: usize = 4 << 20;

fn main() {
    if let Ok(task) = env::var(TASK) {
        return host::serve(&task);
    }
    let mut bench = Bench::new("cluster");
    let gpus = gpus::count();
    if gpus == 0 || !nccl::is_there() {
        println!("skipped: {}", if gpus == 0 { "no CUDA device" } else { "no libnccl" });
        return;
    }
    let most = bench.most_bytes(MOST);
    for (way, variables) in WAYS {
        if gpus < 2 && way == "as_is" {
            println!("skipped: {way} needs two GPUs");
            continue;
        }
        let mut pair = Pair::start(way, variables, gpus, most);
        for bytes in (10..=30).map(|power| 1 << power).filter(|&bytes| bytes <= most) {
            pair.measure(&mut bench, "all_reduce", way, bytes);
            if bytes <= MOST_SINGLE && (bytes.trailing_zeros() % 6 == 4 || bytes == MOST_SINGLE) {
                pair.measure(&mut bench, "single", way, bytes);
            }
        }
    }
    bench.finish();
}

/// The two hosts.
struct Pair {
    hosts: [Process; 2],
    folder: PathBuf,
}

impl Pair {
    fn start(way: &str, variables: &[(&str, &str)], gpus: usize, most: usize) -> Pair {
        let folder = env::temp_dir().join(format!("gpu-pool-cluster-{}-{way}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for ids");
        let hosts = [0, 1].map(|host| {
            let mut command = Command::new(env::current_exe().expect("this program"));
            command.env(TASK, format!("{host} {} {most} {}", host % gpus, folder.display()));
            // Multicast between GPUs of one machine is off, as in the other benches.
            command.env("NCCL_NVLS_ENABLE", "0").envs(variables.iter().copied());
            if way == "sockets" {
                command.env("NCCL_HOSTID", format!("gpu-pool-{host}"));
            }
            Process::start(&mut command)
        });
        Pair { hosts, folder }
    }

    /// Microseconds of the slower host.
    fn time(&mut self, what: &str, rounds: usize) -> f64 {
        for host in &mut self.hosts {
            host.order(what, rounds);
        }
        self.hosts.iter_mut().map(Process::answer).fold(0.0, f64::max)
    }

    fn measure(&mut self, bench: &mut Bench, what: &str, way: &str, bytes: usize) {
        let case = format!("cluster/{way}/{what}/f32/{bytes}");
        if !bench.wants(&case) {
            return;
        }
        // So many calls that a turn takes its share of the case's time: 5 turns and one to warm up, of all sides.
        let once = self.time(&format!("{what}/{}/{bytes}", host::SIDES[0]), 1).max(1.0);
        let rounds = (bench.micros_of_case() as f64 / (6 * host::SIDES.len()) as f64 / once).clamp(1.0, 200.0) as usize;
        bench.set_turns(1, 5);
        let pair = std::cell::RefCell::new(self);
        let mut sides = host::SIDES.map(|side| {
            let (pair, order) = (&pair, format!("{what}/{side}/{bytes}"));
            Side::new(side, move || pair.borrow_mut().time(&order, rounds))
        });
        sides.reverse();
        let mut sides = Vec::from(sides).into_iter();
        let ours = sides.next().expect("the last side");
        bench.compare(&case, MICROSECONDS, ours, sides.collect());
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
