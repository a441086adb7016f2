//! `all_reduce_norm`: all-reduce, residual and RMS norm in one call, against our own three calls; against NCCL's
//! all-reduce, in each way that NCCL runs, with our two kernels behind it; and against torch, in a process for each
//! GPU. Called, and 20 in a graph.
//!
//! NCCL's calls and our operations cannot be captured together: there NCCL's time is the sum of two graphs' times.
//! Called, NCCL's time in ordinary memory of our pool is that of the calls and the kernels as they follow each other;
//! in windows and in processes it is that of its calls, and of the kernels in a graph.
//!
//! * `<gpu or software>/norm_by/<direct or inbox>/<type>/<devices>/<hidden>/<rows>`: each way of the kernel by itself,
//!   in graphs.

use std::cell::LazyCell;

use cudarc::driver::{DevicePtr, DevicePtrMut, sys::CUstream};
use gpu_pool::{Device, DeviceBuffer, GpuPool, ReduceOp, Result, collective::Algorithm, kernel::Float};
use gpu_pool_train::{RowNorm, prelude::*};
use half::bf16;

use crate::{
    LazyTorch, Machine, graph,
    nccl::Club,
    ops::{Number, Op},
    stage::{self, Line, Player, Stage, fill, slowest},
    support::{Bench, MICROSECONDS, Side, gpus},
    sweep::WARM_UP,
};

const HIDDEN: [usize; 3] = [4096, 8192, 16384];
const ROWS: [usize; 8] = [1, 3, 16, 64, 128, 256, 1024, 4096];
/// Hidden size and rows for which TensorRT-LLM publishes its times: 6.98 us and 12.98 us on two GPUs, in graphs.
const PUBLISHED: [(usize, usize); 2] = [(6144, 6), (6144, 138)];
/// Operations in a graph.
const CHAIN: usize = 20;
/// Bytes to reduce in a turn, if that is more than one chain.
const ENOUGH: usize = 4 << 30;

/// Who does what.
#[derive(Clone, Copy, PartialEq)]
enum Who {
    Together,
    OneByOne,
    /// NCCL's call in ordinary memory, and two kernels.
    Nccl,
    /// The two kernels alone.
    Behind,
}

pub fn run(bench: &mut Bench, machine: &Machine, pool: &GpuPool, world: usize, torch: &LazyTorch<'_>) {
    sweep::<bf16>(bench, machine, pool, world, torch);
    sweep::<f32>(bench, machine, pool, world, torch);
    for (name, algorithm) in [("direct", Algorithm::Direct), ("inbox", Algorithm::Inbox)] {
        by_itself(bench, machine, world, (name, algorithm));
    }
}

fn by_itself(bench: &mut Bench, machine: &Machine, world: usize, (name, algorithm): (&str, Algorithm)) {
    let case = |rows: usize| format!("{}/norm_by/{name}/bf16/{world}/4096/{rows}", machine.kind);
    let rows: Vec<usize> = ROWS.into_iter().filter(|&rows| bench.wants(&case(rows))).collect();
    if rows.is_empty() || machine.software {
        return;
    }
    let pool = machine.builder(world).algorithm(algorithm).build().expect("the devices can be opened");
    bench.set_turns(1, 5);
    for rows in rows {
        let launches = launches(rows * 4096 * size_of::<bf16>());
        let turn = || turn::<bf16>(&pool, None, (world, launches), (4096, rows), Who::Together, true);
        bench.compare(&case(rows), MICROSECONDS, Side::new("gpu-pool", turn), Vec::new());
    }
}

