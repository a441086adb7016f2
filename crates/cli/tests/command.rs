//! The program `gpu-pool` as a user runs it: output and exit codes, on software GPUs.

use gpu_pool::{GpuPool, ReduceOp};
use gpu_pool_cluster::{Cluster, prelude::*};
use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
    time::{Duration, Instant},
};

fn gpu_pool(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-pool"));
    command.args(arguments).env("GPU_POOL_BACKEND", "host:2").envs(variables.iter().copied());
    command.output().expect("the program runs")
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn doctor_ends_well_without_a_gpu() {
    let output = gpu_pool(&["doctor", "--json"], &[]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success() && report["ok"] == true && report["version"] == 1, "{report:#}");
    let proof = report["lines"].as_array().unwrap().iter().find(|line| line["topic"] == "proof");
    assert!(proof.is_some_and(|line| line["text"].as_str().unwrap().starts_with("2 ordered pairs")), "{report:#}");
}

#[test]
fn doctor_names_a_misspelt_variable() {
    let output = gpu_pool(&["doctor"], &[("GPU_POOL_TIMOUT", "3")]);
    assert_eq!(output.status.code(), Some(1));
    let text = text(&output);
    assert!(text.contains("GPU_POOL_TIMOUT has no effect") && text.contains("-> use GPU_POOL_TIMEOUT"), "{text}");
}

#[test]
fn an_unknown_subcommand_is_an_error() {
    assert_eq!(gpu_pool(&["doktor"], &[]).status.code(), Some(2));
}

/// All operations and a few types and reductions. Only a whole run finds what a plain loop expects of each.
#[test]
fn bench_has_the_columns_of_nccl_tests_and_finds_nothing_wrong() {
    let small = ["-b", "1K", "-e", "4K", "-f", "4", "-n", "2", "-w", "1"];
    let cases: [(&str, &[&str]); 9] = [
        ("all_reduce", &["-o", "prod", "-d", "int8"]),
        ("all_reduce", &["-o", "avg", "-d", "bfloat16"]),
        ("all_gather", &["-d", "double"]),
        ("reduce_scatter", &["-o", "max", "-d", "half"]),
        ("broadcast", &["-r", "1", "-d", "uint8"]),
        ("reduce", &["-r", "1", "-o", "min", "-d", "int64"]),
        ("all_to_all", &["-d", "uint32"]),
        ("alltoall", &[]),
        ("sendrecv", &[]),
    ];
    for (op, more) in cases {
        let output = gpu_pool(&[&["bench", op], &small[..], more].concat(), &[]);
        let text = text(&output);
        assert!(output.status.success() && text.ends_with("# 0 wrong elements\n"), "{op}: {text}");
        let rows: Vec<Vec<&str>> =
            text.lines().filter(|line| !line.starts_with('#')).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows.iter().map(|row| row[0]).collect::<Vec<_>>(), ["1024", "4096"], "{text}");
        assert!(rows.iter().all(|row| row.len() == 13 && (row[8] == "0" || row[12] == "0")), "{text}");
    }
}

/// nccl-tests counts wrong elements, and so does this: here a link changes 16 bytes of what goes over it.
#[test]
fn bench_counts_wrong_elements() {
    let none = gpu_pool(&["bench", "all_gather", "-b", "8M"], &[]);
    assert_eq!(none.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&none.stderr).contains("no size"), "{none:?}");
    let arguments = ["bench", "all_gather", "-b", "64K", "-e", "64K", "-n", "1", "-w", "0", "--json"];
    let faults = [("GPU_POOL_FAULTS", "0>1:copy-peer:*:corrupt"), ("GPU_POOL_ALGORITHM", "copies")];
    let output = gpu_pool(&arguments, &faults);
    let row: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{row:#}");
    assert!((1..=8).contains(&row["out_of_place"]["wrong"].as_u64().unwrap()), "{row:#}");
    assert_eq!((&row["size"], &row["count"], &row["redop"]), (&65536.into(), &8192.into(), &"none".into()));
    let unchecked = gpu_pool(&[&arguments[..], &["-c", "0"]].concat(), &faults);
    assert!(unchecked.status.success());
}

