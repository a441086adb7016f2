//# first: `Stream` cannot be returned
//# lines: 20
use gpu_pool::GpuPool;

fn main() {
    let _ = GpuPool::scope(|dev, _| dev.stream()); //~ E0277: NotDeviceThreadOnly
}
