//! Cases that are not sweeps of sizes: set-up, a late member, recovery, the meeting, and matrix products on the same
//! GPU.

use std::{
    hint,
    sync::Barrier,
    time::{Duration, Instant},
};

use cudarc::driver::sys;
use gpu_pool::{Device, Error, GpuPool, Matrix, ReduceOp, Result};
use gpu_pool_lab::Check;
use gpu_pool_lab::prelude::*;
use parking_lot::Mutex;

use crate::{
    Machine,
    nccl::{Club, Nccl},
    ops::{Number, Op},
    stage::{Line, Stage, Who, check, fill, slowest},
    support::{Bench, FACTOR, MEGABYTES, MICROSECONDS, MILLISECONDS, Side, gpus},
};

const SMALL: usize = 64 << 10;
const LARGE: usize = 64 << 20;
const LATE: Duration = Duration::from_millis(1);
const GEMMS: usize = 5;
/// A meeting uses no GPU, so software GPUs are measured on every machine.
const MEETINGS: [usize; 2] = [2, 8];

pub fn run(bench: &mut Bench, machine: &Machine, pool: &GpuPool) {
    let world = pool.device_count();
    let case = |name: &str| format!("{}/{name}/{world}", machine.kind);
    if bench.wants(&case("setup")) || bench.wants(&format!("{}/memory", case("setup"))) {
        setup(bench, machine, pool, &case("setup"));
    }
    if bench.wants(&case("meeting")) {
        meeting(bench, pool, &case("meeting"));
    }
    for members in MEETINGS {
        let case = format!("software/meeting/{members}");
        if bench.wants(&case) {
            let pool = GpuPool::builder().host(members).check(Check::Off).record_memory(false).build();
            meeting(bench, &pool.expect("software GPUs can be had"), &case);
        }
    }
    if bench.wants(&case("abort_recovery")) {
        abort_recovery(bench, pool, &case("abort_recovery"));
    }
    let names = ["late_1ms", "beside_gemm"].map(case);
    if world < 2 || !names.iter().any(|name| bench.wants(name)) {
        return;
    }
    let large = if machine.software { SMALL } else { LARGE };
    let club = machine.nccl.map(|nccl| Club::join(nccl, pool, world, large));
    let stage = Stage::<f32>::new(pool, club.as_ref(), world, Op::AllReduce, SMALL);
    // After this connections exist and threads are awake.
    for who in stage.players() {
        stage.turn(who, 2, 10);
    }
    if bench.wants(&names[0]) {
        bench.set_turns(1, bench.size(31, 5));
        let repeats = bench.size(20, 3);
        compare(bench, &names[0], &stage, machine.nccl, |who, samples| late(&stage, who, repeats, samples));
    }
    drop(stage);
    if bench.wants(&names[1]) {
        let stage = Stage::<f32>::new(pool, club.as_ref(), world, Op::AllReduce, large);
        beside_gemm(bench, machine, &names[1], &stage);
    }
    if let Some(club) = club {
        club.leave(pool);
    }
}

/// Records a case with all sides of the stage.
pub fn compare<T: Number>(
    bench: &mut Bench,
    case: &str,
    stage: &Stage<'_, T>,
    nccl: Option<&Nccl>,
    turn: impl Fn(Who, &mut Vec<f64>),
) {
    let turn = &turn;
    let side = |name, who| Side::sampling(name, move |samples| turn(who, samples));
    let name = nccl.map_or("", |nccl| &nccl.name);
    let names = Who::NCCL.map(|who| (who, format!("{name}, {}", who.way())));
    let plays = stage.players();
    let peers = names.iter().filter(|(who, _)| plays.contains(who)).map(|(who, name)| side(name.as_str(), *who));
    let unit = if case.contains("beside") { FACTOR } else { MICROSECONDS };
    let peers = peers.collect();
    bench.compare(case, unit, side("gpu-pool", Who::Ours), peers);
}

