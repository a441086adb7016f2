//! Measures the collectives against NCCL, which is loaded at run time; the same device threads call it, one rank each.
//! In the sweeps of sizes and in graphs NCCL also runs in a process for each GPU, see `processes.rs`.
//!
//! Both sides take turns in one process. In a turn every device thread warms up, meets the others, enqueues dependent
//! operations back to back (all-reduce and broadcast in place, so that an output is the next input) and waits for its
//! stream. The time is the slowest thread's, per operation. NCCL runs twice: *plain*, in ordinary memory of our pool,
//! and in *windows*, memory of its own registered as symmetric; the best of all its ways counts at each size. NVLink
//! multicast stays off on both sides (`NCCL_NVLS_ENABLE=0`, see nvls in
//! <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html>). Results are checked before anything is timed.
//! Sizes and bus bandwidth are those of
//! [nccl-tests](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
//!
//! * `<gpu or software>/<operation>/<f32 or bf16>/<devices>/<bytes>`: microseconds, 1 KB to 1 GB (`--max BYTES`)
//! * `.../graph/all_reduce/<f32 or bf16>/<devices>/<bytes>`: each all-reduce of 20 in a graph; NCCL's is captured, too
//! * `.../algorithm/..`: each algorithm by itself, see `algorithms.rs`
//! * `.../all_reduce_norm/<f32 or bf16>/<devices>/<hidden>/<rows>`, and `.../graph/all_reduce_norm/..`: `norm.rs`
//! * `.../zero/bf16/<devices>/<parameters>`, `.../zero_clip/..`, each also `.../graph/..`: a step of an optimizer whose
//!   state is divided, see `sharded.rs`
//! * `.../host/all_reduce/f32/<devices>/1024`, `.../host/meeting/..`: what a small call costs the host, see `host.rs`
//! * `.../setup/<devices>`: a further pool (or communicators) on GPUs in use, until the first all-reduce is over;
//!   `.../memory`: the memory that this takes on the fullest GPU
//! * `.../late_1ms/<devices>`: one member calls an all-reduce of 64 KB one millisecond late; how much longer than that
//!   the others are in it
//! * `.../single/<devices>/<bytes>`: an all-reduce and the wait for it, one after the other; see its p99
//! * `.../host_load/<devices>/<bytes>`: the same while every core is kept busy
//! * `.../abort_recovery/<devices>`: from a member's error, with collectives in flight, to the end of the next scope's
//!   all-reduce
//! * `.../meeting/<devices>`: `barrier`, back to back, against `std::sync::Barrier`; `software/meeting/8` also where
//!   there are GPUs
//! * `.../no_peer/..`: without access to each other's memory, see `no_peer.rs`
//! * `.../beside_gemm/<devices>`: duration of matrix products during all-reduces of 64 MB, as a multiple of their
//!   duration alone
//!
//! `SMs` are the blocks of our kernels. NCCL's blocks are read from captured graphs: `plain_blocks` and
//! `windows_blocks` in the results of graphs.
//!
//! The peers of graphs, `all_reduce_norm` and `zero` that are torch's run in `benches/peers/fused.py`, a process for
//! each GPU.
//!
//! NCCL's collectives by copy engines are its windows with `NCCL_CTA_POLICY=2` in the environment (since 2.28). A lean
//! NCCL, for `setup`, has `NCCL_MAX_NCHANNELS=1 NCCL_BUFFSIZE=65536`.
//!
//! `GPU_POOL_SHARE=2 CUDA_DEVICE_MAX_CONNECTIONS=32` tries all of it on one GPU, without NCCL: times mean nothing.
//!
//! `--plot DIR` draws each sweep of sizes; `--case-ms MS` sets how long each size is measured. Without GPUs only our
//! side runs, on software GPUs, up to 4 MB.

#[path = "../support/mod.rs"]
mod support;

mod algorithms;
mod calls;
mod extras;
mod graph;
mod host;
mod nccl;
mod no_peer;
mod norm;
mod ops;
mod plot;
mod processes;
mod sharded;
mod stage;
mod sweep;

