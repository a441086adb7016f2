//! Traces of pools: what is in the file, in real and in virtual time, after a kill, and of several processes.

use crate::support::{again, task};
use gpu_pool::{GpuPool, ReduceOp, Result};
use gpu_pool_lab::{Topology, prelude::*};
use serde_json::Value as Json;
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("trace_{name}"))
}

/// The events of a whole file, and that each row's slices lie in or behind each other, as viewers demand.
fn events(path: &Path) -> Vec<Json> {
    let events: Vec<Json> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let mut rows = HashMap::<(u64, u64), Vec<(u64, u64)>>::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let (start, length) = (nanos(&event["ts"]), nanos(&event["dur"]));
        let row = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        rows.entry(row).or_default().push((start, start + length));
    }
    for (row, mut spans) in rows {
        spans.sort_by_key(|&(start, end)| (start, std::cmp::Reverse(end)));
        let mut open: Vec<u64> = Vec::new();
        for (start, end) in spans {
            open.retain(|&outer| outer > start);
            assert!(open.iter().all(|&outer| end <= outer), "row {row:?}: {start}..{end} leaves the slice around it");
            open.push(end);
        }
    }
    events
}

fn nanos(micros: &Json) -> u64 {
    (micros.as_f64().unwrap() * 1e3).round() as u64
}

fn count(events: &[Json], kind: &str) -> usize {
    events.iter().filter(|event| event["cat"] == kind && event["ph"] == "X").count()
}

fn rows(events: &[Json]) -> Vec<&str> {
    let names = events.iter().filter(|event| event["name"] == "thread_name");
    names.map(|event| event["args"]["name"].as_str().unwrap()).collect()
}

/// Each arrow has both ends, and each end lies in a slice of its row.
fn flows(events: &[Json]) -> usize {
    let ends = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
    let (from, to) = (ends("s"), ends("f"));
    let id = |event: &&Json| event["id"].as_u64().unwrap();
    assert_eq!(from.iter().map(id).collect::<Vec<_>>(), to.iter().map(id).collect::<Vec<_>>());
    for end in to {
        let at = nanos(&end["ts"]);
        let holds = |event: &Json| (0..=nanos(&event["dur"])).contains(&at.wrapping_sub(nanos(&event["ts"])));
        let waits = events.iter().filter(|event| event["cat"] == "wait" && event["ph"] == "X");
        let mut own = waits.filter(|event| (&event["pid"], &event["tid"]) == (&end["pid"], &end["tid"]));
        let slice = own.find(|event| holds(event));
        assert!(slice.unwrap()["args"]["cause"].is_string(), "{end}");
    }
    from.len()
}

const CALLS: usize = 5;

fn train(pool: &GpuPool) -> Result<()> {
    pool.on(&[0, 1]).named("train").run(|dev, _| {
        let other = dev.stream()?;
        for _ in 0..CALLS {
            let mut x = dev.upload(&vec![1.0f32; 1 << 16])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            let y = dev.on(&other).sum(&x)?;
            dev.download(&y)?;
        }
        Ok(())
    })?;
    Ok(())
}

