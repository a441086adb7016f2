//# first: `[f32; 4]` is no buffer or view of this device
//# lines: 30
use gpu_pool::{Device, DeviceBuffer, Result};

fn copy(dev: &Device, x: &mut DeviceBuffer<f32>) -> Result<()> {
    dev.copy(&[1.0f32; 4], x) //~ E0277: Device::upload
}

fn main() {
    let _ = copy;
}
