//! How payload gets from process to process: the traits of `traits.rs`.
//!
//! Between GPUs by NCCL; between the hosts' memories by MPI, or by shared memory on one host. Libraries are opened at
//! run time. One conformance suite holds for the transports of the hosts' memory: `tests/transports`.

#[cfg(any(all(target_os = "linux", not(loom)), all(feature = "mpi", target_os = "macos")))]
mod host;
#[cfg(all(feature = "mpi", any(target_os = "linux", target_os = "macos")))]
pub(crate) mod mpi;
#[cfg(feature = "nccl")]
pub(crate) mod nccl;
// loom has no memory that two processes map.
#[cfg(all(target_os = "linux", not(loom)))]
pub(crate) mod shm;

/// The cause of a library's error: `lost`'s, if it tells one soon. A library often sees a dead process before the
/// cluster does, and says less about it. Other errors are causes (rule C6 of `docs/src/design/cluster.md`).
pub(crate) fn cause(error: gpu_pool::Error, lost: &dyn Fn() -> Option<gpu_pool::Error>) -> gpu_pool::Error {
    // ENOMEM, ENFILE, EMFILE: this process is the cause.
    let own = matches!(error, gpu_pool::Error::Transport { library: "shm", code: 12 | 23 | 24, .. });
    let symptom = !own && matches!(error, gpu_pool::Error::Transport { .. });
    if symptom { soon(lost).unwrap_or(error) } else { error }
}

/// The loss that `lost` tells within a second: by then a closed connection is known.
fn soon(lost: &dyn Fn() -> Option<gpu_pool::Error>) -> Option<gpu_pool::Error> {
    use std::time::Duration;
    let mut stall = crate::runtime::StallTimer::new(Duration::from_secs(1));
    while !stall.is_over() {
        if let Some(cause) = lost() {
            return Some(cause);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

/// The error of a fault of a device's driver, outside of a device's own calls.
#[cfg(any(feature = "mpi", feature = "nccl"))]
fn failed(device: usize, op: &'static str, fault: crate::runtime::driver::Fault) -> gpu_pool::Error {
    use crate::runtime::driver::{Fault, FaultKind};
    let Fault { kind, code, name, detail, .. } = fault;
    match kind {
        FaultKind::DeviceLost => gpu_pool::Error::DeviceLost { device, op, code, name, site: None },
        _ => gpu_pool::Error::Driver { device, op, code, name, detail },
    }
}

/// The libraries between processes that are found here, each with its version or with the reason why it is not of use.
/// It opens them, as a pool of several processes would, and they stay open.
pub fn libraries() -> Vec<(&'static str, gpu_pool::Result<String>)> {
    vec![
        #[cfg(feature = "nccl")]
        ("NCCL", nccl::Library::get().map(nccl::Library::version)),
        #[cfg(all(feature = "mpi", any(target_os = "linux", target_os = "macos")))]
        ("MPI", mpi::version()),
    ]
}
