//# first: only copies and kernels take peers
//# lines: 60
use gpu_pool::{Device, DeviceBuffer, Result};

fn fill(dev: &Device, x: &DeviceBuffer<f32>) -> Result<()> {
    dev.fill(&mut x.peer(), 1.0) //~ E0277: only copies and kernels take peers
}

fn main() {
    let _ = fill;
}
