use gpu_pool::{Device, DeviceView, DeviceViewMut, Result};

fn write(dev: &Device, mut x: DeviceViewMut<'_, f32>) -> Result<Vec<f32>> {
    let part = x.slice(..4);
    dev.scale(&mut x, 2.0)?; //~ E0502
    dev.download(&part)
}

fn give_away<'a>(x: DeviceViewMut<'a, f32>) -> (DeviceView<'a, f32>, DeviceViewMut<'a, f32>) {
    (x.slice(..4), x) //~
}

fn write_the_part(dev: &Device, x: DeviceViewMut<'_, f32>) -> Result<()> {
    dev.scale(&mut x.slice(..4), 2.0) //~ E0277
}

fn main() {
    let _ = (write, give_away, write_the_part);
}
