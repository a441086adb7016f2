use gpu_pool::{Device, DeviceBuffer, Result};
use std::sync::Arc;

fn write(dev: &Device, mut x: Arc<DeviceBuffer<f32>>) -> Result<()> {
    dev.fill(&mut *x, 1.0) //~ E0596
}

fn main() {
    let _ = write;
}
