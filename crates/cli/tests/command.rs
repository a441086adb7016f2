//! The program `gpu-pool` as a user runs it: output and exit codes, on software GPUs.

use std::process::{Command, Output};

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
    std::fs::remove_file(out).unwrap();
    let wrong = gpu_pool(&["trace", concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")], &[]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("README.md: no Chrome trace"));
}
