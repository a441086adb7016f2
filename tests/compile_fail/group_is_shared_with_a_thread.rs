//# first: `Group<'_>` is `DeviceThreadOnly`
//# lines: 30
use gpu_pool::GpuPool;

fn main() {
    let _ = GpuPool::scope(|dev, _| {
        let group = dev.group(&[0])?;
        std::thread::scope(|s| {
            s.spawn(|| group.barrier()); //~ E0277: DeviceThreadOnly
        });
        Ok(())
    });
}