#[test]
fn a_trace_has_scopes_operations_kernels_waits_and_memory() {
    let (path, pool) = (file("all.json"), GpuPool::builder().host(2).build().unwrap());
    // Before and behind the trace nothing is in it.
    train(&pool).unwrap();
    pool.record_trace(&path, || train(&pool)).unwrap().unwrap();
    train(&pool).unwrap();

    let events = events(&path);
    assert_eq!(events[0]["name"], "gpu_pool_trace");
    assert_eq!(events[0]["args"]["version"], 1);
    assert_eq!((count(&events, "scope"), count(&events, "closure")), (1, 2));
    assert_eq!(events.iter().find(|event| event["cat"] == "scope").unwrap()["name"], "train");
    assert_eq!(count(&events, "collective"), 2 * CALLS);
    for call in events.iter().filter(|event| event["cat"] == "collective") {
        let args = &call["args"];
        assert_eq!((&args["bytes"], &args["members"]), (&(4 << 16).into(), &serde_json::json!([0, 1])));
        assert!(args["algorithm"].is_string() && args["route"].is_string(), "{call}");
        assert!(args["place"].as_str().unwrap().contains("tests/basics/trace.rs:"), "{call}");
    }
    // An upload and a download for each call.
    assert_eq!(events.iter().filter(|event| event["name"] == "copy up").count(), 2 * CALLS);
    assert_eq!(events.iter().filter(|event| event["name"] == "copy down").count(), 2 * CALLS);
    assert!(count(&events, "kernel") >= 2 * CALLS, "{}", count(&events, "kernel"));
    assert!(count(&events, "wait") > 0 && flows(&events) > 0);
    for name in ["GPU 0 thread", "GPU 1 thread", "GPU 0 stream 0", "GPU 0 stream 1", "GPU 1 stream 1"] {
        assert!(rows(&events).contains(&name), "{name}: {:?}", rows(&events));
    }
    let memory: Vec<_> = events.iter().filter(|event| event["name"] == "GPU 1 memory").collect();
    let word = |event: &Json, name: &str| event["args"][name].as_u64().unwrap();
    assert!(memory.iter().any(|event| word(event, "used") >= 4 << 16), "{memory:?}");
    assert!(memory.iter().all(|event| word(event, "used") <= word(event, "reserved")), "{memory:?}");
    assert!(!events.iter().any(|event| event["name"] == "dropped"));
}

#[test]
fn jobs_tasks_and_graphs_are_in_a_trace() {
    let (path, pool) = (file("jobs.json"), GpuPool::builder().host(2).build().unwrap());
    let traced = || -> Result<()> {
        let jobs = pool.jobs().build()?;
        let sum = jobs.job().name("sum of ones").submit(|dev| dev.download(&dev.sum(&dev.upload(&[1.0f32; 8])?)?))?;
        assert_eq!(sum.wait()?, [8.0]);
        jobs.close()?;
        let host = pool.tasks(|t| {
            let x = t.gpu(1).named("ones").run((), |dev, ()| dev.upload(&[1.0f32, 2.0]));
            let x = t.gpu(1).download(&x);
            let y = t.cpu().named("on the CPU").run((&x,), |(x,)| Ok(x.as_slice()?.to_vec()));
            t.get(&y)
        })?;
        assert_eq!(host, [1.0, 2.0]);
        pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(64)?;
            let (graph, ()) = dev.capture(|dev| dev.scale(&mut x, 2.0))?;
            dev.launch_graph(&graph)
        })?;
        Ok(())
    };
    pool.record_trace(&path, traced).unwrap().unwrap();
    let events = events(&path);
    let named = |kind: &str, name: &str| events.iter().filter(|e| e["cat"] == kind && e["name"] == name).count();
    assert_eq!((named("job", "sum of ones"), named("task", "ones"), named("task", "on the CPU")), (1, 1, 1));
    assert_eq!(named("kernel", "graph"), 2);
}

#[test]
fn a_second_trace_of_a_pool_and_a_bad_file_are_refused() {
    let (path, pool) = (file("second.json"), GpuPool::builder().host(1).trace(file("life.json")).build().unwrap());
    let refused = pool.record_trace(&path, || ()).unwrap_err().to_string();
    assert!(refused.contains("is being written already"), "{refused}");
    pool.run(|dev, _| dev.zeros::<u8>(8)).unwrap();
    drop(pool);
    assert_eq!(count(&events(&file("life.json")), "closure"), 1);

    let pool = GpuPool::builder().host(1).build().unwrap();
    let refused = pool.record_trace(Path::new("/no/such/folder/x.json"), || ()).unwrap_err().to_string();
    assert!(refused.contains("/no/such/folder"), "{refused}");
    pool.record_trace(&path, || ()).unwrap();
    assert_eq!(count(&events(&path), "op"), 0);
}

