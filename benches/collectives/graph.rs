//! All-reduces in graphs: each side captures a chain of them, and launches it. Each is in place, so it depends on the
//! one before.

use std::{cell::LazyCell, ptr};

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstream, CUstreamCaptureMode};
use gpu_pool::{GpuPool, Result};
use half::bf16;

use crate::{
    LazyTorch, Machine,
    nccl::Club,
    ops::{Number, Op},
    stage::{Player, Stage, Who, check, slowest},
    support::{Bench, MICROSECONDS, Side},
};

/// All-reduces in a graph.
const CHAIN: usize = 20;
/// Most launches per turn, after one that does not count.
const LAUNCHES: usize = 10;
/// Bytes to reduce in a turn, if that is more than one launch.
const ENOUGH: usize = 12 << 30;
const SIZES: [usize; 11] =
    [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30];

/// What torch's own kernels do in symmetric memory, and the largest size for which they are asked.
const SYMMETRIC: [(&str, &str, usize); 2] =
    [("one_shot_graph", "torch, one shot, graph", 4 << 20), ("two_shot_graph", "torch, two shots, graph", 256 << 20)];

pub fn run(bench: &mut Bench, machine: &Machine, pool: &GpuPool, world: usize, torch: &LazyTorch<'_>) {
    sweep::<f32>(bench, machine, pool, world, torch);
    sweep::<bf16>(bench, machine, pool, world, torch);
}

fn sweep<T: Number>(bench: &mut Bench, machine: &Machine, pool: &GpuPool, world: usize, torch: &LazyTorch<'_>) {
    let case = |bytes: usize| format!("{}/graph/all_reduce/{}/{world}/{bytes}", machine.kind, T::NAME);
    let wanted = |&bytes: &usize| bytes <= machine.most && bench.wants(&case(bytes));
    let sizes: Vec<usize> = SIZES.into_iter().filter(wanted).collect();
    let Some(&most) = sizes.last() else { return };
    let club = machine.nccl.map(|nccl| Club::join(nccl, pool, world, most).and_processes(nccl, most));
    let name = machine.nccl.map_or("", |nccl| &nccl.name);
    let names = Who::NCCL.map(|who| (who, format!("{name}, {}, graph", who.way())));
    let torch = LazyCell::force(torch).as_ref().filter(|torch| torch.ask("symmetric", 1) > 0.0);
    bench.set_turns(1, bench.size(15, 3));
    for bytes in sizes {
        let stage = Stage::<T>::new(pool, club.as_ref(), world, Op::AllReduce, bytes);
        // Connections must exist before a capture.
        stage.players().into_iter().for_each(|who| stage.check(who, &case(bytes)));
        let stage = &stage;
        for who in stage.players() {
            if let Some(name) = who.blocks_note()
                && let Some(blocks) = blocks(stage, who)
            {
                bench.note(name, blocks.into());
                println!("{}: {blocks} blocks, {name}", case(bytes));
            }
        }
        let side = |name, who| Side::new(name, move || turn(stage, who));
        let plays = stage.players();
        let peers = names.iter().filter(|(who, _)| plays.contains(who)).map(|(who, name)| side(name.as_str(), *who));
        let mut peers: Vec<_> = peers.collect();
        if let Some(torch) = torch {
            for (form, name, _) in SYMMETRIC.into_iter().filter(|(.., most)| bytes <= *most) {
                let order = format!("sum:{}:{bytes}:{form}", T::NAME);
                peers.push(torch.side(name, order, launches(stage)));
            }
        }
        bench.compare(&case(bytes), MICROSECONDS, side("gpu-pool", Who::Ours), peers);
    }
    if let Some(club) = club {
        club.leave(pool);
    }
}

/// Launches of a graph in a turn.
fn launches<T: Number>(stage: &Stage<'_, T>) -> usize {
    let defined = (Op::AllReduce.most_calls(stage.world()) / CHAIN).saturating_sub(1);
    defined.min(ENOUGH / CHAIN / stage.bytes()).clamp(1, LAUNCHES)
}

impl Who {
    /// The name of this side's block count in the results.
    fn blocks_note(self) -> Option<&'static str> {
        match self {
            // The kernels of processes are those of threads.
            Who::Ours | Who::ProcessesPlain | Who::ProcessesWindows => None,
            Who::Plain => Some("plain_blocks"),
            Who::Windows => Some("windows_blocks"),
        }
    }
}

