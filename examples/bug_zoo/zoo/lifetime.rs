//! Exhibits: memory that is reused or freed too early, or read before anything has written it.

use super::bare::{Gpu, Mem};
use super::prelude::*;
use gpu_pool::extend::driver::DriverResult;
use gpu_pool_lab::check::Kind;
use std::sync::Arc;

/// Numbers in a buffer.
const N: usize = 1 << 14;

exhibits! { "lifetime.rs"

"shared-pool": "One memory pool for two devices" {
    "A free list that does not know devices hands device 1 a block of device 0's memory, which device 0's stream is \
     still writing. Nothing fails: the block is valid everywhere."
    seen "JuliaGPU/CUDA.jl" pull 253:
        "\"Make the memory allocator context-aware\"; until then the manual said \"effectively breaking \
         multi-gpu-single-process concurrency\""
    wrong shared_pool_wrong, "struct SharedPool", "impl SharedPool" => Caught::Report(Kind::Race), Runs
    right shared_pool_right =>
        "Each device has a pool of its own, and a block goes back to the one that it came from."
}

"missing-record-stream": "A block is reused while a side stream reads it" {
    "The cache hands a block out again on the stream that freed it, which is right as long as no other stream has \
     used it. A copy to the host on a side stream has, and the cache was never told."
    seen "meta-pytorch/torchrec" pull 4231: "NaNs from a missing `record_stream` for a copy on a side stream"
    wrong missing_record_stream_wrong, "struct SharedPool", "impl SharedPool" =>
        Caught::Report(Kind::Race), Runs
    right missing_record_stream_right =>
        "A block of a pool remembers its last uses on all streams, and its next owner waits for them."
}

"free-while-peer-reads": "Memory is freed while another device reads it" {
    "The owner has nothing more to do with the memory and frees it. Its own work is over, but a peer's copy is not: \
     `cudaFree` waits for the owner, never for a peer."
    seen "pytorch/pytorch" issues 196257: "`cudaFree` does not wait for a peer's queue; late stores corrupt silently"
    wrong free_while_peer_reads_wrong => Caught::Report(Kind::FreeInUse), OnlyChecked
    right free_while_peer_reads_right =>
        "A buffer may be dropped at any time, on any device: the memory rests until every device is done with it."
}

"replay-after-free": "A captured graph outlives the memory that it names" {
    "A graph is recorded once and holds bare addresses. The scratch memory that was allocated while it was captured \
     is freed, then the graph is replayed. (A graph in the small: this crate has no capture yet.)"
    seen "beehive-lab/TornadoVM" issues 1006: "replays of a graph against addresses from before"
    wrong replay_after_free_wrong, "struct Graph", "impl Graph" =>
        Caught::Report(Kind::UseAfterFree), OnlyChecked
    right replay_after_free_right => "The graph owns what it names, and gives it back when it is dropped."
}

"uninitialised": "Memory that nobody has written" {
    "The output is allocated without being cleared, since the kernels will write all of it. One expert got no rows, \
     so its part keeps whatever was there."
    seen "tgale96/grouped_gemm" issues 36: "NaNs in the part of the output whose batch size is 0"
    wrong uninitialised_wrong => Caught::Report(Kind::UninitializedRead), Runs
    right uninitialised_right => "`zeros` is the safe way to get memory; `uninit` is unsafe."
}

}

/// Free blocks of all devices in one list.
#[derive(Default)]
struct SharedPool {
    free: Vec<Mem>,
}

impl SharedPool {
    #[track_caller]
    fn get(&mut self, gpu: &Gpu) -> DriverResult<Mem> {
        self.free.pop().map_or_else(|| gpu.alloc(N), Ok)
    }

    fn put(&mut self, block: Mem) {
        self.free.push(block);
    }
}

fn shared_pool_wrong(ground: &Ground) -> Outcome {
    let [first, second] = ground.bare()?;
    second.enable_peer(&first)?; // so that nothing fails
    let (s, t) = (first.stream()?, second.stream()?);
    let mut pool = SharedPool::default();

    let x = pool.get(&first)?;
    first.fill(x, 1.0, s)?;
    pool.put(x);

    let y = pool.get(&second)?; // the same block
    second.fill(y, 2.0, t)?;
    first.sync(s)?;
    second.sync(t)?;
    Ok(Seen::all(&second.download(y, t)?, 2.0))
}

fn shared_pool_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(N)?;
        dev.fill(&mut x, 1.0)?;
        drop(x); // under way, still
        dev.barrier()?;
        let mut y = dev.zeros::<f32>(N)?;
        dev.fill(&mut y, 2.0)?;
        dev.barrier()?;
        dev.download(&y)
    })?;
    Ok(Seen::all(&seen.concat(), 2.0))
}

