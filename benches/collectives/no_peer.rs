//! All-reduce where no GPU may access another's memory, against NCCL with `NCCL_P2P_DISABLE=1`; and the bandwidth of
//! the links to the host.
//!
//! NCCL reads its environment once. So it runs in two child processes, without and with `NCCL_SHM_USE_CUDA_MEMCPY=1`
//! (<https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html>), which take turns with ours; the better one
//! counts at each size. Each process checks its results before anything is timed.

use std::{
    cell::RefCell,
    process::Command,
    time::{Duration, Instant},
};

use gpu_pool::{Device, GpuPool, PinnedBuffer, Result};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;

use crate::{
    Machine,
    nccl::{Club, Nccl},
    ops::Op,
    stage::{Line, Stage, Who},
    support::{
        Bench, GIGABYTES, MICROSECONDS, Side,
        child::{Process, serve},
    },
};

/// The variable that makes a process a child, with the number of devices.
const CHILD: &str = "GPU_POOL_BENCH_NO_PEER";
/// Largest size of a plain run; `--max` may set a larger one.
const MOST: usize = 256 << 20;
const WARM_UP: usize = 3;
/// Piece sizes for the test of the links.
const PIECES: [usize; 3] = [1 << 20, 2 << 20, 4 << 20];

/// Whether this process is a child. If so, it has done its work.
pub fn is_child() -> bool {
    let Ok(world) = std::env::var(CHILD) else { return false };
    let world: usize = world.parse().expect("a number of devices");
    let nccl = Nccl::load().expect("the parent has found NCCL");
    let devices: Vec<usize> = (0..world).collect();
    let pool = GpuPool::builder().cuda().devices(&devices).check(Check::Off).record_memory(false).build();
    let pool = pool.expect("the devices can be opened");
    let club = Club::join(nccl, &pool, world, 0);
    let mut stage: Option<(usize, Stage<'_, f32>)> = None;
    serve(|bytes, calls| {
        let bytes: usize = bytes.parse().expect("a number of bytes");
        if stage.as_ref().is_none_or(|(of, _)| *of != bytes) {
            stage = None;
            let fresh = Stage::new(&pool, Some(&club), world, Op::AllReduce, bytes);
            fresh.check(Who::Plain, "no_peer, NCCL");
            stage = Some((bytes, fresh));
        }
        stage.as_ref().expect("just made").1.turn(Who::Plain, WARM_UP, calls)
    });
    true
}

fn start(world: usize, memcpy: bool) -> Process {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.env(CHILD, world.to_string()).env("NCCL_P2P_DISABLE", "1");
    command.env("NCCL_NVLS_ENABLE", "0");
    // Settings of the parent for other comparisons must not affect this one.
    command.env_remove("NCCL_SINGLE_PROC_MEM_REG_ENABLE").env_remove("NCCL_SYM_NOWIN_ENABLE");
    match memcpy {
        true => command.env("NCCL_SHM_USE_CUDA_MEMCPY", "1"),
        false => command.env_remove("NCCL_SHM_USE_CUDA_MEMCPY"),
    };
    Process::start(&mut command)
}

/// A pool of the first `world` devices without peer access.
fn apart(machine: &Machine, world: usize) -> GpuPool {
    machine.builder(world).without_peer_access().build().expect("the devices can be opened")
}

/// Runs the cases `<kind>/no_peer/...`, with a summary line for each number of devices.
pub fn run(bench: &mut Bench, machine: &Machine, counts: &[usize]) {
    for &world in counts {
        let case = |bytes: usize| format!("{}/no_peer/all_reduce/f32/{world}/{bytes}", machine.kind);
        let links = |piece: usize| format!("{}/no_peer/links/{world}/{piece}", machine.kind);
        let most = bench.asked_for().map_or(MOST, |max| max.min(1 << 30)).min(machine.most);
        let sizes = std::iter::successors(Some(1 << 10), |bytes| Some(bytes * 2)).take_while(|bytes| *bytes <= most);
        let sizes: Vec<usize> = sizes.filter(|bytes| bench.wants(&case(*bytes))).collect();
        let pieces: Vec<usize> = PIECES.into_iter().filter(|piece| bench.wants(&links(*piece))).collect();
        if sizes.is_empty() && pieces.is_empty() {
            continue;
        }
        let pool = apart(machine, world);
        for piece in pieces {
            carry(bench, &links(piece), &pool, piece);
        }
        let children = RefCell::new(match machine.nccl {
            Some(_) if !sizes.is_empty() => vec![start(world, false), start(world, true)],
            _ => Vec::new(),
        });
        let ratios: Vec<f64> =
            sizes.iter().filter_map(|&bytes| point(bench, &case(bytes), &pool, &children, world, bytes)).collect();
        if let Some(worst) = ratios.iter().copied().min_by(f64::total_cmp) {
            let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
            println!("no_peer/{world}: {mean:.2} times the better NCCL in the mean, at worst {worst:.2}");
        }
    }
}

/// Measures one size. Returns how many times as fast as the better NCCL our side is.
fn point(
    bench: &mut Bench,
    case: &str,
    pool: &GpuPool,
    children: &RefCell<Vec<Process>>,
    world: usize,
    bytes: usize,
) -> Option<f64> {
    let stage: Stage<'_, f32> = Stage::new(pool, None, world, Op::AllReduce, bytes);
    stage.check(Who::Ours, case);
    let theirs = |k: usize, calls: usize| {
        let child = &mut children.borrow_mut()[k];
        child.order(&bytes.to_string(), calls);
        child.answer()
    };
    let peers = children.borrow().len();
    // The first turn of each side also checks results, and wakes threads up.
    let mut estimates = vec![(stage.turn(Who::Ours, 2, 3), stage.turn(Who::Ours, 1, 3)).1];
    estimates.extend((0..peers).map(|k| (theirs(k, 3), theirs(k, 3)).1));
    let fastest = estimates.iter().copied().fold(f64::MAX, f64::min);
    let room = Op::AllReduce.most_calls(world) - WARM_UP;
    let calls = ((bench.size(3000, 500) as f64 / fastest) as usize).clamp(3, bench.size(100, 20).min(room));
    let round: f64 = estimates.iter().map(|micros| micros * (WARM_UP + calls) as f64 + 200.0).sum();
    let turns = ((bench.size(1_000_000, 100_000) as f64 / round) as usize).clamp(5, bench.size(61, 5));

    let times = RefCell::new(vec![Vec::new(); 1 + peers]);
    let keep = |k: usize, micros: f64| {
        times.borrow_mut()[k].push(micros);
        micros
    };
    bench.set_turns(0, turns);
    let names = ["NCCL, P2P off", "NCCL, P2P off, copy engines"];
    let sides = (0..peers).map(|k| Side::new(names[k], move || keep(1 + k, theirs(k, calls)))).collect();
    let ours = Side::new("gpu-pool", || keep(0, stage.turn(Who::Ours, WARM_UP, calls)));
    bench.compare(case, MICROSECONDS, ours, sides);

    let mut medians = times.into_inner().into_iter().map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    let ours = medians.next()?;
    Some(medians.min_by(f64::total_cmp)? / ours)
}

/// GB/s per device and direction, when all links carry both directions at once by copy engines. The pieces are copied
/// again and again from and to the same page-locked memory, which stays in the host's cache if it fits.
fn carry(bench: &mut Bench, case: &str, pool: &GpuPool, piece: usize) {
    let time = Duration::from_millis(bench.size(200, 50) as u64);
    bench.set_turns(1, bench.size(7, 3));
    let turn = || {
        let line = Line::new(pool.device_count());
        let rates = pool.run(|dev, _| {
            let up = dev.stream()?;
            let up = dev.on(&up);
            let pinned = || -> Result<[PinnedBuffer<u8>; 2]> { Ok([dev.pinned(piece)?, dev.pinned(piece)?]) };
            let (mut down_to, up_from) = (pinned()?, pinned()?);
            let (from, mut to) = (dev.zeros::<u8>(piece)?, dev.zeros::<u8>(piece)?);
            dev.synchronize()?;
            line.wait();
            both(
                dev,
                &up,
                time,
                piece,
                |dev, k| dev.download_pinned(&from, &mut down_to[k]),
                |up, k| up.upload_pinned_into(&up_from[k], &mut to),
            )
        });
        let rates = rates.expect("copies");
        rates.iter().sum::<f64>() / rates.len() as f64
    };
    bench.compare(case, GIGABYTES, Side::new("gpu-pool", turn), Vec::new());
}

/// Copies in both directions until the time is over, with a few pieces queued, so that neither direction idles.
fn both(
    down: &Device,
    up: &Device,
    time: Duration,
    piece: usize,
    mut send_down: impl FnMut(&Device, usize) -> Result<()>,
    mut send_up: impl FnMut(&Device, usize) -> Result<()>,
) -> Result<f64> {
    const AHEAD: usize = 8;
    let (clock, mut pieces) = (Instant::now(), 0);
    while clock.elapsed() < time {
        for k in 0..AHEAD {
            send_down(down, k % 2)?;
            send_up(up, k % 2)?;
        }
        pieces += AHEAD;
        if pieces % (4 * AHEAD) == 0 {
            down.synchronize()?;
            up.synchronize()?;
        }
    }
    down.synchronize()?;
    up.synchronize()?;
    Ok((pieces * piece) as f64 / clock.elapsed().as_secs_f64() / 1e9)
}
