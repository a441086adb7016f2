use super::*;
use std::process::Command;

/// Leaked handles must not wrap the count around to zero while a handle is alive.
#[test]
#[cfg(not(miri))]
fn too_many_handles_stop_the_process() {
    const CHILD: &str = "GPU_POOL_TEST_TOO_MANY_HANDLES";
    if std::env::var_os(CHILD).is_some() {
        RefCount(AtomicU32::new(MOST + 1)).acquire();
        return;
    }
    let this = std::env::current_exe().unwrap();
    let name = "sync::refs::tests::too_many_handles_stop_the_process";
    let child = Command::new(this).args([name, "--exact"]).env(CHILD, "1").output().unwrap();
    assert!(!child.status.success());
    assert!(String::from_utf8_lossy(&child.stdout).contains("running 1 test"), "the test was renamed");
    assert!(child.status.code().is_none_or(|code| code != 101), "stopped, and not by a panic");
}