fn missing_record_stream_wrong(ground: &Ground) -> Outcome {
    let [gpu] = ground.bare()?;
    let (compute, stash) = (gpu.stream()?, gpu.stream()?);
    let (mut cache, computed) = (SharedPool::default(), gpu.event()?);
    let host = gpu.alloc_pinned(N)?;
    let x = cache.get(&gpu)?;
    gpu.fill(x, 1.0, compute)?;
    gpu.record(computed, compute)?;
    gpu.wait(stash, computed)?;
    gpu.copy_to_host(host, x, stash)?;
    cache.put(x); // "compute is done with it"

    let y = cache.get(&gpu)?;
    gpu.fill(y, 2.0, compute)?;
    gpu.sync(stash)?;
    Ok(Seen::all(&gpu.host_read(host)?, 1.0))
}

fn missing_record_stream_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(1)?;
    let mut host = pool.pinned::<f32>(N)?;
    pool.with(vec![&mut host]).run(|dev, _, host| {
        let stash = dev.stream()?;
        let mut x = dev.zeros::<f32>(N)?;
        dev.fill(&mut x, 1.0)?;
        dev.on(&stash).download_pinned(&x, host)?;
        drop(x);
        let mut y = dev.zeros::<f32>(N)?;
        dev.fill(&mut y, 2.0)
    })?;
    Ok(Seen::all(host.as_slice()?, 1.0))
}

fn free_while_peer_reads_wrong(ground: &Ground) -> Outcome {
    let [owner, reader] = ground.bare()?;
    reader.enable_peer(&owner)?;
    let (s, t) = (owner.stream()?, reader.stream()?);
    let (x, y) = (owner.alloc(N)?, reader.alloc(N)?);
    owner.fill(x, 1.0, s)?;
    owner.sync(s)?;
    reader.copy_from_peer(y, &owner, x, t)?;
    owner.free(x)?; // the owner's stream is idle, after all
    Ok(Seen::all(&reader.download(y, t)?, 1.0))
}

fn free_while_peer_reads_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let seen = pool.run(|dev, _| {
        let mut x = dev.zeros::<f32>(N)?;
        dev.fill(&mut x, 1.0)?;
        let mut all = dev.exchange(Arc::new(x))?;
        let theirs = all.swap_remove((dev.rank() + 1) % all.len());
        let y = theirs.copy_to(dev)?;
        drop((theirs, all)); // the last handle goes with a copy under way
        dev.download(&y)
    })?;
    Ok(Seen::all(&seen.concat(), 1.0))
}

/// Work that is recorded once and submitted many times.
#[derive(Default)]
struct Graph {
    nodes: Vec<Box<dyn Fn() -> DriverResult>>,
}

impl Graph {
    fn replay(&self) -> DriverResult {
        self.nodes.iter().try_for_each(|node| node())
    }
}

fn replay_after_free_wrong(ground: &Ground) -> Outcome {
    let [gpu] = ground.bare()?;
    let (stream, x, y) = (gpu.stream()?, gpu.alloc(N)?, gpu.alloc(N)?);
    gpu.fill(x, 1.0, stream)?;
    gpu.fill(y, 0.0, stream)?;

    let mut graph = Graph::default();
    let scratch = gpu.alloc(N)?; // while it is captured
    let on = gpu.clone();
    graph.nodes.push(Box::new(move || on.fill(scratch, 1.0, stream)));
    let on = gpu.clone();
    graph.nodes.push(Box::new(move || on.axpy(1.0, scratch, y, stream)));
    graph.replay()?;
    gpu.sync(stream)?;
    gpu.free(scratch)?; // captured, so done with

    graph.replay()?;
    Ok(Seen::all(&gpu.download(y, stream)?, 2.0))
}

fn replay_after_free_right(ground: &Ground) -> Outcome {
    let [gpu] = ground.bare()?;
    let (stream, y) = (gpu.stream()?, gpu.alloc(N)?);
    gpu.fill(y, 0.0, stream)?;

    let (mut graph, scratch) = (Graph::default(), gpu.alloc(N)?);
    let on = gpu.clone();
    graph.nodes.push(Box::new(move || on.fill(scratch, 1.0, stream)));
    let on = gpu.clone();
    graph.nodes.push(Box::new(move || on.axpy(1.0, scratch, y, stream)));
    graph.replay()?;
    graph.replay()?;
    let seen = gpu.download(y, stream)?; // waits
    drop(graph);
    gpu.free(scratch)?;
    Ok(Seen::all(&seen, 2.0))
}

fn uninitialised_wrong(ground: &Ground) -> Outcome {
    let [gpu] = ground.bare()?;
    let stream = gpu.stream()?;
    let output = gpu.alloc(2 * N)?;
    let rows = [N, 0]; // of two experts
    gpu.fill(output.part(0..rows[0]), 1.0, stream)?;
    gpu.fill(output.part(N..N + rows[1]), 1.0, stream)?;
    let seen = gpu.download(output, stream)?;
    let (first, second) = seen.split_at(N);
    Ok(Seen::when(first == [1.0; N] && second == [0.0; N]))
}

fn uninitialised_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(1)?;
    let seen = pool.run(|dev, _| {
        let mut output = dev.zeros::<f32>(2 * N)?;
        dev.fill(&mut output.slice_mut(0..N), 1.0)?;
        dev.download(&output)
    })?;
    let (first, second) = seen[0].split_at(N);
    Ok(Seen::when(first == [1.0; N] && second == [0.0; N]))
}
