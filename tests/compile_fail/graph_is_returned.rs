//# first: `Graph` cannot be returned
//# lines: 20
use gpu_pool::GpuPool;

fn main() {
    let _ = GpuPool::scope(|dev, _| Ok(dev.capture(|_| Ok(()))?.0)); //~ E0277: NotDeviceThreadOnly
}
