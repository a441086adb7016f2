//! A step of AdamW whose state is divided among the devices (ZeRO-1), with gradients and parameters of bf16 in one
//! buffer each: one kernel of each device, against the same step as three collectives and the kernels between them,
//! with the algorithms that are the fastest for each; against NCCL's collectives, in each way that NCCL runs, with our
//! kernels between them; and against torch in a process for each GPU: with its fused AdamW, and with all between the
//! collectives compiled.
//!
//! NCCL's time is a sum: of each collective alone, and of the kernels in a graph.

use std::{
    cell::{LazyCell, RefCell},
    time::Instant,
};

use gpu_pool::{DeviceBuffer, GpuPool, Graph, PerDevice, ReduceOp};
use gpu_pool_train::{Optimizer, ShardedOptimizer, prelude::*};
use half::bf16;

use crate::{
    LazyTorch, Machine, graph,
    nccl::Club,
    ops::Op,
    stage::{Line, Stage, Who, slowest},
    support::{Bench, MICROSECONDS, Side, child::Torch},
    sweep::WARM_UP,
};

/// Parameters.
const SIZES: [usize; 6] = [256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
/// Steps in a graph.
const IN_GRAPH: usize = 20;

/// One device's part.
struct Trainer {
    own: ShardedOptimizer<bf16>,
    grads: DeviceBuffer<bf16>,
    weights: [DeviceBuffer<bf16>; 1],
    graph: Graph,
}

pub fn run(bench: &mut Bench, machine: &Machine, pool: &GpuPool, world: usize, torch: &LazyTorch<'_>) {
    let kinds = [(false, "zero"), (true, "zero_clip")];
    let sizes = || SIZES.into_iter().filter(|params| params * size_of::<bf16>() <= machine.most);
    let case = |graph: bool, name: &str, params: usize| {
        format!("{}/{}{name}/bf16/{world}/{params}", machine.kind, if graph { "graph/" } else { "" })
    };
    let any = |bench: &Bench| {
        sizes().any(|params| {
            kinds.iter().any(|(_, name)| [false, true].iter().any(|&graph| bench.wants(&case(graph, name, params))))
        })
    };
    if !any(bench) {
        return;
    }
    let one = (world < pool.device_count()).then(|| machine.pool(world));
    let pool = one.as_ref().unwrap_or(pool);
    let most = sizes().max().unwrap_or(0) * size_of::<bf16>();
    let club = machine.nccl.map(|nccl| Club::join(nccl, pool, world, most).and_processes(nccl, most));
    let nccl = machine.nccl.map_or("", |nccl| &nccl.name);
    let ways = Who::NCCL.map(|way| (way, format!("{nccl}, {}, and our kernels", way.way())));
    let torch = LazyCell::force(torch).as_ref();
    let compiles = torch.is_some_and(|torch| torch.ask("compiles", 1) > 0.0);
    for params in sizes() {
        for (clips, name) in kinds {
            if ![false, true].iter().any(|&graph| bench.wants(&case(graph, name, params))) {
                continue;
            }
            let mut ours = trainers(pool, params, clips, Step::OneKernel);
            let mut three = trainers(pool, params, clips, Step::Calls);
            let parts = club.as_ref().map(|club| Parts::new(pool, club, world, params, clips));
            for graph in [false, true] {
                let case = case(graph, name, params);
                if !bench.wants(&case) {
                    continue;
                }
                // About 3 us, and a microsecond for each 200 KB.
                let most = if machine.software { 3 } else { 300 };
                let rounds = (bench.micros_of_case() / 20 / (10 + params / 100_000)).clamp(3, most);
                bench.set_turns(1, bench.size(9, 3));
                let ours = Side::new("gpu-pool", || time(&mut ours, world, rounds, graph));
                let three = Side::new("gpu-pool, three calls", || time(&mut three, world, rounds, graph));
                let mut peers = vec![three];
                if let Some(parts) = &parts {
                    let plays = parts.scatter.players();
                    let ways = ways.iter().filter(|(way, _)| plays.contains(way));
                    peers.extend(ways.map(|(way, name)| Side::new(name, move || parts.time(*way, rounds, graph))));
                }
                if let Some(torch) = torch {
                    peers.push(of_torch(torch, (params, clips), rounds, (false, graph)));
                    if compiles {
                        peers.push(of_torch(torch, (params, clips), rounds, (true, graph)));
                    }
                }
                bench.compare(&case, MICROSECONDS, ours, peers);
            }
        }
    }
    if let Some(club) = club {
        club.leave(pool);
    }
}

/// How a step is done.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    OneKernel,
    Calls,
    /// By each device for itself: the kernels between the calls.
    Alone,
}

