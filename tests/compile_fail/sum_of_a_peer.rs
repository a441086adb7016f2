//# first: only copies and kernels take peers
//# lines: 30
use gpu_pool::{Device, DeviceBuffer, Result};

fn sum(dev: &Device, x: &DeviceBuffer<f32>) -> Result<DeviceBuffer<f32>> {
    dev.sum(&x.peer()) //~ E0277: only copies and kernels take peers
}

fn main() {
    let _ = sum;
}
