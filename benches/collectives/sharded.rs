//! A step of AdamW whose state is divided among the devices (ZeRO-1), with gradients and parameters of bf16 in one
//! buffer each: one kernel of each device, against the same step as three collectives and the kernels between them.

use std::time::Instant;

use gpu_pool::{
    Algorithm, DeviceBuffer, GpuPool, Graph, PerDevice, ReduceOp, parallel::Optimizer, parallel::ShardedOptimizer,
};
use half::bf16;

use crate::{
    Machine,
    stage::{Line, slowest},
    support::{Bench, MICROSECONDS, Side},
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

pub fn run(bench: &mut Bench, machine: &Machine, pool: &GpuPool, world: usize) {
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
    let calls = machine.builder(world).algorithm(Algorithm::Direct).build().expect("the devices can be opened");
    let one = (world < pool.devices()).then(|| machine.pool(world));
    let one = one.as_ref().unwrap_or(pool);
    for params in sizes() {
        for (clips, name) in kinds {
            if ![false, true].iter().any(|&graph| bench.wants(&case(graph, name, params))) {
                continue;
            }
            let [mut ours, mut three] = [one, &calls].map(|pool| trainers(pool, params, clips));
            for graph in [false, true] {
                let case = case(graph, name, params);
                if !bench.wants(&case) {
                    continue;
                }
                // About 3 us, and a microsecond for each 200 KB.
                let rounds = (bench.micros_of_case() / 20 / (10 + params / 100_000)).clamp(3, 300);
                bench.set_turns(1, bench.size(9, 3));
                let ours = Side::new("gpu-pool", || time(&mut ours, world, rounds, graph));
                let three = Side::new("gpu-pool, three calls", || time(&mut three, world, rounds, graph));
                bench.compare(&case, MICROSECONDS, ours, vec![three]);
            }
        }
    }
}

fn trainers(pool: &GpuPool, params: usize, clips: bool) -> PerDevice<Trainer> {
    let made = pool.per_device(|dev, _| {
        let group = dev.group(&(0..dev.count()).collect::<Vec<_>>())?;
        let optimizer = Optimizer::adam_w(1e-4);
        let optimizer = if clips { optimizer.clip(1.0) } else { optimizer };
        let mut own = ShardedOptimizer::new(&group, optimizer, ReduceOp::Avg, &[params])?;
        let (mut grads, mut weights) = (dev.zeros::<bf16>(own.len())?, [dev.zeros::<bf16>(params)?]);
        dev.fill(&mut grads, bf16::from_f32(1e-3))?;
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
