//! Memory of other code as a buffer, and its drop.

use crate::{
    Machine,
    driver_pool::check,
    sides::{Contender, Ours, Source, Work},
    support::{Bench, NANOSECONDS, Side},
};
use cudarc::driver::sys;
use gpu_pool::{Device, DeviceBuffer};
use std::sync::Arc;

const BYTES: usize = 4096;

/// One allocation of other code: the driver's, or on a software GPU the host's.
struct Foreign {
    address: u64,
    memory: Arc<Vec<u8>>,
}

impl Foreign {
    fn new(dev: &Device, software: bool) -> Self {
        let memory = Arc::new(vec![0; BYTES]);
        let mut address = memory.as_ptr() as u64;
        if !software {
            let _context = dev.cuda().expect("a GPU");
            // SAFETY: the pointer is to a live integer, and the context is current. The bench leaks the memory.
            check(unsafe { sys::cuMemAlloc_v2(&mut address, BYTES) });
        }
        Foreign { address, memory }
    }
}

impl Source for Foreign {
    type Block = DeviceBuffer<u8>;

    #[inline]
    fn take(&self, dev: &Device, bytes: usize) -> Option<DeviceBuffer<u8>> {
        // SAFETY: live memory, of which there is one buffer at a time, and which nothing uses.
        unsafe { dev.adopt(self.address, bytes, self.memory.clone()) }.ok()
    }

    #[inline]
    fn give(&self, block: DeviceBuffer<u8>) {
        drop(block);
    }
}

pub fn run(bench: &mut Bench, machine: &Machine) {
    let case = format!("{}/adopt", machine.kind);
    if !bench.wants(&case) {
        return;
    }
    let pool = machine.pool(1);
    let rounds = bench.size(10_000, 1000);
    let (foreign, ours) =
        (Contender::new(&pool, 0, |dev| Foreign::new(dev, machine.software)), Contender::new(&pool, 0, |_| Ours));
    bench.set_turns(bench.size(3, 1), bench.size(31, 5));
    let adopted = Side::sampling("gpu-pool", |samples| foreign.time(1, Work::Pair(BYTES), rounds, samples));
    let allocated = Side::sampling("the pool's own", |samples| ours.time(1, Work::Pair(BYTES), rounds, samples));
    bench.compare(&case, NANOSECONDS, adopted, vec![allocated]);
}
