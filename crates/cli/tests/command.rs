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
