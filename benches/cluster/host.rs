//! A host: a process with one GPU that carries out orders, at the same time as the other one.

use std::{path::Path, ptr, time::Instant};

use cudarc::driver::sys::{self, CUresult, CUstream};
use gpu_pool::{Check, GpuPool};

use crate::{nccl::Rank, support::child};

/// The last one is ours.
pub const SIDES: [&str; 2] = ["blocking", "polled"];

/// Answers orders `<all_reduce or single>/<side>/<bytes> <rounds>` with microseconds per call.
pub fn serve(task: &str) {
    let mut words = task.splitn(4, ' ');
    let mut word = || words.next().expect("four words");
    let mut number = || word().parse::<usize>().expect("a number");
    let (host, gpu, most) = (number(), number(), number());
    let folder = Path::new(word());
    let pool = GpuPool::builder().cuda().devices(&[gpu]).check(Check::Off).record_memory(false).build();
    let pool = pool.expect("the GPU can be opened");
    let served = pool.run(|dev, _| {
        let data = dev.zeros::<u8>(most)?;
        let cuda = dev.cuda()?;
        let stream = cuda.stream().cu_stream();
        dev.synchronize()?;
        let at = ptr::with_exposed_provenance_mut(data.address() as usize);
        let ranks = SIDES.map(|side| Rank::join(folder, side, host, side == "blocking"));
        child::serve(|order, rounds| {
            let parts: Vec<&str> = order.split('/').collect();
            let [what, side, bytes] = parts[..] else { panic!("{order}: no order") };
            let bytes: usize = bytes.parse().expect("a number");
            let rank = &ranks[SIDES.iter().position(|name| *name == side).expect("a side")];
            assert!(bytes <= most);
            // SAFETY: `data` has these bytes, of this stream's device; it lives until the end, when all is waited for.
            let call = || unsafe { rank.all_reduce(at, bytes / 4, stream) };
            call();
            wait(stream);
            let clock = Instant::now();
            for _ in 0..rounds {
                call();
                if what == "single" {
                    wait(stream);
                }
            }
            wait(stream);
            clock.elapsed().as_secs_f64() * 1e6 / rounds as f64
        });
        drop(ranks);
        drop(data);
        Ok(())
    });
    served.expect("the device works");
}

/// The wait of a program that uses NCCL.
fn wait(stream: CUstream) {
    // SAFETY: the stream lives as long as the pool.
    let code = unsafe { sys::cuStreamSynchronize(stream) };
    assert_eq!(code, CUresult::CUDA_SUCCESS, "the stream fails");
}
