//! The programs of `examples/sources`: each prints what its source prints, and notices a wrong result; and the table of
//! the guide tells the truth about them. On software GPUs, with the race checker. Sizes are small, for debug builds.
#![cfg(feature = "blas")]

use gpu_pool::{Builder, GpuPool, collective::ReduceOrder};
use gpu_pool_lab::{Check, prelude::*};
use std::{fs, path::Path, time::Duration};

#[path = "../../../examples/sources/channel_parallel.rs"]
#[allow(dead_code, reason = "`main`")]
mod channel_parallel;
#[path = "../../../examples/sources/copy_while_computing.rs"]
#[allow(dead_code, reason = "`main`")]
mod copy_while_computing;
#[path = "../../../examples/sources/data_parallel.rs"]
#[allow(dead_code, reason = "`main`")]
mod data_parallel;
#[path = "../../../examples/sources/five_steps.rs"]
#[allow(dead_code, reason = "`main`")]
mod five_steps;
#[path = "../../../examples/sources/model_parallel.rs"]
#[allow(dead_code, reason = "`main`")]
mod model_parallel;
#[path = "../../../examples/sources/perceptron.rs"]
#[allow(dead_code, reason = "`main`")]
mod perceptron;
#[path = "../../../examples/sources/producer_consumer.rs"]
#[allow(dead_code, reason = "`main`")]
mod producer_consumer;
#[path = "../../../examples/sources/staged_copy.rs"]
#[allow(dead_code, reason = "`main`")]
mod staged_copy;
#[path = "../../../examples/sources/sum_on_devices.rs"]
#[allow(dead_code, reason = "`main`")]
mod sum_on_devices;
#[path = "../../../examples/sources/thread_per_device.rs"]
#[allow(dead_code, reason = "`main`")]
mod thread_per_device;
#[path = "../../../examples/sources/two_series.rs"]
#[allow(dead_code, reason = "`main`")]
mod two_series;
#[path = "../../../examples/sources/unified_slices.rs"]
#[allow(dead_code, reason = "`main`")]
mod unified_slices;

fn devices(count: usize) -> Builder {
    // Longer than any test takes: a hang is told from a slow machine.
    GpuPool::builder().host(count).check(Check::Races).timeout(Duration::from_secs(300))
}

fn pool(count: usize) -> GpuPool {
    devices(count).build().unwrap()
}

/// What a program prints, which must succeed.
fn printed(run: impl FnOnce(&mut Vec<u8>) -> anyhow::Result<()>) -> String {
    let mut out = Vec::new();
    run(&mut out).unwrap();
    String::from_utf8(out).unwrap()
}

/// The lines are `<label>: <number> sec`.
#[track_caller]
fn assert_times(printed: &str, labels: &[&str]) {
    assert_eq!(printed.lines().count(), labels.len(), "{printed}");
    for (line, label) in printed.lines().zip(labels) {
        let number = line.strip_prefix(label).and_then(|rest| rest.strip_prefix(": ")?.strip_suffix(" sec"));
        assert!(number.is_some_and(|number| number.parse::<f64>().is_ok()), "{line}");
    }
}

#[test]
fn data_parallel_prints_the_tutorials_lines() {
    let full = "\tIn Model: input size [15, 5] output size [15, 2]\n".repeat(2)
        + "Outside: input size [30, 5] output_size [30, 2]\n";
    let last = "\tIn Model: input size [5, 5] output size [5, 2]\n".repeat(2)
        + "Outside: input size [10, 5] output_size [10, 2]\n";
    let expected = "Let's use 2 GPUs!\n".to_owned() + &full.repeat(3) + &last;
    assert_eq!(printed(|out| data_parallel::run(&pool(2), out)), expected);
    // On one device: what is outside alone.
    let one = printed(|out| data_parallel::run(&pool(1), out));
    assert!(
        one.starts_with("\tIn Model: input size [30, 5] output size [30, 2]\nOutside: input size [30, 5]"),
        "{one}"
    );
    let zeros = (vec![0.0; 10], vec![0.0; 2]);
    assert!(data_parallel::check(&[1.0; 5], &zeros, &[0.0; 2]).is_ok());
    assert!(data_parallel::check(&[1.0; 5], &zeros, &[0.0, 0.1]).is_err());
    assert!(data_parallel::check(&[1.0; 10], &zeros, &[0.0; 2]).is_err());
}

#[test]
fn model_parallel_equals_one_device() {
    let text = printed(|out| model_parallel::run(&pool(2), out, 2));
    assert!(text.starts_with("epoch 1: loss ") && text.ends_with("bit for bit\n"), "{text}");
    assert!(model_parallel::check(&[3.0, 1.0, 0.5], &[3.0, 1.0, 0.5]).is_ok());
    assert!(model_parallel::check(&[3.0, 1.0, 0.5], &[3.0, 1.0, 0.6]).is_err());
    assert!(model_parallel::check(&[3.0, 2.0, 0.5], &[3.0, 2.0, 0.5]).is_err());
}

#[test]
fn five_steps_give_the_same_bits_with_both_sums() {
    for count in [1, 2, 3] {
        let pool = devices(count).reduce_order(ReduceOrder::Rank).build().unwrap();
        let text = printed(|out| five_steps::run(&pool, out, 5));
        assert!(text.ends_with("give the same bits\n"), "{text}");
    }
    assert!(five_steps::check(&[0.0], &[-0.0]).is_err());
}

