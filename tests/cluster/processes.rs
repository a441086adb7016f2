//! Processes that work as one, started as a launcher would: this test program again, with `GPU_POOL_RANK` and so on.

use crate::support::{again, builder, task};
use gpu_pool::{Builder, Device, Error, ReduceOp, cluster::Cluster};
use std::{
    net::TcpListener,
    process::{Child, Stdio},
    time::Duration,
};

/// Processes of one cluster.
pub struct Fleet(pub Vec<Child>);

impl Fleet {
    /// One process for each number of devices. Each runs the part of [`child`] that `what` names.
    pub fn start(what: &str, devices: &[usize]) -> Fleet {
        // The system's choice; another program could take it before rank 0 does, which nobody has seen yet.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let size = devices.len().to_string();
        let start = |(rank, devices): (usize, &usize)| {
            let mut process = again(&["processes::child"], &format!("{what} {devices}"));
            process.env("GPU_POOL_RANK", rank.to_string()).env("GPU_POOL_SIZE", &size);
            process.env("GPU_POOL_LOCAL_RANK", rank.to_string()).env("GPU_POOL_LOCAL_SIZE", &size);
            process.env("GPU_POOL_MASTER", "127.0.0.1").env("GPU_POOL_PORT", port.to_string());
            process.env("GPU_POOL_SILENCE", "2s").env("GPU_POOL_TRANSPORT", "shm");
            process.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        Fleet(devices.iter().enumerate().map(start).collect())
    }

    /// What each process has said, in the order of ranks. All must succeed.
    #[track_caller]
    pub fn said(mut self) -> Vec<Vec<String>> {
        let ended: Vec<_> = self.0.drain(..).map(|process| process.wait_with_output().unwrap()).collect();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        for (rank, output) in ended.iter().enumerate() {
            let all = || format!("{}\n{}", text(&output.stdout), text(&output.stderr));
            assert!(output.status.success(), "process {rank}: {}\n{}", output.status, all());
        }
        let said = |line: &str| line.split_once("CHILD ").map(|(_, said)| said.to_owned());
        ended.iter().map(|output| text(&output.stdout).lines().filter_map(said).collect()).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for process in &mut self.0 {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn say(what: impl std::fmt::Display) {
    println!("CHILD {what}");
}

/// One process of a fleet.
#[test]
fn child() {
    let Some(task) = task() else { return };
    let (what, devices) = task.split_once(' ').unwrap();
    let builder = builder().timeout(Duration::from_secs(60)).host(devices.parse().unwrap());
    match what {
        "sum" => sum(builder).unwrap(),
        "names" => names(builder).unwrap(),
        other => panic!("no task {other}"),
    }
}

fn sum(builder: Builder) -> Result<(), Error> {
    let pool = builder.cluster(Cluster::from_env()?).build()?;
    let found = pool.run(|dev: &Device, _| {
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
    let cluster = Cluster::from_env()?;
    let alone = cluster.rank() == 0;
    let limit = Duration::from_secs(if alone { 1 } else { 60 });
    let pool = builder.timeout(limit).cluster(cluster).build()?;
    if alone {
        say(pool.run_named("alone", |_, _| Ok(())).unwrap_err());
    }
    // What has failed leaves the cluster usable.
    say(format!("{:?}", pool.run_named("together", |dev, _| Ok(dev.world()?.rank()))?));
    pool.close()
}

/// Once the caller waited for ever for devices that had not been told of the scope.
#[test]
fn a_named_scope_that_others_do_not_begin_times_out() {
    let said = Fleet::start("names", &[2, 1]).said().concat();
    assert!(said[0].contains(r#""alone"; missing hosts: [1]"#), "{said:?}");
    assert_eq!(said[1..], ["[0, 1]", "[2]"]);
}