#[test]
fn topo_writes_a_machine_that_runs_in_virtual_time() {
    let file = std::env::temp_dir().join(format!("gpu-pool-topo-{}.toml", std::process::id()));
    let output = gpu_pool(&["topo", "--json", "--machine", file.to_str().unwrap()], &[]);
    let matrix: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success() && matrix["version"] == 1, "{matrix:#}");
    let pairs = matrix["pairs"].as_array().unwrap();
    assert!(pairs.len() == 2 && pairs.iter().all(|pair| pair["gbps"].as_f64().unwrap() > 0.0), "{matrix:#}");
    let machine = gpu_pool_lab::Topology::from_file(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!((machine.len(), machine.links().len()), (2, 2));
    let shown = text(&gpu_pool(&["topo"], &[]));
    assert!(shown.contains("GB/s") && shown.contains("from host"), "{shown}");
}

#[test]
fn trace_sums_a_file_up_and_names_one_that_is_none() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/unit/trace/small.json");
    let output = gpu_pool(&["trace", file], &[]);
    assert_eq!(text(&output), include_str!("unit/trace/small.txt"));
    let out = std::env::temp_dir().join(format!("gpu-pool-merged-{}.json", std::process::id()));
    let out = out.to_str().unwrap();
    assert_eq!(gpu_pool(&["trace", file, file], &[]).status.code(), Some(1));
    let both = text(&gpu_pool(&["trace", "--merge", out, file, file], &[]));
    assert!(both.contains("host 0, GPU 1") && both.matches(" 210.0 ").count() == 2, "{both}");
    // A file that is there is no new one: without OUT it would be the first of the files.
    let there = gpu_pool(&["trace", "--merge", out, file], &[]);
    assert_eq!((there.status.code(), text(&gpu_pool(&["trace", out], &[]))), (Some(1), both));
    std::fs::remove_file(out).unwrap();
    let wrong = gpu_pool(&["trace", concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")], &[]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("README.md: no Chrome trace"));
}

/// The first flight record of each process, in a folder, as far as they are whole.
fn records(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let first = |file: &PathBuf| file.to_string_lossy().ends_with("-0.json");
    files.filter(|file| first(file) && fs::read_to_string(file).unwrap().ends_with('}')).collect()
}

/// A process whose device 1 does not come to a sum before each process has a record of the hang: the last process of
/// the cluster, or the only one.
#[test]
fn child() {
    let Ok(folder) = std::env::var("GPU_POOL_FLIGHT_RECORD") else { return };
    let cluster = Cluster::launched().unwrap();
    let (rank, size) = cluster.as_ref().map_or((0, 1), |cluster| (cluster.rank(), cluster.size()));
    let builder = GpuPool::builder().host(2).timeout(Duration::from_millis(300));
    let builder = match cluster {
        Some(cluster) => builder.cluster(cluster),
        None => builder,
    };
    let pool = builder.build().unwrap();
    let failed = pool.run(|dev, _| {
        let mut x = dev.upload(&[1.0f32; 64])?;
        let start = Instant::now();
        while (rank + 1, dev.index()) == (size, 1) && records(folder.as_ref()).len() < size {
            assert!(start.elapsed() < Duration::from_secs(30), "no record");
            thread::sleep(Duration::from_millis(5));
        }
        if size == 1 { dev.all_reduce(&mut x, ReduceOp::Sum) } else { dev.world()?.all_reduce(&mut x, ReduceOp::Sum) }
    });
    println!("{}", failed.unwrap_err());
    if (rank, size) == (0, 2) {
        wait_for_last_words(&Path::new(&folder).join(format!("gpu-pool-process0-{}-0.txt", std::process::id())));
    }
}

/// The process that does not hang has the other one's words behind its record.
fn wait_for_last_words(file: &Path) {
    let start = Instant::now();
    loop {
        let text = fs::read_to_string(file).unwrap();
        let words = text.split_once("\nlast words of process 1:\n").map_or("", |(_, words)| words);
        if words.contains("device 1 is MISSING: it runs the closure of ") {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "no last words: {text}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The records of a hang of so many processes, in a new folder.
fn hang(processes: usize) -> Vec<PathBuf> {
    let folder = std::env::temp_dir().join(format!("gpu-pool-hang-{}-{processes}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["child", "--exact", "--nocapture"]).env("GPU_POOL_FLIGHT_RECORD", &folder);
        if processes > 1 {
            let [rank, size] = [rank, processes].map(|number| number.to_string());
            process.envs([("GPU_POOL_RANK", &rank), ("GPU_POOL_LOCAL_RANK", &rank)]);
            process.envs([("GPU_POOL_SIZE", &size), ("GPU_POOL_LOCAL_SIZE", &size)]);
            process.env("GPU_POOL_MASTER", "127.0.0.1").env("GPU_POOL_PORT", port.to_string());
            process.env("GPU_POOL_TRANSPORT", "shm");
        }
        process.spawn().unwrap()
    };
    for mut process in (0..processes).map(start).collect::<Vec<_>>() {
        assert!(process.wait().unwrap().success());
    }
    records(&folder)
}

#[test]
fn trace_shows_a_flight_record() {
    let file = &hang(1)[0];
    let trace = |more: &[&str]| gpu_pool(&[&["trace", file.to_str().unwrap()], more].concat(), &[]);
    let shown = text(&trace(&[]));
    assert!(shown.starts_with("pid ") && shown.contains("device 0: no progress for "), "{shown}");
    let line = |begin: &str| shown.lines().find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("{shown}"));
    let stuck = line(" device 1");
    assert!(
        stuck.contains(" MISSING ") && stuck.contains(" runs its closure; last call: upload, 256 bytes ("),
        "{shown}"
    );
    let waits = line(" device 0");
    assert!(waits.contains("command.rs:") && waits.ends_with("  waits for device 1 in all_reduce"), "{shown}");
    assert!(line(" device 1, stream ").contains(" upload, 256 bytes ("), "{shown}");
    let sum = shown.lines().find(|line| line.contains("  all_reduce, 256 bytes, devices [0, 1], by "));
    assert!(sum.is_some_and(|sum| sum.starts_with(" device 0 ") && sum.ends_with("), NOT OVER")), "{shown}");
    let json: serde_json::Value = serde_json::from_slice(&trace(&["--json", "--top", "1"]).stdout).unwrap();
    assert_eq!(
        (&json["devices"][0]["missing"], json["calls"].as_array().unwrap().len()),
        (&true.into(), 2),
        "{json:#}"
    );
    let record = fs::read_to_string(file).unwrap();
    let of_two = record.replace("\"gpu_pool_flight_record\":1", "\"gpu_pool_flight_record\":2");
    for (changed, why) in
        [(&record[..record.len() / 2], "the file is cut off"), (&of_two, "a flight record of version 2")]
    {
        fs::write(file, changed).unwrap();
        let refused = trace(&[]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(1) && said.contains(&format!("0.json: {why}")), "{said}");
    }
    fs::remove_dir_all(file.parent().unwrap()).unwrap();
}

#[test]
fn trace_shows_the_flight_records_of_several_processes_together() {
    let files = hang(2);
    let trace = |files: &[&Path]| {
        let files = files.iter().map(|file| file.to_str().unwrap());
        gpu_pool(&["trace"].into_iter().chain(files).collect::<Vec<_>>(), &[])
    };
    let shown = text(&trace(&[&files[0], &files[1]]));
    assert_eq!(shown, text(&trace(&[&files[1], &files[0]])));
    assert!(shown.starts_with("process 0, "), "{shown}");
    let devices: Vec<_> = shown.lines().filter(|line| line.starts_with(" process ")).take(4).collect();
    let waits = |line: &&&str| line.ends_with(" is in all_reduce, 256 bytes");
    assert_eq!(devices.iter().filter(waits).count(), 2, "{shown}");
    let begins =
        [" process 1, device 1  MISSING ", " process 0, device 0 ", " process 0, device 1 ", " process 1, device 0 "];
    assert!(devices.iter().zip(begins).all(|(line, begin)| line.starts_with(begin)), "{shown}");
    let small = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/unit/trace/small.json"));
    assert_eq!(trace(&[&files[0], small]).status.code(), Some(1));
    fs::remove_dir_all(files[0].parent().unwrap()).unwrap();
}