/// A step with NCCL's collectives.
struct Parts<'a> {
    scatter: Stage<'a, bf16>,
    gather: Stage<'a, bf16>,
    /// The sum of the squares.
    squares: Option<Stage<'a, f32>>,
    /// The kernels between them.
    between: RefCell<PerDevice<Trainer>>,
    world: usize,
}

impl<'a> Parts<'a> {
    fn new(pool: &'a GpuPool, club: &'a Club, world: usize, params: usize, clips: bool) -> Self {
        let club = Some(club);
        let of = |op| Stage::<bf16>::new(pool, club, world, op, params * size_of::<bf16>());
        let squares = clips.then(|| Stage::<f32>::new(pool, club, world, Op::AllReduce, world * size_of::<f32>()));
        let parts = Parts {
            scatter: of(Op::ReduceScatter),
            gather: of(Op::AllGather),
            squares,
            between: RefCell::new(trainers(pool, params / world, clips, Step::Alone)),
            world,
        };
        // Connections must exist before a capture.
        for way in parts.scatter.players() {
            parts.scatter.check(way, "zero");
            parts.gather.check(way, "zero");
            if let Some(squares) = &parts.squares {
                squares.check(way, "zero");
            }
        }
        parts
    }

    /// Microseconds of a step.
    fn time(&self, way: Who, rounds: usize, graph: bool) -> f64 {
        let calls = rounds.min(Op::AllReduce.most_calls(self.world) - WARM_UP);
        let sums = match graph {
            true => [graph::turn(&self.scatter, way), graph::turn(&self.gather, way)],
            false => [self.scatter.turn(way, WARM_UP, calls), self.gather.turn(way, WARM_UP, calls)],
        };
        let squares = self.squares.as_ref().map_or(0.0, |squares| match graph {
            true => graph::turn(squares, way),
            false => squares.turn(way, WARM_UP, calls),
        });
        sums.iter().sum::<f64>() + squares + time(&mut self.between.borrow_mut(), self.world, rounds, true)
    }
}

/// The turns of torch's processes.
fn of_torch(torch: &Torch, (params, clips): (usize, bool), rounds: usize, (compiled, graph): (bool, bool)) -> Side<'_> {
    let clip = if clips { "clip" } else { "plain" };
    let (name, form) = match (compiled, graph) {
        (false, false) => ("torch, fused AdamW", "calls"),
        (false, true) => ("torch, fused AdamW", "graph"),
        (true, false) => ("torch, compiled", "compiled"),
        (true, true) => ("torch, compiled", "compiled_graph"),
    };
    let number = if graph { rounds.div_ceil(IN_GRAPH) } else { rounds };
    torch.side(name, format!("zero:{params}:{clip}:{form}"), number)
}

fn trainers(pool: &GpuPool, params: usize, clips: bool, step: Step) -> PerDevice<Trainer> {
    let made = pool.per_device(|dev, _| {
        let all: Vec<usize> = (0..dev.count()).collect();
        let group = dev.group(if step == Step::Alone { &all[dev.rank()..][..1] } else { &all })?;
        let optimizer = Optimizer::adam_w(1e-4);
        let optimizer = if clips { optimizer.clip(1.0) } else { optimizer };
        let own = ShardedOptimizer::new(&group, optimizer, ReduceOp::Avg, &[params])?;
        let mut own = if step == Step::Calls { own.by_calls() } else { own };
        let (mut grads, mut weights) = (dev.zeros::<bf16>(own.len())?, [dev.zeros::<bf16>(params)?]);
        // Noise: equal numbers take less power.
        dev.normal(&mut grads.slice_mut(own.place(0)), 0.0, 1e-3, 1 + dev.rank() as u64, 0)?;
        dev.normal(&mut weights[0], 0.0, 0.02, 0, 0)?;
        own.step(dev, &mut grads, &mut weights)?;
        own.prepare(dev)?;
        let (graph, ()) =
            dev.capture(|dev| (0..IN_GRAPH).try_for_each(|_| own.step(dev, &mut grads, &mut weights).map(drop)))?;
        Ok(Trainer { own, grads, weights, graph })
    });
    made.expect("there is memory")
}

/// Microseconds of a step.
fn time(trainers: &mut PerDevice<Trainer>, world: usize, rounds: usize, graph: bool) -> f64 {
    let line = Line::new(world);
    let launches = if graph { rounds.div_ceil(IN_GRAPH) } else { rounds };
    let steps = if graph { launches * IN_GRAPH } else { launches };
    slowest(trainers.run(|dev, _, Trainer { own, grads, weights, graph: held }| {
        let mut once = || match graph {
            true => dev.launch_graph(held),
            false => own.step(dev, grads, weights).map(drop),
        };
        once()?;
        dev.synchronize()?;
        line.wait();
        let clock = Instant::now();
        for _ in 0..launches {
            once()?;
        }
        dev.synchronize()?;
        Ok(clock.elapsed().as_secs_f64() * 1e6 / steps as f64)
    }))
}
