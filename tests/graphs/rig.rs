//! What the tests share: a step of everything, and whether all is well.

use crate::support::{ramp, slow_add};
use gpu_pool::{Device, DeviceBuffer, GpuPool, Result};

/// Microseconds that a slow kernel takes here: long compared to the calls that follow it.
pub const SLOW: u32 = 15_000;

/// Some of everything that a graph can hold.
pub fn step(dev: &Device, x: &mut DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<DeviceBuffer<f32>> {
    let mut z = dev.zeros::<f32>(x.len())?;
    dev.axpy(0.5, x, &mut z)?;
    dev.scale(x, 1.001)?;
    dev.copy(&z.slice(10..20), &mut y.slice_mut(..10))?;
    let twice = dev.cast::<f64, _>(y)?;
    dev.fill(&mut y.slice_mut(20..), 3.0)?;
    dev.axpy(1.0, &z, y)?;
    drop(twice);
    dev.dot(x, y)
}

/// The device still works, on the stream that was captured beside and on others.
pub fn works(dev: &Device) {
    let mut x = dev.upload(&ramp(1000, 1)).unwrap();
    slow_add(dev, &mut x, 7, 0).unwrap();
    let side = dev.stream().unwrap();
    slow_add(&dev.on(&side), &mut x, 8, 0).unwrap();
    assert_eq!(dev.download(&x).unwrap(), ramp(1000, 1).iter().map(|x| x.wrapping_add(15)).collect::<Vec<_>>());
}

pub fn all_work(pool: &GpuPool) {
    pool.run(|dev, _| {
        works(dev);
        Ok(())
    })
    .unwrap();
}
