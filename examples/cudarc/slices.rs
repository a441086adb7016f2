//! A program of cudarc with a context, a stream and memory of its own on each GPU gets collectives: its slices become
//! buffers of this crate, and its streams order both. Nothing is copied.
//!
//! ```sh
//! cargo run --release --example cudarc_slices
//! ```

use anyhow::{Result, ensure};
use gpu_pool::{
    Error, GpuPool, ReduceOp,
    cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr},
};
use std::sync::Arc;

const LEN: usize = 1 << 20;

fn main() -> Result<()> {
    let pool = match GpuPool::builder().cuda().build() {
        Err(Error::NoDevice { .. }) => {
            println!("skipped: no CUDA device");
            return Ok(());
        }
        pool => pool?,
    };
    let ordinals = pool.run(|dev, _| Ok(dev.info().ordinal))?;

    // The program as it was.
    let existing = |ordinal: usize| -> Result<(Arc<CudaStream>, Arc<CudaSlice<f32>>)> {
        let stream = CudaContext::new(ordinal)?.new_stream()?;
        let slice = stream.clone_htod(&vec![1.0 + ordinal as f32; LEN])?;
        Ok((stream, Arc::new(slice)))
    };
    let own = ordinals.iter().map(|&ordinal| existing(ordinal)).collect::<Result<Vec<_>>>()?;

    // New: the sum over all GPUs, behind the program's copies, and before its next ones.
    let summed = pool.run(|dev, shard| {
        let (stream, slice) = &own[shard.index()];
        let address = slice.device_ptr(stream).0;
        // SAFETY: `own` keeps the stream until the pool is closed. The slice has `LEN` live values, the buffer keeps
        // them, and cudarc uses them on that stream alone.
        let (stream, mut x) =
            unsafe { (dev.adopt_stream(stream.cu_stream() as u64)?, dev.adopt::<f32>(address, LEN, slice.clone())?) };
        dev.on(&stream).all_reduce(&mut x, ReduceOp::Sum)
    });
    // Before `own` goes, also after a failure.
    pool.close()?;
    summed?;

    let expected: f32 = ordinals.iter().map(|&ordinal| 1.0 + ordinal as f32).sum();
    for (stream, slice) in &own {
        ensure!(stream.clone_dtoh(&**slice)?.iter().all(|&x| x == expected), "a wrong sum");
    }
    println!("{LEN} elements of cudarc on {} GPUs were summed in place: {expected}", own.len());
    Ok(())
}
