//! Collectives and training steps of two processes, against NCCL alone, PyTorch's DDP and MPI.
//!
//! This process starts the others, and gives orders to the first of each kind; that one passes them on to the others
//! and answers with the time of the slowest. In a turn each process makes one call that is not timed, then calls back
//! to back, and waits for its devices. The sides take turns, in one run.
//!
//! On GPUs, two processes with a GPU each:
//!
//! * `gpu/<as_is, forced or sockets>/all_reduce/f32/<bytes>`: microseconds per call, 1 KB to 1 GB (`--max BYTES`)
//! * `gpu/<as_is, forced or sockets>/single/f32/<bytes>`: a call and the wait for it, one after the other
//! * `gpu/meeting`: a `world.barrier()`, the part of each call before its launch that is on the host
//! * `gpu/as_is/zero/<parameters>`, `zero_clip`: a step of a `ShardedOptimizer` with gradients and parameters of bf16
//!   in one buffer each, by one kernel in memory that the processes lend each other, against three collectives and the
//!   kernels between them, and against torch (reduce-scatter, fused AdamW or all between compiled, all-gather)
//! * `gpu/<as_is or sockets>/step/<batch>`: a training step of `overlap`'s perceptron; `alone` is one without exchange
//!
//! As it is, small sums go by own kernels; under `forced` all goes over NCCL. Under `sockets` NCCL talks over the
//! loopback interface, as between two machines. With one GPU both processes share it, under `sockets` only and without
//! DDP: then they take turns on it, and the times say nothing.
//!
//! The peers: `NCCL` as programs usually call it; `polled NCCL` is a communicator that is not blocking, whose calls are
//! polled until they are launched, as our transport does (`src/cluster/transport/nccl.rs`).
//!
//! On software GPUs (without a GPU, or with `GPU_POOL_BACKEND=host`): see [`software`].

#[path = "../support/perceptron.rs"]
mod perceptron;
#[path = "../support/mod.rs"]
mod support;

mod backward;
mod host;
mod killed;
mod mpi;
mod nccl;
mod processes;
mod software;

use std::cell::RefCell;

use processes::{Processes, TASK};
use support::{Bench, MICROSECONDS, Side, child::Process, gpus};

/// What NCCL may use between the processes. Own kernels come to those as they are alone.
const WAYS: [(&str, &[(&str, &str)]); 3] = [
    ("as_is", &[]),
    ("forced", &[]),
    (
        "sockets",
        &[
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_SHM_DISABLE", "1"),
            ("NCCL_NET", "Socket"),
            ("NCCL_SOCKET_IFNAME", "lo"),
            ("NCCL_HOSTID", "gpu-pool"),
        ],
    ),
];

/// Multicast between GPUs of one machine is off, as in the other benches.
const NO_MULTICAST: (&str, &str) = ("NCCL_NVLS_ENABLE", "0");

const MOST: usize = 1 << 30;

/// Single calls are measured up to this size.
const MOST_SINGLE: usize = 4 << 20;

