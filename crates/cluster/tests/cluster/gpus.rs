//! Processes with a GPU each, which meet by own kernels: their start, and a process that is killed or stopped.

use crate::{
    fleet::{Fleet, HEARTBEAT_TIMEOUT, free_port, say},
    support::cuda_devices,
};
use gpu_pool::{Error, GpuPool};
use std::time::Instant;

/// At most so many processes with this task, by this transport. None where there are too few GPUs.
pub fn fleet(task: &str, transport: &str, most: usize) -> Option<Fleet> {
    let gpus = cuda_devices().min(most);
    if gpus < 2 {
        println!("skipped: {}", if gpus == 0 { "no CUDA device" } else { "one CUDA device" });
        return None;
    }
    let tasks = vec![format!("cuda1 {task}"); gpus];
    Some(Fleet::of(&tasks, free_port(), |_, process| {
        process.env("GPU_POOL_TRANSPORT", transport).env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    }))
}

/// One of two processes is killed or stopped when both have said `ready`; the other one [tells](tell) of the loss.
pub fn kill_and_stop(task: &str) {
    for (victim, signal) in [(1, libc::SIGKILL), (0, libc::SIGKILL), (1, libc::SIGSTOP)] {
        let Some(mut fleet) = fleet(task, "auto", 2) else { return };
        (0..2).for_each(|rank| drop(fleet.until(rank, "ready")));
        let start = Instant::now();
        fleet.signal(victim, signal);
        let (at, error) = fleet.until(1 - victim, "error ");
        println!("process {} knows after {:?}: {error}", 1 - victim, at - start);
        assert!(error.starts_with(&format!("lost {victim}: ")), "{error}");
        assert!(at - start < HEARTBEAT_TIMEOUT * 3, "{:?}", at - start);
        assert_eq!(fleet.until(1 - victim, "local work ").1, "true");
        assert!(!fleet.ends(1 - victim));
    }
}

/// Says the failure of a scope, and whether the pool still works.
pub fn tell(pool: &GpuPool, error: &Error) {
    say(match error {
        Error::HostLost { host, why, .. } => format!("error lost {host}: {why}"),
        Error::HostTimeout { missing, waited, .. } => format!("error late {missing:?}, {waited:?}"),
        Error::AbortedByHost { host, cause, .. } => format!("error aborted by {host}: {cause}"),
        other => format!("error other {other}"),
    });
    let local = pool.run(|dev, _| dev.download(&dev.upload(&[3.0f32])?));
    say(format!("local work {}", local.is_ok_and(|x| x == [[3.0]])));
}
