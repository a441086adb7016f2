//! Measures the memory pool against the driver's own, `cuMemAllocAsync` and `cuMemFreeAsync` from the same device
//! threads (default pool, release threshold raised, so that it keeps freed memory), and against PyTorch's caching
//! allocator.
//!
//! * `small/<pair_4K or ring_16>/<one or all>`: 4 KiB from the pool and back; sixteen live blocks of mixed small sizes,
//!   which are replaced one after the other. On one device thread, and on all at once; the single thread is among the
//!   peers.
//! * `adopt`: 4 KiB of other code as a buffer, and its drop (target: 100 ns); the peer is 4 KiB from the pool
//! * `large/<live>`: a random one of the live blocks is freed, and as much allocated again. Blocks of 1 to 512 MiB
//!   each; with 1000 live ones 1 to 64 MiB, with 10,000 1 to 4 MiB, so that the memory of three sides fits on a GPU.
//! * `remote/<thread or device>/<producers>`: drops on other threads than the owner's; `remote/take`: their cost for
//!   the owner when it allocates the same memory again, compared with memory that it has freed itself
//! * `steal/<in_flight, ordered or over>`: memory that one stream has used, for another; the peer is the same stream
//! * `rmm_random/<allocations>/<most MiB>`, `rmm_streams/<streams>`: RMM's benchmarks `random_allocations` and
//!   `multi_stream_allocations`, re-implemented (see `trace` and `streams`)
//! * `fragmentation/<what>`: loops that made other allocators run out of memory, under a limit that leaves no room for
//!   waste
//! * `waste`: bytes held for bytes asked for, by the rounding of sizes
//! * `words/is_complete`: asking whether work is over, against `cuEventQuery`
//!
//! Results are nanoseconds per operation, in batches; medians of many turns. `GPU_POOL_TORCH` names the program that
//! runs PyTorch's side (`benches/peers`). On software GPUs the numbers show the cost of the pool's own bookkeeping.

#[path = "../support/mod.rs"]
mod support;

mod adopt;
mod driver_pool;
mod fragmentation;
mod large;
mod random;
mod remote;
mod sides;
mod small;
mod spin;
mod steal;
mod streams;
mod torch;
mod trace;
mod waste;
mod words;

use std::time::Instant;

use gpu_pool::{Builder, GpuPool};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use support::{Bench, Side, Unit, gpus};

/// Memory of a software GPU: room for every case; it is never touched.
const SOFTWARE_MEMORY: u64 = 96 << 30;

/// Seconds for the turns of a slow peer.
const SECONDS: f64 = 3.0;

/// The devices and peers of this run.
pub struct Machine {
    /// `gpu` or `software`: the first part of every case's name.
    pub kind: &'static str,
    /// True without GPUs, and so without their driver.
    pub software: bool,
    /// How many devices.
    pub devices: usize,
    /// PyTorch's side, if it was named.
    pub torch: Option<torch::Torch>,
}

impl Machine {
    fn new() -> Self {
        let hardware = gpus::count();
        let software = hardware == 0;
        let (kind, devices) = if software { ("software", 4) } else { ("gpu", hardware.min(8)) };
        let torch = torch::Torch::start();
        if software {
            println!("no GPU: software GPUs, and the driver's pool is not among the peers");
        }
        match &torch {
            Some(torch) => println!("{} is {}", torch.name, torch.program),
            None => println!("GPU_POOL_TORCH is not set: PyTorch's allocator is not among the peers"),
        }
        Machine { kind, software, devices, torch }
    }

    /// A pool of the first `devices` devices, as in production: no checker, no records.
    pub fn builder(&self, devices: usize) -> Builder {
        let builder = match self.software {
            true => GpuPool::builder().host(devices).software_memory(SOFTWARE_MEMORY),
            false => GpuPool::builder().cuda().devices(&(0..devices).collect::<Vec<_>>()),
        };
        builder.check(Check::Off).record_memory(false)
    }

    /// [`builder`](Self::builder)'s, built.
    pub fn pool(&self, devices: usize) -> GpuPool {
        self.builder(devices).build().expect("the devices can be opened")
    }
}

/// Sets the number of turns to what takes some seconds, at most `most`. `slowest` is a turn of the slowest side: a peer
/// may map gigabytes at each operation.
pub fn pace(bench: &mut Bench, most: usize, slowest: impl FnOnce()) {
    let clock = Instant::now();
    slowest();
    let turns = SECONDS / clock.elapsed().as_secs_f64().max(1e-6);
    bench.set_turns(0, (turns as usize).clamp(3, most));
}

/// Records a value that is no time, and equal in every turn.
pub fn record(bench: &mut Bench, case: &str, unit: Unit, ours: f64, peers: &[(&str, f64)]) {
    bench.set_turns(0, 1);
    let peers = peers.iter().map(|&(name, value)| Side::new(name, move || value)).collect();
    bench.compare(case, unit, Side::new("gpu-pool", || ours), peers);
}

fn main() {
    let mut bench = Bench::new("memory");
    let machine = Machine::new();
    small::run(&mut bench, &machine);
    adopt::run(&mut bench, &machine);
    large::run(&mut bench, &machine);
    remote::run(&mut bench, &machine);
    steal::run(&mut bench, &machine);
    random::run(&mut bench, &machine);
    streams::run(&mut bench, &machine);
    fragmentation::run(&mut bench, &machine);
    waste::run(&mut bench, &machine);
    words::run(&mut bench, &machine);
    bench.finish();
}
