//# first: Device` cannot be returned
//# lines: 20
use gpu_pool::GpuPool;

fn main() {
    let _ = GpuPool::scope(|dev, _| Ok(dev)); //~ E0277: NotDeviceThreadOnly
}
