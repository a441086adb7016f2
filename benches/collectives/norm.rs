//! `all_reduce_norm`: all-reduce, residual and RMS norm in one call, against our own three calls, and against NCCL's
//! all-reduce with our two kernels behind it. Called, and 20 in a graph. NCCL's calls and our operations cannot be
//! captured together: there the peer's time is the sum of two graphs' times.

use cudarc::driver::{DevicePtr, DevicePtrMut, sys};
use gpu_pool::{Device, DeviceBuffer, Float, GpuPool, ReduceOp, Result, RowNorm};
use half::bf16;

use crate::{
    Machine,
    graph::Chain,
    nccl::{Club, Rank},
    ops::{Number, Op},
    stage::{Line, Player, check, fill, slowest},
    support::{Bench, MICROSECONDS, Side, gpus},
};

const HIDDEN: [usize; 3] = [4096, 8192, 16384];
const ROWS: [usize; 8] = [1, 3, 16, 64, 128, 256, 1024, 4096];
/// Operations in a graph.
const CHAIN: usize = 20;
/// Bytes to reduce in a turn, if that is more than one chain.
const ENOUGH: usize = 4 << 30;

/// Who does what.
#[derive(Clone, Copy, PartialEq)]
enum Who {
    Together,
    OneByOne,
    Nccl,
}

pub fn run(bench: &mut Bench, machine: &Machine, pool: &GpuPool, world: usize) {
    sweep::<bf16>(bench, machine, pool, world);
    sweep::<f32>(bench, machine, pool, world);
}

fn sweep<T: Number + Float<Acc = f32>>(bench: &mut Bench, machine: &Machine, pool: &GpuPool, world: usize) {
    let case = |graph: bool, hidden: usize, rows: usize| {
        let form = if graph { "graph/" } else { "" };
        format!("{}/{form}all_reduce_norm/{}/{world}/{hidden}/{rows}", machine.kind, T::NAME)
    };
    let all = || HIDDEN.into_iter().flat_map(|hidden| ROWS.map(|rows| (hidden, rows)));
    let wanted = |&(hidden, rows): &(usize, usize)| {
        let fits = hidden * rows * size_of::<T>() <= machine.most;
        fits && (bench.wants(&case(false, hidden, rows)) || bench.wants(&case(true, hidden, rows)))
    };
    let shapes: Vec<_> = all().filter(wanted).collect();
    if shapes.is_empty() {
        return;
    }
    let club = machine.nccl.map(|nccl| Club::join(nccl, pool, world, 0));
    let nccl = machine.nccl.map_or(String::new(), |nccl| format!("{}, plain, and two kernels", nccl.name));
    bench.set_turns(1, bench.size(15, 3));
    for (hidden, rows) in shapes {
        for graph in [false, true] {
            let turn = |who| turn::<T>(pool, club.as_ref(), world, (hidden, rows), who, graph);
            let side = |name, who| Side::new(name, move || turn(who));
            let mut peers = vec![side("gpu-pool, three calls", Who::OneByOne)];
            if club.is_some() {
                peers.push(side(&nccl, Who::Nccl));
            }
            bench.compare(&case(graph, hidden, rows), MICROSECONDS, side("gpu-pool", Who::Together), peers);
        }
    }
    if let Some(club) = club {
        club.leave(pool);
    }
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
        dev.add_assign(&mut self.residual, &self.y)?;
        dev.rms_norm(&self.residual, &self.gamma, 1e-5).map(drop)
    }
}

/// Microseconds per operation of the slowest device.
fn turn<T: Number + Float<Acc = f32>>(
    pool: &GpuPool,
    club: Option<&Club>,
    world: usize,
    shape: (usize, usize),
    who: Who,
    graph: bool,
) -> f64 {
    let devices: Vec<usize> = (0..world).collect();
    let bytes = shape.0 * shape.1 * size_of::<T>();
    let launches = (ENOUGH / CHAIN / bytes).clamp(1, 10);
    let line = Line::new(world);
    let times = pool.run_on(&devices, |dev, _| {
        let mut seat = Seat::<T>::new(dev, shape)?;
        dev.synchronize()?;
        let rank = club.map(|club| club.ranks[dev.rank()].lock());
        let ours = |seat: &mut Seat<T>| match (who, graph) {
            (Who::Together, false) => timed(dev, &line, launches * CHAIN, &mut || seat.together(dev)),
            (Who::OneByOne, false) => timed(dev, &line, launches * CHAIN, &mut || seat.one_by_one(dev)),
            (who, _) => {
                let mut each = |dev: &Device| match who {
                    Who::Together => seat.together(dev),
                    Who::OneByOne => seat.one_by_one(dev),
                    Who::Nccl => seat.behind(dev),
                };
                let (chain, ()) = dev.capture(|dev| (0..CHAIN).try_for_each(|_| each(dev)))?;
                dev.synchronize()?;
                timed(dev, &line, launches, &mut || dev.launch_graph(&chain))
            }
        };
        let own = match (who, graph) {
            (Who::Nccl, false) => 0.0,
            _ => ours(&mut seat)?,
        };
        let theirs = match rank {
            Some(rank) if who == Who::Nccl => nccl(dev, &rank, &mut seat, (&line, launches), graph)?,
            _ => 0.0,
        };
        Ok((own + theirs) / (launches * CHAIN) as f64)
    });
    slowest(times)
}

/// NCCL's all-reduces alone in a graph; called, with our kernels behind each.
fn nccl<T: Number + Float<Acc = f32>>(
    dev: &Device,
    rank: &Rank,
    seat: &mut Seat<T>,
    (line, launches): (&Line, usize),
    graph: bool,
) -> Result<f64> {
    let cuda = dev.cuda()?;
    let (stream, len) = (cuda.stream().cu_stream(), seat.x.len());
    let (x, y) = {
        let (x, mut y) = (cuda.read(&seat.x)?, cuda.write(&mut seat.y)?);
        (x.device_ptr(cuda.stream()).0, y.device_ptr_mut(cuda.stream()).0)
    };
    let call = || {
        // SAFETY: both have `len` elements and live as long as the seat; all that uses them is on this stream, which is
        // waited for before the seat goes.
        unsafe { rank.call(Op::AllReduce, T::NCCL, [x, y], size_of::<T>(), len, stream) };
        Ok(())
    };
    if graph {
        // Connections must exist before a capture.
        call()?;
        // SAFETY: the stream lives as long as `cuda`.
        check(unsafe { sys::cuStreamSynchronize(stream) });
        line.wait();
        let chain = Chain::capture(stream, || (0..CHAIN).try_for_each(|_| call()))?;
        return timed(dev, line, launches, &mut || chain.launch());
    }
    timed(dev, line, launches * CHAIN, &mut || {
        call()?;
        seat.behind(dev)
    })
}

/// Microseconds of so many calls, after one that does not count.
fn timed(dev: &Device, line: &Line, calls: usize, call: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    line.wait();
    call()?;
    dev.synchronize()?;
    Player { call, wait: &mut || dev.synchronize() }.timed(line, calls)
}