/// Parameters of a divided optimizer.
const PARAMETERS: [usize; 5] = [256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// Rows of all processes in a training step.
const BATCHES: [usize; 2] = [8192, 65536];

fn main() {
    if let Ok(task) = std::env::var(TASK) {
        return host::serve(&task);
    }
    let mut bench = Bench::new("cluster");
    bench.set_turns(1, 5);
    match gpus::count() {
        0 => software::measure(&mut bench),
        _ if !nccl::is_there() => println!("skipped: no libnccl"),
        gpus => measure(&mut bench, gpus),
    }
    bench.finish();
}

fn measure(bench: &mut Bench, gpus: usize) {
    let most = bench.most_bytes(MOST);
    for (way, variables) in WAYS {
        if gpus < 2 && way != "sockets" {
            println!("skipped: {way} needs two GPUs");
            continue;
        }
        let transport = if way == "as_is" { "auto" } else { "nccl" };
        let pair = Processes::by_hand(&format!("gpu 1 {most}"), transport, |rank, process| {
            process.envs([NO_MULTICAST]).envs(variables.iter().copied());
            if way == "sockets" {
                process.env("NCCL_HOSTID", format!("gpu-pool-{rank}"));
            }
        });
        if way == "as_is" {
            row(bench, "gpu/meeting", &[("gpu-pool", &pair.first, "barrier".to_owned())]);
            divided(bench, &pair.first);
        }
        for bytes in (10..=30).map(|power| 1 << power).filter(|&bytes| bytes <= most) {
            all_reduces(bench, &pair.first, "all_reduce", way, bytes);
            if bytes <= MOST_SINGLE && (bytes.trailing_zeros() % 6 == 4 || bytes == MOST_SINGLE) {
                all_reduces(bench, &pair.first, "single", way, bytes);
            }
        }
        if way != "forced" {
            steps(bench, &pair.first, way, variables);
        }
    }
}

fn all_reduces(bench: &mut Bench, pair: &RefCell<Process>, what: &str, way: &str, bytes: usize) {
    let order = |side: &str| format!("{what}/{side}/{bytes}");
    let sides = [("gpu-pool", "world"), ("NCCL", "blocking"), ("polled NCCL", "polled")];
    let sides = sides.map(|(name, side)| (name, pair, order(side)));
    row(bench, &format!("gpu/{way}/{what}/f32/{bytes}"), &sides);
}

/// Steps of a divided optimizer.
fn divided(bench: &mut Bench, pair: &RefCell<Process>) {
    let cases = PARAMETERS.iter().flat_map(|params| ["zero", "zero_clip"].map(|what| (what, params)));
    let cases: Vec<_> = cases.filter(|(what, params)| bench.wants(&format!("gpu/as_is/{what}/{params}"))).collect();
    if cases.is_empty() {
        return;
    }
    let torch = Process::torch("fused.py", 2, &["2"], &[NO_MULTICAST]).map(RefCell::new);
    for (what, params) in cases {
        let clip = if what == "zero" { "plain" } else { "clip" };
        let order = |way: &str| format!("{way}/{clip}/{params}");
        let mut sides = vec![("gpu-pool", pair, order("lent")), ("gpu-pool, three calls", pair, order("three_calls"))];
        for (name, form) in [("torch, fused AdamW", "calls"), ("torch, compiled", "compiled")] {
            sides.extend(torch.iter().map(|torch| (name, torch, format!("zero:{params}:{clip}:{form}"))));
        }
        row(bench, &format!("gpu/as_is/{what}/{params}"), &sides);
    }
}

/// Training steps of both processes, against those of two processes of torch.
fn steps(bench: &mut Bench, pair: &RefCell<Process>, way: &str, variables: &[(&str, &str)]) {
    let cases = BATCHES.iter().flat_map(|batch| ["step", "alone"].map(|what| (what, batch)));
    let cases = cases.map(|(what, batch)| (format!("gpu/{way}/{what}/{batch}"), what, batch));
    let cases: Vec<_> = cases.filter(|(case, ..)| bench.wants(case)).collect();
    if cases.is_empty() {
        return;
    }
    let variables = [variables, &[NO_MULTICAST]].concat();
    let torch = Process::torch("ddp.py", 2, &["2"], &variables).map(RefCell::new);
    for (case, what, batch) in cases {
        let mut sides = vec![("gpu-pool", pair, format!("{what}/{batch}"))];
        sides.extend(torch.iter().map(|torch| ("DDP", torch, format!("{batch}:{what}"))));
        row(bench, &case, &sides);
    }
}

/// Compares sides: names, the processes that carry them out, and their orders. Ours is the first.
fn row(bench: &mut Bench, case: &str, sides: &[(&str, &RefCell<Process>, String)]) {
    if !bench.wants(case) {
        return;
    }
    let ask = |process: &RefCell<Process>, order: &str, rounds| {
        let mut process = process.borrow_mut();
        process.order(order, rounds);
        process.answer()
    };
    // So many calls that 6 turns of all sides take the case's time. What is done for the first call only does not
    // count.
    let once = |(_, process, order): &(&str, &RefCell<Process>, String)| {
        ask(process, order, 1);
        ask(process, order, 1)
    };
    let once = sides.iter().map(once).fold(1.0, f64::max);
    let rounds = (bench.micros_of_case() as f64 / (6 * sides.len()) as f64 / once).clamp(1.0, 200.0) as usize;
    let mut sides = sides.iter().map(|(name, process, order)| Side::new(name, move || ask(process, order, rounds)));
    let ours = sides.next().expect("ours");
    bench.compare(case, MICROSECONDS, ours, sides.collect());
}