/// Free bytes on each GPU.
fn free(pool: &GpuPool) -> Vec<usize> {
    let free = pool.run(|dev, _| {
        let _current = dev.cuda()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to live integers; the context is current.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) });
        Ok(free)
    });
    free.expect("GPUs answer")
}

/// The GPUs have contexts already, from the pool of the other cases. So neither side pays for contexts.
fn setup(bench: &mut Bench, machine: &Machine, pool: &GpuPool, case: &str) {
    let world = pool.device_count();
    // For each side: the time, and the most memory that it took from a GPU.
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let taken = |before: &[usize], after: &[usize]| {
        let bytes = before.iter().zip(after).map(|(before, after)| before.saturating_sub(*after));
        bytes.max().unwrap_or(0) as f64 / 1e6
    };
    let held = || if machine.software { vec![0; world] } else { free(pool) };
    for _ in 0..bench.size(3, 1) {
        let (before, clock) = (held(), Instant::now());
        let further = machine.pool(world);
        let first = further.run(|dev, _| {
            let mut x = dev.zeros::<f32>(256)?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.synchronize()
        });
        first.expect("an all-reduce");
        ours.push((clock.elapsed().as_secs_f64() * 1e3, taken(&before, &held())));
        further.close().expect("its devices end");
        if let Some(nccl) = machine.nccl {
            let stage = Stage::<f32>::new(pool, None, world, Op::AllReduce, 1 << 10);
            let (before, clock) = (held(), Instant::now());
            let club = Club::join(nccl, pool, world, 0);
            let stage = stage.with(&club);
            stage.turn(Who::Plain, 0, 1);
            theirs.push((clock.elapsed().as_secs_f64() * 1e3, taken(&before, &held())));
            drop(stage);
            club.leave(pool);
        }
    }
    let name = machine.nccl.map_or("", |nccl| &nccl.name);
    bench.set_turns(0, 1);
    let mut record = |case: &str, unit, of: fn(&(f64, f64)) -> f64| {
        let side = |name, values: &[(f64, f64)]| {
            let values: Vec<f64> = values.iter().map(of).collect();
            Side::sampling(name, move |samples| samples.extend(&values))
        };
        let peers = if theirs.is_empty() { Vec::new() } else { vec![side(name, &theirs)] };
        bench.compare(case, unit, side("gpu-pool", &ours), peers);
    };
    record(case, MILLISECONDS, |made| made.0);
    if !machine.software {
        record(&format!("{case}/memory"), MEGABYTES, |made| made.1);
    }
}

/// Host threads that meet, without any work.
fn meeting(bench: &mut Bench, pool: &GpuPool, case: &str) {
    let (rounds, world) = (bench.size(1000, 50), pool.device_count());
    let time = |meet: &(dyn Fn(&Device) -> Result<()> + Sync)| {
        let line = Line::new(world);
        slowest(pool.run(|dev, _| {
            meet(dev)?;
            line.wait();
            let clock = Instant::now();
            for _ in 0..rounds {
                meet(dev)?;
            }
            Ok(clock.elapsed().as_secs_f64() * 1e6 / rounds as f64)
        }))
    };
    let std = Barrier::new(world);
    let ours = Side::new("gpu-pool", || time(&|dev| dev.barrier()));
    let theirs = Side::new("std::sync::Barrier", || {
        time(&|_| {
            std.wait();
            Ok(())
        })
    });
    bench.set_turns(1, bench.size(31, 5));
    bench.compare(case, MICROSECONDS, ours, vec![theirs]);
}

