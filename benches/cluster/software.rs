//! Software GPUs, two processes with two devices each:
//!
//! * `software/meeting`: microseconds of a `world.barrier()` of two processes with a device each, one after the other
//! * `software/meeting/mesh`: as processes of several machines do that; against the way by rank 0 alone
//! * `software/<shm or mpi>/all_reduce/f32/<bytes>`: microseconds per call, against `MPI_Allreduce` of the same bytes
//!   on four ranks, if there is an mpirun
//! * `software/<shm or mpi>/backward/<bytes>`: a step of two processes with a device each, whose backward pass takes
//!   40 ms and no core; the peer starts no bucket before the pass is over
//! * `software/killed/..`: [`killed`](crate::killed)

use std::cell::RefCell;

use crate::{
    killed, mpi,
    processes::{Processes, again},
    row,
    support::{Bench, child::Process},
};

const MOST: usize = 64 << 20;

pub fn measure(bench: &mut Bench) {
    let most = bench.most_bytes(MOST);
    // More processes than most machines have cores: times move a lot.
    bench.set_turns(1, 15);
    meeting(bench);
    all_reduces(bench, most);
    backward(bench, most);
    killed::measure(bench);
}

fn meeting(bench: &mut Bench) {
    const CASE: &str = "software/meeting";
    if bench.wants(CASE) {
        let pair = Processes::by_hand("host 1 4", "shm", |_, _| {});
        row(bench, CASE, &[("gpu-pool", &pair.first, "barrier".to_owned())]);
    }
    const MESH: &str = "software/meeting/mesh";
    if bench.wants(MESH) {
        let by = |way: &'static str| {
            Processes::by_hand("host 1 4", "shm", move |_, process| {
                process.env("GPU_POOL_MEETING", way);
            })
        };
        let [mesh, hub] = ["mesh", "hub"].map(by);
        let sides = [("gpu-pool", &mesh.first), ("by rank 0", &hub.first)];
        row(bench, MESH, &sides.map(|(name, first)| (name, first, "barrier".to_owned())));
    }
}

fn all_reduces(bench: &mut Bench, most: usize) {
    let sizes = (16..=26).step_by(2).map(|power| 1 << power).filter(|&bytes: &usize| bytes <= most);
    let cases = sizes
        .flat_map(|bytes| ["shm", "mpi"].map(|way| (format!("software/{way}/all_reduce/f32/{bytes}"), way, bytes)));
    let cases: Vec<_> = cases.filter(|(case, ..)| bench.wants(case)).collect();
    if cases.is_empty() {
        return;
    }
    let task = format!("host 2 {most}");
    let shm = Processes::by_hand(&task, "shm", |_, _| {});
    let over_mpi = started(2, &task);
    let peer = started(4, &format!("mpi 0 {most}"));
    for (case, way, bytes) in cases {
        let Some(ours) = (if way == "shm" { Some(&shm.first) } else { over_mpi.as_ref() }) else { continue };
        let mut sides = vec![("gpu-pool", ours, format!("all_reduce/world/{bytes}"))];
        sides.extend(peer.iter().map(|peer| ("MPI_Allreduce", peer, bytes.to_string())));
        row(bench, &case, &sides);
    }
}

/// Processes that mpirun starts, if there is one.
fn started(ranks: usize, task: &str) -> Option<RefCell<Process>> {
    let process = again(task);
    let mut mpirun = mpi::run(ranks)?;
    mpirun.arg(process.get_program()).env("GPU_POOL_TRANSPORT", "mpi");
    mpirun.envs(process.get_envs().filter_map(|(name, value)| Some((name, value?))));
    Some(RefCell::new(Process::start(&mut mpirun)))
}

fn backward(bench: &mut Bench, most: usize) {
    let sizes = [1 << 20, 16 << 20].into_iter().filter(|&bytes: &usize| bytes <= most);
    let cases =
        sizes.flat_map(|bytes| ["shm", "mpi"].map(|way| (format!("software/{way}/backward/{bytes}"), way, bytes)));
    let cases: Vec<_> = cases.filter(|(case, ..)| bench.wants(case)).collect();
    if cases.is_empty() {
        return;
    }
    let shm = Processes::by_hand("host 1 4", "shm", |_, _| {});
    let over_mpi = started(2, "host 1 4");
    for (case, way, bytes) in cases {
        let Some(ours) = (if way == "shm" { Some(&shm.first) } else { over_mpi.as_ref() }) else { continue };
        let order = |when: &str| format!("backward/{when}/{bytes}");
        row(bench, &case, &[("gpu-pool", ours, order("beside")), ("behind the pass", ours, order("behind"))]);
    }
}
