use gpu_pool::{Device, DeviceBuffer, Result};

fn shift(dev: &Device, x: &mut DeviceBuffer<f32>) -> Result<()> {
    dev.copy(&x.slice(0..10), &mut x.slice_mut(5..15)) //~ E0502
}

fn main() {
    let _ = shift;
}
