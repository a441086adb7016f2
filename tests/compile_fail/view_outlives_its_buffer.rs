use gpu_pool::{Device, DeviceView, Result};

fn make(dev: &Device) -> Result<DeviceView<'_, f32>> {
    let x = dev.zeros::<f32>(4)?;
    Ok(x.slice(..2)) //~ E0515
}

fn main() {
    let _ = make;
}
