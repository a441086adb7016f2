use gpu_pool::{AsViewMut, Device, DeviceBuffer, Result};

fn without(dev: &Device, x: &mut DeviceBuffer<f32>) -> Result<()> {
    let mut part = x.slice_mut(..8).view_mut().slice_mut(..4); //~ E0716
    dev.scale(&mut part, 2.0)
}

fn with(dev: &Device, x: &mut DeviceBuffer<f32>) -> Result<()> {
    let mut view = x.slice_mut(..8);
    let mut part = view.view_mut().slice_mut(..4);
    dev.scale(&mut part, 2.0)?;
    dev.scale(&mut x.view_mut().slice_mut(..4), 2.0)
}

fn main() {
    let _ = (without, with);
}
