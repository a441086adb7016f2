//! A GPU that traps: typed errors for everybody and no hang, whether the driver spares the other GPUs or not (580 does
//! not). In a process of its own, since a trap cannot be undone.

use crate::support::{again, printed, task};
use gpu_pool::{DeviceBuffer, Error, GpuPool, LaunchDims, Module, ReduceOp, kernel};
use gpu_pool_lab::prelude::*;
use std::time::Duration;

static MODULE: Module = Module::ptx(
    ".version 7.5\n.target sm_75\n.address_size 64\n\
     .visible .entry give_up(.param .u64 x)\n{\n    trap;\n    ret;\n}\n",
);
kernel! { static GIVE_UP: "give_up" in MODULE, fn(x: &mut [u32]); }

#[test]
fn a_gpu_that_traps_is_an_error_and_no_hang() {
    if gpu_pool::extend::driver::cuda::device_count().unwrap_or(0) < 2 {
        println!("skipped: needs 2 CUDA devices");
        return;
    }
    assert!(printed(&mut again(&["lost_gpu::child"], "trap"), 1).contains("all as it should be"));
}

#[test]
fn child() {
    if task().is_none() {
        return;
    }
    let pool = GpuPool::builder()
        .check(gpu_pool_lab::Check::Races)
        .cuda()
        .devices(&[0, 1])
        .module(&MODULE)
        .timeout(Duration::from_secs(20))
        .build()
        .unwrap();
    // The peer waits in a collective; it is told the cause.
    let peer = std::sync::Mutex::new(None);
    let failed = pool.run(|dev, _| {
        let mut x = dev.zeros::<u32>(64)?;
        if dev.index() == 0 {
            // SAFETY: the kernel touches nothing.
            unsafe { dev.launch(&GIVE_UP, LaunchDims::cover(1), (&mut x,))? };
            dev.synchronize()?;
        }
        let mut sum = dev.upload(&[1.0f32])?;
        let told = dev.all_reduce(&mut sum, ReduceOp::Sum);
        *peer.lock().unwrap() = told.as_ref().err().cloned();
        told
    });
    println!("{failed:?}");
    assert!(matches!(failed, Err(Error::DeviceLost { device: 0, .. })));
    assert!(matches!(&*peer.lock().unwrap(), Some(Error::Aborted { by: 0, .. })));
    // The lost one stays lost.
    assert!(matches!(pool.run(|dev, _| dev.zeros::<u32>(1).map(drop)), Err(Error::DeviceLost { .. })));
    let sum = |pool: &GpuPool, devices: &[usize]| {
        pool.on(devices).run(|dev, _| {
            let x: DeviceBuffer<f32> = dev.upload(&vec![0.5; 1 << 20])?;
            dev.download(&dev.sum(&x)?)
        })
    };
    match sum(&pool, &[1]) {
        Ok(sums) => {
            assert_eq!(sums, [[524_288.0]]);
            assert_eq!(pool.report().lost, [true, false]);
            let rest = pool.survivors().unwrap();
            assert_eq!(sum(&rest, &[0]).unwrap(), [[524_288.0]]);
            rest.close().unwrap();
        }
        // Driver 580: the trap has taken every context of the process with it, also without peer access.
        Err(error) => {
            assert!(matches!(error, Error::DeviceLost { device: 1, .. }), "{error}");
            assert_eq!(pool.report().lost, [true, true]);
            assert!(matches!(pool.survivors(), Err(Error::NoDevice { .. })));
        }
    }
    pool.close().unwrap();
    println!("all as it should be");
}
