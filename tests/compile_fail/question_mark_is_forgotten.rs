//# first: a `?` is missing
//# lines: 30
use gpu_pool::{Device, DeviceBuffer, Result};

fn sum(dev: &Device) -> Result<DeviceBuffer<f32>> {
    dev.sum(&dev.upload(&[1.0f32])) //~ E0277: put a `?` behind the call
}

fn main() {
    let _ = sum;
}