/// Thread blocks of NCCL's kernel, so the number of multiprocessors that it uses. Only a captured graph shows it.
fn blocks<T: Number>(stage: &Stage<'_, T>, who: Who) -> Option<u32> {
    let found = stage.each(who, false, |dev, player| {
        let cuda = dev.cuda()?;
        Ok(Chain::capture(cuda.stream().cu_stream(), || (player.call)())?.blocks)
    });
    found.expect("NCCL's calls are captured").into_iter().max().filter(|blocks| *blocks > 0)
}

/// Blocks of the largest kernel in a graph.
fn largest(graph: CUgraph) -> u32 {
    let mut count = 0;
    // SAFETY: a live graph; without room for nodes the call only returns their number.
    check(unsafe { sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut count) });
    let mut nodes = vec![ptr::null_mut(); count];
    // SAFETY: there is room for that many.
    check(unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count) });
    let blocks = nodes.into_iter().filter_map(|node| {
        let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: a node of the live graph.
        check(unsafe { sys::cuGraphNodeGetType(node, &mut kind) });
        (kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL).then(|| {
            let mut params = std::mem::MaybeUninit::zeroed();
            // SAFETY: a kernel node; only fields that the driver writes are read.
            let params: sys::CUDA_KERNEL_NODE_PARAMS = unsafe {
                check(sys::cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr()));
                params.assume_init()
            };
            params.gridDimX * params.gridDimY * params.gridDimZ
        })
    });
    blocks.max().unwrap_or(0)
}

/// Microseconds per operation of the slowest device.
pub fn turn<T: Number>(stage: &Stage<'_, T>, who: Who) -> f64 {
    if let Some(micros) = stage.turn_of_processes(who, true, 1) {
        return micros;
    }
    let launches = launches(stage);
    let line = stage.line();
    let timed = |player: &mut Player<'_>| -> Result<f64> {
        // No device launches while another one still makes its graph: NCCL does not guard against that.
        line.wait();
        (player.call)()?;
        (player.wait)()?;
        Ok(player.timed(&line, launches)? / (launches * CHAIN) as f64)
    };
    slowest(match who {
        Who::Ours => stage.each_captured(CHAIN, |_, player| timed(player)),
        _ => stage.each(who, false, |dev, player| {
            let cuda = dev.cuda()?;
            let stream = cuda.stream().cu_stream();
            let chain = Chain::capture(stream, || (0..CHAIN).try_for_each(|_| (player.call)()))?;
            timed(&mut Player { call: &mut || chain.launch(), wait: player.wait })
        }),
    })
}

/// NCCL's calls in a graph, as its guide says
/// (<https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html>).
pub struct Chain {
    exec: CUgraphExec,
    stream: CUstream,
    /// Blocks of its largest kernel.
    blocks: u32,
}

impl Chain {
    /// Captures what `calls` enqueues to the stream.
    pub fn capture(stream: CUstream, calls: impl FnOnce() -> Result<()>) -> Result<Self> {
        let (mut graph, mut exec): (CUgraph, CUgraphExec) = (ptr::null_mut(), ptr::null_mut());
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream of the context that is current.
        check(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) });
        calls()?;
        // SAFETY: the pointers are to live handles; the stream captures; the template is destroyed when it is no longer
        // needed.
        unsafe {
            check(sys::cuStreamEndCapture(stream, &mut graph));
        }
        let blocks = largest(graph);
        // SAFETY: as above.
        unsafe {
            check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            check(sys::cuGraphDestroy(graph));
            // Like our side: the first launch costs no more than the others.
            check(sys::cuGraphUpload(exec, stream));
            check(sys::cuStreamSynchronize(stream));
        }
        Ok(Chain { exec, stream, blocks })
    }

    pub fn launch(&self) -> Result<()> {
        // SAFETY: both are live; the memory of the calls lives as long as the stage.
        check(unsafe { sys::cuGraphLaunch(self.exec, self.stream) });
        Ok(())
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        // SAFETY: the handle belongs to this graph. Its launches have been waited for, or the driver keeps it until
        // they are over.
        let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}
