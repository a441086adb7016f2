//# first: `OnStream<'_>` is `DeviceThreadOnly`
//# lines: 30
use gpu_pool::GpuPool;

fn main() {
    let _ = GpuPool::scope(|dev, _| {
        let stream = dev.stream()?;
        let on = dev.on(&stream);
        std::thread::scope(|s| {
            s.spawn(|| on.name().len()); //~ E0277: DeviceThreadOnly
        });
        Ok(())
    });
}
