//! The memory pool against the driver's own, `cuMemAllocAsync` and `cuMemFreeAsync` from the same device threads
//! (default pool, release threshold raised, so that it keeps what is freed), and against PyTorch's caching allocator.
//!
//! * `small/<pair_4K or ring_16>/<one or all>`: 4 KiB from the pool and back; sixteen live ones of mixed small sizes,
//!   of which one after the other is replaced. On one device thread, and on all at once, with the one among the peers.
//! * `large/<live>`: of so many live blocks a random one is freed, and as much allocated again. Of 1 to 512 MiB each;
//!   with 1000 live ones of 1 to 64 MiB, with 10,000 of 1 to 4, so that three sides' memory fits on a GPU.
//! * `remote/<thread or device>/<producers>`: drops on other threads than the owner's; `remote/take`: what they cost
//!   the owner when he allocates the same memory again, against memory that he has freed himself
//! * `steal/<in_flight, ordered or over>`: memory that one stream has used, for another; the peer is the same stream
//! * `rmm_random/<allocations>/<most MiB>`, `rmm_streams/<streams>`: RMM's benchmarks `random_allocations` and
//!   `multi_stream_allocations`, re-implemented (see `trace` and `streams`)
//! * `fragmentation/<what>`: loops that have run others out of memory, under a limit that leaves no room for waste
//! * `waste`: bytes held for bytes asked for, by the rounding of sizes
//! * `words/is_complete`: asking whether work is over, against `cuEventQuery`
//!
//! Operations are nanoseconds each, in batches; medians of many turns. `GPU_POOL_TORCH` names the program that is
//! PyTorch's side (`benches/peers`). On software GPUs the numbers say what the pool's own books cost.

#[path = "../support/mod.rs"]
mod support;

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

use gpu_pool::{Builder, Check, GpuPool};
use support::{Bench, Side, Unit, gpus};

/// What a software GPU has: room for every case, and nobody touches it.
const SOFTWARE_MEMORY: u64 = 96 << 30;

/// What the turns of a slow peer may take.
const SECONDS: f64 = 3.0;

/// What there is to run on.
pub struct Machine {
    /// `gpu` or `software`: the first part of every case's name.
    pub kind: &'static str,
    /// Whether there are no GPUs, and so no driver.
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

    /// A pool of the first so many devices, as a program has it in production: no checker, no records.
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

/// Sets so many turns as take some seconds, up to `most`; `slowest` is a turn of the slowest side. A peer may be asked
/// to map gigabytes at each operation.
pub fn pace(bench: &mut Bench, most: usize, slowest: impl FnOnce()) {
    let clock = Instant::now();
    slowest();
    let turns = SECONDS / clock.elapsed().as_secs_f64().max(1e-6);
    bench.set_turns(0, (turns as usize).clamp(3, most));
}

/// Records what is no measurement of time, and the same at every turn.
pub fn record(bench: &mut Bench, case: &str, unit: Unit, ours: f64, peers: &[(&str, f64)]) {
    bench.set_turns(0, 1);
    let peers = peers.iter().map(|&(name, value)| Side::new(name, move || value)).collect();
    bench.compare(case, unit, Side::new("gpu-pool", || ours), peers);
}

fn main() {
    let mut bench = Bench::new("memory");
    let machine = Machine::new();
    small::run(&mut bench, &machine);
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
