use gpu_pool::{Device, DeviceBuffer, LaunchDims, Module, Result, kernel};

static MODULE: Module = Module::ptx("");
kernel! { static STEP: "step" in MODULE, fn(y: &mut [f32]); }

fn moved(dev: &Device, y: &mut DeviceBuffer<f32>) -> Result<()> {
    unsafe { dev.launch(&STEP, LaunchDims::cover(1), (y,))? };
    unsafe { dev.launch(&STEP, LaunchDims::cover(1), (y,)) } //~ E0382
}

fn borrowed(dev: &Device, y: &mut DeviceBuffer<f32>) -> Result<()> {
    unsafe { dev.launch(&STEP, LaunchDims::cover(1), (&mut *y,))? };
    unsafe { dev.launch(&STEP, LaunchDims::cover(1), (&mut *y,)) }
}

fn main() {
    let _ = (moved, borrowed);
}
