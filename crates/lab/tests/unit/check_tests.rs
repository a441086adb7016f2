use super::*;
use gpu_pool::extend::driver::host::{self, HostConfig};
use std::{sync::mpsc, time::Duration};

/// On CUDA a submission may wait for room in a stream's queue while it holds the account's lock. Then it waits for
/// the host functions in the queue, so they must not need that lock.
#[test]
fn a_host_function_does_not_need_the_account() {
    let gpu = wrap(host::machine(&[HostConfig::default()])).remove(0);
    let checker = gpu.checker().unwrap().0.clone();
    let s = gpu.stream_create(0).unwrap();
    let (go, gate) = mpsc::channel::<()>();
    let (ran, runs) = mpsc::channel();
    gpu.launch_host(s, Box::new(move || gate.recv().unwrap())).unwrap();
    gpu.launch_host(s, Box::new(move || ran.send(()).unwrap())).unwrap();
    let account = checker.state.lock();
    go.send(()).unwrap();
    let result = runs.recv_timeout(Duration::from_secs(10));
    drop(account);
    assert!(gpu.stream_wait_idle(s, Duration::MAX).unwrap());
    result.expect("the host functions have waited for the lock");
}
