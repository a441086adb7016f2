//! Exhibits: memory that the host and devices share.

use super::prelude::*;
use gpu_pool_lab::check::Kind;

/// Numbers in a buffer.
const N: usize = 1 << 14;

exhibits! { "host_memory.rs"

"host-reads-too-early": "The host reads before the copy has landed" {
    "A copy to page-locked memory returns at once. The host reads what is there: a mixture of before and after, or \
     all of it from before."
    seen "pytorch/pytorch" issues 86264: "`to(\"cpu\", non_blocking=True)` works weird"
    wrong host_reads_too_early_wrong => Caught::Report(Kind::HostAccess), Runs
    right host_reads_too_early_right =>
        "`PinnedBuffer::as_slice` waits for the copies that write it; there is no other way to the numbers."
}

"host-writes-too-early": "The host overwrites a batch that is being sent" {
    "The loader fills the page-locked buffer with the next batch while the copy of the last one reads it: the \
     device gets some rows of each."
    seen "pytorch/pytorch" issues 127612: "a tensor on the CPU is changed before it was sent"
    wrong host_writes_too_early_wrong => Caught::Report(Kind::HostAccess), Runs
    right host_writes_too_early_right => "`PinnedBuffer::as_mut_slice` waits for all copies, from it and to it."
}

"pinned-freed-in-flight": "Page-locked memory is freed during the copy" {
    "A helper makes a page-locked buffer, starts the copy, and returns: the buffer goes back to its allocator, and \
     the next one gets its address, before the copy has read it."
    seen "pytorch/pytorch" issues 130785: "`.pin_memory().cuda(non_blocking=True)`, found 94 times in public code"
    wrong pinned_freed_in_flight_wrong => Caught::Report(Kind::FreeInUse), OnlyChecked
    right pinned_freed_in_flight_right =>
        "A `PinnedBuffer` may be dropped at once: its memory rests until the copy is over."
}

"unified-on-two-devices": "Two devices touch the same unified memory" {
    "Unified memory has one address on all devices, and each works on its slice. The second device also reads the \
     last row of the first one's, which is being written."
    seen "JuliaGPU/CUDA.jl" issues 2615: "one array in unified memory for several GPUs (there, the slices are apart)"
    wrong unified_on_two_devices_wrong => Caught::Report(Kind::Race), Runs
    right unified_on_two_devices_right =>
        "`rows_mut` cuts the memory into parts that do not overlap; what a neighbour needs of a part is handed over \
         between two scopes."
}

"unified-looked-at": "The host looks at unified memory while devices work" {
    "The host keeps a slice of unified memory over the launch of the kernels that write it."
    seen "vernamlab/cuFHE" issues 2: "the host touches managed memory while a kernel runs: CUDA_EXCEPTION_15"
    wrong =>
        Caught::DoesNotCompile {
            file: "tests/compile_fail/unified_is_looked_at_while_its_rows_are_out.rs",
            code: "E0502"
        },
        Runs
    right unified_looked_at_right =>
        "The rows are borrowed by the devices while they work, and `as_slice` comes before or after."
}

}

fn host_reads_too_early_wrong(ground: &Ground) -> Outcome {
    let [gpu] = ground.bare()?;
    let (stream, x, host) = (gpu.stream()?, gpu.alloc(N)?, gpu.alloc_pinned(N)?);
    gpu.fill(x, 1.0, stream)?;
    gpu.copy_to_host(host, x, stream)?;
    let seen = gpu.host_read(host)?;
    Ok(Seen::all(&seen, 1.0))
}

fn host_reads_too_early_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(1)?;
    let mut host = pool.pinned::<f32>(N)?;
    pool.with(vec![&mut host]).run(|dev, _, host| {
        let mut x = dev.zeros::<f32>(N)?;
        dev.fill(&mut x, 1.0)?;
        dev.download_pinned(&x, host)
    })?;
    Ok(Seen::all(host.as_slice()?, 1.0))
}

fn host_writes_too_early_wrong(ground: &Ground) -> Outcome {
    let [gpu] = ground.bare()?;
    let (stream, x, batch) = (gpu.stream()?, gpu.alloc(N)?, gpu.alloc_pinned(N)?);
    gpu.host_write(batch, 1.0)?;
    gpu.copy_to_device(x, batch, stream)?;
    gpu.host_write(batch, 2.0)?; // the next batch
    Ok(Seen::all(&gpu.download(x, stream)?, 1.0))
}

fn host_writes_too_early_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(1)?;
    let mut batch = pool.pinned::<f32>(N)?;
    batch.as_mut_slice()?.fill(1.0);
    let seen = pool.with(vec![&mut batch]).run(|dev, _, batch| {
        let x = dev.upload_pinned(batch)?;
        batch.as_mut_slice()?.fill(2.0); // waits for the copy
        dev.download(&x)
    })?;
    Ok(Seen::all(&seen.concat(), 1.0))
}

fn pinned_freed_in_flight_wrong(ground: &Ground) -> Outcome {
    let [gpu] = ground.bare()?;
    let (stream, x) = (gpu.stream()?, gpu.alloc(N)?);
    let batch = gpu.alloc_pinned(N)?;
    gpu.host_write(batch, 1.0)?;
    gpu.copy_to_device(x, batch, stream)?;
    gpu.free(batch)?; // as when a local goes out of scope
    Ok(Seen::all(&gpu.download(x, stream)?, 1.0))
}

fn pinned_freed_in_flight_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(1)?;
    let seen = pool.run(|dev, _| {
        let mut batch = dev.pinned::<f32>(N)?;
        batch.as_mut_slice()?.fill(1.0);
        let x = dev.upload_pinned(&batch)?;
        drop(batch);
        dev.download(&x)
    })?;
    Ok(Seen::all(&seen.concat(), 1.0))
}

fn unified_on_two_devices_wrong(ground: &Ground) -> Outcome {
    let [first, second] = ground.bare()?;
    let (s, t) = (first.stream()?, second.stream()?);
    let table = first.alloc_managed(2 * N)?;
    first.fill(table.part(0..N), 1.0, s)?;
    let (halo, row) = (table.part(N - 16..N), table.part(N..N + 16));
    second.axpy(1.0, halo, row, t)?;
    first.sync(s)?;
    second.sync(t)?;
    Ok(Seen::all(&first.host_read(row)?, 1.0))
}

fn unified_on_two_devices_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let mut table = pool.unified::<f32>(2 * N)?;
    pool.with(table.rows_mut(16)).run(|dev, shard, mut rows| match shard.index() {
        0 => dev.fill(&mut rows, 1.0),
        _ => Ok(()),
    })?;
    let halo = table.as_slice()?[N - 16..N].to_vec();
    pool.with(table.rows_mut(16)).run(|dev, shard, rows| match shard.index() {
        0 => Ok(()),
        _ => dev.axpy(1.0, &dev.upload(&halo)?, &mut rows.split_at_mut(16).0),
    })?;
    Ok(Seen::all(&table.as_slice()?[N..N + 16], 1.0))
}

fn unified_looked_at_right(ground: &Ground) -> Outcome {
    let pool = ground.pool(2)?;
    let mut table = pool.unified::<f32>(2 * N)?;
    let before = table.as_slice()?[0];
    pool.with(table.rows_mut(16)).run(|dev, _, mut rows| dev.fill(&mut rows, before + 1.0))?;
    Ok(Seen::all(table.as_slice()?, 1.0))
}