fn sweep<T: Number + Float<Acc = f32>>(
    bench: &mut Bench,
    machine: &Machine,
    pool: &GpuPool,
    world: usize,
    torch: &LazyTorch<'_>,
) {
    let case = |graph: bool, hidden: usize, rows: usize| {
        let form = if graph { "graph/" } else { "" };
        format!("{}/{form}all_reduce_norm/{}/{world}/{hidden}/{rows}", machine.kind, T::NAME)
    };
    let all = || HIDDEN.into_iter().flat_map(|hidden| ROWS.map(|rows| (hidden, rows))).chain(PUBLISHED);
    let wanted = |&(hidden, rows): &(usize, usize)| {
        let fits = hidden * rows * size_of::<T>() <= machine.most;
        fits && (bench.wants(&case(false, hidden, rows)) || bench.wants(&case(true, hidden, rows)))
    };
    let shapes: Vec<_> = all().filter(wanted).collect();
    if shapes.is_empty() {
        return;
    }
    let most = shapes.iter().map(|(hidden, rows)| hidden * rows * size_of::<T>()).max().unwrap_or(0);
    let club = machine.nccl.map(|nccl| Club::join(nccl, pool, world, most).and_processes(nccl, most));
    let nccl = machine.nccl.map_or("", |nccl| &nccl.name);
    let ways = stage::Who::NCCL.map(|way| (way, format!("{nccl}, {}, and two kernels", way.way())));
    let torch = LazyCell::force(torch).as_ref();
    let can = |what| torch.is_some_and(|torch| torch.ask(what, 1) > 0.0);
    let forms = [("compiles", "torch, compiled", "compiled"), ("symmetric", "torch, symmetric memory", "symmetric")];
    let forms: Vec<_> = forms.into_iter().filter(|(what, ..)| can(what)).collect();
    bench.set_turns(1, bench.size(9, 3));
    for (hidden, rows) in shapes {
        let stage = Stage::<T>::new(pool, club.as_ref(), world, Op::AllReduce, hidden * rows * size_of::<T>());
        // Connections must exist before a capture.
        stage.players().into_iter().for_each(|way| stage.check(way, &case(false, hidden, rows)));
        for graph in [false, true] {
            let launches = launches(stage.bytes());
            let turn = |who, graph| turn::<T>(pool, club.as_ref(), (world, launches), (hidden, rows), who, graph);
            let side = |name, who| Side::new(name, move || turn(who, graph));
            let with = |way| match (way, graph) {
                (stage::Who::Plain, false) => turn(Who::Nccl, false),
                (_, false) => {
                    let calls = (launches * CHAIN).min(Op::AllReduce.most_calls(world) - WARM_UP);
                    stage.turn(way, WARM_UP, calls) + turn(Who::Behind, true)
                }
                (_, true) => graph::turn(&stage, way) + turn(Who::Behind, true),
            };
            let with = &with;
            let mut peers = vec![side("gpu-pool, three calls", Who::OneByOne)];
            let plays = stage.players();
            let ways = ways.iter().filter(|(way, _)| plays.contains(way));
            peers.extend(ways.map(|(way, name)| Side::new(name, move || with(*way))));
            if let Some(torch) = torch {
                let order = |form: &str| format!("norm:{}:{hidden}:{rows}:{form}", T::NAME);
                // Its sums are in place, as NCCL's.
                let defined = Op::AllReduce.most_calls(world);
                let number = if graph { launches.min(defined / CHAIN) } else { (launches * CHAIN).min(defined) };
                peers.push(torch.side("torch", order(if graph { "graph" } else { "calls" }), number));
                for (_, name, form) in &forms {
                    let form = format!("{form}{}", if graph { "_graph" } else { "" });
                    peers.push(torch.side(name, order(&form), number));
                }
            }
            bench.compare(&case(graph, hidden, rows), MICROSECONDS, side("gpu-pool", Who::Together), peers);
        }
    }
    if let Some(club) = club {
        club.leave(pool);
    }
}

/// Launches of a graph in a turn; as many chains of calls.
fn launches(bytes: usize) -> usize {
    (ENOUGH / CHAIN / bytes).clamp(1, 10)
}

/// A member's memory.
struct Seat<T: Number + Float<Acc = f32>> {
    x: DeviceBuffer<T>,
    residual: DeviceBuffer<T>,
    gamma: DeviceBuffer<T>,
    y: DeviceBuffer<T>,
}