/// A member fails while the others are in collectives.
fn abort_recovery(bench: &mut Bench, pool: &GpuPool, case: &str) {
    let ours = Side::new("gpu-pool", || {
        let failed = Mutex::new(None);
        let outcome = pool.run(|dev, _| {
            let mut x = dev.zeros::<f32>(SMALL / 4)?;
            for _ in 0..4 {
                dev.all_reduce(&mut x, ReduceOp::Sum)?;
            }
            if dev.rank() == 0 {
                *failed.lock() = Some(Instant::now());
                return Err(Error::custom("on purpose"));
            }
            // No other member meets this call: it ends when the failure arrives.
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.synchronize()
        });
        assert!(matches!(outcome, Err(Error::Custom(_))), "{outcome:?}");
        let next = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.0f32; SMALL / 4])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.synchronize()
        });
        next.expect("the pool goes on");
        let failed = failed.lock().expect("it failed");
        failed.elapsed().as_secs_f64() * 1e6
    });
    bench.set_turns(1, bench.size(31, 5));
    bench.compare(case, MICROSECONDS, ours, Vec::new());
}

/// Rank 0 calls late. The sample is how much longer than that the slowest other rank is in the operation.
fn late(stage: &Stage<'_, f32>, who: Who, repeats: usize, samples: &mut Vec<f64>) {
    let line = Line::new(stage.world());
    let extra = stage.each(who, false, |dev, player| {
        let mut extra = Vec::with_capacity(repeats);
        for _ in 0..repeats {
            line.wait();
            let clock = Instant::now();
            while dev.rank() == 0 && clock.elapsed() < LATE {
                hint::spin_loop();
            }
            (player.call)()?;
            (player.wait)()?;
            extra.push((clock.elapsed().as_secs_f64() - LATE.as_secs_f64()) * 1e6);
        }
        Ok(if dev.rank() == 0 { vec![f64::MIN; repeats] } else { extra })
    });
    samples.extend(slowest_each(extra));
}

/// The slowest device of each repeat.
pub fn slowest_each(times: Result<Vec<Vec<f64>>>) -> impl Iterator<Item = f64> {
    let times = times.expect("every call succeeds");
    let repeats = times.first().map_or(0, Vec::len);
    (0..repeats).map(move |k| times.iter().map(|device| device[k]).fold(f64::MIN, f64::max))
}

/// Matrix products on the device's own stream, while all-reduces run on another stream.
fn beside_gemm(bench: &mut Bench, machine: &Machine, case: &str, stage: &Stage<'_, f32>) {
    let side = if machine.software { 256 } else { 4096 };
    bench.set_turns(1, bench.size(7, 3));
    let noise: Vec<f32> = gpus::noise(1 << 16, 1).into_iter().map(|x| x as f32 / 2f32.powi(31) - 1.0).collect();
    // Microseconds of the products with `calls` operations at the same time.
    let products = |who: Who, calls: usize| {
        let line = Line::new(stage.world());
        slowest(stage.each(who, true, |dev, player| {
            let (mut a, mut c) = (dev.zeros::<f32>(side * side)?, dev.zeros::<f32>(side * side)?);
            // Zeros would be faster than other numbers.
            fill(dev, &mut a, &noise)?;
            let mut product =
                || dev.gemm(1.0, Matrix::new(&a, side, side)?, Matrix::new(&a, side, side)?.t(), 0.0, &mut c);
            product()?;
            dev.synchronize()?;
            line.wait();
            let start = dev.record_timed()?;
            for _ in 0..GEMMS {
                product()?;
            }
            let end = dev.record_timed()?;
            for _ in 0..calls {
                (player.call)()?;
            }
            (player.wait)()?;
            dev.synchronize()?;
            Ok(end.elapsed_since(&start)?.as_secs_f64() * 1e6)
        }))
    };
    compare(bench, case, stage, machine.nccl, |who, samples| {
        let alone = products(who, 0);
        // More calls than the products last, even if both slow down.
        let calls = (2.0 * alone / stage.turn(who, 1, 3)).ceil() as usize;
        let calls = calls.clamp(1, Op::AllReduce.most_calls(stage.world()));
        samples.push(products(who, calls) / alone);
    });
}
