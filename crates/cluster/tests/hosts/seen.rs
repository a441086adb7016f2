//! Times of traces and of flight records are rank 0's, whatever a process's own clock says. In a loopback cluster the
//! wall clock of host `n` is `n` hours behind.

use crate::loopback::Hosts;
use gpu_pool::{GpuPool, ReduceOp};
use serde_json::Value;
use std::{fs, path::Path};

const HOUR: f64 = 3600e6;

/// The head of a trace, and the beginnings of its closures, in microseconds of the file's axis.
fn read(path: &Path) -> (Value, Vec<f64>) {
    let events: Vec<Value> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let closures = events.iter().filter(|event| event["cat"] == "closure");
    (events[0]["args"].clone(), closures.map(|event| event["ts"].as_f64().unwrap()).collect())
}

#[test]
fn times_are_those_of_rank_0() {
    let hosts = Hosts::new(&[1, 1]);
    let paths = ["0", "1", "both"]
        .map(|name| std::env::temp_dir().join(format!("gpu-pool-seen-{}.{name}.json", std::process::id())));
    let sum = || {
        hosts.all(|dev| {
            let mut x = dev.upload(&[1.0f32; 8])?;
            dev.world()?.all_reduce(&mut x, ReduceOp::Sum)
        })
    };
    let [first, second] = [0, 1].map(|host| &hosts.pools[host]);
    first.record_trace(&paths[0], || second.record_trace(&paths[1], sum)).unwrap().unwrap();
    let offset = |host: usize| {
        let head = read(&paths[host]).0;
        assert_eq!(head["clock_error_us"], 0);
        head["clock_offset_us"].as_f64().unwrap()
    };
    let ahead = offset(1) - offset(0);
    assert!((ahead - HOUR).abs() < HOUR / 2.0, "{ahead}");
    gpu_pool::trace::merge(&paths[..2], &paths[2]).unwrap();
    let (_, closures) = read(&paths[2]);
    let [a, b] = closures[..] else { panic!("{closures:?}") };
    assert!((b - a - HOUR).abs() < HOUR / 2.0, "{closures:?}");
    let recorded = |pool: &GpuPool| {
        let record: Value = serde_json::from_str(&pool.flight_record().to_json()).unwrap();
        record["unix_seconds"].as_f64().unwrap() * 1e6
    };
    let ahead = recorded(second) - recorded(first);
    assert!((ahead - HOUR).abs() < HOUR / 2.0, "{ahead}");
    paths.iter().for_each(|path| fs::remove_file(path).unwrap());
}
