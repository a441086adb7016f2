use gpu_pool::{Device, DeviceBuffer, LaunchDims, Module, Result, kernel};

static MODULE: Module = Module::ptx("");
kernel! { static CLEAR: "clear" in MODULE, fn(x: &mut [f32]) |_dims| { x.fill(0.0) } }

fn launch(dev: &Device, x: &mut DeviceBuffer<f32>) -> Result<()> {
    dev.launch(&CLEAR, LaunchDims::cover(1), (x,)) //~ E0133
}

fn unordered(dev: &Device) -> Result<()> {
    dev.unordered().synchronize() //~ E0133
}

fn main() {
    let _ = (launch, unordered);
}
