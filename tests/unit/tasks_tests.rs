use crate::{Error, GpuPool};
use std::{fs, process::Command};

const TASK: &str = "GPU_POOL_TEST_TASK";

/// The process that has no room for the stacks of rayon's threads.
#[test]
fn child() {
    if std::env::var(TASK).as_deref() != Ok("no threads") {
        return;
    }
    let pool = GpuPool::builder().host(2).build().unwrap();
    pool.run(|dev, _| dev.barrier()).unwrap();
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    let (pid, limit) = (std::process::id().to_string(), format!("--as={}", pages * 4096 + (128 << 20)));
    assert!(Command::new("prlimit").args(["--pid", &pid, &limit]).status().unwrap().success());
    // rayon tries once only.
    for _ in 0..2 {
        let error = pool.tasks(|t| t.get(&t.cpu().run((), |()| Ok(1)))).unwrap_err();
        let Error::NoThread { op, device, why, site } = &error else { panic!("{error:?}") };
        assert_eq!((*op, *device, site.file()), ("tasks", None, file!()));
        assert!(why.contains("rayon") && error.to_string().contains("tasks_tests.rs"), "{error}");
    }
    pool.run(|dev, _| dev.barrier()).unwrap();
    println!("CHILD refused");
}

/// Once this panicked.
#[test]
fn without_threads_of_rayon_tasks_are_refused() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["tasks::tests::child", "--exact", "--nocapture"]);
    // No stack fits the memory that the child leaves; all other allocations do.
    let output = command.env(TASK, "no threads").env("RUST_MIN_STACK", (256 << 20).to_string()).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("CHILD refused"), "{output:?}");
}
