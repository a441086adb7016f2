//! The transport on GPUs. A cluster's processes are this test binary again, on one machine: NCCL takes them for hosts
//! (`NCCL_HOSTID`), so that one GPU will do, and they talk by sockets. Files in a folder stand in for the hub.
//!
//! `LD_LIBRARY_PATH=..nvidia/nccl/lib gpu_pool-<hash> nccl::gpu_tests --nocapture --test-threads=1`

mod data;
mod pools;

use super::*;
use crate::runtime::driver::{self, Address, Driver};
use RailCall::*;
use data::{bytes, close, decode, encode, value};
use parking_lot::MutexGuard;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
};

/// `<folder> <number of this host> <device counts, with commas> <what to do>`
const TASK: &str = "GPU_POOL_TEST_TASK";

/// How long processes may take. Those that share a GPU take turns on it, by milliseconds.
const TIMEOUT: Duration = Duration::from_secs(150);

/// Bytes of the largest buffer.
const AREA: usize = 8 << 20;

/// Its processes and its folder go with it.
struct Cluster {
    folder: PathBuf,
    hosts: Vec<Child>,
    /// One cluster at a time: all are on the same GPUs.
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Cluster {
    /// Starts these hosts of a cluster with so many devices. `None`, after a line that says why, where that cannot be.
    fn start(devices: &[usize], hosts: &[usize], what: &str) -> Option<Cluster> {
        if driver::cuda::device_count().is_err() {
            println!("skipped: no CUDA device");
            return None;
        }
        if let Err(error) = Library::get() {
            println!("skipped: no libnccl ({error})");
            return None;
        }
        let alone = ALONE.lock();
        let folder = env::temp_dir().join(format!("gpu-pool-nccl-{}-{what}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let counts = devices.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let start = |&host: &usize| {
            let log = fs::File::create(folder.join(format!("log{host}"))).unwrap();
            let mut command = Command::new(env::current_exe().unwrap());
            command.args([concat!(module_path!(), "::cuda_is_a_host").split_once("::").unwrap().1]);
            command.args(["--exact", "--nocapture", "--test-threads=1"]);
            command.env(TASK, format!("{} {host} {counts} {what}", folder.display()));
            command.env("NCCL_HOSTID", format!("gpu-pool-{host}")).env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
            command.envs([("NCCL_SHM_DISABLE", "1"), ("NCCL_P2P_DISABLE", "1"), ("NCCL_NVLS_ENABLE", "0")]);
            command.envs([("NCCL_NET", "Socket"), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_DEBUG", "WARN")]);
            command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
        };
        Some(Cluster { hosts: hosts.iter().map(start).collect(), folder, _alone: alone })
    }

    /// How a process ends, which must be in time.
    fn end(&mut self, at: usize) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.hosts[at].try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < TIMEOUT, "process {at} hangs:\n{}", self.logs());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// All processes succeed.
    fn all_end(mut self) {
        for at in 0..self.hosts.len() {
            let status = self.end(at);
            assert!(status.success(), "process {at}: {status}\n{}", self.logs());
        }
        println!("{}", self.logs());
    }

    fn logs(&self) -> String {
        let log = |host: usize| fs::read(self.folder.join(format!("log{host}"))).unwrap_or_default();
        let named = |host| format!("-- host {host}\n{}", String::from_utf8_lossy(&log(host)));
        (0..3).map(named).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for host in &mut self.hosts {
            let _ = host.kill();
            let _ = host.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Every call, type and reduction, compared with sums of the host.
#[test]
fn cuda_all_calls_of_two_hosts() {
    if let Some(cluster) = Cluster::start(&[1, 1], &[0, 1], "calls") {
        cluster.all_end();
    }
}

/// Two communicators in each process, at once; and a second transport after the first has ended.
#[test]
fn cuda_two_hosts_with_two_rails() {
    if let Some(cluster) = Cluster::start(&[2, 2], &[0, 1], "rails") {
        cluster.all_end();
    }
}

/// A rail of hosts 1 and 2, whose ranks are 0 and 1.
#[test]
fn cuda_rails_without_some_hosts() {
    if let Some(cluster) = Cluster::start(&[1, 2, 2], &[0, 1, 2], "rails") {
        cluster.all_end();
    }
}

/// pytorch#118692, nccl#1777: kernels that wait for a host that is gone end, and the survivor does local work.
#[test]
fn cuda_a_killed_host_ends_all_calls() {
    let Some(mut cluster) = Cluster::start(&[2, 2], &[0, 1], "killed") else { return };
    assert!(!cluster.end(1).success());
    fs::write(cluster.folder.join("lost"), "").unwrap();
    let status = cluster.end(0);
    assert!(status.success(), "{status}\n{}", cluster.logs());
}

/// A host that never comes: a typed error after the limit, and no hang in the abort of a communicator in the making.
#[test]
fn cuda_a_host_that_never_comes() {
    if let Some(cluster) = Cluster::start(&[1, 1], &[0], "alone") {
        cluster.all_end();
    }
}

/// A transport that is dropped, not closed.
#[test]
fn cuda_a_dropped_transport_ends() {
    if let Some(cluster) = Cluster::start(&[1, 1], &[0, 1], "dropped") {
        cluster.all_end();
    }
}

/// Pools: the groups' collectives, and messages between GPUs with any ordinals.
#[test]
fn cuda_pools_of_two_hosts() {
    for devices in [&[1, 1][..], &[2, 2], &[1, 2]] {
        if let Some(cluster) = Cluster::start(devices, &[0, 1], &format!("pool-{}", pools::port())) {
            cluster.all_end();
        }
    }
}

/// Rails beside the steps inside the processes.
#[test]
fn cuda_pools_of_two_hosts_overlap() {
    for devices in [&[2, 2][..], &[2, 1]] {
        if let Some(cluster) = Cluster::start(devices, &[0, 1], &format!("beside-{}", pools::port())) {
            cluster.all_end();
        }
    }
}

/// A process of a cluster, if it was started as one.
#[test]
fn cuda_is_a_host() {
    let Ok(task) = env::var(TASK) else { return };
    let mut words = task.split(' ');
    let folder = PathBuf::from(words.next().unwrap());
    let host: usize = words.next().unwrap().parse().unwrap();
    let devices: Vec<usize> = words.next().unwrap().split(',').map(|count| count.parse().unwrap()).collect();
    let gpu = host % driver::cuda::device_count().unwrap();
    let what = words.next().unwrap();
    for (kind, beside) in [("pool-", false), ("beside-", true)] {
        if let Some(port) = what.strip_prefix(kind) {
            return pools::of_a_process(port.parse().unwrap(), host, &devices, gpu, beside, TIMEOUT);
        }
    }
    let drivers: Vec<DriverRef> = (0..devices[host]).map(|_| driver::cuda::open(gpu).unwrap()).collect();
    let start = |round: usize, connect_timeout| start(&folder, round, host, &devices, &drivers, connect_timeout);
    let begin = Instant::now();
    match what {
        "calls" => {
            let nccl = start(0, TIMEOUT).unwrap();
            println!("connected after {:?}", begin.elapsed());
            on_all(&drivers, |device| {
                Member::new(&nccl, device, &drivers[device]).all_calls(&super::operation::tests::ALL)
            });
            nccl.close().unwrap();
        }
        "rails" => {
            for round in 0..2 {
                let nccl = start(round, TIMEOUT).unwrap();
                on_all(&drivers, |device| Member::new(&nccl, device, &drivers[device]).all_calls(&[DType::F32]));
                nccl.close().unwrap();
                assert!(nccl.failed(0).is_some(), "it has ended");
            }
        }
        "killed" => {
            let nccl = start(0, TIMEOUT).unwrap();
            if host == 1 {
                // SAFETY: ends this process, at once.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            }
            on_all(&drivers, |device| Member::new(&nccl, device, &drivers[device]).survive());
            assert!(nccl.close().is_err());
        }
        "alone" => {
            let error = start(0, Duration::from_secs(3)).expect_err("nobody else comes");
            println!("{error} after {:?}", begin.elapsed());
            assert!(matches!(error, Error::Transport { library: "nccl", .. }), "{error:?}");
        }
        "dropped" => drop(start(0, TIMEOUT).unwrap()),
        what => panic!("{what}"),
    }
    println!("done after {:?}", begin.elapsed());
}

fn on_all(drivers: &[DriverRef], f: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = (0..drivers.len()).map(|device| scope.spawn(move || f(device))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Connects all rails of a process. The files of a round stand in for the hub's keys.
fn start(
    folder: &Path,
    round: usize,
    host: usize,
    devices: &[usize],
    drivers: &[DriverRef],
    connect_timeout: Duration,
) -> Result<Nccl> {
    let file = |key: &str| folder.join(format!("{round}-{}", key.replace('/', "-")));
    let set = |key: &str, value: &[u8]| {
        let fresh = file(&format!("{key}-fresh"));
        fs::write(&fresh, value).unwrap();
        fs::rename(fresh, file(key)).unwrap();
        Ok(())
    };
    let get = |key: &str| {
        let begin = Instant::now();
        while !file(key).exists() {
            assert!(begin.elapsed() < TIMEOUT, "nobody sets {key}");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(fs::read(file(key)).unwrap())
    };
    let flag = folder.join("lost");
    let lost =
        move || flag.exists().then(|| Error::HostLost { host: 1, op: "hub", why: "the test has killed it".into() });
    let nccl = Nccl::new(host, devices, Arc::new(lost), connect_timeout)?;
    let connected: Mutex<Result<()>> = Mutex::new(Ok(()));
    on_all(drivers, |device| {
        if let Err(error) = nccl.connect_rail(device, &drivers[device], &Keys { set: &set, get: &get }) {
            *connected.lock() = Err(error);
        }
    });
    connected.into_inner().map(|()| nccl)
}

/// A device of a rail, with memory to work in.
struct Member<'a> {
    nccl: &'a Nccl,
    device: usize,
    driver: &'a dyn Driver,
    stream: RawStream,
    at: Address,
    pinned: *mut u8,
}

impl<'a> Member<'a> {
    fn new(nccl: &'a Nccl, device: usize, driver: &'a DriverRef) -> Self {
        driver.bind().unwrap();
        let (stream, at) = (driver.stream_create(0).unwrap(), driver.mem_alloc(2 * AREA).unwrap());
        Member { nccl, device, driver: &**driver, stream, at, pinned: driver.host_alloc(2 * AREA).unwrap() }
    }

    /// Copies `bytes` to the beginning of the area, makes the call, and returns the `len` bytes from `from` on.
    fn after(&self, bytes: &[u8], call: &RailCall<'_>, from: usize, len: usize) -> Vec<u8> {
        assert!(bytes.len() <= 2 * AREA && from + len <= 2 * AREA);
        // SAFETY: all in this member's own memory, which nobody else uses; the wait below ends all that names it.
        unsafe {
            self.pinned.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            self.driver.copy_to_device(self.at, self.pinned, bytes.len(), self.stream).unwrap();
            self.nccl.submit(self.device, self.stream, call).unwrap();
            self.driver.copy_to_host(self.pinned, self.at + from as u64, len, self.stream).unwrap();
        }
        let idle = self.driver.stream_wait_idle(self.stream, TIMEOUT);
        assert!(idle.unwrap(), "{call:?}: {:?}", self.nccl.failed(self.device));
        // SAFETY: the copy to these bytes is done.
        unsafe { std::slice::from_raw_parts(self.pinned, len) }.to_vec()
    }

    fn all_calls(&self, dtypes: &[DType]) {
        let hosts = hosts_of(&self.nccl.rails.devices, self.device);
        if hosts.len() == self.nccl.rails.devices.len() {
            for &dtype in dtypes {
                self.reductions(dtype, &hosts);
            }
            self.moves(&hosts);
        } else {
            let call =
                AllReduce { source: self.at, destination: self.at, len: 1, dtype: DType::F32, reduce: ReduceOp::Sum };
            // SAFETY: this member's own memory; and nothing is submitted.
            let error = unsafe { self.nccl.submit(self.device, self.stream, &call) }.unwrap_err();
            assert!(error.to_string().contains("a call of all"), "{error}");
        }
        self.messages(&hosts);
        assert_eq!(self.nccl.failed(self.device).map(|error| error.to_string()), None);
    }

    fn reductions(&self, dtype: DType, hosts: &[usize]) {
        use ReduceOp::*;
        let me = self.nccl.rails.host;
        let factor = |host: usize| 0.5 * (host + 1) as f64;
        for reduce in [Sum, Prod, Min, Max, Avg, Scaled(factor(me))] {
            if !self.nccl.can(dtype, reduce) {
                continue;
            }
            let float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
            let cut = |x: f64| if float { x } else { x.trunc() };
            let expected = |i: usize| {
                let all = hosts.iter().map(|&host| match reduce {
                    Scaled(_) => cut(factor(host)) * value(host, i),
                    _ => value(host, i),
                });
                match reduce {
                    Prod => all.product(),
                    Min => all.fold(f64::INFINITY, f64::min),
                    Max => all.fold(0.0, f64::max),
                    Avg => cut(all.sum::<f64>() / hosts.len() as f64),
                    _ => all.sum(),
                }
            };
            for (len, to) in [(0, 0), (1, 0), (1001, 0), (1001, AREA), (100_003, 0)] {
                let input: Vec<f64> = (0..len).map(|i| value(me, i)).collect();
                let call = AllReduce { source: self.at, destination: self.at + to as u64, len, dtype, reduce };
                let found = self.after(&encode(dtype, &input), &call, to, len * dtype.size());
                close(&decode(dtype, &found), expected, &call);
            }
            let len = 20_011;
            let input: Vec<f64> = (0..len * hosts.len()).map(|i| value(me, i)).collect();
            let destination = self.at + AREA as u64;
            let call = ReduceScatter { source: self.at, destination, len, parts: hosts.len(), dtype, reduce };
            let found = self.after(&encode(dtype, &input), &call, AREA, len * dtype.size());
            close(&decode(dtype, &found), |i| expected(me * len + i), &call);
        }
    }

    fn moves(&self, hosts: &[usize]) {
        let me = self.nccl.rails.host;
        for len in [1, 5, 70_001] {
            let destination = self.at + AREA as u64;
            let call = AllGather { source: self.at, destination, bytes: len, parts: hosts.len() };
            let all: Vec<u8> = hosts.iter().flat_map(|&host| bytes(host, len)).collect();
            assert!(self.after(&bytes(me, len), &call, AREA, all.len()) == all, "{call:?}");
            for &root in hosts {
                let call = Broadcast { at: self.at, bytes: len, root };
                assert!(self.after(&bytes(me, len), &call, 0, len) == bytes(root, len), "{call:?}");
            }
        }
    }

    /// All pairs of hosts, each with itself, and with lengths of their own, some of them 0.
    fn messages(&self, hosts: &[usize]) {
        let me = self.nccl.rails.host;
        for unit in [1, 4_099] {
            let len = |from: usize, to: usize| unit * (3 * from + 2 * to);
            let (mut out, mut sent, mut received) = (Vec::new(), Vec::new(), Vec::new());
            let mut at = AREA;
            for &peer in hosts {
                let from = self.at + out.len() as u64;
                out.extend(bytes(10 * me + peer, len(me, peer)));
                sent.push(RailMessage::send(peer, from, len(me, peer)));
                received.push(RailMessage::receive(peer, self.at + at as u64, len(peer, me)));
                at += len(peer, me);
            }
            // Not in one order on all hosts.
            received.rotate_left(me % hosts.len());
            sent.extend(received);
            let found = self.after(&out, &Messages(&sent), AREA, at - AREA);
            let expected: Vec<u8> = hosts.iter().flat_map(|&peer| bytes(10 * peer + me, len(peer, me))).collect();
            assert!(found == expected, "messages of {unit}");
        }
    }

    /// The other host is gone: everything submitted ends, later calls are errors, and the device is well.
    fn survive(&self) {
        let call =
            AllReduce { source: self.at, destination: self.at, len: 1000, dtype: DType::F32, reduce: ReduceOp::Sum };
        // SAFETY: this member's own memory, which lives until the process ends.
        let submitted = unsafe { self.nccl.submit(self.device, self.stream, &call) };
        let begin = Instant::now();
        while self.nccl.failed(self.device).is_none() {
            assert!(begin.elapsed() < TIMEOUT, "the loss is not known");
            thread::sleep(Duration::from_millis(1));
        }
        let error = self.nccl.failed(self.device).unwrap();
        println!("device {}: submitted: {submitted:?}; {error} after {:?}", self.device, begin.elapsed());
        assert!(
            matches!(error, Error::HostLost { host: 1, .. } | Error::Transport { library: "nccl", .. }),
            "{error:?}"
        );
        assert!(self.nccl.abort(&error), "an abort hangs");
        assert!(self.driver.stream_wait_idle(self.stream, TIMEOUT).unwrap(), "the stream is stuck");
        // SAFETY: as above.
        let again = unsafe { self.nccl.submit(self.device, self.stream, &call) };
        assert!(again.is_err());
        // SAFETY: this member's own memory, all that was submitted is done.
        unsafe {
            self.driver.fill_u8(self.at, 7, 100, self.stream).unwrap();
            self.driver.copy_to_host(self.pinned, self.at, 100, self.stream).unwrap();
            assert!(self.driver.stream_wait_idle(self.stream, TIMEOUT).unwrap());
            assert_eq!(std::slice::from_raw_parts(self.pinned, 100), [7; 100]);
        }
    }
}
