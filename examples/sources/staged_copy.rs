//! The CUDA Handbook, listing 9.1, `chMemcpyPeerToPeer`: a copy between devices by way of two staging buffers.
//!
//! `cargo run --release --example staged_copy`. It uses the first two GPUs, else two software GPUs. Device 0 copies
//! piece by piece into page-locked memory, device 1 copies from it. The devices wait for each other; the CPU waits for
//! none of them. `Device::copy` does all of this by itself where there is no peer access: the last lines.

use anyhow::{Result, ensure};
use gpu_pool::{Device, DeviceBuffer, GpuPool, PinnedBuffer};
use std::{
    io::{Write, stdout},
    time::{Duration, Instant},
};

/// Tag of a staging buffer that has been filled.
const FULL: u64 = 0;
/// Tag of a staging buffer that may be filled again.
const EMPTY: u64 = 1;
/// Tag of the source of the library's copy.
const SOURCE: u64 = 2;

fn main() -> Result<()> {
    // Without peer access, so that `copy` below has to stage, too.
    let pool = GpuPool::builder().devices(&[0, 1]).without_peer_access().build()?;
    run(&pool, &mut stdout(), 25_000_000, 1 << 20)
}

/// A copy of `len` elements in pieces of `staging`, by hand and by the library. Each way runs twice, and the second run
/// is timed: the library page-locks its staging buffers in the first one.
pub fn run(pool: &GpuPool, out: &mut (dyn Write + Send), len: usize, staging: usize) -> Result<()> {
    let data: Vec<f32> = (0..len).map(|i| i as f32).collect();
    let copied = pool.on(&[0, 1]).run(|dev, _| {
        let (src, mut dst) = match dev.rank() {
            0 => (dev.upload(&data)?, dev.zeros(0)?),
            _ => (dev.zeros(0)?, dev.zeros::<f32>(len)?),
        };
        if dev.rank() == 1 {
            for _ in 0..2 {
                dev.give(dev.pinned::<f32>(staging)?, 0, EMPTY)?; // two staging buffers take turns
            }
        }
        let hand = second(dev, || by_hand(dev, &src, &mut dst, len, staging))?;
        let found = dev.download(&dst)?;
        if dev.rank() == 0 {
            dev.give(src, 1, SOURCE)?;
            return Ok((found, Vec::new(), [hand; 2]));
        }
        let src = dev.take::<DeviceBuffer<f32>>(0, SOURCE)?;
        dev.fill(&mut dst, 0.0)?;
        let mut library = || {
            let begin = Instant::now();
            dev.copy(&src, &mut dst)?;
            dev.synchronize()?;
            Ok::<_, gpu_pool::Error>(begin.elapsed())
        };
        let library = library().and_then(|_| library())?;
        Ok((found, dev.download(&dst)?, [hand, library]))
    })?;
    let (by_hand, by_library, times) = &copied[1];
    for (what, time) in ["by hand", "by Device::copy"].iter().zip(times) {
        let seconds = time.as_secs_f64();
        writeln!(out, "{len} elements {what}: {seconds:.4} sec, {:.1} GB/s", 4e-9 * len as f64 / seconds)?;
    }
    check(&data, by_hand)?;
    check(&data, by_library)
}

/// Both devices call this: device 0 fills staging buffers, device 1 empties them.
fn by_hand(
    dev: &Device,
    src: &DeviceBuffer<f32>,
    dst: &mut DeviceBuffer<f32>,
    len: usize,
    staging: usize,
) -> gpu_pool::Result<()> {
    let pieces = (0..len).step_by(staging).map(|start| start..len.min(start + staging));
    for piece in pieces {
        if dev.rank() == 0 {
            let mut buffer = dev.take::<PinnedBuffer<f32>>(1, EMPTY)?;
            dev.download_pinned(&src.slice(piece.clone()), &mut buffer.range_mut(..piece.len()))?;
            dev.give(buffer, 1, FULL)?; // and the event after which device 1 may read it
        } else {
            let buffer = dev.take::<PinnedBuffer<f32>>(0, FULL)?;
            dev.upload_pinned_into(&buffer.range(..piece.len()), &mut dst.slice_mut(piece))?;
            dev.give(buffer, 0, EMPTY)?; // and the event after which device 0 may write it
        }
    }
    Ok(())
}

/// The time of the second run, from when both devices are ready.
fn second(dev: &Device, mut run: impl FnMut() -> gpu_pool::Result<()>) -> gpu_pool::Result<Duration> {
    run()?;
    let begin = start_together(dev)?;
    run()?;
    dev.synchronize()?;
    Ok(begin.elapsed())
}

/// The time at which both devices are ready.
fn start_together(dev: &Device) -> gpu_pool::Result<Instant> {
    dev.synchronize()?;
    dev.barrier()?;
    Ok(Instant::now())
}

/// Compares the copy with the source.
pub fn check(src: &[f32], dst: &[f32]) -> Result<()> {
    ensure!(src == dst, "the copy differs from its source");
    Ok(())
}