#[test]
fn a_grid_learns_as_one_row_of_it() {
    let text = printed(|out| channel_parallel::run(&pool(4), &pool(2), out, 50));
    assert!(text.starts_with("step 0: loss ") && text.ends_with("4 devices learn as 2 do\n"), "{text}");
    assert!(channel_parallel::check(&[3.0, 1.0], &[3.0, 1.0]).is_ok());
    assert!(channel_parallel::check(&[3.0, 1.0], &[3.0, 1.1]).is_err());
    assert!(channel_parallel::check(&[3.0, 2.0], &[3.0, 2.0]).is_err());
}

#[test]
fn two_series_run_on_two_devices() {
    assert_times(&printed(|out| two_series::run(&pool(2), out, 40, 50)), &["GPU1 time", "GPU2 time", "GPU1 & GPU2"]);
    assert!(two_series::check(&[2.0], 1, &[4.0], &[4.0]).is_ok());
    assert!(two_series::check(&[2.0], 1, &[4.0], &[5.0]).is_err());
    assert!(two_series::check(&[2.0], 1, &[5.0], &[5.0]).is_err());
}

#[test]
fn copies_overlap_computing() {
    let text = printed(|out| copy_while_computing::run(&pool(1), out, 40, 50));
    assert_times(&text, &["Run on GPU1", "Copy to CPU", "Run on GPU1 and copy to CPU"]);
    let host = [pool(1).pinned::<f32>(1).unwrap()];
    assert!(copy_while_computing::check(&[vec![1.0]], &host).is_err());
    assert!(copy_while_computing::check(&[vec![0.0]], &host).is_err());
    assert!(copy_while_computing::check(&[], &[]).is_err());
}

#[test]
fn the_perceptron_on_a_cpu_and_two_devices_equals_a_plain_loop() {
    let text = printed(|out| perceptron::run(&pool(2), out, 12));
    assert!(text.starts_with("step 0: loss ") && text.contains("step 10: loss "), "{text}");
    assert!(perceptron::check(&[0.0]).is_err());
}

#[test]
fn unified_memory_is_worked_on_by_slices() {
    for count in [1, 4] {
        assert_eq!(printed(|out| unified_slices::run(&pool(count), out)), "Test Passed\n");
    }
    assert!(unified_slices::check(&[1.0, 1.0], &[2.0, 2.0], &[3.0, 2.0]).is_err());
}

#[test]
fn each_device_has_a_thread_and_tasks_of_its_own() {
    let text = printed(|out| thread_per_device::run(&pool(3), out, 7000));
    assert!(text.starts_with("Worker 0 uses software GPU 0\nWorker 1 uses software GPU 1\n"), "{text}");
    assert!(text.ends_with("devices: 21000\na task on each device: 6000\nfour threads: 84000\n"), "{text}");
    assert!(thread_per_device::check("", 2.0, 1.0, &mut Vec::new()).is_err());
}

#[test]
fn a_copy_is_staged_by_hand_and_by_the_library() {
    let staged = devices(2).without_peer_access().build().unwrap();
    // Fewer pieces than buffers; as many; a shorter last one; none.
    for len in [10, 200, 1000, 1050, 0] {
        let text = printed(|out| staged_copy::run(&staged, out, len, 100));
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("by hand: ") && text.contains("by Device::copy: "), "{text}");
    }
    printed(|out| staged_copy::run(&pool(2), out, 1050, 100));
    assert!(staged_copy::check(&[1.0], &[2.0]).is_err());
}

#[test]
fn a_consumer_waits_for_its_producer() {
    let text = printed(|out| producer_consumer::run(&pool(2), out, 20, 1000));
    assert_eq!(text, "device 1 consumed 20 buffers of device 0\n");
    assert!(producer_consumer::check(&[0.0, 9.0], 10).is_err());
}

#[test]
fn results_are_summed_on_the_cpu_and_on_the_devices() {
    for count in [1, 4] {
        let text = printed(|out| sum_on_devices::run(&pool(count), out, 100_001));
        assert_eq!(text.lines().count(), count + 1, "{text}");
    }
    assert!(sum_on_devices::check(0.333, 0.334).is_err());
    assert!(sum_on_devices::check(0.4, 0.4).is_err());
}

/// Lines of a program without blank ones and comments: all, and those without the functions `main` and `check`.
fn lines(source: &str) -> (usize, usize) {
    let (mut all, mut job, mut extra) = (0, 0, false);
    for line in source.lines().filter(|line| !line.trim().is_empty() && !line.trim().starts_with("//")) {
        extra |= line.starts_with("fn main(") || line.starts_with("pub fn check(");
        (all, job) = (all + 1, job + usize::from(!extra));
        extra &= line != "}";
    }
    (all, job)
}

#[test]
fn the_guides_table_counts_the_lines_of_each_program() {
    let root = &Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/src/guide/sources.md")).unwrap();
    let mut told = Vec::new();
    for row in page.lines().filter(|line| line.contains("/examples/sources/")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let name = cells[1].split("/examples/sources/").nth(1).and_then(|rest| rest.split(')').next()).unwrap();
        let source = fs::read_to_string(root.join("examples/sources").join(name)).unwrap();
        let (all, job) = lines(&source);
        assert_eq!(cells[3..], [job.to_string(), all.to_string()], "{name}: on the right the lines that it has");
        assert!(!source.contains("kernel!"), "{name} has a kernel");
        told.push(name.to_owned());
    }
    let programs = fs::read_dir(root.join("examples/sources")).unwrap();
    let mut programs: Vec<_> = programs.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    programs.sort();
    told.sort();
    assert_eq!(told, programs, "left: programs of the page; right: programs");
}

#[test]
fn lines_are_counted_without_comments_and_checks() {
    let source =
        "//! What\n\nfn f() {\n    // why\n    g()\n}\nfn main() {\n    f()\n}\npub fn check() {\n}\nfn h() {}\n";
    assert_eq!(lines(source), (9, 4));
}
