//! Traces of processes have one time: that of rank 0, which they ask for.

use crate::fleet::{Fleet, free_port, pool, say};
use gpu_pool::{Builder, Result};
use serde_json::Value;
use std::{fs, path::Path};

pub fn child(builder: Builder, path: &str) -> Result<()> {
    let pool = pool(builder)?;
    let path = format!("{path}.{}", std::env::var("GPU_POOL_RANK").unwrap());
    pool.record_trace(&path, || pool.run(|dev, _| dev.world()?.barrier()))??;
    say("traced");
    pool.close()
}

fn events(path: &Path) -> Vec<Value> {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// By the connection, as on several machines, and on one machine, where the clocks are the same.
#[test]
fn processes_trace_by_the_clock_of_rank_0() {
    for meeting in ["hub", "mesh", "auto"] {
        let folder = std::env::temp_dir().join(format!("gpu-pool-{meeting}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let what = format!("trace {}", folder.join("trace").display());
        let fleet = Fleet::start_with(&what, &[1, 1], free_port(), |_, process| {
            process.env("GPU_POOL_MEETING", meeting);
        });
        assert_eq!(fleet.said(), [["traced"]; 2]);
        let files = [0, 1].map(|rank| folder.join(format!("trace.{rank}")));
        let errors = [0, 1].map(|rank: usize| events(&files[rank])[0]["args"]["clock_error_us"].as_f64().unwrap());
        assert_eq!([errors[0] > 0.0, errors[1] > 0.0], [false, meeting != "auto"], "{errors:?}");
        let both = folder.join("both");
        gpu_pool::trace::merge(&files, &both).unwrap();
        let is_closure = |event: &&Value| event["cat"] == "closure";
        let span = |event: &Value| {
            let start = event["ts"].as_f64().unwrap();
            (start, start + event["dur"].as_f64().unwrap())
        };
        let closures: Vec<_> = events(&both).iter().filter(is_closure).map(span).collect();
        let [a, b] = closures[..] else { panic!("{closures:?}") };
        // Neither leaves the barrier before the other one has come.
        let (first_end, last_start, error) = (a.1.min(b.1), a.0.max(b.0), errors[1]);
        assert!(first_end + error >= last_start, "{closures:?} {error}");
        fs::remove_dir_all(folder).unwrap();
    }
}