#[test]
fn in_virtual_time_a_trace_has_virtual_times() {
    let path = file("virtual.json");
    let pool = GpuPool::builder().topology(Topology::nvswitch(2)).build().unwrap();
    let before = pool.trace().unwrap().steps().len();
    pool.record_trace(&path, || train(&pool)).unwrap().unwrap();
    let trace = pool.trace().unwrap();
    let events = events(&path);
    // As the machine itself tells it.
    let kernels = trace.steps().iter().filter(|step| step.what.to_string().starts_with("kernel"));
    let expected: Vec<_> = kernels.clone().map(|step| (step.time.0 / 1000, step.time.1 / 1000)).collect();
    let slices = events.iter().filter(|event| event["cat"] == "kernel" && event["name"] != "fill");
    let found: Vec<_> = slices.map(|event| (nanos(&event["ts"]), nanos(&event["dur"]))).collect();
    let found: Vec<_> = found.into_iter().map(|(start, length)| (start, start + length)).collect();
    assert!(before > 0 && !found.is_empty());
    assert!(found.iter().all(|span| expected.contains(span)), "{found:?} {expected:?}");
    // The host's slices, too: virtual work of microseconds takes milliseconds to compute.
    let end = trace.steps().iter().map(|step| step.time.1 / 1000).max().unwrap();
    let scope = events.iter().find(|event| event["cat"] == "scope").unwrap();
    assert!(nanos(&scope["ts"]) + nanos(&scope["dur"]) < 2 * end, "{scope} {end}");
    assert!(flows(&events) > 0);
}

/// The part of the other tests' processes.
#[test]
fn a_process_that_is_traced() {
    let Some(task) = task() else { return };
    let pool = GpuPool::builder().host(2).build().unwrap();
    let start = Instant::now();
    loop {
        train(&pool).unwrap();
        if task == "once" || start.elapsed() > Duration::from_secs(60) {
            return;
        }
    }
}

const PROCESS: &str = "trace::a_process_that_is_traced";

#[test]
fn a_killed_program_leaves_a_readable_file() {
    let path = file("killed.json");
    let mut process = again(&[PROCESS], "for ever");
    let mut process = process.env("GPU_POOL_TRACE", &path).stdout(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while fs::metadata(&path).map_or(0, |file| file.len()) < 200_000 && start.elapsed() < Duration::from_secs(50) {
        thread::sleep(Duration::from_millis(2));
    }
    process.kill().unwrap();
    process.wait().unwrap();
    let text = fs::read_to_string(&path).unwrap();
    // The repair that viewers do: up to the last whole line.
    let whole = text.rfind(",\n").unwrap();
    fs::write(&path, format!("{}\n]\n", &text[..whole])).unwrap();
    let events = events(&path);
    assert!(count(&events, "collective") > 0 && count(&events, "kernel") > 0);
    assert!(!text.contains("gpu_pool_trace_end"));
}

#[test]
fn files_of_two_processes_come_to_one_time() {
    let wall = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as f64;
    let (paths, began) = (["a.json", "b.json"].map(file), wall());
    let mut spans = Vec::new();
    for path in &paths {
        let start = wall();
        let done = again(&[PROCESS], "once").env("GPU_POOL_TRACE", path).stdout(Stdio::null()).status().unwrap();
        assert!(done.success());
        spans.push((start, wall()));
    }
    let both = file("both.json");
    gpu_pool::trace::merge(&paths, &both).unwrap();
    let events = events(&both);
    let zero = events[0]["args"]["clock_offset_us"].as_f64().unwrap();
    assert!(zero >= began);
    for (pid, (start, end)) in [1, 2].into_iter().zip(spans) {
        let own: Vec<_> = events.iter().filter(|event| event["pid"] == pid && event["ph"] == "X").cloned().collect();
        assert_eq!((count(&own, "scope"), count(&own, "closure")), (1, 2));
        let times = own.iter().map(|event| zero + event["ts"].as_f64().unwrap());
        assert!(
            times.clone().all(|time| (start..=end).contains(&time)),
            "{start} {end} {:?}",
            times.collect::<Vec<_>>()
        );
    }
    flows(&events);
    let refused = gpu_pool::trace::merge([Path::new("Cargo.toml")], &both).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::InvalidData);
    // Each of its lines would come again, for ever.
    let whole = fs::read(&both).unwrap_or_default();
    let refused = gpu_pool::trace::merge([&paths[0], &both], &both).unwrap_err();
    assert_eq!((refused.kind(), fs::read(&both).unwrap_or_default()), (std::io::ErrorKind::InvalidInput, whole));
}
