use gpu_pool::{Device, DeviceBuffer, ReduceOp, Result};

fn strings(dev: &Device) -> Result<DeviceBuffer<String>> { //~ E0277
    dev.upload(&[String::new()]) //~ E0277
}

fn bools(dev: &Device) -> Result<()> {
    dev.zeros::<bool>(4).map(drop) //~ E0277
}

fn reduce(dev: &Device, x: &mut DeviceBuffer<u16>) -> Result<()> {
    dev.all_reduce(x, ReduceOp::Sum) //~ E0277: collectives do not know the type `u16`
}

fn scale(dev: &Device, x: &mut DeviceBuffer<i32>) -> Result<()> {
    dev.scale(x, 2) //~ E0277: the built-in operations do not know the type `i32`
}

fn main() {
    let _ = (strings, bools, reduce, scale);
}
