//! Sweeps over sizes, with both sides in turn.

use gpu_pool::{GpuPool, ReduceOp};

use crate::{
    Machine,
    nccl::Club,
    ops::{Number, Op},
    stage::{Stage, Who},
    support::{Bench, MICROSECONDS, Side},
};

const LEAST: usize = 1 << 10;
/// Warm-up operations at the start of each turn.
pub const WARM_UP: usize = 3;

/// Times of one side at one size, best first.
#[derive(Clone)]
pub struct Times(Vec<f64>);

impl Times {
    pub fn median(&self) -> f64 {
        self.0[self.0.len() / 2]
    }

    fn p99(&self) -> f64 {
        self.0[(0.99 * (self.0.len() - 1) as f64).round() as usize]
    }
}

/// What was measured at one size: microseconds.
pub struct Point {
    pub bytes: usize,
    pub ours: Times,
    /// NCCL's, by the way that it runs.
    pub theirs: Vec<(Who, Times)>,
    /// Multiprocessors that our kernels use, for all-reduces, where the pool reports it. NCCL reports it only in its
    /// log, and logging takes time.
    pub blocks: Option<u32>,
}

impl Point {
    /// NCCL's best median.
    pub fn best(&self) -> Option<f64> {
        self.theirs.iter().map(|(_, times)| times.median()).min_by(f64::total_cmp)
    }

    /// NCCL's median, if it runs in this way.
    pub fn theirs(&self, who: Who) -> Option<f64> {
        self.theirs.iter().find(|(of, _)| *of == who).map(|(_, times)| times.median())
    }

    fn ratio(&self) -> Option<f64> {
        self.best().map(|best| best / self.ours.median())
    }
}

/// A sweep.
pub struct Curve {
    pub op: Op,
    pub dtype: &'static str,
    pub world: usize,
    /// NCCL's name with its version.
    pub peer: Option<&'static str>,
    pub points: Vec<Point>,
}

impl Curve {
    /// `all_reduce/f32/8`.
    pub fn name(&self) -> String {
        format!("{}/{}/{}", self.op.name(), self.dtype, self.world)
    }

    /// GB/s over the bus.
    pub fn bus(&self, bytes: usize, micros: f64) -> f64 {
        self.op.bus(self.world, bytes, micros)
    }

    /// Prints a line for each size.
    fn print(&self) {
        let or_blank = |number: Option<f64>| number.map(|x| format!("{x:.2}")).unwrap_or_default();
        println!("\n{}: us and GB/s of bus bandwidth", self.name());
        println!(
            "      bytes       ours        p99    GB/s    SMs      plain    windows  processes  p.windows    GB/s   \
             ratio"
        );
        for point in &self.points {
            let (bytes, ours) = (point.bytes, &point.ours);
            let [plain, windows, processes, process_windows] = Who::NCCL.map(|who| or_blank(point.theirs(who)));
            println!(
                "{bytes:>11} {:>10.2} {:>10.2} {:>7.1} {:>6} {plain:>10} {windows:>10} {processes:>10} \
                 {process_windows:>10} {:>7} {:>7}",
                ours.median(),
                ours.p99(),
                self.bus(bytes, ours.median()),
                point.blocks.map(|blocks| blocks.to_string()).unwrap_or_default(),
                or_blank(point.best().map(|best| self.bus(bytes, best))),
                or_blank(point.ratio()),
            );
        }
    }

