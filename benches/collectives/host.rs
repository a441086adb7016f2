//! What a small all-reduce costs the host: the time of the calls alone, no more of them than the driver's queue holds.
//!
//! The peers do less than a call. They are the launch of a kernel that has as many arguments as the all-reduce's, but
//! fewer bytes of them, and ends at once; and launches of graphs: of one such kernel, of one all-reduce, and of 20 of
//! them. In a call, and in a launch of a graph with collectives, the members' threads meet. `meeting` is what a call
//! takes longer than the launch of a kernel; its peer is the bare meeting, `barrier`.

use gpu_pool::{Device, DeviceBuffer, LaunchDims, Module, Result, kernel};

use crate::{
    Machine,
    nccl::Club,
    ops::Op,
    stage::{Line, Player, Stage, Who, slowest},
    support::{Bench, MICROSECONDS, Side},
};

const BYTES: usize = 1 << 10;
/// Calls in a turn.
const CALLS: usize = 200;
/// All-reduces in the larger graph, and its launches in a turn.
const CHAIN: usize = 20;

static MODULE: Module = Module::ptx(
    ".version 7.0
.target sm_70
.address_size 64
.visible .entry eight(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d, .param .u64 e, .param .u64 f,
    .param .u32 g, .param .u32 h) { ret; }
",
);
kernel! {
    /// Does nothing, with as many arguments as the kernel of a small all-reduce.
    static EIGHT: "eight" in MODULE,
        fn(_a: &[f32], _b: &mut [f32], _c: u64, _d: u64, _e: u64, _f: u64, _g: u32, _h: u32) |_dims| {}
}

pub fn run(bench: &mut Bench, machine: &Machine, world: usize) {
    let case = |what: &str| format!("{}/host/{what}/f32/{world}/{BYTES}", machine.kind);
    let (call, meeting) = (case("all_reduce"), case("meeting"));
    if !bench.wants(&call) && !bench.wants(&meeting) {
        return;
    }
    let pool = machine.builder(world).module(&MODULE).build().expect("the devices can be opened");
    let club = machine.nccl.map(|nccl| Club::join(nccl, &pool, world, 0));
    let stage = Stage::<f32>::new(&pool, club.as_ref(), world, Op::AllReduce, BYTES);
    let (line, calls) = (Line::new(world), bench.size(CALLS, 50));
    let of = |who: Who| slowest(stage.each(who, false, |_, player| player.on_host(&line, calls)));
    let graph = |length, calls| slowest(stage.each_captured(length, |_, player| player.on_host(&line, calls)));
    let launch = || {
        slowest(pool.run(|dev, _| {
            let (a, mut b) = (dev.zeros(1)?, dev.zeros(1)?);
            on_host(dev, (&line, calls), &mut || launch_eight(dev, &a, &mut b))
        }))
    };
    let launch_graph = || {
        slowest(pool.run(|dev, _| {
            let (a, mut b) = (dev.zeros(1)?, dev.zeros(1)?);
            let (graph, ()) = dev.capture(|dev| launch_eight(dev, &a, &mut b))?;
            on_host(dev, (&line, calls), &mut || dev.launch_graph(&graph))
        }))
    };
    let barrier = || slowest(pool.run(|dev, _| on_host(dev, (&line, calls), &mut || dev.barrier())));
    let name = machine.nccl.map_or(String::new(), |nccl| format!("{}, plain", nccl.name));
    bench.set_turns(2, bench.size(31, 5));
    let ours = Side::new("gpu-pool", || of(Who::Ours));
    let mut peers = vec![
        Side::new("launch of a kernel", launch),
        Side::new("launch of a graph with a kernel", launch_graph),
        Side::new("launch of a graph with an all_reduce", || graph(1, calls)),
        Side::new("launch of a graph with 20 all_reduces", || graph(CHAIN, (calls / CHAIN).max(1))),
    ];
    if club.is_some() {
        peers.push(Side::new(&name, || of(Who::Plain)));
    }
    bench.compare(&call, MICROSECONDS, ours, peers);
    let difference = Side::new("gpu-pool", || of(Who::Ours) - launch());
    bench.compare(&meeting, MICROSECONDS, difference, vec![Side::new("barrier", barrier)]);
    drop(stage);
    if let Some(club) = club {
        club.leave(&pool);
    }
}

fn launch_eight(dev: &Device, a: &DeviceBuffer<f32>, b: &mut DeviceBuffer<f32>) -> Result<()> {
    // SAFETY: the kernel fits its signature and touches nothing.
    unsafe { dev.launch(&EIGHT, LaunchDims::cover(1), (a, b, 0u64, 0u64, 0u64, 0u64, 0u32, 0u32)) }
}

fn on_host(dev: &Device, (line, calls): (&Line, usize), call: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    Player { call, wait: &mut || dev.synchronize() }.on_host(line, calls)
}
