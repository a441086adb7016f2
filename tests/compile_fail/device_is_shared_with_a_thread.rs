//# first: Device` is `DeviceThreadOnly`
//# lines: 30
use gpu_pool::GpuPool;

fn main() {
    let _ = GpuPool::scope(|dev, _| {
        std::thread::scope(|s| {
            s.spawn(|| dev.synchronize()); //~ E0277: DeviceThreadOnly
        });
        Ok(())
    });
}
