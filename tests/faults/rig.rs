//! What the tests share: a pool that works, and kernels that do not.

use crate::support;
use gpu_pool::{Device, Error, GpuPool, Module, ReduceOp, kernel};

/// The pool does all that pools do.
#[track_caller]
pub fn assert_works(pool: &GpuPool) {
    let n = pool.device_count();
    for _ in 0..3 {
        let sums = pool.run(|dev, _| {
            let mut x = dev.upload(&[1.0f32; 50])?;
            dev.all_reduce(&mut x, ReduceOp::Sum)?;
            dev.barrier()?;
            assert_eq!(dev.exchange(dev.rank())?, (0..n).collect::<Vec<_>>());
            dev.download(&x)
        });
        assert_eq!(sums.unwrap(), vec![vec![n as f32; 50]; n]);
    }
}

#[track_caller]
pub fn reduce(dev: &Device, len: usize) -> Result<(), Error> {
    dev.all_reduce(&mut dev.zeros::<f32>(len)?, ReduceOp::Sum)
}

pub static STRAY_MODULE: Module = Module::ptx(".version 7.5\n.target sm_75\n.address_size 64\n");
kernel! {
    pub static STRAY: "stray" in STRAY_MODULE, fn(x: &mut [u32]) |_dims| { x.fill(1) }
    pub static TWINLESS: "twinless" in STRAY_MODULE, fn(x: &mut [u32]);
    pub static CRASH: "crash" in STRAY_MODULE, fn(x: &mut [u32]) |_dims| {
        panic!("illegal address, so to speak, at {:?}", x.first());
    }
}

pub fn host(count: usize) -> GpuPool {
    support::builder().host(count).module(&STRAY_MODULE).module(&support::MODULE).build().unwrap()
}