impl<T: Number + Float<Acc = f32>> Seat<T> {
    fn new(dev: &Device, (hidden, rows): (usize, usize)) -> Result<Self> {
        let (mut x, mut gamma) = (dev.zeros(hidden * rows)?, dev.zeros(hidden)?);
        let noise: Vec<T> = gpus::noise(hidden, dev.rank() as u64 + 1).into_iter().map(T::tiny).collect();
        fill(dev, &mut x, &noise)?;
        dev.fill(&mut gamma, <T as Number>::narrow(1.0))?;
        Ok(Seat { x, residual: dev.zeros(hidden * rows)?, gamma, y: dev.zeros(hidden * rows)? })
    }

    fn together(&mut self, dev: &Device) -> Result<()> {
        let norm = RowNorm::rms(&self.gamma, 1e-5);
        dev.all_reduce_norm_into(&self.x, &mut self.residual, norm, &mut self.y).map(drop)
    }

    fn one_by_one(&mut self, dev: &Device) -> Result<()> {
        dev.all_reduce_into(&self.x, &mut self.y, ReduceOp::Sum)?;
        self.behind(dev)
    }

    /// What follows the sum, in two kernels.
    fn behind(&mut self, dev: &Device) -> Result<()> {
        dev.add_in_place(&mut self.residual, &self.y)?;
        dev.rms_norm(&self.residual, &self.gamma, 1e-5).map(drop)
    }
}

/// Microseconds per operation of the slowest device.
fn turn<T: Number + Float<Acc = f32>>(
    pool: &GpuPool,
    club: Option<&Club>,
    (world, launches): (usize, usize),
    shape: (usize, usize),
    who: Who,
    graph: bool,
) -> f64 {
    let devices: Vec<usize> = (0..world).collect();
    let line = Line::new(world);
    slowest(pool.on(&devices).run(|dev, _| {
        let mut seat = Seat::<T>::new(dev, shape)?;
        dev.synchronize()?;
        let theirs = club.filter(|_| who == Who::Nccl).map(|club| club.ranks[dev.rank()].lock());
        let theirs = theirs.map(|rank| Ok((rank, operands(dev, &mut seat)?))).transpose()?;
        let mut each = |dev: &Device| match who {
            Who::Together => seat.together(dev),
            Who::OneByOne => seat.one_by_one(dev),
            Who::Nccl | Who::Behind => {
                if let Some((rank, (operands, stream))) = &theirs {
                    let len = shape.0 * shape.1;
                    // SAFETY: both have `len` elements and live as long as the seat; all that uses them is on this
                    // stream, which is waited for before the seat goes.
                    unsafe { rank.call(Op::AllReduce, T::NCCL, *operands, size_of::<T>(), len, *stream) };
                }
                seat.behind(dev)
            }
        };
        let micros = if graph {
            let (chain, ()) = dev.capture(|dev| (0..CHAIN).try_for_each(|_| each(dev)))?;
            dev.synchronize()?;
            timed(dev, &line, launches, &mut || dev.launch_graph(&chain))?
        } else {
            timed(dev, &line, launches * CHAIN, &mut || each(dev))?
        };
        Ok(micros / (launches * CHAIN) as f64)
    }))
}

/// The addresses of NCCL's input and output, and the stream of its calls.
fn operands<T: Number + Float<Acc = f32>>(dev: &Device, seat: &mut Seat<T>) -> Result<([u64; 2], CUstream)> {
    let cuda = dev.cuda()?;
    let (x, mut y) = (cuda.read(&seat.x)?, cuda.write(&mut seat.y)?);
    let operands = [x.device_ptr(cuda.stream()).0, y.device_ptr_mut(cuda.stream()).0];
    Ok((operands, cuda.stream().cu_stream()))
}

/// Microseconds of so many calls, after one that does not count.
fn timed(dev: &Device, line: &Line, calls: usize, call: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    line.wait();
    call()?;
    dev.synchronize()?;
    Player { call, wait: &mut || dev.synchronize() }.timed(line, calls)
}
