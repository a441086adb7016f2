//! Variables that are no text.

use gpu_pool::{Error, GpuPool};
use gpu_pool_cluster::Cluster;
use std::{env, ffi::OsString, os::unix::ffi::OsStringExt, process::Command};

const TASK: &str = "GPU_POOL_TEST_TASK";

/// The process with a bad variable.
#[test]
fn child() {
    if env::var(TASK).as_deref() != Ok("variables") {
        return;
    }
    match Cluster::launched() {
        Err(Error::Cluster { op, why }) => println!("CHILD {op}: {why}"),
        cluster => println!("CHILD {cluster:?}"),
    }
    match GpuPool::builder().host(1).build() {
        Err(Error::InvalidArgument { op, why, .. }) => println!("CHILD {op}: {why}"),
        pool => println!("CHILD {}", pool.is_ok()),
    }
}

fn said(variables: &[(&str, OsString)]) -> Vec<String> {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["environment::child", "--exact", "--nocapture"]).env(TASK, "variables");
    let output = command.envs(variables.iter().map(|(name, value)| (name, value))).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| Some(line.split_once("CHILD ")?.1.to_owned())).collect()
}

/// Once a process with such a secret joined without one, and one with such a rank ran alone.
#[test]
fn a_value_that_is_no_text_is_refused() {
    let bad = || OsString::from_vec(b"hush\xff".to_vec());
    let good = [("RANK", "0"), ("SIZE", "1"), ("MASTER", "127.0.0.1"), ("PORT", "0"), ("SECRET", "x")];
    let named: Vec<_> = good.iter().map(|(name, value)| (format!("GPU_POOL_{name}"), value)).collect();
    for wrong in ["GPU_POOL_SECRET", "GPU_POOL_RANK", "GPU_POOL_TRANSPORT", "GPU_POOL_SILENCE"] {
        let rest = named.iter().filter(|(name, _)| name != wrong);
        let mut variables: Vec<_> = rest.map(|(name, value)| (&**name, OsString::from(**value))).collect();
        variables.push((wrong, bad()));
        assert_eq!(said(&variables), [format!("environment: the value of {wrong} is not UTF-8"), "true".to_owned()]);
    }
    let all = ["GPU_POOL_RANK", "GPU_POOL_SIZE", "GPU_POOL_MASTER", "GPU_POOL_PORT"].map(|name| (name, bad()));
    assert_eq!(said(&all)[0], "environment: the value of GPU_POOL_RANK is not UTF-8");
    let refused = "GPU_POOL_TIMEOUT: the value of GPU_POOL_TIMEOUT is not UTF-8";
    assert_eq!(said(&[("GPU_POOL_TIMEOUT", bad())]), ["Ok(None)", refused]);
}
