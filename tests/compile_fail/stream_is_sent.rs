//# first: Stream` is `DeviceThreadOnly`
//# lines: 30
use gpu_pool::GpuPool;

fn main() {
    let _ = GpuPool::scope(|dev, _| {
        let stream = dev.stream()?;
        std::thread::spawn(move || drop(stream)); //~ E0277: DeviceThreadOnly
        Ok(())
    });
}
