//! Each algorithm of all-reduces by itself, in graphs, where the call's cost on the host does not count. The thresholds
//! between algorithms come from these times.
//!
//! * `<gpu or software>/algorithm/<name>/<f32 or bf16>/<devices>/<bytes>`: microseconds. An algorithm that cannot carry
//!   a size out falls back to another one: compare with `auto`.

use gpu_pool::{ReduceOp, collective::Algorithm};
use half::bf16;

use crate::{
    Machine, graph,
    ops::{Number, Op},
    stage::{Stage, Who},
    support::{Bench, MICROSECONDS, Side},
};

const ALGORITHMS: [(&str, Algorithm); 6] = [
    ("auto", Algorithm::Auto),
    ("direct", Algorithm::Direct),
    ("inbox", Algorithm::Inbox),
    ("exchange", Algorithm::Exchange),
    ("ring", Algorithm::Ring),
    ("copies", Algorithm::Copies),
];
/// Steps of two around the thresholds.
const SIZES: [usize; 15] = [
    4 << 10,
    16 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
    8 << 20,
    16 << 20,
    32 << 20,
    64 << 20,
    256 << 20,
];

pub fn run(bench: &mut Bench, machine: &Machine, world: usize) {
    bench.set_turns(1, 5);
    for (name, algorithm) in ALGORITHMS {
        each::<f32>(bench, machine, world, (name, algorithm));
        each::<bf16>(bench, machine, world, (name, algorithm));
    }
}

fn each<T: Number>(bench: &mut Bench, machine: &Machine, world: usize, (name, algorithm): (&str, Algorithm)) {
    let case = |bytes: usize| format!("{}/algorithm/{name}/{}/{world}/{bytes}", machine.kind, T::NAME);
    // Inboxes of software GPUs are there to try the protocol.
    let most = if machine.software { 64 << 10 } else { machine.most };
    let wanted = |&bytes: &usize| bytes <= most && bench.wants(&case(bytes));
    let sizes: Vec<usize> = SIZES.into_iter().filter(wanted).collect();
    if sizes.is_empty() {
        return;
    }
    let pool = machine.builder(world).algorithm(algorithm).build().expect("the devices can be opened");
    for bytes in sizes {
        let stage = Stage::<T>::new(&pool, None, world, Op::AllReduce, bytes);
        stage.check(Who::Ours, &case(bytes));
        bench.note("blocks", pool.explain(T::DTYPE, ReduceOp::Sum, bytes).unwrap().blocks.into());
        let ours = Side::new("gpu-pool", || graph::turn(&stage, Who::Ours));
        bench.compare(&case(bytes), MICROSECONDS, ours, Vec::new());
    }
}
