use gpu_pool::{Device, DeviceBuffer, LaunchDims, Module, Result, kernel};

static MODULE: Module = Module::ptx("");
kernel! { static SAXPY: "saxpy" in MODULE, fn(x: &[f32], y: &mut [f32], a: f32); }

fn wrong_element(dev: &Device, x: &DeviceBuffer<f64>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    unsafe { dev.launch(&SAXPY, LaunchDims::cover(1), (x, y, 1.0f32)) } //~ E0277: cannot be given for the kernel parameter
}

fn shared_for_exclusive(dev: &Device, x: &DeviceBuffer<f32>, y: &DeviceBuffer<f32>) -> Result<()> {
    unsafe { dev.launch(&SAXPY, LaunchDims::cover(1), (x, y, 1.0f32)) } //~ E0277: cannot be given for the kernel parameter
}

fn another_scalar(dev: &Device, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    unsafe { dev.launch(&SAXPY, LaunchDims::cover(1), (x, y, 1.0f64)) } //~ E0277: cannot be given for the kernel parameter
}

fn one_too_few(dev: &Device, x: &DeviceBuffer<f32>, y: &mut DeviceBuffer<f32>) -> Result<()> {
    unsafe { dev.launch(&SAXPY, LaunchDims::cover(1), (x, y)) } //~ E0277: do not fit the kernel's parameters
}

fn peer_is_written(dev: &Device, x: &DeviceBuffer<f32>, y: &DeviceBuffer<f32>) -> Result<()> {
    unsafe { dev.launch(&SAXPY, LaunchDims::cover(1), (x, y.peer(), 1.0f32)) } //~ E0277: cannot be given for the kernel parameter
}

fn main() {
    let _ = (wrong_element, shared_for_exclusive, another_scalar, one_too_few, peer_is_written);
}
