//! Single all-reduces, each with the wait for it: how long a step waits if it needs the sum at once. On an idle host,
//! and with every core busy; the 99th percentile counts.

use std::{
    hint, iter,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};

use gpu_pool::GpuPool;

use crate::{
    Machine,
    extras::{compare, slowest_each},
    nccl::Club,
    ops::Op,
    stage::{Stage, Who},
    support::Bench,
};

const SIZES: [usize; 3] = [1 << 10, 64 << 10, 4 << 20];

pub fn run(bench: &mut Bench, machine: &Machine, pool: &GpuPool) {
    let world = pool.device_count();
    let case = |name: &str, bytes: usize| format!("{}/{name}/{world}/{bytes}", machine.kind);
    let most = if machine.software { 64 << 10 } else { machine.most };
    let sizes = SIZES.into_iter().filter(|&bytes| bytes <= most);
    let cases: Vec<_> = sizes.map(|bytes| (bytes, case("single", bytes), case("host_load", bytes))).collect();
    let wanted = |bench: &Bench| cases.iter().any(|(_, alone, loaded)| bench.wants(alone) || bench.wants(loaded));
    if world < 2 || !wanted(bench) {
        return;
    }
    let club = machine.nccl.map(|nccl| Club::join(nccl, pool, world, most.min(SIZES[2])));
    for (bytes, alone, loaded) in &cases {
        let stage = Stage::<f32>::new(pool, club.as_ref(), world, Op::AllReduce, *bytes);
        for who in stage.players() {
            stage.turn(who, 2, 10);
        }
        if bench.wants(alone) {
            singles(bench, machine, alone, &stage);
        }
        if bench.wants(loaded) {
            beside_load(|| singles(bench, machine, loaded, &stage));
        }
    }
    if let Some(club) = club {
        club.leave(pool);
    }
}

/// Calls one after the other. Each sample is the time of the slowest device.
fn singles(bench: &mut Bench, machine: &Machine, case: &str, stage: &Stage<'_, f32>) {
    let repeats = bench.size(50, 10);
    bench.set_turns(1, bench.size(31, 5));
    compare(bench, case, stage, machine.nccl, |who: Who, samples| {
        let times = stage.each(who, false, |_, player| {
            let once = || {
                let clock = Instant::now();
                (player.call)()?;
                (player.wait)()?;
                Ok(clock.elapsed().as_secs_f64() * 1e6)
            };
            iter::repeat_with(once).take(repeats).collect()
        });
        samples.extend(slowest_each(times));
    });
}

/// Runs `f` while other threads keep every core busy.
fn beside_load(f: impl FnOnce()) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    hint::spin_loop();
                }
            });
        }
        // Ends the busy threads also if the bench panics: the scope waits for them.
        let _over = Raise(&over);
        f();
    });
}

/// Sets a flag when it is dropped.
struct Raise<'a>(&'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
