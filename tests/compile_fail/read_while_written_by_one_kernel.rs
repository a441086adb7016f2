use gpu_pool::{Device, DeviceBuffer, Result};

fn double(dev: &Device, x: &mut DeviceBuffer<f32>) -> Result<()> {
    dev.axpy(1.0, x, x) //~ E0502
}

fn main() {
    let _ = double;
}