    /// Prints one line: the comparison with NCCL's best over all sizes.
    pub fn summarise(&self) {
        let ratios: Vec<(f64, usize)> = self.points.iter().filter_map(|p| Some((p.ratio()?, p.bytes))).collect();
        let Some(&(worst, at)) = ratios.iter().min_by(|a, b| a.0.total_cmp(&b.0)) else { return };
        let mean = (ratios.iter().map(|(ratio, _)| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        let peer = self.peer.unwrap_or_default();
        println!("{}: {mean:.2} times {peer}'s best in the mean, at worst {worst:.2} at {at} bytes", self.name());
    }
}

/// Sweeps each operation over the requested sizes.
pub fn run<T: Number>(
    bench: &mut Bench,
    machine: &Machine,
    pool: &GpuPool,
    world: usize,
    operations: &[Op],
) -> Vec<Curve> {
    let case = |op: Op, bytes: usize| format!("{}/{}/{}/{world}/{bytes}", machine.kind, op.name(), T::NAME);
    let sizes = sizes(machine.most, bench.size(1, 3));
    let wanted = |bench: &Bench, op| -> Vec<usize> {
        sizes.iter().copied().filter(|&bytes| bench.wants(&case(op, bytes))).collect()
    };
    let most = operations.iter().flat_map(|&op| wanted(bench, op)).max();
    let Some(most) = most else { return Vec::new() };

    let club = machine.nccl.map(|nccl| Club::join(nccl, pool, world, most).and_processes(nccl, most));
    let mut curves = Vec::new();
    for &op in operations {
        let peer = machine.nccl.map(|nccl| nccl.name.as_str());
        let mut curve = Curve { op, dtype: T::NAME, world, peer, points: Vec::new() };
        for bytes in wanted(bench, op) {
            let (case, stage) = (case(op, bytes), Stage::<T>::new(pool, club.as_ref(), world, op, bytes));
            let mut point = measure(bench, &stage, op, bytes, &case);
            // The pool's explanation is about all its devices.
            let explained = op == Op::AllReduce && world == pool.device_count();
            point.blocks = explained.then(|| pool.explain(T::DTYPE, ReduceOp::Sum, bytes).unwrap().blocks);
            record(bench, &case, &point, peer.unwrap_or_default());
            curve.points.push(point);
        }
        if !curve.points.is_empty() {
            curve.print();
            curves.push(curve);
        }
    }
    if let Some(club) = club {
        club.leave(pool);
    }
    curves
}

/// Powers of two, or every `step`-th of them; the largest in any case.
fn sizes(most: usize, step: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(LEAST), |bytes| Some(bytes << 1)).take_while(|&bytes| bytes <= most);
    let mut sizes: Vec<usize> = powers.clone().step_by(step).collect();
    sizes.extend(powers.last());
    sizes.dedup();
    sizes
}

/// Measures both sides, in turns that take about a second in all, or `--case-ms`.
fn measure<T: Number>(bench: &Bench, stage: &Stage<'_, T>, op: Op, bytes: usize, case: &str) -> Point {
    let players = stage.players();
    players.iter().for_each(|&who| stage.check(who, case));

    // A turn takes a few milliseconds, so that the wait at its end does not matter, and has at least a few operations.
    // The first turn is no estimate: threads may sleep, and connections may be missing.
    let estimates: Vec<f64> = players.iter().map(|&who| (stage.turn(who, 2, 3), stage.turn(who, 1, 3)).1).collect();
    let fastest = estimates.iter().copied().fold(f64::MAX, f64::min);
    let room = op.most_calls(stage.world()) - WARM_UP;
    let calls = (bench.size(3000, 500) as f64 / fastest) as usize;
    let calls = calls.clamp(3, bench.size(100, 20).min(room));
    let round: f64 = estimates.iter().map(|micros| micros * (WARM_UP + calls) as f64 + 200.0).sum();
    let turns = (bench.micros_of_case() as f64 / round) as usize;
    let turns = turns.clamp(bench.size(7, 3), bench.size(61, 5));

    let mut times = vec![Vec::with_capacity(turns); players.len()];
    for turn in 0..turns {
        for k in 0..players.len() {
            let k = (turn + k) % players.len();
            times[k].push(stage.turn(players[k], WARM_UP, calls));
        }
    }
    let mut of = players.iter().zip(times).map(|(&who, mut times)| {
        times.sort_by(f64::total_cmp);
        (who, Times(times))
    });
    let (_, ours) = of.next().expect("ours plays");
    Point { bytes, ours, theirs: of.collect(), blocks: None }
}

/// Records one line for each way that NCCL runs.
fn record(bench: &mut Bench, case: &str, point: &Point, peer: &str) {
    let side = |name, times: &Times| {
        let times = times.0.clone();
        Side::sampling(name, move |samples| samples.extend(&times))
    };
    let names: Vec<_> = point.theirs.iter().map(|(who, _)| format!("{peer}, {}", who.way())).collect();
    let peers = point.theirs.iter().zip(&names).map(|((_, times), name)| side(name.as_str(), times)).collect();
    bench.set_turns(0, 1);
    if let Some(blocks) = point.blocks {
        bench.note("blocks", blocks.into());
    }
    bench.compare(case, MICROSECONDS, side("gpu-pool", &point.ours), peers);
}