use std::cell::LazyCell;

use gpu_pool::{Builder, GpuPool};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use half::bf16;
use nccl::Nccl;
use ops::Op;
use support::{Bench, child::Torch, gpus};

/// PyTorch's side, started when a case first needs it.
pub type LazyTorch<'a> = LazyCell<Option<Torch>, Box<dyn FnOnce() -> Option<Torch> + 'a>>;

/// The devices and peers of this run.
pub struct Machine {
    /// `gpu` or `software`: the first part of every case's name.
    pub kind: &'static str,
    /// True without GPUs, and so without NCCL.
    pub software: bool,
    /// The largest size.
    pub most: usize,
    /// The peer, if it was found.
    pub nccl: Option<&'static Nccl>,
}

impl Machine {
    /// A pool of the first `devices` devices, as in production: no checker, no records.
    pub fn pool(&self, devices: usize) -> GpuPool {
        self.builder(devices).build().expect("the devices can be opened")
    }

    /// The builder of that pool.
    pub fn builder(&self, devices: usize) -> Builder {
        gpus::builder(self.software, devices).check(Check::Off).record_memory(false)
    }

    /// PyTorch's side of what one kernel of ours does, for pools of so many devices: a process for each GPU.
    pub fn torch(&self, devices: usize) -> Option<Torch> {
        if self.software { None } else { Torch::start("fused.py", devices.min(gpus::count())) }
    }
}

fn main() {
    if no_peer::is_child() || processes::is_child() {
        return;
    }
    // SAFETY: the program still has only one thread.
    unsafe {
        // Never use multicast: on a shared host it can put other users' GPUs out of service.
        std::env::set_var("NCCL_NVLS_ENABLE", "0");
        // Enables NCCL's kernels for symmetric memory also if one process has several ranks, and for memory that is not
        // registered.
        std::env::set_var("NCCL_SINGLE_PROC_MEM_REG_ENABLE", "1");
        std::env::set_var("NCCL_SYM_NOWIN_ENABLE", "1");
        // Graph buffers may be registered only by processes with one GPU each; others may hang (see this variable in
        // NCCL's env.html).
        std::env::set_var("NCCL_GRAPH_REGISTER", "0");
    }
    let mut bench = Bench::new("collectives");
    let devices_to_use = gpus::device_count();
    let software = devices_to_use == 0;
    let (kind, devices, most) = if software { ("software", 4, 4 << 20) } else { ("gpu", devices_to_use, 1 << 30) };
    // Two ranks of NCCL cannot share a GPU.
    let nccl = if devices_to_use > gpus::count() || software { None } else { Nccl::load() };
    let machine = Machine { kind, software, most: bench.most_bytes(most), nccl };
    let pool = machine.pool(devices);

    let mut curves = Vec::new();
    let mut counts = vec![devices, 2];
    counts.dedup();
    counts.retain(|&world| world > 1 && world <= devices);
    for &world in &counts {
        curves.extend(sweep::run::<f32>(&mut bench, &machine, &pool, world, &Op::ALL));
        curves.extend(sweep::run::<bf16>(&mut bench, &machine, &pool, world, &[Op::AllReduce]));
        let torch: LazyTorch<'_> = LazyCell::new(Box::new(|| machine.torch(world)));
        graph::run(&mut bench, &machine, &pool, world, &torch);
        norm::run(&mut bench, &machine, &pool, world, &torch);
        sharded::run(&mut bench, &machine, &pool, world, &torch);
        host::run(&mut bench, &machine, world);
        algorithms::run(&mut bench, &machine, world);
    }
    if let Some(folder) = bench.plot_folder() {
        curves.iter().for_each(|curve| plot::draw(folder, curve));
    }
    extras::run(&mut bench, &machine, &pool);
    calls::run(&mut bench, &machine, &pool);
    // Runs alone: other processes create and destroy contexts.
    drop(pool);
    no_peer::run(&mut bench, &machine, &counts);
    bench.finish();
    curves.iter().for_each(sweep::Curve::summarise);
}
